//! `POST /execute`: runs a command and says what it said, in the words of OSWorld's guest server.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde::Deserialize;
use serde_json::json;

use crate::{children::Children, http::Response};

/// As in OSWorld's server.
const LIMIT: Duration = Duration::from_secs(120);
/// Per stream; what comes after it is read and dropped, and the answer says so.
const MAX_OUTPUT: usize = 4 * 1024 * 1024;

#[derive(Deserialize)]
struct Order {
    command: Words,
    #[serde(default)]
    shell: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Words {
    List(Vec<String>),
    Line(String),
}

pub fn execute(body: &[u8], children: &Children) -> Response {
    let order: Order = match serde_json::from_slice(body) {
        Ok(order) => order,
        Err(e) => {
            return Response::error(400, format!("the body is not {{\"command\":[..]|string,\"shell\":bool}}: {e}"));
        }
    };
    let words = match words(order) {
        Ok(words) => words,
        Err(why) => return Response::error(400, why),
    };
    match run(&words, children) {
        Ok(value) => Response::json(200, &value),
        Err(e) => Response::error(500, format!("{}: {e}", words[0])),
    }
}

/// The program and its arguments; never empty.
fn words(order: Order) -> Result<Vec<String>, String> {
    let shell = |line: String| vec!["/bin/sh".to_owned(), "-c".to_owned(), line];
    let words = match (order.command, order.shell) {
        (Words::Line(line), true) => shell(line),
        (Words::Line(line), false) => split(&line)?,
        (Words::List(list), true) => {
            let mut list = list.into_iter();
            let mut words = shell(list.next().unwrap_or_default());
            words.extend(list);
            words
        }
        (Words::List(list), false) => list,
    };
    if words.first().is_none_or(String::is_empty) {
        return Err("the command is empty".to_owned());
    }
    if words.iter().any(|w| w.contains('\0')) {
        return Err("the command holds a NUL byte".to_owned());
    }
    Ok(words)
}

/// Splits as a POSIX shell would, without expanding anything.
fn split(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_ascii_whitespace() => words.extend(word.take()),
            '\'' => {
                let w = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('\'') => break,
                        Some(c) => w.push(c),
                        None => return Err("the command has a quote without an end".to_owned()),
                    }
                }
            }
            '"' => {
                let w = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some(c @ ('"' | '\\' | '$' | '`')) => w.push(c),
                            Some(c) => w.extend(['\\', c]),
                            None => return Err("the command has a quote without an end".to_owned()),
                        },
                        Some(c) => w.push(c),
                        None => return Err("the command has a quote without an end".to_owned()),
                    }
                }
            }
            '\\' => match chars.next() {
                Some(c) => word.get_or_insert_default().push(c),
                None => return Err("the command ends in a backslash".to_owned()),
            },
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

fn run(words: &[String], children: &Children) -> io::Result<serde_json::Value> {
    let deadline = Instant::now() + LIMIT;
    let late = || io::Error::other(format!("did not end within {} s and was killed", LIMIT.as_secs()));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = children.start(&mut command)?;
    let mut streams =
        [Stream::new(child.stdout.take().map(OwnedFd::from)), Stream::new(child.stderr.take().map(OwnedFd::from))];
    let ended = match collect(&mut streams, deadline) {
        Ok(true) => children.wait(child.id(), deadline).ok_or_else(late),
        Ok(false) => Err(late()),
        Err(e) => Err(e),
    };
    let status = ended.inspect_err(|_| children.abandon(child.id()))?;
    let [out, err] = streams;
    Ok(json!({
        "status": "success",
        "output": String::from_utf8_lossy(&out.kept),
        "error": String::from_utf8_lossy(&err.kept),
        // As Python reports it: minus the signal for a process that one ended.
        "returncode": status.code().or_else(|| status.signal().map(|s| -s)),
        "truncated": out.dropped || err.dropped,
    }))
}

struct Stream {
    /// `None` after its end.
    source: Option<File>,
    kept: Vec<u8>,
    dropped: bool,
}

impl Stream {
    fn new(source: Option<OwnedFd>) -> Self {
        Self { source: source.map(File::from), kept: Vec::new(), dropped: false }
    }

    fn read_some(&mut self) -> io::Result<()> {
        let Some(source) = &mut self.source else { return Ok(()) };
        let mut chunk = [0; 16 * 1024];
        match source.read(&mut chunk) {
            Ok(0) => self.source = None,
            Ok(n) => {
                let room = MAX_OUTPUT - self.kept.len();
                self.dropped |= n > room;
                self.kept.extend_from_slice(&chunk[..n.min(room)]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }
}

/// Reads both streams to their ends, whichever speaks first; false when the time is over before.
fn collect(streams: &mut [Stream; 2], deadline: Instant) -> io::Result<bool> {
    loop {
        let open: Vec<usize> = (0..2).filter(|i| streams[*i].source.is_some()).collect();
        let left = deadline.saturating_duration_since(Instant::now());
        if open.is_empty() || left.is_zero() {
            return Ok(open.is_empty());
        }
        let mut polled: Vec<PollFd> = streams
            .iter()
            .filter_map(|s| s.source.as_ref())
            .map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN))
            .collect();
        match poll(&mut polled, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready: Vec<usize> =
            open.iter().zip(&polled).filter(|(_, p)| p.any().unwrap_or(true)).map(|(i, _)| *i).collect();
        for i in ready {
            streams[i].read_some()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_split_as_a_shell_would() {
        let split = |line| split(line).unwrap();
        assert_eq!(split("echo  a 'b c' \"d \\\"e\" f\\ g ''"), ["echo", "a", "b c", "d \"e", "f g", ""]);
        assert!(split("  ").is_empty());
    }

    #[test]
    fn a_line_without_an_end_and_an_empty_command_are_refused() {
        for line in ["a 'b", "a \"b", "a \\"] {
            assert!(split(line).is_err(), "{line}");
        }
        for body in ["{\"command\":[]}", "{\"command\":\"\"}", "{\"command\":[\"\"]}", "{\"command\":\"a\\u0000b\"}"] {
            assert!(words(serde_json::from_str(body).unwrap()).is_err(), "{body}");
        }
    }

    #[test]
    fn a_shell_gets_the_line_as_it_is() {
        let order = serde_json::from_str("{\"command\":\"a | b\",\"shell\":true}").unwrap();
        assert_eq!(words(order).unwrap(), ["/bin/sh", "-c", "a | b"]);
    }
}
