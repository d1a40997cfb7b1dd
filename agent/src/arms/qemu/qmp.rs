//! QEMU's machine protocol, by hand: the dozen commands used here. What they are used for, and in which order, is its
//! caller's business. Events are remembered (bounded) because some failures are told by an event alone.

mod wire;

use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    time::Duration,
};

use serde_json::{Value, json};

pub use self::wire::{Change, Question};
use self::wire::{Wire, clip};
use crate::probe::raw_us;

#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    #[error("QMP {doing}: the connection to QEMU failed")]
    Io {
        doing: String,
        #[source]
        source: io::Error,
    },
    #[error("QMP {doing}: QEMU closed the connection, so it has exited")]
    Closed { doing: String },
    #[error("QMP {doing}: no answer within {waited_ms} ms")]
    TimedOut { doing: String, waited_ms: u64 },
    #[error("QMP {doing}: QEMU said {class}: {desc}")]
    Refused { doing: String, class: String, desc: String },
    #[error("QMP {doing}: not the protocol: {why}")]
    Protocol { doing: String, why: String },
    #[error("the migration ended as {status}: {detail}")]
    Migration { status: String, detail: String },
}

/// A negotiated connection.
#[derive(Debug)]
pub struct Qmp {
    wire: Wire,
    version: String,
}

impl Qmp {
    /// Waits for the greeting and leaves capability negotiation. Every later command is bounded by `timeout` too.
    pub fn negotiate(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let mut wire = Wire::new(stream, timeout);
        let greeting = wire.greeting()?;
        let version = &greeting["QMP"]["version"]["qemu"];
        let number = |part: &str| version[part].as_u64();
        let (Some(a), Some(b), Some(c)) = (number("major"), number("minor"), number("micro")) else {
            let why = format!("the greeting is {}", clip(&greeting));
            return Err(QmpError::Protocol { doing: "greeting".to_owned(), why });
        };
        let mut q = Self { wire, version: format!("{a}.{b}.{c}") };
        q.change(Change::Negotiate, Value::Null)?;
        Ok(q)
    }

    /// As the greeting said it, for instance `7.2.22`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Names of the events seen so far, oldest first.
    pub fn events(&self) -> Vec<String> {
        self.wire.events().filter_map(|e| e["event"].as_str().map(str::to_owned)).collect()
    }

    fn change(&mut self, change: Change, arguments: Value) -> Result<(), QmpError> {
        self.wire.change(change, arguments, None).map(drop)
    }

    /// `running`, `paused`, `inmigrate`, `internal-error`, ...
    pub fn status(&mut self) -> Result<String, QmpError> {
        let v = self.wire.ask(Question::Status)?;
        Ok(v["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Is KVM really in use? What QEMU says of itself, not what was asked for.
    pub fn kvm_enabled(&mut self) -> Result<bool, QmpError> {
        Ok(self.wire.ask(Question::Kvm)?["enabled"].as_bool().unwrap_or(false))
    }

    pub fn stop(&mut self) -> Result<(), QmpError> {
        self.change(Change::Stop, Value::Null)
    }

    pub fn cont(&mut self) -> Result<(), QmpError> {
        self.change(Change::Continue, Value::Null)
    }

    /// QEMU answers and exits; an answer cut short by the exit counts too.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.change(Change::Quit, Value::Null) {
            Ok(()) | Err(QmpError::Closed { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    pub fn set_capability(&mut self, name: &str, on: bool) -> Result<(), QmpError> {
        let arguments = json!({"capabilities": [{"capability": name, "state": on}]});
        self.change(Change::SetCapabilities, arguments)
    }

    pub fn capability(&mut self, name: &str) -> Result<bool, QmpError> {
        let all = self.wire.ask(Question::Capabilities)?;
        let found = all.as_array().and_then(|a| a.iter().find(|c| c["capability"] == name).cloned());
        Ok(found.is_some_and(|c| c["state"] == true))
    }

    /// Hands `fd` over under `name`; QEMU keeps its own copy.
    pub fn give_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.wire.change(Change::TakeDescriptor, json!({"fdname": name}), Some(fd)).map(drop)
    }

    pub fn migrate(&mut self, uri: &str) -> Result<(), QmpError> {
        self.change(Change::Migrate, json!({"uri": uri}))
    }

    pub fn migrate_incoming(&mut self, uri: &str) -> Result<(), QmpError> {
        self.change(Change::MigrateIncoming, json!({"uri": uri}))
    }

    /// Waits until the migration in progress is over; anything but `completed` is an error with QEMU's reason.
    pub fn wait_migration(&mut self, limit: Duration) -> Result<(), QmpError> {
        let deadline = raw_us() + limit.as_micros() as u64;
        loop {
            let v = self.wire.ask(Question::Migration)?;
            match v["status"].as_str().unwrap_or("none") {
                "completed" => return Ok(()),
                status @ ("failed" | "cancelled") => {
                    let detail = v["error-desc"].as_str().unwrap_or("QEMU gave no reason").to_owned();
                    return Err(QmpError::Migration { status: status.to_owned(), detail });
                }
                status if raw_us() >= deadline => {
                    let detail = format!("not over after {} ms", limit.as_millis());
                    return Err(QmpError::Migration { status: status.to_owned(), detail });
                }
                // QEMU tells the end by an event only when the `events` capability is on in both; asking is one
                // round trip of some 100 us and needs no capability.
                _ => std::thread::park_timeout(Duration::from_millis(1)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _, Write as _},
        os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
        thread::JoinHandle,
    };

    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;

    /// A peer that greets, takes one line per script entry (which must contain the first text) and answers the second
    /// with ID replaced.
    fn peer(script: Vec<(&'static str, &'static str)>) -> (UnixStream, JoinHandle<()>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let t = std::thread::spawn(move || {
            let mut w = theirs.try_clone().unwrap();
            writeln!(w, "{GREETING}").unwrap();
            let mut lines = BufReader::new(theirs).lines();
            let caps = ("qmp_capabilities", r#"{"return": {}, "id": ID}"#);
            for (want, say) in std::iter::once(caps).chain(script) {
                let line = lines.next().unwrap().unwrap();
                assert!(line.contains(want), "{line} lacks {want}");
                let id = serde_json::from_str::<Value>(&line).unwrap()["id"].to_string();
                w.write_all(say.replace("ID", &id).as_bytes()).unwrap();
                w.write_all(b"\n").unwrap();
            }
        });
        (ours, t)
    }

    fn client(script: Vec<(&'static str, &'static str)>) -> (Qmp, JoinHandle<()>) {
        let (s, t) = peer(script);
        (Qmp::negotiate(s, Duration::from_secs(5)).unwrap(), t)
    }

    /// Whatever QEMU says, in any pieces, is an answer, an event or an error within the time limit.
    #[test]
    fn fuzz_the_monitor() {
        let script = [
            GREETING,
            r#"{"return": {}, "id": 1}"#,
            r#"{"event": "STOP"}"#,
            r#"{"return": {"status": "running"}, "id": 2}"#,
        ];
        let refused =
            [GREETING, r#"{"return": {}, "id": 1}"#, r#"{"error": {"class": "GenericError", "desc": "no"}, "id": 2}"#];
        let seeds = [&script[..], &refused].map(|lines| lines.join("\n").into_bytes());
        drums_fuzz::decoder!(seeds.to_vec(), |bytes: &[u8]| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            // All that it will ever say, then the end: nothing waits.
            (&theirs).write_all(bytes).unwrap();
            (&theirs).write_all(b"\n").unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            if let Ok(mut qmp) = Qmp::negotiate(ours, Duration::from_secs(5)) {
                let _ = qmp.status();
                let _ = qmp.wait_migration(Duration::from_millis(1));
                let _ = qmp.events();
            }
        });
    }

    #[test]
    fn greeting_and_commands() {
        let (mut q, t) = client(vec![
            ("query-status", r#"{"return": {"status": "running", "running": true}, "id": ID}"#),
            ("query-kvm", r#"{"return": {"enabled": false, "present": true}, "id": ID}"#),
        ]);
        assert_eq!(q.version(), "7.2.22");
        assert_eq!(q.status().unwrap(), "running");
        assert!(!q.kvm_enabled().unwrap());
        t.join().unwrap();
    }

    #[test]
    fn events_between_are_kept_and_not_taken_for_answers() {
        let (mut q, t) = client(vec![(
            "cont",
            "{\"event\": \"RESUME\", \"timestamp\": {}}\n{\"event\": \"STOP\", \"timestamp\": {}}\n{\"return\": {}, \"id\": ID}",
        )]);
        q.cont().unwrap();
        assert_eq!(q.events(), ["RESUME", "STOP"]);
        t.join().unwrap();
    }

    #[test]
    fn refusals_name_command_and_reason() {
        let (mut q, t) = client(vec![(
            "migrate-incoming",
            r#"{"error": {"class": "GenericError", "desc": "'-incoming' was not specified"}, "id": ID}"#,
        )]);
        let e = q.migrate_incoming("fd:state").unwrap_err().to_string();
        assert!(e.contains("migrate-incoming") && e.contains("was not specified"), "{e}");
        t.join().unwrap();
    }

    #[test]
    fn a_failed_migration_is_an_error_with_its_reason() {
        let (mut q, t) = client(vec![
            ("query-migrate", r#"{"return": {"status": "active"}, "id": ID}"#),
            ("query-migrate", r#"{"return": {"status": "failed", "error-desc": "Unable to write"}, "id": ID}"#),
        ]);
        let e = q.wait_migration(Duration::from_secs(5)).unwrap_err().to_string();
        assert!(e.contains("failed") && e.contains("Unable to write"), "{e}");
        t.join().unwrap();
    }

    #[test]
    fn silence_closing_and_garbage_are_told_apart() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let e = Qmp::negotiate(ours, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(e, QmpError::TimedOut { .. }), "{e}");
        drop(theirs);
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let e = Qmp::negotiate(ours, Duration::from_secs(5)).unwrap_err();
        assert!(matches!(e, QmpError::Closed { .. }), "{e}");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"hello\n").unwrap();
        let e = Qmp::negotiate(ours, Duration::from_secs(5)).unwrap_err();
        assert!(matches!(e, QmpError::Protocol { .. }), "{e}");
        let (mut q, t) = client(vec![("query-status", r#"{"return": {}, "id": 999}"#)]);
        assert!(matches!(q.status().unwrap_err(), QmpError::Protocol { .. }));
        t.join().unwrap();
    }

    #[test]
    fn quit_may_be_answered_by_the_end() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let t = std::thread::spawn(move || {
            let mut w = theirs.try_clone().unwrap();
            writeln!(w, "{GREETING}").unwrap();
            let mut lines = BufReader::new(theirs).lines();
            lines.next().unwrap().unwrap();
            writeln!(w, r#"{{"return": {{}}, "id": 1}}"#).unwrap();
            lines.next().unwrap().unwrap();
        });
        let mut q = Qmp::negotiate(ours, Duration::from_secs(5)).unwrap();
        q.quit().unwrap();
        t.join().unwrap();
    }

    #[test]
    fn a_descriptor_arrives_with_its_command() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let t = std::thread::spawn(move || {
            let mut w = theirs.try_clone().unwrap();
            writeln!(w, "{GREETING}").unwrap();
            let mut reader = BufReader::new(theirs.try_clone().unwrap());
            reader.read_line(&mut String::new()).unwrap();
            writeln!(w, r#"{{"return": {{}}, "id": 1}}"#).unwrap();
            let mut bytes = [0; 512];
            let mut iov = [io::IoSliceMut::new(&mut bytes)];
            let mut space = nix::cmsg_space!([i32; 1]);
            let m = recvmsg::<()>(theirs.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::empty()).unwrap();
            let Some(ControlMessageOwned::ScmRights(fds)) = m.cmsgs().unwrap().next() else { panic!("no descriptor") };
            // SAFETY: the kernel has just installed this descriptor for us and nothing else owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fds[0]) };
            std::fs::File::from(fd).write_all(b"state").unwrap();
            writeln!(w, r#"{{"return": {{}}, "id": 2}}"#).unwrap();
        });
        let mut q = Qmp::negotiate(ours, Duration::from_secs(5)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        q.give_fd("state", file.as_fd()).unwrap();
        t.join().unwrap();
        let mut text = String::new();
        io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "state");
    }
}
