//! The evidence of a run: what agents observed, in order, and nothing derived from it.
//!
//! One numbered sequence per (run, host). These types are a published format on purpose: the same record goes over the
//! wire (bincode), into the store and into bundles (JSON lines), so that verification reads exactly what was recorded.
//! They belong to wire version 1 and only grow by new variants at the end. No field attribute may skip or flatten:
//! bincode needs every field in its place.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    arm::ArmKind,
    clock::Micros,
    digest::Sha256,
    experiment::Metric,
    ids::{ArmName, Generation, HostId, RunId, SessionRef},
    machine::HostFacts,
};

/// One row of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub registration: Sha256,
    pub run: RunId,
    pub host: HostId,
    /// 1, 2, 3 ... per (run, host), without gaps.
    pub seq: u64,
    /// Wall clock of the agent when the record was made.
    pub at: Micros,
    /// Lease generation under which it was made; the coordinator marks records of an old one as late.
    pub generation: Generation,
    pub body: Body,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// First record of a run on a host: what the host is, and which agent speaks.
    Preflight(Preflight),
    /// A template was built (outside every timed window).
    Template(Template),
    BlockStarted(BlockStarted),
    Sample(Sample),
    /// Where the time of one operation went.
    Timeline(Timeline),
    /// What the fidelity gates read of one session.
    Fidelity(Fidelity),
    /// Outcome gates of one session.
    Outcome(Outcome),
    BlockEnded(BlockEnded),
    Log(Log),
    /// Last record of a run on a host.
    Closed(Closed),
}

impl Body {
    /// True if it holds real numbers, of which some (infinities) are none in JSON and could not be read back.
    pub fn has_reals(&self) -> bool {
        match self {
            Self::Template(_) | Self::BlockStarted(_) | Self::Sample(_) | Self::BlockEnded(_) => true,
            Self::Preflight(_)
            | Self::Timeline(_)
            | Self::Fidelity(_)
            | Self::Outcome(_)
            | Self::Log(_)
            | Self::Closed(_) => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preflight {
    pub facts: HostFacts,
    pub agent_version: String,
    pub agent_sha256: Sha256,
    /// Digest of the workload tree as unpacked here.
    pub workload_sha256: Sha256,
    /// Resolution of the clocks used, nanoseconds, by clock name.
    pub clock_resolution_ns: BTreeMap<String, u64>,
    /// Delay given to each delayed arm, milliseconds, once its base arm's warm-up median is known; empty before.
    pub note: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Template {
    pub arm: ArmName,
    /// 0, 1, 2 ... per arm and host.
    pub build: u32,
    pub duration_ms: f64,
    pub bytes: u64,
    pub sha256: Sha256,
    /// The saved state as the template's guest reported it: siblings must carry it and must differ from its identity.
    pub state: String,
    pub identity: Identity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockKind {
    WarmUp,
    Measured,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockStarted {
    pub block: u32,
    pub kind: BlockKind,
    /// Arms in the order of this block.
    pub order: Vec<ArmName>,
    pub template_build: u32,
    /// Randomised set-up of the block.
    pub cpus: Vec<u32>,
    pub environment_bytes: u32,
    /// Delay injected per delayed arm, milliseconds: its fraction of the base arm's warm-up median on this host.
    pub delays_ms: BTreeMap<ArmName, f64>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub block: u32,
    pub kind: BlockKind,
    /// 0-based place of the arm in its block.
    pub position: u32,
    pub arm: ArmName,
    pub session: SessionRef,
    pub template_build: u32,
    pub metric: Metric,
    /// In `unit`. Never present for a failed operation: its `Outcome` says so, and it counts as plus infinity.
    pub value: f64,
    pub unit: String,
    /// `CLOCK_MONOTONIC_RAW` or the cgroup's CPU account.
    pub clock: String,
    /// Intended start on that clock, microseconds.
    pub intended_start_us: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    pub block: u32,
    pub position: u32,
    pub arm: ArmName,
    pub session: SessionRef,
    /// `create`, `reset` or `destroy`.
    pub operation: String,
    /// In order of start; offsets from the intended start, microseconds of CLOCK_MONOTONIC_RAW.
    pub phases: Vec<Phase>,
}

/// Phase of a `create` in which the positive control's delay is waited for.
pub const INJECTED_DELAY: &str = "injected delay";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    pub name: String,
    pub start_us: u64,
    pub end_us: u64,
}

/// Readings of one session that say whether the registered thing ran. `mechanism` and `limits` hold what was read, by
/// name; `faults` holds what contradicts the registration, empty when nothing does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    pub block: u32,
    pub position: u32,
    pub arm: ArmName,
    pub kind: ArmKind,
    pub session: SessionRef,
    pub mechanism: BTreeMap<String, String>,
    pub limits: LimitsRead,
    pub workload_sha256: Sha256,
    /// Digest of the guest server's own binary as the guest reads it.
    pub guest_sha256: Sha256,
    pub faults: Vec<String>,
}

/// Limits as read back from the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitsRead {
    pub cpu_milli: u32,
    pub cpus: Vec<u32>,
    pub memory_bytes: u64,
}

/// Who a session says it is. Siblings must differ in every field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub hostname: String,
    pub machine_id: String,
    pub address: String,
    /// 16 bytes of the guest's userspace random stream, hexadecimal.
    pub random: String,
}

/// Did the session do its job? One record per session, also for one that never became ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub block: u32,
    pub kind: BlockKind,
    pub position: u32,
    pub arm: ArmName,
    pub session: SessionRef,
    pub valid: bool,
    /// What failed, in words; empty when valid.
    pub failures: Vec<String>,
    /// Operations that failed: their metrics count as plus infinity.
    pub failed_metrics: Vec<Metric>,
    pub identity: Identity,
    /// The saved state that a restored session carries; empty for a cold one.
    pub state: String,
    /// After the reset.
    pub identity_after_reset: Identity,
}

/// Environment readings over a block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    pub duration_ms: f64,
    pub steal_ms: f64,
    /// CPU used by others: busy time of /proc/stat less the run's own groups and the agent.
    pub outside_cpu_ms: f64,
    /// The agent's and shim's own CPU in the block.
    pub harness_cpu_ms: f64,
    /// The canary loop before each arm and after the last, milliseconds.
    pub canaries_ms: Vec<f64>,
    /// Wall clock against CLOCK_MONOTONIC_RAW over the block.
    pub clock_step_ms: f64,
    /// Time taken to settle between samples; `settled` is false when the limit passed.
    pub settle_ms: Vec<f64>,
    pub settled: bool,
    pub unsettled: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockResult {
    /// Every arm had its turn (its sessions may have failed).
    Completed,
    /// The agent died or was stopped in the block.
    Interrupted(String),
    Cancelled,
    /// The run's deadline or the life lease ended before the block did.
    Expired(String),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockEnded {
    pub block: u32,
    pub kind: BlockKind,
    pub result: BlockResult,
    pub environment: Environment,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Log {
    /// `error`, `warn`, `info` or `debug`.
    pub level: String,
    pub target: String,
    /// At most 64 KiB; longer texts are cut with a mark.
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Teardown {
    Clean,
    /// What could not be undone.
    Leaked(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    pub teardown: Teardown,
    /// Empty after an orderly end.
    pub reason: String,
}
