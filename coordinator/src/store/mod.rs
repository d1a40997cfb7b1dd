//! The store: what must survive the coordinator.
//!
//! Owns rows and transactions. Knows no policy: states and verdicts are handed in. One trait, so that a second backend
//! passes the same contract suite (`contract`); SQLite is the one there is. All access goes through one writer thread
//! ([`StoreHandle`]), so a transaction never meets another.
//!
//! **Invariant:** a run's state and the events that led to it are written in one transaction, under the generation that
//! was read; a writer that lost the race is told.
//! **Invariant:** nothing is deleted; registrations, evidence, events and the audit trail are never changed.

mod audit;
#[cfg(test)]
mod contract;
#[cfg(test)]
mod crash;
mod evidence;
#[cfg(test)]
mod fixtures;
mod handle;
mod migrations;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(test)]
mod script;
mod shared;
mod sqlite;

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::Record,
    experiment::Registration,
    ids::{ExperimentId, Generation, HostId, InstallationId, RunId, WorkloadName},
    machine::HostFacts,
    wire::latest::Upgrade,
};

use drums_provider::token::ClientToken;

pub use audit::{AuditEntry, AuditQuery, AuditRow, Who};
pub use evidence::{Stored, Written};
pub use handle::{Reachable, SharedStore, StoreHandle};
#[cfg(feature = "postgres")]
pub use postgres::{PostgresStore, Taken};
pub use sqlite::SqliteStore;

use crate::{
    core::run::{Note, RunState},
    net::ports::{Bound, Launched, Redemption, Started, TokenRefusal},
    pki::Role,
};

/// What a backend's own library says.
pub type DbError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open the store {place}")]
    Open { place: String, source: DbError },
    #[error("the store {place} was made by a newer version of this program (migration {found}); use that version")]
    TooNew { place: String, found: String },
    #[error("cannot bring the store up to date (migration {name})")]
    Migrate { name: String, source: DbError },
    #[error("the store cannot {attempt}")]
    Sql { attempt: &'static str, source: DbError },
    #[error("the store holds a {what} that cannot be read: {got}")]
    Corrupt { what: &'static str, got: String },
    #[error("the run {run} was changed by another writer (generation {held}, expected {expected})")]
    Conflict { run: RunId, held: u32, expected: u32 },
    #[error("record {seq} of host {host} was stored before with other content")]
    Differs { host: HostId, seq: u64 },
    #[error("record {seq} of host {host} could not be read back from the store: {why}")]
    Unstorable { host: HostId, seq: u64, why: String },
    #[error("there is a host {0} already")]
    HostExists(HostId),
    #[error("the launch {launch} is one of {held} here, and not of {given}; a launch is never another one later")]
    OtherLaunch { launch: ClientToken, held: String, given: String },
    #[error("there is no {what} {id}")]
    Missing { what: &'static str, id: String },
    #[error("the store {place} cannot be reached")]
    Away { place: String, source: DbError },
    #[error("another coordinator has taken over from epoch {epoch}; this one writes nothing any more")]
    Superseded { epoch: u64 },
    #[error("this coordinator does not hold the lease of the store {place}")]
    NotLeading { place: String },
    #[error("the store {place} is used wrongly: {what}")]
    BadPlace { place: String, what: String },
    #[error("the store has been closed")]
    Closed,
    #[error("the store could not commit: {0}")]
    NotCommitted(String),
}

impl StoreError {
    /// The same for the next of those whose work was to be committed together.
    fn again(&self) -> Self {
        Self::NotCommitted(drums_common::telemetry::chain(self))
    }
}

impl StoreError {
    /// The store's server is away: whoever waits and tries again loses nothing, and nothing follows from it.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Away { .. })
    }
}

/// An adopted host is released and restored; no code path can end one. Hosts that were launched, and must die, come with
/// their providers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    Adopted,
    Owned,
}

impl Ownership {
    fn as_str(self) -> &'static str {
        match self {
            Self::Adopted => "adopted",
            Self::Owned => "owned",
        }
    }
}

#[derive(Clone, Debug)]
pub struct HostRow {
    pub host: HostId,
    pub ownership: Ownership,
    /// `sandbox`, `ec2`, `metal` or `mac`.
    pub kind: String,
    pub added: Micros,
    pub released: Option<Micros>,
    pub installation: Option<InstallationId>,
    pub facts: Option<HostFacts>,
    pub agent_version: Option<String>,
    pub agent_sha256: Option<Sha256>,
    pub welcomed: Option<Micros>,
    pub generation: Generation,
    /// The build that it is to run, while it does not.
    pub upgrade: Option<Upgrade>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateRow {
    pub sha256: Sha256,
    pub host: HostId,
    pub installation: InstallationId,
    pub expires: Micros,
    pub revoked: Option<Micros>,
}

/// A certificate of a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersonRow {
    pub certificate: Sha256,
    pub name: String,
    pub role: Role,
    pub issued: Micros,
    pub expires: Micros,
    pub revoked: Option<Micros>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadRow {
    pub sha256: Sha256,
    pub name: WorkloadName,
    pub bytes: u64,
    pub files: u64,
    pub added: Micros,
}

/// What a host's hello told.
#[derive(Clone, Debug)]
pub struct HelloRow {
    pub installation: InstallationId,
    /// The one it showed.
    pub certificate: Sha256,
    pub facts: HostFacts,
    pub agent_version: String,
    pub agent_sha256: Sha256,
}

#[derive(Clone, Debug)]
pub struct RunRow {
    pub state: RunState,
    /// Counts the writes to this row.
    pub generation: u32,
    pub experiment: ExperimentId,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRow {
    pub number: u64,
    pub at: Micros,
    pub note: Note,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EvidenceRow {
    pub record: Record,
    pub received: Micros,
    pub late: bool,
}

/// What became of a registration that was handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    New,
    /// This very registration was there before.
    Before,
    /// The experiment has another registration, and this one was not said to amend it.
    Taken {
        latest: Sha256,
    },
    /// It was said to amend an experiment that has no registration.
    NothingToAmend,
}

/// Every method is one transaction; what changes something writes its row of the audit trail in it, and takes its time
/// from there. Between `begin_together` and `commit_together` they may share a commit: each is undone by itself if it
/// fails, and none counts before that commit.
pub trait Store: Send {
    /// False where every method goes on to commit by itself. After an error nothing is done until the next beginning.
    fn begin_together(&mut self) -> Result<bool, StoreError> {
        Ok(false)
    }
    fn commit_together(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    /// The value under `key`; `value` is stored first if there was none.
    fn meta_or(&mut self, key: &str, value: &str, audit: &AuditRow) -> Result<String, StoreError>;

    fn hosts(&mut self) -> Result<Vec<HostRow>, StoreError>;
    fn host(&mut self, host: &HostId) -> Result<Option<HostRow>, StoreError>;
    /// A new host, or a released one taken back, perhaps on another machine: nothing is known of it then.
    fn add_host(&mut self, host: &HostId, kind: &str, ownership: Ownership, audit: &AuditRow)
    -> Result<(), StoreError>;
    /// Marks it released and revokes its certificates.
    fn release_host(&mut self, host: &HostId, audit: &AuditRow) -> Result<(), StoreError>;
    /// What came before the certificate that the host showed is revoked: its key has a successor that works.
    fn welcomed(&mut self, host: &HostId, hello: &HelloRow, audit: &AuditRow) -> Result<Generation, StoreError>;
    /// The build that the host is to run, or none. Only for a host that is not released.
    fn set_upgrade(&mut self, host: &HostId, upgrade: Option<&Upgrade>, audit: &AuditRow) -> Result<(), StoreError>;
    /// Only for the installation that holds the name now.
    fn set_facts(
        &mut self,
        host: &HostId,
        installation: InstallationId,
        facts: &HostFacts,
        audit: &AuditRow,
    ) -> Result<(), StoreError>;
    /// Fences what was given to the host so far.
    fn next_generation(&mut self, host: &HostId, audit: &AuditRow) -> Result<Generation, StoreError>;

    fn add_token(&mut self, secret: Sha256, host: &HostId, expires: Micros, audit: &AuditRow)
    -> Result<(), StoreError>;
    /// A token that goes into a launch's user data, and with the first of a launch what that is to make. It is used by that
    /// instance only, and by nobody until [`Store::launched_as`] said which one it is.
    fn add_launch_token(
        &mut self,
        secret: Sha256,
        host: &HostId,
        expires: Micros,
        launched: &Launched,
        audit: &AuditRow,
    ) -> Result<(), StoreError>;
    /// The launch was read back: this is the instance, and from now on it may enrol. Safe to repeat, which writes no row;
    /// another instance than the one that was said before, or one of another launch, is refused.
    fn launched_as(&mut self, launch: ClientToken, started: &Started, audit: &AuditRow) -> Result<(), StoreError>;
    /// What a token, which may be unknown, is bound to, and who proved with this document which instance it is.
    fn bound(&mut self, secret: Sha256, document: Option<Sha256>) -> Result<Bound, StoreError>;
    /// Writes its row only if the token is used up by this.
    fn redeem(&mut self, redemption: &Redemption, audit: &AuditRow) -> Result<Result<(), TokenRefusal>, StoreError>;
    /// True if the host moved: another installation held the name. Its certificates are then revoked, the machine it ran
    /// on is forgotten, and what it was given is fenced.
    fn add_certificate(&mut self, row: &CertificateRow, audit: &AuditRow) -> Result<bool, StoreError>;
    fn certificate(&mut self, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError>;

    /// A person's new certificate. With `replace` those that the name had are revoked; how many these were.
    fn add_person(&mut self, row: &PersonRow, replace: bool, audit: &AuditRow) -> Result<u64, StoreError>;
    fn person(&mut self, certificate: Sha256) -> Result<Option<PersonRow>, StoreError>;
    /// In order of issue.
    fn people(&mut self) -> Result<Vec<PersonRow>, StoreError>;
    /// Revokes the valid certificates of a name, or the one with this SHA-256; how many there were. Writes its row only
    /// if there were any.
    fn revoke_people(&mut self, who: &str, audit: &AuditRow) -> Result<u64, StoreError>;

    /// False if it was there already.
    fn add_workload(&mut self, row: &WorkloadRow, audit: &AuditRow) -> Result<bool, StoreError>;
    /// In order of arrival.
    fn workloads(&mut self) -> Result<Vec<WorkloadRow>, StoreError>;

    /// An experiment's first registration, or a later one that was said to amend it. Of writers that come at once, one is
    /// the first.
    fn add_registration(
        &mut self,
        registration: &Registration,
        spec: &str,
        amends: bool,
        audit: &AuditRow,
    ) -> Result<Registered, StoreError>;
    fn registration(&mut self, sha256: Sha256) -> Result<Option<Registration>, StoreError>;
    /// All of an experiment, or all there are, latest last.
    fn registrations(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError>;
    fn spec_of(&mut self, sha256: Sha256) -> Result<Option<String>, StoreError>;

    /// With a row of the audit trail for each note.
    fn create_run(&mut self, state: &RunState, notes: &[Note], audit: &AuditRow) -> Result<(), StoreError>;
    /// Compare and set on the row's generation; with a row for each note, and `audit` if somebody asked for the change.
    fn save_run(
        &mut self,
        state: &RunState,
        expected: u32,
        notes: &[Note],
        now: Micros,
        audit: Option<&AuditRow>,
    ) -> Result<(), StoreError>;
    fn run(&mut self, run: RunId) -> Result<Option<RunRow>, StoreError>;
    /// In order of creation.
    fn runs(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<RunRow>, StoreError>;
    fn events(&mut self, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError>;

    /// Stores what follows on what is there; repeats are left out, and so is everything after a gap. A record that could
    /// not be read back, or that differs from what is stored under its number, is an error when it is the first that is
    /// left; nothing is overwritten.
    fn commit_evidence(
        &mut self,
        run: RunId,
        host: &HostId,
        current: Generation,
        records: &[Written],
        now: Micros,
    ) -> Result<Stored, StoreError>;
    fn acked(&mut self, run: RunId, host: &HostId) -> Result<u64, StoreError>;
    fn evidence(&mut self, run: RunId, host: &HostId, after: u64, limit: u32) -> Result<Vec<EvidenceRow>, StoreError>;

    /// Something that changes nothing else, and that an operator should be able to read later.
    fn add_audit(&mut self, row: &AuditRow) -> Result<(), StoreError>;
    fn audits(&mut self, query: &AuditQuery) -> Result<Vec<AuditEntry>, StoreError>;
}
