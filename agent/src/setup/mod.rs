//! Tools of a host: what is there, installing what is missing, and finding out by trying what works.
//!
//! Nothing here measures, and nothing here runs while something is measured. `install` changes the machine (Debian
//! packages, and a private prefix for CRIU); `tools` only looks; `kvm` and `doctor` try things, each bounded in time, each
//! removing what it made.

pub mod apt;
pub mod command;
pub mod criu;
pub mod doctor;
pub mod install;
pub mod kvm;
pub mod listener;
mod probe_guest;
pub mod tools;
mod trials;

use std::path::{Path, PathBuf};

pub use doctor::{DoctorOptions, Report, Trial, examine};
pub use install::{Installed, SetupError, SetupOptions, run};
pub use trials::Ground;

/// Where tools live that are not the host's packages: shared by all agents of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolsDir(PathBuf);

impl ToolsDir {
    pub const DEFAULT: &str = "/var/lib/drums-tools";

    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The prefix that holds CRIU with its own libraries.
    pub fn criu(&self) -> PathBuf {
        self.0.join("criu")
    }

    /// The answers of the KVM preflight, by QEMU, kernel and boot.
    pub fn kvm_answer(&self) -> PathBuf {
        self.0.join("kvm-answer.json")
    }
}
