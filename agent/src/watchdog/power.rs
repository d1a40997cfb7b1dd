//! How a machine is powered off, whatever hangs on it: asked first, then told, then done.
//!
//! Off and not halted: a halted machine is paid for.

use std::{
    fs, io,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use super::decide::Why;
use crate::measure::clock::pause_before_looking_again;

/// The ways, and how long each is given before the next one: 60 seconds in all. The first lets services end, the second
/// ends them; for a machine on which the service manager itself hangs there are [`Machine::reboot`] and [`Machine::sysrq`].
const ASKED: [(&[&str], Duration); 2] = [
    (&["systemctl", "--no-block", "poweroff"], Duration::from_secs(40)),
    (&["systemctl", "--no-block", "--force", "poweroff"], Duration::from_secs(20)),
];

/// What ends this host: the machine, or in tests a program that says so.
pub enum PowerOff {
    ThisMachine,
    Program(PathBuf),
}

impl PowerOff {
    /// Comes back from a machine only if nothing worked: whoever runs this watchdog starts it again, and it tries again.
    pub fn now(&self, why: Why) -> io::Result<()> {
        match self {
            Self::ThisMachine => {
                // On a thread of its own: a log that hangs must not hold this up.
                let _ = std::thread::Builder::new().spawn(move || tracing::error!(%why, "this host is powered off"));
                power_off(&mut ThisMachine)
            }
            Self::Program(program) => {
                tracing::warn!(%why, program = %program.display(), "a test's program is run instead of powering off");
                let status = Command::new(program).arg(why.to_string()).stdin(Stdio::null()).status()?;
                if status.success() { Ok(()) } else { Err(io::Error::other(format!("it ended with {status}"))) }
            }
        }
    }
}

/// What the ways need of a machine.
trait Machine {
    /// Starts a program and does not wait for it: it may hang as all else does. False if it cannot be started.
    fn start(&mut self, argv: &[&str]) -> bool;
    fn pause(&mut self, time: Duration);
    /// reboot(2); comes back only on failure.
    fn reboot(&mut self) -> io::Error;
    /// The kernel's own key, which works where reboot(2) was taken away.
    fn sysrq(&mut self) -> io::Result<()>;
}

fn power_off(machine: &mut dyn Machine) -> io::Result<()> {
    for (argv, patience) in ASKED {
        if machine.start(argv) {
            machine.pause(patience);
        }
    }
    // Nothing is synced: what counts is on the disk already, and a disk that hangs would hold this up for ever.
    let refused = machine.reboot();
    machine.sysrq().map_err(|e| io::Error::new(e.kind(), format!("reboot(2): {refused}; the kernel's key: {e}")))
}

struct ThisMachine;

impl Machine for ThisMachine {
    fn start(&mut self, argv: &[&str]) -> bool {
        let mut command = Command::new(argv[0]);
        command.args(&argv[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().is_ok()
    }

    fn pause(&mut self, time: Duration) {
        pause_before_looking_again(time);
    }

    fn reboot(&mut self) -> io::Error {
        match nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF) {
            Ok(never) => match never {},
            Err(e) => e.into(),
        }
    }

    fn sysrq(&mut self) -> io::Result<()> {
        fs::write("/proc/sysrq-trigger", "o")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which nothing works, or nothing but the last.
    struct Stubborn {
        starts: bool,
        sysrq_works: bool,
        did: Vec<String>,
        waited: Duration,
    }

    impl Machine for Stubborn {
        fn start(&mut self, argv: &[&str]) -> bool {
            self.did.push(argv.join(" "));
            self.starts
        }
        fn pause(&mut self, time: Duration) {
            self.waited += time;
        }
        fn reboot(&mut self) -> io::Error {
            self.did.push("reboot".to_owned());
            io::ErrorKind::PermissionDenied.into()
        }
        fn sysrq(&mut self) -> io::Result<()> {
            self.did.push("sysrq".to_owned());
            if self.sysrq_works { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        }
    }

    #[test]
    fn every_way_is_tried_within_its_bound_whatever_hangs() {
        let ways = ["systemctl --no-block poweroff", "systemctl --no-block --force poweroff", "reboot", "sysrq"];
        for (starts, waited) in [(true, Duration::from_secs(60)), (false, Duration::ZERO)] {
            let mut machine = Stubborn { starts, sysrq_works: true, did: Vec::new(), waited: Duration::ZERO };
            power_off(&mut machine).unwrap();
            assert_eq!((machine.did.as_slice(), machine.waited), (ways.map(str::to_owned).as_slice(), waited));
        }
        let mut machine = Stubborn { starts: true, sysrq_works: false, did: Vec::new(), waited: Duration::ZERO };
        let said = power_off(&mut machine).unwrap_err().to_string();
        assert!(said.contains("reboot(2)") && said.contains("key"), "{said}");
    }
}
