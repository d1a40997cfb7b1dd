//! Time as data: microseconds everywhere, so that process, wire and store never disagree about precision.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Wall-clock time, microseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micros(pub i64);

impl Micros {
    /// This instant plus `ms` milliseconds, saturating.
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(1_000)))
    }

    /// Milliseconds from `earlier` to this instant; zero if `earlier` is later.
    pub fn ms_since(self, earlier: Self) -> u64 {
        u64::try_from(self.0.saturating_sub(earlier.0) / 1_000).unwrap_or(0)
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us", self.0)
    }
}

/// A point on a monotonic clock of one machine, microseconds. Leases use CLOCK_BOOTTIME, durations CLOCK_MONOTONIC_RAW;
/// points of different clocks or machines are never compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MonoMicros(pub u64);

impl MonoMicros {
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms.saturating_mul(1_000)))
    }

    /// Microseconds from `earlier` to this point; zero if `earlier` is later.
    pub fn us_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    pub fn ms_since(self, earlier: Self) -> u64 {
        self.us_since(earlier) / 1_000
    }
}

/// Where time comes from. The real one is in each daemon's skin; tests move theirs by hand.
pub trait Clock: Send + Sync {
    /// Wall clock, UTC.
    fn now(&self) -> Micros;
    /// CLOCK_BOOTTIME: goes on during suspend; what leases are timed on.
    fn boottime(&self) -> MonoMicros;
}
