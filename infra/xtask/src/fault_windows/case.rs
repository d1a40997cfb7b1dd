//! One case: a state folder of its own, an agent stopped in a window, somebody killed, a sweep, and a look at what is
//! left.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::ledger::Ledger;
use drums_common::arm::ArmKind;
use drums_infra::leakgate::{self, Scope, Snapshot};

use super::{
    INSTALLATION,
    decoys::{Decoys, audit},
    stopped::{Reached, Running},
    stops_in,
};

/// An agent that is neither stopped nor done after this hangs.
const PATIENCE: Duration = Duration::from_secs(180);
/// What the kernel may need until the dead are gone.
const SETTLE: Duration = Duration::from_secs(15);
/// How often a sweep is begun afresh to reach a window that is not in every sweep.
const SWEEPS: u32 = 3;
/// How often a case is begun afresh to kill a tool while it works.
const CATCHES: u32 = 8;

/// What every case needs.
pub struct Ground {
    pub agent: PathBuf,
    pub tree: PathBuf,
    pub decoys: Decoys,
    /// Dropped last: ledgers of what the decoys are made of lie in it.
    pub folder: Folder,
}

/// Removed when dropped.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl std::ops::Deref for Folder {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a case showed.
pub struct Found {
    pub left: Vec<String>,
    /// Who else could have been the victim in that window; none where it was not reached.
    pub others: Option<BTreeSet<String>>,
    pub worked: Duration,
}

/// One state folder.
struct Case<'a> {
    ground: &'a Ground,
    state: tempfile::TempDir,
    before: Snapshot,
    /// Network namespaces of an agent that was killed: links lead into them until the sweep comes.
    namespaces: RefCell<Vec<File>>,
    swept: Cell<bool>,
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        // After an error: the folder cannot be removed while things of the case are mounted in it.
        self.namespaces.take();
        if !self.swept.get()
            && let Err(e) = audit(&self.ground.agent, self.state.path())
        {
            eprintln!("{e:#}");
        }
    }
}

/// Undoes what the cases of a killed run left, and removes its decoys.
pub fn clear(agent: &Path, folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().join("ledger").is_dir() {
            audit(agent, &entry.path())?;
        }
    }
    Decoys::clear(INSTALLATION, agent, folder)?;
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}, which a killed run left", folder.display()))
        }
        _ => Ok(()),
    }
}

impl Ground {
    fn case(&self) -> Result<Case<'_>> {
        let state = tempfile::Builder::new().prefix("state-").tempdir_in(&*self.folder)?;
        fs::write(state.path().join("installation"), format!("{INSTALLATION}\n"))?;
        self.decoys.haunt(&state.path().join("ledger"))?;
        Ok(Case {
            ground: self,
            state,
            before: Snapshot::take()?,
            namespaces: RefCell::default(),
            swept: Cell::new(false),
        })
    }

    /// Names of the windows of an arm: of a session's whole life, then of the sweep after an agent killed in its middle.
    pub fn windows(&self, arm: ArmKind) -> Result<Vec<String>> {
        let list = self.folder.join(format!("{arm}.windows"));
        let case = self.case()?;
        match case.attempt(arm, &["--list-windows".as_ref(), list.as_os_str()])?.reached()? {
            Reached::Ended(status) if status.success() => {}
            other => bail!("an undisturbed trial of {arm} did not succeed: {other:?}\n{}", case.log()),
        }
        let life = read_lines(&list)?;
        let swept = self.folder.join(format!("{arm}.sweep"));
        let case = self.case()?;
        case.kill_in_the_middle(arm, &life)?;
        match case.audit(&["--list-windows".as_ref(), swept.as_os_str()])?.reached()? {
            Reached::Ended(status) if status.success() => {}
            other => bail!("an undisturbed sweep of {arm} did not succeed: {other:?}\n{}", case.log()),
        }
        Ok([life, read_lines(&swept)?].concat())
    }

    /// What is left after a victim died in the window, and who else could have been the victim there: `pick` names one,
    /// and is told who is at work besides the one that stands still. A tool that works in the window goes on for as long
    /// as `worked` before.
    pub fn one(
        &self,
        arm: ArmKind,
        window: &str,
        worked: Duration,
        mut pick: impl FnMut(&BTreeSet<String>) -> String,
    ) -> Result<Found> {
        let mut victim = None;
        let mut worked = if window.contains("/wait.") { worked } else { Duration::ZERO };
        for _ in 0..CATCHES {
            let (case, mut running) = match self.stopped_in(arm, window)? {
                Ok(stopped) => stopped,
                Err(case) => return Ok(Found { left: case.sweep()?, others: None, worked: Duration::ZERO }),
            };
            let others = running.victims()?;
            let victim = &*victim.get_or_insert_with(|| pick(&others));
            let ours = victim == stops_in(window);
            let killed = match (ours, worked.is_zero()) {
                _ if !ours && !others.contains(victim) => false,
                (true, true) => running.kill().map(|()| true)?,
                (true, false) => {
                    running.release()?;
                    running.work(worked);
                    running.kill().map(|()| true)?
                }
                // CRIU below runc is there only once runc works.
                (false, true) if running.kill_other(victim)? => true,
                (false, _) => {
                    running.release()?;
                    running.kill_at_work(victim, worked)?
                }
            };
            if !killed {
                // It was quicker than that.
                worked = if worked < Duration::from_millis(1) { Duration::ZERO } else { worked / 2 };
                drop(running);
                let left = case.sweep()?;
                ensure!(
                    left.is_empty(),
                    "nobody but the agent was killed in {window}, and left is {}",
                    left.join("; ")
                );
                continue;
            }
            if !ours {
                running.release()?;
                running.go_on()?;
                // It ends with an error or without: both are right, as long as it ends and what it made goes.
                if let Reached::Stopped = running.reached()? {
                    bail!("the agent stopped a second time in {window}");
                }
            }
            drop(running);
            return Ok(Found { left: case.sweep()?, others: Some(others), worked });
        }
        // A virtual machine that was told to end, say.
        Ok(Found { left: Vec::new(), others: None, worked: Duration::ZERO })
    }

    /// An agent, or a sweep, that stands in the window; the case alone where the sweep never came to it.
    fn stopped_in(&self, arm: ArmKind, window: &str) -> Result<Result<(Case<'_>, Running), Case<'_>>> {
        let stop = ["--stop-at".as_ref(), window.as_ref()];
        if !window.starts_with("sweep/") {
            let case = self.case()?;
            let mut running = case.attempt(arm, &stop)?;
            return match running.reached()? {
                Reached::Stopped => Ok(Ok((case, running))),
                Reached::Ended(status) => bail!("{window} was never reached: {status}\n{}", case.log()),
            };
        }
        let life = read_lines(&self.folder.join(format!("{arm}.windows")))?;
        let mut tries = 0;
        loop {
            tries += 1;
            let case = self.case()?;
            case.kill_in_the_middle(arm, &life)?;
            let mut running = case.audit(&stop)?;
            match running.reached()? {
                Reached::Stopped => return Ok(Ok((case, running))),
                // What a dead session held may go by itself (a link with its namespace) before the sweep comes to it.
                Reached::Ended(status) if status.success() && tries < SWEEPS => {}
                Reached::Ended(status) if status.success() => return Ok(Err(case)),
                Reached::Ended(status) => bail!("{window} was never reached: {status}\n{}", case.log()),
            }
        }
    }
}

impl Case<'_> {
    fn attempt(&self, arm: ArmKind, more: &[&OsStr]) -> Result<Running> {
        let mut command = Command::new(&self.ground.agent);
        command.args(["try", arm.as_str(), "-n", "1", "--workload"]).arg(&self.ground.tree);
        self.start(command.arg("--state").arg(self.state.path()).args(more))
    }

    fn audit(&self, more: &[&OsStr]) -> Result<Running> {
        let mut command = Command::new(&self.ground.agent);
        self.start(command.arg("audit").arg("--state").arg(self.state.path()).args(more))
    }

    fn start(&self, command: &mut Command) -> Result<Running> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path())?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Running::start(command, PATIENCE)
    }

    fn log_path(&self) -> PathBuf {
        self.ground.folder.join("last.log")
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.log_path()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// A live session whose agent is gone: the sweep's starting point.
    fn kill_in_the_middle(&self, arm: ArmKind, life: &[String]) -> Result<()> {
        let last = life.iter().rev().find(|w| w.starts_with("create/")).context("no window lies in a create")?;
        let mut running = self.attempt(arm, &["--stop-at".as_ref(), last.as_ref()])?;
        match running.reached()? {
            Reached::Stopped => {
                // Left alone, the kernel removes links with them, at once or later than the sweep looks.
                self.namespaces.replace(running.namespaces()?);
                running.kill()
            }
            Reached::Ended(status) => bail!("{last} was never reached: {status}\n{}", self.log()),
        }
    }

    /// A fresh agent's audit, and then what the kernel shows that was not there before, what the ledger still holds, and
    /// what lies in the state folder.
    fn sweep(&self) -> Result<Vec<String>> {
        self.namespaces.take();
        let mut left = Vec::new();
        let mut first = self.audit(&[])?;
        match first.reached()? {
            Reached::Ended(status) if status.success() => {}
            other => left.push(format!("the sweep did not succeed: {other:?}: {}", self.log())),
        }
        drop(first);
        self.swept.set(true);
        let names = vec![
            self.state.path().display().to_string(),
            format!("drums-{INSTALLATION}"),
            drums_agent::sys::SessionNet::link_prefix(INSTALLATION),
        ];
        left.extend(leakgate::settle(&self.before, &Scope::from_env(names), SETTLE)?.iter().map(ToString::to_string));
        left.extend(held(&self.state.path().join("ledger"))?);
        left.extend(files(self.state.path()));
        let again = Command::new(&self.ground.agent)
            .arg("audit")
            .arg("--json")
            .arg("--state")
            .arg(self.state.path())
            .output()?;
        let report: serde_json::Value =
            serde_json::from_slice(&again.stdout).context("the audit's answer is not JSON")?;
        for (what, list) in report.as_object().into_iter().flatten() {
            left.extend(
                list.as_array().into_iter().flatten().map(|l| format!("a second sweep still found {what}: {l}")),
            );
        }
        Ok(left)
    }
}

/// Entries that a ledger still holds, other than what it knows to be a stranger's.
fn held(ledger: &Path) -> Result<Vec<String>> {
    let ledger = Ledger::open(ledger)?;
    let open = ledger.open_plans().flat_map(|p| p.entries.iter().filter(|e| !e.disowned).map(move |e| (p, e)));
    Ok(open.map(|(plan, entry)| format!("ledger entry {} of {}", entry.resource, plan.name)).collect())
}

/// Images in the scratch folder, and sockets anywhere below the state folder.
fn files(state: &Path) -> Vec<String> {
    let (mut left, mut todo) = (Vec::new(), vec![state.to_owned()]);
    while let Some(folder) = todo.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_socket() {
                left.push(format!("socket {}", path.display()));
            } else if folder.starts_with(state.join("scratch")) {
                left.push(format!("image {}", path.display()));
            } else if kind.is_dir() {
                todo.push(path);
            }
        }
    }
    left
}

fn read_lines(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.lines().map(str::to_owned).collect())
}
