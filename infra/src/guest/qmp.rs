//! QEMU's monitor: a dozen commands, one line of JSON each.

use std::{io::Write as _, os::unix::net::UnixStream, path::Path, sync::Arc, time::Duration};

use serde_json::{Value, json};

use super::{GuestError, Result, seen::Seen};

#[derive(Debug)]
pub struct Qmp {
    to: UnixStream,
    next: u64,
}

impl Qmp {
    /// QEMU makes its socket some time after its start; there is no event to wait for but its end.
    pub fn connect(socket: &Path, seen: &Arc<Seen>, within: Duration) -> Result<Self> {
        let failed = |source| GuestError::Io { what: "speak to QEMU at", path: socket.to_owned(), source };
        let begun = std::time::Instant::now();
        let to = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(e) if begun.elapsed() >= within => return Err(failed(e)),
                // Its end, if it comes, ends this; that nothing is seen meanwhile is what is expected.
                Err(_) => {
                    let looked = seen.wait("QEMU's socket", Duration::from_millis(20), |_| None::<()>);
                    if let Err(ended @ GuestError::Ended { .. }) = looked {
                        return Err(ended);
                    }
                }
            }
        };
        let from = to.try_clone().map_err(failed)?;
        seen.clone().follow(from, Seen::monitor);
        Ok(Self { to, next: 0 })
    }

    /// Sends it, and comes back when it was carried out.
    pub fn call(&mut self, seen: &Seen, command: &str, arguments: &Value, within: Duration) -> Result<()> {
        self.next += 1;
        let id = self.next;
        let mut asked = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            asked["arguments"] = arguments.clone();
        }
        let sent = self.to.write_all(format!("{asked}\n").as_bytes());
        sent.map_err(|source| GuestError::Refused { command: command.to_owned(), why: source.to_string() })?;
        let answer = seen.wait(&format!("QEMU's answer to {command}"), within, |state| {
            state.monitor.iter().map(|(_, said)| said).find(|said| said["id"] == id).cloned()
        })?;
        match answer.get("error") {
            None => Ok(()),
            Some(why) => Err(GuestError::Refused { command: command.to_owned(), why: why["desc"].to_string() }),
        }
    }
}
