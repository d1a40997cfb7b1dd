//! Rates of success, paired rates, and corrections for several claims.

use statrs::{
    distribution::{Binomial, DiscreteCDF},
    function::beta::beta_reg,
};

use super::Interval;

/// Successes among trials with the exact (Clopper-Pearson) interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub successes: u64,
    pub trials: u64,
    pub interval: Interval,
}

impl Rate {
    /// The rate itself; none without a trial.
    pub fn value(&self) -> Option<f64> {
        (self.trials > 0).then(|| self.successes as f64 / self.trials as f64)
    }
}

/// Exact interval of a rate: coverage at least `1 - alpha`. Without a trial it is the whole range.
pub fn clopper_pearson(successes: u64, trials: u64, alpha: f64) -> Rate {
    let (k, n) = (successes.min(trials) as f64, trials as f64);
    let low = if k == 0.0 { 0.0 } else { beta_quantile(k, n - k + 1.0, alpha / 2.0) };
    let high = if k == n { 1.0 } else { beta_quantile(k + 1.0, n - k, 1.0 - alpha / 2.0) };
    Rate { successes, trials, interval: Interval { low, high } }
}

/// Quantile of a Beta distribution by bisection of its distribution function, to the last bits of a double.
fn beta_quantile(a: f64, b: f64, p: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if beta_reg(a, b, middle) < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// Exact two-sided McNemar test: of the pairs where only one side succeeded, do they fall evenly? Returns the p value;
/// 1 without such a pair.
pub fn mcnemar(only_first: u64, only_second: u64) -> f64 {
    let n = only_first + only_second;
    let Ok(binomial) = Binomial::new(0.5, n) else { return 1.0 };
    if n == 0 {
        return 1.0;
    }
    (2.0 * binomial.cdf(only_first.min(only_second))).min(1.0)
}

/// Holm's step-down: adjusted p values in the order of the input.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut adjusted = vec![0.0; p.len()];
    let mut floor: f64 = 0.0;
    for (rank, &i) in order.iter().enumerate() {
        floor = floor.max((p[i] * (p.len() - rank) as f64).min(1.0));
        adjusted[i] = floor;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 5e-5, "{a} against {b}");
    }

    #[test]
    fn clopper_pearson_matches_published_values() {
        let r = clopper_pearson(16, 16, 0.05);
        close(r.interval.low, 0.025f64.powf(1.0 / 16.0));
        close(r.interval.high, 1.0);
        let r = clopper_pearson(0, 10, 0.05);
        close(r.interval.high, 0.30850);
        let r = clopper_pearson(7, 10, 0.05);
        close(r.interval.low, 0.34755);
        close(r.interval.high, 0.93326);
        let r = clopper_pearson(0, 0, 0.05);
        assert_eq!((r.interval.low, r.interval.high, r.value()), (0.0, 1.0, None));
    }

    #[test]
    fn mcnemar_is_exact() {
        close(mcnemar(0, 0), 1.0);
        close(mcnemar(0, 5), 0.0625);
        close(mcnemar(1, 9), 0.021484);
        close(mcnemar(4, 4), 1.0);
    }

    #[test]
    fn holm_steps_down_and_never_decreases() {
        let adjusted = holm(&[0.01, 0.04, 0.03]);
        close(adjusted[0], 0.03);
        close(adjusted[1], 0.06);
        close(adjusted[2], 0.06);
        assert!(holm(&[]).is_empty());
    }
}
