//! PostgreSQL: people's certificates.

use drums_common::{clock::Micros, digest::Sha256};
use tokio_postgres::Row;

use super::{PostgresStore, audit};
use crate::store::{AuditRow, PersonRow, StoreError, shared::read};

macro_rules! person {
    ($rest:literal) => {
        concat!("SELECT certificate, name, role, issued_us, expires_us, revoked_us FROM person ", $rest)
    };
}

fn person(r: &Row) -> Result<PersonRow, StoreError> {
    Ok(PersonRow {
        certificate: read("digest", r.get(0))?,
        name: r.get(1),
        role: read("role", r.get(2))?,
        issued: Micros(r.get(3)),
        expires: Micros(r.get(4)),
        revoked: r.get::<_, Option<i64>>(5).map(Micros),
    })
}

pub(super) fn add(s: &mut PostgresStore, row: &PersonRow, replace: bool, audit: &AuditRow) -> Result<u64, StoreError> {
    let mut t = s.write("add a person")?;
    let mut replaced = 0;
    if replace {
        let revoke = "UPDATE person SET revoked_us = $1 WHERE name = $2 AND revoked_us IS NULL";
        replaced = t.execute(revoke, &[&row.issued.0, &row.name])?;
    }
    t.execute(
        "INSERT INTO person (certificate, name, role, issued_us, expires_us, revoked_us) VALUES ($1, $2, $3, $4, $5, $6)",
        &[
            &row.certificate.to_string(),
            &row.name,
            &row.role.as_str(),
            &row.issued.0,
            &row.expires.0,
            &row.revoked.map(|r| r.0),
        ],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(replaced)
}

pub(super) fn one(s: &mut PostgresStore, certificate: Sha256) -> Result<Option<PersonRow>, StoreError> {
    let rows = s.read("read a person", person!("WHERE certificate = $1"), &[&certificate.to_string()])?;
    rows.first().map(person).transpose()
}

pub(super) fn all(s: &mut PostgresStore) -> Result<Vec<PersonRow>, StoreError> {
    s.read("list people", person!("ORDER BY number"), &[])?.iter().map(person).collect()
}

pub(super) fn revoke(s: &mut PostgresStore, who: &str, audit: &AuditRow) -> Result<u64, StoreError> {
    let mut t = s.write("revoke a person")?;
    let sql = "UPDATE person SET revoked_us = $1 WHERE (name = $2 OR certificate = $2) AND revoked_us IS NULL";
    let revoked = t.execute(sql, &[&audit.at.0, &who])?;
    if revoked > 0 {
        audit::add(&mut t, audit)?;
    }
    t.commit()?;
    Ok(revoked)
}
