//! What the API says, as JSON: mirrors of the inner types, so that those may change. Both the server and `drumsctl` use
//! them. Times are RFC 3339, UTC.

use std::collections::BTreeMap;

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::Record,
    experiment::{Experiment, WorkloadManifest},
    ids::{ExperimentId, HostId, InstallationId, RunId, WorkloadName},
    machine::HostFacts,
    token::Address,
    verdict::Verdict,
};
use serde::{Deserialize, Serialize};

use crate::pki::Role;

/// RFC 3339 with microseconds, UTC.
pub fn utc(at: Micros) -> String {
    jiff::Timestamp::from_microsecond(at.0).map_or_else(|_| at.to_string(), |t| t.to_string())
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatusView {
    pub version: String,
    pub build: Sha256,
    pub home: String,
    pub installation: InstallationId,
    pub ca: Sha256,
    pub up_since: String,
    pub now: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FleetView {
    pub hosts: Vec<HostView>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostView {
    pub name: HostId,
    pub kind: String,
    pub ownership: String,
    /// `connected`, `silent`, `lost`, `disconnected`, `enrolled` (a certificate, never connected), `new` or `released`.
    pub state: String,
    /// Age of the last sign of life, milliseconds.
    pub heartbeat_ms: Option<u64>,
    pub activity: String,
    /// What is left of the life lease, milliseconds, as the coordinator counts.
    pub life_left_ms: Option<u64>,
    pub generation: u32,
    /// Adopted hosts cost nothing here.
    pub cost: Option<f64>,
    pub version: Option<String>,
    pub agent_sha256: Option<Sha256>,
    /// The build that was ordered and does not run yet.
    pub upgrade: Option<Sha256>,
    pub machine: Option<String>,
    pub added: String,
    pub released: Option<String>,
    pub welcomed: Option<String>,
    pub facts: Option<HostFacts>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeHost {
    /// An artifact; none takes an order back.
    pub sha256: Option<Sha256>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddHost {
    pub name: HostId,
    pub kind: String,
    /// Addresses that the token names; empty for the configured ones.
    pub addresses: Vec<String>,
    pub valid_minutes: u64,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct TokenView {
    /// The secret is in here: for the one who asked for it.
    pub token: String,
    pub host: HostId,
    pub addresses: Vec<Address>,
    pub expires: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditView {
    /// Grows with every row.
    pub number: u64,
    pub at: String,
    pub at_us: i64,
    pub actor: String,
    /// Where it came from: an address, `unix socket`, or empty for what the coordinator did by itself.
    pub peer: String,
    pub action: String,
    pub run: Option<RunId>,
    pub host: Option<HostId>,
    pub detail: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkloadView {
    pub name: WorkloadName,
    pub sha256: Sha256,
    pub bytes: u64,
    pub files: u64,
    pub added: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddWorkload {
    pub name: WorkloadName,
    pub manifest: WorkloadManifest,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecBody {
    /// As the user named it.
    pub file: String,
    pub source: String,
    /// A later version of a registered experiment.
    pub amend: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegistrationView {
    pub sha256: Sha256,
    pub experiment: ExperimentId,
    pub title: String,
    pub registered: String,
    pub registered_us: i64,
    pub max_runs: u32,
    pub runs: u32,
    /// False when this very registration was there before.
    pub new: bool,
    /// The registration of this experiment that a run takes when none is named.
    pub latest: Sha256,
}

/// A registration whole, as bundles carry it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegistrationBody {
    pub sha256: Sha256,
    pub canonical: String,
    pub registered_us: i64,
    pub spec: String,
}

/// The dry run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlanView {
    pub experiment: Experiment,
    pub registration: Option<Sha256>,
    pub registered: bool,
    /// Hosts that a run would get now.
    pub hosts: Vec<PlanHost>,
    /// What keeps a run from starting now; empty when one could.
    pub missing: Vec<String>,
    pub machines: usize,
    /// A guess, or the mean of earlier runs.
    pub expected_ms: u64,
    pub expected_from: String,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlanHost {
    pub host: HostId,
    pub chosen: bool,
    pub machine: Option<String>,
    pub lacks: Vec<String>,
    pub blocks: Vec<PlanBlock>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlanBlock {
    pub kind: String,
    pub block: u32,
    pub template_build: u32,
    pub order: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateRun {
    pub experiment: ExperimentId,
    pub registration: Option<Sha256>,
    /// The operator's own end, microseconds since 1970.
    pub until_us: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunsView {
    pub runs: Vec<RunView>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunView {
    pub run: RunId,
    pub experiment: ExperimentId,
    pub registration: Sha256,
    pub number: u32,
    pub max_runs: u32,
    pub phase: String,
    pub verdict: Option<Verdict>,
    /// Why no more blocks are granted.
    pub ending: Option<String>,
    pub created: String,
    pub started: Option<String>,
    pub deadline: Option<String>,
    pub closed: Option<String>,
    pub blocks_done: u32,
    pub blocks_total: u32,
    /// A guess of what is left until every block ended.
    pub left_ms: Option<u64>,
    pub hosts: Vec<RunHostView>,
    /// What hosts could not undo.
    pub leaked: Vec<String>,
    /// Hosts that never reported their teardown.
    pub unreported: Vec<HostId>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunHostView {
    pub host: HostId,
    pub machine: String,
    pub prepared: bool,
    pub lost: bool,
    pub blocks_done: u32,
    pub blocks_total: u32,
    /// The block that it has the turn for.
    pub block: Option<String>,
    /// What its agent says that it does.
    pub activity: String,
    /// `clean`, `leaked` or nothing yet.
    pub teardown: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EventsView {
    pub events: Vec<EventView>,
    pub run: RunView,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EventView {
    pub number: u64,
    pub at: String,
    pub at_us: i64,
    pub kind: String,
    pub host: Option<HostId>,
    pub text: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvidenceView {
    pub rows: Vec<EvidenceRow>,
    pub last: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvidenceRow {
    pub record: Record,
    pub received_us: i64,
    pub late: bool,
}

/// Counts by word, for `doctor`.
pub type Counts = BTreeMap<String, u64>;

/// Somebody with a certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PersonView {
    pub name: String,
    pub role: Role,
    pub certificate: Sha256,
    pub issued: String,
    pub expires: String,
    pub revoked: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct AccessView {
    pub people: Vec<PersonView>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddAccess {
    pub name: String,
    pub role: Role,
    /// PKCS#10, DER, base64. The key stays with whoever asked.
    pub signing_request: String,
    /// Revoke what this name had before.
    pub replace: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct IssuedView {
    pub person: PersonView,
    pub certificate_pem: String,
    pub ca_pem: String,
    /// Certificates that this one replaced.
    pub replaced: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RevokeAccess {
    /// A name, or one certificate's SHA-256.
    pub who: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RevokedView {
    pub revoked: u64,
}
