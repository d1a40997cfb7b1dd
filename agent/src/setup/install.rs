//! `drums-agent setup`: makes a Debian host able to run the arms. May be run again at any time; does only what is missing.

use std::{fs, io, os::fd::AsRawFd as _, path::PathBuf};

use serde::Serialize;

#[cfg(test)]
use super::trials;
use super::{
    ToolsDir,
    apt::{self, AptError},
    criu::{self, CriuError, CriuNote},
    tools,
};

/// CRIU's prefix, package lists and QEMU's packages, with room to spare.
pub const MIN_DISK_BYTES: u64 = 1 << 30;
/// Two sessions of the smallest experiment and the tools around them.
pub const MIN_MEMORY_BYTES: u64 = 1 << 30;

#[derive(Clone, Debug, Default)]
pub struct SetupOptions {
    /// Install CRIU again even if a working one is there.
    pub renew: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Installed {
    pub criu: CriuNote,
    pub runc: String,
    pub qemu: String,
    /// What was done now, in words; empty if all was there.
    pub done: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("{0}")]
    Refused(String),
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot install {packages}")]
    Packages { packages: String, source: AptError },
    #[error("cannot install CRIU")]
    Criu(#[source] CriuError),
    #[error("{tool} was installed, but does not run: {why}")]
    DoesNotRun { tool: &'static str, why: String },
}

/// Why this machine cannot be a host at all, whatever is installed on it.
pub fn refuse_unfit_machine() -> Result<(), SetupError> {
    let refuse = |why: &str| Err(SetupError::Refused(why.to_owned()));
    if !cfg!(target_os = "linux") || !cfg!(target_arch = "x86_64") {
        return refuse(
            "a host has to be x86_64 Linux: the arms use its namespaces, CRIU and a virtual machine of that kind",
        );
    }
    if !nix::unistd::geteuid().is_root() {
        return refuse(
            "not running as root: namespaces, mounts, cgroups and CRIU need it; run the command again with sudo, or as root",
        );
    }
    Ok(())
}

/// Installs what is missing. `progress` is told what happens.
pub fn run(dir: &ToolsDir, options: &SetupOptions, progress: &mut dyn FnMut(&str)) -> Result<Installed, SetupError> {
    refuse_unfit_machine()?;
    let io_error = |what: &'static str| {
        let path = dir.path().to_owned();
        move |source: io::Error| SetupError::Io { what, path, source }
    };
    fs::create_dir_all(dir.path()).map_err(io_error("create"))?;
    room(dir)?;
    // One setup at a time: two agents of a machine share the folder.
    let lock = fs::File::create(dir.path().join(".lock")).map_err(io_error("lock"))?;
    // SAFETY: the descriptor is open for the call.
    if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
        return Err(io_error("lock")(io::Error::last_os_error()));
    }

    let mut done = Vec::new();
    let packages: Vec<&str> = [("runc", "runc"), ("qemu-system-x86_64", "qemu-system-x86")]
        .into_iter()
        .filter(|(program, _)| tools::program(program).is_none())
        .map(|(_, package)| package)
        .collect();
    if !packages.is_empty() {
        let names = packages.join(" and ");
        progress(&format!("installing {names} from this machine's package sources"));
        apt::install(&packages).map_err(|source| SetupError::Packages { packages: names.clone(), source })?;
        done.push(format!("installed {names}"));
    }
    let criu = match criu::installed(dir).filter(|_| !options.renew) {
        Some(note) => note,
        None => {
            let note = criu::install(dir, progress).map_err(SetupError::Criu)?;
            done.push(format!("installed CRIU {} from {} into {}", note.version, note.suite, dir.criu().display()));
            note
        }
    };
    let version = |tool: &'static str, program: &str| {
        let path = tools::program(program).ok_or_else(|| "it is nowhere to be found".to_owned());
        path.and_then(|p| tools::version(&p)).map_err(|why| SetupError::DoesNotRun { tool, why })
    };
    Ok(Installed { criu, runc: version("runc", "runc")?, qemu: version("QEMU", "qemu-system-x86_64")?, done })
}

fn room(dir: &ToolsDir) -> Result<(), SetupError> {
    let stat = nix::sys::statvfs::statvfs(dir.path()).map_err(|e| SetupError::Io {
        what: "look at",
        path: dir.path().to_owned(),
        source: e.into(),
    })?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < MIN_DISK_BYTES {
        return Err(SetupError::Refused(format!(
            "{} has {} MiB free; setup needs {} MiB: make room, or choose another folder with --tools",
            dir.path().display(),
            free >> 20,
            MIN_DISK_BYTES >> 20
        )));
    }
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024);
    match total {
        Some(total) if total < MIN_MEMORY_BYTES => Err(SetupError::Refused(format!(
            "this machine has {} MiB of memory; sessions and their tools need at least {} MiB",
            total >> 20,
            MIN_MEMORY_BYTES >> 20
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Installs for real into a folder of its own, and makes it do what the restored arms do. Needs root and a mirror.
    #[test]
    fn live_criu_installs_into_a_prefix_saves_and_restores() {
        if refuse_unfit_machine().is_err() {
            eprintln!("SKIP root: not root on x86_64 Linux");
            return;
        }
        let t = tempfile::tempdir().unwrap();
        let dir = ToolsDir::new(t.path());
        let note = criu::install(&dir, &mut |line| eprintln!("{line}")).unwrap();
        assert!(criu::known(&note.version));
        assert_eq!(criu::installed(&dir), Some(note));
        let left: Vec<_> = fs::read_dir(t.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["criu"], "only the prefix remains");
        let program = tools::find(&dir).criu.unwrap();
        trials::criu(&program, &trials::tests::own_listener(), &trials::Ground::default()).unwrap();
    }
}
