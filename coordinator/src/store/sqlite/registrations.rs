//! SQLite: workloads and registrations.

use drums_common::{clock::Micros, digest::Sha256, experiment::Registration, ids::ExperimentId};
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::{SqliteStore, audit, sql};
use crate::store::{
    AuditRow, Registered, StoreError, WorkloadRow,
    shared::{read, registration_answer, thaw},
};

fn raw_registration(row: &Row<'_>) -> rusqlite::Result<(String, String, i64)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

pub(super) fn add_workload(s: &mut SqliteStore, row: &WorkloadRow, audit: &AuditRow) -> Result<bool, StoreError> {
    let e = sql("store a workload");
    let t = s.write("store a workload")?;
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
        audit::add(&t, audit)?;
    }
    t.commit().map_err(&e)?;
    Ok(n == 1)
}

pub(super) fn workloads(c: &Connection) -> Result<Vec<WorkloadRow>, StoreError> {
    let e = sql("list workloads");
    let mut statement = c
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

pub(super) fn add(
    s: &mut SqliteStore,
    r: &Registration,
    spec: &str,
    amends: bool,
    audit: &AuditRow,
) -> Result<Registered, StoreError> {
    let e = sql("store a registration");
    let (sha, id) = (r.sha256.to_string(), r.experiment.id.to_string());
    let t = s.write("store a registration")?;
    let there: Vec<String> = {
        let mut statement =
            t.prepare_cached("SELECT sha256 FROM registration WHERE experiment = ?1 ORDER BY number").map_err(&e)?;
        let rows = statement.query_map([&id], |row| row.get(0)).map_err(&e)?;
        rows.collect::<Result<_, _>>().map_err(&e)?
    };
    if let Some(answer) = registration_answer(&there, &sha, amends)? {
        return Ok(answer);
    }
    t.execute(
        "INSERT INTO registration (sha256, experiment, canonical, spec, registered_us) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![sha, id, r.canonical, spec, r.registered_at.0],
    )
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)?;
    Ok(Registered::New)
}

pub(super) fn one(c: &Connection, sha256: Sha256) -> Result<Option<Registration>, StoreError> {
    let raw = c
        .query_row(
            "SELECT sha256, canonical, registered_us FROM registration WHERE sha256 = ?1",
            [sha256.to_string()],
            raw_registration,
        )
        .optional()
        .map_err(sql("read a registration"))?;
    raw.map(thaw).transpose()
}

pub(super) fn of(c: &Connection, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError> {
    let e = sql("list registrations");
    let mut statement = c
        .prepare_cached(
            "SELECT sha256, canonical, registered_us FROM registration WHERE ?1 IS NULL OR experiment = ?1 ORDER BY number",
        )
        .map_err(&e)?;
    let rows = statement.query_map([experiment.map(|x| x.to_string())], raw_registration).map_err(&e)?;
    rows.map(|r| r.map_err(&e).and_then(thaw)).collect()
}

pub(super) fn spec_of(c: &Connection, sha256: Sha256) -> Result<Option<String>, StoreError> {
    c.query_row("SELECT spec FROM registration WHERE sha256 = ?1", [sha256.to_string()], |r| r.get(0))
        .optional()
        .map_err(sql("read a spec"))
}
