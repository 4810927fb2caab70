//! `doctor`: what this host can and cannot do, each finding with its remedy. Changes nothing.

use std::{
    fmt, fs,
    io::{self, Write as _},
    path::Path,
};

use super::{CliError, DoctorArgs, EXIT_FAILURE, EXIT_OK};
use crate::{
    api::{client::Client, types::InterfaceCoverage},
    config::Config,
    datapath::doctor::{Check, CheckState, examine},
    lease::store::check_state_dir,
};

/// What was looked at, as it was found.
#[derive(Clone, Debug)]
struct Facts {
    host: Vec<Check>,
    /// Nothing: the kernel always compiles, or does not say.
    jit: Option<bool>,
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
    let defaults = || Config::from_toml("", "").map(|loaded| loaded.config);
    let (config, configuration) = match args.config.exists().then(|| Config::load(&args.config)) {
        None => (defaults().ok(), Ok(())),
        Some(Ok(loaded)) => (Some(loaded.config), Ok(())),
        Some(Err(error)) => (defaults().ok(), Err(error.to_string())),
    };
    let agent = config.map(|config| config.agent);
    let state_dir = agent.as_ref().map_or(Path::new("/var/lib/portcullis"), |agent| &agent.state_dir);
    Facts {
        host: agent.as_ref().map(|agent| examine(agent, None)).unwrap_or_default(),
        jit: fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").ok().map(|value| value.trim() != "0"),
        configuration,
        state: check_state_dir(state_dir).map_err(|error| error.to_string()),
        interfaces: client.coverage().await.ok().map(|coverage| coverage.interfaces),
    }
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> = facts.host.iter().map(host).collect();
    if facts.jit == Some(false) {
        let remedy = "sysctl -w net.core.bpf_jit_enable=1";
        found.push(finding(Grade::Weak, "kernel programs are interpreted: every packet pays", remedy));
    }
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

fn host(check: &Check) -> Finding {
    let grade = match check.state {
        CheckState::Ok => Grade::Good,
        CheckState::Warn => Grade::Weak,
        CheckState::Fail => Grade::Bad,
    };
    finding(grade, format!("{}: {}", check.name, check.finding), check.remedy.as_str())
}

fn interface(interface: &InterfaceCoverage) -> Finding {
    let what = format!("{}: tc by {}, XDP {}", interface.name, interface.tc, interface.xdp);
    match &interface.note {
        None => finding(Grade::Good, what, ""),
        Some(note) => finding(Grade::Weak, what, note.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(state: CheckState, remedy: &str) -> Check {
        Check { name: "bpf()", state, finding: "as it is".to_owned(), remedy: remedy.to_owned() }
    }

    fn healthy() -> Facts {
        Facts {
            host: vec![check(CheckState::Ok, "")],
            jit: Some(true),
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
            (Grade::Weak, "bpf(): as it is", Facts { host: vec![check(CheckState::Warn, "mend it")], ..healthy() }),
            (Grade::Bad, "bpf(): as it is", Facts { host: vec![check(CheckState::Fail, "mend it")], ..healthy() }),
            (Grade::Weak, "interpreted", Facts { jit: Some(false), ..healthy() }),
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
}
