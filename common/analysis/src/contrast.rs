//! Contrasts of two arms on one machine: which unit is resampled, the ratio, and what a bar says about it.
//!
//! Samples of an arm that restores nest in template builds, and what varies between builds does not average out over
//! blocks: a contrast with such an arm resamples builds (the mean log ratio of each), any other resamples blocks.

use std::collections::BTreeMap;

use drums_common::{
    arm::{ArmKind, Mechanism},
    draw::Draw,
    experiment::{Bar, BarRule, Experiment, Metric},
    ids::{HostId, RunId},
};

use crate::{
    gates::JudgedBlock,
    stats::{
        Interval, RatioInterval, geometric_mean_ratio, mcnemar, median, quantile_interval,
        ratio::{MIN_UNITS, log_ratio},
    },
    summary::{BarSummary, RatioSummary, Verdict},
};

/// Builds per machine below which a claim on restored arms is exploratory.
pub const CONFIRMATORY_BUILDS: usize = 8;
/// Exchanges of arms for the chance that a rule passes identical ones.
const EXCHANGES: usize = 2_000;

/// A counted block of a pooled run.
#[derive(Clone, Copy)]
pub struct Counted<'x, 'e, 'a> {
    pub run: RunId,
    pub host: &'a HostId,
    pub block: &'x JudgedBlock<'e, 'a>,
}

impl Counted<'_, '_, '_> {
    /// The arm's value here, plus infinity if it failed; none if it is not there (completeness has refused that).
    pub fn value(&self, arm: usize, metric: Metric) -> Option<f64> {
        self.block.rows.iter().find(|r| r.arm == arm)?.values.get(&metric)?.value()
    }
    fn valid(&self, arm: usize) -> bool {
        self.block.rows.iter().any(|r| r.arm == arm && r.session_valid)
    }
    fn build(&self) -> u32 {
        self.block.attempt.started.template_build
    }
}

/// A contrast computed on one machine.
pub struct Contrast {
    pub numerator: usize,
    pub denominator: usize,
    pub metric: Metric,
    pub pairs: Vec<(f64, f64)>,
    /// Log ratios of the units.
    pub units: Vec<f64>,
    pub by_build: bool,
    pub interval: RatioInterval,
    only_numerator: u64,
    only_denominator: u64,
}

impl Contrast {
    pub fn compute(
        experiment: &Experiment,
        machine: &str,
        blocks: &[Counted<'_, '_, '_>],
        metric: Metric,
        numerator: usize,
        denominator: usize,
    ) -> Self {
        let (num, den) = (&experiment.arms[numerator], &experiment.arms[denominator]);
        let by_build = num.kind.from_template() || den.kind.from_template();
        let mut pairs = Vec::new();
        let mut groups: BTreeMap<(RunId, &HostId, u32), Vec<f64>> = BTreeMap::new();
        let mut blocks_units = Vec::new();
        let (mut only_numerator, mut only_denominator) = (0, 0);
        for b in blocks {
            let (Some(n), Some(d)) = (b.value(numerator, metric), b.value(denominator, metric)) else { continue };
            pairs.push((n, d));
            blocks_units.push(log_ratio(n, d));
            groups.entry((b.run, b.host, b.build())).or_default().push(log_ratio(n, d));
            match (b.valid(numerator), b.valid(denominator)) {
                (true, false) => only_numerator += 1,
                (false, true) => only_denominator += 1,
                _ => {}
            }
        }
        let units = if by_build {
            // Infinities of both signs in one build add up to NaN, which is what is known of it.
            groups.values().map(|g| g.iter().sum::<f64>() / g.len() as f64).collect()
        } else {
            blocks_units
        };
        let draw = Draw::new(
            experiment.design.seed,
            &["ratio", machine, metric.as_str(), num.name.as_str(), den.name.as_str()],
        );
        let interval = geometric_mean_ratio(&units, experiment.design.alpha, draw);
        Self { numerator, denominator, metric, pairs, units, by_build, interval, only_numerator, only_denominator }
    }

    pub fn exploratory(&self) -> bool {
        self.by_build && self.units.len() < CONFIRMATORY_BUILDS
    }

    pub fn unit_name(&self) -> &'static str {
        if self.by_build { "template build" } else { "block" }
    }

    fn side(&self, numerator: bool) -> Vec<f64> {
        self.pairs.iter().map(|(n, d)| if numerator { *n } else { *d }).collect()
    }

    pub fn ratio_of_medians(&self) -> Option<f64> {
        let (n, d) = (median(&self.side(true))?, median(&self.side(false))?);
        (n.is_finite() || d.is_finite()).then(|| n / d)
    }

    pub fn summary(&self, experiment: &Experiment, machine: &str, name: String) -> RatioSummary {
        let (num, den) = (&experiment.arms[self.numerator], &experiment.arms[self.denominator]);
        let spec = experiment.metric(self.metric);
        let text = |f: fn(&drums_common::experiment::MetricSpec) -> &String| spec.map(f).cloned().unwrap_or_default();
        RatioSummary {
            name,
            metric: self.metric,
            numerator: num.name.clone(),
            denominator: den.name.clone(),
            machine: machine.to_owned(),
            endpoint: text(|s| &s.endpoint),
            position: text(|s| &s.position),
            base_case: text(|s| &s.base_case),
            family: family(num.kind, den.kind).to_owned(),
            isolation: format!("{} against {}", isolation(num.kind), isolation(den.kind)),
            ratio: self.interval.ratio.map(Into::into),
            low: self.interval.interval.low.into(),
            high: self.interval.interval.high.into(),
            ratio_of_medians: self.ratio_of_medians().map(Into::into),
            blocks: self.pairs.len() as u32,
            unit: self.unit_name().to_owned(),
            units: self.units.len() as u32,
            answer: self.interval.answer(experiment.design.margin),
            mde: self.interval.mde.map(Into::into),
            exploratory: self.exploratory(),
            only_numerator_valid: self.only_numerator as u32,
            only_denominator_valid: self.only_denominator as u32,
            mcnemar_p: mcnemar(self.only_numerator, self.only_denominator).into(),
            bar: None,
        }
    }

    /// What the bar says. Holm's p is filled in once all bars of the machine are known.
    pub fn judge(&self, experiment: &Experiment, machine: &str, bar: &Bar) -> BarSummary {
        let alpha = experiment.design.alpha;
        let percentile = |numerator| quantile_interval(&self.side(numerator), 0.95, alpha);
        let (tested, mut answer, mut reason) = match bar.rule {
            BarRule::Bound => by_bound(self.interval.interval, self.units.len(), bar.at_most),
            BarRule::Median => by_point(self.ratio_of_medians(), bar.at_most, "ratio of medians"),
            BarRule::P95 => match (percentile(true), percentile(false)) {
                (Some(n), Some(d)) if n.interval.is_some() && d.interval.is_some() => {
                    let ratio = (n.value.is_finite() || d.value.is_finite()).then(|| n.value / d.value);
                    by_point(ratio, bar.at_most, "ratio of 95th percentiles")
                }
                _ => {
                    let n = self.pairs.len();
                    (
                        None,
                        Verdict::Undecided,
                        format!("n too small: {n} samples have no interval of a 95th percentile"),
                    )
                }
            },
        };
        if self.exploratory() && answer == Verdict::Pass {
            answer = Verdict::Undecided;
            reason = format!(
                "{reason}; exploratory: {} template builds on this machine, a claim needs {CONFIRMATORY_BUILDS}",
                self.units.len()
            );
        }
        BarSummary {
            at_most: bar.at_most.into(),
            rule: bar.rule,
            tested: tested.map(Into::into),
            answer,
            reason,
            p: self.interval.p_below(bar.at_most).into(),
            p_holm: 1.0.into(),
            chance_for_identical_arms: self.chance(experiment, machine, bar).into(),
        }
    }

    /// How often the rule would pass if both arms were one: the pairs' spread is kept, their common ratio taken out, and
    /// numerator and denominator exchanged at random.
    fn chance(&self, experiment: &Experiment, machine: &str, bar: &Bar) -> f64 {
        let mut draw = Draw::new(experiment.design.seed, &["identical", machine, &bar.name]);
        let Some(centre) = self.interval.ratio.filter(|r| r.is_finite() && *r > 0.0) else { return 0.0 };
        let mut passed = 0;
        for _ in 0..EXCHANGES {
            let pass = match bar.rule {
                BarRule::Bound => {
                    let logs: Vec<f64> =
                        self.units.iter().map(|x| x - centre.ln()).map(|x| sign(&mut draw) * x).collect();
                    student_high(&logs, experiment.design.alpha).is_some_and(|high| high.exp() <= bar.at_most)
                }
                BarRule::Median | BarRule::P95 => {
                    let (mut a, mut b) = (Vec::new(), Vec::new());
                    for (n, d) in &self.pairs {
                        let n = n / centre;
                        let (x, y) = if sign(&mut draw) > 0.0 { (n, *d) } else { (*d, n) };
                        a.push(x);
                        b.push(y);
                    }
                    let p = if bar.rule == BarRule::Median { 0.5 } else { 0.95 };
                    let at = |v: &[f64]| quantile_interval(v, p, experiment.design.alpha).map(|q| q.value);
                    matches!((at(&a), at(&b)), (Some(x), Some(y)) if x / y <= bar.at_most)
                }
            };
            passed += usize::from(pass);
        }
        passed as f64 / EXCHANGES as f64
    }
}

fn sign(draw: &mut Draw) -> f64 {
    if draw.below(2) == 0 { 1.0 } else { -1.0 }
}

/// Upper end of Student's interval: close to the real one, and cheap enough for thousands of exchanges.
fn student_high(logs: &[f64], alpha: f64) -> Option<f64> {
    use statrs::distribution::{ContinuousCDF, StudentsT};
    let n = logs.len() as f64;
    if logs.len() < MIN_UNITS {
        return None;
    }
    let mean = logs.iter().sum::<f64>() / n;
    let variance = logs.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0);
    let t = StudentsT::new(0.0, 1.0, n - 1.0).ok()?;
    Some(mean + t.inverse_cdf(1.0 - alpha / 2.0) * (variance / n).sqrt())
}

fn by_bound(interval: Interval, units: usize, at_most: f64) -> (Option<f64>, Verdict, String) {
    let Interval { low, high } = interval;
    let shown = |x: f64| crate::value::Value::new(x);
    if high <= at_most {
        (Some(high), Verdict::Pass, format!("upper bound {} is at most {at_most}", shown(high)))
    } else if low > at_most {
        (Some(high), Verdict::Fail, format!("lower bound {} is above {at_most}", shown(low)))
    } else if low == 0.0 && high == f64::INFINITY {
        (Some(high), Verdict::Undecided, format!("no interval: {units} units, {MIN_UNITS} finite ones needed"))
    } else {
        let why = format!("the interval [{}, {}] contains {at_most}", shown(low), shown(high));
        (Some(high), Verdict::Undecided, why)
    }
}

fn by_point(point: Option<f64>, at_most: f64, what: &str) -> (Option<f64>, Verdict, String) {
    let shown = |x: f64| crate::value::Value::new(x);
    match point {
        None => (None, Verdict::Undecided, format!("no {what}")),
        Some(0.0) => (Some(0.0), Verdict::Undecided, format!("the denominator failed, so its {what} says nothing")),
        Some(x) if x <= at_most => (Some(x), Verdict::Pass, format!("{what} {} is at most {at_most}", shown(x))),
        Some(x) => (Some(x), Verdict::Fail, format!("{what} {} is above {at_most}", shown(x))),
    }
}

/// How a session of this kind is reached: only equal paths make a contrast of mechanisms.
fn path(kind: ArmKind) -> &'static str {
    match kind.mechanism() {
        Mechanism::Drums | Mechanism::Runc => "veth",
        Mechanism::Qemu => "tap",
        Mechanism::External => "external",
    }
}

/// `a` within a mechanism, `b` between mechanisms at one position and path, `c` anything else: a product contrast.
pub fn family(a: ArmKind, b: ArmKind) -> &'static str {
    if a.mechanism() == b.mechanism() && a.mechanism() != Mechanism::External {
        "a"
    } else if path(a) == path(b) && path(a) != "external" && a.from_template() == b.from_template() {
        "b"
    } else {
        "c"
    }
}

pub fn isolation(kind: ArmKind) -> &'static str {
    match kind.mechanism() {
        Mechanism::Drums | Mechanism::Runc => "shared kernel",
        Mechanism::Qemu => "own kernel",
        Mechanism::External => "unknown isolation",
    }
}
