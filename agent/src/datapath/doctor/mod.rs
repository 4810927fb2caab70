//! What this host has and lacks, check by check, each with its remedy.

pub mod clock;
mod host;
pub mod queues;

use crate::config::model::Agent;

/// One check's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub name: &'static str,
    pub state: CheckState,
    /// What was found, a sentence.
    pub finding: String,
    /// What to do about it; empty if nothing.
    pub remedy: String,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckState {
    Ok,
    /// The guarantee holds with the restriction that the finding names.
    Warn,
    /// The agent does not start, or its guarantee does not hold.
    Fail,
}

impl Check {
    pub fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, state: CheckState::Ok, finding: finding.into(), remedy: String::new() }
    }

    pub fn warn(name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, state: CheckState::Warn, finding: finding.into(), remedy: remedy.into() }
    }

    pub fn fail(name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, state: CheckState::Fail, finding: finding.into(), remedy: remedy.into() }
    }
}

/// Runs every check of the host, for an agent of these settings. What is attached is for a running agent to say.
pub fn examine(agent: &Agent) -> Vec<Check> {
    let mut checks = vec![
        host::kernel(),
        host::btf(),
        host::jit(),
        host::bpf_call(),
        host::capabilities(),
        host::bpffs(agent),
        host::cgroup(agent),
        host::lockdown(),
        clock::namespace(),
        clock::slew(agent),
        clock::drift_bound(agent),
    ];
    checks.extend(queues::checks());
    checks
}
