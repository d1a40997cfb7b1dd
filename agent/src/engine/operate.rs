//! Create, reset, destroy: the timed operations.

use std::{sync::atomic::Ordering, time::Duration};

use drums_common::{arm::ArmKind, evidence::INJECTED_DELAY, ids::SessionRef};
use serde_json::{Value, json};

use super::{
    Engine,
    api::{
        Created, Destroyed, EngineError, FidelityReading, GuestReady, HostFailure, ProbeError, ReadyAnswer, Reset,
        SessionFailure, SessionHandle, SessionOrder, Target,
    },
    host,
    run::{Made, Stopped},
    timeline::Timeline,
};
use crate::{arms::Plan, steps::Cx, sys::clock};

/// A call to a guest that has answered before takes milliseconds; this is for a guest that hangs.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a session did not come about, before it is unwound.
pub(super) enum Cause {
    Session { stage: &'static str, failure: SessionFailure },
    Host { attempted: String, failure: HostFailure },
}

impl Cause {
    pub(super) fn session(stage: &'static str, failure: SessionFailure) -> Self {
        Self::Session { stage, failure }
    }

    fn of(self, session: SessionRef, kind: ArmKind, leaked: Vec<String>) -> EngineError {
        match self {
            Self::Session { stage, failure } => {
                EngineError::Session { session, kind, stage: stage.to_owned(), leaked, source: Box::new(failure) }
            }
            Self::Host { attempted, failure } => EngineError::Host { attempted, leaked, source: Box::new(failure) },
        }
    }
}

impl From<Stopped> for Cause {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Step(e) => Self::session("creation", SessionFailure::Step(e)),
            Stopped::Ledger(e) => Self::Host { attempted: "cannot go on with a session".to_owned(), failure: e.into() },
        }
    }
}

/// A session that answered, inside the timed window still.
struct Up {
    ready: GuestReady,
    ready_us: u64,
    /// Connections that the prober began until then.
    attempts: u32,
    cpu_us: u64,
}

impl Engine {
    /// A failure counts against an arm only while the host stands: without the shim every session fails, and so does
    /// one that ran into the end of the agent's own descriptors or disk.
    fn charge(&self, session: SessionRef, kind: ArmKind, cause: Cause, leaked: Vec<String>) -> EngineError {
        let cause = match cause {
            Cause::Session { stage, failure } => {
                let attempted = format!("session {session} of {kind} could not be judged: {stage} failed");
                match self.sys.standing() {
                    Err(e) => {
                        tracing::error!(%session, stage, error = drums_common::telemetry::chain(&failure), "failed without a shim");
                        Cause::Host { attempted, failure: e.into() }
                    }
                    Ok(()) if failure.is_host_fault() => {
                        Cause::Host { attempted, failure: HostFailure::Session(Box::new(failure)) }
                    }
                    Ok(()) => Cause::Session { stage, failure },
                }
            }
            host @ Cause::Host { .. } => host,
        };
        cause.of(session, kind, leaked)
    }

    pub(super) fn failed(&self, order: &SessionOrder<'_>, cause: Cause, leaked: Vec<String>) -> EngineError {
        self.charge(order.session, order.arm.kind, cause, leaked)
    }

    /// Plan, ledger and what an arm wants done before the clock starts.
    fn prepare(&mut self, order: &SessionOrder<'_>) -> Result<(Plan, Made), EngineError> {
        let plan = self.plan(order)?;
        let mut made = Made { plan: self.site.name(order.session), ..Made::default() };
        self.intend(&made.plan, &plan.steps)
            .map_err(|e| host(format!("cannot begin session {}", order.session), e.into()))?;
        let mut untimed = Timeline::start(self.sys.now_us());
        match self.apply(&plan.before, &mut made, &mut untimed) {
            Ok(()) => Ok((plan, made)),
            Err(stopped) => {
                let (_, leaked) = self.unwind(made, &mut untimed);
                Err(self.failed(order, stopped.into(), leaked))
            }
        }
    }

    pub(super) fn make(&mut self, order: &SessionOrder<'_>) -> Result<Created, EngineError> {
        let (plan, mut made) = self.prepare(order)?;
        let mut timeline = Timeline::start(self.sys.now_us());
        if let Some(delay) = order.delay {
            self.delay(delay, &mut timeline);
        }
        match self.bring_up(order, &plan, &mut made, &mut timeline) {
            Ok(up) => self.created(order, plan, made, timeline, up),
            Err(cause) => {
                let (_, leaked) = self.unwind(made, &mut timeline);
                Err(self.failed(order, cause, leaked))
            }
        }
    }

    fn created(
        &mut self,
        order: &SessionOrder<'_>,
        plan: Plan,
        made: Made,
        timeline: Timeline,
        up: Up,
    ) -> Result<Created, EngineError> {
        let target = target(&plan, &made);
        let fidelity = self.read_up(order, &plan, &target, &made, &up);
        Ok(Created {
            timed: timeline.done(up.ready_us),
            cpu_s: seconds(up.cpu_us),
            fidelity,
            ready: up.ready,
            handle: SessionHandle { session: order.session, kind: order.arm.kind, target, made },
        })
    }

    /// The reading of a session that is up, and how hard the prober knocked: each connection costs the guest something.
    fn read_up(&self, order: &SessionOrder<'_>, plan: &Plan, target: &Target, made: &Made, up: &Up) -> FidelityReading {
        let mut reading = self.read(order, plan, target, &made.cx, &up.ready);
        reading.mechanism.insert("connections begun until ready".to_owned(), up.attempts.to_string());
        reading
    }

    /// Steps, post-restore call, first answer.
    fn bring_up(
        &mut self,
        order: &SessionOrder<'_>,
        plan: &Plan,
        made: &mut Made,
        timeline: &mut Timeline,
    ) -> Result<Up, Cause> {
        self.apply(&plan.steps, made, timeline)?;
        let deadline = timeline.start_us().saturating_add(micros(order.ready_timeout));
        if let Some((at, who)) = &plan.personalise {
            let from = self.sys.now_us();
            let mut who = who.clone();
            who.clock_us = Some(clock::wall_us());
            let body = serde_json::to_value(&who).unwrap_or(Value::Null);
            let left = Duration::from_micros(deadline.saturating_sub(from).max(1_000));
            let answer = self.prober.post(at, "/drums/personalise", &body, left, &mut self.lives(&made.cx));
            timeline.mark("personalise", from, self.sys.now_us());
            accepted("the post-restore call", answer).map_err(|f| Cause::session("personalisation", f))?;
        }
        let from = self.sys.now_us();
        let ReadyAnswer { guest: ready, ready_us, attempts } =
            self.first_answer(&target(plan, made), made, deadline)?;
        timeline.mark("ready", from, ready_us);
        let cpu_us = self.sys.cgroup_cpu_us(&plan.cgroup).map_err(|e| Cause::Host {
            attempted: "cannot read the session's CPU account".to_owned(),
            failure: e.into(),
        })?;
        Ok(Up { ready, ready_us, attempts, cpu_us })
    }

    /// A full answer that echoes a nonce drawn now, after the create or restore.
    pub(super) fn first_answer(&self, at: &Target, made: &Made, deadline: u64) -> Result<ReadyAnswer, Cause> {
        let nonce = hex::encode(rand::random::<[u8; 16]>());
        self.prober
            .ready(at, &nonce, deadline, &mut self.lives(&made.cx))
            .map_err(|e| Cause::session("readiness", SessionFailure::NotReady(e)))
    }

    /// Whether waiting for a session's answer makes sense: it may have ended, and the agent may be asked to give up.
    pub(super) fn lives<'s>(&'s self, cx: &'s Cx) -> impl FnMut() -> bool + 's {
        let child = cx.session();
        move || !self.give_up.load(Ordering::Relaxed) && child.is_none_or(|c| self.sys.alive(c))
    }

    /// The positive control's delay: waited for by the clock that measures, before the first step. Later, the guest would
    /// boot meanwhile and hide a part of it.
    fn delay(&self, delay: Duration, timeline: &mut Timeline) {
        let from = self.sys.now_us();
        let until = from.saturating_add(micros(delay));
        loop {
            let now = self.sys.now_us();
            if now >= until || self.give_up.load(Ordering::Relaxed) {
                timeline.mark(INJECTED_DELAY, from, now);
                return;
            }
            clock::between_looks((until - now).min(100_000));
        }
    }

    pub(super) fn replace(&mut self, handle: SessionHandle, order: &SessionOrder<'_>) -> Result<Reset, EngineError> {
        let (plan, mut made) = match self.prepare(order) {
            Ok(prepared) => prepared,
            Err(e) => return Err(self.end_after(handle, e)),
        };
        let mut timeline = Timeline::start(self.sys.now_us());
        let (_, old) = self.take_apart(take(handle), &mut timeline);
        let up = self.bring_up(order, &plan, &mut made, &mut timeline);
        // Our own accounts are settled after the clock stopped.
        let leaked = self.account(old);
        match up {
            Ok(up) => {
                let target = target(&plan, &made);
                let fidelity = self.read_up(order, &plan, &target, &made, &up);
                let handle = SessionHandle { session: order.session, kind: order.arm.kind, target, made };
                Ok(Reset { timed: timeline.done(up.ready_us), ready: up.ready, fidelity, handle, leaked })
            }
            Err(cause) => {
                let (_, more) = self.unwind(made, &mut timeline);
                Err(self.failed(order, cause, leaked.into_iter().chain(more).collect()))
            }
        }
    }

    /// The old session goes even when its successor could not be planned.
    fn end_after(&mut self, handle: SessionHandle, error: EngineError) -> EngineError {
        let mut timeline = Timeline::start(self.sys.now_us());
        let (_, more) = self.unwind(take(handle), &mut timeline);
        match error {
            EngineError::Session { session, kind, stage, mut leaked, source } => {
                leaked.extend(more);
                EngineError::Session { session, kind, stage, leaked, source }
            }
            EngineError::Host { attempted, mut leaked, source } => {
                leaked.extend(more);
                EngineError::Host { attempted, leaked, source }
            }
        }
    }

    pub(super) fn end(&mut self, handle: SessionHandle) -> Result<Destroyed, EngineError> {
        let mut timeline = Timeline::start(self.sys.now_us());
        let (done, leaked) = self.unwind(take(handle), &mut timeline);
        Ok(Destroyed { timed: timeline.done(done), leaked })
    }

    pub(super) fn plant(&mut self, handle: &SessionHandle) -> Result<(), EngineError> {
        let answer = self.prober.post(
            &handle.target,
            "/drums/dirty",
            &json!({}),
            CALL_TIMEOUT,
            &mut self.lives(&handle.made.cx),
        );
        let planted = answer.map_err(|e| self.guest(handle, "planting of marks", e))?;
        let missing: Vec<_> = marks(&planted).filter(|(_, there)| !there).map(|(name, _)| name).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(EngineError::Session {
            session: handle.session,
            kind: handle.kind,
            stage: "planting of marks".to_owned(),
            leaked: Vec::new(),
            source: Box::new(SessionFailure::Refused { what: "marks", why: format!("not planted: {missing:?}") }),
        })
    }

    pub(super) fn look_for_dirt(&mut self, handle: &SessionHandle) -> Result<Vec<String>, EngineError> {
        let answer = self.prober.get(&handle.target, "/drums/dirty", CALL_TIMEOUT, &mut self.lives(&handle.made.cx));
        let seen = answer.map_err(|e| self.guest(handle, "look for marks", e))?;
        Ok(marks(&seen).filter(|(_, there)| *there).map(|(name, _)| name).collect())
    }

    fn guest(&self, handle: &SessionHandle, stage: &'static str, source: ProbeError) -> EngineError {
        let cause = Cause::session(stage, SessionFailure::Guest { what: "the call", source });
        self.charge(handle.session, handle.kind, cause, Vec::new())
    }
}

/// Where the session answers: what its making told, or else the plan.
fn target(plan: &Plan, made: &Made) -> Target {
    made.cx.target.clone().unwrap_or_else(|| plan.ready_at.clone())
}

fn take(mut handle: SessionHandle) -> Made {
    std::mem::take(&mut handle.made)
}

/// The guest's answer about its marks: names and whether they are there.
fn marks(answer: &Value) -> impl Iterator<Item = (String, bool)> {
    let map = answer.as_object().cloned().unwrap_or_default();
    map.into_iter().filter_map(|(name, there)| Some((name, there.as_bool()?)))
}

/// `ok` in a guest's answer, or what it says failed.
pub(super) fn accepted(what: &'static str, answer: Result<Value, ProbeError>) -> Result<(), SessionFailure> {
    let answer = answer.map_err(|source| SessionFailure::Guest { what, source })?;
    if answer.get("ok").and_then(Value::as_bool) == Some(true) {
        return Ok(());
    }
    let why = answer.get("failed").map_or_else(|| answer.to_string(), Value::to_string);
    Err(SessionFailure::Refused { what, why })
}

#[allow(clippy::cast_precision_loss)] // 2^53 us are 285 years
pub(super) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}
