//! What the integration tests share: where the workspace is, its programs, and the fleet under test.

pub mod fleet;
pub mod moto;

use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::{ffi::OsStrExt as _, fs::FileExt as _},
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
    once("programs", || {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let mut command = Command::new(cargo);
        let output = drums_infra::cargo::outside(&mut command)
            .current_dir(root())
            // As in the Makefile, so that nothing is built a second time.
            .args(["build", "--quiet", "--locked", "--workspace", "--exclude", "drums-ec2", "--bins", "--tests"])
            .output()
            .context("cannot start cargo")?;
        ensure!(output.status.success(), "the programs do not build: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    })?;
    Ok(target()?.join("debug"))
}

/// The minimal workload, built from this checkout.
pub fn image() -> Result<PathBuf> {
    let out = target()?.join("images/it-minimal");
    once("image", || {
        let guest = drums_infra::image::minimal::build_guest(root()).context("cannot build the guest server")?;
        let options =
            drums_infra::image::minimal::Options { out: out.clone(), guest, cache: target()?.join("packages") };
        drums_infra::image::minimal::build(&options).context("cannot build the minimal workload")?;
        Ok(())
    })?;
    Ok(out)
}

/// Makes a thing that tests share at most once in a test run: the runner starts a process per test and gives all of them
/// the run's id. Without one, each asking makes it.
fn once(name: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
    let Some(run) = std::env::var_os("NEXTEST_RUN_ID") else { return make() };
    let folder = target()?.join("prepared");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(name);
    let mut made_in = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
    // Others wait here while it is made; the lock ends with the file.
    made_in.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    let mut id = Vec::new();
    made_in.read_to_end(&mut id)?;
    if id == run.as_bytes() {
        return Ok(());
    }
    make()?;
    made_in.set_len(0)?;
    made_in.write_all_at(run.as_bytes(), 0)?;
    Ok(())
}

/// Cargo's target folder, in which this program lies: `target/debug/deps/it-HASH`.
fn target() -> Result<PathBuf> {
    let me = std::env::current_exe().context("cannot ask for this program's own path")?;
    Ok(me.ancestors().nth(3).context("this program does not lie in a target folder")?.to_owned())
}

/// Says that a test cannot run here, in the words that `cargo xtask skips` reads.
pub fn skip(name: &str, reason: &str) {
    eprintln!("SKIP {name}: {reason}");
}
