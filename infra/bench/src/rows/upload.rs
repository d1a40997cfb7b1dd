//! Result upload: 1 MiB of evidence from every agent, until all of it is committed and acknowledged.

use std::{path::Path, time::Instant};

use anyhow::Result;
use drums_common::lease::LeaseTimes;

use super::{Bench, Cpu, Floor, PATIENCE, settle};
use crate::{
    agents::{Pace, Swarm},
    floor::client::{Clients, Load},
    home::experiment,
    row::{Goal, Reading, Row, order, ratio},
};

const BYTES: usize = 1 << 20;

#[allow(clippy::cast_precision_loss)] // counts of agents and bytes
pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let all = bench.size.agents;
    let e = experiment(900, Vec::new(), u32::try_from(all)?, 2, 4096)?;
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(&e))?;
    let coordinator = home.start()?;
    let floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    let pace = Pace { beating: false, block: PATIENCE * 60, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..all)?, home.agents, &e, pace)?;
    swarm.connected(PATIENCE).await?;
    let clients = Clients::start(home.hosts(0..all)?, floor.address, Load { connect: true, ..Load::default() })?;
    clients.connected(PATIENCE).await?;
    let run = coordinator.run(&e)?;
    swarm.settled(run, PATIENCE).await?;

    let rate = |seconds: f64, cpu_us| Reading { value: all as f64 * BYTES as f64 / seconds / 1e6, cpu_us };
    let mut readings: [Vec<Reading>; 2] = Default::default();
    for round in order(bench.seed, "upload", 2, bench.size.long_rounds) {
        for arm in round {
            settle().await;
            let reading = if arm == 0 {
                let (cpu, began) = (Cpu::of(coordinator.pid())?, Instant::now());
                swarm.say(run, BYTES);
                swarm.settled(run, PATIENCE * 5).await?;
                rate(began.elapsed().as_secs_f64(), cpu.us_per(all as f64)?)
            } else {
                let (cpu, began) = (Cpu::of(floor.helper.pid())?, Instant::now());
                clients.upload(BYTES, PATIENCE * 5).await?;
                rate(began.elapsed().as_secs_f64(), cpu.us_per(all as f64)?)
            };
            readings[arm].push(reading);
        }
    }
    let [ours, quinn] = &readings;
    let name = format!("result upload, 1 MiB from each of {all}");
    let peer = "bare quinn that hashes, writes and syncs the same way";
    Ok(vec![ratio(&name, ours, peer, quinn, "MB/s", Goal::AtLeast(0.9), bench.seed)])
}
