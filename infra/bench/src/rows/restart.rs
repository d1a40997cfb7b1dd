//! A coordinator that is killed in the middle of everything, until it is back: all agents connected again, every run
//! going on.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use drums_common::{ids::RunId, lease::LeaseTimes};
use serde_json::Value;
use tokio::time::sleep;

use super::{Bench, PATIENCE};
use crate::{
    agents::{Pace, Swarm},
    home::{Coordinator, Home, experiment, host_name},
    row::{Goal, Reading, Row, worst},
};

/// Between looks, which cost the coordinator something too.
const LOOK: Duration = Duration::from_millis(50);
/// A round trip of a fleet at work on one machine, QUIC's delayed acknowledgements included.
const CALM: Duration = Duration::from_millis(100);

/// How long everything took, counted from the kill.
#[derive(Clone, Copy, Debug)]
pub struct Back {
    /// The API answers.
    pub answers: Duration,
    /// Every agent was welcomed again.
    pub connected: Duration,
    /// Besides, every run is in the phase in which it was, and a record of each that was not committed before is.
    pub going_on: Duration,
}

/// What the scenario is made of.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub agents: usize,
    pub runs: usize,
    pub blocks: u32,
    pub block: Duration,
}

/// Kills the coordinator `times` times; afterwards, if `to_the_end`, every run must complete with all of its evidence.
pub async fn kill(dir: &Path, program: &Path, scale: Scale, times: usize, to_the_end: bool) -> Result<Vec<Back>> {
    let each = scale.agents / scale.runs;
    ensure!(each >= 1, "fewer agents than runs");
    let mut experiments = Vec::new();
    for run in 0..scale.runs {
        let names = (run * each..(run + 1) * each).map(host_name).collect();
        let id = 900 + u16::try_from(run)?;
        experiments.push(experiment(id, names, u32::try_from(each)?, scale.blocks, 4096)?);
    }
    let home = Home::make(&dir.join("home"), program, each * scale.runs, LeaseTimes::default(), &experiments)?;
    let mut coordinator = home.start()?;
    let pace = Pace { block: scale.block, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..home.len())?, home.agents, &experiments[0], pace)?;
    swarm.connected(PATIENCE).await?;
    let runs = experiments.iter().map(|e| coordinator.run(e)).collect::<Result<Vec<_>>>()?;
    let mut back = Vec::new();
    for kills in 1..=times {
        // As many blocks as hosts since the last kill: what agents make up for a run, they have made up by then.
        let done = (kills * each) as u64;
        wait("every run is in the middle", PATIENCE, || {
            let views = coordinator.runs()?;
            Ok(views.iter().all(|v| v["phase"] == "running" && v["blocks_done"].as_u64() >= Some(done)))
        })
        .await?;
        // Each kill finds a fleet at work, and not one that is still getting over the last.
        swarm.calm(CALM, PATIENCE).await?;
        back.push(kill_once(&home, &mut coordinator, &swarm, &runs).await?);
    }
    if to_the_end {
        wait("every run is closed", PATIENCE * 2, || Ok(coordinator.runs()?.iter().all(|v| !v["closed"].is_null())))
            .await?;
        for view in coordinator.runs()? {
            complete(&coordinator, &view, scale.blocks)?;
        }
    }
    Ok(back)
}

async fn kill_once(home: &Home, coordinator: &mut Coordinator, swarm: &Swarm, runs: &[RunId]) -> Result<Back> {
    let welcomed = || swarm.totals.connects.load(std::sync::atomic::Ordering::SeqCst);
    let began = Instant::now();
    coordinator.running.kill();
    let (before, committed) = (welcomed(), runs.iter().map(|r| swarm.committed(*r)).collect::<Vec<_>>());
    *coordinator = home.start()?;
    let answers = began.elapsed();
    let all = swarm.len() as u64;
    wait("every agent is welcomed again", PATIENCE, || Ok(welcomed() >= before + all)).await?;
    swarm.connected(PATIENCE).await?;
    let connected = began.elapsed();
    wait("every run goes on", PATIENCE, || {
        Ok(runs.iter().zip(&committed).all(|(run, before)| swarm.committed(*run) > *before))
    })
    .await?;
    let going_on = began.elapsed();
    eprintln!(
        "restart: it answers after {answers:.3?}, all are connected after {connected:.3?}, all go on after {going_on:.3?}"
    );
    let broken: Vec<Value> = coordinator.runs()?.into_iter().filter(|v| !v["ending"].is_null()).collect();
    ensure!(broken.is_empty(), "runs ended of it: {broken:?}");
    Ok(Back { answers, connected, going_on })
}

/// Every host of a closed run did every block, and each of its records is there once.
fn complete(coordinator: &Coordinator, view: &Value, blocks: u32) -> Result<()> {
    let verdict = view["verdict"].as_str().unwrap_or_default();
    ensure!(["pass", "fail", "undecided"].contains(&verdict), "a run did not complete: {view}");
    let run = view["run"].as_str().context("a run without an id")?;
    for host in view["hosts"].as_array().context("a run without hosts")? {
        let name = host["host"].as_str().context("a host without a name")?;
        let rows = coordinator.api("GET", &format!("runs/{run}/evidence/{name}?after=0"), None)?;
        let records = rows["rows"].as_array().context("evidence without records")?;
        let numbers: Vec<u64> = records.iter().filter_map(|r| r["record"]["seq"].as_u64()).collect();
        let wanted: Vec<u64> = (1..=records.len() as u64).collect();
        ensure!(numbers == wanted, "{name} of {run}: records {numbers:?}");
        let ended = records.iter().filter(|r| r["record"]["body"]["block_ended"]["kind"] == "measured").count();
        ensure!(ended == blocks as usize, "{name} of {run}: {ended} of {blocks} blocks");
    }
    Ok(())
}

async fn wait(what: &str, patience: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + patience;
    while !holds()? {
        ensure!(Instant::now() < deadline, "not seen within {patience:?}: {what}");
        sleep(LOOK).await;
    }
    Ok(())
}

pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let block = Duration::from_millis(bench.size.block_ms);
    let scale = Scale { agents: bench.size.agents, runs: 10, blocks: 10, block };
    let back = kill(dir, &bench.coordinator(), scale, bench.size.kills, false).await?;
    let seconds = |of: fn(&Back) -> Duration| -> Vec<Reading> {
        back.iter().map(|b| Reading { value: of(b).as_secs_f64(), cpu_us: f64::NAN }).collect()
    };
    let name = format!("killed -9 under {} agents and 10 runs", scale.agents);
    Ok(vec![
        worst(&format!("{name}: all runs go on"), &seconds(|b| b.going_on), "s", Goal::AtMost(5.0)),
        worst(&format!("{name}: all agents are connected"), &seconds(|b| b.connected), "s", Goal::None),
        worst(&format!("{name}: it answers"), &seconds(|b| b.answers), "s", Goal::None),
    ])
}
