//! A bounded run of the fuzzer, with the stable compiler and without cargo-fuzz.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

use crate::counts::Outcome;
use crate::run::{Ended, run as run_limited};
use crate::{cargo, succeed, target};

/// LLVM's coverage instrumentation as libFuzzer reads it. AddressSanitizer would need a nightly compiler, and there is
/// no `unsafe` in what is fuzzed.
const RUSTFLAGS: [&str; 7] = [
    "--cfg=fuzzing",
    "-Ccodegen-units=1",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Builds the fuzzer and runs it for `seconds`. What it learns stays in `ebpf/fuzz/corpus`, the input of a crash in
/// `ebpf/fuzz/artifacts`.
pub(crate) fn run(root: &Path, seconds: u32) -> anyhow::Result<Outcome> {
    let folder = root.join("ebpf/fuzz");
    let (corpus, artifacts) = (folder.join("corpus"), folder.join("artifacts"));
    for path in [&corpus, &artifacts] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    let triple = format!("{ARCH}-unknown-linux-gnu");
    let target = target(root).join("fuzz");
    // A target keeps the instrumentation out of build scripts.
    succeed(
        cargo()
            .current_dir(&folder)
            .args(["build", "--quiet", "--locked", "--release", "--target", &triple, "--target-dir"])
            .arg(&target)
            .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f")),
    )?;
    let log = target.join("verdict.log");
    let create = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut fuzzer = Command::new(target.join(triple).join("release/verdict"));
    fuzzer
        .arg(format!("-max_total_time={seconds}"))
        .args(["-max_len=512", "-timeout=5", "-print_final_stats=1"])
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(&corpus)
        .stderr(create);
    let limit = Duration::from_secs(u64::from(seconds) + 60);
    let ended = run_limited(&mut fuzzer, limit, |line| println!("{line}"))?;
    let printed = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let printed = String::from_utf8_lossy(&printed);
    Ok(match ended {
        Ended::Itself(status) if status.success() => match executed(&printed) {
            Some(inputs) if inputs > 0 => Outcome::Passed(format!("{inputs} inputs in {seconds} s")),
            Some(_) | None => Outcome::Failed(format!("nothing was tried, see {}", log.display())),
        },
        Ended::Itself(status) => {
            println!("{printed}");
            Outcome::Failed(format!(
                "ended with {status}: the input is in {}, give it to the program as its argument to see it again",
                artifacts.display()
            ))
        }
        Ended::TooLong(limit) => Outcome::Failed(format!("hung, killed after {} s", limit.as_secs())),
    })
}

/// How many inputs libFuzzer says it has tried.
fn executed(printed: &str) -> Option<u64> {
    printed.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_how_many_inputs_were_tried() {
        let printed = "Done 5 runs\nstat::number_of_executed_units: 7164708\nstat::average_exec_per_sec:     341176\n";
        assert_eq!(executed(printed), Some(7_164_708));
        assert_eq!(executed("ERROR: no such file\n"), None);
    }
}
