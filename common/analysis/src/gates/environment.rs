//! Environment gates: noise, clock, settling. Blind to the arm; they void whole blocks.

use std::collections::BTreeMap;

use drums_common::{evidence::Environment, experiment::Experiment, ids::HostId};

use super::{AttemptKey, Effect, Gate, even};
use crate::{
    collect::{HostRun, RunEvidence},
    stats::median,
    summary::GateKind,
};

pub(super) struct Judged<'a> {
    /// Why each voided attempt is void.
    pub(super) voids: BTreeMap<AttemptKey<'a>, Vec<String>>,
    pub(super) gates: Vec<Gate>,
}

/// Median of a host's canary loops in a run; none if it ran none.
pub(crate) fn host_canary(run: &HostRun<'_>) -> Option<f64> {
    let all: Vec<f64> =
        run.attempts.iter().filter_map(|a| a.ended).flat_map(|e| e.environment.canaries_ms.clone()).collect();
    median(&all)
}

/// A share of one CPU over a block.
pub(crate) fn fraction(part_ms: f64, e: &Environment) -> f64 {
    if e.duration_ms > 0.0 { part_ms / e.duration_ms } else { 0.0 }
}

pub(crate) fn canary_ratio(e: &Environment, host_median: Option<f64>) -> f64 {
    let slowest = e.canaries_ms.iter().copied().fold(0.0, f64::max);
    match host_median {
        Some(m) if m > 0.0 => slowest / m,
        _ => 1.0,
    }
}

pub(super) fn judge<'a>(experiment: &Experiment, evidence: &RunEvidence<'a>) -> Judged<'a> {
    let g = &experiment.gates;
    let gate = |name, limit: String| Gate::new(name, GateKind::Environment, Effect::VoidsBlock, limit);
    let mut steal = gate("steal", format!("at most {} of a CPU", g.max_steal_fraction));
    let mut outside = gate("outside-cpu", format!("at most {} of a CPU", g.max_outside_cpu_fraction));
    let mut canary = gate("canary", format!("at most {} of the host's median", g.max_canary_ratio));
    let mut clock = gate("clock", format!("steps of at most {} ms", g.max_clock_step_ms));
    let mut settle = gate("settle", format!("settled within {} ms", g.settle_timeout_ms));
    let mut voids: BTreeMap<AttemptKey<'a>, Vec<String>> = BTreeMap::new();
    let (mut worst_steal, mut worst_outside, mut worst_canary, mut worst_step) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
    let (mut judged, mut unsettled) = (0u64, 0u64);

    for (host, run) in &evidence.hosts {
        let usual = host_canary(run);
        for (i, attempt) in run.attempts.iter().enumerate().filter(|(_, a)| a.measured() && a.completed()) {
            let Some(end) = attempt.ended else { continue };
            judged += 1;
            let e = &end.environment;
            let mut void = |gate: &mut Gate, why: String| {
                gate.found(format!("{}: {why}", attempt.place()));
                voids.entry((*host, i)).or_default().push(why);
            };
            let readings =
                [fraction(e.steal_ms, e), fraction(e.outside_cpu_ms, e), canary_ratio(e, usual), e.clock_step_ms.abs()];
            worst_steal = worst_steal.max(readings[0]);
            worst_outside = worst_outside.max(readings[1]);
            worst_canary = worst_canary.max(readings[2]);
            worst_step = worst_step.max(readings[3]);
            if readings.iter().any(|r| !r.is_finite()) || e.duration_ms <= 0.0 || e.canaries_ms.is_empty() {
                void(&mut canary, "the environment was not read".to_owned());
                continue;
            }
            if readings[0] > g.max_steal_fraction {
                void(&mut steal, format!("steal {:.3} of a CPU", readings[0]));
            }
            if readings[1] > g.max_outside_cpu_fraction {
                void(&mut outside, format!("outside CPU {:.3} of a CPU", readings[1]));
            }
            if readings[2] > g.max_canary_ratio {
                void(&mut canary, format!("canary {:.2} of the median", readings[2]));
            }
            if readings[3] > g.max_clock_step_ms {
                void(&mut clock, format!("the wall clock stepped by {:.2} ms", e.clock_step_ms));
            }
            if !e.settled {
                unsettled += 1;
                void(&mut settle, format!("not settled: {}", e.unsettled.join(", ")));
            }
        }
    }

    steal.reading = format!("at most {worst_steal:.3}");
    outside.reading = format!("at most {worst_outside:.3}");
    canary.reading = format!("at most {worst_canary:.2}");
    clock.reading = format!("at most {worst_step:.2} ms");
    settle.reading = format!("{unsettled} blocks unsettled");

    let voided = voids.len() as u64;
    let mut share = Gate::new(
        "void-fraction",
        GateKind::Environment,
        Effect::Invalidates,
        format!("at most {} of the blocks voided", g.max_void_fraction),
    );
    share.reading = format!("{voided} of {judged}");
    if judged > 0 && voided as f64 / judged as f64 > g.max_void_fraction {
        share.found(format!("{voided} of {judged} blocks were voided"));
    }
    Judged { voids, gates: vec![steal, outside, canary, clock, settle, share, even::gate(experiment, evidence)] }
}

/// Readings of one host in a run, over its measured blocks: for the report.
pub(crate) fn readings<'e>(run: &'e HostRun<'_>) -> Vec<&'e Environment> {
    run.attempts.iter().filter(|a| a.measured()).filter_map(|a| a.ended).map(|e| &e.environment).collect()
}

/// A host and its readings, by run.
pub(crate) fn by_host<'e, 'a>(evidence: &'e RunEvidence<'a>) -> impl Iterator<Item = (&'a HostId, &'e HostRun<'a>)> {
    evidence.hosts.iter().map(|(h, r)| (*h, r))
}
