//! SQLite: one file in the home, one connection, WAL.

mod audit;
mod hosts;
mod instances;
mod part;
mod people;
mod registrations;
mod runs;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    experiment::Registration,
    ids::{ExperimentId, Generation, HostId, InstallationId, RunId},
    machine::HostFacts,
    wire::latest::Upgrade,
};
use drums_provider::token::ClientToken;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, TransactionBehavior};

use self::part::{Part, run};

use super::{
    AuditEntry, AuditQuery, AuditRow, CertificateRow, EventRow, EvidenceRow, HelloRow, HostRow, Ownership, PersonRow,
    Registered, RunRow, Store, StoreError, Stored, WorkloadRow, Written, migrations,
};
use crate::{
    core::run::{Note, RunState},
    net::ports::{Bound, Launched, Redemption, Started, TokenRefusal},
};

/// Statements that are kept: more than there are.
const PREPARED: usize = 64;
/// Of the file's pages in memory; the system keeps them too. SQLite's two megabytes are two kilobytes for each of a thousand
/// idle agents.
const CACHE_KIB: i32 = 512;
/// Another process holds the file only for a backup or by mistake; five seconds tell which.
const BUSY: Duration = Duration::from_secs(5);

pub struct SqliteStore {
    pub(super) connection: Connection,
    /// Several jobs share a transaction now, whether or not it is still there.
    together: bool,
}

impl SqliteStore {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let connection = Connection::open(path).map_err(open(path))?;
        Self::prepare(connection, path)
    }

    /// A store as it is found, whatever program's: nothing is brought forward, which is for the coordinator that has it.
    pub fn as_it_is(path: &Path) -> Result<Self, StoreError> {
        let fail = open(path);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(&fail)?;
        connection.busy_timeout(BUSY).map_err(&fail)?;
        Ok(Self { connection, together: false })
    }

    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from(":memory:");
        let connection = Connection::open_in_memory().map_err(open(&path))?;
        Self::prepare(connection, &path)
    }

    fn prepare(mut connection: Connection, path: &Path) -> Result<Self, StoreError> {
        let fail = open(path);
        connection.busy_timeout(BUSY).map_err(&fail)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(&fail)?;
        // Evidence is acknowledged after commit: a commit that a power cut undoes would lose it.
        connection.pragma_update(None, "synchronous", "FULL").map_err(&fail)?;
        connection.pragma_update(None, "foreign_keys", "ON").map_err(&fail)?;
        // Negative: KiB instead of pages.
        connection.pragma_update(None, "cache_size", -CACHE_KIB).map_err(&fail)?;
        connection.set_prepared_statement_cache_capacity(PREPARED);
        migrate(&mut connection, path)?;
        let me = Self { connection, together: false };
        me.spill(false).map_err(&fail)?;
        Ok(me)
    }

    /// What `init` gave it. A store without is a new one, whatever it was before.
    pub fn installation(&self) -> Result<Option<String>, StoreError> {
        self.connection
            .query_row("SELECT value FROM meta WHERE key = 'installation'", [], |r| r.get(0))
            .optional()
            .map_err(sql("read its installation"))
    }

    /// A consistent copy of everything, into a file that must not exist.
    pub fn backup(&mut self, to: &Path) -> Result<(), StoreError> {
        let e = sql("copy itself into the backup");
        // The copy is one transaction, of all there is.
        self.spill(true).map_err(&e)?;
        // VACUUM INTO refuses a file that exists, and copies one consistent state.
        let copied = self.connection.execute("VACUUM INTO ?1", [to.to_string_lossy()]);
        self.spill(false).map_err(&e)?;
        copied.map(drop).map_err(&e)
    }

    /// Whether pages may be written before their transaction's commit. What the handle gathers is bounded and stays in memory:
    /// written out before, a page goes into the statement journal as well, since a savepoint may want it back, and the log's
    /// checksums are made anew. What may be as large as the store itself must not stay there.
    fn spill(&self, may: bool) -> rusqlite::Result<()> {
        self.connection.pragma_update(None, "cache_spill", may)
    }

    /// A transaction, or a part of the one that is shared.
    fn write(&mut self, attempt: &'static str) -> Result<Part<'_>, StoreError> {
        if self.together && self.connection.is_autocommit() {
            // A full disk in the middle of a statement does that, say. What were done now would be committed by itself, and
            // answered with the failure of what it came with.
            let why = "the database took the transaction back that this was to share";
            return Err(StoreError::NotCommitted(why.to_owned()));
        }
        Part::begin(&self.connection).map_err(sql(attempt))
    }
}

fn open(path: &Path) -> impl Fn(rusqlite::Error) -> StoreError {
    move |e| StoreError::Open { place: path.display().to_string(), source: e.into() }
}

fn sql(attempt: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |e| StoreError::Sql { attempt, source: e.into() }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let fail = open(path);
    connection.execute_batch("CREATE TABLE IF NOT EXISTS migration (name TEXT PRIMARY KEY) STRICT").map_err(&fail)?;
    let done: Vec<String> = {
        let mut statement = connection.prepare("SELECT name FROM migration ORDER BY name").map_err(&fail)?;
        let rows = statement.query_map([], |row| row.get(0)).map_err(&fail)?;
        rows.collect::<Result<_, _>>().map_err(&fail)?
    };
    for (name, text) in migrations::pending(migrations::SQLITE, &done, &path.display().to_string())? {
        let run = |connection: &mut Connection| {
            let t = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            t.execute_batch(text)?;
            t.execute("INSERT INTO migration (name) VALUES (?1)", [name])?;
            t.commit()
        };
        run(connection).map_err(|e| StoreError::Migrate { name: (*name).to_owned(), source: e.into() })?;
    }
    Ok(())
}

impl Store for SqliteStore {
    fn begin_together(&mut self) -> Result<bool, StoreError> {
        self.together = true;
        if !self.connection.is_autocommit() {
            // Left by a commit that failed and could not be taken back: nobody was told that it counts.
            run(&self.connection, "ROLLBACK").map_err(sql("take back a transaction"))?;
        }
        // Deferred: what only reads takes no lock and syncs nothing.
        run(&self.connection, "BEGIN").map_err(sql("begin a transaction"))?;
        Ok(true)
    }

    fn commit_together(&mut self) -> Result<(), StoreError> {
        self.together = false;
        let committed = run(&self.connection, "COMMIT").map_err(sql("commit a transaction"));
        if committed.is_err() && !self.connection.is_autocommit() {
            // Nothing of it counts; the next jobs begin afresh.
            run(&self.connection, "ROLLBACK").map_err(sql("take back a transaction"))?;
        }
        committed
    }

    fn meta_or(&mut self, key: &str, value: &str, audit: &AuditRow) -> Result<String, StoreError> {
        let e = sql("keep a fact of its own");
        let t = self.write("keep a fact of its own")?;
        let new = t.execute("INSERT OR IGNORE INTO meta (key, value) VALUES (?1, ?2)", [key, value]).map_err(&e)? == 1;
        if new {
            audit::add(&t, audit)?;
        }
        let got = t.query_row("SELECT value FROM meta WHERE key = ?1", [key], |r| r.get(0)).map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(got)
    }

    fn hosts(&mut self) -> Result<Vec<HostRow>, StoreError> {
        hosts::all(&self.connection)
    }
    fn host(&mut self, host: &HostId) -> Result<Option<HostRow>, StoreError> {
        hosts::one(&self.connection, host)
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
        instances::bound(&self.connection, secret, document)
    }
    fn redeem(&mut self, r: &Redemption, audit: &AuditRow) -> Result<Result<(), TokenRefusal>, StoreError> {
        hosts::redeem(self, r, audit)
    }
    fn add_certificate(&mut self, row: &CertificateRow, audit: &AuditRow) -> Result<bool, StoreError> {
        hosts::add_certificate(self, row, audit)
    }
    fn certificate(&mut self, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError> {
        hosts::certificate(&self.connection, sha256)
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
        registrations::workloads(&self.connection)
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
        registrations::one(&self.connection, sha256)
    }
    fn registrations(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError> {
        registrations::of(&self.connection, experiment)
    }
    fn spec_of(&mut self, sha256: Sha256) -> Result<Option<String>, StoreError> {
        registrations::spec_of(&self.connection, sha256)
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
        Ok(runs::all(&self.connection, Some(run), None)?.pop())
    }
    fn runs(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<RunRow>, StoreError> {
        runs::all(&self.connection, None, experiment)
    }
    fn events(&mut self, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        runs::events(&self.connection, run, after, limit)
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
        runs::acked(&self.connection, run, host)
    }
    fn evidence(&mut self, run: RunId, host: &HostId, after: u64, limit: u32) -> Result<Vec<EvidenceRow>, StoreError> {
        runs::evidence(&self.connection, run, host, after, limit)
    }

    fn add_audit(&mut self, row: &AuditRow) -> Result<(), StoreError> {
        audit::add(&self.connection, row)
    }
    fn audits(&mut self, query: &AuditQuery) -> Result<Vec<AuditEntry>, StoreError> {
        audit::find(&self.connection, query)
    }
}
