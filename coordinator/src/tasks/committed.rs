//! How far a host's evidence of a run is committed, and what of it the driver has not seen.
//!
//! The driver may read everything from the store, and does after a restart; what comes in while it lives it is told here,
//! so that a gigabyte of logs is not read back for the few records that change a run.

use drums_common::ids::{HostId, RunId};

use super::driver::PAGE;
use crate::{
    core::run::Observed,
    store::{EvidenceRow, Store, StoreError},
};

/// A host's evidence of one run. Only records that change a run are kept, until the driver takes them.
#[derive(Debug, Default)]
pub(super) struct Committed {
    pub through: u64,
    /// What is told begins after this number and goes to `through`.
    told_after: u64,
    told: Vec<(u64, Observed, bool)>,
}

/// Beyond this the driver reads the store: it has not looked for long.
const MAX_TOLD: usize = 256;

impl Committed {
    pub fn through(through: u64) -> Self {
        Self { through, told_after: through, told: Vec::new() }
    }

    /// A batch was committed after what was there `before`: number, content and whether it is late, of each record.
    pub fn commit(&mut self, before: u64, through: u64, records: impl Iterator<Item = (u64, Observed, bool)>) {
        if through <= self.through {
            return;
        }
        if before != self.through || self.told.len() > MAX_TOLD {
            self.told.clear();
            self.told_after = before;
        }
        let new = records.filter(|(seq, body, _)| *seq > before && *seq <= through && !matches!(body, Observed::Other));
        self.told.extend(new);
        self.through = through;
    }

    /// Everything after `applied`, and a last entry for how far it goes; none if the store has to be asked.
    pub fn take(&mut self, applied: u64) -> Option<Vec<(u64, Observed, bool)>> {
        let whole = self.told_after <= applied;
        let mut told = std::mem::take(&mut self.told);
        self.told_after = self.through;
        if !whole {
            return None;
        }
        told.retain(|(seq, ..)| *seq > applied);
        if told.last().is_none_or(|(seq, ..)| *seq < self.through) {
            // Late or not, it only moves the cursor.
            told.push((self.through, Observed::Other, false));
        }
        Some(told)
    }
}

/// What the driver steps a run by: records that change nothing but how far a host's evidence goes count as one.
pub(super) fn of_host(host: &HostId, told: Vec<(u64, Observed, bool)>) -> Vec<(HostId, u64, Observed, bool)> {
    let last = told.last().map(|(seq, ..)| *seq);
    told.into_iter()
        .filter(|(seq, body, _)| !matches!(body, Observed::Other) || Some(*seq) == last)
        .map(|(seq, body, late)| (host.clone(), seq, body, late))
        .collect()
}

pub(super) type Read = (HostId, u64, Result<Vec<EvidenceRow>, StoreError>);

pub(super) fn read_evidence(s: &mut dyn Store, run: RunId, hosts: Vec<(HostId, u64)>) -> Vec<Read> {
    hosts
        .into_iter()
        .map(|(host, after)| {
            let rows = s.evidence(run, &host, after, PAGE);
            (host, after, rows)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(seqs: std::ops::RangeInclusive<u64>) -> impl Iterator<Item = (u64, Observed, bool)> {
        seqs.map(|seq| (seq, if seq % 2 == 0 { closed() } else { Observed::Other }, false))
    }

    fn closed() -> Observed {
        Observed::Closed { teardown: drums_common::evidence::Teardown::Clean, reason: String::new() }
    }

    fn seqs(told: Option<Vec<(u64, Observed, bool)>>) -> Option<Vec<u64>> {
        told.map(|t| t.into_iter().map(|(seq, ..)| seq).collect())
    }

    #[test]
    fn what_was_told_is_taken_once_and_what_was_not_is_asked_of_the_store() {
        let mut c = Committed::through(4);
        assert_eq!(seqs(c.take(0)), None, "an earlier life committed it");
        c.commit(4, 7, records(3..=7));
        assert_eq!(seqs(c.take(4)), Some(vec![6, 7]), "the last says how far it goes");
        c.commit(7, 8, records(8..=8));
        assert_eq!(seqs(c.take(7)), Some(vec![8]));
        c.commit(8, 9, records(9..=9));
        assert_eq!(seqs(c.take(7)), None, "what was taken and not stored is read again");
        c.commit(12, 14, records(13..=14));
        assert_eq!(seqs(c.take(9)), None, "a batch was not told");
        c.commit(12, 13, records(13..=13));
        assert_eq!(c.through, 14, "an answer that was overtaken");
    }
}
