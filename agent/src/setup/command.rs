//! Runs a helper program to its end, or to the end of its time.
//!
//! For setup and doctor only: sessions and their tools are started by the shim. A program gets a process group of its own
//! and is killed with it; where `dies_with_us` is asked for, also if this process ends first.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, FromRawFd as _, OwnedFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Kept of each stream; the rest is read and dropped.
const MAX_OUTPUT: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("cannot start {program}; is it installed?")]
    Spawn { program: String, source: io::Error },
    #[error("cannot follow `{command}`")]
    Follow { command: String, source: io::Error },
    #[error("`{command}` did not end within {limit:?} and was killed{}", tail(.output))]
    Late { command: String, limit: Duration, output: String },
    #[error("`{command}` ended with {status}{}", tail(.output))]
    Failed { command: String, status: ExitStatus, output: String },
}

fn tail(output: &str) -> String {
    let lines: Vec<_> = output.trim().lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(4)..].join(" / ");
    if last.is_empty() { String::new() } else { format!(": {last}") }
}

/// What a program said; both streams in one text each.
#[derive(Debug, Default)]
pub struct Said {
    pub out: String,
    pub err: String,
}

/// Puts the calling process into the control group that these files lead to. Does not allocate.
pub fn enter(doors: &[File]) -> io::Result<()> {
    doors.iter().try_for_each(|mut door| door.write_all(b"0"))
}

/// What to run, in words: only programs and arguments, no shell.
pub struct Run {
    command: Command,
    shown: String,
    limit: Duration,
}

impl Run {
    pub fn new(program: impl AsRef<OsStr>, limit: Duration) -> Self {
        let shown = program.as_ref().to_string_lossy().into_owned();
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        // Messages are parsed, so they must not be translated.
        command.env("LC_ALL", "C.UTF-8");
        Self { command, shown, limit }
    }

    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        for arg in args {
            self.shown.push(' ');
            self.shown.push_str(&arg.as_ref().to_string_lossy());
            self.command.arg(arg);
        }
        self
    }

    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    pub fn folder(mut self, path: &std::path::Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// The program is in the control group that these files lead to.
    pub fn entering(mut self, doors: Vec<File>) -> Self {
        // SAFETY: write on descriptors that are open is async-signal-safe.
        unsafe {
            self.command.pre_exec(move || enter(&doors));
        }
        self
    }

    /// The program is killed when the calling thread ends. Not for programs that must not be torn in the middle.
    pub fn dies_with_us(mut self) -> Self {
        // SAFETY: prctl and setrlimit on the closure's own memory are async-signal-safe.
        unsafe {
            self.command.pre_exec(|| {
                // A trial may well crash what it tries; that leaves no core file behind.
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                    Ok(())
                } else {
                    Err(io::Error::last_os_error())
                }
            });
        }
        self
    }

    /// Runs to a successful end.
    pub fn ok(self) -> Result<Said, CommandError> {
        let (shown, limit) = (self.shown.clone(), self.limit);
        let (said, ended) = self.until(|_| false)?;
        match ended {
            Ended::By(status) if status.success() => Ok(said),
            Ended::By(status) => Err(CommandError::Failed { command: shown, status, output: said.err + &said.out }),
            Ended::Late | Ended::Enough => {
                Err(CommandError::Late { command: shown, limit, output: said.err + &said.out })
            }
        }
    }

    /// Runs until it ends, `enough` says so of what it has said, or its time is over; in the last two cases it is killed.
    pub fn until(mut self, enough: impl Fn(&Said) -> bool) -> Result<(Said, Ended), CommandError> {
        let deadline = Instant::now() + self.limit;
        let mut child =
            self.command.spawn().map_err(|source| CommandError::Spawn { program: self.shown.clone(), source })?;
        let pid = child.id();
        let result = (|| {
            let mut streams = [
                Stream::new(child.stdout.take().map(OwnedFd::from))?,
                Stream::new(child.stderr.take().map(OwnedFd::from))?,
            ];
            let end = pidfd(pid)?;
            follow(&mut streams, &end, deadline, &enough)
        })();
        let ended = match &result {
            Ok((_, Some(how))) => Some(*how),
            Ok((_, None)) => None,
            Err(_) => Some(Ended::Late),
        };
        if ended.is_some() {
            // It was not waited for, so its number and its group are still its own; nothing is left to kill if it fails.
            let _ = crate::sys::signal::kill_group(pid);
        }
        let follow = |source| CommandError::Follow { command: self.shown.clone(), source };
        let status = child.wait().map_err(follow)?;
        let (said, _) = result.map_err(follow)?;
        Ok((said, ended.unwrap_or(Ended::By(status))))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    By(ExitStatus),
    Enough,
    Late,
}

impl Ended {
    pub fn words(self) -> String {
        match self {
            Self::By(status) => match status.signal() {
                Some(signal) => format!("ended by signal {signal}"),
                None => format!("ended with status {}", status.code().unwrap_or(-1)),
            },
            Self::Enough => "was ended by us".to_owned(),
            Self::Late => "was still running when its time was over".to_owned(),
        }
    }
}

fn follow(
    streams: &mut [Stream; 2],
    end: &OwnedFd,
    deadline: Instant,
    enough: &impl Fn(&Said) -> bool,
) -> io::Result<(Said, Option<Ended>)> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(end.as_fd(), PollFlags::POLLIN)];
        fds.extend(streams.iter().filter_map(|s| s.source.as_ref()).map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ended = fds[0].any().unwrap_or(true);
        for stream in streams.iter_mut() {
            stream.read_available()?;
        }
        let said = Said { out: streams[0].text(), err: streams[1].text() };
        // What a program left running may keep the pipes open, so its own end is what counts.
        if ended {
            return Ok((said, None));
        }
        if enough(&said) {
            return Ok((said, Some(Ended::Enough)));
        }
        if left.is_zero() {
            return Ok((said, Some(Ended::Late)));
        }
    }
}

struct Stream {
    source: Option<File>,
    kept: Vec<u8>,
}

impl Stream {
    fn new(source: Option<OwnedFd>) -> io::Result<Self> {
        if let Some(fd) = &source {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Self { source: source.map(File::from), kept: Vec::new() })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }

    fn read_available(&mut self) -> io::Result<()> {
        let mut chunk = [0; 16 * 1024];
        while let Some(source) = &mut self.source {
            match source.read(&mut chunk) {
                Ok(0) => self.source = None,
                Ok(n) => self.kept.extend_from_slice(&chunk[..n.min(MAX_OUTPUT - self.kept.len())]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// A descriptor that becomes readable when the process ends.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the descriptor that comes back is ours alone.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor from the kernel, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Waits until the descriptor is readable; false when the time is over first.
pub fn readable(fd: &OwnedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(n) => return n > 0,
            Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Run {
        Run::new("sh", limit).args(["-c", script])
    }

    #[test]
    fn output_and_status_are_both_seen() {
        let said = sh("echo out; echo err >&2", Duration::from_secs(20)).ok().unwrap();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("out\n", "err\n"));
        let error = sh("echo why >&2; exit 3", Duration::from_secs(20)).ok().unwrap_err().to_string();
        assert!(error.contains("exit status: 3: why"), "{error}");
        assert!(Run::new("/no/such", Duration::from_secs(1)).ok().unwrap_err().to_string().contains("installed"));
    }

    #[test]
    fn a_late_program_is_killed_with_its_children() {
        let start = Instant::now();
        let error = sh("echo started; sleep 600 & sleep 600", Duration::from_millis(300)).ok().unwrap_err().to_string();
        assert!(error.contains("did not end within 300ms") && error.contains("started"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_program_that_said_enough_is_ended() {
        let (said, ended) =
            sh("echo marker; sleep 600", Duration::from_secs(20)).until(|s| s.out.contains("marker")).unwrap();
        assert_eq!((said.out.as_str(), ended), ("marker\n", Ended::Enough));
    }

    #[test]
    fn a_child_that_keeps_the_pipe_does_not_hold_us() {
        let start = Instant::now();
        sh("setsid sleep 5 & echo done", Duration::from_secs(20)).ok().unwrap();
        assert!(start.elapsed() < Duration::from_secs(4));
    }
}
