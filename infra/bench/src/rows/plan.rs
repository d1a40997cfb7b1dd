//! A plan of 4 KiB to every agent, until each has acknowledged it by evidence that is committed.
//!
//! Ours is a real run: from the instant at which the coordinator stored that it begins, until the last agent had the
//! acknowledgement of its first record. Bare quinn writes as many bytes and waits for their echo; a second floor has what an
//! echo lacks: each client's record is hashed, written and synced, and then acknowledged. OpenSSH takes the same
//! file to fifty hosts, each connection to one address: it costs what it costs wherever it leads.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, Result};
use drums_common::{clock::Micros, experiment::Registration, lease::LeaseTimes};

use super::{Bench, Cpu, Floor, PATIENCE, end_run, told};
use crate::{
    agents::{Pace, Swarm},
    floor::{
        client::{Clients, Load},
        ssh::Ssh,
    },
    home::experiment,
    row::{Goal, Reading, Row, order, ratio},
};

const BYTES: usize = 4096;
const ARMS: [&str; 5] = [
    "ours",
    "bare quinn echo",
    "OpenSSH, fresh",
    "OpenSSH, warm ControlMaster",
    "bare quinn that writes and syncs a record of each",
];

#[allow(clippy::cast_precision_loss)] // microseconds of one round
pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let all = bench.size.agents;
    let e = experiment(900, Vec::new(), u32::try_from(all)?, 2, BYTES)?;
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(&e))?;
    let coordinator = home.start()?;
    let mut floor = Floor::start(&home, &dir.join("uploads.sqlite"))?;
    // A block would begin right after the plan: this run ends before one does.
    let pace = Pace { beating: false, block: PATIENCE, ..Pace::default() };
    let swarm = Swarm::start(home.hosts(0..all)?, home.agents, &e, pace)?;
    swarm.connected(PATIENCE).await?;
    let clients = Clients::start(home.hosts(0..all)?, floor.address, Load { connect: true, ..Load::default() })?;
    clients.connected(PATIENCE).await?;

    let plan = dir.join("plan.json");
    fs::write(&plan, Registration::freeze(e.clone(), Micros(0))?.canonical)?;
    let hosts = bench.size.ssh_hosts;
    let ssh = match Ssh::missing() {
        None => {
            let mut ssh = Ssh::start(&dir.join("ssh"), hosts)?;
            ssh.open_masters()?;
            Some(ssh)
        }
        Some(_) if bench.size.quick => None,
        Some(why) => anyhow::bail!("OpenSSH is a floor of this row, and {why}"),
    };

    let per = |us: f64, hosts: usize, cpu_us| Reading { value: us / hosts as f64, cpu_us };
    let mut readings: [Vec<Reading>; 5] = Default::default();
    let rounds = bench.size.rounds;
    for (n, round) in order(bench.seed, "plan", ARMS.len(), rounds).into_iter().enumerate() {
        for arm in round {
            if matches!(arm, 2 | 3) && (n >= bench.size.ssh_rounds || ssh.is_none()) {
                continue;
            }
            bench.settle().await;
            let reading = match (arm, &ssh) {
                (0, _) => {
                    let cpu = Cpu::of(coordinator.pid())?;
                    let run = coordinator.run(&e)?;
                    let last = swarm.acknowledged(run, PATIENCE).await?;
                    let cpu_us = cpu.us_per(all as f64)?;
                    let events = coordinator.api("GET", &format!("runs/{run}/events"), None)?;
                    let events = events["events"].as_array().context("no events")?;
                    let started = events.iter().find(|e| e["kind"] == "started").context("it never started")?;
                    let started = started["at_us"].as_i64().context("an event without its time")?;
                    end_run(&coordinator, run).await?;
                    swarm.forget(run, PATIENCE).await?;
                    per((last.0 - started) as f64, all, cpu_us)
                }
                (1, _) => {
                    let cpu = Cpu::of(floor.helper.pid())?;
                    let took = floor.helper.ask(&format!("push {BYTES}"))?;
                    per(took["us"].as_f64().context("no time")?, all, cpu.us_per(all as f64)?)
                }
                (4, _) => {
                    clients.forget_uploads();
                    let (cpu, began) = (Cpu::of(floor.helper.pid())?, Instant::now());
                    floor.helper.ask(&format!("order {BYTES}"))?;
                    clients.uploaded(PATIENCE).await?;
                    per(began.elapsed().as_secs_f64() * 1e6, all, cpu.us_per(all as f64)?)
                }
                (arm, Some(ssh)) => {
                    let took = ssh.push(&plan, arm == 3)?;
                    per(took.as_secs_f64() * 1e6, hosts.into(), f64::NAN)
                }
                (_, None) => continue,
            };
            readings[arm].push(reading);
        }
        told("plan", n, rounds, &ARMS, &readings);
    }
    let [ours, quinn, fresh, warm, synced] = &readings;
    let name = format!("plan of 4 KiB to {all} agents, all acknowledged and committed");
    let mut rows = vec![
        ratio(&name, ours, ARMS[1], quinn, "us per host", Goal::AtMost(1.2), bench.seed),
        ratio(&name, ours, ARMS[4], synced, "us per host", Goal::None, bench.seed),
        ratio(
            "what writing and syncing adds to the echo",
            synced,
            ARMS[1],
            quinn,
            "us per host",
            Goal::None,
            bench.seed,
        ),
    ];
    for (arm, theirs, goal) in [(ARMS[2], fresh, 100.0), (ARMS[3], warm, 10.0)] {
        if !theirs.is_empty() {
            let name = format!("plan per host: {arm} ({hosts} hosts), over ours");
            rows.push(ratio(&name, theirs, ARMS[0], ours, "us per host", Goal::AtLeast(goal), bench.seed));
        }
    }
    Ok(rows)
}
