//! The runner with the real spool and link, on an engine in memory.

mod evidence;
mod fake;
mod faults;
mod lifecycle;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use drums_common::{
    arm::ArmKind,
    clock::{Clock, Micros},
    digest::Sha256,
    evidence::{BlockKind, BlockResult, Body, Outcome, Record},
    experiment::{
        Arm, Bar, BarRule, Control, Design, Experiment, Gates, HostsRule, Limits, ManifestFile, Metric, MetricSpec,
        Registration, WorkloadManifest, WorkloadRef,
    },
    failure::{Failure, FailureClass},
    ids::{ArmName, ExperimentId, Generation, RunId, SessionRef},
    machine::{Accelerator, HostFacts},
    wire::latest::{Desired, Grant, RunDesired, RunPhase, ToCoordinator, Welcome},
};

use self::fake::{Call, FakeEngine, Fault, Faults, StillMachine};
use super::{
    clock::SystemClock,
    decide::Idle,
    progress::{BlockKey, block_key},
    runner::{Parts, Runner, Step, Workloads},
};
use crate::{
    engine::api::ArmEngine,
    facts::{Findings, Readings},
    net::{FetchError, Link},
    spool::Spool,
    succession::Succession,
};

const RUN: RunId = RunId([1, 2, 3, 4, 5, 6]);

fn name(s: &str) -> ArmName {
    s.parse().unwrap()
}

fn experiment() -> Experiment {
    let arm = |n: &str, kind, control| Arm { name: name(n), kind, control, command: vec![] };
    let same = Some(Control::SameAs { arm: name("restored") });
    let delayed = Some(Control::Delayed { arm: name("cold"), fraction: 0.25 });
    Experiment {
        version: 1,
        id: ExperimentId(999),
        title: "t".into(),
        hypothesis: "h".into(),
        workload: WorkloadRef { name: "minimal".parse().unwrap(), sha256: None },
        limits: Limits { cpu_milli: 1_000, cpuset_size: 1, memory_bytes: 1 << 29, vmm_memory_overhead_bytes: 0 },
        design: Design {
            blocks_per_host: 4,
            warmup_blocks: 1,
            template_builds_per_host: 2,
            seed: 28,
            max_runs: 1,
            ready_timeout_ms: 5_000,
            margin: 0.25,
            alpha: 0.05,
        },
        hosts: HostsRule { names: vec![], count: 1 },
        arms: vec![
            arm("cold", ArmKind::DrumsCold, None),
            arm("restored", ArmKind::DrumsRestored, None),
            arm("restored-b", ArmKind::DrumsRestored, same),
            arm("delayed", ArmKind::DrumsCold, delayed),
        ],
        metrics: Metric::ALL
            .into_iter()
            .map(|metric| MetricSpec {
                metric,
                endpoint: "E3".into(),
                position: "K2".into(),
                base_case: "cold as shipped".into(),
                primary: metric == Metric::CreateToReady,
            })
            .collect(),
        bars: vec![Bar {
            name: "b".into(),
            metric: Metric::CreateToReady,
            numerator: name("restored"),
            denominator: name("cold"),
            at_most: 1.0,
            rule: BarRule::Bound,
        }],
        gates: Gates {
            max_steal_fraction: 0.05,
            max_outside_cpu_fraction: 0.2,
            max_canary_ratio: 1.5,
            max_clock_step_ms: 50.0,
            settle_timeout_ms: 2_000,
            max_void_fraction: 0.1,
        },
        deadline_ms: 600_000,
        not_after: None,
    }
}

fn grants(n: u32) -> Vec<Grant> {
    let arms = ["cold", "restored", "restored-b", "delayed"];
    (0..n)
        .map(|block| Grant {
            // Numbered apart, as coordinators do: warm-up 0, then 0, 1, 2 ...
            block: block.saturating_sub(1),
            kind: if block == 0 { BlockKind::WarmUp } else { BlockKind::Measured },
            order: (0..4).map(|i| name(arms[(i + block as usize) % 4])).collect(),
            template_build: block / 2,
            seed: 1_000 + u64::from(block),
        })
        .collect()
}

/// A workload folder with one file in it.
struct Folder(PathBuf);

impl Workloads for Folder {
    fn fetch(&self, _workload: Sha256) -> Result<PathBuf, FetchError> {
        Ok(self.0.clone())
    }
}

/// One agent's measuring side, its state folder and the link to nobody.
struct Agent {
    dir: tempfile::TempDir,
    link: Link,
    spool: Arc<Spool>,
    runner: Option<Runner<FakeEngine>>,
    calls: Rc<RefCell<Vec<Call>>>,
    live: Rc<RefCell<BTreeSet<SessionRef>>>,
    registration: Registration,
}

fn no_faults() -> Faults {
    Rc::new(RefCell::new(|_: &Call| None))
}

fn faults(f: impl FnMut(&Call) -> Option<Fault> + 'static) -> Faults {
    Rc::new(RefCell::new(f))
}

fn facts() -> HostFacts {
    Readings::take(Path::new("/")).describe(Findings {
        tools: BTreeMap::new(),
        accelerator: Accelerator::Tcg,
        accelerator_detail: String::new(),
        unfit: BTreeMap::new(),
    })
}

fn welcome(generation: u32) -> Welcome {
    Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(generation),
        beat_ms: 1_000,
        dispatch_lease_ms: 600_000,
        life_lease_ms: 1_800_000,
    }
}

/// What the digest of an agent is of.
const BUILD: &[u8] = b"agent";

impl Agent {
    fn new(faults: Faults) -> Self {
        Self::start(tempfile::tempdir().unwrap(), faults, 1, 0, BUILD)
    }

    /// The same state folder under a new process.
    fn restart(self, faults: Faults) -> Self {
        self.restart_under(2, faults)
    }

    /// 0 is an agent that no coordinator has welcomed yet.
    fn restart_under(self, generation: u32, faults: Faults) -> Self {
        self.restart_with(generation, faults, 0, BUILD)
    }

    /// On a disk whose space is all below what is to stay free.
    fn restart_on_a_full_disk(self) -> Self {
        self.restart_with(2, no_faults(), u64::MAX, BUILD)
    }

    /// Another agent's binary in the place of this one.
    fn restart_as(self, build: &[u8]) -> Self {
        self.restart_with(2, no_faults(), 0, build)
    }

    fn restart_with(mut self, generation: u32, faults: Faults, min_free_bytes: u64, build: &[u8]) -> Self {
        // As a killed process: nothing is written on the way out, and the spool's lock is the kernel's to free.
        drop(self.runner.take());
        drop(self.spool);
        Self::start(self.dir, faults, generation, min_free_bytes, build)
    }

    fn start(dir: tempfile::TempDir, faults: Faults, generation: u32, min_free_bytes: u64, build: &[u8]) -> Self {
        Self::start_with(Arc::new(SystemClock), dir, faults, generation, min_free_bytes, build)
    }

    fn start_with(
        clock: Arc<dyn Clock>,
        dir: tempfile::TempDir,
        faults: Faults,
        generation: u32,
        min_free_bytes: u64,
        build: &[u8],
    ) -> Self {
        let link = Link::detached(clock.clone(), facts(), &welcome(generation));
        let (spool, ..) = Spool::open(&dir.path().join("spool"), min_free_bytes).unwrap();
        let spool = Arc::new(spool);
        let workload = dir.path().join("workload");
        std::fs::create_dir_all(&workload).unwrap();
        let file = ManifestFile {
            kind: "file".into(),
            mode: 0o755,
            bytes: fake::GUEST.len() as u64,
            sha256: Sha256::of(fake::GUEST),
            target: String::new(),
        };
        let manifest = WorkloadManifest { version: 1, files: BTreeMap::from([("sbin/drums-guest".to_owned(), file)]) };
        std::fs::write(workload.join("manifest.json"), manifest.canonical()).unwrap();
        let mut engine = FakeEngine::new(faults);
        let audit = engine.audit();
        let (calls, live) = (engine.calls.clone(), engine.live.clone());
        let parts = Parts {
            host: "h1".parse().unwrap(),
            agent_version: "0".into(),
            agent_sha256: Sha256::of(build),
            lock: dir.path().join("lock"),
            engine,
            surroundings: Box::new(StillMachine::default()),
            facts: Box::new(|_| facts()),
            workloads: Box::new(Folder(workload)),
            succession: Succession::of(dir.path()),
            spool: spool.clone(),
            link: link.clone(),
            clock,
        };
        let registration = Registration::freeze(experiment(), Micros(0)).unwrap();
        let runner = Some(Runner::new(parts, &audit).map_err(|e| e.0).unwrap());
        Self { dir, link, spool, runner, calls, live, registration }
    }

    fn desired(&self, phase: RunPhase, blocks: u32) -> Desired {
        Desired {
            generation: self.link.generation(),
            runs: vec![RunDesired {
                run: RUN,
                registration: self.registration.sha256,
                canonical: self.registration.canonical.clone(),
                workload_sha256: Sha256::of(b"workload"),
                phase,
                granted: grants(blocks),
                acked_seq: 0,
                deadline_left_ms: 600_000,
            }],
        }
    }

    fn offer(&self, phase: RunPhase, blocks: u32) {
        self.link.offer(self.desired(phase, blocks));
    }

    /// Steps until there is nothing to do.
    fn settle(&mut self) -> Idle {
        loop {
            let view = self.link.view();
            match self.runner.as_mut().unwrap().step(&view) {
                Step::Did | Step::HeldUp => {}
                Step::Idle(why) => return why,
                Step::Stop => panic!("stopped"),
            }
        }
    }

    /// From nothing to closed, with so many blocks granted.
    fn whole_run(&mut self, blocks: u32) -> Vec<Record> {
        self.offer(RunPhase::Prepare, 0);
        self.settle();
        for n in 1..=blocks {
            self.offer(RunPhase::Measure, n);
            self.settle();
        }
        self.offer(RunPhase::Unwind, blocks);
        self.settle();
        self.records()
    }

    /// Why demands were refused so far, and of which class.
    fn refusals(&self) -> Vec<Failure> {
        let said = std::iter::from_fn(|| self.link.said());
        said.filter_map(|m| if let ToCoordinator::Refused { failure, .. } = m { Some(failure) } else { None }).collect()
    }

    fn records(&self) -> Vec<Record> {
        self.spool.run(RUN).map(|s| s.records().unwrap()).unwrap_or_default()
    }
}

fn outcomes(records: &[Record]) -> Vec<&Outcome> {
    let pick = |r: &'_ Record| matches!(r.body, Body::Outcome(_));
    records
        .iter()
        .filter(|r| pick(r))
        .map(|r| match &r.body {
            Body::Outcome(o) => o,
            _ => unreachable!("filtered"),
        })
        .collect()
}

/// How each granted block ended, by its place among the grants.
fn results(records: &[Record]) -> Vec<(u32, BlockResult)> {
    let ends = records.iter().filter_map(|r| match &r.body {
        Body::BlockEnded(b) => Some(b.result.clone()),
        _ => None,
    });
    (0..).zip(ends).collect()
}

/// The module's invariants over any records of a run, and M26: every started session is accounted for.
fn check_accounts(records: &[Record]) {
    for (i, r) in records.iter().enumerate() {
        assert_eq!(r.seq, i as u64 + 1);
    }
    let mut open: Option<(BlockKey, Vec<ArmName>)> = None;
    let mut blocks = BTreeSet::new();
    let mut samples: BTreeMap<(BlockKey, ArmName), BTreeSet<Metric>> = BTreeMap::new();
    let (mut started, mut valid, mut failed, mut lost) = (0usize, 0usize, 0usize, 0usize);
    let mut done: BTreeSet<ArmName> = BTreeSet::new();
    let mut turns = 0;
    for r in records {
        match &r.body {
            Body::BlockStarted(b) => {
                assert!(open.is_none(), "block {} began inside another", b.block);
                assert!(blocks.insert(block_key(b.kind, b.block)), "block {} began twice", b.block);
                started += b.order.len();
                open = Some((block_key(b.kind, b.block), b.order.clone()));
                done.clear();
                turns = 0;
            }
            Body::Sample(s) => {
                let (block, order) = open.as_ref().expect("a sample outside a block");
                assert_eq!(*block, block_key(s.kind, s.block));
                assert_eq!(order[s.position as usize], s.arm);
                assert!(s.value.is_finite() && s.value > 0.0);
                assert!(samples.entry((*block, s.arm.clone())).or_default().insert(s.metric), "sampled twice");
            }
            Body::Outcome(o) => {
                let (block, order) = open.as_ref().expect("an outcome outside a block");
                assert_eq!((*block, &order[o.position as usize]), (block_key(o.kind, o.block), &o.arm));
                if !done.insert(o.arm.clone()) {
                    // A further turn of the delayed arm's base arm.
                    assert_eq!((o.kind, o.arm.as_str()), (BlockKind::WarmUp, "cold"), "two outcomes of an arm");
                    started += 1;
                }
                turns += 1;
                let sampled = samples.remove(&(*block, o.arm.clone())).unwrap_or_default();
                for m in Metric::ALL {
                    assert!(sampled.contains(&m) != o.failed_metrics.contains(&m), "{} {m:?}: {o:?}", o.arm);
                }
                assert_eq!(o.valid, o.failures.is_empty());
                if o.valid { valid += 1 } else { failed += 1 }
            }
            Body::BlockEnded(b) => {
                let (block, order) = open.take().expect("an end without a beginning");
                assert_eq!(block, block_key(b.kind, b.block));
                lost += order.len() - done.len();
                if b.result == BlockResult::Completed {
                    assert_eq!(done.len(), order.len());
                    assert_eq!(b.environment.canaries_ms.len(), turns + 1);
                    assert_eq!(b.environment.settle_ms.len(), turns + 1);
                }
            }
            _ => {}
        }
    }
    assert!(open.is_none(), "a block without an end");
    assert_eq!(started, valid + failed + lost);
}
