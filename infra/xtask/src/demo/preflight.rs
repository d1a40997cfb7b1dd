//! Refusals before anything is built or made: each says what is missing and what to do.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

const GIB: u64 = 1 << 30;
/// Template images, QEMU guests and two agents at once, measured on a machine of 24 GiB; below it the gates would only
/// record swapping.
const MEMORY: u64 = 4 * GIB;
/// A first release build takes about 3 GiB, tools 0.3 GiB, a run's templates and evidence the rest.
const DISK: u64 = 6 * GIB;

pub fn check(root: &Path) -> Result<()> {
    let uname = nix::sys::utsname::uname().context("cannot ask the kernel what it is")?;
    refuse(uname.sysname(), uname.machine(), nix::unistd::geteuid().is_root())?;
    let memory = memory_available()?;
    if memory < MEMORY {
        bail!("{} MiB of memory are available and the demo needs {}; end other programs", memory >> 20, MEMORY >> 20);
    }
    for path in [root.to_owned(), existing(&crate::workspace::target_dir()?)] {
        let stat = nix::sys::statvfs::statvfs(&path)
            .with_context(|| format!("cannot ask for the space left at {}", path.display()))?;
        let free = stat.blocks_available() * stat.fragment_size();
        if free < DISK {
            bail!(
                "{} MiB are free at {} and the demo needs {}; free some, or move the build with CARGO_TARGET_DIR",
                free >> 20,
                path.display(),
                DISK >> 20
            );
        }
    }
    Ok(())
}

fn refuse(system: &std::ffi::OsStr, machine: &std::ffi::OsStr, root: bool) -> Result<()> {
    if system != "Linux" || machine != "x86_64" {
        bail!("this is {} {} and the demo needs Linux x86_64", system.display(), machine.display());
    }
    if !root {
        bail!("the demo needs root: it makes namespaces, cgroups and network links for real; run `sudo make demo`");
    }
    Ok(())
}

fn memory_available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line =
        text.lines().find_map(|l| l.strip_prefix("MemAvailable:")).context("/proc/meminfo names no MemAvailable")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("MemAvailable is not a number")?;
    Ok(kib << 10)
}

/// The nearest folder above that exists: the build folder itself may come later.
fn existing(path: &Path) -> std::path::PathBuf {
    path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_and_users_are_refused_with_what_to_do() {
        let said = |system: &str, machine: &str, root| {
            refuse(system.as_ref(), machine.as_ref(), root).map_err(|e| e.to_string())
        };
        assert!(said("Linux", "x86_64", true).is_ok());
        assert!(said("Darwin", "arm64", true).unwrap_err().contains("needs Linux x86_64"));
        assert!(said("Linux", "aarch64", true).unwrap_err().contains("aarch64"));
        assert!(said("Linux", "x86_64", false).unwrap_err().contains("sudo make demo"));
    }
}
