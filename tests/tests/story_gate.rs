//! The demonstration `gate` as a program sees it: one object on standard output, and nothing else.

use std::process::{Command, Stdio};

use portcullis_tests::world;
use serde_json::Value;

#[test]
fn json_is_one_report_in_which_every_check_holds() {
    let output = Command::new(world::binary("story-gate"))
        .arg("--json")
        .env("PORTCULLIS_BIN", world::binary("portcullis"))
        .stderr(Stdio::inherit())
        .output()
        .expect("the story can be run");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("no single JSON value ({e}): {text}"));

    let keys = |value: &Value| -> Vec<String> { value.as_object().expect("an object").keys().cloned().collect() };
    assert_eq!(keys(&report), ["checks", "passed", "story"]);
    assert_eq!(report["story"], "gate");
    let checks = report["checks"].as_array().expect("a list");
    for check in checks {
        assert_eq!(keys(check), ["limit", "name", "ok", "unit", "value"]);
        assert_eq!(check["ok"], true, "{check}");
    }
    assert_eq!(report["passed"], true);
    assert!(output.status.success(), "{}", output.status);

    let after = |act: &str, client: &str| {
        let name = format!("{act}, {client}: seen, sent after the deadline");
        checks.iter().find(|check| check["name"] == *name).map(|check| check["value"].as_f64())
    };
    for act in ["holder stopped", "agent killed"] {
        for client in ["TCP IPv4", "TCP IPv6", "UDP IPv4", "UDP IPv6"] {
            assert_eq!(after(act, client), Some(Some(0.0)), "{act}, {client}");
        }
    }
}
