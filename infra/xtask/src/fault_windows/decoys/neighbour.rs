//! A session of another installation, made by another agent, alive all the time.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use drums_agent::ledger::Ledger;
use drums_common::ids::{Generation, InstallationId};
use drums_infra::leakgate::{Scope, Snapshot};

use super::super::stopped::{Reached, Running};

const INSTALLATION: InstallationId = InstallationId([0xfa, 0x17, 0x00, 0x02]);
/// Its agent stands still in this window for as long as it lives: the session's first process runs by then.
const WINDOW: &str = "create/spawn-session.1/after";
const PATIENCE: Duration = Duration::from_secs(60);
/// Session numbers that it has drawn before.
const DRAWN: u32 = 9_000;

pub struct Neighbour {
    agent: PathBuf,
    folder: PathBuf,
    /// Ended first.
    running: Option<Running>,
    before: Snapshot,
    /// Everything of it that the kernel showed when it stood.
    stood: BTreeSet<String>,
}

impl Neighbour {
    fn state(folder: &Path) -> PathBuf {
        folder.join("neighbour")
    }

    pub fn clear(agent: &Path, folder: &Path) -> Result<()> {
        let state = Self::state(folder);
        if state.exists() {
            audit(agent, &state)?;
            fs::remove_dir_all(&state).context("cannot remove the folder of an earlier run's neighbour")?;
        }
        Ok(())
    }

    pub fn start(agent: &Path, tree: &Path, folder: &Path) -> Result<Self> {
        let state = Self::state(folder);
        fs::create_dir(&state).context("cannot make the folder of a neighbour")?;
        fs::write(state.join("installation"), format!("{INSTALLATION}\n"))?;
        // Addresses follow from session numbers, and this one stands in the same network as the cases' sessions.
        let mut ledger = Ledger::open(&state.join("ledger"))?;
        for _ in 0..DRAWN {
            ledger.next_session(Generation(1))?;
        }
        drop(ledger);
        let before = Snapshot::take()?;
        let mut command = Command::new(agent);
        command.args(["try", "drums-cold", "-n", "1", "--stop-at", WINDOW, "--workload"]).arg(tree);
        command.arg("--state").arg(&state).stdin(Stdio::null()).stdout(Stdio::null());
        let mut running = Running::start(&mut command, PATIENCE)?;
        match running.reached()? {
            Reached::Stopped => {}
            Reached::Ended(status) => bail!("a neighbour's session could not be made: {status}"),
        }
        let mut me = Self {
            agent: agent.to_owned(),
            folder: folder.to_owned(),
            running: Some(running),
            before,
            stood: BTreeSet::new(),
        };
        me.stood = me.seen()?;
        for kind in ["process", "mount", "cgroup", "link"] {
            let there = me.stood.iter().any(|s| s.starts_with(kind));
            anyhow::ensure!(there, "the neighbour's session has no {kind}: {:?}", me.stood);
        }
        Ok(me)
    }

    fn seen(&self) -> Result<BTreeSet<String>> {
        let names = vec![
            Self::state(&self.folder).display().to_string(),
            format!("drums-{INSTALLATION}"),
            drums_agent::sys::SessionNet::link_prefix(INSTALLATION),
        ];
        let new = Snapshot::take()?.new_since(&self.before, &Scope::Names(names));
        Ok(new.iter().map(ToString::to_string).collect())
    }

    pub fn missing(&self) -> Vec<String> {
        match self.seen() {
            Ok(now) => self.stood.difference(&now).map(|what| format!("the neighbour's {what}")).collect(),
            Err(e) => vec![format!("the neighbour cannot be looked at: {e:#}")],
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.running = None;
        if let Err(e) = Self::clear(&self.agent, &self.folder) {
            eprintln!("{e:#}");
        }
    }
}

/// Undoes what an agent of this state folder left.
pub fn audit(agent: &Path, state: &Path) -> Result<()> {
    let mut command = Command::new(agent);
    command.arg("audit").arg("--state").arg(state).stdin(Stdio::null());
    let output = command.output().context("cannot start the agent's audit")?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "the audit of {} failed: {}", state.display(), said.trim());
    Ok(())
}
