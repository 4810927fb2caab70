//! Puts the kernel object into `OUT_DIR/portcullis.o` and says in `PORTCULLIS_BPF_ORIGIN` where it came from.
//!
//! `PORTCULLIS_BPF` decides: `build` compiles it or fails, `prebuilt` takes the committed one, `auto` (the default)
//! compiles it if it can and else takes the committed one.

#[path = "../ebpf/build/object.rs"]
mod object;

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use object::{Request, Toolchain};

fn main() -> anyhow::Result<()> {
    let variable = |name| env::var(name).with_context(|| format!("cargo sets {name} for build scripts"));
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().context("the agent's crate lies in the checkout")?;
    let out = PathBuf::from(variable("OUT_DIR")?);
    let to = out.join("portcullis.o");
    let arch = variable("CARGO_CFG_TARGET_ARCH")?;
    let features: &[&str] = if env::var_os("CARGO_FEATURE_KERNEL_LOG").is_some() { &["log"] } else { &[] };
    let request = Request { root, bin: "portcullis", features, arch: &arch, target: target_folder(&out) };

    println!("cargo::rerun-if-env-changed=PORTCULLIS_BPF");
    for path in object::SOURCES.into_iter().chain(["agent/build.rs", "agent/prebuilt"]) {
        rerun_if_changed(&root.join(path));
    }
    let origin = match env::var("PORTCULLIS_BPF").as_deref().unwrap_or("auto") {
        "build" => compile(&request, &to)?,
        "prebuilt" => take_prebuilt(&request, &to)?,
        "auto" => match compile(&request, &to) {
            Ok(origin) => origin,
            Err(error) => {
                let origin = take_prebuilt(&request, &to)
                    .with_context(|| format!("the kernel object was not built: {error}"))?;
                println!("cargo::warning=the committed kernel object is used, because of this: {}", one_line(&error));
                // A compiler or linker that is installed later is noticed.
                rerun_if_changed(&object::cargo_home().join("bin"));
                rerun_if_changed(Path::new("/usr/lib/rustlib"));
                origin
            }
        },
        other => bail!("PORTCULLIS_BPF is `{other}`: set it to auto, build or prebuilt, or unset it"),
    };
    println!("cargo::rustc-env=PORTCULLIS_BPF_ORIGIN={origin}");
    Ok(())
}

fn compile(request: &Request<'_>, to: &Path) -> Result<String, object::Error> {
    let toolchain = Toolchain::find()?;
    rerun_if_changed(&toolchain.rustc);
    rerun_if_changed(&toolchain.linker);
    toolchain.build(request, to)?;
    Ok(format!("built by {}", toolchain.tools))
}

fn take_prebuilt(request: &Request<'_>, to: &Path) -> anyhow::Result<String> {
    if !request.features.is_empty() {
        bail!("the committed object has no features: unset the feature kernel-log, or `cargo xtask setup`");
    }
    let record = object::trusted_record(request.root)?;
    object::copy(&object::prebuilt(request.root).join("portcullis.o"), to)?;
    Ok(format!("committed, built by {}", record.tools))
}

/// The outer target folder: cargo marks it for backup programs.
fn target_folder(out: &Path) -> &Path {
    out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists()).unwrap_or(out)
}

/// Tells cargo of an existing path only: a missing one would run this script, and so compile the agent, every time.
fn rerun_if_changed(path: &Path) {
    if path.exists() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

fn one_line(error: &object::Error) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" | ")
}
