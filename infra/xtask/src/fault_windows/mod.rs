//! `cargo xtask fault-windows`: stops the agent at every fault window of every arm, kills -9 the agent, its shim or the
//! tool that is at work, lets a fresh agent sweep, and looks from outside whether anything of ours is left and whether
//! what only looks like ours is untouched.

mod decoys;
mod stopped;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_common::{arm::ArmKind, ids::InstallationId};
use drums_infra::{
    fleet::Binaries,
    leakgate::{self, Scope, Snapshot},
};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha20Rng;
use serde::Serialize;

use self::{
    decoys::Decoys,
    stopped::{Reached, Running},
};
use crate::{rows, workspace};

#[derive(clap::Args)]
pub struct FaultWindowsArgs {
    /// Only these arms [default: all that are built in]
    #[arg(long = "arm", value_name = "KIND")]
    arms: Vec<ArmKind>,
    /// Only windows whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Share of the windows that is drawn
    #[arg(long, value_name = "FRACTION", default_value_t = 1.0)]
    draw: f64,
    /// Of the draw
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write `{"rows": [...]}` here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// An agent that is neither stopped nor done after this hangs.
const PATIENCE: Duration = Duration::from_secs(180);
/// What the kernel may need until the dead are gone.
const SETTLE: Duration = Duration::from_secs(15);
/// How often a sweep is begun afresh to reach a window that is not in every sweep.
const SWEEPS: u32 = 8;
/// The victim in a row of a window that was not reached: nobody was killed, and only the sweep itself was looked at.
const NOBODY: &str = "nobody";
/// Every case is a state folder of its own under this one installation, so that decoys can be named like its things.
const INSTALLATION: InstallationId = InstallationId([0xfa, 0x17, 0x00, 0x01]);

#[derive(Clone, Debug, Serialize)]
struct Row {
    arm: ArmKind,
    window: String,
    victim: String,
    clean: bool,
    decoys_spared: bool,
    /// What was left, or went wrong; empty otherwise.
    left: Vec<String>,
}

pub fn run(args: &FaultWindowsArgs) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "sessions are made and killed for real: run it as root");
    ensure!((0.0..=1.0).contains(&args.draw), "--draw is a share between 0 and 1, not {}", args.draw);
    let (agent, tree) = prepare()?;
    let folder = tempfile::Builder::new().prefix("drums-windows-").tempdir()?;
    let ground =
        Ground { agent, tree, decoys: Decoys::plant(INSTALLATION, folder.path())?, folder: folder.path().into() };
    let mut rows = Vec::new();
    let done = cases(args, &ground, &mut rows);
    // What was found is kept, however it ended.
    if let Some(path) = &args.json {
        rows::write(path, &rows)?;
    }
    done?;
    let bad: Vec<&Row> = rows.iter().filter(|r| !(r.clean && r.decoys_spared)).collect();
    let unreached = rows.iter().filter(|r| r.victim == NOBODY).count();
    println!("{} cases, {} of them not clean, {unreached} windows not reached", rows.len(), bad.len());
    ensure!(rows.len() > unreached, "no window was drawn and reached; take a larger --draw or another --seed");
    ensure!(bad.is_empty(), "{} cases left something behind or touched a stranger's", bad.len());
    Ok(())
}

/// Rows come about one by one, so that an early end loses none.
fn cases(args: &FaultWindowsArgs, ground: &Ground, rows: &mut Vec<Row>) -> Result<()> {
    let mut draw = ChaCha20Rng::seed_from_u64(args.seed);
    for arm in if args.arms.is_empty() { ArmKind::BUILT_IN.to_vec() } else { args.arms.clone() } {
        let listed = ground.windows(arm)?;
        println!("{arm}: {} windows", listed.len());
        for window in listed {
            let wanted = args.only.as_ref().is_none_or(|text| window.contains(text));
            if wanted && draw.random_bool(args.draw) {
                ground.every_victim(arm, &window, rows)?;
            }
        }
    }
    Ok(())
}

/// The agent's binary of this build, and the minimal workload's tree.
fn prepare() -> Result<(PathBuf, PathBuf)> {
    let here = std::env::current_exe().context("cannot find this program's own folder")?;
    let folder = here.parent().context("this program lies in no folder")?;
    let mut build = workspace::cargo();
    // The same selections as in the Makefile, so that nothing is built a second time.
    build.args(["build", "--quiet", "--locked"]);
    if let Some(profile) = ["release", "quick"].into_iter().find(|p| folder.ends_with(p)) {
        build.args(["--profile", profile, "-p", "xtask", "-p", "drums-agent", "-p", "drums-coordinator"]);
    } else {
        build.args(["--workspace", "--bins", "--tests"]);
    }
    workspace::run(&mut build)?;
    let image = workspace::target_dir()?.join("images/minimal");
    crate::image::minimal(&image)?;
    Ok((Binaries::beside(folder).agent, image.join("tree")))
}

/// What every case needs.
struct Ground {
    agent: PathBuf,
    tree: PathBuf,
    decoys: Decoys,
    folder: PathBuf,
}

/// What a case showed.
struct Found {
    left: Vec<String>,
    /// Who else could have been the victim in that window; none where it was not reached.
    others: Option<BTreeSet<String>>,
}

/// One state folder.
struct Case<'a> {
    ground: &'a Ground,
    state: tempfile::TempDir,
    before: Snapshot,
}

impl Ground {
    fn case(&self) -> Result<Case<'_>> {
        let state = tempfile::Builder::new().prefix("state-").tempdir_in(&self.folder)?;
        fs::write(state.path().join("installation"), format!("{INSTALLATION}\n"))?;
        Ok(Case { ground: self, state, before: Snapshot::take()? })
    }

    /// Names of the windows of an arm: of a session's whole life, then of the sweep after an agent killed in its middle.
    fn windows(&self, arm: ArmKind) -> Result<Vec<String>> {
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

    /// The agent first; whoever else is at work in this window after it.
    fn every_victim(&self, arm: ArmKind, window: &str, rows: &mut Vec<Row>) -> Result<()> {
        let mut waiting: Vec<String> = vec!["agent".into()];
        let mut seen: BTreeSet<String> = waiting.iter().cloned().collect();
        while let Some(mut victim) = waiting.pop() {
            let mut left = Vec::new();
            match self.one(arm, window, &victim) {
                Ok(case) => {
                    left.extend(case.left);
                    match case.others {
                        Some(others) => waiting.extend(others.into_iter().filter(|o| seen.insert(o.clone()))),
                        None => NOBODY.clone_into(&mut victim),
                    }
                }
                Err(e) => left.push(format!("{e:#}")),
            }
            let spared = self.decoys.missing();
            let row = Row {
                arm,
                window: window.to_owned(),
                victim,
                clean: left.is_empty(),
                decoys_spared: spared.is_empty(),
                left: [left, spared].concat(),
            };
            let mark = if row.left.is_empty() { "clean" } else { "NOT CLEAN" };
            println!("{arm}  {window}  {}  {mark}", row.victim);
            for what in &row.left {
                println!("    {what}");
            }
            let lost = !row.decoys_spared;
            rows.push(row);
            ensure!(!lost, "a stranger's thing was touched; nothing after that would mean anything");
        }
        Ok(())
    }

    /// What is left after the victim died in the window, and who else could have been the victim there.
    fn one(&self, arm: ArmKind, window: &str, victim: &str) -> Result<Found> {
        let stop = ["--stop-at".as_ref(), window.as_ref()];
        let sweeping = window.starts_with("sweep/");
        let mut tries = 0;
        let (case, mut running) = loop {
            tries += 1;
            let case = self.case()?;
            let mut running = if sweeping {
                case.kill_in_the_middle(arm, &read_lines(&self.folder.join(format!("{arm}.windows")))?)?;
                case.audit(&stop)?
            } else {
                case.attempt(arm, &stop)?
            };
            match running.reached()? {
                Reached::Stopped => break (case, running),
                // What a dead session held may go by itself (a link with its namespace) before the sweep comes to it.
                Reached::Ended(status) if sweeping && status.success() && tries < SWEEPS => {}
                Reached::Ended(status) if sweeping && status.success() => {
                    return Ok(Found { left: case.sweep()?, others: None });
                }
                Reached::Ended(status) => bail!("{window} was never reached: {status}\n{}", case.log()),
            }
        };
        let others = running.victims()?;
        if victim == "agent" {
            running.kill()?;
        } else {
            ensure!(others.contains(victim), "{victim} was not at work in {window} this time");
            running.kill_other(victim)?;
            running.go_on()?;
            // It ends with an error or without: both are right, as long as it ends and what it made goes.
            if let Reached::Stopped = running.reached()? {
                bail!("the agent stopped a second time in {window}");
            }
        }
        drop(running);
        Ok(Found { left: case.sweep()?, others: Some(others) })
    }
}

impl Case<'_> {
    fn attempt(&self, arm: ArmKind, more: &[&std::ffi::OsStr]) -> Result<Running> {
        let mut command = Command::new(&self.ground.agent);
        command.args(["try", arm.as_str(), "-n", "1", "--workload"]).arg(&self.ground.tree);
        self.start(command.arg("--state").arg(self.state.path()).args(more))
    }

    fn audit(&self, more: &[&std::ffi::OsStr]) -> Result<Running> {
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
            Reached::Stopped => running.kill(),
            Reached::Ended(status) => bail!("{last} was never reached: {status}\n{}", self.log()),
        }
    }

    /// A fresh agent's audit, and then what the kernel shows that was not there before, and what the ledger still holds.
    fn sweep(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        let mut first = self.audit(&[])?;
        match first.reached()? {
            Reached::Ended(status) if status.success() => {}
            other => left.push(format!("the sweep did not succeed: {other:?}: {}", self.log())),
        }
        drop(first);
        let names = vec![
            self.state.path().display().to_string(),
            format!("drums-{INSTALLATION}"),
            drums_agent::sys::SessionNet::link_prefix(INSTALLATION),
        ];
        left.extend(leakgate::settle(&self.before, &Scope::from_env(names), SETTLE)?.iter().map(ToString::to_string));
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

fn read_lines(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.lines().map(str::to_owned).collect())
}
