//! The test tiers, in the order of what they cost, and their sum.

use std::env::consts::ARCH;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::ValueEnum;

use crate::counts::{Counts, Outcome};
use crate::object::{Error, Toolchain};
use crate::run::{self, Ended};
use crate::{cargo, ebpf, fuzz, setup, succeed, target};

/// A test that cannot run here appends a line, its name and why, to the file that this variable names.
const SKIPS: &str = "PORTCULLIS_SKIPS";
/// The agent that the tests run.
const AGENT: &str = "PORTCULLIS_BIN";
/// Set to 1 for tests that take longer the more they try.
const LONG: &str = "PORTCULLIS_LONG";
/// Arguments of cargo for the program that knows what tests may leave behind.
const RESIDUE: [&str; 7] = ["run", "--quiet", "--locked", "-p", "portcullis-tests", "--bin", "residue"];

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only this tier; may be repeated
    #[arg(long = "tier", value_name = "NAME")]
    tiers: Vec<Tier>,
    /// Try longer: more fuzzing, more rounds of what is random
    #[arg(long)]
    long: bool,
    /// Only tests whose name contains this, and only tiers that consist of such tests
    #[arg(last = true)]
    filter: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tier {
    /// Format, clippy on the host and on the kernel programs
    Lint,
    /// Tests that need nothing but a processor
    Pure,
    /// The committed kernel object against its source
    Object,
    /// Tests that load programs into the kernel of this machine, in namespaces of their own
    Kernel,
    /// Random packets against the parser and the verdict
    Fuzz,
    /// Licences, sources and advisories of the dependencies
    Deny,
    /// Whether the tests left anything behind
    Residue,
}

impl Tier {
    /// What one command of the tier may take, a cold build on a slow machine included.
    fn limit(self, long: bool) -> Duration {
        let minutes = match self {
            Tier::Lint | Tier::Pure => 20,
            Tier::Object | Tier::Fuzz | Tier::Residue => 10,
            Tier::Deny => 5,
            Tier::Kernel if long => 120,
            Tier::Kernel => 30,
        };
        Duration::from_secs(minutes * 60)
    }

    /// Whether it consists of tests that have names to filter by.
    fn has_named_tests(self) -> bool {
        match self {
            Tier::Pure | Tier::Kernel => true,
            Tier::Lint | Tier::Object | Tier::Fuzz | Tier::Deny | Tier::Residue => false,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Lint => "lint",
            Tier::Pure => "pure",
            Tier::Object => "object",
            Tier::Kernel => "kernel",
            Tier::Fuzz => "fuzz",
            Tier::Deny => "deny",
            Tier::Residue => "residue",
        })
    }
}

/// Sets the machine up, runs the tiers and prints their sum as the last line.
pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    setup::run(setup::Purpose::Everything, false)?;
    let started = Instant::now();
    let mut session =
        Session { root, target: target(root), options, tier: Tier::Lint, snapshot: None, failures: Vec::new() };
    let mut sum = Counts::default();
    for &tier in Tier::value_variants() {
        let asked_for = options.tiers.is_empty() || options.tiers.contains(&tier);
        if asked_for && (options.filter.is_none() || tier.has_named_tests()) {
            println!("\n== {tier}");
            let started = Instant::now();
            session.tier = tier;
            // What does not build must not keep the other tiers from being run, nor the sum from being printed.
            let counts = match session.run() {
                Ok(counts) => counts,
                Err(error) => session.count("run", &Outcome::Failed(format!("{error:#}"))),
            };
            println!("== {tier}: {counts} in {:.1} s", started.elapsed().as_secs_f32());
            sum += counts;
        }
    }
    println!();
    for failure in &session.failures {
        println!("failed: {failure}");
    }
    println!("all tiers took {:.0} s", started.elapsed().as_secs_f32());
    println!("{sum}");
    // A filter that no test matches, or a tier without tests, has shown nothing.
    Ok(if sum.failed == 0 && sum.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Session<'a> {
    root: &'a Path,
    target: PathBuf,
    options: &'a Options,
    tier: Tier,
    /// What stood on the machine before the kernel tier.
    snapshot: Option<PathBuf>,
    /// Names of what failed, for the end of the output.
    failures: Vec<String>,
}

impl Session<'_> {
    fn run(&mut self) -> anyhow::Result<Counts> {
        match self.tier {
            Tier::Lint => self.lint(),
            Tier::Pure => self.pure(),
            Tier::Object => ebpf::check(self.root).map(|outcome| self.count("committed object", &outcome)),
            Tier::Kernel => self.kernel(),
            Tier::Fuzz => {
                let seconds = if self.options.long { 600 } else { 20 };
                fuzz::run(self.root, seconds).map(|outcome| self.count("fuzz", &outcome))
            }
            Tier::Deny => self.deny(),
            Tier::Residue => self.residue(),
        }
    }

    fn lint(&mut self) -> anyhow::Result<Counts> {
        let mut counts = self.check("format", self.cargo(["fmt", "--all", "--check"]))?;
        for (label, manifest) in [("format of ebpf", "ebpf/Cargo.toml"), ("format of fuzz", "ebpf/fuzz/Cargo.toml")] {
            counts += self.check(label, self.cargo(["fmt", "--all", "--check", "--manifest-path", manifest]))?;
        }
        let deny_warnings = ["--", "-D", "warnings"];
        let mut clippy = self.cargo(["clippy", "--workspace", "--all-targets", "--locked"]);
        clippy.args(deny_warnings);
        counts += self.check("clippy", clippy)?;
        let mut clippy = self.common("clippy");
        clippy.arg("--all-targets").args(deny_warnings);
        counts += self.check("clippy of common", clippy)?;
        counts += self.lint_kernel_programs()?;
        Ok(counts)
    }

    /// Clippy of the toolchain that compiles the kernel programs: only that one has a `core` to build for them.
    fn lint_kernel_programs(&mut self) -> anyhow::Result<Counts> {
        let label = "clippy of the kernel programs";
        let toolchain = match Toolchain::find() {
            Ok(toolchain) => toolchain,
            Err(error @ (Error::NoCompiler | Error::NoLinker)) => {
                return Ok(self.count(label, &Outcome::Skipped(error.to_string())));
            }
            Err(error) => return Err(error.into()),
        };
        if !toolchain.rustc.with_file_name("cargo-clippy").exists() {
            let reason = format!("no clippy beside {}", toolchain.rustc.display());
            return Ok(self.count(label, &Outcome::Skipped(reason)));
        }
        let mut clippy = toolchain.command("cargo-clippy", "clippy", &ebpf::request(self.root, &self.target));
        clippy.args(["--", "-D", "warnings"]);
        self.check(label, clippy)
    }

    fn pure(&mut self) -> anyhow::Result<Counts> {
        let mut counts =
            self.tests(self.cargo(["test", "--workspace", "--lib", "--bins", "--locked", "--no-fail-fast"]))?;
        counts += self.tests(self.cargo(["test", "-p", "portcullis", "--test", "*", "--locked", "--no-fail-fast"]))?;
        counts += self.tests(self.cargo(["test", "--workspace", "--doc", "--locked", "--no-fail-fast"]))?;
        let mut common = self.common("test");
        common.arg("--no-fail-fast");
        counts += self.tests(common)?;
        Ok(counts)
    }

    fn kernel(&mut self) -> anyhow::Result<Counts> {
        if let Some(counts) = self.skipped_without_root() {
            return Ok(counts);
        }
        self.take_snapshot()?;
        // With its kill points: without the variable that names one, the agent passes them by.
        succeed(&mut self.cargo(["build", "-p", "portcullis", "--features", "crash-points", "--locked"]))?;
        let mut tests = self.cargo(["test", "-p", "portcullis-tests", "--test", "*", "--locked", "--no-fail-fast"]);
        tests.args(["--features", "crash-points"]);
        tests.env(AGENT, self.target.join("debug/portcullis"));
        self.tests(tests)
    }

    /// Remembers what stood on the machine before the tests of the kernel, which is not theirs.
    fn take_snapshot(&mut self) -> anyhow::Result<()> {
        let mut command = self.cargo(RESIDUE);
        let output =
            command.args(["--", "snapshot"]).stderr(Stdio::inherit()).output().context("cannot run residue")?;
        if !output.status.success() {
            bail!("residue snapshot ended with {}: see its messages above", output.status);
        }
        let path = self.target.join("residue-snapshot");
        fs::write(&path, output.stdout).with_context(|| format!("cannot write {}", path.display()))?;
        self.snapshot = Some(path);
        Ok(())
    }

    fn residue(&mut self) -> anyhow::Result<Counts> {
        if let Some(counts) = self.skipped_without_root() {
            return Ok(counts);
        }
        let mut command = self.cargo(RESIDUE);
        command.args(["--", "check"]).args(&self.snapshot);
        self.check("residue", command)
    }

    fn skipped_without_root(&mut self) -> Option<Counts> {
        let reason = "loading programs and looking into namespaces needs root: run this as root";
        (!rustix::process::geteuid().is_root()).then(|| self.count("root", &Outcome::Skipped(reason.to_owned())))
    }

    fn deny(&mut self) -> anyhow::Result<Counts> {
        let mut counts = Counts::default();
        for manifest in ["Cargo.toml", "ebpf/Cargo.toml", "ebpf/fuzz/Cargo.toml"] {
            let deny = |checks: &[&str]| {
                let mut command = self.cargo(["deny", "--locked", "--manifest-path", manifest, "--config"]);
                command.arg(self.root.join("deny.toml")).args(["check", "--hide-inclusion-graph"]).args(checks);
                command
            };
            let (static_checks, mut advisories) = (deny(&["bans", "licenses", "sources"]), deny(&["advisories"]));
            counts += self.check(&format!("deny {manifest}"), static_checks)?;
            let output = advisories.output().context("cannot run cargo deny")?;
            let outcome = advisories_outcome(output.status.success(), &String::from_utf8_lossy(&output.stderr));
            counts += self.count(&format!("advisories {manifest}"), &outcome);
        }
        Ok(counts)
    }

    fn cargo<const N: usize>(&self, arguments: [&str; N]) -> Command {
        let mut command = cargo();
        command.current_dir(self.root).args(arguments);
        command
    }

    /// A cargo for the host build of what kernel and user space share.
    fn common(&self, subcommand: &str) -> Command {
        let triple = format!("{ARCH}-unknown-linux-gnu");
        let mut command =
            self.cargo([subcommand, "--manifest-path", "ebpf/Cargo.toml", "-p", "portcullis-common", "--locked"]);
        command.args(["--target", &triple, "--target-dir"]).arg(self.target.join("common"));
        command
    }

    /// Runs a command that is one check.
    fn check(&mut self, label: &str, mut command: Command) -> anyhow::Result<Counts> {
        let outcome = match run::run(&mut command, self.limit(), |line| println!("{line}"))? {
            Ended::Itself(status) if status.success() => Outcome::Passed("clean".to_owned()),
            Ended::Itself(status) => Outcome::Failed(status.to_string()),
            Ended::TooLong(limit) => Outcome::Failed(format!("killed after {} s", limit.as_secs())),
        };
        Ok(self.count(label, &outcome))
    }

    fn count(&mut self, label: &str, outcome: &Outcome) -> Counts {
        outcome.print(label);
        match outcome {
            Outcome::Passed(_) | Outcome::Skipped(_) => {}
            Outcome::Failed(reason) => self.failures.push(format!("{}: {label}: {reason}", self.tier)),
        }
        Counts::from(outcome)
    }

    /// Runs a `cargo test` and counts its tests.
    fn tests(&mut self, mut command: Command) -> anyhow::Result<Counts> {
        let skips = self.target.join("skipped-tests");
        fs::write(&skips, "").with_context(|| format!("cannot write {}", skips.display()))?;
        command.env(SKIPS, &skips);
        if self.options.long {
            command.env(LONG, "1");
        }
        if let Some(filter) = &self.options.filter {
            command.args(["--", filter]);
        }
        let mut counts = Counts::default();
        let (tier, failures) = (self.tier, &mut self.failures);
        let ended = run::run(&mut command, tier.limit(self.options.long), |line| {
            println!("{line}");
            if let Some(program) = Counts::of_line(line) {
                counts += program;
            } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
                failures.push(format!("{tier}: {name}"));
            }
        })?;
        let skipped = fs::read_to_string(&skips).with_context(|| format!("cannot read {}", skips.display()))?;
        for line in skipped.lines() {
            println!("skipped: {line}");
            counts.reclassify_skipped(1);
        }
        match ended {
            Ended::Itself(status) if !status.success() && counts.failed == 0 => {
                // It did not build, or a test ended the whole program: no line was printed for it.
                counts += self.count("cargo test", &Outcome::Failed(status.to_string()));
            }
            Ended::Itself(_) => {}
            Ended::TooLong(limit) => {
                let reason = format!("a test hung, killed after {} s", limit.as_secs());
                counts += self.count("cargo test", &Outcome::Failed(reason));
            }
        }
        Ok(counts)
    }

    fn limit(&self) -> Duration {
        self.tier.limit(self.options.long)
    }
}

/// Where the database of advisories cannot be fetched, nothing is known of the dependencies; that is not their fault.
fn advisories_outcome(success: bool, stderr: &str) -> Outcome {
    const UNREACHABLE: &str = "failed to fetch advisory database";
    if success {
        Outcome::Passed("none".to_owned())
    } else if let Some((_, rest)) = stderr.split_once(UNREACHABLE) {
        let database = rest.split_whitespace().next().unwrap_or_default();
        Outcome::Skipped(format!("{UNREACHABLE} {database}"))
    } else {
        Outcome::Failed(stderr.trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advisories_are_skipped_only_without_their_database() {
        let unreachable =
            "2026-01-01 [ERROR] failed to fetch advisory database https://example.org/db with cli: failed\n";
        let reason = "failed to fetch advisory database https://example.org/db".to_owned();
        assert_eq!(advisories_outcome(false, unreachable), Outcome::Skipped(reason));
        let vulnerable = advisories_outcome(false, "error[vulnerability]: bad\n");
        assert_eq!(vulnerable, Outcome::Failed("error[vulnerability]: bad".to_owned()));
        assert!(matches!(advisories_outcome(true, ""), Outcome::Passed(_)));
    }
}
