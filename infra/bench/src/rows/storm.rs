//! Reconnect storm: everybody dials at once. Handshakes per core, with hello, welcome and the first order on our side.

use std::{path::Path, time::Instant};

use anyhow::Result;
use drums_analysis::stats::ratio::MIN_UNITS;
use drums_common::lease::LeaseTimes;
use drums_coordinator::pki::Pki;

use super::{Bench, Cpu, Floor, PATIENCE, per_core, told};
use crate::{
    agents::{Pace, Swarm},
    floor::{
        client::{Clients, Load},
        tls,
    },
    home::experiment,
    row::{Goal, Reading, Row, order, ratio, worst},
};

const ARMS: [&str; 3] = ["ours", "bare quinn", "rustls in memory, server's side"];

#[allow(clippy::cast_precision_loss)] // counts of handshakes
pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let all = bench.size.agents;
    let any = experiment(900, Vec::new(), 2, 2, 4096)?;
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(&any))?;
    let coordinator = home.start()?;
    let floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    let pki = Pki::open(&home.dir.join("pki"))?;
    let one = home.hosts(0..1)?.remove(0).identity;
    let off = Pace { connect: false, beating: false, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..all)?, home.agents, &any, off)?;
    let clients = Clients::start(home.hosts(0..all)?, floor.address, Load::default())?;

    let mut readings: [Vec<Reading>; 3] = Default::default();
    let mut took = Vec::new();
    // The first storm of each makes what later ones find: threads, statements, pages.
    let rounds = bench.size.rounds.max(MIN_UNITS) + 1;
    for (n, round) in order(bench.seed, "storm", ARMS.len(), rounds).into_iter().enumerate() {
        for arm in round {
            bench.settle().await;
            let reading = match arm {
                0 => {
                    let (cpu, began) = (Cpu::of(coordinator.pid())?, Instant::now());
                    swarm.set_pace(|p| p.connect = true);
                    swarm.connected(PATIENCE).await?;
                    let seconds = began.elapsed().as_secs_f64();
                    bench.settle().await;
                    let reading = per_core(cpu.us_per(all as f64)?);
                    if n > 0 {
                        took.push(Reading { value: seconds, cpu_us: reading.cpu_us });
                    }
                    swarm.set_pace(|p| p.connect = false);
                    swarm.gone(PATIENCE).await?;
                    reading
                }
                1 => {
                    let cpu = Cpu::of(floor.helper.pid())?;
                    clients.set(|l| l.connect = true);
                    clients.connected(PATIENCE).await?;
                    bench.settle().await;
                    let reading = per_core(cpu.us_per(all as f64)?);
                    clients.set(|l| l.connect = false);
                    clients.gone(PATIENCE).await?;
                    reading
                }
                _ => {
                    let n = all.min(200);
                    per_core(tls::server_ns(&pki, &one, n)? as f64 / 1e3 / n as f64)
                }
            };
            if n > 0 {
                readings[arm].push(reading);
            }
        }
        told("storm", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn, tls] = &readings;
    let name = format!("reconnect storm of {all}: handshakes per core");
    Ok(vec![
        ratio(&name, ours, ARMS[1], quinn, "per s of CPU", Goal::AtLeast(0.8), bench.seed),
        ratio(&name, ours, ARMS[2], tls, "per s of CPU", Goal::None, bench.seed),
        worst(&format!("reconnect storm of {all}: until all are welcomed"), &took, "s", Goal::None),
    ])
}
