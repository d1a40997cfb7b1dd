//! One granted block: every arm once, in the granted order, between two readings of the machine. In a warm-up block the
//! arm that a positive control is delayed against has further turns right after its first.
//!
//! Writes `BlockStarted` (committed before anything else happens) and, whatever happens, one `BlockEnded`.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::Duration,
};

use drums_common::{
    evidence::{BlockEnded, BlockKind, BlockResult, BlockStarted, Body, Environment},
    experiment::{Arm, Control, Experiment},
    ids::{ArmName, RunId},
    wire::latest::{Activity, Grant},
};

use super::{
    clock::Instants,
    draw::{self, Draws},
    journal::Journal,
    lock::{LockError, MachineLock},
    noise::{Noise, NoisePoint},
    settle::Survey,
    surroundings::Surroundings,
    templates::{Building, Ensured, Templates},
    turn::{self, TurnEnd, TurnOrder},
};
use crate::{
    engine::api::{ArmEngine, Workload},
    net::Link,
    spool::SpoolError,
};

/// Valid warm-up sessions of a delayed arm's base arm, at least: their median sets the delay.
const BASE_SESSIONS: usize = 5;
/// An arm that fails more than half of them is not waited for any longer.
const MAX_BASE_TURNS: u32 = 10;

/// A dispatch lease that ended in silence of our own is renewed by the next beat, well within this.
const RENEWAL: Duration = Duration::from_secs(3);

/// What a block is run with; the same over a run.
pub struct Bench<'a> {
    pub engine: &'a mut dyn ArmEngine,
    pub surroundings: &'a mut dyn Surroundings,
    pub link: &'a Link,
    pub journal: &'a mut Journal,
    pub templates: &'a mut Templates,
    pub run: RunId,
    pub experiment: &'a Experiment,
    pub workload: &'a Workload,
    /// What CPU sets are drawn from.
    pub available_cpus: &'a [u32],
    pub lock: &'a Path,
    /// Asked between arms: why the block must end now, if it must.
    pub ending: &'a dyn Fn() -> Option<BlockResult>,
    /// What an operation under way looks at: true soon after a cancellation.
    pub give_up: &'a dyn Fn() -> bool,
}

/// How running a block ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It has its two records.
    Ended(BlockResult),
    /// It was called off, or the dispatch lease was lost, before it began, and it has none.
    NotBegun,
}

#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("evidence of block {block} cannot be written")]
    Evidence { block: u32, source: SpoolError },
    #[error("block {block} cannot have the machine")]
    Lock { block: u32, source: LockError },
}

/// Runs one block from the lock to its `BlockEnded`.
pub fn run(bench: &mut Bench<'_>, grant: &Grant) -> Result<Ran, BlockError> {
    let evidence = |source| BlockError::Evidence { block: grant.block, source };
    let Some(_lock) = MachineLock::acquire(bench.lock, || (bench.ending)().is_some())
        .map_err(|source| BlockError::Lock { block: grant.block, source })?
    else {
        return Ok(Ran::NotBegun);
    };
    let draws = draw::block(grant.seed, bench.available_cpus, bench.experiment.limits.cpuset_size, grant.order.len());
    let problem = match check_grant(grant, bench.experiment, &draws) {
        Some(problem) => Some(problem),
        None => match bring_templates(bench, grant, &draws).map_err(evidence)? {
            Ensured::Ready => None,
            Ensured::HostBroken(why) => Some(why),
            Ensured::GivenUp => return Ok(Ran::NotBegun),
        },
    };
    // Waiting for the machine and building templates take their time, in which the coordinator may have gone.
    if !bench.link.wait_for_dispatch(RENEWAL) {
        return Ok(Ran::NotBegun);
    }
    let started = BlockStarted {
        block: grant.block,
        kind: grant.kind,
        order: grant.order.clone(),
        template_build: grant.template_build,
        cpus: draws.cpus.clone(),
        environment_bytes: draws.environment_bytes,
        delays_ms: match grant.kind {
            BlockKind::WarmUp => BTreeMap::new(),
            BlockKind::Measured => bench.journal.progress().delays_ms(bench.experiment),
        },
    };
    bench.journal.record(Body::BlockStarted(started.clone())).map_err(evidence)?;
    bench.journal.commit().map_err(evidence)?;
    let mut reading = Reading::start(bench);
    let result = match problem {
        Some(why) => BlockResult::Interrupted(why),
        None => turns(bench, grant, &draws, &started.delays_ms, &mut reading).map_err(evidence)?,
    };
    let environment = reading.end(bench);
    let ended = BlockEnded { block: grant.block, kind: grant.kind, result: result.clone(), environment };
    bench.journal.record(Body::BlockEnded(ended)).map_err(evidence)?;
    bench.journal.commit().map_err(evidence)?;
    Ok(Ran::Ended(result))
}

/// What makes a grant impossible to run as it stands.
fn check_grant(grant: &Grant, experiment: &Experiment, draws: &Draws) -> Option<String> {
    if let Some(unknown) = grant.order.iter().find(|a| experiment.arm(a).is_none()) {
        return Some(format!("the grant names arm {unknown}, which is not in the registration"));
    }
    let wanted = experiment.limits.cpuset_size as usize;
    if draws.cpus.len() < wanted {
        return Some(format!("the CPU set needs {wanted} CPUs and this agent may use {}", draws.cpus.len()));
    }
    None
}

fn bring_templates(bench: &mut Bench<'_>, grant: &Grant, draws: &Draws) -> Result<Ensured, SpoolError> {
    let building = Building {
        run: bench.run,
        experiment: bench.experiment,
        grant,
        workload: bench.workload,
        cpus: &draws.cpus,
        environment_bytes: draws.environment_bytes,
        generation: bench.link.generation(),
    };
    let (engine, journal, templates) = (&mut *bench.engine, &mut *bench.journal, &mut *bench.templates);
    let tried =
        catch_unwind(AssertUnwindSafe(|| templates.ensure(engine, bench.link, journal, &building, bench.give_up)));
    match tried {
        Ok(Err(e)) => {
            // A template may exist without its record: all are thrown away before the next attempt.
            bench.templates.forget();
            Err(e)
        }
        Ok(result) => result,
        Err(panic) => {
            let why = panicked("building templates", &*panic);
            after_panic(bench, &why)?;
            Ok(Ensured::HostBroken(why))
        }
    }
}

/// One turn of a block.
struct Place<'a> {
    grant: &'a Grant,
    draws: &'a Draws,
    delays_ms: &'a BTreeMap<ArmName, f64>,
    position: u32,
    arm: &'a Arm,
    /// Turns of this arm before, in this block.
    nth: u32,
}

fn turns(
    bench: &mut Bench<'_>,
    grant: &Grant,
    draws: &Draws,
    delays_ms: &BTreeMap<ArmName, f64>,
    reading: &mut Reading,
) -> Result<BlockResult, SpoolError> {
    let experiment = bench.experiment;
    for (position, name) in (0u32..).zip(&grant.order) {
        // The grant was checked: every arm of the order is in the registration.
        let Some(arm) = experiment.arm(name) else { continue };
        let mut nth = 0;
        while nth == 0 || wants_another(bench, grant.kind, arm, nth) {
            if let Some(result) = (bench.ending)() {
                return Ok(result);
            }
            let place = Place { grant, draws, delays_ms, position, arm, nth };
            if let Some(result) = turn(bench, &place, reading)? {
                return Ok(result);
            }
            nth += 1;
        }
    }
    reading.between(bench, &draws.cpus)?;
    Ok(BlockResult::Completed)
}

/// What the positive control's delay is a fraction of must not be one lucky session.
fn wants_another(bench: &Bench<'_>, kind: BlockKind, arm: &Arm, turns: u32) -> bool {
    let is_base = bench
        .experiment
        .arms
        .iter()
        .any(|a| matches!(&a.control, Some(Control::Delayed { arm: base, .. }) if *base == arm.name));
    let have = bench.journal.progress().warmup_ms.get(&arm.name).map_or(0, Vec::len);
    kind == BlockKind::WarmUp && is_base && have < BASE_SESSIONS && turns < MAX_BASE_TURNS
}

/// One arm's turn and its records; a result when the block ends with it.
fn turn(bench: &mut Bench<'_>, place: &Place<'_>, reading: &mut Reading) -> Result<Option<BlockResult>, SpoolError> {
    let Place { grant, draws, delays_ms, position, arm, nth } = *place;
    let name = &arm.name;
    reading.between(bench, &draws.cpus)?;
    bench.link.set_activity(Activity::Measuring { run: bench.run, block: grant.block, arm: name.clone() });
    let seen = bench.journal.progress().identities.clone();
    let delay = delay_of(arm, grant.kind, delays_ms);
    let identities = match nth {
        0 => draws.identities.get(position as usize).copied().unwrap_or_default(),
        nth => draw::further_identities(grant.seed, position, nth),
    };
    let mut bodies = Vec::new();
    let mut leaked = Vec::new();
    let (engine, templates) = (&mut *bench.engine, &*bench.templates);
    let order = TurnOrder {
        run: bench.run,
        experiment: bench.experiment,
        arm,
        block: grant.block,
        kind: grant.kind,
        position,
        template_build: grant.template_build,
        cpus: &draws.cpus,
        environment_bytes: draws.environment_bytes,
        identities,
        workload: bench.workload,
        generation: bench.link.generation(),
        delay: delay.as_ref().map(|d| *d).map_err(String::as_str),
        template: templates.state(arm),
        seen: &seen,
    };
    let end = catch_unwind(AssertUnwindSafe(|| {
        turn::run(engine, bench.link, &order, bench.give_up, &mut bodies, &mut leaked)
    }));
    for body in bodies {
        bench.journal.record(body)?;
    }
    bench.journal.leaks(&leaked)?;
    bench.journal.commit()?;
    Ok(match end {
        Ok(TurnEnd::Done) => None,
        Ok(TurnEnd::HostBroken(why)) => {
            bench.journal.log("error", "measure", &format!("arm {name}: {why}"))?;
            Some(BlockResult::Interrupted(format!("arm {name}: {why}")))
        }
        Ok(TurnEnd::GivenUp) => Some((bench.ending)().unwrap_or(BlockResult::Cancelled)),
        Err(panic) => {
            let why = panicked(&format!("arm {name}"), &*panic);
            after_panic(bench, &why)?;
            Some(BlockResult::Interrupted(why))
        }
    })
}

/// The positive control's delay. None is injected while its base arm's warm-up is still being measured.
fn delay_of(arm: &Arm, kind: BlockKind, delays_ms: &BTreeMap<ArmName, f64>) -> Result<Option<Duration>, String> {
    match (&arm.control, kind) {
        (Some(Control::Delayed { arm: base, .. }), BlockKind::Measured) => match delays_ms.get(&arm.name) {
            Some(ms) if ms.is_finite() && *ms >= 0.0 => Ok(Some(Duration::from_secs_f64(ms / 1_000.0))),
            _ => Err(format!(
                "its delay is a fraction of {base}'s warm-up, and {base} has no valid warm-up session here"
            )),
        },
        _ => Ok(None),
    }
}

/// A bug of ours in an arm's code must not end the agent: whatever it left is undone by the audit.
fn after_panic(bench: &mut Bench<'_>, why: &str) -> Result<(), SpoolError> {
    tracing::error!(run = %bench.run, error = why, "undoing everything after a panic");
    bench.journal.log("error", "measure", why)?;
    bench.templates.forget();
    let engine = &mut *bench.engine;
    match catch_unwind(AssertUnwindSafe(|| engine.reclaim())) {
        Ok(report) => bench.journal.leaks(&report.leaked),
        Err(panic) => bench.journal.log("error", "measure", &panicked("the audit", &*panic)),
    }
}

fn panicked(what: &str, panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    format!("{what} panicked: {text}")
}

fn settle_limit(bench: &Bench<'_>) -> Duration {
    Duration::from_millis(bench.experiment.gates.settle_timeout_ms)
}

/// Readings of the machine over a block.
struct Reading {
    start: Instants,
    noise: Result<NoisePoint, String>,
    baseline: Survey,
    environment: Environment,
}

impl Reading {
    fn start(bench: &mut Bench<'_>) -> Self {
        // What building templates has left behind is no baseline.
        let settled = bench.surroundings.settle(None, settle_limit(bench));
        let noise = bench.surroundings.noise(&*bench.engine);
        let mut reading = Self {
            start: Instants::now(),
            noise,
            baseline: settled.last.unwrap_or_default(),
            environment: Environment { settled: true, ..Environment::default() },
        };
        reading.unsettled(settled.left.into_iter().map(|l| format!("{l} before the block")).collect());
        reading
    }

    /// Before each arm and after the last: settle, then the canary.
    fn between(&mut self, bench: &mut Bench<'_>, cpus: &[u32]) -> Result<(), SpoolError> {
        let settled = bench.surroundings.settle(Some(&self.baseline), settle_limit(bench));
        self.environment.settle_ms.push(settled.waited_ms);
        self.unsettled(settled.left);
        match bench.surroundings.canary(cpus) {
            Ok(ms) => self.environment.canaries_ms.push(ms),
            Err(e) => {
                bench.journal.log("error", "measure", &e)?;
                self.unsettled(vec![format!("no canary: {e}")]);
            }
        }
        Ok(())
    }

    fn unsettled(&mut self, left: Vec<String>) {
        if !left.is_empty() {
            self.environment.settled = false;
            self.environment.unsettled.extend(left);
        }
    }

    fn end(mut self, bench: &mut Bench<'_>) -> Environment {
        let noise = bench.surroundings.noise(&*bench.engine);
        let end = Instants::now();
        self.environment.duration_ms = end.ms_since(&self.start);
        self.environment.clock_step_ms = end.step_ms_since(&self.start);
        match (&self.noise, &noise) {
            (Ok(a), Ok(b)) => {
                let n = Noise::between(a, b);
                self.environment.steal_ms = n.steal_ms;
                self.environment.outside_cpu_ms = n.outside_cpu_ms;
                self.environment.harness_cpu_ms = n.harness_cpu_ms;
            }
            // Without a reading there is no quiet machine: the gate fails closed.
            (Err(e), _) | (_, Err(e)) => {
                let e = format!("no noise reading: {e}");
                self.unsettled(vec![e]);
            }
        }
        self.environment
    }
}
