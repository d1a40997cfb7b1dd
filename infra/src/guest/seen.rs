//! What was seen of a guest so far, and waiting for more of it.

use std::{
    io::{BufRead as _, BufReader, Read},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;

use super::{GuestError, Off, Result};

/// Lines of the serial line that an error shows.
const SHOWN: usize = 30;

#[derive(Debug, Default)]
pub struct Seen {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
pub struct State {
    pub lines: Vec<String>,
    /// Of the monitor: greetings, answers and events, each with when it came.
    pub monitor: Vec<(SystemTime, Value)>,
    /// No more will come: the process has ended.
    pub ended: bool,
}

impl State {
    pub fn off(&self) -> Option<Off> {
        let (at, said) = self.monitor.iter().find(|(_, said)| said["event"] == "SHUTDOWN")?;
        Some(Off { at: *at, reason: said["data"]["reason"].as_str().unwrap_or_default().to_owned() })
    }
}

impl Seen {
    /// Reads on a thread of its own until there is no more: whoever waits is not to hold up the guest.
    pub fn follow(self: Arc<Self>, from: impl Read + Send + 'static, each: fn(&mut State, String)) {
        std::thread::spawn(move || {
            let mut reader = BufReader::new(from);
            let mut bytes = Vec::new();
            while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                each(&mut self.lock(), text);
                self.more.notify_all();
                bytes.clear();
            }
            self.lock().ended = true;
            self.more.notify_all();
        });
    }

    pub fn line(state: &mut State, text: String) {
        state.lines.push(text);
    }

    pub fn monitor(state: &mut State, text: String) {
        if let Ok(said) = serde_json::from_str(&text) {
            state.monitor.push((SystemTime::now(), said));
        }
    }

    /// Until `find` finds it.
    pub fn wait<T>(&self, what: &str, within: Duration, find: impl Fn(&State) -> Option<T>) -> Result<T> {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = find(&state) {
                return Ok(found);
            }
            if state.ended {
                return Err(GuestError::Ended { said: last(&state) });
            }
            let Some(left) = within.checked_sub(begun.elapsed()) else {
                return Err(GuestError::NotSeen { what: what.to_owned(), waited: within, last: last(&state) });
            };
            state = self.more.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn look<T>(&self, at: impl Fn(&State) -> T) -> T {
        at(&self.lock())
    }

    pub fn console(&self) -> String {
        self.lock().lines.join("\n")
    }

    pub fn lines(&self) -> usize {
        self.lock().lines.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn last(state: &State) -> String {
    state.lines[state.lines.len().saturating_sub(SHOWN)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_was_said_before_is_seen_and_what_never_comes_is_told_with_the_last_words() {
        let seen = Arc::new(Seen::default());
        let (reader, writer) = std::io::pipe().unwrap();
        seen.clone().follow(reader, Seen::line);
        std::io::Write::write_all(&mut (&writer), b"one\r\ntwo \xff\n").unwrap();
        let two = |state: &State| state.lines.iter().find(|l| l.contains("two")).cloned();
        assert_eq!(seen.wait("two", LONG, two).unwrap(), "two \u{fffd}");
        let never = seen.wait("three", Duration::from_millis(20), |_| None::<()>).unwrap_err().to_string();
        assert!(never.contains("three was not seen") && never.contains("one"), "{never}");
        // Nobody waits for what has ended.
        drop(writer);
        let ended = seen.wait("three", LONG, |_| None::<()>).unwrap_err();
        assert!(matches!(ended, GuestError::Ended { .. }), "{ended}");
    }

    #[test]
    fn off_is_an_event_of_the_monitor_and_not_a_word_of_the_guest() {
        let mut state = State::default();
        Seen::line(&mut state, r#"{"event":"SHUTDOWN","data":{"reason":"guest-shutdown"}}"#.to_owned());
        Seen::monitor(&mut state, r#"{"event":"STOP"}"#.to_owned());
        assert!(state.off().is_none());
        Seen::monitor(&mut state, r#"{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"}}"#.to_owned());
        assert_eq!(state.off().unwrap().reason, "guest-shutdown");
    }
}
