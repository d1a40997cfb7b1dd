//! Made-up evidence for tests, here and in other packages: an experiment like EXP-028 and records as agents would write
//! them, with faults to order.
//!
//! Nothing in the way from evidence to verdict uses this, and nothing made here may be called a measurement: the agent
//! version says `synthetic`.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    arm::{ArmKind, Mechanism},
    clock::Micros,
    digest::Sha256,
    draw::Draw,
    evidence::{
        BlockEnded, BlockKind, BlockResult, BlockStarted, Body, Closed, Environment, Fidelity, INJECTED_DELAY,
        Identity, LimitsRead, Log, Outcome, Phase, Preflight, Record, Sample, Teardown, Template, Timeline,
    },
    experiment::{
        Arm, Bar, BarRule, Control, Design, Experiment, Gates, HostsRule, Limits, Metric, MetricSpec, Registration,
        WorkloadRef,
    },
    ids::{ArmName, Generation, HostId, RunId, SessionRef},
    machine::{Accelerator, HostFacts, MachineIdentity, Tool},
    williams,
};

use crate::collect::{RunMeta, RunState};

/// What to make. Change the fields, then call [`Scenario::run`].
#[derive(Clone, Debug)]
pub struct Scenario {
    pub experiment: Experiment,
    /// Host and the number of its machine.
    pub hosts: Vec<(HostId, u32)>,
    /// True median of create-to-ready per arm, milliseconds.
    pub medians_ms: BTreeMap<ArmName, f64>,
    /// Spread of a value around its block, as standard deviation of the logarithm.
    pub sigma: f64,
    pub block_sigma: f64,
    pub build_sigma: f64,
    /// Fraction added to whatever runs first in a block.
    pub first_position_effect: f64,
    /// Fraction by which everything is slower at the end of a run than at its start.
    pub drift: f64,
    /// Sessions that never become ready.
    pub failing: BTreeSet<(HostId, u32, ArmName)>,
    /// Blocks that a noisy neighbour disturbs.
    pub noisy: BTreeSet<(HostId, u32)>,
    /// An arm after whose sessions the machine is slower, too little to void a block.
    pub disturbing: Option<ArmName>,
    /// Delay put into delayed arms, over what was registered.
    pub delay_factor: f64,
    /// Seed of the made-up world; the registered seed is the experiment's.
    pub world: u64,
}

/// Parses a name of this module's own.
fn name<T: std::str::FromStr>(s: &str) -> T
where
    T::Err: std::fmt::Debug,
{
    s.parse().expect("a well-formed name")
}

/// An experiment with EXP-028's eight arms, metrics and bars.
pub fn exp028() -> Experiment {
    let arm = |n: &str, kind, control| Arm { name: name(n), kind, control, command: Vec::new() };
    let bar = |n: &str, numerator: &str, denominator: &str, at_most| Bar {
        name: n.to_owned(),
        metric: Metric::CreateToReady,
        numerator: name(numerator),
        denominator: name(denominator),
        at_most,
        rule: BarRule::Bound,
    };
    let metric = |metric, endpoint: &str, primary| MetricSpec {
        metric,
        endpoint: endpoint.to_owned(),
        position: "K2".to_owned(),
        base_case: "cold as shipped, restored steady".to_owned(),
        primary,
    };
    Experiment {
        version: drums_common::experiment::CANONICAL_VERSION,
        id: name("EXP-028"),
        title: "Three isolation mechanisms, cold and from a template, on a minimal guest".to_owned(),
        hypothesis:
            "A namespace session is ready sooner than a runc container, and a QEMU guest restored from a template \
                     sooner than one that boots."
                .to_owned(),
        workload: WorkloadRef { name: name("minimal"), sha256: Some(Sha256::of(b"workload")) },
        limits: Limits {
            cpu_milli: 1000,
            cpuset_size: 1,
            memory_bytes: 512 << 20,
            vmm_memory_overhead_bytes: 128 << 20,
        },
        design: Design {
            blocks_per_host: 8,
            warmup_blocks: 1,
            template_builds_per_host: 4,
            seed: 28,
            max_runs: 3,
            ready_timeout_ms: 30_000,
            margin: 0.25,
            alpha: 0.05,
        },
        hosts: HostsRule { names: Vec::new(), count: 2 },
        arms: vec![
            arm("drums-cold", ArmKind::DrumsCold, None),
            arm("drums-restored", ArmKind::DrumsRestored, None),
            arm("runc-cold", ArmKind::RuncCold, None),
            arm("runc-restored", ArmKind::RuncRestored, None),
            arm("qemu-cold", ArmKind::QemuCold, None),
            arm("qemu-warm", ArmKind::QemuWarm, None),
            arm("drums-restored-b", ArmKind::DrumsRestored, Some(Control::SameAs { arm: name("drums-restored") })),
            arm(
                "drums-cold-delayed",
                ArmKind::DrumsCold,
                Some(Control::Delayed { arm: name("drums-cold"), fraction: 0.25 }),
            ),
        ],
        metrics: vec![
            metric(Metric::CreateToReady, "E3", true),
            metric(Metric::ResetToReady, "E3", false),
            metric(Metric::Destroy, "nothing observed", false),
            metric(Metric::CreateCpu, "E3", false),
        ],
        bars: vec![
            bar("qemu-warm-over-cold", "qemu-warm", "qemu-cold", 0.25),
            bar("drums-over-runc-cold", "drums-cold", "runc-cold", 0.6),
            bar("drums-over-runc-restored", "drums-restored", "runc-restored", 0.8),
        ],
        gates: Gates {
            max_steal_fraction: 0.05,
            max_outside_cpu_fraction: 0.5,
            max_canary_ratio: 1.5,
            max_clock_step_ms: 5.0,
            settle_timeout_ms: 5_000,
            max_void_fraction: 0.1,
        },
        deadline_ms: 1_200_000,
        not_after: None,
    }
}

impl Scenario {
    /// EXP-028 on one machine with two agents, as it is expected to come out: a pass.
    pub fn exp028(world: u64) -> Self {
        let experiment = exp028();
        let medians_ms = [
            ("drums-cold", 18.0),
            ("drums-restored", 75.0),
            ("runc-cold", 62.0),
            ("runc-restored", 140.0),
            ("qemu-cold", 3100.0),
            ("qemu-warm", 330.0),
            ("drums-restored-b", 75.0),
            ("drums-cold-delayed", 22.5),
        ];
        Self {
            experiment,
            hosts: vec![(name("h1"), 0), (name("h2"), 0)],
            medians_ms: medians_ms.into_iter().map(|(n, m)| (name(n), m)).collect(),
            sigma: 0.06,
            block_sigma: 0.05,
            build_sigma: 0.02,
            first_position_effect: 0.0,
            drift: 0.0,
            failing: BTreeSet::new(),
            noisy: BTreeSet::new(),
            disturbing: None,
            delay_factor: 1.0,
            world,
        }
    }

    pub fn registration(&self) -> Registration {
        Registration::freeze(self.experiment.clone(), Micros(1_790_000_000_000_000)).expect("finite numbers only")
    }

    /// One complete run: its state and all records of all hosts.
    pub fn run(&self, number: u32) -> (RunMeta, Vec<Record>) {
        let registration = self.registration().sha256;
        let digest = Sha256::of(format!("synthetic run {number} of world {}", self.world).as_bytes()).0;
        let mut id = [0; 6];
        id.copy_from_slice(&digest[..6]);
        let run = RunId(id);
        let mut records = Vec::new();
        for (host, machine) in &self.hosts {
            let mut maker = HostMaker {
                scenario: self,
                registration,
                run,
                host,
                number,
                draw: Draw::new(self.world, &["synthetic", host.as_str(), &number.to_string()]),
                records: Vec::new(),
                session: 0,
                now_us: 1_000_000,
            };
            maker.all(*machine);
            records.extend(maker.records);
        }
        let meta = RunMeta { run, number, state: RunState::Complete, reason: String::new(), late: BTreeMap::new() };
        (meta, records)
    }
}

/// A draw of the standard normal distribution.
pub(crate) fn normal(d: &mut Draw) -> f64 {
    (-2.0 * d.unit().ln()).sqrt() * (std::f64::consts::TAU * d.unit()).cos()
}

struct HostMaker<'a> {
    scenario: &'a Scenario,
    registration: Sha256,
    run: RunId,
    host: &'a HostId,
    number: u32,
    draw: Draw,
    records: Vec<Record>,
    session: u32,
    now_us: u64,
}

impl HostMaker<'_> {
    fn push(&mut self, body: Body) {
        let seq = self.records.len() as u64 + 1;
        self.records.push(Record {
            registration: self.registration,
            run: self.run,
            host: self.host.clone(),
            seq,
            at: Micros(1_790_000_000_000_000 + i64::from(self.number) * 3_600_000_000 + self.now_us as i64),
            generation: Generation(1),
            body,
        });
    }

    fn identity(&mut self, what: &str) -> Identity {
        self.session += 1;
        let n = self.session;
        let hex =
            Sha256::of(format!("{}/{}/{}/{n}/{what}", self.scenario.world, self.run, self.host).as_bytes()).to_string();
        Identity {
            hostname: format!("drums-{}-s{n}g1", &hex[..8]),
            machine_id: hex[..32].to_owned(),
            address: format!("198.19.{}.{}", n / 64, n % 64 * 4 + 2),
            random: hex[32..].to_owned(),
        }
    }

    fn all(&mut self, machine: u32) {
        let e = &self.scenario.experiment;
        self.push(Body::Preflight(preflight(e, self.host, machine)));
        self.push(Body::Log(Log { level: "info".into(), target: "synthetic".into(), text: "begins".into() }));
        for build in 0..e.design.template_builds_per_host {
            for arm in e.arms.iter().filter(|a| a.kind.from_template()) {
                let identity = self.identity("template");
                let duration_ms = self.scenario.medians_ms[&arm.name] * 4.0 * (1.0 + 0.1 * self.draw.unit());
                self.push(Body::Template(Template {
                    arm: arm.name.clone(),
                    build,
                    duration_ms,
                    bytes: 12 << 20,
                    sha256: Sha256::of(identity.random.as_bytes()),
                    state: format!("saved-{}-{build}", arm.name),
                    identity,
                }));
            }
        }
        for block in 0..e.design.warmup_blocks {
            self.block(BlockKind::WarmUp, block);
        }
        let (mut good, mut block) = (0, 0);
        while good < e.design.blocks_per_host {
            self.block(BlockKind::Measured, block);
            good += u32::from(!self.scenario.noisy.contains(&(self.host.clone(), block)));
            block += 1;
        }
        self.push(Body::Closed(Closed { teardown: Teardown::Clean, reason: String::new() }));
    }

    fn block(&mut self, kind: BlockKind, block: u32) {
        let scenario = self.scenario;
        let e = &scenario.experiment;
        let order = williams::block_order(e, self.host, kind, block);
        let build = block % e.design.template_builds_per_host.max(1);
        let cpus = vec![block % 2];
        let delays_ms = e
            .arms
            .iter()
            .filter_map(|a| match &a.control {
                Some(Control::Delayed { arm, fraction }) => {
                    Some((a.name.clone(), scenario.medians_ms.get(arm)? * fraction * scenario.delay_factor))
                }
                _ => None,
            })
            .collect();
        let environment_bytes = self.draw.below(4096) as u32;
        self.push(Body::BlockStarted(BlockStarted {
            block,
            kind,
            order: order.clone(),
            template_build: build,
            cpus: cpus.clone(),
            environment_bytes,
            delays_ms,
        }));
        let began = self.now_us;
        let block_effect = scenario.block_sigma * normal(&mut self.draw);
        for (position, name) in order.iter().enumerate() {
            if let Some(arm) = e.arm(name) {
                self.arm(kind, block, position as u32, arm, build, &cpus, block_effect);
            }
        }
        let duration_ms = (self.now_us - began) as f64 / 1e3;
        let noisy = kind == BlockKind::Measured && scenario.noisy.contains(&(self.host.clone(), block));
        let mut canaries_ms: Vec<f64> = (0..=order.len()).map(|_| 2.0 * (1.0 + 0.05 * self.draw.unit())).collect();
        if let Some(p) = order.iter().position(|a| scenario.disturbing.as_ref() == Some(a)) {
            canaries_ms[p + 1] *= 1.3;
        }
        self.push(Body::BlockEnded(BlockEnded {
            block,
            kind,
            result: BlockResult::Completed,
            environment: Environment {
                duration_ms,
                steal_ms: if noisy { duration_ms * 0.2 } else { duration_ms * 0.002 },
                outside_cpu_ms: duration_ms * 0.03,
                harness_cpu_ms: duration_ms * 0.01,
                canaries_ms,
                clock_step_ms: 0.02,
                settle_ms: vec![3.0; order.len() + 1],
                settled: true,
                unsettled: Vec::new(),
            },
        }));
    }

    #[allow(clippy::too_many_arguments)]
    fn arm(
        &mut self,
        kind: BlockKind,
        block: u32,
        position: u32,
        arm: &Arm,
        build: u32,
        cpus: &[u32],
        block_effect: f64,
    ) {
        let s = self.scenario;
        let e = &s.experiment;
        let identity = self.identity("session");
        let session = SessionRef { number: self.session, generation: Generation(1) };
        let successor = SessionRef { number: session.number + 1, ..session };
        let failed = kind == BlockKind::Measured && s.failing.contains(&(self.host.clone(), block, arm.name.clone()));
        let build_effect = if arm.kind.from_template() {
            let names = ["build", self.host.as_str(), arm.name.as_str(), &build.to_string(), &self.number.to_string()];
            s.build_sigma * normal(&mut Draw::new(s.world, &names))
        } else {
            0.0
        };
        let through =
            f64::from(block) / f64::from(e.design.blocks_per_host) + f64::from(position) / (8.0 * e.arms.len() as f64);
        let first = if position == 0 { 1.0 + s.first_position_effect } else { 1.0 };
        let noise = s.sigma * normal(&mut self.draw);
        let base = s.medians_ms.get(&arm.name).copied().unwrap_or(50.0);
        let create = base * (block_effect + build_effect + noise).exp() * first * (1.0 + s.drift * through);
        let start = self.now_us;
        let fidelity = Fidelity {
            block,
            position,
            arm: arm.name.clone(),
            kind: arm.kind,
            session,
            mechanism: BTreeMap::from([("synthetic".to_owned(), "yes".to_owned())]),
            limits: LimitsRead {
                cpu_milli: e.limits.cpu_milli,
                cpus: cpus.to_vec(),
                memory_bytes: e.limits.memory_bytes
                    + if arm.kind.mechanism() == Mechanism::Qemu { e.limits.vmm_memory_overhead_bytes } else { 0 },
            },
            workload_sha256: workload(e),
            guest_sha256: Sha256::of(b"guest"),
            faults: Vec::new(),
        };
        let mut outcome = Outcome {
            block,
            kind,
            position,
            arm: arm.name.clone(),
            session,
            valid: true,
            failures: Vec::new(),
            failed_metrics: Vec::new(),
            identity,
            state: if arm.kind.from_template() { format!("saved-{}-{build}", arm.name) } else { String::new() },
            identity_after_reset: Identity::default(),
        };
        if failed {
            self.now_us += e.design.ready_timeout_ms * 1000;
            outcome.valid = false;
            outcome.failures = vec![format!("not ready within {} ms", e.design.ready_timeout_ms)];
            outcome.failed_metrics = e.metrics.iter().map(|m| m.metric).collect();
            outcome.identity = Identity::default();
            outcome.state = String::new();
            self.push(Body::Outcome(outcome));
            return;
        }
        let destroy = 4.0 + 0.05 * base * (1.0 + 0.2 * self.draw.unit());
        let values = [
            (Metric::CreateToReady, create),
            (Metric::ResetToReady, create * 1.1 * (0.03 * normal(&mut self.draw)).exp()),
            (Metric::Destroy, destroy),
            (Metric::CreateCpu, create * 0.7e-3 * (0.05 * normal(&mut self.draw)).exp()),
        ];
        let of = |before: bool| if before { session } else { successor };
        for spec in &e.metrics {
            let value = values.iter().find(|(m, _)| *m == spec.metric).map_or(create, |(_, v)| *v);
            self.push(Body::Sample(Sample {
                block,
                kind,
                position,
                arm: arm.name.clone(),
                session: of(matches!(spec.metric, Metric::CreateToReady | Metric::CreateCpu)),
                template_build: build,
                metric: spec.metric,
                value,
                unit: spec.metric.unit().to_owned(),
                clock: if spec.metric == Metric::CreateCpu { "cgroup cpuacct" } else { "CLOCK_MONOTONIC_RAW" }
                    .to_owned(),
                intended_start_us: start,
            }));
        }
        for (operation, took) in [("create", create), ("reset", values[1].1), ("destroy", destroy)] {
            let delay = match &arm.control {
                Some(Control::Delayed { arm, fraction }) if operation == "create" => {
                    s.medians_ms.get(arm).map(|m| m * fraction * s.delay_factor)
                }
                _ => None,
            };
            let phases = phases(arm.kind, operation, took, delay);
            self.push(Body::Timeline(Timeline {
                block,
                position,
                arm: arm.name.clone(),
                session: of(operation == "create"),
                operation: operation.to_owned(),
                phases,
            }));
        }
        outcome.identity_after_reset = self.identity("after reset");
        self.push(Body::Fidelity(Fidelity { session: successor, ..fidelity.clone() }));
        self.push(Body::Fidelity(fidelity));
        self.push(Body::Outcome(outcome));
        self.now_us += (1000.0 * (create + values[1].1 + destroy)) as u64 + 20_000;
    }
}

fn phases(kind: ArmKind, operation: &str, took_ms: f64, delay_ms: Option<f64>) -> Vec<Phase> {
    let parts: &[(&str, f64)] = match (operation, kind) {
        ("destroy", _) => &[("kill", 0.3), ("reap", 0.4), ("remove cgroup", 0.3)],
        (_, ArmKind::DrumsCold) => &[("cgroup", 0.1), ("namespaces", 0.25), ("mounts", 0.3), ("ready", 0.35)],
        (_, ArmKind::RuncCold | ArmKind::External) => {
            &[("bundle", 0.08), ("runc create", 0.6), ("runc start", 0.2), ("ready", 0.12)]
        }
        (_, ArmKind::DrumsRestored | ArmKind::RuncRestored) => {
            &[("mounts", 0.12), ("criu restore", 0.65), ("reseed", 0.08), ("ready", 0.15)]
        }
        (_, ArmKind::QemuCold) => &[("spawn", 0.06), ("kernel", 0.6), ("init", 0.24), ("ready", 0.1)],
        (_, ArmKind::QemuWarm) => &[("spawn", 0.35), ("migrate in", 0.4), ("reseed", 0.15), ("ready", 0.1)],
    };
    let delay_ms = delay_ms.map(|d| (INJECTED_DELAY, d));
    let rest = took_ms - delay_ms.map_or(0.0, |d| d.1);
    let mut at = 0.0;
    delay_ms
        .into_iter()
        .chain(parts.iter().map(|(name, share)| (*name, share * rest)))
        .map(|(name, ms)| {
            let start = at;
            at += ms * 1000.0;
            Phase { name: name.to_owned(), start_us: start as u64, end_us: at as u64 }
        })
        .collect()
}

/// The registered one; some other if none was pinned.
fn workload(e: &Experiment) -> Sha256 {
    e.workload.sha256.unwrap_or(Sha256::of(b"workload"))
}

fn preflight(e: &Experiment, host: &HostId, machine: u32) -> Preflight {
    let tool = |path: &str, version: &str| Tool {
        path: path.to_owned(),
        version: version.to_owned(),
        sha256: Sha256::of(version.as_bytes()),
    };
    Preflight {
        facts: HostFacts {
            identity: MachineIdentity {
                boot_id: format!("00000000-0000-4000-8000-{machine:012}"),
                machine_id: format!("{machine:032}"),
                dmi_uuid: String::new(),
                btime_s: 1_790_000_000,
                hardware: format!("Synthetic CPU {machine}, 2 CPUs, 8 GiB"),
            },
            hostname: host.to_string(),
            kernel: "6.18.0-synthetic".to_owned(),
            os: "Debian GNU/Linux 12 (bookworm)".to_owned(),
            cpu_model: format!("Synthetic CPU {machine}"),
            microcode: "0x1".to_owned(),
            mitigations: BTreeMap::from([("spectre_v2".to_owned(), "Mitigation: synthetic".to_owned())]),
            cpus: 2,
            memory_bytes: 8 << 30,
            disk_free_bytes: 20 << 30,
            cgroup_version: 1,
            accelerator: Accelerator::Tcg,
            accelerator_detail: "/dev/kvm is absent".to_owned(),
            tools: BTreeMap::from([
                ("criu".to_owned(), tool("/opt/criu", "4.2.1")),
                ("runc".to_owned(), tool("/usr/sbin/runc", "1.1.5")),
                ("qemu".to_owned(), tool("/usr/bin/qemu-system-x86_64", "7.2.19")),
            ]),
            unfit: BTreeMap::new(),
        },
        agent_version: "synthetic".to_owned(),
        agent_sha256: Sha256::of(b"agent"),
        workload_sha256: workload(e),
        clock_resolution_ns: BTreeMap::from([("CLOCK_MONOTONIC_RAW".to_owned(), 1)]),
        note: String::new(),
    }
}
