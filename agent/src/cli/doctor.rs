//! `doctor`: what this host can and cannot do, each finding with its remedy. Changes nothing.

use std::{
    fmt, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use super::{CliError, DoctorArgs, EXIT_FAILURE, EXIT_OK};
use crate::{
    api::{client::Client, types::InterfaceCoverage},
    clock,
    config::Config,
    lease::store::check_state_dir,
};

const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
const CGROUP2_MAGIC: u64 = 0x6367_7270;
/// Number and name of what the agent cannot do without.
const CAPABILITIES: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// What was looked at, as it was found.
#[derive(Clone, Debug)]
struct Facts {
    /// Major and minor version.
    kernel: (u32, u32),
    btf: bool,
    /// Nothing: the kernel always compiles, or does not say.
    jit: Option<bool>,
    /// The effective set, a bit per capability.
    capabilities: u64,
    bpffs: bool,
    cgroup2: bool,
    /// Offset of CLOCK_BOOTTIME in this time namespace, in seconds and nanoseconds.
    boottime_offset: (i64, i64),
    slew_ppm: u64,
    drift_ppm: u32,
    /// Why the configuration cannot be used; a missing file is no reason.
    configuration: Result<(), String>,
    state: Result<(), String>,
    /// From a running agent.
    interfaces: Option<Vec<InterfaceCoverage>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grade {
    Good,
    /// The agent runs, with less than it could have.
    Weak,
    /// The agent does not run, or cannot be trusted.
    Bad,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "ok",
            Self::Weak => "weak",
            Self::Bad => "BAD",
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Finding {
    grade: Grade,
    what: String,
    /// Empty where nothing is to be done.
    remedy: String,
}

fn finding(grade: Grade, what: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { grade, what: what.into(), remedy: remedy.into() }
}

/// Looks at this host and prints the findings.
pub async fn doctor(args: &DoctorArgs, client: &Client) -> Result<u8, CliError> {
    let findings = findings(&look(args, client).await);
    let mut out = io::stdout().lock();
    for finding in &findings {
        writeln!(out, "{:<4}  {}", finding.grade, finding.what)?;
        if !finding.remedy.is_empty() {
            writeln!(out, "      -> {}", finding.remedy)?;
        }
    }
    let bad = findings.iter().any(|finding| finding.grade == Grade::Bad);
    Ok(if bad { EXIT_FAILURE } else { EXIT_OK })
}

async fn look(args: &DoctorArgs, client: &Client) -> Facts {
    let text =
        if args.config.exists() { Config::load(&args.config) } else { Config::from_toml("", "").map_err(Into::into) };
    let (config, configuration) = match text {
        Ok(loaded) => (Some(loaded.config), Ok(())),
        Err(error) => (None, Err(error.to_string())),
    };
    let agent = config.map(|config| config.agent);
    let state_dir = agent.as_ref().map_or(Path::new("/var/lib/portcullis"), |agent| &agent.state_dir);
    let bpffs = agent.as_ref().map_or(Path::new("/sys/fs/bpf"), |agent| &agent.bpffs);
    let cgroup_root = agent.as_ref().and_then(|agent| agent.cgroup_root.clone());
    let cgroup_root =
        cgroup_root.or_else(|| cgroup2_mount(&fs::read_to_string("/proc/self/mounts").unwrap_or_default()));
    Facts {
        kernel: kernel_version(&rustix::system::uname().release().to_string_lossy()),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        jit: fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").ok().map(|value| value.trim() != "0"),
        capabilities: effective_capabilities(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
        bpffs: bpffs.ancestors().any(|path| is_on(path, BPF_FS_MAGIC)),
        cgroup2: cgroup_root.is_some_and(|root| is_on(&root, CGROUP2_MAGIC)),
        boottime_offset: boottime_offset(&fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default()),
        slew_ppm: clock::slew_ppm().unwrap_or(0),
        drift_ppm: agent.as_ref().map_or(100_000, |agent| agent.drift_ppm),
        configuration,
        state: check_state_dir(state_dir).map_err(|error| error.to_string()),
        interfaces: client.coverage().await.ok().map(|coverage| coverage.interfaces),
    }
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = vec![kernel(facts.kernel)];
    found.push(match facts.btf {
        true => finding(Grade::Good, "the kernel has BTF", ""),
        false => finding(Grade::Weak, "the kernel has no BTF", "run a kernel built with CONFIG_DEBUG_INFO_BTF"),
    });
    if facts.jit == Some(false) {
        let remedy = "sysctl -w net.core.bpf_jit_enable=1";
        found.push(finding(Grade::Weak, "kernel programs are interpreted: every packet pays", remedy));
    }
    let missing: Vec<&str> =
        CAPABILITIES.iter().filter(|(bit, _)| facts.capabilities >> bit & 1 == 0).map(|(_, name)| *name).collect();
    found.push(match missing.as_slice() {
        [] => finding(Grade::Good, "capabilities", ""),
        missing => finding(Grade::Bad, format!("capabilities are missing: {}", missing.join(", ")), "run as root"),
    });
    found.push(match facts.bpffs {
        true => finding(Grade::Good, "a BPF file system is mounted", ""),
        false => finding(
            Grade::Weak,
            "no BPF file system is mounted: the agent mounts one if it may",
            "mount -t bpf bpf /sys/fs/bpf",
        ),
    });
    found.push(match facts.cgroup2 {
        true => finding(Grade::Good, "cgroup v2", ""),
        false => finding(
            Grade::Bad,
            "no cgroup v2 root: no socket can be stamped with its opening, and there is no backstop",
            "mount one (systemd does with systemd.unified_cgroup_hierarchy=1), or set `cgroup_root` in [agent]",
        ),
    });
    found.push(match facts.boottime_offset {
        (0, 0) => finding(Grade::Good, "the boot clock is the kernel's own", ""),
        (seconds, nanos) => finding(
            Grade::Bad,
            format!("this time namespace moves the boot clock by {seconds}.{nanos:09} s: deadlines would be wrong"),
            "run the agent outside the time namespace",
        ),
    });
    found.push(slew(facts.slew_ppm, facts.drift_ppm));
    found.push(match &facts.configuration {
        Ok(()) => finding(Grade::Good, "the configuration", ""),
        Err(error) => finding(Grade::Bad, error.as_str(), "`portcullis check` says more"),
    });
    found.push(match &facts.state {
        Ok(()) => finding(Grade::Good, "the state directory is on a disk", ""),
        Err(error) => finding(Grade::Bad, error.as_str(), ""),
    });
    match &facts.interfaces {
        None => found.push(finding(
            Grade::Weak,
            "no agent answers: what is attached to the interfaces is not known",
            "start the agent, then ask again",
        )),
        Some(interfaces) => found.extend(interfaces.iter().map(interface)),
    }
    found
}

fn kernel(version: (u32, u32)) -> Finding {
    let (major, minor) = version;
    let name = format!("kernel {major}.{minor}");
    match version {
        (6, 6..) | (7.., _) => finding(Grade::Good, format!("{name}: TCX, first in order"), ""),
        (5, 18..) | (6, _) => finding(
            Grade::Weak,
            format!("{name}: no TCX; clsact is used, and its order is not ours"),
            "run 6.6 or newer",
        ),
        _ => finding(
            Grade::Weak,
            format!("{name}: no TCX, and no native XDP at an MTU of 9000"),
            "run 5.18 or newer for XDP, 6.6 or newer for TCX",
        ),
    }
}

fn slew(slew_ppm: u64, drift_ppm: u32) -> Finding {
    let what = format!("the boot clock is slewed by {slew_ppm} ppm; the configured bound is {drift_ppm} ppm");
    match slew_ppm <= u64::from(drift_ppm) {
        true => finding(Grade::Good, what, ""),
        false => finding(
            Grade::Bad,
            what,
            "limit the time daemon (chrony: maxslewrate below the bound), or raise `drift` in [agent]",
        ),
    }
}

fn interface(interface: &InterfaceCoverage) -> Finding {
    let what = format!("{}: tc by {}, XDP {}", interface.name, interface.tc, interface.xdp);
    match &interface.note {
        None => finding(Grade::Good, what, ""),
        Some(note) => finding(Grade::Weak, what, note.as_str()),
    }
}

fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// `CapEff` of `/proc/self/status`; nothing readable is nothing allowed.
fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// The `boottime` line of `/proc/self/timens_offsets`; a kernel without time namespaces has no such file.
fn boottime_offset(offsets: &str) -> (i64, i64) {
    let line = offsets.lines().find_map(|line| line.strip_prefix("boottime"));
    let mut numbers = line.unwrap_or_default().split_whitespace().map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Where the first cgroup v2 hierarchy is mounted.
fn cgroup2_mount(mounts: &str) -> Option<PathBuf> {
    let fields = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let place = fields.next()?.to_owned();
        (fields.next()? == "cgroup2").then(|| PathBuf::from(place))
    };
    mounts.lines().find_map(fields)
}

fn is_on(path: &Path, magic: u64) -> bool {
    // The field's type differs between architectures; every magic number has 32 bits.
    #[allow(clippy::unnecessary_cast)]
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type as u64 & 0xffff_ffff == magic)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Facts {
        Facts {
            kernel: (6, 12),
            btf: true,
            jit: Some(true),
            capabilities: u64::MAX,
            bpffs: true,
            cgroup2: true,
            boottime_offset: (0, 0),
            slew_ppm: 12,
            drift_ppm: 100_000,
            configuration: Ok(()),
            state: Ok(()),
            interfaces: Some(vec![]),
        }
    }

    #[test]
    fn a_healthy_host_needs_no_remedy() {
        assert!(findings(&healthy()).iter().all(|finding| finding.grade == Grade::Good && finding.remedy.is_empty()));
    }

    #[test]
    fn each_ailment_is_found_alone_and_has_a_remedy() {
        let note = Some("load the driver with XDP".to_owned());
        let interface = InterfaceCoverage { name: "eth0".into(), index: 2, tc: "tcx".into(), xdp: "none".into(), note };
        let ailing = [
            (Grade::Weak, "no TCX", Facts { kernel: (6, 1), ..healthy() }),
            (Grade::Weak, "MTU of 9000", Facts { kernel: (5, 15), ..healthy() }),
            (Grade::Weak, "no BTF", Facts { btf: false, ..healthy() }),
            (Grade::Weak, "interpreted", Facts { jit: Some(false), ..healthy() }),
            (Grade::Bad, "missing: CAP_BPF", Facts { capabilities: !(1 << 39), ..healthy() }),
            (Grade::Weak, "no BPF file system", Facts { bpffs: false, ..healthy() }),
            (Grade::Bad, "no cgroup v2", Facts { cgroup2: false, ..healthy() }),
            (Grade::Bad, "time namespace", Facts { boottime_offset: (-5, 0), ..healthy() }),
            (Grade::Bad, "100001 ppm", Facts { slew_ppm: 100_001, ..healthy() }),
            (Grade::Bad, "line 3", Facts { configuration: Err("line 3: no".into()), ..healthy() }),
            (Grade::Bad, "tmpfs", Facts { state: Err("on tmpfs: move it".into()), ..healthy() }),
            (Grade::Weak, "no agent", Facts { interfaces: None, ..healthy() }),
            (Grade::Weak, "eth0", Facts { interfaces: Some(vec![interface]), ..healthy() }),
        ];
        for (grade, says, facts) in ailing {
            let found: Vec<Finding> =
                findings(&facts).into_iter().filter(|finding| finding.grade != Grade::Good).collect();
            let [only] = found.as_slice() else { panic!("{says}: {found:?}") };
            assert!(only.grade == grade && only.what.contains(says), "{only:?}");
            assert!(!only.remedy.is_empty() || only.what.contains("move it"), "{only:?}");
        }
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        assert_eq!(kernel_version("6.1.0-18-amd64"), (6, 1));
        assert_eq!(kernel_version("6.18.44"), (6, 18));
        assert_eq!(effective_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), 0x1ff_ffff_ffff);
        assert_eq!(effective_capabilities(""), 0);
        assert_eq!(boottime_offset("monotonic           0         0\nboottime         -300         7\n"), (-300, 7));
        assert_eq!(boottime_offset(""), (0, 0));
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup2_mount(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(cgroup2_mount("tmpfs /tmp tmpfs rw 0 0"), None);
    }
}
