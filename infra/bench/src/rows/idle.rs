//! Memory per idle agent: what a connected agent that only beats adds to the coordinator's proportional set size.

use std::path::Path;

use anyhow::Result;
use drums_common::lease::LeaseTimes;
use tokio::time::sleep;

use super::{Bench, Floor, PATIENCE, told};
use crate::{
    agents::{Pace, Swarm},
    floor::client::{Clients, Load},
    home::experiment,
    process::pss_bytes,
    row::{Goal, Reading, Row, order, ratio, worst},
};

const ARMS: [&str; 2] = ["ours", "bare quinn"];

/// Each round has fresh processes: memory that was once taken is not given back.
#[allow(clippy::cast_precision_loss)] // bytes of some megabytes
pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let all = bench.size.agents;
    let any = experiment(900, Vec::new(), 2, 2, 4096)?;
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(&any))?;
    let per = |before: u64, after: u64| Reading {
        value: (after as f64 - before as f64) / all as f64 / 1024.0,
        cpu_us: f64::NAN,
    };
    let mut readings: [Vec<Reading>; 2] = Default::default();
    let rounds = bench.size.fresh_rounds;
    for (n, round) in order(bench.seed, "idle", ARMS.len(), rounds).into_iter().enumerate() {
        for arm in round {
            let reading = if arm == 0 {
                let coordinator = home.start()?;
                bench.settle().await;
                let before = pss_bytes(coordinator.pid())?;
                let swarm = Swarm::start(home.hosts(0..all)?, home.agents, &any, Pace::default())?;
                swarm.connected(PATIENCE).await?;
                sleep(bench.size.settle() * 10).await;
                per(before, pss_bytes(coordinator.pid())?)
            } else {
                let floor = Floor::start(&home, &dir.join(format!("uploads-{n}.sqlite")))?;
                bench.settle().await;
                let before = pss_bytes(floor.helper.pid())?;
                let beat = std::time::Duration::from_millis(LeaseTimes::default().beat_ms);
                let load = Load { connect: true, beat: Some(beat), ..Load::default() };
                let clients = Clients::start(home.hosts(0..all)?, floor.address, load)?;
                clients.connected(PATIENCE).await?;
                sleep(bench.size.settle() * 10).await;
                per(before, pss_bytes(floor.helper.pid())?)
            };
            readings[arm].push(reading);
        }
        told("idle", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn] = &readings;
    let name = format!("memory per idle agent, {all} agents");
    Ok(vec![
        ratio(&name, ours, ARMS[1], quinn, "KiB", Goal::AtMost(1.1), bench.seed),
        worst(&name, ours, "KiB", Goal::AtMost(48.0)),
    ])
}
