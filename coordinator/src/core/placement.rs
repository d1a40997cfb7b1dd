//! Which hosts a run gets, and when its machines are free for it.

use drums_common::{
    experiment::{Experiment, HostsRule},
    failure::Failure,
    ids::HostId,
    machine::HostFacts,
};

use super::{run::RunState, turns};

/// A host as placement sees it.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub host: HostId,
    pub connected: bool,
    /// None for a host whose agent never connected.
    pub facts: Option<HostFacts>,
}

/// Why a host cannot take an experiment, in words; empty when it can.
pub fn lacks(experiment: &Experiment, candidate: &Candidate) -> Vec<String> {
    let mut out = Vec::new();
    let Some(facts) = &candidate.facts else {
        out.push("its agent never connected".to_owned());
        return out;
    };
    if !candidate.connected {
        out.push("its agent is not connected".to_owned());
    }
    out.extend(unmet(experiment, facts));
    out
}

/// What a host's facts say that it cannot do of an experiment.
pub fn unmet(experiment: &Experiment, facts: &HostFacts) -> Vec<String> {
    let mut out = Vec::new();
    for arm in &experiment.arms {
        if let Some(why) = facts.unfit.get(&arm.kind) {
            out.push(format!("arm {}: {why}", arm.name));
        }
    }
    if facts.cpus < experiment.limits.cpuset_size {
        out.push(format!("it has {} CPUs, the limits need {}", facts.cpus, experiment.limits.cpuset_size));
    }
    let need = experiment.limits.memory_bytes + experiment.limits.vmm_memory_overhead_bytes;
    if facts.memory_bytes < need {
        out.push(format!("it has {} MiB of memory, one session needs {}", facts.memory_bytes >> 20, need >> 20));
    }
    out
}

/// The hosts of a new run, in their registered order; or why there are not enough.
pub fn place(experiment: &Experiment, candidates: &[Candidate]) -> Result<Vec<HostId>, Failure> {
    let HostsRule { names, count } = &experiment.hosts;
    let mut reasons = Vec::new();
    let mut chosen = Vec::new();
    let wanted: Vec<&Candidate> = if names.is_empty() {
        candidates.iter().collect()
    } else {
        for name in names.iter().filter(|n| !candidates.iter().any(|c| c.host == **n)) {
            reasons.push(format!("{name}: there is no such host"));
        }
        names.iter().filter_map(|n| candidates.iter().find(|c| c.host == *n)).collect()
    };
    for candidate in wanted {
        let why = lacks(experiment, candidate);
        if why.is_empty() {
            chosen.push(candidate.host.clone());
        } else {
            reasons.push(format!("{}: {}", candidate.host, why.join(", ")));
        }
    }
    chosen.truncate(*count as usize);
    if chosen.len() == *count as usize {
        return Ok(chosen);
    }
    let have = chosen.len();
    let reasons = if reasons.is_empty() { "there are no others".to_owned() } else { reasons.join("; ") };
    Err(Failure::refused(
        "not-enough-hosts",
        format!("{} needs {count} hosts and {have} can take it: {reasons}", experiment.id),
        "start the agents (drums-agent run), see drumsctl fleet, or install what is missing with drums-agent setup",
    ))
}

/// True if none of `earlier` (live runs that were made before) uses a machine of `run`: one run measures there at a time.
pub fn machines_free(run: &RunState, earlier: &[&RunState]) -> bool {
    earlier.iter().filter(|other| other.live() && other.id != run.id).all(|other| {
        let all: Vec<_> = run.hosts.iter().chain(&other.hosts).map(|h| &h.machine).collect();
        let own = run.hosts.len();
        turns::machines(all.into_iter())
            .iter()
            .all(|group| group.iter().all(|&i| i < own) || group.iter().all(|&i| i >= own))
    })
}
