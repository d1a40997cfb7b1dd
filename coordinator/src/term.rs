//! Until when a coordinator may answer agents for a store that others may lead.
//!
//! Whatever is written, the store fences; an answer to a beat is not written, and renews what the agent holds. A coordinator
//! that was cut off from its store must not keep a host going that its successor judges lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use drums_common::{clock::MonoMicros, lease::DRIFT_PPM};

/// Shared between whoever renews the store's lease and whoever answers. Over until it is renewed for the first time.
#[derive(Clone, Debug, Default)]
pub struct Term(Arc<AtomicU64>);

impl Term {
    /// The store gave its lease for `ttl`, after it was asked at `asked`: by its clock, which may be the faster one.
    pub fn renewed(&self, asked: MonoMicros, ttl: Duration) {
        let ttl_us = u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX / 2);
        let until = asked.0.saturating_add(ttl_us - (ttl_us / 1_000_000 + 1).saturating_mul(DRIFT_PPM).min(ttl_us));
        self.0.store(until, Ordering::Relaxed);
    }

    pub fn over(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub fn holds(&self, now: MonoMicros) -> bool {
        now.0 < self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_ends_before_anybody_else_may_have_taken_the_lease() {
        let (term, at) = (Term::default(), MonoMicros);
        assert!(!term.holds(at(0)), "nothing was taken yet");
        term.renewed(at(1_000_000), Duration::from_secs(10));
        // By a clock that is the slower one by as much as it may be, ten seconds of the store's are so many.
        let theirs = 10_000_000 - 10_000_000 * DRIFT_PPM / 1_000_000;
        assert!(term.holds(at(10_900_000)) && !term.holds(at(1_000_000 + theirs)));
        term.over();
        assert!(!term.holds(at(1_000_000)));
    }
}
