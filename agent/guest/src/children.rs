//! Processes that the guest started, and orphans that it inherited as pid 1.
//!
//! One place collects every exit status, because `waitpid(-1)` of a reaper would otherwise take a status from under
//! the code that waits for its own child. Starting a child and reaping happen under one lock, so a child that dies at
//! once is still known when it is reaped.

use std::{
    collections::HashMap,
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, Command, ExitStatus},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

#[derive(Default)]
pub struct Children {
    /// `None` while the child runs. Only children that somebody will wait for are in here.
    known: Mutex<HashMap<i32, Option<ExitStatus>>>,
    changed: Condvar,
}

impl Children {
    /// Starts `command`; `wait` or `abandon` must follow.
    pub fn start(&self, command: &mut Command) -> io::Result<Child> {
        self.spawn(command, true)
    }

    /// Starts `command` and forgets it: nobody will ask for its status.
    pub fn start_detached(&self, command: &mut Command) -> io::Result<()> {
        self.spawn(command, false).map(drop)
    }

    /// The child has no signal blocked and a process group of its own.
    fn spawn(&self, command: &mut Command, watched: bool) -> io::Result<Child> {
        command.process_group(0);
        // SAFETY: the closure runs between fork and exec and only makes async-signal-safe calls on its own memory.
        unsafe {
            command.pre_exec(|| {
                let mut none: libc::sigset_t = std::mem::zeroed();
                libc::sigemptyset(&mut none);
                if libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) == 0 {
                    Ok(())
                } else {
                    Err(io::Error::last_os_error())
                }
            });
        }
        let mut known = self.lock();
        let child = command.spawn()?;
        if watched {
            known.insert(child.id() as i32, None);
        }
        Ok(child)
    }

    /// Waits until the child was reaped; `None` when the time is over first.
    pub fn wait(&self, pid: u32, deadline: Instant) -> Option<ExitStatus> {
        let pid = pid as i32;
        let mut known = self.lock();
        loop {
            if let Some(Some(status)) = known.get(&pid).copied() {
                known.remove(&pid);
                return Some(status);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            known = self.changed.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives up on a child: kills its group; whoever is left is reaped as an orphan.
    pub fn abandon(&self, pid: u32) {
        let mut known = self.lock();
        known.remove(&(pid as i32));
        // SAFETY: kill takes plain numbers. The lock is held, so the pid was not reaped and given to another.
        unsafe { libc::kill(-(pid as i32), libc::SIGKILL) };
    }

    /// Collects every child that has died. Returns false when there is no child at all.
    pub fn reap(&self) -> bool {
        let mut known = self.lock();
        let some = loop {
            let mut status = 0;
            // SAFETY: status is a valid place for one integer.
            match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
                0 => break true,
                -1 => break io::Error::last_os_error().raw_os_error() == Some(libc::EINTR),
                pid => {
                    if let Some(slot) = known.get_mut(&pid) {
                        *slot = Some(ExitStatus::from_raw(status));
                    }
                }
            }
        };
        self.changed.notify_all();
        some
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Option<ExitStatus>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends all processes of the pid namespace but ourselves: asks, waits up to `patience`, then kills. For pid 1 only.
pub fn end_all(children: &Children, patience: Duration) {
    for (signal, limit) in [(libc::SIGTERM, patience), (libc::SIGKILL, patience)] {
        // SAFETY: kill takes plain numbers; as pid 1, -1 means every other process of this pid namespace.
        if unsafe { libc::kill(-1, signal) } != 0 {
            return;
        }
        let deadline = Instant::now() + limit;
        while children.reap() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait_for_sigchld(left);
        }
    }
}

/// SIGCHLD is blocked in every thread, so a child's death between `reap` and here is pending, not lost.
fn wait_for_sigchld(limit: Duration) {
    let limit = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: the set and the time are valid for the call; no information about the signal is asked for.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::sigtimedwait(&set, std::ptr::null_mut(), &limit);
    }
}
