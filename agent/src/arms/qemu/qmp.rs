//! QEMU's machine protocol, by hand: JSON lines over a Unix stream, one command at a time, an id on each, every wait
//! bounded, descriptors by SCM_RIGHTS.
//!
//! It knows the protocol and the dozen commands used here. What they are used for, and in which order, is its caller's
//! business. Events are remembered (bounded) because some failures are told by an event alone.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read as _, Write as _},
    os::{
        fd::{AsRawFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

use crate::probe::raw_us;

/// The longest line accepted; QEMU's own answers to the commands here are a few KiB.
const MAX_LINE: usize = 4 << 20;
const MAX_EVENTS: usize = 64;

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
    stream: UnixStream,
    inbox: Vec<u8>,
    next_id: u64,
    timeout: Duration,
    version: String,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Waits for the greeting and leaves capability negotiation. Every later command is bounded by `timeout` too.
    pub fn negotiate(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let mut q =
            Self { stream, inbox: Vec::new(), next_id: 1, timeout, version: String::new(), events: VecDeque::new() };
        let deadline = raw_us() + timeout.as_micros() as u64;
        let greeting = q.line("greeting", deadline, timeout)?;
        let version = &greeting["QMP"]["version"]["qemu"];
        let number = |part: &str| version[part].as_u64();
        match (number("major"), number("minor"), number("micro")) {
            (Some(a), Some(b), Some(c)) => q.version = format!("{a}.{b}.{c}"),
            _ => {
                let why = format!("the greeting is {}", clip(&greeting));
                return Err(QmpError::Protocol { doing: "greeting".to_owned(), why });
            }
        }
        q.command("qmp_capabilities", Value::Null)?;
        Ok(q)
    }

    /// As the greeting said it, for instance `7.2.22`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Names of the events seen so far, oldest first.
    pub fn events(&self) -> Vec<String> {
        self.events.iter().filter_map(|e| e["event"].as_str().map(str::to_owned)).collect()
    }

    /// One command, its answer.
    pub fn command(&mut self, name: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(name, arguments, None)
    }

    /// One command with a descriptor attached.
    fn send(&mut self, name: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> Result<Value, QmpError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({"execute": name, "id": id});
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(b'\n');
        let io = |source: io::Error| match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed { doing: name.to_owned() },
            _ => QmpError::Io { doing: name.to_owned(), source },
        };
        self.stream.set_write_timeout(Some(self.timeout)).map_err(io)?;
        let mut sent = 0;
        if let Some(fd) = fd {
            let fds = [fd.as_raw_fd()];
            // The descriptor travels with the first bytes; the rest of the line follows as plain data.
            sent = sendmsg::<()>(
                self.stream.as_raw_fd(),
                &[IoSlice::new(&bytes)],
                &[ControlMessage::ScmRights(&fds)],
                MsgFlags::MSG_NOSIGNAL,
                None,
            )
            .map_err(|e| io(e.into()))?;
        }
        self.stream.write_all(&bytes[sent..]).map_err(io)?;
        let deadline = raw_us() + self.timeout.as_micros() as u64;
        loop {
            let answer = self.line(name, deadline, self.timeout)?;
            if answer["event"].is_string() {
                continue;
            }
            if let Some(error) = answer.get("error") {
                let text = |key: &str| error[key].as_str().unwrap_or("?").to_owned();
                return Err(QmpError::Refused { doing: name.to_owned(), class: text("class"), desc: text("desc") });
            }
            if answer["id"].as_u64() != Some(id) {
                let why = format!("an answer for another command: {}", clip(&answer));
                return Err(QmpError::Protocol { doing: name.to_owned(), why });
            }
            match answer.get("return") {
                Some(v) => return Ok(v.clone()),
                None => {
                    let why = format!("neither return nor error in {}", clip(&answer));
                    return Err(QmpError::Protocol { doing: name.to_owned(), why });
                }
            }
        }
    }

    /// The next line, which is remembered when it is an event.
    fn line(&mut self, doing: &str, deadline_us: u64, allowed: Duration) -> Result<Value, QmpError> {
        loop {
            if let Some(end) = self.inbox.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.inbox.drain(..=end).collect();
                let value: Value = serde_json::from_slice(&line).map_err(|e| QmpError::Protocol {
                    doing: doing.to_owned(),
                    why: format!("{e} in {:?}", String::from_utf8_lossy(&line[..line.len().min(200)])),
                })?;
                if value["event"].is_string() {
                    if self.events.len() == MAX_EVENTS {
                        self.events.pop_front();
                    }
                    self.events.push_back(value.clone());
                }
                return Ok(value);
            }
            if self.inbox.len() > MAX_LINE {
                let why = format!("a line longer than {MAX_LINE} bytes");
                return Err(QmpError::Protocol { doing: doing.to_owned(), why });
            }
            let left = deadline_us.saturating_sub(raw_us());
            let timed_out = || QmpError::TimedOut { doing: doing.to_owned(), waited_ms: allowed.as_millis() as u64 };
            if left == 0 {
                return Err(timed_out());
            }
            let io = |source| QmpError::Io { doing: doing.to_owned(), source };
            self.stream.set_read_timeout(Some(Duration::from_micros(left))).map_err(io)?;
            let mut chunk = [0; 8192];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(QmpError::Closed { doing: doing.to_owned() }),
                Ok(n) => self.inbox.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(timed_out());
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(QmpError::Closed { doing: doing.to_owned() });
                }
                Err(source) => return Err(io(source)),
            }
        }
    }

    /// `running`, `paused`, `inmigrate`, `internal-error`, ...
    pub fn status(&mut self) -> Result<String, QmpError> {
        let v = self.command("query-status", Value::Null)?;
        Ok(v["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Is KVM really in use? What QEMU says of itself, not what was asked for.
    pub fn kvm_enabled(&mut self) -> Result<bool, QmpError> {
        Ok(self.command("query-kvm", Value::Null)?["enabled"].as_bool().unwrap_or(false))
    }

    pub fn stop(&mut self) -> Result<(), QmpError> {
        self.command("stop", Value::Null).map(drop)
    }

    pub fn cont(&mut self) -> Result<(), QmpError> {
        self.command("cont", Value::Null).map(drop)
    }

    pub fn powerdown(&mut self) -> Result<(), QmpError> {
        self.command("system_powerdown", Value::Null).map(drop)
    }

    /// QEMU answers and exits; an answer cut short by the exit counts too.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.command("quit", Value::Null) {
            Ok(_) | Err(QmpError::Closed { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    pub fn set_capability(&mut self, name: &str, on: bool) -> Result<(), QmpError> {
        let arguments = json!({"capabilities": [{"capability": name, "state": on}]});
        self.command("migrate-set-capabilities", arguments).map(drop)
    }

    pub fn capability(&mut self, name: &str) -> Result<bool, QmpError> {
        let all = self.command("query-migrate-capabilities", Value::Null)?;
        let found = all.as_array().and_then(|a| a.iter().find(|c| c["capability"] == name).cloned());
        Ok(found.is_some_and(|c| c["state"] == true))
    }

    /// Hands `fd` over under `name`; QEMU keeps its own copy.
    pub fn give_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.send("getfd", json!({"fdname": name}), Some(fd)).map(drop)
    }

    pub fn migrate(&mut self, uri: &str) -> Result<(), QmpError> {
        self.command("migrate", json!({"uri": uri})).map(drop)
    }

    pub fn migrate_incoming(&mut self, uri: &str) -> Result<(), QmpError> {
        self.command("migrate-incoming", json!({"uri": uri})).map(drop)
    }

    /// Waits until the migration in progress is over; anything but `completed` is an error with QEMU's reason.
    pub fn wait_migration(&mut self, limit: Duration) -> Result<(), QmpError> {
        let deadline = raw_us() + limit.as_micros() as u64;
        loop {
            let v = self.command("query-migrate", Value::Null)?;
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

fn clip(v: &Value) -> String {
    v.to_string().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        os::fd::{AsFd as _, FromRawFd as _, OwnedFd},
        thread::JoinHandle,
    };

    use nix::sys::socket::{ControlMessageOwned, recvmsg};

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
