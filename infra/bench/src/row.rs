//! Rows of the result: a ratio with its interval held against a goal that was fixed beforehand.

use drums_analysis::stats::{geometric_mean_ratio, median, ratio::log_ratio};
use drums_common::draw::Draw;
use serde::Serialize;

const ALPHA: f64 = 0.05;

/// Which end of the interval is held against which number.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    AtLeast(f64),
    AtMost(f64),
    /// The whole interval lies within this fraction of 1.
    Within(f64),
    /// Printed for comparison.
    None,
}

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// Geometric mean of the rounds' ratios; of a level, its worst. Not finite (null in the file) where a reading was
    /// not positive or not finite and no ratio exists: the interval is then unbounded, no goal is met, and `note` says why.
    pub ratio: f64,
    /// Ends of the interval. Few rounds, of which one is far from the others, may leave an end open: the low one at 0,
    /// the high one not finite (null in the file).
    pub low: f64,
    pub high: f64,
    pub n: usize,
    pub bound: &'static str,
    pub goal: Option<f64>,
    pub met: Option<bool>,
    pub unit: &'static str,
    pub peer: String,
    /// Median of what is named, in `each`.
    pub ours: f64,
    /// Median of the peer, in `each`.
    pub theirs: f64,
    pub each: &'static str,
    /// CPU time of the server's process per operation, microseconds.
    pub cpu_us: Option<f64>,
    pub peer_cpu_us: Option<f64>,
    pub note: String,
}

/// What one arm gave in one round.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub value: f64,
    /// Microseconds of the server's CPU per operation.
    pub cpu_us: f64,
}

fn values(readings: &[Reading]) -> Vec<f64> {
    readings.iter().map(|r| r.value).collect()
}

fn cpu(readings: &[Reading]) -> Option<f64> {
    median(&readings.iter().map(|r| r.cpu_us).filter(|v| v.is_finite()).collect::<Vec<_>>())
}

/// Ours over theirs, paired by round.
pub fn ratio(
    name: &str,
    ours: &[Reading],
    peer: &str,
    theirs: &[Reading],
    each: &'static str,
    goal: Goal,
    seed: u64,
) -> Row {
    let log = |(a, b): (&Reading, &Reading)| {
        let counts = |v: f64| v > 0.0 && v.is_finite();
        if counts(a.value) && counts(b.value) { log_ratio(a.value, b.value) } else { f64::NAN }
    };
    let logs: Vec<f64> = ours.iter().zip(theirs).map(log).collect();
    let lost = logs.iter().filter(|l| l.is_nan()).count();
    let found = geometric_mean_ratio(&logs, ALPHA, Draw::new(seed, &["bench ratio", name, peer]));
    let (low, high) = (found.interval.low, found.interval.high);
    let (bound, goal, met) = judged(low, high, goal);
    let note = if lost == 0 {
        String::new()
    } else {
        format!("no ratio: in {lost} of {} rounds a reading was nothing or endless; measure more agents", logs.len())
    };
    Row {
        name: name.to_owned(),
        ratio: found.ratio.unwrap_or(f64::NAN),
        low,
        high,
        n: found.n,
        bound,
        goal,
        met,
        unit: "ratio",
        peer: peer.to_owned(),
        ours: median(&values(ours)).unwrap_or(f64::NAN),
        theirs: median(&values(theirs)).unwrap_or(f64::NAN),
        each,
        cpu_us: cpu(ours),
        peer_cpu_us: cpu(theirs),
        note,
    }
}

/// The worst of a level: its goal holds for every one.
pub fn worst(name: &str, levels: &[Reading], unit: &'static str, goal: Goal) -> Row {
    let mut sorted = values(levels);
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.first().copied().unwrap_or(f64::NAN), sorted.last().copied().unwrap_or(f64::NAN));
    let (bound, goal, met) = judged(low, high, goal);
    Row {
        name: name.to_owned(),
        ratio: high,
        low,
        high,
        n: sorted.len(),
        bound,
        goal,
        met,
        unit,
        peer: String::new(),
        ours: median(&sorted).unwrap_or(f64::NAN),
        theirs: f64::NAN,
        each: unit,
        cpu_us: cpu(levels),
        peer_cpu_us: None,
        note: String::new(),
    }
}

fn judged(low: f64, high: f64, goal: Goal) -> (&'static str, Option<f64>, Option<bool>) {
    match goal {
        Goal::AtLeast(g) => ("low", Some(g), Some(low >= g)),
        Goal::AtMost(g) => ("high", Some(g), Some(high <= g)),
        Goal::Within(g) => ("both", Some(g), Some(low >= 1.0 / (1.0 + g) && high <= 1.0 + g)),
        Goal::None => ("none", None, None),
    }
}

impl Row {
    #[must_use]
    pub fn with_note(mut self, note: &str) -> Self {
        self.note = [self.note.as_str(), note].into_iter().filter(|n| !n.is_empty()).collect::<Vec<_>>().join("; ");
        self
    }

    pub fn in_words(&self) -> String {
        let goal = match (self.goal, self.met) {
            (Some(goal), Some(met)) => {
                let sign = match self.bound {
                    "low" => ">=",
                    "high" => "<=",
                    _ => "within",
                };
                format!("  {sign} {goal}: {}", if met { "met" } else { "MISSED" })
            }
            _ => String::new(),
        };
        let against = if self.peer.is_empty() { String::new() } else { format!(" against {:.4}", self.theirs) };
        let cpu = match (self.cpu_us, self.peer_cpu_us) {
            (Some(a), Some(b)) => format!(", CPU {a:.1} us against {b:.1} us"),
            (Some(a), None) => format!(", CPU {a:.1} us"),
            _ => String::new(),
        };
        let note = if self.note.is_empty() { String::new() } else { format!("\n      {}", self.note) };
        format!(
            "{:<58} {:.3} [{:.3}, {:.3}] {}  {:.4}{against} {}{cpu}, n = {}{goal}{note}",
            self.name, self.ratio, self.low, self.high, self.unit, self.ours, self.each, self.n
        )
    }
}

/// Which arm comes when: every round has each once, in an order drawn anew.
pub fn order(seed: u64, row: &str, arms: usize, rounds: usize) -> Vec<Vec<usize>> {
    let mut draw = Draw::new(seed, &["control-plane bench order", row]);
    let mut order: Vec<usize> = (0..arms).collect();
    (0..rounds)
        .map(|_| {
            draw.shuffle(&mut order);
            order.clone()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readings(values: &[f64]) -> Vec<Reading> {
        values.iter().map(|v| Reading { value: *v, cpu_us: 1.0 }).collect()
    }

    #[test]
    fn a_goal_is_held_against_the_end_that_works_against_it() {
        let ours = readings(&[0.9, 1.1, 0.95, 1.05, 0.9, 1.1, 0.95, 1.05]);
        let theirs = readings(&[1.0; 8]);
        let met = |goal| ratio("x", &ours, "y", &theirs, "s", goal, 1).met;
        assert_eq!(met(Goal::AtLeast(0.8)), Some(true));
        assert_eq!(met(Goal::AtLeast(0.99)), Some(false), "the estimate is about 1, the low end is not");
        assert_eq!(met(Goal::AtMost(1.01)), Some(false));
        assert_eq!(met(Goal::Within(0.5)), Some(true));
        assert_eq!(met(Goal::Within(0.01)), Some(false));
        assert_eq!(worst("x", &ours, "s", Goal::AtMost(1.0)).met, Some(false), "one is over it");
        assert_eq!(worst("x", &ours, "s", Goal::AtMost(1.1)).met, Some(true));
    }

    #[test]
    fn where_a_reading_is_nothing_or_endless_there_is_no_ratio_no_goal_is_met_and_the_note_says_why() {
        for bad in [0.0, -3.0, f64::NAN, f64::INFINITY] {
            for (ours, theirs) in [([2.0; 4], [1.0, bad, 1.0, 1.0]), ([1.0, 1.0, bad, 1.0], [2.0; 4])] {
                for goal in [Goal::AtMost(1e9), Goal::AtLeast(1e-9), Goal::Within(1e9)] {
                    let row = ratio("x", &readings(&ours), "y", &readings(&theirs), "s", goal, 1);
                    assert_eq!(row.met, Some(false), "{row:?}");
                    assert!(!row.ratio.is_finite() && row.note.contains("in 1 of 4 rounds"), "{row:?}");
                }
            }
        }
    }

    #[test]
    fn an_end_that_few_rounds_leave_open_is_null_in_the_file_and_meets_no_goal() {
        let row = ratio("x", &readings(&[1.0, 1.0, 1.0, 9.0]), "y", &readings(&[1.0; 4]), "s", Goal::AtMost(1e9), 1);
        assert!(row.ratio.is_finite() && row.high.is_infinite(), "{row:?}");
        assert_eq!(row.met, Some(false));
        assert!(serde_json::to_value(&row).unwrap()["high"].is_null());
    }

    #[test]
    fn every_round_has_each_arm_once_in_orders_that_differ() {
        let order = order(7, "row", 3, 20);
        assert!(order.iter().all(|round| (0..3).all(|arm| round.contains(&arm))));
        assert!(order.iter().any(|round| *round != order[0]));
    }
}
