//! Result upload: 1 MiB of evidence from every agent, until all of it is committed and acknowledged.
//!
//! Each round has fresh processes, stores and agents: nobody writes on in a file that an earlier round made large, and a
//! gigabyte a round would fill a disk.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, Result};
use drums_common::{experiment::Experiment, lease::LeaseTimes};

use super::{Bench, Cpu, Floor, PATIENCE, told};
use crate::{
    agents::{Pace, Swarm},
    floor::client::{Clients, Load},
    home::experiment,
    row::{Goal, Reading, Row, order, ratio},
};

const ARMS: [&str; 2] = ["ours", "bare quinn that hashes, writes and syncs the same way"];

pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let (all, rounds) = (bench.size.agents, bench.size.fresh_rounds);
    let e = experiment(900, Vec::new(), u32::try_from(all)?, 2, 4096)?;
    let mut readings: [Vec<Reading>; 2] = Default::default();
    for (n, round) in order(bench.seed, "upload", ARMS.len(), rounds).into_iter().enumerate() {
        let dir = dir.join(n.to_string());
        for (arm, reading) in one_round(bench, &dir, &e, round).await? {
            readings[arm].push(reading);
        }
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        told("upload", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn] = &readings;
    let name = format!("result upload, {} KiB from each of {all}", bench.size.upload_bytes >> 10);
    Ok(vec![ratio(&name, ours, ARMS[1], quinn, "MB/s", Goal::AtLeast(0.9), bench.seed)])
}

#[allow(clippy::cast_precision_loss)] // counts of agents and bytes
async fn one_round(bench: &Bench, dir: &Path, e: &Experiment, arms: Vec<usize>) -> Result<Vec<(usize, Reading)>> {
    let (all, bytes) = (bench.size.agents, bench.size.upload_bytes);
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(e))?;
    let coordinator = home.start()?;
    let floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    let pace = Pace { beating: false, block: PATIENCE * 60, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..all)?, home.agents, e, pace)?;
    swarm.connected(PATIENCE).await?;
    let clients = Clients::start(home.hosts(0..all)?, floor.address, Load { connect: true, ..Load::default() })?;
    clients.connected(PATIENCE).await?;
    let run = coordinator.run(e)?;
    swarm.settled(run, PATIENCE).await?;

    let rate = |seconds: f64, cpu_us| Reading { value: all as f64 * bytes as f64 / seconds / 1e6, cpu_us };
    let mut readings = Vec::new();
    let mut texts = Some(swarm.texts(bytes));
    for arm in arms {
        // What is left to be written of before is none of this arm's.
        nix::unistd::sync();
        bench.settle().await;
        let pid = if arm == 0 { coordinator.pid() } else { floor.helper.pid() };
        let (cpu, began) = (Cpu::of(pid)?, Instant::now());
        if arm == 0 {
            swarm.say(run, texts.take().unwrap_or_default());
            swarm.settled(run, PATIENCE * 5).await?;
        } else {
            clients.upload(bytes, PATIENCE * 5).await?;
        }
        readings.push((arm, rate(began.elapsed().as_secs_f64(), cpu.us_per(all as f64)?)));
    }
    Ok(readings)
}
