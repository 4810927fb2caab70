//! The kernel, its file systems, and what the agent is allowed to do.

use std::path::Path;

use super::Check;
use crate::{
    config::model::Agent,
    datapath::{host, sys},
};

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

pub(super) fn kernel() -> Check {
    const NAME: &str = "kernel";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let upgrade = "run a newer kernel (Debian: `apt install -t bookworm-backports linux-image-amd64`)";
    match version(&release) {
        Some(version) if version >= (6, 6) => Check::ok(NAME, format!("{release}, with TCX")),
        Some(version) if version >= (5, 18) => {
            Check::warn(NAME, format!("{release} has no TCX (6.6): classifiers are clsact filters"), upgrade)
        }
        Some(version) if version >= (5, 10) => Check::warn(
            NAME,
            format!("{release} has no TCX (6.6): classifiers are clsact filters; and no XDP at an MTU of 9000 (5.18)"),
            upgrade,
        ),
        Some(_) => Check::fail(NAME, format!("{release} is older than 5.10"), upgrade),
        None => Check::warn(NAME, format!("{release} is no version that can be compared"), "compare it with 5.10"),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn btf() -> Check {
    const NAME: &str = "BTF";
    if Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Check::ok(NAME, "the kernel describes its types");
    }
    let remedy = "run a kernel built with CONFIG_DEBUG_INFO_BTF=y";
    Check::warn(NAME, "the kernel does not describe its types: less can be said of what it refuses", remedy)
}

pub(super) fn jit() -> Check {
    const NAME: &str = "JIT";
    // Without the file the kernel always compiles.
    match std::fs::read_to_string("/proc/sys/net/core/bpf_jit_enable") {
        Ok(value) if value.trim() == "0" => Check::warn(
            NAME,
            "kernel programs are interpreted: every packet pays",
            "sysctl -w net.core.bpf_jit_enable=1",
        ),
        Ok(_) | Err(_) => Check::ok(NAME, "kernel programs are compiled"),
    }
}

pub(super) fn bpf_call() -> Check {
    const NAME: &str = "bpf()";
    match sys::tcx_query(1, sys::AttachType::TcxIngress).map_err(|error| error.raw_os_error()) {
        // EINVAL: no TCX, but the call was let through.
        Ok(_) | Err(Some(libc::EINVAL)) => Check::ok(NAME, "the system call is allowed"),
        Err(Some(libc::EPERM | libc::EACCES)) => Check::fail(
            NAME,
            "the system call is refused, by seccomp or for want of a capability",
            "systemd: SystemCallFilter=bpf and AmbientCapabilities; containers: a seccomp profile that allows bpf",
        ),
        Err(Some(libc::ENOSYS)) => {
            Check::fail(NAME, "the kernel has no bpf()", "run a kernel built with CONFIG_BPF_SYSCALL=y")
        }
        Err(code) => Check::fail(
            NAME,
            format!("a query fails: {}", std::io::Error::from_raw_os_error(code.unwrap_or(libc::EIO))),
            "look at the kernel's log",
        ),
    }
}

fn effective_capabilities() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).ok_or(std::io::ErrorKind::InvalidData.into())
}

fn has(mask: u64, capability: u32) -> bool {
    mask & 1 << capability != 0
}

pub(super) fn capabilities() -> Check {
    const NAME: &str = "capabilities";
    let mask = match effective_capabilities() {
        Ok(mask) => mask,
        Err(error) => return Check::warn(NAME, format!("cannot be read: {error}"), "mount /proc"),
    };
    let missing = missing(mask);
    if missing.is_empty() {
        return Check::ok(NAME, "what loading and attaching need is effective");
    }
    let missing = missing.join(" ");
    Check::fail(NAME, format!("{missing} missing"), format!("run as root, or add `AmbientCapabilities={missing}`"))
}

/// What the agent needs and `mask` lacks. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
fn missing(mask: u64) -> Vec<&'static str> {
    let needed = [("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_PERFMON", CAP_PERFMON), ("CAP_BPF", CAP_BPF)];
    let implied = |capability| capability != CAP_NET_ADMIN && has(mask, CAP_SYS_ADMIN);
    let missing = needed.into_iter().filter(|(_, number)| !has(mask, *number) && !implied(*number));
    missing.map(|(name, _)| name).collect()
}

pub(super) fn bpffs(agent: &Agent) -> Check {
    const NAME: &str = "bpffs";
    let existing = agent.bpffs.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let place = agent.bpffs.display();
    match host::is_bpffs(existing) {
        Ok(true) => Check::ok(NAME, format!("{place} is on one")),
        Ok(false) if effective_capabilities().is_ok_and(|mask| has(mask, CAP_SYS_ADMIN)) => {
            Check::ok(NAME, format!("{place} is on none yet; the agent mounts one at its start"))
        }
        Ok(false) => Check::fail(
            NAME,
            format!("{place} is on none, and the agent may not mount one"),
            format!(
                "`mount -t bpf bpf {}` before the agent starts, or give it CAP_SYS_ADMIN",
                host::mount_point(&agent.bpffs).display()
            ),
        ),
        Err(error) => Check::fail(NAME, format!("{place}: {error}"), "set `bpffs` to a folder that root can reach"),
    }
}

pub(super) fn cgroup(agent: &Agent) -> Check {
    const NAME: &str = "cgroup v2";
    let remedy = "`mount -t cgroup2 none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1";
    match (&agent.cgroup_root, host::cgroup_root()) {
        (Some(path), _) if path.is_dir() => Check::ok(NAME, format!("{} is configured", path.display())),
        (Some(path), _) => {
            Check::fail(NAME, format!("`cgroup_root` {} does not exist", path.display()), "correct it, or leave it out")
        }
        (None, Ok(Some(path))) => Check::ok(NAME, format!("mounted at {}", path.display())),
        (None, Ok(None)) => Check::fail(NAME, "not mounted: sockets are not stamped, and there is no backstop", remedy),
        (None, Err(error)) => Check::warn(NAME, format!("cannot be told: {error}"), "mount /proc"),
    }
}

pub(super) fn lockdown() -> Check {
    const NAME: &str = "lockdown";
    // `none [integrity] confidentiality`; without the file the kernel has no lockdown.
    let modes = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    if modes.contains("[confidentiality]") {
        return Check::fail(
            NAME,
            "the kernel is locked down for confidentiality: programs may not read kernel memory",
            "boot with lockdown=integrity",
        );
    }
    Check::ok(NAME, if modes.contains("[integrity]") { "integrity, which does not matter here" } else { "off" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        assert_eq!(version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version("5.10.205+"), Some((5, 10)));
        assert_eq!(version("next"), None);
    }

    #[test]
    fn capabilities_are_bits() {
        assert!(has(1 << 39, CAP_BPF) && !has(1 << 38, CAP_BPF));
        assert_eq!(missing(0), ["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
        assert_eq!(missing(1 << CAP_NET_ADMIN | 1 << CAP_BPF | 1 << CAP_PERFMON), [""; 0]);
        // The older capability is enough for loading, and for nothing of the network.
        assert_eq!(missing(1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN), [""; 0]);
        assert_eq!(missing(1 << CAP_SYS_ADMIN), ["CAP_NET_ADMIN"]);
    }
}
