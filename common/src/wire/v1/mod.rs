//! Version 1: messages as they were first given. A later version adds a sibling module; this one never changes.

use serde::{Deserialize, Serialize};

use crate::{
    clock::{Micros, MonoMicros},
    digest::Sha256,
    evidence::{BlockKind, Record},
    failure::Failure,
    ids::{ArmName, Generation, HostId, InstallationId, RunId},
    machine::HostFacts,
};

/// Agent → coordinator, first message on the control stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentHello {
    pub agent_version: String,
    pub agent_sha256: Sha256,
    pub installation: InstallationId,
    /// Drawn when the agent's process started: tells a reconnect from a second agent with the same identity.
    pub instance: u64,
    pub facts: HostFacts,
    /// What the spool holds, so that the coordinator knows what will come.
    pub spools: Vec<SpoolState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpoolState {
    pub run: RunId,
    /// Last sequence number written, 0 for none.
    pub last_seq: u64,
    pub closed: bool,
}

/// Coordinator → agent on the control stream. Level-triggered: `Desired` is the whole truth each time, so any message
/// but the last may be lost with a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    Welcome(Welcome),
    Refused(Failure),
    Desired(Desired),
    /// The certificate was revoked or the host released: exit.
    Retire {
        reason: String,
    },
    Goodbye,
    /// Where sealed evidence may be put while the coordinator is away; the whole truth each time, as `Desired`. Sent only
    /// where a bucket is configured.
    Uploads(Uploads),
    /// The answer to `Renew`.
    Renewal(EnrolReply),
    /// Nothing is to be run, and another build is to take this agent's place. Sent instead of a `Desired` without runs.
    Upgrade(Upgrade),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    Hello(Box<AgentHello>),
    /// Facts changed after a fresh preflight.
    Facts(Box<HostFacts>),
    /// A run's demand cannot be met; the run goes on to its end by evidence, this tells why at once.
    Refused {
        run: RunId,
        failure: Failure,
    },
    Goodbye {
        reason: String,
    },
    /// Asks for the next certificate of this host and installation, for a new key.
    Renew {
        /// PKCS#10, DER; the key never leaves the agent.
        csr_der: Vec<u8>,
    },
    /// The build that was ordered did not take over, and will not under this order.
    UpgradeFailed {
        upgrade: Upgrade,
        failure: Failure,
    },
}

/// Another build of the agent: an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    pub sha256: Sha256,
    pub bytes: u64,
    /// When it was ordered: the same build ordered once more is tried once more.
    pub ordered: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub host: HostId,
    pub generation: Generation,
    pub beat_ms: u64,
    pub dispatch_lease_ms: u64,
    pub life_lease_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Desired {
    pub generation: Generation,
    /// At most one run a host at a time measures; others wait or unwind.
    pub runs: Vec<RunDesired>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDesired {
    pub run: RunId,
    /// Registration: canonical form and digest. The agent parses it and refuses one that does not match.
    pub registration: Sha256,
    pub canonical: String,
    pub workload_sha256: Sha256,
    pub phase: RunPhase,
    /// Every block granted to this host so far, in order. The agent runs those that its spool does not show as ended.
    pub granted: Vec<Grant>,
    /// Cumulative acknowledgement: everything up to this is committed.
    pub acked_seq: u64,
    /// What is left of the run's deadline when this was sent, milliseconds.
    pub deadline_left_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunPhase {
    /// Fetch the workload, try the arms out, write `Preflight`.
    Prepare,
    /// Run granted blocks.
    Measure,
    /// No more blocks: undo templates and all, write `Closed`.
    Unwind,
    /// As `Unwind`, at once: stop the block that is running.
    Cancel,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub block: u32,
    pub kind: BlockKind,
    pub order: Vec<ArmName>,
    pub template_build: u32,
    /// Seed of the block's own draws (CPU, environment size, identities).
    pub seed: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploads {
    pub runs: Vec<RunUploads>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunUploads {
    pub run: RunId,
    /// Where segment 0, 1, 2 ... of the run goes.
    pub segments: Vec<UploadUrl>,
    /// For how long from when this was sent, milliseconds.
    pub valid_ms: u64,
}

/// `file:///...`, or an HTTP URL that is signed for one PUT of one object which is not there yet. Who has it can write
/// there, so it is a secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadUrl(pub String);

// What makes it valid stands behind the question mark and must not reach a log.
impl std::fmt::Debug for UploadUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.shown())
    }
}

impl UploadUrl {
    /// Without its signature.
    pub fn shown(&self) -> &str {
        self.0.split('?').next().unwrap_or_default()
    }
}

/// Evidence stream, agent → coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvidenceBatch {
    pub run: RunId,
    /// Consecutive sequence numbers.
    pub records: Vec<Record>,
}

/// Evidence stream, coordinator → agent, after the commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvidenceAck {
    pub run: RunId,
    pub through_seq: u64,
}

/// Artifact stream, one request per stream, agent → coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactRequest {
    pub sha256: Sha256,
    /// Resume from here.
    pub offset: u64,
}

/// Artifact stream: the head; raw bytes follow to the end of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ArtifactHead {
    Found { total_bytes: u64 },
    Missing(Failure),
}

/// Datagram, agent → coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    pub generation: Generation,
    pub number: u64,
    /// The agent's CLOCK_BOOTTIME when it sent this.
    pub sent: MonoMicros,
    pub activity: Activity,
    /// Declared silence from now: nothing will be sent for at most this long. 0 for none.
    pub quiet_ms: u64,
    /// Grows whenever a run makes progress (evidence written).
    pub progress: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    Idle,
    Preparing { run: RunId },
    Building { run: RunId, arm: ArmName },
    Measuring { run: RunId, block: u32, arm: ArmName },
    Unwinding { run: RunId },
}

/// Datagram, coordinator → agent: renews the leases from when the beat was *sent*.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeatAck {
    pub generation: Generation,
    pub number: u64,
    pub sent: MonoMicros,
}

/// Enrolment (ALPN `drums-enrol/1`), agent → coordinator: one request on one bidirectional stream.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolRequest {
    /// The token's secret.
    pub secret: Vec<u8>,
    pub host: HostId,
    /// PKCS#10, DER; the key never leaves the agent.
    pub csr_der: Vec<u8>,
    pub installation: InstallationId,
}

// The secret must not reach a log through a Debug print.
impl std::fmt::Debug for EnrolRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnrolRequest").field("host", &self.host).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EnrolReply {
    Enrolled { certificate_pem: String, ca_pem: String },
    Refused(Failure),
}

#[cfg(test)]
mod goldens;
