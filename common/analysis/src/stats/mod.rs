//! Statistics that know nothing of arms, blocks or records: numbers in, numbers with intervals out.
//!
//! Plus infinity is a value here (a failed session's latency), never a gap: order statistics sort it last, and a ratio
//! with one in it loses the bound that it could have moved. Everything is a pure function; resampling draws come from a
//! stream that the caller names.

pub mod order;
pub mod rates;
pub mod ratio;
pub mod variance;

pub use order::{Quantile, median, median_interval, quantile_interval};
pub use rates::{Rate, clopper_pearson, holm, mcnemar};
pub use ratio::{Answer, RatioInterval, geometric_mean_ratio};

/// Two-sided interval of a quantity, either end possibly infinite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub const UNKNOWN_RATIO: Self = Self { low: 0.0, high: f64::INFINITY };

    pub fn contains(&self, x: f64) -> bool {
        self.low <= x && x <= self.high
    }
}
