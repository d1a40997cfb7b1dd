//! SQLite: opening, migrations, hosts, tokens, workloads, registrations, audit.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::Record,
    experiment::Registration,
    ids::{ExperimentId, Generation, HostId, InstallationId, RunId},
    machine::HostFacts,
};
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, TransactionBehavior, params};

use super::{
    AuditRow, CertificateRow, EventRow, EvidenceRow, HelloRow, HostRow, Ownership, PersonRow, Registered, RunRow,
    Store, StoreError, WorkloadRow, sqlite_people, sqlite_runs,
};
use crate::{
    core::run::{Note, RunState},
    net::ports::{Redemption, TokenRefusal},
};

/// Forward only; a number is never reused.
const MIGRATIONS: [(&str, &str); 2] = [
    ("0001_first", include_str!("migrations/0001_first.sql")),
    ("0002_people", include_str!("migrations/0002_people.sql")),
];

pub struct SqliteStore {
    connection: Connection,
}

impl SqliteStore {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Open { path: path.to_owned(), source };
        let connection = Connection::open(path).map_err(fail)?;
        Self::prepare(connection, path)
    }

    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from(":memory:");
        let connection =
            Connection::open_in_memory().map_err(|source| StoreError::Open { path: path.clone(), source })?;
        Self::prepare(connection, &path)
    }

    fn prepare(mut connection: Connection, path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Open { path: path.to_owned(), source };
        // Another process holds the file only for a backup or by mistake; five seconds tell which.
        connection.busy_timeout(Duration::from_secs(5)).map_err(fail)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
        // Evidence is acknowledged after commit: a commit that a power cut undoes would lose it.
        connection.pragma_update(None, "synchronous", "FULL").map_err(fail)?;
        connection.pragma_update(None, "foreign_keys", "ON").map_err(fail)?;
        migrate(&mut connection, path)?;
        Ok(Self { connection })
    }

    /// What `init` gave it. A store without is a new one, whatever it was before.
    pub fn installation(&self) -> Result<Option<String>, StoreError> {
        self.connection
            .query_row("SELECT value FROM meta WHERE key = 'installation'", [], |r| r.get(0))
            .optional()
            .map_err(sql("read its installation"))
    }

    pub(super) fn write(&mut self, attempt: &'static str) -> Result<Transaction<'_>, StoreError> {
        self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql(attempt))
    }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let fail = |source| StoreError::Open { path: path.to_owned(), source };
    connection.execute_batch("CREATE TABLE IF NOT EXISTS migration (name TEXT PRIMARY KEY) STRICT").map_err(fail)?;
    let done: Vec<String> = {
        let mut statement = connection.prepare("SELECT name FROM migration ORDER BY name").map_err(fail)?;
        let rows = statement.query_map([], |row| row.get(0)).map_err(fail)?;
        rows.collect::<Result<_, _>>().map_err(fail)?
    };
    if let Some(found) = done.iter().find(|d| !MIGRATIONS.iter().any(|(name, _)| name == d)) {
        return Err(StoreError::TooNew { path: path.to_owned(), found: found.clone() });
    }
    for (name, text) in MIGRATIONS.iter().filter(|(name, _)| !done.iter().any(|d| d == name)) {
        let run = |connection: &mut Connection| {
            let t = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            t.execute_batch(text)?;
            t.execute("INSERT INTO migration (name) VALUES (?1)", [name])?;
            t.commit()
        };
        run(connection).map_err(|source| StoreError::Migrate { name, source })?;
    }
    Ok(())
}

pub(super) fn insert_audit(connection: &Connection, row: &AuditRow) -> rusqlite::Result<()> {
    connection
        .execute(
            "INSERT INTO audit (at_us, actor, action, detail) VALUES (?1, ?2, ?3, ?4)",
            params![row.at.0, row.actor, row.action, row.detail],
        )
        .map(|_| ())
}

pub(super) fn sql(attempt: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |source| StoreError::Sql { attempt, source }
}

pub(super) fn read<T: FromStr>(what: &'static str, text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| corrupt(what, text))
}

pub(super) fn read_json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|_| corrupt(what, text))
}

pub(super) fn corrupt(what: &'static str, text: &str) -> StoreError {
    StoreError::Corrupt { what, got: text.chars().take(120).collect() }
}

/// Our own types serialise; a failure would be a map with keys that are no texts.
pub(super) fn json<T: serde::Serialize>(what: &'static str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|e| StoreError::Corrupt { what, got: e.to_string() })
}

const HOST: &str = "SELECT name, ownership, kind, added_us, released_us, installation, facts, agent_version, agent_sha256, \
                    welcomed_us, generation FROM host";

struct RawHost(String, String, String, i64, Option<i64>, [Option<String>; 4], Option<i64>, u32);

fn raw_host(row: &Row<'_>) -> rusqlite::Result<RawHost> {
    let texts = [row.get(5)?, row.get(6)?, row.get(7)?, row.get(8)?];
    Ok(RawHost(row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, texts, row.get(9)?, row.get(10)?))
}

fn host_row(raw: RawHost) -> Result<HostRow, StoreError> {
    let RawHost(name, ownership, kind, added, released, [installation, facts, version, sha], welcomed, generation) =
        raw;
    Ok(HostRow {
        host: read("host name", &name)?,
        ownership: if ownership == "owned" { Ownership::Owned } else { Ownership::Adopted },
        kind,
        added: Micros(added),
        released: released.map(Micros),
        installation: installation.map(|i| read("installation id", &i)).transpose()?,
        facts: facts.map(|f| read_json("host's facts", &f)).transpose()?,
        agent_version: version,
        agent_sha256: sha.map(|s| read("digest", &s)).transpose()?,
        welcomed: welcomed.map(Micros),
        generation: Generation(generation),
    })
}

fn raw_registration(row: &Row<'_>) -> rusqlite::Result<(String, String, i64)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

fn registration((sha, canonical, at): (String, String, i64)) -> Result<Registration, StoreError> {
    let sha256: Sha256 = read("digest", &sha)?;
    Registration::thaw(&canonical, sha256, Micros(at)).map_err(|_| corrupt("registration", &canonical))
}

impl Store for SqliteStore {
    fn meta_or(&mut self, key: &str, value: &str) -> Result<String, StoreError> {
        let e = sql("keep a fact of its own");
        let t = self.write("keep a fact of its own")?;
        t.execute("INSERT OR IGNORE INTO meta (key, value) VALUES (?1, ?2)", [key, value]).map_err(&e)?;
        let got = t.query_row("SELECT value FROM meta WHERE key = ?1", [key], |r| r.get(0)).map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(got)
    }

    fn hosts(&mut self) -> Result<Vec<HostRow>, StoreError> {
        let e = sql("list hosts");
        let mut statement = self.connection.prepare_cached(&format!("{HOST} ORDER BY added_us, name")).map_err(&e)?;
        let rows = statement.query_map([], raw_host).map_err(&e)?;
        rows.map(|r| r.map_err(&e).and_then(host_row)).collect()
    }

    fn host(&mut self, host: &HostId) -> Result<Option<HostRow>, StoreError> {
        let mut statement =
            self.connection.prepare_cached(&format!("{HOST} WHERE name = ?1")).map_err(sql("read a host"))?;
        let raw = statement.query_row([host.as_str()], raw_host).optional().map_err(sql("read a host"))?;
        raw.map(host_row).transpose()
    }

    fn add_host(&mut self, host: &HostId, kind: &str, ownership: Ownership, now: Micros) -> Result<(), StoreError> {
        let e = sql("add a host");
        let t = self.write("add a host")?;
        let released: Option<Option<i64>> = t
            .query_row("SELECT released_us FROM host WHERE name = ?1", [host.as_str()], |r| r.get(0))
            .optional()
            .map_err(&e)?;
        let ownership = match ownership {
            Ownership::Adopted => "adopted",
            Ownership::Owned => "owned",
        };
        match released {
            Some(None) => return Err(StoreError::HostExists(host.clone())),
            // Its generation goes on counting: what it was given before its release stays fenced.
            Some(Some(_)) => t.execute(
                "UPDATE host SET released_us = NULL, installation = NULL, facts = NULL, kind = ?2, ownership = ?3, generation = generation + 1 WHERE name = ?1",
                params![host.as_str(), kind, ownership],
            ),
            None => t.execute(
                "INSERT INTO host (name, ownership, kind, added_us) VALUES (?1, ?2, ?3, ?4)",
                params![host.as_str(), ownership, kind, now.0],
            ),
        }
        .map_err(&e)?;
        t.commit().map_err(&e)
    }

    fn release_host(&mut self, host: &HostId, now: Micros) -> Result<(), StoreError> {
        let e = sql("release a host");
        let t = self.write("release a host")?;
        let changed = t
            .execute(
                "UPDATE host SET released_us = ?2 WHERE name = ?1 AND released_us IS NULL",
                params![host.as_str(), now.0],
            )
            .map_err(&e)?;
        if changed == 0 {
            return Err(StoreError::Missing { what: "host", id: host.to_string() });
        }
        t.execute(
            "UPDATE certificate SET revoked_us = ?2 WHERE host = ?1 AND revoked_us IS NULL",
            params![host.as_str(), now.0],
        )
        .map_err(&e)?;
        // A token that was not used yet would enrol it again.
        t.execute("UPDATE token SET expires_us = min(expires_us, ?2) WHERE host = ?1", params![host.as_str(), now.0])
            .map_err(&e)?;
        t.commit().map_err(&e)
    }

    fn welcomed(&mut self, host: &HostId, hello: &HelloRow, now: Micros) -> Result<Generation, StoreError> {
        let e = sql("record that a host connected");
        let facts = json("host's facts", &hello.facts)?;
        let t = self.write("record that a host connected")?;
        t.execute(
            "UPDATE host SET installation = ?2, facts = ?3, agent_version = ?4, agent_sha256 = ?5, welcomed_us = ?6 WHERE name = ?1",
            params![
                host.as_str(),
                hello.installation.to_string(),
                facts,
                hello.agent_version,
                hello.agent_sha256.to_string(),
                now.0
            ],
        )
        .map_err(&e)?;
        let generation =
            t.query_row("SELECT generation FROM host WHERE name = ?1", [host.as_str()], |r| r.get(0)).map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(Generation(generation))
    }

    fn set_facts(&mut self, host: &HostId, installation: InstallationId, facts: &HostFacts) -> Result<(), StoreError> {
        let facts = json("host's facts", facts)?;
        self.connection
            .execute(
                "UPDATE host SET facts = ?3 WHERE name = ?1 AND installation = ?2",
                params![host.as_str(), installation.to_string(), facts],
            )
            .map_err(sql("store a host's facts"))?;
        Ok(())
    }

    fn next_generation(&mut self, host: &HostId) -> Result<Generation, StoreError> {
        self.connection
            .query_row(
                "UPDATE host SET generation = generation + 1 WHERE name = ?1 RETURNING generation",
                [host.as_str()],
                |r| r.get(0),
            )
            .map(Generation)
            .map_err(sql("count a host's generation"))
    }

    fn add_token(
        &mut self,
        secret: Sha256,
        host: &HostId,
        now: Micros,
        expires: Micros,
        audit: &AuditRow,
    ) -> Result<(), StoreError> {
        let e = sql("store a token");
        let t = self.write("store a token")?;
        t.execute(
            "INSERT INTO token (secret_sha256, host, issued_us, expires_us) VALUES (?1, ?2, ?3, ?4)",
            params![secret.to_string(), host.as_str(), now.0, expires.0],
        )
        .map_err(&e)?;
        insert_audit(&t, audit).map_err(&e)?;
        t.commit().map_err(&e)
    }

    fn redeem(&mut self, r: &Redemption) -> Result<Result<(), TokenRefusal>, StoreError> {
        let e = sql("use a token");
        let t = self.write("use a token")?;
        let found: Option<(String, i64, Option<String>, Option<i64>)> = t
            .query_row(
                "SELECT token.host, expires_us, key_sha256, released_us FROM token JOIN host ON host.name = token.host WHERE secret_sha256 = ?1",
                [r.secret_sha256.to_string()],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
            )
            .optional()
            .map_err(&e)?;
        let Some((host, expires, key, released)) = found else { return Ok(Err(TokenRefusal::Unknown)) };
        if host != r.host.as_str() {
            return Ok(Err(TokenRefusal::WrongHost(read("host name", &host)?)));
        }
        if released.is_some() {
            return Ok(Err(TokenRefusal::Released));
        }
        match key {
            Some(key) if key != r.key_sha256.to_string() => return Ok(Err(TokenRefusal::Reused)),
            _ if r.now.0 >= expires => return Ok(Err(TokenRefusal::Expired)),
            // The same key again: the reply to the first attempt was lost.
            Some(_) => return Ok(Ok(())),
            None => {}
        }
        t.execute(
            "UPDATE token SET used_us = ?2, key_sha256 = ?3, installation = ?4 WHERE secret_sha256 = ?1",
            params![r.secret_sha256.to_string(), r.now.0, r.key_sha256.to_string(), r.installation.to_string()],
        )
        .map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(Ok(()))
    }

    fn add_certificate(&mut self, row: &CertificateRow, now: Micros) -> Result<bool, StoreError> {
        let e = sql("record a certificate");
        let (host, installation) = (row.host.as_str(), row.installation.to_string());
        let t = self.write("record a certificate")?;
        t.execute(
            "INSERT OR IGNORE INTO certificate (sha256, host, installation, issued_us, expires_us) VALUES (?1, ?2, ?3, ?4, ?5)",
            params![row.sha256.to_string(), host, installation, now.0, row.expires.0],
        )
        .map_err(&e)?;
        let moved = t
            .execute(
                "UPDATE host SET facts = NULL, generation = generation + 1 WHERE name = ?1 AND installation != ?2",
                params![host, installation],
            )
            .map_err(&e)?
            > 0;
        if moved {
            t.execute(
                "UPDATE certificate SET revoked_us = ?3 WHERE host = ?1 AND installation != ?2 AND revoked_us IS NULL",
                params![host, installation, now.0],
            )
            .map_err(&e)?;
        }
        t.execute("UPDATE host SET installation = ?2 WHERE name = ?1", params![host, installation]).map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(moved)
    }

    fn certificate(&mut self, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError> {
        let raw: Option<(String, String, i64, Option<i64>)> = self
            .connection
            .query_row(
                "SELECT host, installation, expires_us, revoked_us FROM certificate WHERE sha256 = ?1",
                [sha256.to_string()],
                |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)),
            )
            .optional()
            .map_err(sql("read a certificate"))?;
        let Some((host, installation, expires, revoked)) = raw else { return Ok(None) };
        Ok(Some(CertificateRow {
            sha256,
            host: read("host name", &host)?,
            installation: read("installation id", &installation)?,
            expires: Micros(expires),
            revoked: revoked.map(Micros),
        }))
    }

    fn add_person(&mut self, row: &PersonRow, replace: bool, audit: &AuditRow) -> Result<u64, StoreError> {
        sqlite_people::add(self, row, replace, audit)
    }
    fn person(&mut self, certificate: Sha256) -> Result<Option<PersonRow>, StoreError> {
        sqlite_people::one(self, certificate)
    }
    fn people(&mut self) -> Result<Vec<PersonRow>, StoreError> {
        sqlite_people::all(self)
    }
    fn revoke_people(&mut self, who: &str, now: Micros, audit: &AuditRow) -> Result<u64, StoreError> {
        sqlite_people::revoke(self, who, now, audit)
    }

    fn add_workload(&mut self, row: &WorkloadRow, audit: &AuditRow) -> Result<bool, StoreError> {
        let e = sql("store a workload");
        let t = self.write("store a workload")?;
        let n = t
            .execute(
                "INSERT OR IGNORE INTO workload (sha256, name, bytes, files, added_us) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    row.sha256.to_string(),
                    row.name.as_str(),
                    row.bytes.cast_signed(),
                    row.files.cast_signed(),
                    row.added.0
                ],
            )
            .map_err(&e)?;
        if n == 1 {
            insert_audit(&t, audit).map_err(&e)?;
        }
        t.commit().map_err(&e)?;
        Ok(n == 1)
    }

    fn workloads(&mut self) -> Result<Vec<WorkloadRow>, StoreError> {
        let e = sql("list workloads");
        let mut statement = self
            .connection
            .prepare_cached("SELECT sha256, name, bytes, files, added_us FROM workload ORDER BY added_us, rowid")
            .map_err(&e)?;
        let rows = statement
            .query_map([], |r| {
                Ok((
                    r.get::<_, String>(0)?,
                    r.get::<_, String>(1)?,
                    r.get::<_, i64>(2)?,
                    r.get::<_, i64>(3)?,
                    r.get::<_, i64>(4)?,
                ))
            })
            .map_err(&e)?;
        rows.map(|r| {
            let (sha, name, bytes, files, added) = r.map_err(&e)?;
            Ok(WorkloadRow {
                sha256: read("digest", &sha)?,
                name: read("workload name", &name)?,
                bytes: bytes.cast_unsigned(),
                files: files.cast_unsigned(),
                added: Micros(added),
            })
        })
        .collect()
    }

    fn add_registration(
        &mut self,
        r: &Registration,
        spec: &str,
        amends: bool,
        audit: &AuditRow,
    ) -> Result<Registered, StoreError> {
        let e = sql("store a registration");
        let (sha, id) = (r.sha256.to_string(), r.experiment.id.to_string());
        let t = self.write("store a registration")?;
        let there: Vec<String> = {
            let mut statement = t
                .prepare_cached("SELECT sha256 FROM registration WHERE experiment = ?1 ORDER BY number")
                .map_err(&e)?;
            let rows = statement.query_map([&id], |row| row.get(0)).map_err(&e)?;
            rows.collect::<Result<_, _>>().map_err(&e)?
        };
        match there.last() {
            _ if there.contains(&sha) => return Ok(Registered::Before),
            Some(latest) if !amends => {
                return Ok(Registered::Taken { latest: latest.parse().map_err(|_| corrupt("digest", latest))? });
            }
            None if amends => return Ok(Registered::NothingToAmend),
            _ => {}
        }
        t.execute(
            "INSERT INTO registration (sha256, experiment, canonical, spec, registered_us) VALUES (?1, ?2, ?3, ?4, ?5)",
            params![sha, id, r.canonical, spec, r.registered_at.0],
        )
        .map_err(&e)?;
        insert_audit(&t, audit).map_err(&e)?;
        t.commit().map_err(&e)?;
        Ok(Registered::New)
    }

    fn registration(&mut self, sha256: Sha256) -> Result<Option<Registration>, StoreError> {
        let raw = self
            .connection
            .query_row(
                "SELECT sha256, canonical, registered_us FROM registration WHERE sha256 = ?1",
                [sha256.to_string()],
                raw_registration,
            )
            .optional()
            .map_err(sql("read a registration"))?;
        raw.map(registration).transpose()
    }

    fn registrations(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError> {
        let e = sql("list registrations");
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT sha256, canonical, registered_us FROM registration WHERE ?1 IS NULL OR experiment = ?1 ORDER BY number",
            )
            .map_err(&e)?;
        let rows = statement.query_map([experiment.map(|x| x.to_string())], raw_registration).map_err(&e)?;
        rows.map(|r| r.map_err(&e).and_then(registration)).collect()
    }

    fn spec_of(&mut self, sha256: Sha256) -> Result<Option<String>, StoreError> {
        self.connection
            .query_row("SELECT spec FROM registration WHERE sha256 = ?1", [sha256.to_string()], |r| r.get(0))
            .optional()
            .map_err(sql("read a spec"))
    }

    fn create_run(&mut self, state: &RunState, notes: &[Note], now: Micros) -> Result<(), StoreError> {
        sqlite_runs::create_run(self, state, notes, now)
    }
    fn save_run(&mut self, state: &RunState, expected: u32, notes: &[Note], now: Micros) -> Result<(), StoreError> {
        sqlite_runs::save_run(self, state, expected, notes, now)
    }
    fn run(&mut self, run: RunId) -> Result<Option<RunRow>, StoreError> {
        Ok(sqlite_runs::runs(&self.connection, Some(run), None)?.pop())
    }
    fn runs(&mut self, experiment: Option<ExperimentId>) -> Result<Vec<RunRow>, StoreError> {
        sqlite_runs::runs(&self.connection, None, experiment)
    }
    fn events(&mut self, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        sqlite_runs::events(&self.connection, run, after, limit)
    }
    fn commit_evidence(
        &mut self,
        run: RunId,
        host: &HostId,
        current: Generation,
        records: &[Record],
        now: Micros,
    ) -> Result<u64, StoreError> {
        sqlite_runs::commit_evidence(self, run, host, current, records, now)
    }
    fn acked(&mut self, run: RunId, host: &HostId) -> Result<u64, StoreError> {
        sqlite_runs::acked(&self.connection, run, host)
    }
    fn evidence(&mut self, run: RunId, host: &HostId, after: u64, limit: u32) -> Result<Vec<EvidenceRow>, StoreError> {
        sqlite_runs::evidence(&self.connection, run, host, after, limit)
    }

    fn add_audit(&mut self, row: &AuditRow) -> Result<(), StoreError> {
        insert_audit(&self.connection, row).map_err(sql("write the audit trail"))
    }

    fn audits(&mut self, limit: u32) -> Result<Vec<AuditRow>, StoreError> {
        let e = sql("read the audit trail");
        let mut statement = self
            .connection
            .prepare_cached("SELECT at_us, actor, action, detail FROM audit ORDER BY number DESC LIMIT ?1")
            .map_err(&e)?;
        let rows = statement
            .query_map([limit], |r| {
                Ok(AuditRow { at: Micros(r.get(0)?), actor: r.get(1)?, action: r.get(2)?, detail: r.get(3)? })
            })
            .map_err(&e)?;
        let mut rows = rows.collect::<Result<Vec<_>, _>>().map_err(&e)?;
        rows.reverse();
        Ok(rows)
    }

    fn backup(&mut self, to: &Path) -> Result<(), StoreError> {
        // VACUUM INTO refuses a file that exists, and copies one consistent state.
        self.connection
            .execute("VACUUM INTO ?1", [to.to_string_lossy()])
            .map_err(sql("copy itself into the backup"))?;
        Ok(())
    }
}
