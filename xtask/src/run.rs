//! Running a program with a time limit, its output read line by line.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};

/// How a program ended.
#[derive(Debug)]
pub(crate) enum Ended {
    Itself(ExitStatus),
    /// It took longer than its limit and was killed, with all its descendants.
    TooLong(Duration),
}

/// Runs a program to its end, or kills it with its descendants after `limit`. Each line of its standard output goes
/// to `line` at once; standard error stays where it is.
///
/// The program stays in the caller's process group, so that the terminal's interrupt reaches it.
pub(crate) fn run(command: &mut Command, limit: Duration, mut line: impl FnMut(&str)) -> anyhow::Result<Ended> {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let output = child.stdout.take().context("standard output is a pipe")?;
    let (sender, lines) = mpsc::channel();
    // The thread ends with the last holder of the pipe. It is not joined: a daemon that a test left behind may hold it.
    thread::spawn(move || {
        let mut reader = BufReader::new(output);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            if sender.send(text).is_err() {
                return;
            }
            bytes.clear();
        }
    });
    // The pipe closes when the program ends, and at the latest a moment after: descendants may hold it open.
    let poll = Duration::from_millis(100);
    loop {
        match lines.recv_timeout(poll) {
            Ok(text) => line(&text),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                if child.try_wait()?.is_some() {
                    break;
                }
            }
        }
        if started.elapsed() > limit {
            kill_tree(&mut child)?;
            return Ok(Ended::TooLong(limit));
        }
    }
    wait(&mut child, limit.saturating_sub(started.elapsed()))
}

/// Waits for a program that has closed its output.
fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<Ended> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Itself(status));
        }
        if started.elapsed() > limit {
            kill_tree(child)?;
            return Ok(Ended::TooLong(limit));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Kills a child and its descendants, each by its id. The child is reaped last, so no id is another's by then.
fn kill_tree(child: &mut Child) -> anyhow::Result<()> {
    let parents = parents().context("cannot list processes")?;
    let mut tree = vec![child.id()];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        tree.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(id, _)| *id));
        next += 1;
    }
    for id in tree {
        // One that has ended in the meantime is what was wanted.
        if let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    child.wait()?;
    Ok(())
}

/// Every process with its parent.
fn parents() -> io::Result<Vec<(u32, u32)>> {
    let parent = |entry: io::Result<fs::DirEntry>| {
        let entry = entry.ok()?;
        let id = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        Some((id, parent_in_stat(&stat)?))
    };
    Ok(fs::read_dir("/proc")?.filter_map(parent).collect())
}

/// The parent's id in `/proc/PID/stat`: the second field after the name, which may itself hold spaces and brackets.
fn parent_in_stat(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_parent_behind_any_name() {
        assert_eq!(parent_in_stat("42 (a) S) R 7 42 42 0 -1"), Some(7));
        assert_eq!(parent_in_stat("42 (truncated"), None);
    }

    #[test]
    fn hands_over_lines_and_status() {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two; exit 3"]);
        let ended = run(&mut command, Duration::from_secs(60), |line| lines.push(line.to_owned())).expect("sh runs");
        assert_eq!(lines, ["one", "two"]);
        assert!(matches!(ended, Ended::Itself(status) if status.code() == Some(3)), "{ended:?}");
    }

    #[test]
    fn kills_descendants_after_the_limit() {
        let mut grandchild = None;
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'echo $$; exec sleep 600'; true"]);
        let ended =
            run(&mut command, Duration::from_secs(2), |line| grandchild = line.parse::<u32>().ok()).expect("sh runs");
        assert!(matches!(ended, Ended::TooLong(_)), "{ended:?}");
        let grandchild = grandchild.expect("the grandchild told its id");
        // A killed process dies when it is next scheduled, and then may wait for its reaper.
        let alive = || {
            let stat = fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
        };
        let started = Instant::now();
        while alive() {
            assert!(started.elapsed() < Duration::from_secs(30), "process {grandchild} lives");
            thread::yield_now();
        }
    }
}
