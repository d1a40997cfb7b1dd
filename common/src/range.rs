//! What the numbers of an experiment may be. The spec's reader refuses others with their place; a registration that
//! comes from outside is held to the same by [`crate::experiment::Experiment::check`].

use std::ops::RangeInclusive;

pub type Whole = RangeInclusive<u64>;

/// Finite numbers above `low` (or from it, when `closed`) up to `high`.
#[derive(Clone, Copy, Debug)]
pub struct Real {
    pub low: f64,
    pub closed: bool,
    pub high: f64,
}

impl Real {
    pub fn contains(self, v: f64) -> bool {
        v.is_finite() && v <= self.high && (v > self.low || (self.closed && v >= self.low))
    }
}

const fn above_zero(high: f64) -> Real {
    Real { low: 0.0, closed: false, high }
}
const fn from_zero(high: f64) -> Real {
    Real { low: 0.0, closed: true, high }
}

pub const CPU_MILLI: Whole = 10..=1_000_000;
pub const CPUSET_SIZE: Whole = 1..=1_024;
pub const MEMORY_MIB: Whole = 16..=1024 * 1024;
pub const OVERHEAD_MIB: Whole = 0..=64 * 1024;

pub const BLOCKS: Whole = 1..=10_000;
pub const WARMUP: Whole = 1..=100;
pub const BUILDS: Whole = 1..=10_000;
/// TOML's whole numbers end at 2^63 - 1.
pub const SEED: Whole = 0..=i64::MAX as u64;
pub const MAX_RUNS: Whole = 1..=100;
pub const READY_TIMEOUT_MS: Whole = 100..=3_600_000;
pub const DEADLINE_MINUTES: Whole = 1..=60 * 24 * 7;
pub const HOSTS: Whole = 1..=1_000;
pub const MARGIN: Real = above_zero(10.0);
pub const ALPHA: Real = above_zero(0.5);
pub const AT_MOST: Real = above_zero(1_000.0);

pub const STEAL: Real = from_zero(1.0);
pub const OUTSIDE_CPU: Real = from_zero(64.0);
pub const CANARY: Real = from_zero(100.0);
pub const CLOCK_STEP_MS: Real = from_zero(60_000.0);
pub const SETTLE_MS: Whole = 1..=600_000;
pub const VOID: Real = from_zero(1.0);
