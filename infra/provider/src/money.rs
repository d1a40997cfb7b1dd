//! Money: whole micro-dollars, rounded up. Prices carry where they are from and of when.

use std::{fmt, iter::Sum};

use drums_common::clock::Micros;
use serde::{Deserialize, Serialize};

/// Millionths of a US dollar. Sums saturate: a cap is then exceeded, never wrapped round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UsdMicros(pub u64);

impl UsdMicros {
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
    /// This much a `per_ms`, for `ms`: rounded up to the next micro-dollar.
    #[must_use]
    pub fn for_ms(self, ms: u64, per_ms: u64) -> Self {
        let whole = u128::from(self.0) * u128::from(ms);
        Self(u64::try_from(whole.div_ceil(u128::from(per_ms))).unwrap_or(u64::MAX))
    }
    #[must_use]
    pub fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

impl Sum for UsdMicros {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Self::plus)
    }
}

impl fmt::Display for UsdMicros {
    /// To the hundredth of a cent, rounded up: a cost is never shown as less than it is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let up = self.0.div_ceil(100);
        write!(f, "${}.{:04}", up / 10_000, up % 10_000)
    }
}

/// Where a number that we did not measure comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// Asked for now, of the API named.
    Api(String),
    /// The operator wrote it down, at the place named.
    Config(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Api(api) => write!(f, "{api}"),
            Self::Config(place) => write!(f, "{place}"),
        }
    }
}

/// A number with its source and its date.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Quoted<T> {
    pub value: T,
    pub source: Source,
    /// Of the price list, or of the operator's entry.
    pub as_of: Micros,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rounding_is_up() {
        assert_eq!(UsdMicros(1).for_ms(1, 3_600_000), UsdMicros(1));
        assert_eq!(UsdMicros(3_600_000).for_ms(1_000, 3_600_000), UsdMicros(1_000));
        assert_eq!(UsdMicros(u64::MAX).for_ms(u64::MAX, 1), UsdMicros(u64::MAX));
        assert_eq!(UsdMicros(101).to_string(), "$0.0002");
        assert_eq!(UsdMicros(1_234_500_000).to_string(), "$1234.5000");
        assert_eq!(UsdMicros(0).to_string(), "$0.0000");
    }
}
