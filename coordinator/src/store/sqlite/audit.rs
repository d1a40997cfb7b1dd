//! SQLite: the audit trail.

use drums_common::clock::Micros;
use rusqlite::{Connection, params};

use super::sql;
use crate::store::{AuditEntry, AuditQuery, AuditRow, StoreError, Who, audit::plain, shared::read};

pub(super) fn add(c: &Connection, row: &AuditRow) -> Result<(), StoreError> {
    let e = sql("write the audit trail");
    c.prepare_cached(
        "INSERT INTO audit (at_us, actor, peer, action, run, host, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )
    .map_err(&e)?
    .execute(params![
        row.at.0,
        plain(&row.who.actor),
        plain(&row.who.peer),
        row.action,
        row.run.map(|r| r.to_string()),
        row.host.as_ref().map(|h| h.as_str()),
        plain(&row.detail)
    ])
    .map_err(&e)?;
    Ok(())
}

pub(super) fn find(c: &Connection, q: &AuditQuery) -> Result<Vec<AuditEntry>, StoreError> {
    let e = sql("read the audit trail");
    let order = if q.counts_from_the_end() { "DESC" } else { "ASC" };
    let mut statement = c
        .prepare_cached(&format!(
            "SELECT number, at_us, actor, peer, action, run, host, detail FROM audit \
             WHERE number > ?1 AND at_us >= ?2 AND (?3 IS NULL OR run = ?3) AND (?4 IS NULL OR host = ?4) \
             ORDER BY number {order} LIMIT ?5"
        ))
        .map_err(&e)?;
    type Raw = (i64, i64, [String; 3], [Option<String>; 2], String);
    let rows = statement
        .query_map(
            params![
                q.after.unwrap_or(0).cast_signed(),
                q.since.map_or(i64::MIN, |s| s.0),
                q.run.map(|r| r.to_string()),
                q.host.as_ref().map(|h| h.as_str()),
                q.limit
            ],
            |r| {
                let texts = [r.get(2)?, r.get(3)?, r.get(4)?];
                Ok::<Raw, _>((r.get(0)?, r.get(1)?, texts, [r.get(5)?, r.get(6)?], r.get(7)?))
            },
        )
        .map_err(&e)?;
    let entry = |raw: Raw| {
        let (number, at, [actor, peer, action], [run, host], detail) = raw;
        Ok(AuditEntry {
            number: number.cast_unsigned(),
            row: AuditRow {
                at: Micros(at),
                who: Who { actor, peer },
                action,
                run: run.map(|r| read("run id", &r)).transpose()?,
                host: host.map(|h| read("host name", &h)).transpose()?,
                detail,
            },
        })
    };
    let mut found: Vec<_> = rows.map(|r| r.map_err(&e).and_then(entry)).collect::<Result<_, _>>()?;
    if q.counts_from_the_end() {
        found.reverse();
    }
    Ok(found)
}
