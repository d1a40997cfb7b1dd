//! Heartbeats per core: what one beat of one of many agents costs the coordinator.
//!
//! All lease times are a tenth of the defaults, so that beats come ten times as often and everything that goes with them
//! keeps its proportion.

use std::{path::Path, time::Duration};

use anyhow::{Result, ensure};
use drums_common::lease::LeaseTimes;
use tokio::time::sleep;

use super::{Bench, Cpu, Floor, PATIENCE, per_core, told};
use crate::{
    agents::{Pace, Swarm},
    floor::{
        client::{Clients, Load},
        udp,
    },
    home::{experiment, free_address},
    process::Helper,
    row::{Goal, Reading, Row, order, ratio},
};

const EVERY: Duration = Duration::from_millis(50);
const ARMS: [&str; 4] = ["ours", "bare quinn's datagram sink", "raw UDP", "tonic unary (without TLS)"];

fn leases() -> LeaseTimes {
    let d = LeaseTimes::default();
    LeaseTimes {
        beat_ms: d.beat_ms / 10,
        dispatch_ms: d.dispatch_ms / 10,
        silent_ms: d.silent_ms / 10,
        quiet_slack_ms: d.quiet_slack_ms / 10,
        ..d
    }
}

pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let all = bench.size.agents;
    let any = experiment(900, Vec::new(), 2, 2, 4096)?;
    let home = bench.home(dir, leases(), std::slice::from_ref(&any))?;
    let coordinator = home.start()?;
    let floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    let udp_at = free_address()?;
    let udp_server = Helper::start(&["floor-udp", &udp_at.to_string()])?;

    let swarm = Swarm::start(home.hosts(0..all)?, home.agents, &any, Pace { beating: false, ..Pace::default() })?;
    swarm.connected(PATIENCE).await?;
    let clients = Clients::start(home.hosts(0..all)?, floor.address, Load { connect: true, ..Load::default() })?;
    clients.connected(PATIENCE).await?;
    let tonic = Tonic::start(all).await?;

    let period = Duration::from_millis(bench.size.period_ms);
    let rounds = bench.size.rounds;
    let mut readings: [Vec<Reading>; 4] = Default::default();
    let arms = if tonic.is_some() { 4 } else { 3 };
    for (n, round) in order(bench.seed, "beats", arms, rounds).into_iter().enumerate() {
        for arm in round {
            bench.settle().await;
            let reading = match arm {
                0 => {
                    let answers = swarm.totals.answers.load(std::sync::atomic::Ordering::Relaxed);
                    swarm.set_pace(|p| (p.beating, p.beat) = (true, Some(EVERY)));
                    let reading = over(period, coordinator.pid(), || swarm.beats()).await?;
                    swarm.set_pace(|p| p.beating = false);
                    let heard = swarm.totals.answers.load(std::sync::atomic::Ordering::Relaxed) - answers;
                    ensure!(heard > 0, "no beat was answered");
                    reading
                }
                1 => {
                    clients.set(|l| l.beat = Some(EVERY));
                    let reading = over(period, floor.helper.pid(), || clients.sent()).await?;
                    clients.set(|l| l.beat = None);
                    reading
                }
                2 => {
                    let cpu = Cpu::of(udp_server.pid())?;
                    let sent = udp::send(udp_at, all, EVERY, period).await?;
                    #[allow(clippy::cast_precision_loss)] // datagrams of some seconds
                    per_core(cpu.us_per(sent as f64)?)
                }
                _ => match &tonic {
                    Some(tonic) => tonic.call(period).await?,
                    None => continue,
                },
            };
            readings[arm].push(reading);
        }
        told("beats", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn, raw, tonic] = &readings;
    let name = format!("heartbeats per core, {all} agents");
    let seed = bench.seed;
    let mut rows = vec![
        ratio(&name, ours, ARMS[1], quinn, "per s of CPU", Goal::AtLeast(0.8), seed),
        ratio(&name, ours, ARMS[2], raw, "per s of CPU", Goal::None, seed),
    ];
    if !tonic.is_empty() {
        rows.push(ratio(&name, ours, ARMS[3], tonic, "per s of CPU", Goal::AtLeast(3.0), seed));
    }
    Ok(rows)
}

/// The gRPC floor, where it is built in.
#[cfg(feature = "grpc")]
struct Tonic {
    server: Helper,
    channels: crate::floor::grpc::Channels,
}

#[cfg(feature = "grpc")]
impl Tonic {
    async fn start(clients: usize) -> Result<Option<Self>> {
        let address = free_address()?;
        let server = Helper::start(&["floor-grpc", &address.to_string()])?;
        let channels = crate::floor::grpc::Channels::connect(address, clients).await?;
        Ok(Some(Self { server, channels }))
    }

    async fn call(&self, period: Duration) -> Result<Reading> {
        let cpu = Cpu::of(self.server.pid())?;
        let calls = self.channels.call(EVERY, period).await?;
        #[allow(clippy::cast_precision_loss)] // calls of some seconds
        Ok(per_core(cpu.us_per(calls as f64)?))
    }
}

#[cfg(not(feature = "grpc"))]
enum Tonic {}

#[cfg(not(feature = "grpc"))]
impl Tonic {
    #[allow(clippy::unused_async)] // as its counterpart
    async fn start(_: usize) -> Result<Option<Self>> {
        eprintln!("without tonic: this program was built without its feature grpc");
        Ok(None)
    }

    #[allow(clippy::unused_async)] // as its counterpart
    async fn call(&self, _: Duration) -> Result<Reading> {
        match *self {}
    }
}

/// A server's CPU per operation while `count` grows.
async fn over(period: Duration, pid: u32, count: impl Fn() -> u64) -> Result<Reading> {
    // The first beats come together with the order to send them.
    sleep(EVERY * 3).await;
    let (cpu, before) = (Cpu::of(pid)?, count());
    sleep(period).await;
    #[allow(clippy::cast_precision_loss)] // beats of some seconds
    let beats = (count() - before) as f64;
    ensure!(beats > 0.0, "nothing was sent");
    Ok(per_core(cpu.us_per(beats)?))
}
