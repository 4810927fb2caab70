//! Which process has a socket open.

use std::{collections::HashMap, fs, path::Path};

use super::{Owner, Uncovered};

/// Open files that are looked at before the search is given up: about a second's work.
const MOST_FILES: usize = 200_000;

/// Fills in the owners of what is `uncovered`, from the processes under `proc`. Who is not found stays unknown: another
/// process's files may be out of reach, a process may end meanwhile, and the search is bounded.
pub fn find(proc: &Path, uncovered: &mut [Uncovered]) {
    let mut wanted: HashMap<String, Vec<&mut Uncovered>> = HashMap::new();
    for one in uncovered {
        wanted.entry(format!("socket:[{}]", one.listener.inode)).or_default().push(one);
    }
    let mut files = 0;
    for pid in numbers(proc) {
        for file in numbers(&proc.join(pid.to_string()).join("fd")) {
            if wanted.is_empty() || files == MOST_FILES {
                return;
            }
            files += 1;
            let path = proc.join(format!("{pid}/fd/{file}"));
            let Ok(target) = fs::read_link(path) else { continue };
            let Some(owned) = target.to_str().and_then(|target| wanted.remove(target)) else { continue };
            // A process that has just ended has no name any more.
            let name = fs::read_to_string(proc.join(format!("{pid}/comm"))).unwrap_or_default();
            for one in owned {
                one.owner = Some(Owner { pid, name: name.trim_end().to_owned() });
            }
        }
    }
}

/// The entries of a folder whose names are numbers, in order; none if it cannot be read.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}
