//! Fidelity gates: was the registered thing what ran? A no makes the run invalid.

use std::collections::BTreeMap;

use drums_common::{
    arm::Mechanism,
    digest::Sha256,
    evidence::Fidelity,
    experiment::{Experiment, Metric},
    williams,
};

use super::{Effect, Gate};
use crate::{
    collect::{Attempt, RunEvidence},
    summary::GateKind,
};

/// Page size of every supported host: the kernel rounds a memory limit down to it.
const PAGE: u64 = 4096;

fn gate(name: &'static str, limit: impl Into<String>) -> Gate {
    Gate::new(name, GateKind::Fidelity, Effect::Invalidates, limit)
}

pub(super) fn judge(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Vec<Gate> {
    vec![
        registration(evidence),
        order(experiment, evidence),
        mechanism(experiment, evidence),
        limits(experiment, evidence),
        equivalence(experiment, evidence),
        agents(evidence),
        samples(experiment, evidence),
    ]
}

fn measured<'e, 'a>(evidence: &'e RunEvidence<'a>) -> impl Iterator<Item = &'e Attempt<'a>> {
    evidence.hosts.values().flat_map(|h| h.attempts.iter()).filter(|a| a.measured())
}

fn readings<'e, 'a>(evidence: &'e RunEvidence<'a>) -> impl Iterator<Item = (&'e Attempt<'a>, usize, &'a Fidelity)> {
    measured(evidence).flat_map(|a| a.rows.iter().flat_map(move |r| r.fidelity.iter().map(move |f| (a, r.arm, *f))))
}

fn registration(evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("registration", "every record carries this registration");
    for sha in &evidence.foreign {
        g.found(format!("records carry registration {sha}"));
    }
    g.reading = format!("{} records", evidence.hosts.values().map(|h| h.records).sum::<u64>());
    g
}

/// M1: the order is the registered one, not what the host liked.
fn order(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("order", "each block's order is drawn from the registered seed");
    let mut n = 0;
    for a in measured(evidence) {
        n += 1;
        let want = williams::block_order(experiment, a.host, a.started.kind, a.started.block);
        if a.started.order != want {
            g.found(format!("{} ran its arms in another order than the registered one", a.place()));
        }
    }
    g.reading = format!("{n} blocks");
    g
}

/// M12.
fn mechanism(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("mechanism", "the registered mechanism really ran");
    let mut n = 0;
    for (a, arm, f) in readings(evidence) {
        n += 1;
        let arm = &experiment.arms[arm];
        if f.kind != arm.kind {
            g.found(format!("{}, arm {}: {} ran instead of {}", a.place(), arm.name, f.kind, arm.kind));
        }
        for fault in &f.faults {
            g.found(format!("{}, arm {}: {fault}", a.place(), arm.name));
        }
    }
    g.reading = format!("{n} readings");
    g
}

/// M13: limits as read back, in every arm.
fn limits(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let l = &experiment.limits;
    let mut g = gate(
        "limits",
        format!(
            "{} thousandths of a CPU on {} CPUs, {} bytes (QEMU {} more), read back",
            l.cpu_milli, l.cpuset_size, l.memory_bytes, l.vmm_memory_overhead_bytes
        ),
    );
    let mut n = 0;
    for (a, arm, f) in readings(evidence) {
        n += 1;
        let arm = &experiment.arms[arm];
        let place = format!("{}, arm {}", a.place(), arm.name);
        let read = &f.limits;
        let overhead = if arm.kind.mechanism() == Mechanism::Qemu { l.vmm_memory_overhead_bytes } else { 0 };
        let memory = l.memory_bytes + overhead;
        if read.cpu_milli != l.cpu_milli {
            g.found(format!("{place}: CPU quota {} instead of {}", read.cpu_milli, l.cpu_milli));
        }
        if read.memory_bytes / PAGE != memory / PAGE {
            g.found(format!("{place}: memory limit {} instead of {memory}", read.memory_bytes));
        }
        let (mut got, mut want) = (read.cpus.clone(), a.started.cpus.clone());
        got.sort_unstable();
        want.sort_unstable();
        if got != want {
            g.found(format!("{place}: CPU set {got:?} instead of the block's {want:?}"));
        }
        if got.len() != l.cpuset_size as usize {
            g.found(format!("{place}: {} CPUs in the set instead of {}", got.len(), l.cpuset_size));
        }
    }
    g.reading = format!("{n} readings");
    g
}

/// M14: the same workload and the same guest server in every arm and on every host.
fn equivalence(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("equivalence", "one workload and one guest server, by digest, in every arm");
    let mut guests: BTreeMap<Sha256, String> = BTreeMap::new();
    let mut workload = experiment.workload.sha256;
    for (host, run) in &evidence.hosts {
        for p in &run.preflights {
            let want = *workload.get_or_insert(p.workload_sha256);
            if p.workload_sha256 != want {
                g.found(format!("{host} unpacked workload {} instead of {}", p.workload_sha256.short(), want.short()));
            }
        }
    }
    for (a, arm, f) in readings(evidence) {
        let place = format!("{}, arm {}", a.place(), experiment.arms[arm].name);
        let want = *workload.get_or_insert(f.workload_sha256);
        if f.workload_sha256 != want {
            g.found(format!("{place}: workload {} instead of {}", f.workload_sha256.short(), want.short()));
        }
        guests.entry(f.guest_sha256).or_insert(place);
    }
    if guests.len() > 1 {
        let list: Vec<String> = guests.iter().map(|(d, place)| format!("{} ({place})", d.short())).collect();
        g.found(format!("{} different guest servers: {}", guests.len(), list.join(", ")));
    }
    g.reading = format!(
        "workload {}, guest server {}",
        workload.map_or("unknown".to_owned(), |w| w.short()),
        guests.keys().next().map_or("unknown".to_owned(), Sha256::short)
    );
    g
}

/// One agent binary for the whole run (an update in the middle is another experiment).
fn agents(evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("agent", "one agent binary on every host, from start to end");
    let mut seen: BTreeMap<Sha256, String> = BTreeMap::new();
    for (host, run) in &evidence.hosts {
        for p in &run.preflights {
            seen.entry(p.agent_sha256).or_insert_with(|| format!("{} on {host}", p.agent_version));
        }
    }
    if seen.len() > 1 {
        let list: Vec<String> = seen.iter().map(|(d, what)| format!("{} ({what})", d.short())).collect();
        g.found(format!("mixed agents: {}", list.join(", ")));
    }
    g.reading = seen.keys().map(Sha256::short).collect::<Vec<_>>().join(", ");
    g
}

/// M10 and the shape of samples: the registered unit, one machine's raw monotonic clock, one value per metric, and every
/// position as the order says.
fn samples(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let mut g = gate("samples", "one value per metric and session, in its unit, durations on CLOCK_MONOTONIC_RAW");
    let mut n = 0;
    for a in measured(evidence) {
        for r in &a.rows {
            let place = || format!("{}, arm {}", a.place(), experiment.arms[r.arm].name);
            if r.outcomes.len() > 1 {
                g.found(format!("{}: {} outcomes", place(), r.outcomes.len()));
            }
            for (metric, samples) in &r.samples {
                n += samples.len();
                if samples.len() > 1 {
                    g.found(format!("{}: {} samples of {}", place(), samples.len(), metric.as_str()));
                }
                for s in samples {
                    if experiment.metric(*metric).is_none() {
                        g.found(format!("{}: {} is not registered", place(), metric.as_str()));
                    }
                    if s.unit != metric.unit() {
                        g.found(format!(
                            "{}: {} in {:?} instead of {}",
                            place(),
                            metric.as_str(),
                            s.unit,
                            metric.unit()
                        ));
                    }
                    if *metric != Metric::CreateCpu && s.clock != "CLOCK_MONOTONIC_RAW" {
                        g.found(format!("{}: {} on clock {:?}", place(), metric.as_str(), s.clock));
                    }
                    if s.position as usize != r.position {
                        g.found(format!("{}: position {} instead of {}", place(), s.position, r.position));
                    }
                }
            }
        }
    }
    g.reading = format!("{n} samples");
    g
}
