//! A child that stops itself, the processes below it, and the end of either.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use drums_infra::fleet::wait_until;
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};

#[derive(Debug)]
pub enum Reached {
    Stopped,
    Ended(ExitStatus),
}

/// An agent at work. Dropped, it is killed and reaped.
pub struct Running {
    child: Child,
    patience: Duration,
}

impl Running {
    pub fn start(command: &mut Command, patience: Duration) -> Result<Self> {
        // A group of its own: when the shell that started all this goes, its group is orphaned, and the kernel lets
        // whoever is stopped in an orphaned group go on.
        let child = end_with_parent(command.process_group(0)).spawn().context("cannot start the agent")?;
        Ok(Self { child, patience })
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Waits until it has stopped itself or ended.
    pub fn reached(&mut self) -> Result<Reached> {
        let pid = self.pid();
        let mut state = None;
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let seen = wait_until(self.patience, || {
            state = match waitid(Id::Pid(pid), flags) {
                Ok(WaitStatus::StillAlive) => None,
                other => Some(other),
            };
            state.is_some()
        });
        let Some(state) = state.filter(|_| seen) else {
            bail!("the agent hangs: neither stopped nor ended after {:?}", self.patience);
        };
        match state.context("cannot look at the agent's state")? {
            WaitStatus::Stopped(..) => Ok(Reached::Stopped),
            WaitStatus::Exited(_, code) => Ok(Reached::Ended(ExitStatus::from_raw(code << 8))),
            WaitStatus::Signaled(_, signal, _) => Ok(Reached::Ended(ExitStatus::from_raw(signal as i32))),
            other => bail!("the agent is in a state that nobody expects: {other:?}"),
        }
    }

    /// kill -9 of the agent itself.
    pub fn kill(&mut self) -> Result<()> {
        kill(self.pid(), Signal::SIGKILL).context("cannot kill the agent")?;
        self.child.wait().context("cannot reap the agent")?;
        Ok(())
    }

    pub fn go_on(&self) -> Result<()> {
        kill(self.pid(), Signal::SIGCONT).context("cannot let the agent go on")
    }

    /// Who else is at work: the shim, and tools that it runs. runc starts CRIU when it goes on to save or to restore.
    pub fn victims(&self) -> Result<BTreeSet<String>> {
        let below = self.below()?;
        let mut victims: BTreeSet<String> = below.keys().cloned().collect();
        if below.get("runc").is_some_and(|runc| saves_or_restores(*runc)) {
            victims.insert("criu".to_owned());
        }
        Ok(victims)
    }

    /// Lets the tool go on that was held in this window.
    pub fn release(&self) -> Result<()> {
        for pid in self.below()?.into_values() {
            // It may have ended meanwhile.
            let _ = kill(pid, Signal::SIGCONT);
        }
        Ok(())
    }

    /// False if it has ended.
    pub fn kill_other(&self, victim: &str) -> Result<bool> {
        match self.below()?.get(victim) {
            Some(pid) => Ok(kill(*pid, Signal::SIGKILL).is_ok()),
            None => Ok(false),
        }
    }

    /// Waits until the victim is at work, then as long again as `worked`, and kills it. False if it had ended by then.
    pub fn kill_at_work(&self, victim: &str, worked: Duration) -> Result<bool> {
        let until = Instant::now() + self.patience.min(Duration::from_secs(10));
        let mut known = self.below()?;
        while !known.contains_key(victim) {
            // Everybody who could still start it has ended.
            if Instant::now() > until || !known.keys().any(|name| name != "shim") {
                return Ok(false);
            }
            known = self.below()?;
        }
        self.work(worked);
        self.kill_other(victim)
    }

    /// Lets whoever is at work work for so long.
    pub fn work(&self, worked: Duration) {
        let from = Instant::now();
        while from.elapsed() < worked {
            std::thread::yield_now();
        }
    }

    /// Network namespaces of whoever is below the agent. They, and the links that lead into them, stay while these are
    /// held.
    pub fn namespaces(&self) -> Result<Vec<File>> {
        let below = self.descendants()?;
        Ok(below.into_iter().filter_map(|pid| File::open(format!("/proc/{pid}/ns/net")).ok()).collect())
    }

    /// Victims below the agent, by name. Of several with one name the eldest counts.
    fn below(&self) -> Result<BTreeMap<String, Pid>> {
        let mut found = BTreeMap::new();
        for pid in self.descendants()? {
            if let Some(name) = name_of(pid) {
                found.entry(name).or_insert(Pid::from_raw(pid));
            }
        }
        Ok(found)
    }

    /// The living below the agent, by number.
    fn descendants(&self) -> Result<Vec<i32>> {
        let mut parents = BTreeMap::new();
        for entry in fs::read_dir("/proc").context("cannot list processes")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
            let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some((_, tail)) = stat.rsplit_once(')') else { continue };
            let mut fields = tail.split_whitespace();
            let (state, parent) = (fields.next(), fields.next().and_then(|p| p.parse::<i32>().ok()));
            if let (Some(state), Some(parent)) = (state, parent)
                && state != "Z"
            {
                parents.insert(pid, parent);
            }
        }
        let me = self.pid().as_raw();
        Ok(parents.keys().copied().filter(|p| descends(*p, me, &parents)).collect())
    }
}

fn descends(mut pid: i32, ancestor: i32, parents: &BTreeMap<i32, i32>) -> bool {
    while let Some(parent) = parents.get(&pid) {
        if *parent == ancestor {
            return true;
        }
        pid = *parent;
    }
    false
}

fn saves_or_restores(runc: Pid) -> bool {
    let command = fs::read(format!("/proc/{runc}/cmdline")).unwrap_or_default();
    command.split(|b| *b == 0).any(|word| word == b"checkpoint" || word == b"restore")
}

/// Ends with the thread that starts it, however that ends: an agent that stands still would stand there for good.
pub fn end_with_parent(command: &mut Command) -> &mut Command {
    let hook = || nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
    unsafe { command.pre_exec(hook) }
}

/// What a victim is called; nothing for a session's own processes, which die in every case.
fn name_of(pid: i32) -> Option<String> {
    let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = command.split(|b| *b == 0).map(String::from_utf8_lossy);
    let program = words.next()?.into_owned();
    let program = program.rsplit('/').next()?.to_owned();
    let mut words = words.peekable();
    // The shim is started through /proc/self/exe.
    if words.peek().is_some_and(|w| w == "shim") {
        return Some("shim".to_owned());
    }
    match program.as_str() {
        "criu" | "runc" => Some(program),
        _ if program.starts_with("qemu-system") => Some("qemu".to_owned()),
        // The tool's own launcher: ld.so is given criu's path.
        _ if words.any(|w| w.ends_with("/criu") || w.ends_with("/criu.bin")) => Some("criu".to_owned()),
        _ => None,
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Ended already in most cases; both calls then do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
