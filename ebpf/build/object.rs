//! How the kernel object is built: by which compiler, with which flags, and how a committed copy of it is trusted.
//!
//! The agent's build script and `xtask` include this file by path, so it uses nothing but `std`.

use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is to be built.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// The checkout.
    pub(crate) root: &'a Path,
    /// A binary of the crate in `ebpf/`.
    pub(crate) bin: &'a str,
    pub(crate) features: &'a [&'a str],
    /// The processor of the host that loads the object, in Rust's word (`x86_64`).
    pub(crate) arch: &'a str,
    /// The outer target folder. The inner one lies below it, so that debug, release and clippy share one build.
    pub(crate) target: &'a Path,
}

impl Request<'_> {
    /// A folder for each set of features: two builds at once must not take each other's object.
    fn inner_target(&self) -> PathBuf {
        let features = if self.features.is_empty() { "plain".to_owned() } else { self.features.join("-") };
        self.target.join("bpf").join(features)
    }
}

/// Why there is no object.
#[derive(Debug)]
pub(crate) enum Error {
    NoCompiler,
    NoLinker,
    Run { program: PathBuf, source: io::Error },
    Failed { program: PathBuf, stderr: String },
    File { operation: &'static str, path: PathBuf, source: io::Error },
    NoRecord { path: PathBuf },
    Record { path: PathBuf, key: &'static str },
    Stale { path: PathBuf },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoCompiler => f.write_str(
                "no Rust compiler with the sources of the standard library: `rustup toolchain install nightly \
                 --component rust-src`, or on Debian `apt-get install rustc-web cargo-web rust-web-src`",
            ),
            Error::NoLinker => f.write_str("bpf-linker is missing: `cargo xtask setup` installs it"),
            Error::Run { program, source } => write!(f, "cannot run {}: {source}", program.display()),
            Error::Failed { program, stderr } => {
                write!(f, "{} failed, correct what it reports:\n{}", program.display(), stderr.trim_end())
            }
            Error::File { operation, path, source } => write!(f, "cannot {operation} {}: {source}", path.display()),
            Error::NoRecord { path } => {
                write!(
                    f,
                    "there is no committed object, for want of {}: make it with `cargo xtask ebpf --update`",
                    path.display()
                )
            }
            Error::Record { path, key } => {
                write!(f, "{} has no `{key}`: write it with `cargo xtask ebpf --update`", path.display())
            }
            Error::Stale { path } => write!(
                f,
                "{} was built from other sources than these: `cargo xtask setup` installs a compiler for them, \
                 `cargo xtask ebpf --update` builds and records the object anew",
                path.display()
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Run { source, .. } | Error::File { source, .. } => Some(source),
            Error::NoCompiler
            | Error::NoLinker
            | Error::Failed { .. }
            | Error::NoRecord { .. }
            | Error::Record { .. }
            | Error::Stale { .. } => None,
        }
    }
}

/// The programs that decide the object's bits, each by the line it prints of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tools {
    pub(crate) rustc: String,
    pub(crate) linker: String,
    /// `none` where there is no objcopy and the object keeps its DWARF.
    pub(crate) objcopy: String,
}

impl fmt::Display for Tools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.rustc, self.linker, self.objcopy)
    }
}

/// A compiler that can build for a target without a ready-made `core`, with the linker for it.
#[derive(Debug)]
pub(crate) struct Toolchain {
    pub(crate) rustc: PathBuf,
    pub(crate) linker: PathBuf,
    pub(crate) tools: Tools,
    sysroot: PathBuf,
    objcopy: Option<PathBuf>,
}

impl Toolchain {
    pub(crate) fn find() -> Result<Self, Error> {
        let (rustc, sysroot) = compiler().ok_or(Error::NoCompiler)?;
        let linker = in_path("bpf-linker").ok_or(Error::NoLinker)?;
        let objcopy = ["llvm-objcopy-22", "llvm-objcopy"].into_iter().find_map(in_path);
        let tools = Tools {
            rustc: output(Command::new(&rustc).arg("--version"))?,
            linker: output(Command::new(&linker).arg("--version"))?,
            objcopy: match &objcopy {
                Some(program) => objcopy_version(&output(Command::new(program).arg("--version"))?),
                None => "none".to_owned(),
            },
        };
        Ok(Self { rustc, linker, tools, sysroot, objcopy })
    }

    /// A command for the kernel programs' workspace: `cargo`'s `build` or `cargo-clippy`'s `clippy`, both of this
    /// toolchain and not of the one that `PATH` gives.
    pub(crate) fn command(&self, program: &str, subcommand: &str, request: &Request<'_>) -> Command {
        let mut command = Command::new(self.rustc.with_file_name(program));
        // What the outer cargo sets for its own build must not reach the inner one; how to reach a registry may.
        for (name, _) in env::vars_os() {
            if name.to_str().is_none_or(belongs_to_outer_cargo) {
                command.env_remove(&name);
            }
        }
        command
            .current_dir(request.root.join("ebpf"))
            .env("CARGO", self.rustc.with_file_name("cargo"))
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", self.rustflags(request))
            .args([subcommand, "--quiet", "--locked", "--release", "-Zbuild-std=core", "--bin", request.bin])
            .args(["--target", target_triple()])
            .args(["--features", &request.features.join(",")])
            .arg("--target-dir")
            .arg(request.inner_target())
            .stdin(Stdio::null());
        command
    }

    /// Builds the object and writes it to `to`, without its DWARF and with its BTF.
    pub(crate) fn build(&self, request: &Request<'_>, to: &Path) -> Result<(), Error> {
        output(&mut self.command("cargo", "build", request))?;
        let built = request.inner_target().join(target_triple()).join("release").join(request.bin);
        match &self.objcopy {
            Some(program) => output(Command::new(program).arg("--strip-debug").arg(&built).arg(to)).map(drop),
            None => copy(&built, to),
        }
    }

    fn rustflags(&self, request: &Request<'_>) -> String {
        let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
        [
            format!("--cfg=bpf_target_arch=\"{}\"", request.arch),
            // BTF is made from the debug information.
            "-Cdebuginfo=2".to_owned(),
            "-Clink-arg=--btf".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            // In order is for programs that read what they write; here it makes every zeroed struct a call of memset.
            "-Clink-arg=--disable-expand-memcpy-in-order".to_owned(),
            // BTF names source files: without these, the bits would depend on the folder of the checkout.
            remap(request.root, "/portcullis"),
            remap(&cargo_home(), "/cargo"),
            remap(&self.sysroot.join("lib/rustlib/src/rust"), "/rust"),
        ]
        .join("\x1f")
    }
}

/// What is known of the committed object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) tools: Tools,
    /// The processor it was built for. Nothing in the programs depends on it but the byte order.
    pub(crate) arch: String,
    /// [`source_hash`] of what it was built from.
    pub(crate) source: String,
}

impl Record {
    /// Reads the record beside the committed object.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::NoRecord { path: path.to_owned() },
            _ => file("read", path, source),
        })?;
        let value = |key| value_of(&text, key).ok_or(Error::Record { path: path.to_owned(), key });
        Ok(Self {
            tools: Tools { rustc: value("rustc")?, linker: value("linker")?, objcopy: value("objcopy")? },
            arch: value("arch")?,
            source: value("source")?,
        })
    }
}

/// Folder of the committed object `portcullis.o` and its record `portcullis.toml`.
pub(crate) fn prebuilt(root: &Path) -> PathBuf {
    root.join("agent/prebuilt")
}

/// The record of the committed object, if it was built from the present sources and for this byte order.
///
/// An object of other sources is never used: the agent would speak to programs that decide by other rules.
pub(crate) fn trusted_record(root: &Path) -> Result<Record, Error> {
    let path = prebuilt(root).join("portcullis.toml");
    let record = Record::read(&path)?;
    let same_order = (record.arch == "s390x") == cfg!(target_endian = "big");
    if same_order && record.source == source_hash(root)? { Ok(record) } else { Err(Error::Stale { path }) }
}

/// The files and folders that decide the object, relative to the checkout.
pub(crate) const SOURCES: [&str; 5] =
    ["ebpf/Cargo.toml", "ebpf/Cargo.lock", "ebpf/src", "ebpf/common/Cargo.toml", "ebpf/common/src"];

/// 64-bit FNV-1a over names and contents of [`SOURCES`], in hexadecimal.
///
/// It tells an object that was left behind by an edit, not one that was forged: that is what comparing with a
/// build from source is for.
pub(crate) fn source_hash(root: &Path) -> Result<String, Error> {
    let mut files = Vec::new();
    for path in SOURCES {
        collect(&root.join(path), &mut files)?;
    }
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |bytes: &[u8]| {
        // The length keeps a byte from moving between a name and a content unnoticed.
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    for path in files {
        let content = fs::read(&path).map_err(|source| file("read", &path, source))?;
        feed(path.strip_prefix(root).unwrap_or(&path).as_os_str().as_encoded_bytes());
        feed(&content);
    }
    Ok(format!("{hash:016x}"))
}

/// Copies a file and names both in the error.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    fs::copy(from, to).map(drop).map_err(|source| file("copy", from, source))
}

/// Cargo's home, where installed programs lie in `bin`.
pub(crate) fn cargo_home() -> PathBuf {
    env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(".cargo"))
}

fn target_triple() -> &'static str {
    if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" }
}

fn file(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File { operation, path: path.to_owned(), source }
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path).map_err(|source| file("list", path, source))? {
        collect(&entry.map_err(|source| file("list", path, source))?.path(), files)?;
    }
    Ok(())
}

/// Value of a line `key = "value"`: all the TOML that a record needs.
fn value_of(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim().strip_prefix('"')?.strip_suffix('"')?;
        (name.trim() == key).then(|| value.to_owned())
    })
}

/// `llvm-objcopy --version` prints several lines; the one that names the version counts.
fn objcopy_version(printed: &str) -> String {
    let version = printed.lines().map(str::trim).find(|line| line.contains("version")).unwrap_or(printed);
    format!("llvm-objcopy, {version}")
}

fn belongs_to_outer_cargo(name: &str) -> bool {
    let passes = ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR"];
    let outer = [
        "DEBUG",
        "HOST",
        "LD_LIBRARY_PATH",
        "MAKEFLAGS",
        "MFLAGS",
        "NUM_JOBS",
        "OPT_LEVEL",
        "OUT_DIR",
        "PROFILE",
        "RUSTFLAGS",
        "RUSTDOCFLAGS",
        "RUSTUP_TOOLCHAIN",
        "TARGET",
    ];
    outer.contains(&name)
        || name.starts_with("RUSTC")
        || name == "RUSTDOC"
        || name.starts_with("CARGO") && !passes.iter().any(|prefix| name.starts_with(prefix))
}

/// Rustup's nightly if it has the sources of the standard library, else the system's compiler if it has them; with
/// its sysroot.
pub(crate) fn compiler() -> Option<(PathBuf, PathBuf)> {
    [rustup_nightly(), Some(PathBuf::from("/usr/bin/rustc"))]
        .into_iter()
        .flatten()
        .find_map(|rustc| sysroot_with_sources(&rustc).map(|sysroot| (rustc, sysroot)))
}

fn rustup_nightly() -> Option<PathBuf> {
    // The path of the real compiler: the proxy of that name would obey RUSTUP_TOOLCHAIN. Asking must not install it.
    let mut rustup = Command::new("rustup");
    rustup.args(["which", "--toolchain", "nightly", "rustc"]).env("RUSTUP_AUTO_INSTALL", "0");
    output(&mut rustup).ok().map(PathBuf::from)
}

fn sysroot_with_sources(rustc: &Path) -> Option<PathBuf> {
    let sysroot = PathBuf::from(output(Command::new(rustc).args(["--print", "sysroot"])).ok()?);
    sysroot.join("lib/rustlib/src/rust/library/Cargo.lock").exists().then_some(sysroot)
}

/// A program in `PATH`, or among what cargo has installed.
pub(crate) fn in_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).chain([cargo_home().join("bin")]).map(|folder| folder.join(name)).find(|p| p.is_file())
}

/// Runs a program to its end and returns what it printed, without the white space around it.
fn output(command: &mut Command) -> Result<String, Error> {
    let program = PathBuf::from(command.get_program());
    let done = match command.output() {
        Ok(done) => done,
        Err(source) => return Err(Error::Run { program, source }),
    };
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        return Err(Error::Failed { program, stderr });
    }
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkout of nothing but what decides the object.
    fn checkout() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temporary folder");
        for folder in ["ebpf/src", "ebpf/common/src", "agent/prebuilt"] {
            fs::create_dir_all(root.path().join(folder)).expect("folder");
        }
        for file in ["ebpf/Cargo.toml", "ebpf/Cargo.lock", "ebpf/common/Cargo.toml", "ebpf/src/main.rs"] {
            fs::write(root.path().join(file), file).expect("file");
        }
        root
    }

    fn record(root: &Path, arch: &str, source: &str) {
        let text = format!(
            "# comment\nrustc = \"r = 1\"\nlinker = \"l\"\nobjcopy = \"o\"\narch = \"{arch}\"\nsource = \"{source}\"\n"
        );
        fs::write(prebuilt(root).join("portcullis.toml"), text).expect("record");
    }

    #[test]
    fn trusts_an_object_of_these_sources_only() {
        let root = checkout();
        let root = root.path();
        assert!(matches!(trusted_record(root), Err(Error::NoRecord { .. })));
        record(root, "x86_64", &source_hash(root).expect("hash"));
        let tools = Tools { rustc: "r = 1".to_owned(), linker: "l".to_owned(), objcopy: "o".to_owned() };
        assert_eq!(trusted_record(root).expect("trusted").tools, tools);
        for (path, content) in [("ebpf/src/main.rs", "changed"), ("ebpf/common/src/new.rs", "")] {
            let path = root.join(path);
            let before = fs::read(&path).ok();
            fs::write(&path, content).expect("file");
            assert!(matches!(trusted_record(root), Err(Error::Stale { .. })), "{}", path.display());
            match before {
                Some(before) => fs::write(&path, before).expect("file"),
                None => fs::remove_file(&path).expect("file"),
            }
        }
        trusted_record(root).expect("trusted again");
        record(root, "s390x", &source_hash(root).expect("hash"));
        assert!(matches!(trusted_record(root), Err(Error::Stale { .. })), "another byte order");
        fs::write(prebuilt(root).join("portcullis.toml"), "rustc = \"r\"\n").expect("record");
        assert!(matches!(trusted_record(root), Err(Error::Record { key: "linker", .. })));
    }

    #[test]
    fn inner_cargo_inherits_how_to_reach_a_registry_and_nothing_else() {
        for name in ["CARGO", "CARGO_MANIFEST_DIR", "CARGO_BUILD_TARGET", "RUSTC_WRAPPER", "RUSTUP_TOOLCHAIN", "TARGET"]
        {
            assert!(belongs_to_outer_cargo(name), "{name}");
        }
        for name in ["CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_HTTP_PROXY", "PATH", "HOME", "SSL_CERT_FILE"] {
            assert!(!belongs_to_outer_cargo(name), "{name}");
        }
    }

    #[test]
    fn objcopy_is_known_by_the_line_with_its_version() {
        let printed = "llvm-objcopy, compatible with GNU objcopy\nDebian LLVM version 22.1.8\n  Optimized build.";
        assert_eq!(objcopy_version(printed), "llvm-objcopy, Debian LLVM version 22.1.8");
    }
}
