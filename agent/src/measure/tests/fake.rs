//! An engine in memory: sessions are entries of a set, and what goes wrong is a function of what is asked.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    evidence::{Identity, LimitsRead, Phase},
    ids::{ArmName, Generation, RunId, SessionRef},
};

use crate::{
    arms::WantedIdentity,
    engine::api::{
        ArmEngine, AuditReport, Created, Destroyed, EngineError, FidelityReading, GuestReady, HostFailure, Reset,
        SessionFailure, SessionHandle, SessionOrder, TemplateReport, Timed,
    },
    measure::{
        noise::NoisePoint,
        settle::{Settled, Survey},
        surroundings::Surroundings,
    },
    steps::Resource,
};

pub(super) const GUEST: &[u8] = b"guest server";

/// What is asked of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub op: &'static str,
    pub arm: Option<ArmName>,
    /// Calls of this operation before this one.
    pub nth: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Session,
    Host,
    Panic,
    Leak,
    /// A sibling with the template's (or the last session's) random stream.
    Twin,
    /// Answers without what it was given.
    Stranger,
    /// What was planted survives a reset.
    Dirt,
    /// Planting is not seen.
    Blind,
    /// Waits until it is told to give up.
    Hang,
    /// As `Host`, and from then on there is no shim.
    Broken,
}

pub(super) type Faults = Rc<RefCell<dyn FnMut(&Call) -> Option<Fault>>>;

pub(super) struct FakeEngine {
    pub faults: Faults,
    pub calls: Rc<RefCell<Vec<Call>>>,
    pub live: Rc<RefCell<BTreeSet<SessionRef>>>,
    sessions: u32,
    counts: BTreeMap<&'static str, u32>,
    templates: BTreeMap<ArmName, GuestReady>,
    arms: BTreeMap<SessionRef, ArmName>,
    dirty: BTreeSet<SessionRef>,
    last: Option<GuestReady>,
    clock_us: u64,
    give_up: Arc<AtomicBool>,
    broken: bool,
}

impl FakeEngine {
    pub(super) fn new(faults: Faults) -> Self {
        Self {
            faults,
            calls: Rc::default(),
            live: Rc::default(),
            sessions: 0,
            counts: BTreeMap::new(),
            templates: BTreeMap::new(),
            arms: BTreeMap::new(),
            dirty: BTreeSet::new(),
            last: None,
            clock_us: 1_000_000,
            give_up: Arc::default(),
            broken: false,
        }
    }

    fn fault(&mut self, op: &'static str, arm: Option<&ArmName>) -> Option<Fault> {
        let n = self.counts.entry(op).or_default();
        let call = Call { op, arm: arm.cloned(), nth: *n };
        *n += 1;
        self.calls.borrow_mut().push(call.clone());
        let fault = (self.faults.borrow_mut())(&call);
        if fault == Some(Fault::Panic) {
            panic!("told to panic in {op}");
        }
        if fault == Some(Fault::Hang) {
            while !self.give_up.load(Ordering::Acquire) {
                crate::measure::clock::pause_before_looking_again(Duration::from_millis(1));
            }
        }
        fault
    }

    fn check(
        &mut self,
        op: &'static str,
        session: SessionRef,
        arm: Option<&ArmName>,
    ) -> Result<Option<Fault>, EngineError> {
        match self.fault(op, arm) {
            Some(Fault::Session | Fault::Hang) => Err(EngineError::Session {
                session,
                kind: ArmKind::DrumsCold,
                stage: op.to_owned(),
                leaked: vec![],
                source: Box::new(SessionFailure::Template("told to fail".into())),
            }),
            Some(fault @ (Fault::Host | Fault::Broken)) => {
                self.broken |= fault == Fault::Broken;
                Err(EngineError::Host {
                    attempted: op.to_owned(),
                    leaked: vec![],
                    source: Box::new(HostFailure::Unfit("told to break".into())),
                })
            }
            other => Ok(other),
        }
    }

    fn timed(&mut self, delay: Option<Duration>) -> Timed {
        let start = self.clock_us;
        let took = 10_000 + delay.map_or(0, |d| d.as_micros() as u64);
        self.clock_us += took + 1_000;
        let phases = vec![Phase { name: "all".into(), start_us: 0, end_us: took }];
        Timed { intended_start_us: start, done_us: start + took, phases }
    }

    fn answer(&mut self, order: &SessionOrder<'_>, fault: Option<Fault>) -> GuestReady {
        let wanted = WantedIdentity::of(order);
        let restored = order.arm.kind.from_template();
        let n = order.session.number;
        let mut ready = GuestReady {
            ready: true,
            hostname: wanted.hostname,
            machine_id: wanted.machine_id,
            address: format!("198.19.{}.{}", n / 256, n % 256),
            random: format!("{:032x}", u128::from(order.identity_seed) << 32 | u128::from(n)),
            boot: if restored { "restored" } else { "cold" }.into(),
            ..GuestReady::default()
        };
        if restored {
            ready.state = self.templates[&order.arm.name].state.clone();
        }
        match fault {
            Some(Fault::Twin) => {
                let other = self.last.as_ref().or(self.templates.get(&order.arm.name));
                ready.random = other.map(|o| o.random.clone()).unwrap_or_default();
            }
            Some(Fault::Stranger) => ready.hostname = "localhost".into(),
            _ => {}
        }
        self.last = Some(ready.clone());
        self.live.borrow_mut().insert(order.session);
        self.arms.insert(order.session, order.arm.name.clone());
        ready
    }
}

fn fidelity(order: &SessionOrder<'_>) -> FidelityReading {
    let limits = LimitsRead {
        cpu_milli: order.limits.cpu_milli,
        cpus: order.cpus.to_vec(),
        memory_bytes: order.limits.memory_bytes,
    };
    FidelityReading {
        mechanism: BTreeMap::from([("session".to_owned(), order.session.to_string())]),
        limits,
        guest_sha256: Some(Sha256::of(GUEST)),
        faults: vec![],
    }
}

impl ArmEngine for FakeEngine {
    fn unfit(&self, _kind: ArmKind) -> Option<String> {
        None
    }

    fn give_up_when(&mut self, flag: Arc<AtomicBool>) {
        self.give_up = flag;
    }

    fn next_session(&mut self, generation: Generation) -> Result<SessionRef, EngineError> {
        self.sessions += 1;
        let session = SessionRef { number: self.sessions, generation };
        self.check("next_session", session, None)?;
        Ok(session)
    }

    fn build_template(&mut self, order: &SessionOrder<'_>) -> Result<TemplateReport, EngineError> {
        let fault = self.check("build_template", order.session, Some(&order.arm.name))?;
        let random = format!("{:032x}", u128::from(order.identity_seed));
        let identity = Identity {
            hostname: format!("t{}", order.session.number),
            machine_id: format!("m{}", order.session.number),
            address: format!("10.0.0.{}", order.session.number),
            random: random.clone(),
        };
        let state = format!("{} build {}", order.arm.name, order.template_build);
        let ready = GuestReady { state: state.clone(), random, ..GuestReady::default() };
        self.templates.insert(order.arm.name.clone(), ready);
        let leaked = if fault == Some(Fault::Leak) { vec!["cgroup of a template".into()] } else { vec![] };
        Ok(TemplateReport { duration_ms: 100.0, bytes: 1, sha256: Sha256::of(b"image"), state, identity, leaked })
    }

    fn create(&mut self, order: &SessionOrder<'_>) -> Result<Created, EngineError> {
        let fault = self.check("create", order.session, Some(&order.arm.name))?;
        let timed = self.timed(order.delay);
        let ready = self.answer(order, fault);
        let handle = SessionHandle::in_memory(order.session, order.arm.kind);
        Ok(Created { timed, cpu_s: 0.01, ready, fidelity: fidelity(order), handle })
    }

    fn reset(&mut self, handle: SessionHandle, order: &SessionOrder<'_>) -> Result<Reset, EngineError> {
        self.live.borrow_mut().remove(&handle.session());
        let fault = self.check("reset", order.session, Some(&order.arm.name))?;
        let timed = self.timed(order.delay);
        let ready = self.answer(order, fault.clone());
        if fault == Some(Fault::Dirt) {
            self.dirty.insert(order.session);
        }
        let leaked = if fault == Some(Fault::Leak) { vec!["link d1".into()] } else { vec![] };
        let handle = SessionHandle::in_memory(order.session, order.arm.kind);
        Ok(Reset { timed, ready, fidelity: fidelity(order), handle, leaked })
    }

    fn destroy(&mut self, handle: SessionHandle) -> Result<Destroyed, EngineError> {
        self.live.borrow_mut().remove(&handle.session());
        let arm = self.arms.get(&handle.session()).cloned();
        let fault = self.check("destroy", handle.session(), arm.as_ref())?;
        let leaked = if fault == Some(Fault::Leak) { vec!["mount x".into()] } else { vec![] };
        Ok(Destroyed { timed: self.timed(None), leaked })
    }

    fn dirty(&mut self, handle: &SessionHandle) -> Result<(), EngineError> {
        let arm = self.arms.get(&handle.session()).cloned();
        if self.check("dirty", handle.session(), arm.as_ref())? != Some(Fault::Blind) {
            self.dirty.insert(handle.session());
        }
        Ok(())
    }

    fn dirt(&mut self, handle: &SessionHandle) -> Result<Vec<String>, EngineError> {
        let arm = self.arms.get(&handle.session()).cloned();
        self.check("dirt", handle.session(), arm.as_ref())?;
        Ok(if self.dirty.contains(&handle.session()) { vec!["file /tmp/x".into()] } else { vec![] })
    }

    fn discard_templates(&mut self, _run: RunId) -> Vec<String> {
        let fault = self.fault("discard_templates", None);
        self.templates.clear();
        if fault == Some(Fault::Leak) { vec!["folder t".into()] } else { vec![] }
    }

    fn audit(&mut self) -> AuditReport {
        AuditReport::default()
    }

    fn reclaim(&mut self) -> AuditReport {
        self.fault("reclaim", None);
        self.templates.clear();
        let undone = std::mem::take(&mut *self.live.borrow_mut());
        AuditReport { undone: undone.iter().map(ToString::to_string).collect(), ..AuditReport::default() }
    }

    fn broken(&self) -> Option<String> {
        self.broken.then(|| "told to break for good".to_owned())
    }

    fn own_cpu_us(&self) -> u64 {
        0
    }

    fn held(&self) -> Vec<(String, Resource)> {
        let held = |s: &SessionRef| (s.to_string(), Resource::Cgroup { name: s.to_string() });
        self.live.borrow().iter().map(held).collect()
    }
}

/// A machine on which nothing else happens.
#[derive(Default)]
pub(super) struct StillMachine {
    pub unsettled: bool,
}

impl Surroundings for StillMachine {
    fn settle(&mut self, _baseline: Option<&Survey>, _limit: Duration) -> Settled {
        let left = if self.unsettled { vec!["zombie 7 (x)".to_owned()] } else { vec![] };
        Settled { waited_ms: 1.0, left, last: Some(Survey::default()) }
    }
    fn canary(&mut self, _cpus: &[u32]) -> Result<f64, String> {
        Ok(10.0)
    }
    fn noise(&mut self, _engine: &dyn ArmEngine) -> Result<NoisePoint, String> {
        Ok(NoisePoint::default())
    }
}
