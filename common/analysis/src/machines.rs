//! Which hosts are one machine: what inference counts.

use std::collections::BTreeMap;

use drums_common::{arm::Mechanism, evidence::Preflight, experiment::Experiment, ids::HostId};

use crate::{
    collect::RunEvidence,
    summary::{HostSummary, MachineSummary},
};

/// Hosts and machines over all runs. Several hosts on one machine are one machine.
pub struct Machines {
    pub machines: Vec<MachineSummary>,
    pub hosts: Vec<HostSummary>,
}

impl Machines {
    pub fn of(&self, host: &HostId) -> Option<&MachineSummary> {
        self.machines.iter().find(|m| m.hosts.contains(host))
    }

    /// `1 machine, 2 agents`.
    pub fn scale(&self) -> String {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        format!("{}, {}", count(self.machines.len(), "machine"), count(self.hosts.len(), "agent"))
    }
}

pub fn machines(experiment: &Experiment, runs: &[RunEvidence<'_>]) -> Machines {
    let mut latest: BTreeMap<&HostId, &Preflight> = BTreeMap::new();
    for run in runs {
        for (host, h) in &run.hosts {
            if let Some(p) = h.preflights.last() {
                latest.insert(host, p);
            }
        }
    }
    let mut groups: Vec<Vec<(&HostId, &Preflight)>> = Vec::new();
    for (host, p) in latest {
        let same = |g: &&mut Vec<(&HostId, &Preflight)>| {
            g.iter().any(|(_, q)| q.facts.identity.same_machine(&p.facts.identity))
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push((host, p)),
            None => groups.push(vec![(host, p)]),
        }
    }
    let mechanisms: std::collections::BTreeSet<Mechanism> =
        experiment.arms.iter().map(|a| a.kind.mechanism()).collect();
    let mut out = Machines { machines: Vec::new(), hosts: Vec::new() };
    for group in groups {
        let first = &group[0].1.facts;
        let machine = first.identity.key();
        out.machines.push(MachineSummary {
            machine: machine.clone(),
            hosts: group.iter().map(|(h, _)| (*h).clone()).collect(),
            cpu_model: first.cpu_model.clone(),
            kernel: first.kernel.clone(),
            strata: mechanisms.iter().map(|m| (mechanism_name(*m).to_owned(), first.stratum(*m))).collect(),
        });
        out.hosts.extend(group.iter().map(|(host, p)| host_summary(host, &machine, p)));
    }
    out.hosts.sort_by(|a, b| a.host.cmp(&b.host));
    out
}

fn mechanism_name(m: Mechanism) -> &'static str {
    match m {
        Mechanism::Drums => "drums",
        Mechanism::Runc => "runc",
        Mechanism::Qemu => "qemu",
        Mechanism::External => "external",
    }
}

fn host_summary(host: &HostId, machine: &str, p: &Preflight) -> HostSummary {
    use drums_common::machine::Accelerator;
    let f = &p.facts;
    HostSummary {
        host: host.clone(),
        machine: machine.to_owned(),
        hostname: f.hostname.clone(),
        os: f.os.clone(),
        kernel: f.kernel.clone(),
        cpu_model: f.cpu_model.clone(),
        microcode: f.microcode.clone(),
        cpus: f.cpus,
        memory_bytes: f.memory_bytes,
        cgroup_version: f.cgroup_version,
        accelerator: match f.accelerator {
            Accelerator::Tcg => "tcg",
            Accelerator::KvmOnMetal => "kvm on metal",
            Accelerator::KvmNested => "kvm nested",
            Accelerator::None => "none",
        }
        .to_owned(),
        accelerator_detail: f.accelerator_detail.clone(),
        mitigations: f.mitigations.clone(),
        tools: f.tools.iter().map(|(n, t)| (n.clone(), format!("{} ({})", t.version, t.sha256.short()))).collect(),
        agent_version: p.agent_version.clone(),
        agent_sha256: p.agent_sha256,
    }
}
