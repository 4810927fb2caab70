//! Demonstrations and benchmarks: programs of the tests package, found by their names.
//!
//! A demonstration is `tests/src/bin/story-NAME.rs`, a benchmark `tests/src/bin/bench-NAME.rs`; the first line of its
//! documentation describes it. Each prints its report itself, as a table or, given `--json`, as one line of JSON, and
//! its exit code says whether every check held.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};

use crate::setup::{self, Purpose};
use crate::{cargo, ebpf, succeed, target};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Which one; without a name the demonstration `gate`, or all benchmarks
    name: Option<String>,
    /// List the names, each with what it shows
    #[arg(long)]
    list: bool,
    /// Print one line of JSON for each instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Demo,
    Bench,
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Kind::Demo => "story-",
            Kind::Bench => "bench-",
        }
    }

    /// What is run if nothing is named; nothing: all of them.
    fn default_name(self) -> Option<&'static str> {
        match self {
            Kind::Demo => Some("gate"),
            Kind::Bench => None,
        }
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Story {
    name: String,
    description: String,
}

pub(crate) fn run(root: &Path, kind: Kind, options: &Options) -> anyhow::Result<ExitCode> {
    let known = find(root, kind)?;
    if options.list {
        let width = known.iter().map(|story| story.name.len()).max().unwrap_or(0);
        for Story { name, description } in &known {
            println!("{name:width$}  {description}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let name = options.name.as_deref().or(kind.default_name());
    let chosen: Vec<&Story> = known.iter().filter(|story| name.is_none_or(|name| name == story.name)).collect();
    if let (Some(name), true) = (name, chosen.is_empty()) {
        bail!("{}", unknown(name, &known));
    }
    setup::run(Purpose::Stories, false)?;
    succeed(cargo().current_dir(root).args([
        "build",
        "--release",
        "--locked",
        "-p",
        "portcullis",
        "-p",
        "portcullis-tests",
        "--bins",
    ]))?;
    let object = match kind {
        Kind::Demo => None,
        Kind::Bench => Some(ebpf::build_with_bench(root)?),
    };
    let folder = target(root).join("release");
    let mut all_passed = true;
    for story in chosen {
        let program = folder.join(format!("{}{}", kind.prefix(), story.name));
        let mut command = Command::new(&program);
        command.env("PORTCULLIS_BIN", folder.join("portcullis"));
        if let Some(object) = &object {
            command.env("PORTCULLIS_BENCH_BPF", object);
        }
        if options.json {
            command.arg("--json");
        }
        all_passed &= command.status().with_context(|| format!("cannot run {}", program.display()))?.success();
    }
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What to say about a name that none of `known` bears: the nearest that does, if it may be a slip of the hand.
fn unknown(name: &str, known: &[Story]) -> String {
    let distance = |story: &&Story| strsim::damerau_levenshtein(name, &story.name);
    match known.iter().min_by_key(distance).filter(|story| distance(story) <= 1 + name.chars().count() / 3) {
        Some(nearest) => format!("there is no `{name}`: did you mean `{}`?", nearest.name),
        None => format!("there is no `{name}`: `--list` shows the names"),
    }
}

fn find(root: &Path, kind: Kind) -> anyhow::Result<Vec<Story>> {
    let folder = root.join("tests/src/bin");
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut stories = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(name) = file.strip_prefix(kind.prefix()).and_then(|name| name.strip_suffix(".rs")) else { continue };
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        stories.push(Story { name: name.to_owned(), description: description(&source).to_owned() });
    }
    stories.sort();
    Ok(stories)
}

/// The first line of a program's documentation.
fn description(source: &str) -> &str {
    source.lines().find_map(|line| line.strip_prefix("//!")).unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_answered_with_the_nearest() {
        let known = ["gate", "adopt"].map(|name| Story { name: name.to_owned(), description: String::new() });
        assert_eq!(unknown("gaet", &known), "there is no `gaet`: did you mean `gate`?");
        assert_eq!(unknown("packets", &known), "there is no `packets`: `--list` shows the names");
        assert_eq!(unknown("gate", &[]), "there is no `gate`: `--list` shows the names");
    }

    #[test]
    fn finds_programs_by_name_and_kind() {
        let root = tempfile::tempdir().expect("temporary folder");
        assert_eq!(find(root.path(), Kind::Demo).expect("no folder yet"), []);
        let bin = root.path().join("tests/src/bin");
        fs::create_dir_all(&bin).expect("folder");
        fs::write(bin.join("story-gate.rs"), "//! A gate falls by itself.\n//!\n//! More.\nfn main() {}\n")
            .expect("file");
        fs::write(bin.join("story-adopt.rs"), "fn main() {}\n").expect("file");
        fs::write(bin.join("bench-packet.rs"), "//! Nanoseconds per packet.\n").expect("file");
        fs::write(bin.join("residue.rs"), "//! Not a story.\n").expect("file");
        let story =
            |name: &str, description: &str| Story { name: name.to_owned(), description: description.to_owned() };
        let demos = find(root.path(), Kind::Demo).expect("listing");
        assert_eq!(demos, [story("adopt", ""), story("gate", "A gate falls by itself.")]);
        let benches = find(root.path(), Kind::Bench).expect("listing");
        assert_eq!(benches, [story("packet", "Nanoseconds per packet.")]);
    }
}
