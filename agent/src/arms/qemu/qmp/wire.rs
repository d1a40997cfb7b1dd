//! The connection itself: JSON lines over a Unix stream, one command at a time, an id on each, every wait bounded,
//! descriptors by SCM_RIGHTS.
//!
//! There are two ways to send, and no third: [`Wire::ask`] for what changes nothing, [`Wire::change`] for what changes
//! QEMU or its machine, which puts a fault window before and after it.

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

use super::QmpError;
use crate::{probe::raw_us, windows::around};

/// The longest line accepted; QEMU's own answers to the commands here are a few KiB.
const MAX_LINE: usize = 4 << 20;
const MAX_EVENTS: usize = 64;

/// Changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Status,
    Kvm,
    Capabilities,
    Migration,
}

impl Question {
    fn command(self) -> &'static str {
        match self {
            Self::Status => "query-status",
            Self::Kvm => "query-kvm",
            Self::Capabilities => "query-migrate-capabilities",
            Self::Migration => "query-migrate",
        }
    }
}

/// Changes QEMU or its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Negotiate,
    Stop,
    Continue,
    Quit,
    SetCapabilities,
    TakeDescriptor,
    Migrate,
    MigrateIncoming,
}

impl Change {
    fn command(self) -> &'static str {
        match self {
            Self::Negotiate => "qmp_capabilities",
            Self::Stop => "stop",
            Self::Continue => "cont",
            Self::Quit => "quit",
            Self::SetCapabilities => "migrate-set-capabilities",
            Self::TakeDescriptor => "getfd",
            Self::Migrate => "migrate",
            Self::MigrateIncoming => "migrate-incoming",
        }
    }

    /// What its fault windows are called.
    fn window(self) -> &'static str {
        match self {
            Self::Negotiate => "qmp-negotiate",
            Self::Stop => "qmp-stop",
            Self::Continue => "qmp-continue",
            Self::Quit => "qmp-quit",
            Self::SetCapabilities => "qmp-set-capabilities",
            Self::TakeDescriptor => "qmp-take-descriptor",
            Self::Migrate => "qmp-migrate",
            Self::MigrateIncoming => "qmp-migrate-incoming",
        }
    }
}

#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    inbox: Vec<u8>,
    next_id: u64,
    timeout: Duration,
    events: VecDeque<Value>,
}

impl Wire {
    /// Every wait is bounded by `timeout`.
    pub(super) fn new(stream: UnixStream, timeout: Duration) -> Self {
        Self { stream, inbox: Vec::new(), next_id: 1, timeout, events: VecDeque::new() }
    }

    /// The first line that QEMU says, unasked.
    pub(super) fn greeting(&mut self) -> Result<Value, QmpError> {
        self.line("greeting", raw_us() + self.timeout.as_micros() as u64, self.timeout)
    }

    pub(super) fn ask(&mut self, question: Question) -> Result<Value, QmpError> {
        self.send(question.command(), Value::Null, None)
    }

    pub(super) fn change(
        &mut self,
        change: Change,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        around(change.window(), || self.send(change.command(), arguments, fd))
    }

    pub(super) fn events(&self) -> impl Iterator<Item = &Value> {
        self.events.iter()
    }

    /// One command, with a descriptor attached if need be, and its answer.
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
}

pub(super) fn clip(v: &Value) -> String {
    v.to_string().chars().take(200).collect()
}
