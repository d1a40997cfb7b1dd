//! PostgreSQL: workloads and registrations.

use drums_common::{clock::Micros, digest::Sha256, experiment::Registration, ids::ExperimentId};
use tokio_postgres::Row;

use super::{PostgresStore, audit};
use crate::store::{
    AuditRow, Registered, StoreError, WorkloadRow,
    shared::{read, registration_answer, thaw},
};

pub(super) fn add_workload(s: &mut PostgresStore, row: &WorkloadRow, audit: &AuditRow) -> Result<bool, StoreError> {
    let mut t = s.write("store a workload")?;
    let new = t.execute(
        "INSERT INTO workload (sha256, name, bytes, files, added_us) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
        &[
            &row.sha256.to_string(),
            &row.name.as_str(),
            &row.bytes.cast_signed(),
            &row.files.cast_signed(),
            &row.added.0,
        ],
    )? == 1;
    if new {
        audit::add(&mut t, audit)?;
    }
    t.commit()?;
    Ok(new)
}

pub(super) fn workloads(s: &mut PostgresStore) -> Result<Vec<WorkloadRow>, StoreError> {
    let sql = "SELECT sha256, name, bytes, files, added_us FROM workload ORDER BY added_us, number";
    let row = |r: &Row| {
        Ok(WorkloadRow {
            sha256: read("digest", r.get(0))?,
            name: read("workload name", r.get(1))?,
            bytes: r.get::<_, i64>(2).cast_unsigned(),
            files: r.get::<_, i64>(3).cast_unsigned(),
            added: Micros(r.get(4)),
        })
    };
    s.read("list workloads", sql, &[])?.iter().map(row).collect()
}

pub(super) fn add(
    s: &mut PostgresStore,
    r: &Registration,
    spec: &str,
    amends: bool,
    audit: &AuditRow,
) -> Result<Registered, StoreError> {
    let (sha, id) = (r.sha256.to_string(), r.experiment.id.to_string());
    let mut t = s.write("store a registration")?;
    // One writer at a time: the lease's. Nobody registers between the look and the insert.
    let there = t.query("SELECT sha256 FROM registration WHERE experiment = $1 ORDER BY number", &[&id])?;
    let there: Vec<String> = there.iter().map(|r| r.get(0)).collect();
    if let Some(answer) = registration_answer(&there, &sha, amends)? {
        return Ok(answer);
    }
    t.execute(
        "INSERT INTO registration (sha256, experiment, canonical, spec, registered_us) VALUES ($1, $2, $3, $4, $5)",
        &[&sha, &id, &r.canonical, &spec, &r.registered_at.0],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(Registered::New)
}

fn raw(r: &Row) -> Result<Registration, StoreError> {
    thaw((r.get(0), r.get(1), r.get(2)))
}

pub(super) fn one(s: &mut PostgresStore, sha256: Sha256) -> Result<Option<Registration>, StoreError> {
    let sql = "SELECT sha256, canonical, registered_us FROM registration WHERE sha256 = $1";
    s.read("read a registration", sql, &[&sha256.to_string()])?.first().map(raw).transpose()
}

pub(super) fn of(s: &mut PostgresStore, experiment: Option<ExperimentId>) -> Result<Vec<Registration>, StoreError> {
    let sql = "SELECT sha256, canonical, registered_us FROM registration \
               WHERE $1::text IS NULL OR experiment = $1 ORDER BY number";
    s.read("list registrations", sql, &[&experiment.map(|x| x.to_string())])?.iter().map(raw).collect()
}

pub(super) fn spec_of(s: &mut PostgresStore, sha256: Sha256) -> Result<Option<String>, StoreError> {
    let sql = "SELECT spec FROM registration WHERE sha256 = $1";
    Ok(s.read("read a spec", sql, &[&sha256.to_string()])?.first().map(|r| r.get(0)))
}
