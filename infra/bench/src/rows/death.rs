//! An agent's death, until people are shown it. Each victim is a process of its own, and is killed for real.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use drums_common::{draw::Draw, lease::LeaseTimes};
use tokio::time::sleep;

use super::{Bench, PATIENCE};
use crate::{
    agents::{Pace, Swarm},
    home::{experiment, host_name},
    process::Helper,
    row::{Goal, Reading, Row, worst},
};

pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let (all, deaths) = (bench.size.agents, bench.size.deaths);
    let any = experiment(900, Vec::new(), 2, 2, 4096)?;
    let home = bench.home(dir, LeaseTimes::default(), std::slice::from_ref(&any))?;
    let coordinator = home.start()?;
    let swarm = Swarm::start(home.hosts(deaths..all)?, home.agents, &any, Pace::default())?;
    swarm.connected(PATIENCE).await?;
    let mut victims = Vec::new();
    for n in 0..deaths {
        let state = home.write_state(n)?;
        victims.push(Helper::start(&["agent", &state.display().to_string(), &n.to_string()])?);
    }
    let mut draw = Draw::new(bench.seed, &["deaths"]);
    let mut readings = Vec::new();
    for (n, mut victim) in victims.into_iter().enumerate() {
        let name = host_name(n).to_string();
        // At any instant between two beats.
        sleep(Duration::from_millis(500 + draw.below(500))).await;
        ensure!(state(&coordinator, &name)? == "connected", "{name} is not connected before its death");
        victim.kill();
        let died = Instant::now();
        while state(&coordinator, &name)? == "connected" {
            ensure!(died.elapsed() < PATIENCE, "{name}'s death was never shown");
            sleep(Duration::from_millis(20)).await;
        }
        let seconds = died.elapsed().as_secs_f64();
        readings.push(Reading { value: seconds, cpu_us: f64::NAN });
        eprintln!("death: {} of {deaths}: shown after {seconds:.3} s", n + 1);
    }
    let wrongly: Vec<_> = coordinator
        .states()?
        .into_iter()
        .filter(|(name, state)| (deaths..all).any(|n| host_name(n).as_str() == name) && state != "connected")
        .collect();
    ensure!(wrongly.is_empty(), "these live and are shown otherwise: {wrongly:?}");
    Ok(vec![worst(&format!("an agent's death is shown, {all} agents"), &readings, "s", Goal::AtMost(3.0))])
}

fn state(coordinator: &crate::home::Coordinator, name: &str) -> Result<String> {
    let states = coordinator.states()?;
    Ok(states.into_iter().find(|(n, _)| n == name).map(|(_, s)| s).unwrap_or_default())
}
