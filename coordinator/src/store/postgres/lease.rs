//! Which coordinator may write: a lease of one row, timed by the server's clock.
//!
//! ```text
//! standby ─ take: nobody's, run out, or this node's own → epoch + 1 ─▶ active ─ renew under the epoch ─▶ superseded
//! ```
//! The lease outlives connections. That it ran out ends nothing by itself: until somebody else has taken it, the same
//! coordinator may go on, so that a server that was away for a while costs no hand-over.

use std::time::Duration;

use drums_common::clock::Micros;

use super::{PostgresStore, audit};
use crate::store::{AuditRow, StoreError, Who};

/// What came of an attempt to take the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is this store's, which may write from now on.
    Ours { epoch: u64 },
    /// Another coordinator's.
    Theirs { name: String, epoch: u64, left_ms: i64 },
}

impl PostgresStore {
    /// Takes the lease for `ttl`, if nobody else holds it. `node` is the same for every life of one home, whose lock sees
    /// to it that only one of them lives; `name` is for people.
    pub fn take(&mut self, node: &str, name: &str, ttl: Duration) -> Result<Taken, StoreError> {
        let ttl_us = micros(ttl);
        let mut t = self.begin("take the lease")?;
        let taken = t.query(
            "UPDATE lease SET epoch = epoch + 1, node = $1, name = $2, taken_us = now_us(), expires_us = now_us() + $3 \
             WHERE expires_us < now_us() OR node = $1 RETURNING epoch, taken_us",
            &[&node, &name, &ttl_us],
        )?;
        if let Some(row) = taken.first() {
            let (epoch, at): (i64, i64) = (row.get(0), row.get(1));
            let who = Who::new("coordinator", name);
            audit::add(&mut t, &AuditRow::new(Micros(at), who, "lead").detail(&format!("epoch {epoch}")))?;
            t.commit()?;
            self.epoch = Some(epoch);
            return Ok(Taken::Ours { epoch: epoch.cast_unsigned() });
        }
        let rows = t.query("SELECT name, epoch, (expires_us - now_us()) / 1000 FROM lease", &[])?;
        let row = rows.first().ok_or_else(|| StoreError::Missing { what: "row of the", id: "lease".to_owned() })?;
        Ok(Taken::Theirs { name: row.get(0), epoch: row.get::<_, i64>(1).cast_unsigned(), left_ms: row.get(2) })
    }

    /// Holds the lease for another `ttl`; false if another coordinator has taken it.
    pub fn renew(&mut self, epoch: u64, ttl: Duration) -> Result<bool, StoreError> {
        let mut t = self.begin("renew the lease")?;
        let sql = "UPDATE lease SET expires_us = now_us() + $2 WHERE epoch = $1";
        let renewed = t.execute(sql, &[&epoch.cast_signed(), &micros(ttl)])? == 1;
        t.commit()?;
        Ok(renewed)
    }

    /// Lets others take the lease at once: an orderly end.
    pub fn give_up(&mut self, epoch: u64) -> Result<(), StoreError> {
        let mut t = self.begin("give the lease up")?;
        t.execute("UPDATE lease SET expires_us = 0 WHERE epoch = $1", &[&epoch.cast_signed()])?;
        t.commit()
    }
}

fn micros(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_micros()).unwrap_or(i64::MAX / 4)
}
