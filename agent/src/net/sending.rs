//! What of the spool is sent next, and what an answer to it means: data and `now` in, data out.
//!
//! The coordinator's answers are the truth: where it says that less is committed than we believed, sending goes back to
//! there. Runs take turns, a batch each. A run whose evidence is not taken rests for a while, and holds up no other.

use std::collections::{BTreeMap, HashMap};

use drums_common::{clock::MonoMicros, ids::RunId, wire::latest::EvidenceAck};

use crate::spool::RunSpool;

/// Between attempts while the coordinator cannot commit; for one run it doubles up to the maximum, since it may be that
/// the coordinator never takes it.
pub const PAUSE_MS: u64 = 1_000;
const MAX_PAUSE_MS: u64 = 30_000;

/// How far a run is on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub run: RunId,
    pub last_seq: u64,
    pub acked: u64,
}

impl From<&RunSpool> for Held {
    fn from(spool: &RunSpool) -> Self {
        Self { run: spool.meta().run, last_seq: spool.last_seq(), acked: spool.acked() }
    }
}

/// For the life of one connection.
#[derive(Debug, Default)]
pub struct Sending {
    /// Up to where each run was sent and answered.
    cursors: HashMap<RunId, u64>,
    /// Runs that were not taken when they were last tried.
    resting: BTreeMap<RunId, Rest>,
    /// Whose turn was last.
    last: Option<RunId>,
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    until: MonoMicros,
    pause_ms: u64,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// For the first time since it was refused.
    Again,
    /// Neither committed nor told to go back: it rests, so that nobody spins.
    No,
}

impl Sending {
    /// The run that has something to send and waited longest, and after which record.
    pub fn next(&mut self, held: &[Held], now: MonoMicros) -> Option<(RunId, u64)> {
        let due = |h: &&Held| {
            let rests = self.resting.get(&h.run).is_some_and(|r| now < r.until);
            !rests && self.cursors.get(&h.run).copied().unwrap_or(h.acked) < h.last_seq
        };
        let behind = |h: &&Held| self.last.is_none_or(|last| h.run > last);
        let next = held.iter().filter(due).find(behind).or_else(|| held.iter().find(due))?;
        self.last = Some(next.run);
        Some((next.run, *self.cursors.entry(next.run).or_insert(next.acked)))
    }

    /// The coordinator answered a batch that was sent after `cursor`.
    pub fn answered(&mut self, ack: &EvidenceAck, cursor: u64, now: MonoMicros) -> Taken {
        self.cursors.insert(ack.run, ack.through_seq);
        if ack.through_seq == cursor {
            self.refused(ack.run, now);
            Taken::No
        } else if self.resting.remove(&ack.run).is_some() {
            Taken::Again
        } else {
            Taken::Yes
        }
    }

    /// A run was not taken. True if that is news.
    pub fn refused(&mut self, run: RunId, now: MonoMicros) -> bool {
        let before = self.resting.get(&run).map(|r| r.pause_ms);
        let pause_ms = before.map_or(PAUSE_MS, |p| (2 * p).min(MAX_PAUSE_MS));
        self.resting.insert(run, Rest { until: now.plus_ms(pause_ms), pause_ms });
        before.is_none()
    }

    /// It cannot be read: the others go on, and this one is looked at again on the next connection.
    pub fn unreadable(&mut self, run: RunId) {
        self.cursors.insert(run, u64::MAX);
    }

    /// When the next rest ends.
    pub fn rested(&self, now: MonoMicros) -> Option<MonoMicros> {
        self.resting.values().map(|r| r.until).filter(|end| *end > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RunId = RunId([1; 6]);
    const B: RunId = RunId([2; 6]);

    fn held(run: RunId, last_seq: u64, acked: u64) -> Held {
        Held { run, last_seq, acked }
    }
    fn at(ms: u64) -> MonoMicros {
        MonoMicros(ms * 1_000)
    }

    #[test]
    fn runs_take_turns_and_answers_are_the_truth() {
        let mut s = Sending::default();
        let ack = |run, through_seq| EvidenceAck { run, through_seq };
        let both = [held(A, 10, 0), held(B, 4, 2)];
        assert_eq!(s.next(&both, at(0)), Some((A, 0)));
        assert_eq!(s.answered(&ack(A, 5), 0, at(0)), Taken::Yes);
        assert_eq!(s.next(&both, at(0)), Some((B, 2)));
        assert_eq!(s.answered(&ack(B, 4), 2, at(0)), Taken::Yes);
        assert_eq!(s.next(&both, at(0)), Some((A, 5)));
        assert_eq!(s.answered(&ack(A, 3), 5, at(0)), Taken::Yes, "it lost something: back to there");
        assert_eq!(s.next(&both, at(0)), Some((A, 3)));
        assert_eq!(s.answered(&ack(A, 10), 3, at(0)), Taken::Yes);
        assert_eq!(s.next(&both, at(0)), None);
    }

    #[test]
    fn what_is_not_taken_rests_ever_longer_and_holds_up_nobody() {
        let mut s = Sending::default();
        let both = [held(A, 1, 0), held(B, 1, 0)];
        assert_eq!(s.next(&both, at(0)), Some((A, 0)));
        assert!(s.refused(A, at(0)));
        assert_eq!(s.next(&both, at(0)), Some((B, 0)));
        assert_eq!(s.answered(&EvidenceAck { run: B, through_seq: 0 }, 0, at(0)), Taken::No);
        assert_eq!((s.next(&both, at(999)), s.rested(at(999))), (None, Some(at(1_000))));
        assert_eq!(s.next(&both, at(1_000)), Some((A, 0)));
        assert!(!s.refused(A, at(1_000)));
        assert_eq!(s.next(&both, at(1_000)), Some((B, 0)));
        assert_eq!(s.answered(&EvidenceAck { run: B, through_seq: 1 }, 0, at(1_000)), Taken::Again);
        assert_eq!((s.next(&both, at(2_999)), s.rested(at(2_999))), (None, Some(at(3_000))));
        let mut now = at(3_000);
        for _ in 0..10 {
            assert_eq!(s.next(&both, now), Some((A, 0)));
            s.refused(A, now);
            now = s.rested(now).unwrap();
        }
        s.refused(A, at(500_000));
        assert_eq!(s.rested(at(500_000)), Some(at(530_000)));
        s.unreadable(A);
        assert_eq!(s.next(&both, at(600_000)), None);
    }
}
