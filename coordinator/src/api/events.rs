//! The audit trail: who did what, when, from where.

use std::time::Duration;

use axum::{
    Json,
    extract::{Query, State},
};
use drums_common::{
    clock::Micros,
    ids::{HostId, RunId},
};
use serde::Deserialize;

use super::{
    ApiError, Shared,
    views::{AuditView, utc},
};
use crate::store::{AuditEntry, AuditQuery};

const DEFAULT: u32 = 100;
const MOST: u32 = 10_000;
/// A long poll is answered after this at the latest; clients ask again.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Not every row wakes those who wait, so they look again this often.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
pub(super) struct Wanted {
    after: Option<u64>,
    since_us: Option<i64>,
    run: Option<RunId>,
    host: Option<HostId>,
    limit: Option<u32>,
    wait_s: Option<u64>,
}

/// Rows that fit, oldest first. With `wait_s` the answer comes when there is one, or then.
pub(super) async fn list(State(c): Shared, Query(q): Query<Wanted>) -> Result<Json<Vec<AuditView>>, ApiError> {
    let query = AuditQuery {
        after: q.after,
        since: q.since_us.map(Micros),
        run: q.run,
        host: q.host,
        limit: q.limit.unwrap_or(DEFAULT).min(MOST),
    };
    let wait = Duration::from_secs(q.wait_s.unwrap_or(0)).min(MAX_WAIT);
    let deadline = tokio::time::Instant::now() + wait;
    let mut changes = c.control.changes();
    loop {
        // Seen before the look, so that a change during the look wakes us again.
        changes.borrow_and_update();
        let query = query.clone();
        let found = c.control.store.call(move |s| s.audits(&query)).await?;
        if !found.is_empty() || tokio::time::Instant::now() >= deadline {
            return Ok(Json(found.into_iter().map(view).collect()));
        }
        let next = deadline.min(tokio::time::Instant::now() + LOOK);
        if let Ok(Err(_)) = tokio::time::timeout_at(next, changes.changed()).await {
            // The coordinator ends.
            return Ok(Json(Vec::new()));
        }
    }
}

fn view(AuditEntry { number, row }: AuditEntry) -> AuditView {
    AuditView {
        number,
        at: utc(row.at),
        at_us: row.at.0,
        actor: row.who.actor,
        peer: row.who.peer,
        action: row.action,
        run: row.run,
        host: row.host,
        detail: row.detail,
    }
}
