//! What building and testing need on this machine, and installing it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};

use crate::object::{self, in_path};
use crate::{cargo, succeed};

/// The bpf-linker whose objects are compared bit for bit.
const BPF_LINKER: &str = "0.13.0";
const CARGO_DENY: &str = "0.20.2";
/// The LLVM of the compiler that [`COMPILER`] installs.
const DEBIAN_LLVM: u32 = 22;
/// The versions of LLVM that [`BPF_LINKER`] can be built with.
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;
/// Debian's current compiler with the sources of the standard library; the plain `rustc` of a release is too old.
const COMPILER: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// Programs that come in Debian packages of another name, each with what it is for.
const PROGRAMS: [(&str, &str, &str); 6] = [
    ("c++", "g++", "the fuzzer's runtime is C++"),
    ("ip", "iproute2", "tests make namespaces and links"),
    ("nft", "nftables", "tests have packets translated and compare with a packet filter"),
    ("ethtool", "ethtool", "tests read and set what an interface offloads"),
    ("sysctl", "procps", "tests set the kernel's network parameters in their namespaces"),
    ("systemd-nspawn", "systemd-container", "tests run services under a systemd of their own"),
];

/// Something to be installed.
#[derive(Debug, PartialEq, Eq)]
struct Missing {
    what: String,
    why: &'static str,
    how: Install,
}

#[derive(Debug, PartialEq, Eq)]
enum Install {
    /// Debian packages.
    Packages(Vec<String>),
    /// `cargo install` with these arguments and variables.
    Cargo { arguments: Vec<String>, variables: Vec<(String, String)> },
}

/// What the machine is set up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Building, and every test.
    Everything,
    /// Building, demonstrations and benchmarks.
    Stories,
}

/// Programs that demonstrations and benchmarks call.
const STORY_PROGRAMS: [&str; 2] = ["ip", "nft"];

impl Purpose {
    fn needs(self, program: &str) -> bool {
        match self {
            Purpose::Everything => true,
            Purpose::Stories => STORY_PROGRAMS.contains(&program),
        }
    }
}

/// Installs what is missing, or with `check` only says what that is. All of it is said on standard error: the other output
/// belongs to what the set-up is for.
pub(crate) fn run(purpose: Purpose, check: bool) -> anyhow::Result<ExitCode> {
    let missing = find(purpose)?;
    if missing.is_empty() {
        eprintln!("set-up: nothing is missing");
        return Ok(ExitCode::SUCCESS);
    }
    for Missing { what, why, .. } in &missing {
        eprintln!("set-up: {what} is missing: {why}");
    }
    if check {
        return Ok(ExitCode::FAILURE);
    }
    let packages = packages(&missing);
    if !packages.is_empty() {
        install_packages(&packages)?;
    }
    for Missing { what, how, .. } in &missing {
        match how {
            Install::Packages(_) => {}
            Install::Cargo { arguments, variables } => {
                eprintln!("set-up: building {what}, about a minute or two");
                let mut command = cargo();
                command.arg("install").args(arguments).envs(variables.iter().map(|(name, value)| (name, value)));
                command.stdout(io::stderr());
                succeed(&mut command)?;
            }
        }
    }
    match find(purpose)?.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        left => bail!("still missing after installing: {}", names(left)),
    }
}

fn find(purpose: Purpose) -> anyhow::Result<Vec<Missing>> {
    let mut missing = Vec::new();
    let compiler = object::compiler().map(|(rustc, _)| rustc);
    if compiler.is_none() {
        missing.push(Missing {
            what: "a Rust compiler with the sources of the standard library".to_owned(),
            why: "the kernel programs' target has no ready-made `core`",
            how: Install::Packages(COMPILER.map(str::to_owned).to_vec()),
        });
    }
    let system_compiler = compiler.as_ref().is_none_or(|rustc| rustc.starts_with("/usr"));
    let lints = purpose == Purpose::Everything;
    if lints && system_compiler && !Path::new("/usr/bin/clippy-driver").exists() {
        missing.push(Missing {
            what: "clippy of the same compiler".to_owned(),
            why: "the kernel programs are linted too",
            how: Install::Packages(vec!["rust-web-clippy".to_owned()]),
        });
    }
    if in_path("bpf-linker").is_none() {
        missing.extend(linker(compiler.as_deref())?);
    }
    // Not optimised: that takes minutes, and reading three lock files a second.
    if lints && in_path("cargo-deny").is_none() {
        missing.push(Missing {
            what: "cargo-deny".to_owned(),
            why: "licences and sources of dependencies are checked",
            how: Install::Cargo {
                arguments: ["cargo-deny", "--version", CARGO_DENY, "--locked", "--debug"].map(str::to_owned).to_vec(),
                variables: Vec::new(),
            },
        });
    }
    for (program, package, why) in PROGRAMS.into_iter().filter(|(program, ..)| purpose.needs(program)) {
        // The tests run as root, whose path has this folder; whoever runs the set-up may be another.
        if in_path(program).is_none() && !Path::new("/usr/sbin").join(program).exists() {
            missing.push(Missing { what: program.to_owned(), why, how: Install::Packages(vec![package.to_owned()]) });
        }
    }
    Ok(missing)
}

/// bpf-linker and the LLVM to build it with, which must be that of the compiler whose bitcode it reads.
fn linker(compiler: Option<&Path>) -> anyhow::Result<Vec<Missing>> {
    let llvm = match compiler {
        Some(rustc) => llvm_of(rustc)?,
        None => DEBIAN_LLVM,
    };
    if !LINKER_LLVM.contains(&llvm) {
        bail!(
            "bpf-linker {BPF_LINKER} works with LLVM {} to {}, and the compiler has LLVM {llvm}: choose another nightly",
            LINKER_LLVM.start(),
            LINKER_LLVM.end()
        );
    }
    let prefix = format!("/usr/lib/llvm-{llvm}");
    let mut missing = Vec::new();
    if !PathBuf::from(&prefix).join("lib/libLLVM.so").exists() {
        missing.push(Missing {
            what: format!("LLVM {llvm}"),
            why: "bpf-linker is built with the compiler's LLVM",
            how: Install::Packages(vec![format!("llvm-{llvm}-dev")]),
        });
    }
    let feature = format!("llvm-{llvm}");
    let arguments =
        ["bpf-linker", "--version", BPF_LINKER, "--no-default-features", "--features", &feature, "--locked"];
    missing.push(Missing {
        what: "bpf-linker".to_owned(),
        why: "it makes the kernel object from the compiler's bitcode",
        how: Install::Cargo {
            arguments: arguments.map(str::to_owned).to_vec(),
            variables: vec![(format!("LLVM_SYS_{llvm}1_PREFIX"), prefix.clone()), ("LLVM_PREFIX".to_owned(), prefix)],
        },
    });
    Ok(missing)
}

fn llvm_of(rustc: &Path) -> anyhow::Result<u32> {
    let output = Command::new(rustc).arg("-vV").output().with_context(|| format!("cannot run {}", rustc.display()))?;
    llvm_major(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("{} -vV names no LLVM version", rustc.display()))
}

/// The major version in what `rustc -vV` prints.
fn llvm_major(printed: &str) -> Option<u32> {
    let version = printed.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    version.split('.').next()?.trim().parse().ok()
}

fn packages(missing: &[Missing]) -> Vec<String> {
    let mut packages = Vec::new();
    for one in missing {
        match &one.how {
            Install::Packages(names) => packages.extend(names.iter().cloned()),
            Install::Cargo { .. } => {}
        }
    }
    packages
}

fn install_packages(packages: &[String]) -> anyhow::Result<()> {
    if !is_debian(&fs::read_to_string("/etc/os-release").unwrap_or_default()) {
        bail!("this is not Debian: install what Debian calls {} and run this again", packages.join(" "));
    }
    let commands = format!("apt-get update && apt-get install --no-install-recommends {}", packages.join(" "));
    if !rustix::process::geteuid().is_root() {
        bail!("packages are installed by root: run `{commands}`, then this again");
    }
    eprintln!("set-up: {commands}");
    succeed(Command::new("apt-get").args(["update", "--quiet"]).stdout(io::stderr()))?;
    succeed(
        Command::new("apt-get")
            .args(["install", "--quiet", "--yes", "--no-install-recommends"])
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdout(io::stderr()),
    )
}

/// Whether an os-release file is Debian's or a derivative's.
fn is_debian(os_release: &str) -> bool {
    os_release
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(key, _)| matches!(*key, "ID" | "ID_LIKE"))
        .any(|(_, value)| value.trim_matches('"').split(' ').any(|word| word == "debian"))
}

fn names(missing: &[Missing]) -> String {
    missing.iter().map(|one| one.what.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_llvm_version() {
        assert_eq!(llvm_major("rustc 1.96.0\nrelease: 1.96.0\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(llvm_major("rustc 1.96.0\n"), None);
    }

    #[test]
    fn knows_debian_and_its_derivatives() {
        assert!(is_debian("PRETTY_NAME=\"Debian GNU/Linux 12\"\nID=debian\n"));
        assert!(is_debian("ID=pop\nID_LIKE=\"ubuntu debian\"\n"));
        assert!(!is_debian("ID=fedora\nHOME_URL=\"https://debian\"\n"));
        assert!(!is_debian(""));
    }
}
