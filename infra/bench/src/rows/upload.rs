//! Result upload: 1 MiB of evidence from every agent, until all of it is committed and acknowledged.
//!
//! Each arm of each round has fresh processes, stores and agents, and its folder is removed before the next begins: nobody
//! writes on in a file that an earlier round made large, and everybody finds the pages in memory that whoever came before
//! has freed. Of two arms with one folder the second was up to a quarter slower, and a profile showed it copying to pages
//! of the page cache for longer: presumably those that the machine's own host had to bring first.

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
    // The first round finds pages that nobody has used yet.
    let (all, rounds) = (bench.size.agents, bench.size.fresh_rounds + 1);
    let e = experiment(900, Vec::new(), u32::try_from(all)?, 2, 4096)?;
    let mut readings: [Vec<Reading>; 2] = Default::default();
    for (n, round) in order(bench.seed, "upload", ARMS.len(), rounds).into_iter().enumerate() {
        for arm in round {
            let dir = dir.join(format!("{n}-{arm}"));
            let reading = if arm == 0 { ours(bench, &dir, &e).await? } else { floor(bench, &dir, &e).await? };
            fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
            if n > 0 {
                readings[arm].push(reading);
            }
        }
        told("upload", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn] = &readings;
    let name = format!("result upload, {} KiB from each of {all}", bench.size.upload_bytes >> 10);
    Ok(vec![ratio(&name, ours, ARMS[1], quinn, "MB/s", Goal::AtLeast(0.9), bench.seed)])
}

async fn ours(bench: &Bench, dir: &Path, e: &Experiment) -> Result<Reading> {
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(e))?;
    let coordinator = home.start()?;
    let pace = Pace { beating: false, block: PATIENCE * 60, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..bench.size.agents)?, home.agents, e, pace)?;
    swarm.connected(PATIENCE).await?;
    let run = coordinator.run(e)?;
    swarm.settled(run, PATIENCE).await?;
    let texts = swarm.texts(bench.size.upload_bytes);
    rate(bench, coordinator.pid(), async {
        swarm.say(run, texts);
        swarm.settled(run, PATIENCE * 5).await
    })
    .await
}

async fn floor(bench: &Bench, dir: &Path, e: &Experiment) -> Result<Reading> {
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(e))?;
    let floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    let load = Load { connect: true, ..Load::default() };
    let clients = Clients::start(home.hosts(0..bench.size.agents)?, floor.address, load)?;
    clients.connected(PATIENCE).await?;
    rate(bench, floor.helper.pid(), clients.upload(bench.size.upload_bytes, PATIENCE * 5)).await
}

/// Megabytes per second of an upload from every agent to the server `pid`.
#[allow(clippy::cast_precision_loss)] // counts of agents and bytes
async fn rate(bench: &Bench, pid: u32, upload: impl Future<Output = Result<()>>) -> Result<Reading> {
    // What is left to be written of before is none of this arm's.
    nix::unistd::sync();
    bench.settle().await;
    let (all, bytes) = (bench.size.agents as f64, bench.size.upload_bytes as f64);
    let (cpu, began) = (Cpu::of(pid)?, Instant::now());
    upload.await?;
    Ok(Reading { value: all * bytes / began.elapsed().as_secs_f64() / 1e6, cpu_us: cpu.us_per(all)? })
}
