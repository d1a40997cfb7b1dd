//! OpenSSH: a real sshd, and `ssh` taking a plan to it as often as there are hosts, at once: fresh, or each over a
//! connection that a ControlMaster keeps.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    home::free_address,
    process::{Running, dying_with_us, pause},
};

const START: Duration = Duration::from_secs(20);
const SSHD: &str = "/usr/sbin/sshd";
/// sshd refuses to start without it; Debian's unit makes it at boot.
const PRIVILEGE_SEPARATION: &str = "/run/sshd";

pub struct Ssh {
    dir: PathBuf,
    hosts: u8,
    address: SocketAddr,
    _sshd: Running,
    made: bool,
    masters: Vec<Running>,
}

fn key(path: &Path) -> Result<()> {
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
    ensure!(made.context("cannot start ssh-keygen")?.success(), "ssh-keygen made no key at {}", path.display());
    Ok(())
}

impl Ssh {
    /// Why there can be none here.
    pub fn missing() -> Option<String> {
        let there = Path::new(SSHD).exists() && Command::new("ssh").arg("-V").stderr(Stdio::null()).status().is_ok();
        (!there).then(|| format!("{SSHD} or ssh is not installed (Debian: openssh-server, openssh-client)"))
    }

    pub fn start(dir: &Path, hosts: u8) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let made = !Path::new(PRIVILEGE_SEPARATION).exists();
        if made {
            fs::create_dir(PRIVILEGE_SEPARATION).with_context(|| format!("cannot create {PRIVILEGE_SEPARATION}"))?;
            fs::set_permissions(PRIVILEGE_SEPARATION, fs::Permissions::from_mode(0o755))?;
        }
        key(&dir.join("host"))?;
        key(&dir.join("user"))?;
        fs::copy(dir.join("user.pub"), dir.join("authorized"))?;
        // All hosts are one address: sshd listens on 16 at most, and a connection costs the same to each.
        let address = free_address()?;
        let d = dir.display();
        let config = format!(
            "ListenAddress {address}\nHostKey {d}/host\nAuthorizedKeysFile {d}/authorized\nPidFile none\nUsePAM no\nStrictModes no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n\
             MaxStartups 200\nMaxSessions 100\nLogLevel ERROR\n"
        );
        fs::write(dir.join("sshd_config"), config)?;
        let log = fs::File::create(dir.join("sshd.log"))?;
        let mut command = dying_with_us(SSHD);
        command.arg("-D").arg("-e").arg("-f").arg(dir.join("sshd_config"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut sshd = Running::start(&mut command)?;
        let deadline = Instant::now() + START;
        while TcpStream::connect(address).is_err() {
            ensure!(
                sshd.lives() && Instant::now() < deadline,
                "sshd does not answer: {}",
                fs::read_to_string(dir.join("sshd.log")).unwrap_or_default()
            );
            pause();
        }
        Ok(Self { dir: dir.to_owned(), hosts, address, _sshd: sshd, made, masters: Vec::new() })
    }

    /// What `command` is told: to use the connection that is kept at `control`; none: a fresh one.
    fn ssh(&self, mut command: Command, control: Option<u8>) -> Command {
        let d = self.dir.display();
        let path = control.map_or("none".to_owned(), |n| format!("{d}/m{n}"));
        command.args(["-q", "-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]);
        command.args(["-o", &format!("UserKnownHostsFile={d}/known"), "-i", &format!("{d}/user")]);
        command.args(["-p", &self.address.port().to_string(), "-o", &format!("ControlPath={path}")]);
        command
    }

    /// Opens a connection to each host and keeps it.
    pub fn open_masters(&mut self) -> Result<()> {
        for n in 0..self.hosts {
            let mut command = self.ssh(dying_with_us("ssh"), Some(n));
            command.args(["-M", "-N"]).arg(self.address.ip().to_string());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            self.masters.push(Running::start(&mut command)?);
        }
        let deadline = Instant::now() + START;
        for n in 0..self.hosts {
            while !self.dir.join(format!("m{n}")).exists() {
                ensure!(Instant::now() < deadline, "no ControlMaster of host {n} came up");
                pause();
            }
        }
        Ok(())
    }

    /// A plan to every host at once, until each has it on its disk's side and said so. `warm` uses the masters.
    pub fn push(&self, plan: &Path, warm: bool) -> Result<Duration> {
        let began = Instant::now();
        let mut children = Vec::new();
        for n in 0..self.hosts {
            let mut command = self.ssh(Command::new("ssh"), warm.then_some(n));
            command.arg(self.address.ip().to_string()).arg("wc -c");
            command.stdin(fs::File::open(plan)?).stdout(Stdio::piped()).stderr(Stdio::null());
            children.push(command.spawn().context("cannot start ssh")?);
        }
        let wanted = fs::metadata(plan)?.len().to_string();
        for child in children {
            let output = child.wait_with_output()?;
            if !output.status.success() || String::from_utf8_lossy(&output.stdout).trim() != wanted {
                bail!("an ssh ended with {}; see {}/sshd.log", output.status, self.dir.display());
            }
        }
        Ok(began.elapsed())
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        self.masters.clear();
        if self.made {
            // Fails if somebody else uses it by now.
            let _ = fs::remove_dir(PRIVILEGE_SEPARATION);
        }
    }
}
