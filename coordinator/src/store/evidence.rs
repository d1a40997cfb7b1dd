//! Which records of a batch a store takes: the same for every backend.

use std::collections::BTreeMap;

use drums_common::{
    evidence::Record,
    ids::{Generation, HostId},
};

use super::{StoreError, shared::json};

/// A record to be stored.
#[derive(Debug)]
pub(super) struct Fresh {
    pub seq: u64,
    pub late: bool,
    pub text: String,
}

/// The range of a batch's numbers that may be stored already.
pub(super) fn repeated(records: &[Record], through: u64) -> Option<(u64, u64)> {
    let first = records.first()?.seq;
    (first <= through).then(|| (first, through.min(records.last().map_or(first, |r| r.seq))))
}

/// What follows on `through`; repeats must be what is `stored`. Everything after a gap is left out.
pub(super) fn fresh(
    host: &HostId,
    current: Generation,
    records: &[Record],
    through: u64,
    stored: &BTreeMap<u64, String>,
) -> Result<Vec<Fresh>, StoreError> {
    let mut new: Vec<Fresh> = Vec::new();
    for record in records {
        let text = json("record", record)?;
        if record.seq <= through {
            if stored.get(&record.seq) != Some(&text) {
                return Err(StoreError::Differs { host: host.clone(), seq: record.seq });
            }
            continue;
        }
        if record.seq != new.last().map_or(through, |n| n.seq) + 1 {
            break;
        }
        // The wire carries what JSON does not: an infinity would be stored as null, and be read by nobody.
        if record.body.has_reals()
            && let Err(why) = serde_json::from_str::<Record>(&text)
        {
            if new.is_empty() {
                return Err(StoreError::Unstorable { host: host.clone(), seq: record.seq, why: why.to_string() });
            }
            break;
        }
        new.push(Fresh { seq: record.seq, late: record.generation < current, text });
    }
    Ok(new)
}
