//! What a demo made and must remove: on disk before it is made, so that `demo-clean` finds it after a crash.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use drums_infra::fleet::Daemon;
use serde::{Deserialize, Serialize};

pub const FILE: &str = "made.json";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Made {
    #[serde(skip)]
    path: PathBuf,
    /// The agent program, whose audit removes what agents made.
    pub agent: PathBuf,
    pub tools: PathBuf,
    pub daemons: Vec<Process>,
    /// State folders of agents.
    pub states: Vec<PathBuf>,
}

/// A process for good: pids are used again, start times are not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub name: String,
    pub pid: u32,
    pub start: u64,
    pub boot_id: String,
}

impl Process {
    pub fn of(name: &str, pid: u32) -> Option<Self> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
        Some(Self { name: name.to_owned(), pid, start: start_time(pid)?, boot_id })
    }

    pub fn is_alive(&self) -> bool {
        Self::of(&self.name, self.pid).as_ref() == Some(self)
    }
}

/// Clock ticks from boot to the start of a process; none for one that is gone or a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

impl Made {
    pub fn begin(out: &Path, agent: &Path, tools: &Path) -> Result<Self> {
        let made = Self {
            path: out.join(FILE),
            agent: agent.to_owned(),
            tools: tools.to_owned(),
            daemons: Vec::new(),
            states: Vec::new(),
        };
        made.save()?;
        Ok(made)
    }

    /// Notes a daemon. One that a crash kept from being noted still ends with the demo: it dies with its parent.
    pub fn daemon(&mut self, daemon: Option<&Daemon>) -> Result<()> {
        self.daemons.extend(daemon.and_then(|d| Process::of(&d.name, d.pid())));
        self.save()
    }

    pub fn state(&mut self, state: &Path) -> Result<()> {
        self.states.push(state.to_owned());
        self.save()
    }

    fn save(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        let new = self.path.with_extension("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &self.path))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    pub fn load(out: &Path) -> Result<Option<Self>> {
        let path = out.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => {
                let made: Self =
                    serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
                Ok(Some(Self { path, ..made }))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Nothing is left: the note goes.
    pub fn finish(out: &Path) -> Result<()> {
        let path = out.join(FILE);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_read_back_until_it_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        let mut made = Made::begin(dir.path(), Path::new("/a"), Path::new("/t")).unwrap();
        made.state(Path::new("/s/h1")).unwrap();
        let read = Made::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.states, read.agent), (vec![PathBuf::from("/s/h1")], PathBuf::from("/a")));
        Made::finish(dir.path()).unwrap();
        assert!(Made::load(dir.path()).unwrap().is_none());
    }

    #[test]
    fn a_process_of_another_start_is_not_the_one_noted() {
        let me = Process::of("test", std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!Process { start: me.start + 1, ..me.clone() }.is_alive());
        assert!(!Process { boot_id: "another".to_owned(), ..me }.is_alive());
    }
}
