//! What tests have left behind on this machine.
//!
//! `residue snapshot` prints the machine's state; `residue check [SNAPSHOT]` lists what is left of the project's own (and what
//! came up since the snapshot in that file) and exits with 1 if there is something; `residue clean` removes the worlds of
//! dead processes.

use std::{fs, process::ExitCode};

use anyhow::{Context, bail};
use portcullis_tests::residue::{self, Snapshot};

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["snapshot"] => print!("{}", Snapshot::take()),
        ["check"] => return Ok(report(&residue::left(None))),
        ["check", file] => {
            let text = fs::read_to_string(file).with_context(|| format!("read the snapshot {file}"))?;
            return Ok(report(&residue::left(Some(&Snapshot::from_text(&text)))));
        }
        ["clean"] => residue::clean().iter().for_each(|world| println!("removed {world}")),
        _ => bail!("usage: residue snapshot | check [SNAPSHOT] | clean"),
    }
    Ok(ExitCode::SUCCESS)
}

fn report(left: &[String]) -> ExitCode {
    if left.is_empty() {
        println!("nothing is left behind");
        return ExitCode::SUCCESS;
    }
    left.iter().for_each(|item| println!("{item}"));
    eprintln!("{} left behind; `residue clean` removes the worlds of dead processes", left.len());
    ExitCode::FAILURE
}
