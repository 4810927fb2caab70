//! `doctor`: what this host can and cannot do, each finding with its remedy. Changes nothing.
//!
//! What the host has is [`crate::datapath::doctor`]'s to examine. Here is what comes on top: the configuration, the state
//! directory, and what a running agent says of its interfaces.

use std::io::{self, Write as _};

use super::{CliError, DoctorArgs, EXIT_FAILURE, EXIT_OK};
use crate::{
    api::{client::Client, types::InterfaceCoverage},
    config::Config,
    datapath::doctor::{Check, CheckState, examine},
    lease::store::check_state_dir,
};

/// Looks at this host and prints the findings. Fails if the agent would not start, or could not be trusted.
pub async fn doctor(args: &DoctorArgs, client: &Client) -> Result<u8, CliError> {
    let checks = checks(args, client).await;
    let mut out = io::stdout().lock();
    for check in &checks {
        writeln!(out, "{:<4}  {}: {}", word(check.state), check.name, check.finding)?;
        if !check.remedy.is_empty() {
            writeln!(out, "      -> {}", check.remedy)?;
        }
    }
    let bad = checks.iter().any(|check| check.state == CheckState::Fail);
    Ok(if bad { EXIT_FAILURE } else { EXIT_OK })
}

fn word(state: CheckState) -> &'static str {
    match state {
        CheckState::Ok => "ok",
        CheckState::Warn => "weak",
        CheckState::Fail => "BAD",
    }
}

async fn checks(args: &DoctorArgs, client: &Client) -> Vec<Check> {
    const NAME: &str = "configuration";
    let path = args.config.display();
    // Without a usable file the host is examined for an agent of the defaults.
    let defaults = || Config::from_toml("", "").map(|loaded| loaded.config.agent).ok();
    let (agent, configuration) = if args.config.exists() {
        match Config::load(&args.config) {
            Ok(loaded) => (Some(loaded.config.agent), Check::ok(NAME, format!("{path} is in order"))),
            Err(error) => {
                let remedy = format!("correct it; `portcullis check {path}` says whether it is in order");
                (defaults(), Check::fail(NAME, error.to_string(), remedy))
            }
        }
    } else {
        (defaults(), Check::warn(NAME, format!("there is no {path}"), "write one: the agent does not start without"))
    };
    let mut checks = agent.as_ref().map(examine).unwrap_or_default();
    checks.push(configuration);
    checks.extend(agent.map(|agent| state(&agent.state_dir)));
    checks.extend(interfaces(client.coverage().await.ok().map(|coverage| coverage.interfaces).as_deref()));
    checks
}

fn state(directory: &std::path::Path) -> Check {
    const NAME: &str = "state directory";
    match check_state_dir(directory) {
        Ok(()) => Check::ok(NAME, format!("{} is on a disk", directory.display())),
        Err(error) => {
            Check::fail(NAME, error.to_string(), "set `state_dir` to a folder on a disk that outlives a boot")
        }
    }
}

/// What the running agent has attached; nothing is known of it without one.
fn interfaces(covered: Option<&[InterfaceCoverage]>) -> Vec<Check> {
    const NAME: &str = "interface";
    let Some(covered) = covered else {
        let remedy = "start the agent, then ask again";
        return vec![Check::warn(NAME, "no agent answers: what is attached, and how, is not known", remedy)];
    };
    let check = |InterfaceCoverage { name, tc, xdp, note, .. }: &InterfaceCoverage| {
        let note = note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
        let finding = format!("{name}: tc {tc}, XDP {xdp}{note}");
        match (tc.as_str(), xdp.as_str()) {
            ("none", _) => Check::warn(
                NAME,
                finding,
                "what is forwarded here is not judged: name it in `exclude_interfaces` no more, set `attach = \"armed\"`, or \
                 mend what the agent's log says",
            ),
            (_, "generic") => Check::warn(
                NAME,
                format!("{finding}: it costs more per packet than tc alone"),
                "use a driver with native XDP, or set `xdp = \"native\"`",
            ),
            (_, "none") if !note.is_empty() => Check::warn(
                NAME,
                format!("{finding}: tc cuts alone"),
                "remove the other program or update the driver and restart the agent, or set `xdp = \"off\"`",
            ),
            _ => Check::ok(NAME, finding),
        }
    };
    covered.iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(tc: &str, xdp: &str, note: Option<&str>) -> InterfaceCoverage {
        let note = note.map(str::to_owned);
        InterfaceCoverage { name: "eth0".into(), index: 2, tc: tc.into(), xdp: xdp.into(), note }
    }

    #[test]
    fn interfaces_are_told_one_by_one() {
        let cases = [
            (CheckState::Ok, "tcx", "native", None),
            (CheckState::Ok, "clsact", "none", None),
            (CheckState::Warn, "tcx", "generic", None),
            (CheckState::Warn, "tcx", "none", Some("XDP is taken by another program, which stays")),
            (CheckState::Warn, "none", "none", Some("excluded by the configuration")),
        ];
        for (state, tc, xdp, note) in cases {
            let checks = interfaces(Some(&[covered(tc, xdp, note)]));
            let [check] = &checks[..] else { panic!("{checks:?}") };
            assert_eq!((check.state, check.remedy.is_empty()), (state, state == CheckState::Ok), "{check:?}");
            for word in ["eth0", tc, xdp, note.unwrap_or_default()] {
                assert!(check.finding.contains(word), "no {word} in {check:?}");
            }
        }
        assert!(matches!(&interfaces(None)[..], [check] if check.state == CheckState::Warn));
    }

    #[test]
    fn a_directory_that_forgets_is_refused_with_a_remedy() {
        let check = state(std::path::Path::new("/dev/shm"));
        assert!(check.state == CheckState::Fail && !check.remedy.is_empty(), "{check:?}");
        assert_eq!(state(std::path::Path::new("/var/tmp")).state, CheckState::Ok);
    }
}
