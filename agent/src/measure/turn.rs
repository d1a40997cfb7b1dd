//! One arm's turn in a block: create, use, reset, destroy, with the gates between, and the records of all that.
//!
//! The turn writes nothing to disk: bodies are handed back, so that no fsync falls into a window. Whatever happens, the
//! session is undone before the turn ends; only a panic leaves that to the audit.
//!
//! ```text
//! next_session ─▶ create ─▶ function, identity, dirty ─▶ reset ─▶ clean? identity ─▶ destroy ─▶ Outcome
//!                   └ failed: nothing else can be measured; every metric counts as failed
//! ```

use std::{collections::BTreeSet, time::Duration};

use drums_common::{
    evidence::{BlockKind, Body, Fidelity, Identity, Log, Outcome, Sample, Timeline},
    experiment::{Arm, Experiment, Metric},
    ids::{Generation, RunId, SessionRef},
    telemetry::chain,
};

use super::{clock, gates};
use crate::{
    arms::WantedIdentity,
    engine::api::{
        ArmEngine, Created, EngineError, FidelityReading, GuestReady, SessionHandle, SessionOrder, Timed, Workload,
    },
    net::Link,
};

/// Beyond the ready time-out an operation may need this for tearing down what failed; the declared silence covers it.
const UNWIND_ALLOWANCE: Duration = Duration::from_secs(20);

/// Everything that a turn needs to know.
#[derive(Clone, Copy)]
pub struct TurnOrder<'a> {
    pub run: RunId,
    pub experiment: &'a Experiment,
    pub arm: &'a Arm,
    pub block: u32,
    pub kind: BlockKind,
    pub position: u32,
    pub template_build: u32,
    pub cpus: &'a [u32],
    pub environment_bytes: u32,
    /// Of the created and of the reset session.
    pub identities: (u64, u64),
    pub workload: &'a Workload,
    pub generation: Generation,
    /// What the positive control's delay is, or why it is not known.
    pub delay: Result<Option<Duration>, &'a str>,
    /// The saved state of the arm's template (empty for a cold arm), or why there is no template.
    pub template: Result<&'a str, &'a str>,
    /// Everyone seen in the run before this turn.
    pub seen: &'a [(String, Identity)],
}

/// How a turn ended. Failures of the session are in its `Outcome`, not here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnEnd {
    Done,
    /// The host cannot go on; nothing is said about the arm.
    HostBroken(String),
    /// Given up on request; the session is undone and has no outcome.
    GivenUp,
}

/// Runs the turn. Records go to `bodies` as they come about, so that a panic loses none of those before it; what could
/// not be undone goes to `leaked`.
pub fn run(
    engine: &mut dyn ArmEngine,
    link: &Link,
    order: &TurnOrder<'_>,
    give_up: &dyn Fn() -> bool,
    bodies: &mut Vec<Body>,
    leaked: &mut Vec<String>,
) -> TurnEnd {
    let session = match engine.next_session(order.generation) {
        Ok(s) => s,
        Err(e) => return host_broken(&e, leaked),
    };
    let mut turn = Turn {
        order,
        link,
        bodies,
        leaked,
        first: session,
        failures: Vec::new(),
        failed: BTreeSet::new(),
        identity: Identity::default(),
        identity_after_reset: Identity::default(),
        state: String::new(),
    };
    let end = turn.go(engine, give_up);
    if end == TurnEnd::Done {
        turn.outcome();
    }
    end
}

struct Turn<'a, 'b> {
    order: &'a TurnOrder<'a>,
    link: &'a Link,
    bodies: &'b mut Vec<Body>,
    leaked: &'b mut Vec<String>,
    first: SessionRef,
    failures: Vec<String>,
    failed: BTreeSet<Metric>,
    identity: Identity,
    identity_after_reset: Identity,
    state: String,
}

impl<'a> Turn<'a, '_> {
    fn go(&mut self, engine: &mut dyn ArmEngine, give_up: &dyn Fn() -> bool) -> TurnEnd {
        let order = self.order;
        for missing in [order.delay.err(), order.template.err()].into_iter().flatten() {
            self.fail(missing.to_owned(), &Metric::ALL);
        }
        if !self.failures.is_empty() {
            return TurnEnd::Done;
        }

        let first = self.session_order(self.first, order.identities.0, order.delay.unwrap_or_default());
        let created = self.silently("create", || engine.create(&first));
        let Created { timed, cpu_s, ready, fidelity, handle } = match created {
            Ok(c) => c,
            Err(e) if !e.is_outcome() => return host_broken(&e, self.leaked),
            Err(e) => {
                self.leaked.extend_from_slice(e.leaked());
                if give_up() {
                    return TurnEnd::GivenUp;
                }
                self.fail(format!("create: {}", chain(&e)), &Metric::ALL);
                return TurnEnd::Done;
            }
        };
        self.identity = ready.identity();
        self.state.clone_from(&ready.state);
        self.timeline(self.first, "create", &timed);
        self.fidelity(self.first, fidelity);
        let mut faults = self.check_ready(&first, &ready, &[]);
        match use_session(engine, &handle) {
            Ok(f) => faults.extend(f),
            Err(e) if !e.is_outcome() => return self.abandon(engine, handle, &e),
            Err(e) => faults.push(format!("it did not work when used: {}", chain(&e))),
        }
        for f in &faults {
            self.fail(format!("create: {f}"), &[Metric::CreateToReady, Metric::CreateCpu]);
        }
        if faults.is_empty() {
            self.sample(self.first, Metric::CreateToReady, timed.duration_ms(), clock::RAW, timed.intended_start_us);
            self.sample(self.first, Metric::CreateCpu, cpu_s, "cgroup", timed.intended_start_us);
        }
        if give_up() {
            self.destroy(engine, handle);
            return TurnEnd::GivenUp;
        }

        let second = match engine.next_session(order.generation) {
            Ok(s) => s,
            Err(e) => return self.abandon(engine, handle, &e),
        };
        // The control's delay is in create-to-ready and in nothing else.
        let successor = self.session_order(second, order.identities.1, None);
        let reset = self.silently("reset", || engine.reset(handle, &successor));
        let reset = match reset {
            Ok(r) => r,
            Err(e) if !e.is_outcome() => return host_broken(&e, self.leaked),
            Err(e) => {
                self.leaked.extend_from_slice(e.leaked());
                if give_up() {
                    return TurnEnd::GivenUp;
                }
                self.fail(format!("reset: {}", chain(&e)), &[Metric::ResetToReady, Metric::Destroy]);
                return TurnEnd::Done;
            }
        };
        self.leaked.extend_from_slice(&reset.leaked);
        self.identity_after_reset = reset.ready.identity();
        self.timeline(second, "reset", &reset.timed);
        self.fidelity(second, reset.fidelity);
        let before = [("the session before the reset".to_owned(), self.identity.clone())];
        let mut faults = self.check_ready(&successor, &reset.ready, &before);
        faults.extend(reset.leaked.iter().map(|l| format!("{l} of the old session is still there")));
        match engine.dirt(&reset.handle) {
            Ok(dirt) => faults.extend(dirt.iter().map(|d| format!("{d} survived it"))),
            Err(e) if !e.is_outcome() => return self.abandon(engine, reset.handle, &e),
            Err(e) => faults.push(format!("it did not say whether planted things survived: {}", chain(&e))),
        }
        for f in &faults {
            self.fail(format!("reset: {f}"), &[Metric::ResetToReady]);
        }
        if faults.is_empty() {
            let t = &reset.timed;
            self.sample(second, Metric::ResetToReady, t.duration_ms(), clock::RAW, t.intended_start_us);
        }
        self.destroy(engine, reset.handle);
        TurnEnd::Done
    }

    /// A host failure with a session alive: it is undone, and the failure is what ends the block.
    fn abandon(&mut self, engine: &mut dyn ArmEngine, handle: SessionHandle, e: &EngineError) -> TurnEnd {
        self.destroy(engine, handle);
        host_broken(e, self.leaked)
    }

    fn destroy(&mut self, engine: &mut dyn ArmEngine, handle: SessionHandle) {
        let session = handle.session();
        let destroyed = self.silently("destroy", || engine.destroy(handle));
        match destroyed {
            Ok(d) => {
                self.timeline(session, "destroy", &d.timed);
                for l in &d.leaked {
                    self.fail(format!("destroy: {l} is still there"), &[Metric::Destroy]);
                }
                if d.leaked.is_empty() {
                    let t = &d.timed;
                    self.sample(session, Metric::Destroy, t.duration_ms(), clock::RAW, t.intended_start_us);
                }
                self.leaked.extend(d.leaked);
            }
            Err(e) => {
                self.leaked.extend_from_slice(e.leaked());
                self.fail(format!("destroy: {}", chain(&e)), &[Metric::Destroy]);
            }
        }
    }

    /// Is what answered the session that was ordered, and nobody else's twin?
    fn check_ready(&self, o: &SessionOrder<'_>, ready: &GuestReady, more: &[(String, Identity)]) -> Vec<String> {
        // What cannot be there was refused before the session was made.
        let state = self.order.template.unwrap_or_default();
        let mut out = gates::function(self.order.arm.kind, &WantedIdentity::of(o), state, ready);
        out.extend(gates::distinct(&ready.identity(), more));
        out.extend(gates::distinct(&ready.identity(), self.order.seen));
        out.sort();
        out.dedup();
        out
    }

    fn session_order(&self, session: SessionRef, identity_seed: u64, delay: Option<Duration>) -> SessionOrder<'a> {
        let o = self.order;
        SessionOrder {
            run: o.run,
            arm: o.arm,
            session,
            limits: &o.experiment.limits,
            cpus: o.cpus,
            environment_bytes: o.environment_bytes,
            template_build: o.template_build,
            delay,
            identity_seed,
            workload: o.workload,
            ready_timeout: Duration::from_millis(o.experiment.design.ready_timeout_ms),
        }
    }

    /// Runs a timed operation in declared silence; overrunning the bound is recorded.
    fn silently<T>(&mut self, operation: &str, f: impl FnOnce() -> T) -> T {
        let delay = self.order.delay.ok().flatten().unwrap_or_default();
        let bound = Duration::from_millis(self.order.experiment.design.ready_timeout_ms) + delay + UNWIND_ALLOWANCE;
        let quiet = self.link.quiet(bound);
        let out = f();
        let overrun = quiet.overrun();
        drop(quiet);
        if overrun {
            let text =
                format!("{operation} of {} took longer than the {bound:?} of declared silence", self.order.arm.name);
            self.bodies.push(Body::Log(Log { level: "warn".into(), target: "measure".into(), text }));
        }
        out
    }

    /// Notes a failure and the registered metrics that it makes infinite. A metric that was sampled before stays so.
    fn fail(&mut self, why: String, metrics: &[Metric]) {
        self.failures.push(why);
        self.failed.extend(metrics.iter().filter(|m| self.order.experiment.metric(**m).is_some()));
    }

    fn sample(&mut self, session: SessionRef, metric: Metric, value: f64, clock: &str, intended_start_us: u64) {
        if self.order.experiment.metric(metric).is_none() {
            return;
        }
        let o = self.order;
        self.bodies.push(Body::Sample(Sample {
            block: o.block,
            kind: o.kind,
            position: o.position,
            arm: o.arm.name.clone(),
            session,
            template_build: o.template_build,
            metric,
            value,
            unit: metric.unit().to_owned(),
            clock: clock.to_owned(),
            intended_start_us,
        }));
    }

    fn timeline(&mut self, session: SessionRef, operation: &str, timed: &Timed) {
        self.bodies.push(Body::Timeline(Timeline {
            block: self.order.block,
            position: self.order.position,
            arm: self.order.arm.name.clone(),
            session,
            operation: operation.to_owned(),
            phases: timed.phases.clone(),
        }));
    }

    fn fidelity(&mut self, session: SessionRef, reading: FidelityReading) {
        let o = self.order;
        let (guest_sha256, equivalence) = gates::equivalence(o.workload.guest_sha256, reading.guest_sha256);
        let mut faults = reading.faults;
        faults.extend(equivalence);
        self.bodies.push(Body::Fidelity(Fidelity {
            block: o.block,
            position: o.position,
            arm: o.arm.name.clone(),
            kind: o.arm.kind,
            session,
            mechanism: reading.mechanism,
            limits: reading.limits,
            workload_sha256: o.workload.sha256,
            guest_sha256,
            faults,
        }));
    }

    fn outcome(self) {
        let o = self.order;
        self.bodies.push(Body::Outcome(Outcome {
            block: o.block,
            kind: o.kind,
            position: o.position,
            arm: o.arm.name.clone(),
            session: self.first,
            valid: self.failures.is_empty(),
            failures: self.failures,
            failed_metrics: self.failed.into_iter().collect(),
            identity: self.identity,
            state: self.state,
            identity_after_reset: self.identity_after_reset,
        }));
    }
}

/// Function when used: planting must work, and what was planted must be seen, or the reset check would be blind.
fn use_session(engine: &mut dyn ArmEngine, handle: &SessionHandle) -> Result<Vec<String>, EngineError> {
    engine.dirty(handle)?;
    Ok(if engine.dirt(handle)?.is_empty() {
        vec!["what was planted in it is not seen, so a reset could not be checked".to_owned()]
    } else {
        Vec::new()
    })
}

fn host_broken(e: &EngineError, leaked: &mut Vec<String>) -> TurnEnd {
    leaked.extend_from_slice(e.leaked());
    TurnEnd::HostBroken(chain(e))
}
