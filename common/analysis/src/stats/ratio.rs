//! The ratio of two arms from paired units: the one estimator behind every bar, contrast and control.
//!
//! **Estimate:** the geometric mean of the paired ratios, that is `exp` of the mean of their logarithms.
//! **Interval:** equal-tailed bootstrap-t (studentised) on that mean, units resampled with replacement. Below
//! [`HULL_BELOW`] units each end is the wider of the bootstrap-t's and Student's: there either of them alone covers up
//! to 1.8 points less than it says (Student's when logarithms are skewed, the bootstrap-t when they are not), and both
//! together hold the nominal level. `simulate::coverage` shows it.
//!
//! A pair with a failed numerator has the ratio plus infinity, with a failed denominator 0, with both it says nothing
//! and may be anything. None is dropped: an infinite or unknown pair takes the upper end to infinity, a zero or unknown
//! one the lower end to 0. The other end is then that of the finite pairs, which errs against the claim only.

use drums_common::draw::Draw;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::Interval;

/// Resamples; with `alpha` = 0.05 both quantiles are order statistics of exactly known rank.
pub const RESAMPLES: usize = 9_999;
/// Fewer units give no interval.
pub const MIN_UNITS: usize = 4;
/// Below this number the interval is the hull of bootstrap-t and Student's t.
pub const HULL_BELOW: usize = 12;
/// Power for which minimum detectable effects are stated.
pub const POWER: f64 = 0.8;

/// One answer about two arms at a margin fixed beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The whole interval lies below `1 / (1 + margin)`: the numerator is better by more than the margin.
    Better,
    /// The mirror image: the denominator is better by more than the margin.
    Worse,
    /// TOST: the `1 - 2 alpha` interval lies inside the margin.
    Equivalent,
    Undecided,
}

impl Answer {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Equivalent => "equivalent",
            Self::Undecided => "undecided",
        }
    }
}

/// A ratio with what is known about it.
#[derive(Clone, Debug, PartialEq)]
pub struct RatioInterval {
    /// Units that went in, failed ones included.
    pub n: usize,
    /// None if it cannot be said (no unit, or infinities in both directions).
    pub ratio: Option<f64>,
    /// At `1 - alpha`; `[0, inf]` when there are too few finite units.
    pub interval: Interval,
    /// At `1 - 2 alpha`, for equivalence.
    pub tost: Interval,
    /// Smallest effect, as a fraction above 1, found with 80 % power at `alpha`; none without an interval.
    pub mde: Option<f64>,
    /// Studentised resamples, sorted; for p values.
    studentised: Vec<f64>,
    mean: f64,
    error: f64,
    hull: bool,
    finite: usize,
    any_up: bool,
}

impl RatioInterval {
    /// One-sided p value against "the ratio is at least `threshold`". 1 with a failed numerator or without an interval.
    pub fn p_below(&self, threshold: f64) -> f64 {
        if self.studentised.is_empty() || self.any_up {
            return 1.0;
        }
        let t = (self.mean - threshold.ln()) / self.error;
        if t.is_nan() {
            return 1.0;
        }
        let at_most = self.studentised.partition_point(|x| *x <= t);
        let boot = (at_most + 1) as f64 / (self.studentised.len() + 1) as f64;
        if !self.hull {
            return boot;
        }
        boot.max(student(self.finite).map_or(1.0, |s| s.cdf(t)))
    }

    pub fn answer(&self, margin: f64) -> Answer {
        let (bottom, top) = (1.0 / (1.0 + margin), 1.0 + margin);
        if self.interval.high < bottom {
            Answer::Better
        } else if self.interval.low > top {
            Answer::Worse
        } else if bottom < self.tost.low && self.tost.high < top {
            Answer::Equivalent
        } else {
            Answer::Undecided
        }
    }
}

fn student(n: usize) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, n as f64 - 1.0).ok()
}

fn mean_and_error(y: &[f64]) -> (f64, f64) {
    let n = y.len() as f64;
    let mean = y.iter().sum::<f64>() / n;
    let variance = y.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0);
    (mean, (variance / n).sqrt())
}

/// A unit's log ratio from the values of its two sides; plus infinity is a failed side. NaN when nothing can be said.
pub fn log_ratio(numerator: f64, denominator: f64) -> f64 {
    match (numerator.is_finite(), denominator.is_finite()) {
        (true, true) => (numerator / denominator).ln(),
        (false, true) => f64::INFINITY,
        (true, false) => f64::NEG_INFINITY,
        (false, false) => f64::NAN,
    }
}

/// Ratio from the units' log ratios (see [`log_ratio`]); `draw` is a stream that nothing else uses.
pub fn geometric_mean_ratio(logs: &[f64], alpha: f64, mut draw: Draw) -> RatioInterval {
    let finite: Vec<f64> = logs.iter().copied().filter(|x| x.is_finite()).collect();
    let unknown = logs.iter().any(|x| x.is_nan());
    let up = unknown || logs.contains(&f64::INFINITY);
    let down = unknown || logs.contains(&f64::NEG_INFINITY);
    let mut out = RatioInterval {
        n: logs.len(),
        ratio: None,
        interval: Interval::UNKNOWN_RATIO,
        tost: Interval::UNKNOWN_RATIO,
        mde: None,
        studentised: Vec::new(),
        mean: f64::NAN,
        error: f64::NAN,
        hull: finite.len() < HULL_BELOW,
        finite: finite.len(),
        any_up: up,
    };
    out.ratio = match (up, down) {
        (true, true) => None,
        (true, false) => Some(f64::INFINITY),
        (false, true) => Some(0.0),
        (false, false) if logs.is_empty() => None,
        (false, false) => Some((finite.iter().sum::<f64>() / finite.len() as f64).exp()),
    };
    if finite.len() < MIN_UNITS {
        return out;
    }
    (out.mean, out.error) = mean_and_error(&finite);
    out.studentised = studentised(&finite, out.mean, &mut draw);
    out.interval = ends(&out, alpha, up, down);
    out.tost = ends(&out, 2.0 * alpha, up, down);
    if !up
        && !down
        && let Some(t) = student(finite.len())
    {
        out.mde = Some(((t.inverse_cdf(1.0 - alpha / 2.0) + t.inverse_cdf(POWER)) * out.error).exp() - 1.0);
    }
    out
}

fn ends(r: &RatioInterval, alpha: f64, up: bool, down: bool) -> Interval {
    let rank = |p: f64| ((p * (r.studentised.len() + 1) as f64).round() as usize).clamp(1, r.studentised.len()) - 1;
    let (mut t_low, mut t_high) = (r.studentised[rank(alpha / 2.0)], r.studentised[rank(1.0 - alpha / 2.0)]);
    if r.hull
        && let Some(t) = student(r.finite)
    {
        let q = t.inverse_cdf(1.0 - alpha / 2.0);
        (t_low, t_high) = (t_low.min(-q), t_high.max(q));
    }
    // Identical units have no error, and a studentised value of infinity times 0 must not become NaN.
    let end = |t: f64| if r.error == 0.0 { r.mean } else { r.mean - t * r.error };
    Interval {
        low: if down { 0.0 } else { end(t_high).exp() },
        high: if up { f64::INFINITY } else { end(t_low).exp() },
    }
}

fn studentised(y: &[f64], mean: f64, draw: &mut Draw) -> Vec<f64> {
    let n = y.len() as f64;
    let centred: Vec<f64> = y.iter().map(|x| x - mean).collect();
    let mut t: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let (mut sum, mut squares) = (0.0, 0.0);
            for _ in 0..centred.len() {
                let x = centred[index(draw, centred.len())];
                sum += x;
                squares += x * x;
            }
            let away = sum / n;
            // Centred values keep this difference of squares accurate; a rounding error below zero is a zero.
            let variance = ((squares - n * away * away) / (n - 1.0)).max(0.0);
            let error = (variance / n).sqrt();
            if error > 1e-12 * away.abs() {
                away / error
            } else if away == 0.0 {
                0.0
            } else {
                away.signum() * f64::INFINITY
            }
        })
        .collect();
    t.sort_unstable_by(f64::total_cmp);
    t
}

/// Index below `len` by multiplication: its bias, `len / 2^64`, is nothing to a resample, and it takes no division.
fn index(draw: &mut Draw, len: usize) -> usize {
    ((u128::from(draw.next_u64()) * len as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;

    fn of(logs: &[f64]) -> RatioInterval {
        geometric_mean_ratio(logs, 0.05, Draw::new(1, &["test"]))
    }

    fn logs(n: usize, around: f64) -> Vec<f64> {
        let mut d = Draw::new(5, &["logs"]);
        (0..n).map(|_| around.ln() + 0.2 * (d.unit() - 0.5)).collect()
    }

    #[test]
    fn an_interval_surrounds_a_clear_ratio_and_is_repeatable() {
        let r = of(&logs(16, 0.5));
        let ratio = r.ratio.unwrap();
        assert!(r.interval.low < ratio && ratio < r.interval.high);
        assert!(r.interval.low > 0.45 && r.interval.high < 0.55, "{:?}", r.interval);
        assert!(r.interval.low < r.tost.low && r.tost.high < r.interval.high);
        assert_eq!(r, of(&logs(16, 0.5)));
        assert_eq!(r.answer(0.25), Answer::Better);
        assert_eq!(of(&logs(16, 2.0)).answer(0.25), Answer::Worse);
        assert_eq!(of(&logs(16, 1.0)).answer(0.25), Answer::Equivalent);
        assert!(r.p_below(1.0) < 0.001 && r.p_below(0.4) > 0.99);
    }

    #[test]
    fn too_few_units_say_nothing() {
        for n in 0..MIN_UNITS {
            let r = of(&logs(n, 0.5));
            assert_eq!((r.interval, r.mde, r.p_below(1.0)), (Interval::UNKNOWN_RATIO, None, 1.0));
            assert_eq!(r.answer(0.25), Answer::Undecided);
        }
    }

    #[test]
    fn failures_take_the_end_that_they_could_have_moved() {
        let mut v = logs(16, 0.5);
        v[3] = INF;
        let r = of(&v);
        assert_eq!((r.n, r.ratio, r.interval.high, r.p_below(1.0)), (16, Some(INF), INF, 1.0));
        assert!(r.interval.low > 0.4);
        v[3] = f64::NEG_INFINITY;
        let r = of(&v);
        assert_eq!((r.ratio, r.interval.low), (Some(0.0), 0.0));
        assert!(r.interval.high < 0.6);
        v[3] = f64::NAN;
        let r = of(&v);
        assert_eq!((r.ratio, r.interval), (None, Interval::UNKNOWN_RATIO));
        assert!(log_ratio(INF, INF).is_nan());
        assert_eq!(log_ratio(INF, 2.0), INF);
        assert_eq!(log_ratio(2.0, INF), f64::NEG_INFINITY);
    }

    #[test]
    fn identical_units_have_a_point_for_an_interval() {
        let r = of(&[2f64.ln(); 8]);
        assert!((r.interval.low - 2.0).abs() < 1e-12 && (r.interval.high - 2.0).abs() < 1e-12);
    }
}
