//! Processes as /proc shows them, and how they end.

use std::{
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt as _},
    path::Path,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::time::{TimeSpec, TimeValLike as _},
};

use super::clock;
use crate::steps::Inode;

/// The fields of /proc/PID/stat that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub state: u8,
    pub ppid: u32,
    /// Clock ticks after boot.
    pub start: u64,
}

impl Stat {
    /// Ended but not reaped.
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// `None` when there is no such process.
pub fn stat(pid: i32) -> io::Result<Option<Stat>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(e) if is_gone(&e) => return Ok(None),
        Err(e) => return Err(e),
    };
    parse_stat(&text)
        .map(Some)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat reads {text:?}")))
}

fn is_gone(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The second field is a name in parentheses that may hold anything, so count from its last `)`.
    let mut rest = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = *rest.next()?.as_bytes().first()?;
    let ppid = rest.next()?.parse().ok()?;
    // Field 22; `rest` stands at field 5.
    let start = rest.nth(17)?.parse().ok()?;
    Some(Stat { state, ppid, start })
}

/// Waits until the process has ended; false when `deadline_us` (CLOCK_MONOTONIC_RAW) came first.
pub fn wait_ended(pidfd: &impl AsFd, deadline_us: u64) -> io::Result<bool> {
    loop {
        let left = deadline_us.saturating_sub(clock::raw_us());
        let limit = TimeSpec::microseconds(i64::try_from(left).unwrap_or(i64::MAX / 2));
        match ppoll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], Some(limit), None) {
            Ok(0) if left == 0 => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

/// True if the process has ended.
pub fn has_ended(pidfd: &impl AsFd) -> bool {
    wait_ended(pidfd, 0).unwrap_or(true)
}

/// Children of this (single-threaded) process.
pub fn children_of_self() -> io::Result<Vec<i32>> {
    let text = fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id()))?;
    Ok(text.split_ascii_whitespace().filter_map(|p| p.parse().ok()).collect())
}

/// Which file or folder a path names now, itself and not what it links to; none when nothing is there.
pub fn inode(path: &Path) -> io::Result<Option<Inode>> {
    match path.symlink_metadata() {
        Ok(m) => Ok(Some(Inode { device: m.dev(), inode: m.ino() })),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let text = "42 (a) b (c)) S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2\n";
        assert_eq!(parse_stat(text), Some(Stat { state: b'S', ppid: 7, start: 98_765 }));
        assert_eq!(parse_stat("42 (cut"), None);
    }

    #[test]
    fn we_exist_and_pid_zero_does_not() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(!stat(me).unwrap().unwrap().is_zombie());
        assert_eq!(stat(i32::MAX).unwrap(), None);
    }
}
