//! Records on their way into a store, and which of a batch it takes: the same for every backend.

use std::collections::BTreeMap;

use drums_common::{
    evidence::{Body, Record},
    ids::{Generation, HostId},
};

use super::{StoreError, shared::json_of};

/// A record as it will be stored. Made where its batch came in: the store's thread is one, and only stores.
#[derive(Clone, Debug)]
pub struct Written {
    seq: u64,
    generation: Generation,
    text: String,
    /// Why it could not be read back.
    unreadable: Option<String>,
}

impl Written {
    pub fn all(records: &[Record]) -> Result<Vec<Self>, StoreError> {
        records.iter().map(Self::one).collect()
    }

    /// How much a store will write of them.
    pub fn bytes(all: &[Self]) -> usize {
        all.iter().map(|w| w.text.len()).sum()
    }

    fn one(record: &Record) -> Result<Self, StoreError> {
        // Only logs are long.
        let log = if let Body::Log(log) = &record.body { log.text.len() } else { 0 };
        let text = json_of("record", record, 1_024 + log + log / 16)?;
        // The wire carries what JSON does not: an infinity would be stored as null, and be read by nobody.
        let read = record.body.has_reals().then(|| serde_json::from_str::<Record>(&text));
        let unreadable = read.and_then(Result::err).map(|e| e.to_string());
        Ok(Self { seq: record.seq, generation: record.generation, text, unreadable })
    }
}

/// How far a host's evidence of a run was stored before a batch came, and is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub before: u64,
    pub through: u64,
}

/// A record to be stored.
#[derive(Debug)]
pub(super) struct Fresh<'r> {
    pub seq: u64,
    pub late: bool,
    pub text: &'r str,
}

/// The range of a batch's numbers that may be stored already.
pub(super) fn repeated(records: &[Written], through: u64) -> Option<(u64, u64)> {
    let first = records.first()?.seq;
    (first <= through).then(|| (first, through.min(records.last().map_or(first, |r| r.seq))))
}

/// What follows on `through`; repeats must be what is `stored`. Everything after a gap is left out.
pub(super) fn fresh<'r>(
    host: &HostId,
    current: Generation,
    records: &'r [Written],
    through: u64,
    stored: &BTreeMap<u64, String>,
) -> Result<Vec<Fresh<'r>>, StoreError> {
    let mut new: Vec<Fresh<'r>> = Vec::new();
    for record in records {
        if record.seq <= through {
            if stored.get(&record.seq) != Some(&record.text) {
                return Err(StoreError::Differs { host: host.clone(), seq: record.seq });
            }
            continue;
        }
        if record.seq != new.last().map_or(through, |n| n.seq) + 1 {
            break;
        }
        if let Some(why) = &record.unreadable {
            if new.is_empty() {
                return Err(StoreError::Unstorable { host: host.clone(), seq: record.seq, why: why.clone() });
            }
            break;
        }
        new.push(Fresh { seq: record.seq, late: record.generation < current, text: &record.text });
    }
    Ok(new)
}
