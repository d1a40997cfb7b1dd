//! PostgreSQL: a server of its own, one connection, and a lease that says which coordinator may write.
//!
//! Synchronous as the other backend, on the store's thread: a small runtime of its own drives the connection while a
//! call waits, and every wait has a bound. A connection that broke is made anew by the next call; what was asked for is
//! then answered with [`StoreError::Away`], and asked for again by those who need it.
//!
//! **Invariant:** every write begins with a look at the lease under this store's epoch, in its own transaction, and holds
//! a take-over back until it ends. A coordinator that was superseded writes nothing.

mod audit;
mod hosts;
mod instances;
mod lease;
mod link;
mod people;
mod registrations;
mod runs;

use std::time::Duration;

use drums_common::{
    clock::Micros,
    digest::Sha256,
    experiment::Registration,
    ids::{ExperimentId, Generation, HostId, InstallationId, RunId},
    machine::HostFacts,
    wire::latest::Upgrade,
};
use drums_provider::token::ClientToken;
use tokio_postgres::{Row, types::ToSql};

pub use self::lease::Taken;
use self::link::Link;
use super::{
    AuditEntry, AuditQuery, AuditRow, CertificateRow, EventRow, EvidenceRow, HelloRow, HostRow, Ownership, PersonRow,
    Registered, RunRow, Store, StoreError, Stored, WorkloadRow, Written, migrations,
};
use crate::{
    config::PostgresConfig,
    core::run::{Note, RunState},
    net::ports::{Bound, Launched, Redemption, Started, TokenRefusal},
};

pub(super) type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// A migration may rewrite a large table.
const MIGRATION: Duration = Duration::from_secs(600);
/// Held while migrating, so that of two programs one does it.
const MIGRATION_LOCK: i64 = 0x6472_756d_7331;
/// The first migration that knows leases: before it, no two coordinators could meet.
const WITH_LEASE: &str = "0002_lease";

pub struct PostgresStore {
    link: Link,
    /// Under which it may write.
    epoch: Option<i64>,
}

impl PostgresStore {
    /// Connects, and refuses a store of a newer program. An empty one is made; an older one is brought forward by
    /// [`Self::migrate`] once the lease is held.
    pub fn open(at: &PostgresConfig) -> Result<Self, StoreError> {
        let mut store = Self { link: Link::new(at)?, epoch: None };
        let done = store.migrations()?;
        if !done.iter().any(|d| d == WITH_LEASE) {
            store.migrate()?;
        }
        Ok(store)
    }

    /// A fact that was kept.
    pub fn meta(&mut self, key: &str) -> Result<Option<String>, StoreError> {
        let rows = self.read("read a fact of its own", "SELECT value FROM meta WHERE key = $1", &[&key])?;
        Ok(rows.first().map(|r| r.get(0)))
    }

    /// Keeps a fact if there is none yet. The one write without a lease: it changes nothing that is there, so that a home
    /// can be made beside coordinators that run.
    pub fn init(&mut self, key: &str, value: &str, audit: &AuditRow) -> Result<String, StoreError> {
        let t = self.begin("keep a fact of its own")?;
        keep(t, key, value, audit)
    }

    fn migrations(&mut self) -> Result<Vec<String>, StoreError> {
        let known = "SELECT 1 FROM pg_catalog.pg_class WHERE relname = 'migration' AND relnamespace = current_schema()::regnamespace";
        if self.read("look for its migrations", known, &[])?.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.read("read its migrations", "SELECT name FROM migration ORDER BY name", &[])?;
        let done: Vec<String> = rows.iter().map(|r| r.get(0)).collect();
        migrations::pending(migrations::POSTGRES, &done, self.link.place())?;
        Ok(done)
    }

    /// Brings the store up to date; each step is one transaction.
    pub fn migrate(&mut self) -> Result<(), StoreError> {
        let done = self.migrations()?;
        let place = self.link.place().to_owned();
        for (name, text) in migrations::pending(migrations::POSTGRES, &done, &place)? {
            self.migrate_by(name, text).map_err(|e| match e {
                StoreError::Sql { source, .. } => StoreError::Migrate { name: (*name).to_owned(), source },
                e => e,
            })?;
        }
        Ok(())
    }

    fn migrate_by(&mut self, name: &str, text: &'static str) -> Result<(), StoreError> {
        let epoch = self.epoch;
        let mut t = self.begin("migrate")?;
        t.batch("SET LOCAL statement_timeout = 0", MIGRATION)?;
        t.query("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK])?;
        t.batch("CREATE TABLE IF NOT EXISTS migration (name TEXT COLLATE \"C\" PRIMARY KEY)", MIGRATION)?;
        if !t.query("SELECT 1 FROM migration WHERE name = $1", &[&name])?.is_empty() {
            return Ok(());
        }
        if let Some(epoch) = epoch {
            t.hold(epoch)?;
        }
        t.batch(text, MIGRATION)?;
        t.execute("INSERT INTO migration (name) VALUES ($1)", &[&name])?;
        t.commit()
    }

    /// One statement that only reads; tried once more if an old connection turns out to be dead.
    fn read(&mut self, attempt: &'static str, sql: &'static str, params: Params<'_>) -> Result<Vec<Row>, StoreError> {
        let fresh = self.link.connect()?;
        match self.link.query(attempt, sql, params) {
            Err(e) if e.is_away() && !fresh => {
                self.link.connect()?;
                self.link.query(attempt, sql, params)
            }
            other => other,
        }
    }

    /// A transaction that may write, under the lease.
    pub(super) fn write(&mut self, attempt: &'static str) -> Result<Tx<'_>, StoreError> {
        let place = self.link.place().to_owned();
        let epoch = self.epoch.ok_or(StoreError::NotLeading { place })?;
        let mut t = self.begin(attempt)?;
        t.hold(epoch)?;
        Ok(t)
    }

    fn begin(&mut self, attempt: &'static str) -> Result<Tx<'_>, StoreError> {
        let fresh = self.link.connect()?;
        match self.link.batch(attempt, "BEGIN", link::PATIENCE) {
            Err(e) if e.is_away() && !fresh => {
                self.link.connect()?;
                self.link.batch(attempt, "BEGIN", link::PATIENCE)?;
            }
            other => other?,
        }
        Ok(Tx { link: &mut self.link, attempt, open: true })
    }
}

/// A transaction: rolled back unless committed.
pub(super) struct Tx<'a> {
    link: &'a mut Link,
    attempt: &'static str,
    open: bool,
}

impl Tx<'_> {
    /// Keeps any other coordinator from taking over until this transaction ends; fails if one has.
    fn hold(&mut self, epoch: i64) -> Result<(), StoreError> {
        let held = self.query("SELECT 1 FROM lease WHERE epoch = $1 FOR KEY SHARE", &[&epoch])?;
        if held.is_empty() { Err(StoreError::Superseded { epoch: epoch.cast_unsigned() }) } else { Ok(()) }
    }

    fn query(&mut self, sql: &'static str, params: Params<'_>) -> Result<Vec<Row>, StoreError> {
        self.link.query(self.attempt, sql, params)
    }

    pub(super) fn execute(&mut self, sql: &'static str, params: Params<'_>) -> Result<u64, StoreError> {
        self.link.execute(self.attempt, sql, params)
    }

    fn batch(&mut self, sql: &'static str, patience: Duration) -> Result<(), StoreError> {
        self.link.batch(self.attempt, sql, patience)
    }

    /// When this fails because the server went away, nobody here knows whether it was done: whoever asked looks again.
    pub(super) fn commit(mut self) -> Result<(), StoreError> {
        self.open = false;
        self.link.batch(self.attempt, "COMMIT", link::PATIENCE)
    }
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        if self.open && self.link.batch("roll back", "ROLLBACK", link::PATIENCE).is_err() {
            // The server rolls back what a connection leaves.
            self.link.forget();
        }
    }
}

fn keep(mut t: Tx<'_>, key: &str, value: &str, audit: &AuditRow) -> Result<String, StoreError> {
    let new = t.execute("INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&key, &value])? == 1;
    if new {
        audit::add(&mut t, audit)?;
    }
    let rows = t.query("SELECT value FROM meta WHERE key = $1", &[&key])?;
    let got = rows.first().map_or_else(|| value.to_owned(), |r| r.get(0));
    t.commit()?;
    Ok(got)
}

impl Store for PostgresStore {
    fn meta_or(&mut self, key: &str, value: &str, audit: &AuditRow) -> Result<String, StoreError> {
        let t = self.write("keep a fact of its own")?;
        keep(t, key, value, audit)
    }

    fn hosts(&mut self) -> Result<Vec<HostRow>, StoreError> {
        hosts::all(self)
    }
    fn host(&mut self, host: &HostId) -> Result<Option<HostRow>, StoreError> {
        hosts::one(self, host)
    }
    fn add_host(
        &mut self,
        host: &HostId,
        kind: &str,
        ownership: Ownership,
        audit: &AuditRow,
    ) -> Result<(), StoreError> {
        hosts::add(self, host, kind, ownership, audit)
    }
    fn release_host(&mut self, host: &HostId, audit: &AuditRow) -> Result<(), StoreError> {
        hosts::release(self, host, audit)
    }
    fn set_upgrade(&mut self, host: &HostId, upgrade: Option<&Upgrade>, audit: &AuditRow) -> Result<(), StoreError> {
        hosts::set_upgrade(self, host, upgrade, audit)
    }
    fn welcomed(&mut self, host: &HostId, hello: &HelloRow, audit: &AuditRow) -> Result<Generation, StoreError> {
        hosts::welcomed(self, host, hello, audit)
    }
    fn set_facts(
        &mut self,
        host: &HostId,
        installation: InstallationId,
        facts: &HostFacts,
        audit: &AuditRow,
    ) -> Result<(), StoreError> {
        hosts::set_facts(self, host, installation, facts, audit)
    }
    fn next_generation(&mut self, host: &HostId, audit: &AuditRow) -> Result<Generation, StoreError> {
        hosts::next_generation(self, host, audit)
    }

    fn add_token(
        &mut self,
        secret: Sha256,
        host: &HostId,
        expires: Micros,
        audit: &AuditRow,
    ) -> Result<(), StoreError> {
        hosts::add_token(self, secret, host, expires, audit)
    }
    fn add_launch_token(
        &mut self,
        secret: Sha256,
        host: &HostId,
        expires: Micros,
        launched: &Launched,
        audit: &AuditRow,
    ) -> Result<(), StoreError> {
        instances::add_token(self, secret, host, expires, launched, audit)
    }
    fn launched_as(&mut self, launch: ClientToken, started: &Started, audit: &AuditRow) -> Result<(), StoreError> {
        instances::launched_as(self, launch, started, audit)
    }
    fn bound(&mut self, secret: Sha256, document: Option<Sha256>) -> Result<Bound, StoreError> {
        instances::bound(self, secret, document)
    }
    fn redeem(&mut self, r: &Redemption, audit: &AuditRow) -> Result<Result<(), TokenRefusal>, StoreError> {
        hosts::redeem(self, r, audit)
    }
    fn add_certificate(&mut self, row: &CertificateRow, audit: &AuditRow) -> Result<bool, StoreError> {
        hosts::add_certificate(self, row, audit)
    }
    fn certificate(&mut self, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError> {
        hosts::certificate(self, sha256)
    }

    fn add_person(&mut self, row: &PersonRow, replace: bool, audit: &AuditRow) -> Result<u64, StoreError> {
        people::add(self, row, replace, audit)
    }
    fn person(&mut self, certificate: Sha256) -> Result<Option<PersonRow>, StoreError> {
        people::one(self, certificate)
    }
    fn people(&mut self) -> Result<Vec<PersonRow>, StoreError> {
        people::all(self)
    }
    fn revoke_people(&mut self, who: &str, audit: &AuditRow) -> Result<u64, StoreError> {
        people::revoke(self, who, audit)
    }

    fn add_workload(&mut self, row: &WorkloadRow, audit: &AuditRow) -> Result<bool, StoreError> {
        registrations::add_workload(self, row, audit)
    }
    fn workloads(&mut self) -> Result<Vec<WorkloadRow>, StoreError> {
        registrations::workloads(self)
    }
    fn add_registration(
        &mut self,
        r: &Registration,
        spec: &str,
        amends: bool,
        audit: &AuditRow,
    ) -> Result<Registered, StoreError> {
        registrations::add(self, r, spec, amends, audit)
    }
    fn registration(&mut self, sha256: Sha256) -> Result<Option<Registration>, StoreError> {
        registrations::one(self, sha256)
    }
    fn registrations(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError> {
        registrations::of(self, experiment)
    }
    fn spec_of(&mut self, sha256: Sha256) -> Result<Option<String>, StoreError> {
        registrations::spec_of(self, sha256)
    }

    fn create_run(&mut self, state: &RunState, notes: &[Note], audit: &AuditRow) -> Result<(), StoreError> {
        runs::create(self, state, notes, audit)
    }
    fn save_run(
        &mut self,
        state: &RunState,
        expected: u32,
        notes: &[Note],
        now: Micros,
        audit: Option<&AuditRow>,
    ) -> Result<(), StoreError> {
        runs::save(self, state, expected, notes, now, audit)
    }
    fn run(&mut self, run: RunId) -> Result<Option<RunRow>, StoreError> {
        Ok(runs::all(self, Some(run), None)?.pop())
    }
    fn runs(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<RunRow>, StoreError> {
        runs::all(self, None, experiment)
    }
    fn events(&mut self, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        runs::events(self, run, after, limit)
    }
    fn commit_evidence(
        &mut self,
        run: RunId,
        host: &HostId,
        current: Generation,
        records: &[Written],
        now: Micros,
    ) -> Result<Stored, StoreError> {
        runs::commit_evidence(self, run, host, current, records, now)
    }
    fn acked(&mut self, run: RunId, host: &HostId) -> Result<u64, StoreError> {
        runs::acked(self, run, host)
    }
    fn evidence(&mut self, run: RunId, host: &HostId, after: u64, limit: u32) -> Result<Vec<EvidenceRow>, StoreError> {
        runs::evidence(self, run, host, after, limit)
    }

    fn add_audit(&mut self, row: &AuditRow) -> Result<(), StoreError> {
        let mut t = self.write("write the audit trail")?;
        audit::add(&mut t, row)?;
        t.commit()
    }
    fn audits(&mut self, query: &AuditQuery) -> Result<Vec<AuditEntry>, StoreError> {
        audit::find(self, query)
    }
}
