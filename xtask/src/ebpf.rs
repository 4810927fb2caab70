//! The kernel object: built from source, compared with the committed one, recorded.

use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::counts::Outcome;
use crate::object::{self, Error, Record, Request, Toolchain, Tools};
use crate::target;

/// Builds the object into the target folder and says by what.
pub(crate) fn build(root: &Path) -> anyhow::Result<()> {
    let toolchain = Toolchain::find()?;
    let target = target(root);
    let to = target.join("bpf/portcullis.o");
    toolchain.build(&request(root, &target), &to)?;
    println!("{} ({} bytes), built by {}", to.display(), fs::metadata(&to)?.len(), toolchain.tools);
    Ok(())
}

/// Builds the object with the programs that benchmarks compare the gate with, and returns where it is.
pub(crate) fn build_with_bench(root: &Path) -> anyhow::Result<PathBuf> {
    let target = target(root);
    let to = target.join("bpf/bench.o");
    Toolchain::find()?.build(&Request { features: &["bench"], ..request(root, &target) }, &to)?;
    Ok(to)
}

/// Proves that the committed object is what its sources give, under the very tools that are recorded for it.
pub(crate) fn check(root: &Path) -> anyhow::Result<Outcome> {
    let record = match object::trusted_record(root) {
        Ok(record) => record,
        Err(error) => return Ok(Outcome::Failed(error.to_string())),
    };
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error @ (Error::NoCompiler | Error::NoLinker)) => return Ok(Outcome::Skipped(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    if let Some(reason) = other_tools(&record, &toolchain.tools, ARCH) {
        return Ok(Outcome::Skipped(reason));
    }
    let target = target(root);
    let built = target.join("bpf/compared.o");
    toolchain.build(&request(root, &target), &built)?;
    let committed = object::prebuilt(root).join("portcullis.o");
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    Ok(if read(&committed)? == read(&built)? {
        Outcome::Passed(format!("equals the build from source by {}", toolchain.tools))
    } else {
        Outcome::Failed(format!(
            "{} differs from {}, built from the same sources by the same tools: `cargo xtask ebpf --update` if you \
             trust the sources, else find out who made it",
            committed.display(),
            built.display()
        ))
    })
}

/// Builds the committed object anew and records what it was built by and from.
pub(crate) fn update(root: &Path) -> anyhow::Result<()> {
    let toolchain = Toolchain::find()?;
    let folder = object::prebuilt(root);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    toolchain.build(&request(root, &target(root)), &folder.join("portcullis.o"))?;
    let Tools { rustc, linker, objcopy } = &toolchain.tools;
    let text = format!(
        "# What portcullis.o was built by and from; written by `cargo xtask ebpf --update`.\n\
         rustc = \"{rustc}\"\nlinker = \"{linker}\"\nobjcopy = \"{objcopy}\"\narch = \"{ARCH}\"\nsource = \"{}\"\n",
        object::source_hash(root)?
    );
    let path = folder.join("portcullis.toml");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} built by {}", folder.join("portcullis.o").display(), toolchain.tools);
    Ok(())
}

/// What the agent's build script builds.
pub(crate) fn request<'a>(root: &'a Path, target: &'a Path) -> Request<'a> {
    Request { root, bin: "portcullis", features: &[], arch: ARCH, target }
}

/// Why these tools cannot be expected to give the recorded object's bits.
fn other_tools(record: &Record, tools: &Tools, arch: &str) -> Option<String> {
    if record.tools != *tools {
        Some(format!("compiler is {tools}, recorded {}", record.tools))
    } else if record.arch != arch {
        Some(format!("processor is {arch}, recorded {}", record.arch))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(rustc: &str, linker: &str, objcopy: &str) -> Tools {
        Tools { rustc: rustc.to_owned(), linker: linker.to_owned(), objcopy: objcopy.to_owned() }
    }

    #[test]
    fn only_the_recorded_tools_must_give_the_recorded_bits() {
        let recorded = tools("rustc 1.96.0", "bpf-linker 0.13.0", "22.1.8");
        let record = Record { tools: recorded.clone(), arch: "x86_64".to_owned(), source: String::new() };
        assert_eq!(other_tools(&record, &recorded, "x86_64"), None);
        for other in [
            tools("rustc 1.97.0", "bpf-linker 0.13.0", "22.1.8"),
            tools("rustc 1.96.0", "bpf-linker 0.13.1", "22.1.8"),
            tools("rustc 1.96.0", "bpf-linker 0.13.0", "none"),
        ] {
            let reason = other_tools(&record, &other, "x86_64").expect("another tool");
            assert_eq!(reason, format!("compiler is {other}, recorded {recorded}"));
        }
        assert_eq!(
            other_tools(&record, &recorded, "aarch64").as_deref(),
            Some("processor is aarch64, recorded x86_64")
        );
    }
}
