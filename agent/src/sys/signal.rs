//! Signals: the one place of this crate that sends any to a process that it names (a test holds the rest to that). What
//! a number may never lead to is refused here, before the kernel is asked: pid 1, the caller itself, and the numbers that
//! mean a whole group or everybody.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use super::{SysError, clock, procfs};
use crate::steps::Process;

/// 0 means the caller's group, -1 everybody, other negative numbers a group.
fn refuse(pid: i32) -> io::Result<()> {
    let why = match pid {
        ..=0 => "is no process",
        1 => "is the machine's own and never ours",
        _ if pid.unsigned_abs() == std::process::id() => "is this process itself",
        _ => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("pid {pid} {why}")))
}

/// A descriptor that names exactly this process, also after its pid is reused.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    refuse(pid)?;
    // SAFETY: plain system call; on success it yields a new descriptor (close-on-exec) that nobody else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        #[allow(clippy::cast_possible_truncation)] // descriptors are ints
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Signals through the descriptor; a process that has ended is fine.
pub fn send(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: plain system call on a descriptor that lives through it; no info structure is passed.
    let r = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, std::ptr::null::<libc::siginfo_t>(), 0)
    };
    if r == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        e => Err(e),
    }
}

/// Kills exactly that process and waits for its end; a reused pid is left alone.
pub fn kill_exactly(process: Process, timeout_ms: u64) -> Result<(), SysError> {
    let Process { pid, start } = process;
    if let Err(e) = refuse(pid) {
        return Err(SysError::Refused { op: "kill", why: e.to_string() });
    }
    let fail = |op: &'static str| move |e: io::Error| SysError::os(op, format!("pid {pid}"), e);
    let pidfd = match open(pid) {
        Ok(fd) => fd,
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        Err(e) => return Err(fail("open")(e)),
    };
    // The descriptor first, then the look: both are of the same process.
    match procfs::stat(pid).map_err(fail("look up"))? {
        Some(stat) if stat.start == start && !stat.is_zombie() => {}
        _ => return Ok(()),
    }
    send(&pidfd, libc::SIGKILL).map_err(fail("kill"))?;
    let deadline = clock::raw_us().saturating_add(timeout_ms.saturating_mul(1_000));
    if procfs::wait_ended(&pidfd, deadline).map_err(fail("wait for"))? {
        return Ok(());
    }
    Err(SysError::Deadline { what: format!("the end of pid {pid}"), waited_ms: timeout_ms })
}

/// Kills the process group that a child of ours leads. The caller must not have reaped the child: its number is then
/// still its own.
pub fn kill_group(leader: u32) -> io::Result<()> {
    let pid = i32::try_from(leader).unwrap_or(0);
    refuse(pid)?;
    // SAFETY: plain numbers; below -1, so one group is meant.
    if unsafe { libc::kill(-pid, libc::SIGKILL) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Numbers that no row of a ledger, no file of a tool and no message may lead to a signal with.
    const NEVER: [i32; 5] = [1, 0, -1, -2, i32::MIN];

    #[test]
    fn nothing_can_signal_pid_1_a_group_or_ourselves() {
        let me = std::process::id().cast_signed();
        for pid in NEVER.into_iter().chain([me]) {
            assert_eq!(open(pid).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{pid}");
            // With the right start time, as a ledger might have it after everything went wrong.
            let start = procfs::stat(pid.max(1)).unwrap().map_or(0, |s| s.start);
            let said = kill_exactly(Process { pid, start }, 10).unwrap_err();
            assert!(matches!(said, SysError::Refused { .. }), "{pid}: {said}");
            if let Ok(leader) = u32::try_from(pid) {
                assert_eq!(kill_group(leader).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{pid}");
            }
        }
        assert_eq!(kill_group(u32::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_reused_pid_is_left_alone() {
        let mut child = std::process::Command::new("sleep").arg("infinity").spawn().unwrap();
        let pid = child.id().cast_signed();
        let start = procfs::stat(pid).unwrap().unwrap().start;
        kill_exactly(Process { pid, start: start + 1 }, 1_000).unwrap();
        assert!(child.try_wait().unwrap().is_none(), "it was another process's start time");
        kill_exactly(Process { pid, start }, 10_000).unwrap();
        assert!(child.wait().unwrap().code().is_none());
    }

    /// Whoever signals by other means goes around the refusals above.
    #[test]
    fn no_other_file_of_this_crate_sends_signals() {
        fn look(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    look(&path, found);
                } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("sys/signal.rs") {
                    let text = fs::read_to_string(&path).unwrap();
                    // Tests of other files kill what they started themselves.
                    let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
                    for word in
                        ["libc::kill", "signal::kill(", "signal::killpg", "SYS_kill", "SYS_tgkill", "pidfd_send_signal"]
                    {
                        if code.contains(word) {
                            found.push(format!("{}: {word}", path.display()));
                        }
                    }
                }
            }
        }
        let mut found = Vec::new();
        look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        assert_eq!(found, [""; 0]);
    }
}
