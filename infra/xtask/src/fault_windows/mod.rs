//! `cargo xtask fault-windows`: stops the agent at every fault window of every arm, kills -9 the agent, its shim or the
//! tool that is at work, lets a fresh agent sweep, and looks from outside whether anything of ours is left and whether
//! what only looks like ours is untouched. The sweep's own windows are among them.
//!
//! What lives while it runs ends with it, and what a killed run left is removed by the next.

mod case;
mod decoys;
mod registered;
mod stopped;

use std::{
    collections::BTreeSet,
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use drums_common::{arm::ArmKind, ids::InstallationId};
use drums_infra::fleet::Binaries;
use rand::{Rng as _, SeedableRng as _, seq::IteratorRandom as _};
use rand_chacha::ChaCha20Rng;
use serde::Serialize;

use self::{
    case::{Folder, Ground},
    decoys::Decoys,
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
    /// Share of the windows that is drawn; of those one victim each
    #[arg(long, value_name = "FRACTION", default_value_t = 1.0)]
    draw: f64,
    /// Of the draw
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write `{"rows": [...]}` here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Build nothing: take this image of the workload, and the programs beside this one as they are
    #[arg(long, value_name = "DIR")]
    image: Option<PathBuf>,
}

/// The victim in a row of a window that was not reached: nobody was killed, and only the sweep itself was looked at.
const NOBODY: &str = "nobody";
/// Every case is a state folder of its own under this one installation, so that decoys can be named like its things.
const INSTALLATION: InstallationId = InstallationId([0xfa, 0x17, 0x00, 0x01]);
/// One run at a time on a machine: decoys have fixed names.
const LOCK: &str = "/run/lock/drums-fault-windows.lock";
/// How long a tool may work, at most, before it or the agent is killed.
const MOST_WORKED: Duration = Duration::from_millis(60);

#[derive(Clone, Debug, Serialize)]
struct Row {
    arm: ArmKind,
    window: String,
    victim: String,
    clean: bool,
    decoys_spared: bool,
    /// What was left, or went wrong; empty otherwise.
    left: Vec<String>,
    /// How long the tool that is at work in this window had worked when the victim was killed.
    worked_ms: u64,
}

pub fn run(args: &FaultWindowsArgs) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "sessions are made and killed for real: run it as root");
    ensure!((0.0..=1.0).contains(&args.draw), "--draw is a share between 0 and 1, not {}", args.draw);
    let (agent, tree) = prepare(args.image.as_deref())?;
    let lock = File::create(LOCK).with_context(|| format!("cannot make {LOCK}"))?;
    lock.try_lock().with_context(|| format!("another run holds {LOCK}; wait for it"))?;
    let folder = std::env::temp_dir().join("drums-fault-windows");
    case::clear(&agent, &folder)?;
    let folder = Folder::new(folder)?;
    let decoys = Decoys::plant(INSTALLATION, &agent, &tree, &folder)?;
    let ground = Ground { agent, tree, decoys, folder };
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
        registered::check(arm, &listed)?;
        for window in listed {
            let wanted = args.only.as_ref().is_none_or(|text| window.contains(text));
            if wanted && draw.random_bool(args.draw) {
                victims(ground, arm, &window, args.draw < 1.0, &mut draw, rows)?;
            }
        }
    }
    Ok(())
}

/// Whose process it is that stops in a window.
fn stops_in(window: &str) -> &'static str {
    if window.starts_with("sweep/") { "sweep" } else { "agent" }
}

/// The agent or the sweep first, and whoever else is at work in this window after it; of a drawn window one of them,
/// drawn too.
fn victims(
    ground: &Ground,
    arm: ArmKind,
    window: &str,
    drawn: bool,
    draw: &mut ChaCha20Rng,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let mut waiting: Vec<String> = vec![stops_in(window).into()];
    let mut seen: BTreeSet<String> = waiting.iter().cloned().collect();
    while let Some(mut victim) = waiting.pop() {
        let mut left = Vec::new();
        let worked = MOST_WORKED.mul_f64(draw.random());
        let mut worked_ms = 0;
        let began = Instant::now();
        let pick = |others: &BTreeSet<String>| {
            if drawn && let Some(one) = others.iter().chain([&victim]).choose(draw).cloned() {
                victim = one;
            }
            victim.clone()
        };
        match ground.one(arm, window, worked, pick) {
            Ok(found) => {
                left.extend(found.left);
                worked_ms = u64::try_from(found.worked.as_millis()).unwrap_or(u64::MAX);
                match found.others {
                    Some(_) if drawn => {}
                    Some(others) => waiting.extend(others.into_iter().filter(|o| seen.insert(o.clone()))),
                    None => NOBODY.clone_into(&mut victim),
                }
            }
            Err(e) => left.push(format!("{e:#}")),
        }
        let spared = ground.decoys.missing();
        let row = Row {
            arm,
            window: window.to_owned(),
            victim,
            clean: left.is_empty(),
            decoys_spared: spared.is_empty(),
            left: [left, spared].concat(),
            worked_ms,
        };
        let mark = if row.left.is_empty() { "clean" } else { "NOT CLEAN" };
        println!("{arm}  {window}  {}  {mark}  {:.1} s", row.victim, began.elapsed().as_secs_f64());
        for what in &row.left {
            println!("    {what}");
        }
        let lost = !row.decoys_spared;
        rows.push(row);
        ensure!(!lost, "a stranger's thing was touched; nothing after that would mean anything");
    }
    Ok(())
}

/// The agent's binary of this build, and the minimal workload's tree.
pub fn prepare(image: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    let here = std::env::current_exe().context("cannot find this program's own folder")?;
    let folder = here.parent().context("this program lies in no folder")?;
    if let Some(image) = image {
        return Ok((Binaries::beside(folder).agent, image.join("tree")));
    }
    let mut build = workspace::cargo();
    // The same selections as in the Makefile, so that nothing is built a second time.
    build.args(["build", "--quiet", "--locked"]);
    if let Some(profile) = ["release", "quick"].into_iter().find(|p| folder.ends_with(p)) {
        build.args(["--profile", profile, "-p", "xtask", "-p", "drums-agent", "-p", "drums-coordinator"]);
    } else {
        build.args(["--workspace", "--exclude", "drums-ec2", "--bins", "--tests"]);
    }
    workspace::run(&mut build)?;
    let image = workspace::target_dir()?.join("images/minimal");
    crate::image::minimal(&image)?;
    Ok((Binaries::beside(folder).agent, image.join("tree")))
}
