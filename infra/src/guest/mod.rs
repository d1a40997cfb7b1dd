//! A paid host on this machine: the image of a server, booted by QEMU with the user data that a launch gives it, and looked
//! at from outside. What a guest says is its serial line, what it does to its machine are QEMU's events.
//!
//! ```text
//! boot ─▶ running ──(powers itself off)──▶ off        stop / resume: a kernel that hangs, from outside
//!            └─ reset: boots again, with the same disk        cut: no network any more
//! ```
//! Without KVM: the machines that tests run on have none that works. The image's disk is never written to; what a guest
//! writes is gone with it.

mod qmp;
mod seen;

use std::{
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use self::{qmp::Qmp, seen::Seen};
use crate::image::server::Server;

const PROGRAM: &str = "qemu-system-x86_64";
/// QEMU opens its sockets before it does anything else; a machine that is busy takes its time.
const STARTS_IN: Duration = Duration::from_secs(30);
const ANSWERS_IN: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error("cannot {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot start {PROGRAM}; install qemu-system-x86, and util-linux for setpriv")]
    Start { source: io::Error },
    #[error("{PROGRAM} ended before it was asked to; it said: {said}")]
    Ended { said: String },
    #[error("QEMU refused {command}: {why}")]
    Refused { command: String, why: String },
    #[error("{what} was not seen within {} s; the guest last said:\n{last}", waited.as_secs())]
    NotSeen { what: String, waited: Duration, last: String },
}

type Result<T> = std::result::Result<T, GuestError>;

/// What a guest is booted with.
#[derive(Clone, Debug, Default)]
pub struct Seed {
    /// As the launch gives it, to the byte.
    pub user_data: String,
    /// A new one is a new instance to cloud-init.
    pub instance_id: String,
    /// What a test does inside of the guest: a script that cloud-init runs after the user data, in every boot.
    pub vendor_data: String,
    /// Where the guest's clock stands at its start, as `2016-05-01T00:00:00`; now without it.
    pub clock: Option<String>,
}

/// How a guest ended.
#[derive(Clone, Debug)]
pub struct Off {
    /// By this machine's clock.
    pub at: SystemTime,
    /// QEMU's word: `guest-shutdown` for a guest that powered itself off.
    pub reason: String,
}

/// Is killed when it is dropped.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    qmp: Qmp,
    seen: Arc<Seen>,
    /// Its seed and its socket.
    _folder: TempDir,
}

impl Guest {
    pub fn boot(server: &Server, seed: &Seed) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("drums-guest-").tempdir();
        let folder = folder.map_err(|source| GuestError::Io {
            what: "create a folder in",
            path: std::env::temp_dir(),
            source,
        })?;
        let socket = folder.path().join("qmp");
        let mut process = command(server, seed, &write_seed(folder.path(), seed)?, &socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| GuestError::Start { source })?;
        let seen = Arc::new(Seen::default());
        // Owned from here on, so that whatever fails below ends the process.
        if let Some(serial) = process.stdout.take() {
            seen.clone().follow(serial, Seen::line);
        }
        if let Some(errors) = process.stderr.take() {
            seen.clone().follow(errors, Seen::line);
        }
        let mut guest = Started(Some(process));
        let qmp = Qmp::connect(&socket, &seen, STARTS_IN)?;
        let process = guest.0.take().expect("nobody took it");
        let mut guest = Self { process, qmp, seen, _folder: folder };
        guest.qmp.call(&guest.seen, "qmp_capabilities", &Value::Null, ANSWERS_IN)?;
        Ok(guest)
    }

    /// Everything that it said since it was started, over all its boots.
    pub fn console(&self) -> String {
        self.seen.console()
    }

    /// How much it has said: what comes later is looked for from here on.
    pub fn lines(&self) -> usize {
        self.seen.lines()
    }

    /// The first line from number `from` on that has `text` in it.
    pub fn says(&self, from: usize, text: &str, within: Duration) -> Result<String> {
        self.seen.wait(text, within, |state| state.lines.iter().skip(from).find(|l| l.contains(text)).cloned())
    }

    /// It powers itself off, or is off already.
    pub fn off(&self, within: Duration) -> Result<Off> {
        self.seen.wait("power-off", within, |state| state.off())
    }

    pub fn is_off(&self) -> bool {
        self.seen.look(|state| state.off().is_some())
    }

    /// As by its reset button: nothing in it is told.
    pub fn reset(&mut self) -> Result<()> {
        self.call("system_reset", &Value::Null)
    }

    /// No instruction of it is carried out until it is resumed: a kernel that hangs, as it is seen from outside.
    pub fn stop(&mut self) -> Result<()> {
        self.call("stop", &Value::Null)
    }

    pub fn resume(&mut self) -> Result<()> {
        self.call("cont", &Value::Null)
    }

    /// Takes its network away, as a cable that is pulled.
    pub fn cut(&mut self) -> Result<()> {
        self.call("set_link", &json!({ "name": "net0", "up": false }))
    }

    fn call(&mut self, command: &str, arguments: &Value) -> Result<()> {
        self.qmp.call(&self.seen, command, arguments, ANSWERS_IN)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

/// Between its start and the first word with it.
struct Started(Option<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(end);
    }
}

/// It may have ended by itself.
fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}

fn write_seed(folder: &Path, seed: &Seed) -> Result<PathBuf> {
    let at = folder.join("seed");
    std::fs::create_dir(&at).map_err(|source| GuestError::Io { what: "create", path: at.clone(), source })?;
    for (name, text) in [
        ("user-data", seed.user_data.clone()),
        ("vendor-data", seed.vendor_data.clone()),
        ("meta-data", format!("instance-id: {}\nlocal-hostname: host\n", seed.instance_id)),
    ] {
        let path = at.join(name);
        std::fs::write(&path, text).map_err(|source| GuestError::Io { what: "write", path, source })?;
    }
    Ok(at)
}

fn command(server: &Server, seed: &Seed, files: &Path, socket: &Path) -> Command {
    // A comma would end an option's value.
    let plain = |path: &Path| path.display().to_string().replace(',', ",,");
    let mut command = Command::new("setpriv");
    // Nothing is left of a test that dies.
    command.args([
        "--pdeathsig",
        "KILL",
        PROGRAM,
        "-machine",
        "q35,accel=tcg",
        "-cpu",
        "max",
        "-smp",
        "2",
        "-m",
        "768",
    ]);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]);
    // Off, it stays to be asked: its end is an event, and no process that is gone for whatever reason.
    command.args(["-action", "shutdown=pause,panic=pause"]);
    command.arg("-kernel").arg(server.kernel()).arg("-initrd").arg(server.initrd());
    command.args(["-append", &server.manifest.command_line]);
    command.arg("-drive").arg(format!("file={},format=raw,if=virtio,snapshot=on", plain(&server.disk())));
    let vvfat = "file.driver=vvfat,file.label=CIDATA,file.rw=off,format=raw,if=virtio,read-only=on";
    command.arg("-drive").arg(format!("{vvfat},file.dir={}", plain(files)));
    // 10.0.2.2 is this machine's loopback.
    command.args(["-netdev", "user,id=net0,ipv6=off", "-device", "virtio-net-pci,netdev=net0,romfile="]);
    command.args(["-device", "virtio-rng-pci"]);
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", plain(socket)));
    if let Some(clock) = &seed.clock {
        command.arg("-rtc").arg(format!("base={clock}"));
    }
    command
}
