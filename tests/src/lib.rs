//! What the integration tests share: where the workspace is, its programs, and the fleet under test.

pub mod fleet;
pub mod moto;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use cargo_metadata::{Metadata, MetadataCommand};

/// The workspace's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies one below the root")
}

/// Metadata of what is built here: crates of other platforms are not downloaded.
pub fn metadata() -> Result<Metadata> {
    MetadataCommand::new()
        .current_dir(root())
        .other_options(["--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned))
        .exec()
        .context("cargo metadata failed; `cargo fetch --locked` downloads what it needs")
}

/// The folder with the project's programs, freshly built: cargo builds those of other packages for nobody's tests, so a
/// stale one could be tested otherwise.
pub fn programs() -> Result<PathBuf> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    let output = drums_infra::cargo::outside(&mut command)
        .current_dir(root())
        .args(["build", "--quiet", "--locked", "--workspace", "--bins", "--tests"])
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "the programs do not build: {}", String::from_utf8_lossy(&output.stderr));
    // .../target/debug/deps/it-HASH
    let me = std::env::current_exe().context("cannot ask for this program's own path")?;
    let folder = me.ancestors().nth(2).context("this program does not lie in a target folder")?;
    Ok(folder.to_owned())
}

/// The minimal workload, built from this checkout.
pub fn image() -> Result<PathBuf> {
    let target = metadata()?.target_directory.into_std_path_buf();
    let out = target.join("images/it-minimal");
    let guest = drums_infra::image::minimal::build_guest(root()).context("cannot build the guest server")?;
    let options = drums_infra::image::minimal::Options { out: out.clone(), guest, cache: target.join("packages") };
    drums_infra::image::minimal::build(&options).context("cannot build the minimal workload")?;
    Ok(out)
}

/// Says that a test cannot run here, in the words that `cargo xtask skips` reads.
pub fn skip(name: &str, reason: &str) {
    eprintln!("SKIP {name}: {reason}");
}
