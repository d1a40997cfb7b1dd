//! PostgreSQL: the audit trail.

use drums_common::clock::Micros;
use tokio_postgres::Row;

use super::{PostgresStore, Tx};
use crate::store::{AuditEntry, AuditQuery, AuditRow, StoreError, Who, audit::plain, shared::read};

pub(super) fn add(t: &mut Tx<'_>, row: &AuditRow) -> Result<(), StoreError> {
    t.execute(
        "INSERT INTO audit (at_us, actor, peer, action, run, host, detail) VALUES ($1, $2, $3, $4, $5, $6, $7)",
        &[
            &row.at.0,
            &plain(&row.who.actor),
            &plain(&row.who.peer),
            &row.action,
            &row.run.map(|r| r.to_string()),
            &row.host.as_ref().map(|h| h.as_str()),
            &plain(&row.detail),
        ],
    )?;
    Ok(())
}

/// The same question in both directions.
macro_rules! find {
    ($order:literal) => {
        concat!(
            "SELECT number, at_us, actor, peer, action, run, host, detail FROM audit ",
            "WHERE number > $1 AND at_us >= $2 AND ($3::text IS NULL OR run = $3) AND ($4::text IS NULL OR host = $4) ",
            "ORDER BY number ",
            $order,
            " LIMIT $5"
        )
    };
}

pub(super) fn find(s: &mut PostgresStore, q: &AuditQuery) -> Result<Vec<AuditEntry>, StoreError> {
    let sql = if q.counts_from_the_end() { find!("DESC") } else { find!("ASC") };
    let rows = s.read(
        "read the audit trail",
        sql,
        &[
            &q.after.unwrap_or(0).cast_signed(),
            &q.since.map_or(i64::MIN, |s| s.0),
            &q.run.map(|r| r.to_string()),
            &q.host.as_ref().map(|h| h.as_str()),
            &i64::from(q.limit),
        ],
    )?;
    let mut found: Vec<AuditEntry> = rows.iter().map(entry).collect::<Result<_, _>>()?;
    if q.counts_from_the_end() {
        found.reverse();
    }
    Ok(found)
}

fn entry(r: &Row) -> Result<AuditEntry, StoreError> {
    let (run, host): (Option<&str>, Option<&str>) = (r.get(5), r.get(6));
    Ok(AuditEntry {
        number: r.get::<_, i64>(0).cast_unsigned(),
        row: AuditRow {
            at: Micros(r.get(1)),
            who: Who { actor: r.get(2), peer: r.get(3) },
            action: r.get(4),
            run: run.map(|t| read("run id", t)).transpose()?,
            host: host.map(|t| read("host name", t)).transpose()?,
            detail: r.get(7),
        },
    })
}
