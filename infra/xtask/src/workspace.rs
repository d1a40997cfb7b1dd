//! Where the workspace is and how its tools are called.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use cargo_metadata::{Metadata, MetadataCommand};

/// The workspace's root folder: two above this package's.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the package lies at infra/xtask")
}

/// Of the workspace alone: on a bare machine only what the demo is built from has been downloaded.
pub fn metadata() -> Result<Metadata> {
    MetadataCommand::new().current_dir(root()).no_deps().exec().context("cargo metadata failed")
}

/// The folder that cargo builds into.
pub fn target_dir() -> Result<PathBuf> {
    Ok(metadata()?.target_directory.into_std_path_buf())
}

/// A command in the workspace's root.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

pub fn cargo() -> Command {
    // Set by cargo itself for what it runs; the same toolchain then builds what the task needs.
    let mut command = command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    drums_infra::cargo::outside(&mut command);
    command
}

/// Runs to the end with inherited streams; an error names the command.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Runs to the end and returns standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed something that is not UTF-8"))
}

pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Files that git knows or would add, relative to the root.
pub fn files() -> Result<Vec<PathBuf>> {
    let listed = output(command("git").args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]))
        .context("the list of the project's files comes from git")?;
    Ok(listed.split('\0').filter(|s| !s.is_empty()).map(PathBuf::from).filter(|p| root().join(p).is_file()).collect())
}
