//! Processes that are measured: started here, ended here, their CPU time and memory read from the kernel.

use std::{
    ffi::OsStr,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use serde_json::Value;

/// For an orderly end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A program that dies with the thread that starts it. Nothing of ours runs between fork and exec, so that no fork is needed:
/// one of a process with a thousand agents would copy its page tables, and have every page of it faulted in again.
pub fn dying_with_us(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).process_group(0);
    command
}

/// A child that dies with this value.
#[derive(Debug)]
pub struct Running {
    child: Child,
}

impl Running {
    pub fn start(command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self { child })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// True while it runs.
    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// SIGKILL: what a crash looks like. Returns once it is reaped.
    pub fn kill(&mut self) {
        // Both fail only for a child that has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks for an orderly end; kills what does not end in time.
    pub fn stop(&mut self) {
        let pid = Pid::from_raw(self.pid().cast_signed());
        if self.lives() {
            let _ = kill(pid, Signal::SIGTERM);
        }
        self.wait(PATIENCE);
    }

    /// Waits for its end; kills what has not ended by then.
    fn wait(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while self.lives() && Instant::now() < deadline {
            pause();
        }
        self.kill();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Between two looks at a condition for which there is no event.
#[allow(clippy::disallowed_methods)] // a poll with a deadline, which is what the ban asks for
pub fn pause() {
    std::thread::sleep(Duration::from_millis(5));
}

/// CPU time of all threads that a process has and had, nanoseconds.
pub fn cpu_ns(pid: u32) -> Result<u64> {
    let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed())).context("the process has no CPU clock")?;
    let t = clock_gettime(clock).context("the process' CPU clock cannot be read")?;
    Ok(u64::try_from(t.tv_sec()).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec()).unwrap_or(0))
}

/// Proportional set size: what it would free by ending.
pub fn pss_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("Pss:")).with_context(|| format!("{path} has no Pss"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| format!("{path}: {line}"))?;
    Ok(kib << 10)
}

/// A floor's server, or another helper of the bench: this program again, asked over its standard input, a line each way.
pub struct Helper {
    running: Running,
    /// Its input ends with this value, and then it does.
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    name: String,
}

impl Helper {
    pub fn start(arguments: &[&str]) -> Result<Self> {
        let name = arguments.join(" ");
        let program = std::env::current_exe().context("cannot ask for this program's own path")?;
        let mut command = dying_with_us(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).env("NO_COLOR", "1");
        let mut running = Running::start(&mut command)?;
        let to = Some(running.child.stdin.take().context("it was started with a pipe")?);
        let from = BufReader::new(running.child.stdout.take().context("it was started with a pipe")?);
        let mut me = Self { running, to, from, name };
        me.answer().context("it did not become ready")?;
        Ok(me)
    }

    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    pub fn ask(&mut self, line: &str) -> Result<Value> {
        let to = self.to.as_mut().context("it was told to end")?;
        writeln!(to, "{line}").and_then(|()| to.flush()).with_context(|| format!("`{}` is gone", self.name))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        let n = self.from.read_line(&mut line).with_context(|| format!("`{}` is gone", self.name))?;
        if n == 0 {
            bail!("`{}` ended", self.name);
        }
        serde_json::from_str(&line).with_context(|| format!("`{}` said {line:?}", self.name))
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.running.kill();
    }
}

impl Drop for Helper {
    /// In order, since a helper may have something to undo; what does not end is killed.
    fn drop(&mut self) {
        self.to = None;
        self.running.wait(PATIENCE);
    }
}

/// The helper's side: says that it is ready, then answers each line until its input ends.
pub fn serve_lines(mut answer: impl FnMut(&str) -> Result<Value>) -> Result<()> {
    let mut out = io::stdout().lock();
    let mut say = |value: &Value| writeln!(out, "{value}").and_then(|()| out.flush());
    say(&Value::Null)?;
    for line in io::stdin().lines() {
        say(&answer(line?.trim())?)?;
    }
    Ok(())
}
