//! What the measuring side may ask of the engine, and what it gets back. Everything here is data or a trait; the block
//! loop codes against this file and against nothing else of the engine.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    evidence::{Identity, LimitsRead, Phase},
    experiment::{Arm, Limits},
    ids::{Generation, RunId, SessionRef},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    ledger::LedgerError,
    steps::{PlanError, Resource, StepError},
};

pub use super::handle::SessionHandle;
pub use crate::ledger::audit::AuditReport;
pub use crate::probe::{GuestReady, ProbeError, ReadyAnswer, Target};

/// A workload as unpacked on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The folder that becomes a session's root, read-only for us.
    pub tree: PathBuf,
    /// Digest of its manifest.
    pub sha256: Sha256,
    /// Digest of `drums-guest` in it, which the guest server reports of itself.
    pub guest_sha256: Sha256,
}

/// One session to make.
#[derive(Clone, Debug)]
pub struct SessionOrder<'a> {
    pub run: RunId,
    pub arm: &'a Arm,
    /// From [`ArmEngine::next_session`]; never used twice.
    pub session: SessionRef,
    pub limits: &'a Limits,
    /// The CPU set of this block; `limits.cpuset_size` long.
    pub cpus: &'a [u32],
    /// Bytes of padding in the environment of the session's pid 1 (randomised set-up).
    pub environment_bytes: u32,
    /// Which build of the arm's template to restore from, or to build.
    pub template_build: u32,
    /// The positive control: waited for inside a create's timed window, before its first step. A reset has none.
    pub delay: Option<Duration>,
    /// Seed of hostname, machine id and random stream of this session; different for every session.
    pub identity_seed: u64,
    pub workload: &'a Workload,
    pub ready_timeout: Duration,
}

/// When an operation was meant to start, when it was done, and where its time went. CLOCK_MONOTONIC_RAW, microseconds;
/// phases are offsets from the intended start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timed {
    pub intended_start_us: u64,
    pub done_us: u64,
    pub phases: Vec<Phase>,
}

impl Timed {
    /// The measurement itself: from the intended start to done.
    pub fn duration_ms(&self) -> f64 {
        #[allow(clippy::cast_precision_loss)] // 2^53 us are 285 years
        let us = self.done_us.saturating_sub(self.intended_start_us) as f64;
        us / 1_000.0
    }
}

/// What was read of a live session, outside the timed window, for the fidelity gates. `faults` is empty when nothing
/// contradicts what was registered.
#[derive(Clone, Debug, PartialEq)]
pub struct FidelityReading {
    pub mechanism: BTreeMap<String, String>,
    pub limits: LimitsRead,
    /// Digest of the guest server's binary as the guest reads it; none when it could not be asked.
    pub guest_sha256: Option<Sha256>,
    pub faults: Vec<String>,
}

#[derive(Debug)]
pub struct Created {
    pub timed: Timed,
    /// CPU seconds of the session's parent group (tool and session) at ready.
    pub cpu_s: f64,
    pub ready: GuestReady,
    pub fidelity: FidelityReading,
    pub handle: SessionHandle,
}

#[derive(Debug)]
pub struct Reset {
    /// From the intended reset of the used session to the first full answer of its successor.
    pub timed: Timed,
    pub ready: GuestReady,
    /// Of the successor, read after the clock stopped.
    pub fidelity: FidelityReading,
    /// The successor; the old handle is used up.
    pub handle: SessionHandle,
    /// What of the old session could not be undone.
    pub leaked: Vec<String>,
}

#[derive(Debug)]
pub struct Destroyed {
    /// From the intended destroy until nothing of the session was observed.
    pub timed: Timed,
    pub leaked: Vec<String>,
}

/// A template as built and certified.
#[derive(Clone, Debug, PartialEq)]
pub struct TemplateReport {
    pub duration_ms: f64,
    pub bytes: u64,
    /// Digest over the saved image's files.
    pub sha256: Sha256,
    /// The saved state as the template's guest reported it before it was saved.
    pub state: String,
    pub identity: Identity,
    /// What of the template's own session could not be undone.
    pub leaked: Vec<String>,
}

/// Why an operation did not yield what was asked. Whatever it was, everything the operation had made is undone before
/// this is returned; `leaked` in the variants names what could not be.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The session's own failure: an outcome, counted against the arm.
    #[error("session {session} of {kind}: {stage} failed")]
    Session {
        session: SessionRef,
        kind: ArmKind,
        /// What was being done, for people.
        stage: String,
        leaked: Vec<String>,
        #[source]
        source: Box<SessionFailure>,
    },
    /// The host cannot do this at all: nothing is said about the arm.
    #[error("{attempted} on this host")]
    Host {
        attempted: String,
        leaked: Vec<String>,
        #[source]
        source: Box<HostFailure>,
    },
}

impl SessionFailure {
    /// The host is why: nothing is said about the arm.
    pub fn is_host_fault(&self) -> bool {
        crate::sys::is_host_fault(self)
    }
}

impl EngineError {
    /// True when the failure counts against the arm.
    pub fn is_outcome(&self) -> bool {
        matches!(self, Self::Session { .. })
    }
    pub fn leaked(&self) -> &[String] {
        match self {
            Self::Session { leaked, .. } | Self::Host { leaked, .. } => leaked,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SessionFailure {
    #[error("a step failed")]
    Step(#[source] StepError),
    #[error("no answer that proves the session ready")]
    NotReady(#[source] ProbeError),
    #[error("the guest server refused {what}")]
    Guest {
        what: &'static str,
        #[source]
        source: ProbeError,
    },
    #[error("the guest server did not accept {what}: {why}")]
    Refused { what: &'static str, why: String },
    #[error("{0}")]
    Template(String),
}

#[derive(Debug, thiserror::Error)]
pub enum HostFailure {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Sys(#[from] crate::sys::SysError),
    #[error("{0}")]
    Unfit(String),
    /// What looked like a session's failure.
    #[error(transparent)]
    Session(Box<SessionFailure>),
}

/// Body of `POST /drums/personalise`: what makes a restored sibling itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Personalise {
    pub hostname: String,
    pub machine_id: String,
    /// CIDR; only where the guest configures its own interface (QEMU).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Wall clock, microseconds since 1970; filled in at the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock_us: Option<i64>,
    pub seed_hex: String,
}

/// Speaks HTTP to guest servers. One implementation for every arm, over `crate::probe`; tests bring their own.
pub trait Prober: Send {
    /// Probes until a full answer echoed `nonce`, `deadline_us` (CLOCK_MONOTONIC_RAW) passed or `alive` said no.
    fn ready(
        &self,
        target: &Target,
        nonce: &str,
        deadline_us: u64,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<ReadyAnswer, ProbeError>;
    /// One call, within `timeout` and while `alive` says that waiting makes sense.
    fn post(
        &self,
        target: &Target,
        path: &str,
        body: &Value,
        timeout: Duration,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<Value, ProbeError>;
    fn get(
        &self,
        target: &Target,
        path: &str,
        timeout: Duration,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<Value, ProbeError>;
}

/// Sessions of every arm. Synchronous, one owner thread; each call leaves the host as its result says.
pub trait ArmEngine {
    /// Why an arm kind cannot run here, in words an operator can act on; `None` when it can.
    fn unfit(&self, kind: ArmKind) -> Option<String>;

    /// Hands over the flag that, once set, makes an operation under way give up as soon as it can: the closure that
    /// readiness probes ask whether to go on must look at it. Called once, before anything else.
    fn give_up_when(&mut self, flag: Arc<AtomicBool>);

    /// A session number that was never handed out before, also not before a crash.
    fn next_session(&mut self, generation: Generation) -> Result<SessionRef, EngineError>;

    /// Builds and certifies build `order.template_build` of the arm's template (kept per run, arm name and build).
    /// An arm that is not made from templates answers with a host failure.
    fn build_template(&mut self, order: &SessionOrder<'_>) -> Result<TemplateReport, EngineError>;

    /// Makes a session and waits for its first full answer; personalises it first when it was restored.
    fn create(&mut self, order: &SessionOrder<'_>) -> Result<Created, EngineError>;

    /// Replaces a used session by a fresh one of the same arm: destroy, then create, timed as one. `order.session` is
    /// the successor's.
    fn reset(&mut self, handle: SessionHandle, order: &SessionOrder<'_>) -> Result<Reset, EngineError>;

    /// Undoes everything, in reverse, until nothing of it is observed. Leaks are reported, not an error.
    fn destroy(&mut self, handle: SessionHandle) -> Result<Destroyed, EngineError>;

    /// Plants a file and a process through the guest server, so that a reset has something to remove.
    fn dirty(&mut self, handle: &SessionHandle) -> Result<(), EngineError>;

    /// What of the planted things is still there; empty after a good reset.
    fn dirt(&mut self, handle: &SessionHandle) -> Result<Vec<String>, EngineError>;

    /// Undoes every template of a run; answers with leaks.
    fn discard_templates(&mut self, run: RunId) -> Vec<String>;

    /// The ledger against the kernel: what is ours and not held by this engine is undone.
    fn audit(&mut self) -> AuditReport;

    /// After a bug of ours (a panic) in the middle of an operation: nothing that this engine held counts as held any
    /// more, templates included, and the audit undoes it.
    fn reclaim(&mut self) -> AuditReport;

    /// Why this engine can make nothing any more, if so; only starting the agent again helps.
    fn broken(&self) -> Option<String>;

    /// CPU time used so far by the agent, the shim and every group made here, microseconds: what the noise gate takes
    /// off the machine's busy time.
    fn own_cpu_us(&self) -> u64;

    /// Resources that are held at this moment (templates, sessions), for status and leak checks.
    fn held(&self) -> Vec<(String, Resource)>;
}
