//! The machine around a block, as a port: what is read of it between timed windows. The real one reads this host.

use std::{collections::BTreeSet, time::Duration};

use super::{
    canary,
    noise::{self, NoisePoint},
    settle::{self, Settled, Survey},
};
use crate::engine::api::ArmEngine;

/// Reads the machine between timed windows.
pub trait Surroundings {
    /// Waits until the machine is as quiet as `baseline`, or without one until it stands still, at most `limit`.
    fn settle(&mut self, baseline: Option<&Survey>, limit: Duration) -> Settled;
    /// Times the fixed loop on these CPUs, milliseconds.
    fn canary(&mut self, cpus: &[u32]) -> Result<f64, String>;
    /// CPU accounts now.
    fn noise(&mut self, engine: &dyn ArmEngine) -> Result<NoisePoint, String>;
}

/// This host.
#[derive(Clone, Debug)]
pub struct ThisMachine {
    shim: Option<u32>,
    parents: BTreeSet<u32>,
}

impl ThisMachine {
    /// `shim` is the pid of the agent's shim.
    pub fn new(shim: Option<u32>) -> Self {
        Self { shim, parents: shim.into_iter().chain([std::process::id()]).collect() }
    }
}

impl Surroundings for ThisMachine {
    fn settle(&mut self, baseline: Option<&Survey>, limit: Duration) -> Settled {
        settle::settle(baseline, limit, || settle::survey(&self.parents))
    }

    fn canary(&mut self, cpus: &[u32]) -> Result<f64, String> {
        canary::run(cpus).map_err(|e| drums_common::telemetry::chain(&e))
    }

    fn noise(&mut self, engine: &dyn ArmEngine) -> Result<NoisePoint, String> {
        let machine = noise::machine_cpu().map_err(|e| drums_common::telemetry::chain(&e))?;
        let harness_us = noise::self_cpu_us() + self.shim.map_or(0, noise::pid_cpu_us);
        Ok(NoisePoint { machine, own_us: engine.own_cpu_us(), harness_us })
    }
}

/// CPUs that this process may run on: what sessions' CPU sets are drawn from.
pub fn available_cpus() -> Vec<u32> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap_or_default();
    (0..nix::sched::CpuSet::count())
        .filter(|c| set.is_set(*c).unwrap_or(false))
        .filter_map(|c| u32::try_from(c).ok())
        .collect()
}
