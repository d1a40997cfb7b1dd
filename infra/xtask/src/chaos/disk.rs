//! A file system of a daemon's own, in a loop file, that can be made to stand still.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

/// Sparse: it takes what is written.
const SIZE: u64 = 1 << 30;

/// Thawed and unmounted when dropped. It is mounted in this process's mount namespace alone, and a frozen one is thawed
/// by a helper that ends with us: nothing stays, however we end.
pub struct Disk {
    mount: PathBuf,
    /// Holds it frozen for as long as its standard input is open.
    holder: Option<Child>,
    mounted: bool,
}

/// A mount namespace of this process's own. Before any thread begins.
pub fn own_mounts() -> Result<()> {
    use nix::{
        mount::{MsFlags, mount},
        sched::{CloneFlags, unshare},
    };
    unshare(CloneFlags::CLONE_NEWNS).context("cannot leave the machine's mount namespace; this needs root")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("cannot keep mounts to ourselves")
}

impl Disk {
    /// Makes the file system in `image` and mounts it on `mount`.
    pub fn make(image: &Path, mount: &Path) -> Result<Self> {
        fs::create_dir_all(mount).with_context(|| format!("cannot make {}", mount.display()))?;
        let file = fs::File::create(image).with_context(|| format!("cannot make {}", image.display()))?;
        file.set_len(SIZE).with_context(|| format!("cannot size {}", image.display()))?;
        let mut disk = Self { mount: mount.to_owned(), holder: None, mounted: false };
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(image).arg(mount))?;
        disk.mounted = true;
        Ok(disk)
    }

    /// Nothing is written from here on: whoever wants to waits.
    pub fn freeze(&mut self) -> Result<()> {
        let script = "fsfreeze --freeze \"$0\" && echo frozen && read -r _; fsfreeze --unfreeze \"$0\"";
        let mut holder = Command::new("sh")
            .args(["-c", script])
            .arg(&self.mount)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start sh to freeze a file system")?;
        let mut said = String::new();
        let out = holder.stdout.take().context("the freezer has no standard output")?;
        BufReader::new(out).read_line(&mut said).context("cannot hear from the freezer")?;
        self.holder = Some(holder);
        if said.trim() != "frozen" {
            self.thaw();
            anyhow::bail!("{} could not be frozen; fsfreeze comes with util-linux", self.mount.display());
        }
        Ok(())
    }

    pub fn thaw(&mut self) {
        if let Some(mut holder) = self.holder.take() {
            // The end of its input is what it waits for.
            drop(holder.stdin.take());
            let _ = holder.wait();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.thaw();
        if self.mounted
            && let Err(e) = run(Command::new("umount").arg(&self.mount))
        {
            eprintln!("{e:#}");
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {shown}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown} ended with {}: {}", output.status, said.trim());
    Ok(())
}
