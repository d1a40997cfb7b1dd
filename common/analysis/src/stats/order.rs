//! Order statistics: medians and percentiles with intervals that assume no distribution.

use statrs::distribution::{Binomial, DiscreteCDF};

use super::Interval;

/// A quantile of a sample. `interval` is none where the sample is too small for one at the wanted level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    pub n: usize,
    pub value: f64,
    pub interval: Option<Interval>,
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    v
}

/// Median, plus infinity included; none of an empty sample.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile_of_sorted(&sorted(values), 0.5)
}

/// Sample quantile: the middle of the two neighbours for a median of an even number, else the smallest value that at
/// least `p` of the sample does not exceed.
fn quantile_of_sorted(v: &[f64], p: f64) -> Option<f64> {
    let n = v.len();
    if n == 0 {
        return None;
    }
    let exact = n as f64 * p;
    let rank = exact.ceil().max(1.0) as usize;
    let at = v[(rank - 1).min(n - 1)];
    if p == 0.5 && n.is_multiple_of(2) { Some(midpoint(at, v[rank.min(n - 1)])) } else { Some(at) }
}

/// Half-way; infinite as soon as one of them is, without making a NaN.
fn midpoint(a: f64, b: f64) -> f64 {
    if a == b { a } else { a / 2.0 + b / 2.0 }
}

/// Median with its order-statistic interval: none below n = 6 at 95 %.
pub fn median_interval(values: &[f64], alpha: f64) -> Option<Quantile> {
    quantile_interval(values, 0.5, alpha)
}

/// The `p` quantile with the interval between two order statistics whose coverage is at least `1 - alpha` whatever the
/// distribution, each tail at most `alpha / 2`.
pub fn quantile_interval(values: &[f64], p: f64, alpha: f64) -> Option<Quantile> {
    let v = sorted(values);
    let n = v.len();
    let value = quantile_of_sorted(&v, p)?;
    Some(Quantile {
        n,
        value,
        interval: interval_ranks(n, p, alpha).map(|(l, u)| Interval { low: v[l - 1], high: v[u - 1] }),
    })
}

/// 1-based ranks (l, u) with P(Binomial(n, p) < l) and P(Binomial(n, p) >= u) both at most alpha / 2.
fn interval_ranks(n: usize, p: f64, alpha: f64) -> Option<(usize, usize)> {
    let binomial = Binomial::new(p, n as u64).ok()?;
    let at_most = |k: usize| binomial.cdf(k as u64);
    let l = (1..=n).take_while(|l| at_most(l - 1) <= alpha / 2.0).last()?;
    let u = (1..=n).find(|u| 1.0 - at_most(u - 1) <= alpha / 2.0)?;
    (l < u).then_some((l, u))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;

    #[test]
    fn medians_of_small_samples() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[3.0, 1.0]), Some(2.0));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[1.0, 2.0, 3.0, INF]), Some(2.5));
        assert_eq!(median(&[1.0, 2.0, INF, INF]), Some(INF));
        assert_eq!(median(&[INF, INF]), Some(INF));
    }

    #[test]
    fn no_interval_of_a_median_below_six() {
        let v: Vec<f64> = (1..=16).map(f64::from).collect();
        for n in 1..6 {
            assert_eq!(median_interval(&v[..n], 0.05).unwrap().interval, None, "n = {n}");
        }
        // Ranks as printed in tables of distribution-free intervals of a median.
        for (n, l, u) in [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (15, 4, 12), (16, 4, 13)] {
            assert_eq!(interval_ranks(n, 0.5, 0.05), Some((l, u)), "n = {n}");
        }
    }

    #[test]
    fn a_failed_session_widens_the_interval_and_is_not_dropped() {
        let mut v: Vec<f64> = (1..=8).map(f64::from).collect();
        v[0] = INF;
        let q = median_interval(&v, 0.05).unwrap();
        assert_eq!((q.n, q.value), (8, 5.5));
        assert_eq!(q.interval, Some(Interval { low: 2.0, high: INF }));
    }

    #[test]
    fn high_percentiles_need_many_samples() {
        let v: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(quantile_interval(&v[..71], 0.95, 0.05).unwrap().interval, None);
        assert!(quantile_interval(&v[..73], 0.95, 0.05).unwrap().interval.is_some());
        assert_eq!(quantile_interval(&v[..100], 0.95, 0.05).unwrap().value, 95.0);
        assert_eq!(quantile_interval(&v, 0.99, 0.05).unwrap().interval, None);
    }
}
