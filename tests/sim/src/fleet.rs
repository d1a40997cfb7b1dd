//! What every simulation begins with: machines, hosts, experiments, and a home that knows of them.

use drums_agent::spool::RunMeta;
use drums_common::{
    arm::ArmKind,
    clock::Micros,
    digest::Sha256,
    experiment::{
        Arm, Bar, BarRule, Design, Experiment, Gates, HostsRule, Limits, Metric, MetricSpec, Registration, WorkloadRef,
    },
    ids::{ExperimentId, HostId, InstallationId, RunId},
    machine::{Accelerator, HostFacts, MachineIdentity},
};
use drums_coordinator::{
    net::ports::Peer,
    store::{AuditRow, CertificateRow, Ownership, Store, StoreError, Who},
};

/// Hosts of the fleet and the machine that each is on: h1 and h2 share one.
pub const HOSTS: [(&str, &str); 4] = [("h1", "m1"), ("h2", "m1"), ("h3", "m2"), ("h4", "m3")];

/// Experiments: number, hosts, minutes of deadline.
const EXPERIMENTS: [(u16, &[&str], u64); 5] = [
    (901, &["h1", "h2"], 60),
    (902, &["h2", "h3"], 75),
    (903, &["h3"], 50),
    (904, &["h1", "h3", "h4"], 45),
    (905, &["h4"], 20),
];

pub fn host(name: &str) -> HostId {
    name.parse().expect("a host's name")
}

pub fn peer(name: &str) -> Peer {
    let mut installation = [0; 4];
    installation.copy_from_slice(&Sha256::of(name.as_bytes()).0[..4]);
    Peer {
        host: host(name),
        installation: InstallationId(installation),
        certificate: Sha256::of(name.as_bytes()),
        from: (std::net::Ipv4Addr::LOCALHOST, 1).into(),
    }
}

/// Digest of the agent's program, the same on all hosts.
pub fn build() -> Sha256 {
    Sha256::of(b"agent")
}

pub fn facts(machine: &str) -> HostFacts {
    HostFacts {
        identity: MachineIdentity {
            boot_id: machine.into(),
            machine_id: machine.into(),
            dmi_uuid: String::new(),
            btime_s: 1,
            hardware: "x2".into(),
        },
        hostname: machine.into(),
        kernel: "6".into(),
        os: "Debian 12".into(),
        cpu_model: "cpu".into(),
        microcode: String::new(),
        mitigations: Default::default(),
        cpus: 2,
        memory_bytes: 1 << 34,
        disk_free_bytes: 1 << 34,
        cgroup_version: 1,
        accelerator: Accelerator::None,
        accelerator_detail: String::new(),
        tools: Default::default(),
        unfit: Default::default(),
    }
}

pub fn run_meta(run: RunId, registration: Sha256, host: &HostId) -> RunMeta {
    RunMeta { run, registration, host: host.clone() }
}

/// Two arms, one warm-up and four measured blocks.
fn experiment(id: u16, hosts: &[&str], deadline_minutes: u64) -> Experiment {
    let arm =
        |name: &str, kind| Arm { name: name.parse().expect("an arm's name"), kind, control: None, command: vec![] };
    let (drums, runc) = (arm("drums", ArmKind::DrumsCold), arm("runc", ArmKind::RuncCold));
    Experiment {
        version: 1,
        id: ExperimentId(id),
        title: "simulated".into(),
        hypothesis: "nothing is lost".into(),
        workload: WorkloadRef {
            name: "minimal".parse().expect("a workload's name"),
            sha256: Some(Sha256::of(b"workload")),
        },
        limits: Limits { cpu_milli: 1_000, cpuset_size: 1, memory_bytes: 1 << 29, vmm_memory_overhead_bytes: 0 },
        design: Design {
            blocks_per_host: 4,
            warmup_blocks: 1,
            template_builds_per_host: 1,
            seed: u64::from(id),
            max_runs: 100,
            ready_timeout_ms: 30_000,
            margin: 0.25,
            alpha: 0.05,
        },
        hosts: HostsRule { names: hosts.iter().map(|h| host(h)).collect(), count: hosts.len() as u32 },
        metrics: vec![MetricSpec {
            metric: Metric::CreateToReady,
            endpoint: "E3".into(),
            position: "K2".into(),
            base_case: "cold as shipped".into(),
            primary: true,
        }],
        bars: vec![Bar {
            name: "b".into(),
            metric: Metric::CreateToReady,
            numerator: drums.name.clone(),
            denominator: runc.name.clone(),
            at_most: 1.0,
            rule: BarRule::Bound,
        }],
        arms: vec![drums, runc],
        gates: Gates {
            max_steal_fraction: 0.05,
            max_outside_cpu_fraction: 0.2,
            max_canary_ratio: 1.5,
            max_clock_step_ms: 50.0,
            settle_timeout_ms: 2_000,
            max_void_fraction: 0.2,
        },
        deadline_ms: deadline_minutes * 60_000,
        not_after: None,
    }
}

pub fn registrations() -> Vec<Registration> {
    EXPERIMENTS
        .iter()
        .map(|(id, hosts, minutes)| {
            Registration::freeze(experiment(*id, hosts, *minutes), Micros(0)).expect("a sound experiment")
        })
        .collect()
}

/// A home in which the fleet is enrolled and everything is registered. `peers` are its hosts.
pub fn furnish(store: &mut dyn Store, peers: &[Peer]) -> Result<(), StoreError> {
    let audit = AuditRow::new(Micros(1), Who::new("simulation", ""), "furnish");
    for r in registrations() {
        store.add_registration(&r, "simulated", false, &audit)?;
    }
    for p in peers {
        store.add_host(&p.host, "sandbox", Ownership::Adopted, &audit)?;
        let row = CertificateRow {
            sha256: p.certificate,
            host: p.host.clone(),
            installation: p.installation,
            expires: Micros(i64::MAX),
            revoked: None,
        };
        store.add_certificate(&row, &audit)?;
    }
    Ok(())
}
