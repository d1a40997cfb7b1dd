//! Recipes that write workload folders (layout: `drums_common::workload`), and the image of a server. A recipe changes nothing on the machine but
//! its output and its cache: packages are fetched and unpacked privately, never installed.

pub mod debian;
pub mod kernel;
pub mod minimal;
pub mod server;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot run {program}; is it installed?")]
    Spawn { program: String, source: io::Error },
    #[error("`{command}` failed with {status}: {stderr}")]
    Command { command: String, status: String, stderr: String },
    #[error("no package {package} in this machine's package lists; run apt-get update, or check the sources")]
    NoPackage { package: String },
    #[error("{} is not a kernel that can be used: {why}", .path.display())]
    Kernel { path: PathBuf, why: String },
    #[error("package {package} has no {path}")]
    NotInPackage { package: String, path: String },
    #[error("{} is not a statically linked x86-64 program: build it with -C target-feature=+crt-static", .path.display())]
    NotStatic { path: PathBuf },
    #[error("an image of a server is made by root, who alone can own its files; run it as root")]
    NotRoot,
    #[error(transparent)]
    Workload(#[from] crate::workload::WorkloadError),
}

pub(crate) type Result<T> = std::result::Result<T, ImageError>;

pub(crate) fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> ImageError + 'a {
    move |source| ImageError::Io { what, path: path.to_owned(), source }
}

/// Runs a command to its end; its output when it succeeded.
pub(crate) fn run(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|source| ImageError::Spawn { program, source })?;
    if output.status.success() {
        return Ok(output);
    }
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let text = String::from_utf8_lossy(&output.stderr);
    let stderr =
        text.trim().lines().rev().take(6).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join(" / ");
    Err(ImageError::Command {
        command: words.iter().map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" "),
        status: output.status.to_string(),
        stderr,
    })
}

pub(crate) fn put(path: &Path, content: &[u8], bits: u32) -> Result<()> {
    fs::write(path, content).map_err(io_error("write", path))?;
    mode(path, bits)
}

/// Set after creation, so that nobody's umask gets into the manifest.
pub(crate) fn mode(path: &Path, bits: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(bits)).map_err(io_error("set the mode of", path))
}
