//! Interleaved series: every round runs each contestant once, in an order drawn anew, and rounds are the paired units.

use anyhow::{Context as _, Result};
use drums_analysis::stats::{geometric_mean_ratio, ratio::log_ratio};
use drums_common::draw::Draw;
use serde::Serialize;

/// One thing that is timed. `run` does it once and says how many milliseconds it took.
pub struct Contestant<'a> {
    pub name: &'static str,
    pub run: Box<dyn FnMut() -> Result<f64> + 'a>,
}

/// Milliseconds per contestant, in the order of rounds.
pub fn interleave(
    contestants: &mut [Contestant<'_>],
    warmups: usize,
    rounds: usize,
    seed: u64,
) -> Result<Vec<Vec<f64>>> {
    let mut draw = Draw::new(seed, &["bench order"]);
    let mut times = vec![Vec::with_capacity(rounds); contestants.len()];
    let mut order: Vec<usize> = (0..contestants.len()).collect();
    for round in 0..warmups + rounds {
        draw.shuffle(&mut order);
        for &i in &order {
            let contestant = &mut contestants[i];
            let ms = (contestant.run)().with_context(|| format!("{} failed in round {round}", contestant.name))?;
            if round >= warmups {
                times[i].push(ms);
            }
        }
    }
    Ok(times)
}

/// A bench row: how long something takes over how long its peer takes, or where its time goes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// Geometric mean of the rounds' ratios; of a phase, the median of its share of the whole.
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    pub n: usize,
    /// Which end of the interval is held against the goal.
    pub bound: &'static str,
    pub goal: Option<f64>,
    pub met: Option<bool>,
    pub unit: &'static str,
    pub peer: String,
    /// Median of what is named, milliseconds.
    pub median_ms: f64,
    /// Median of the peer, milliseconds.
    pub peer_median_ms: f64,
}

const ALPHA: f64 = 0.05;

pub fn ratio_row(name: &str, ours: &[f64], peer: &str, theirs: &[f64], goal: Option<f64>, seed: u64) -> Row {
    let logs: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| log_ratio(*a, *b)).collect();
    let found = geometric_mean_ratio(&logs, ALPHA, Draw::new(seed, &["bench ratio", name]));
    let (low, high) = (found.interval.low, found.interval.high);
    Row {
        name: name.to_owned(),
        ratio: found.ratio.unwrap_or(f64::NAN),
        low,
        high,
        n: found.n,
        bound: "high",
        goal,
        met: goal.map(|g| high <= g),
        unit: "ratio",
        peer: peer.to_owned(),
        median_ms: median(ours),
        peer_median_ms: median(theirs),
    }
}

/// A phase of a timeline as its share of the whole, with the quartiles of that share as its range.
pub fn phase_row(name: &str, phase: &[f64], whole: &str, wholes: &[f64]) -> Row {
    let mut shares: Vec<f64> = phase.iter().zip(wholes).map(|(p, w)| p / w).collect();
    shares.sort_by(f64::total_cmp);
    Row {
        name: name.to_owned(),
        ratio: median(&shares),
        low: shares.get(shares.len() / 4).copied().unwrap_or(f64::NAN),
        high: shares.get(shares.len() * 3 / 4).copied().unwrap_or(f64::NAN),
        n: shares.len(),
        bound: "quartiles",
        goal: None,
        met: None,
        unit: "share",
        peer: whole.to_owned(),
        median_ms: median(phase),
        peer_median_ms: median(wholes),
    }
}

pub fn median(values: &[f64]) -> f64 {
    drums_analysis::stats::median(values).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_runs_each_once_in_orders_that_differ() {
        let log = std::cell::RefCell::new(Vec::new());
        let log = &log;
        let contestant = |name: &'static str| Contestant {
            name,
            run: Box::new(move || {
                log.borrow_mut().push(name);
                Ok(1.0)
            }),
        };
        let times = interleave(&mut [contestant("a"), contestant("b")], 2, 20, 7).unwrap();
        assert_eq!(times.iter().map(Vec::len).collect::<Vec<_>>(), [20, 20]);
        let log = log.borrow();
        let firsts: std::collections::BTreeSet<_> = log.chunks(2).map(|c| c[0]).collect();
        assert!(log.chunks(2).all(|c| c[0] != c[1]) && firsts.len() == 2);
    }

    #[test]
    fn a_goal_is_met_only_by_the_upper_bound() {
        let theirs: Vec<f64> = (0..40).map(|i| 10.0 + f64::from(i % 7)).collect();
        let ours: Vec<f64> = theirs.iter().enumerate().map(|(i, x)| x * if i % 2 == 0 { 0.45 } else { 0.55 }).collect();
        let row = |goal| ratio_row("x", &ours, "y", &theirs, Some(goal), 1);
        assert_eq!(row(0.6).met, Some(true));
        assert_eq!(row(row(0.6).ratio).met, Some(false));
    }
}
