//! SQLite: people's certificates.

use drums_common::{clock::Micros, digest::Sha256};
use rusqlite::{OptionalExtension as _, Row, params};

use super::{SqliteStore, audit, sql};
use crate::store::{AuditRow, PersonRow, StoreError, shared::read};

const PERSON: &str = "SELECT certificate, name, role, issued_us, expires_us, revoked_us FROM person";

type Raw = (String, String, String, i64, i64, Option<i64>);

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?))
}

fn person((certificate, name, role, issued, expires, revoked): Raw) -> Result<PersonRow, StoreError> {
    Ok(PersonRow {
        certificate: read("digest", &certificate)?,
        name,
        role: read("role", &role)?,
        issued: Micros(issued),
        expires: Micros(expires),
        revoked: revoked.map(Micros),
    })
}

pub(super) fn add(
    store: &mut SqliteStore,
    row: &PersonRow,
    replace: bool,
    audit: &AuditRow,
) -> Result<u64, StoreError> {
    let fail = sql("add a person");
    let t = store.write("add a person")?;
    let mut replaced = 0;
    if replace {
        let revoke = "UPDATE person SET revoked_us = ?1 WHERE name = ?2 AND revoked_us IS NULL";
        replaced = t.execute(revoke, params![row.issued.0, row.name]).map_err(&fail)?;
    }
    t.execute(
        "INSERT INTO person (certificate, name, role, issued_us, expires_us, revoked_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![
            row.certificate.to_string(),
            row.name,
            row.role.as_str(),
            row.issued.0,
            row.expires.0,
            row.revoked.map(|r| r.0)
        ],
    )
    .map_err(&fail)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&fail)?;
    Ok(replaced as u64)
}

pub(super) fn one(store: &mut SqliteStore, certificate: Sha256) -> Result<Option<PersonRow>, StoreError> {
    let fail = sql("read a person");
    let t = store.write("read a person")?;
    let found = t
        .query_row(&format!("{PERSON} WHERE certificate = ?1"), [certificate.to_string()], raw)
        .optional()
        .map_err(fail)?;
    found.map(person).transpose()
}

pub(super) fn all(store: &mut SqliteStore) -> Result<Vec<PersonRow>, StoreError> {
    let fail = sql("list people");
    let t = store.write("list people")?;
    let mut statement = t.prepare(&format!("{PERSON} ORDER BY number")).map_err(&fail)?;
    let rows = statement.query_map([], raw).map_err(&fail)?.collect::<Result<Vec<_>, _>>().map_err(&fail)?;
    rows.into_iter().map(person).collect()
}

pub(super) fn revoke(store: &mut SqliteStore, who: &str, audit: &AuditRow) -> Result<u64, StoreError> {
    let fail = sql("revoke a person");
    let t = store.write("revoke a person")?;
    let revoke = "UPDATE person SET revoked_us = ?1 WHERE (name = ?2 OR certificate = ?2) AND revoked_us IS NULL";
    let revoked = t.execute(revoke, params![audit.at.0, who]).map_err(&fail)?;
    if revoked > 0 {
        audit::add(&t, audit)?;
    }
    t.commit().map_err(&fail)?;
    Ok(revoked as u64)
}
