//! The matrix itself: every cell with all layers, and with each able one alone.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Result, anyhow};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha20Rng;

use super::{
    cell::{Cell, LAYERS, Layer, Moment, Strike, able, bound_s, disarms},
    row::{How, Row},
    world::{self, Jitter, Outcome, Plan, Site, Trial},
};

/// Longer than a life lease and its time to finish, so that an orphan is seen to be ended by it before its deadline.
pub const LIFE_S: u64 = 60 * 60;
/// Drawn faults strike after every boot.
const BOOTED_S: u64 = 600;

/// One run of a row.
struct Run {
    plan: Plan,
    /// The layer that is left alone.
    alone: Option<Layer>,
    able: BTreeSet<Layer>,
    bound_s: u64,
}

pub fn rows(site: &Site, cells: &[Cell], seed: u64, draws: u32) -> Result<Vec<Row>> {
    let mut draw = ChaCha20Rng::seed_from_u64(seed);
    let runs: Vec<Vec<Run>> = cells.iter().map(|c| runs(c, &mut draw, draws)).collect();
    let outcomes = all(runs.iter().flatten().map(|r| &r.plan).collect(), site)?;
    let mut outcomes = outcomes.into_iter();
    let mut rows = Vec::new();
    for (cell, runs) in cells.iter().zip(&runs) {
        let done: Vec<(&Run, Outcome)> = runs.iter().zip(outcomes.by_ref()).collect();
        let which = [None].into_iter().chain(LAYERS.map(Some));
        for alone in which {
            let these: Vec<_> = done.iter().filter(|(r, _)| r.alone == alone).collect();
            rows.extend(row(cell, alone, &these));
        }
    }
    Ok(rows)
}

fn runs(cell: &Cell, draw: &mut ChaCha20Rng, draws: u32) -> Vec<Run> {
    let fixed = cell.strikes().into_iter().map(|s| (s, Jitter::SLOWEST));
    let drawn = (0..draws).map(|_| {
        let at = |f: &_| (*f, Moment::At(draw.random_range(BOOTED_S..LIFE_S)));
        let strikes: Vec<Strike> = cell.faults.iter().map(at).collect();
        (strikes, Jitter::drawn(draw.random()))
    });
    let mut out = Vec::new();
    for (strikes, jitter) in fixed.chain(drawn.collect::<Vec<_>>()) {
        let able = able(&strikes);
        let mut with = |alone: Option<Layer>| {
            let left = alone.map_or_else(|| LAYERS.into(), |l| BTreeSet::from([l]));
            let bound_s = alone.map_or_else(|| bound_s(&strikes), Layer::bound_s);
            let plan = Plan { life_s: LIFE_S, strikes: strikes.clone(), trial: Trial::default(), left, jitter };
            out.push(Run { plan, alone, able: able.clone(), bound_s });
        };
        with(None);
        LAYERS.into_iter().for_each(|l| with(Some(l)));
    }
    out
}

/// What is wrong with a run, if anything is.
fn wrong(run: &Run, outcome: &Outcome) -> Option<String> {
    match (run.alone, &outcome.death) {
        // Taken away by the faults: from then on it is not to kill.
        (Some(layer), death) if !run.able.contains(&layer) => {
            let by_it = death.as_ref().filter(|d| d.by == layer)?;
            let gone = outcome.struck.iter().filter(|(s, _)| disarms(*s).contains(&layer)).map(|(_, at_s)| *at_s).min();
            let after = gone.is_some_and(|at_s| by_it.after_deadline_s > at_s);
            after.then(|| format!("the faults were to disarm the {layer}, and it killed all the same"))
        }
        (_, None) => Some("it outlives its bound".to_owned()),
        (Some(layer), Some(d)) if d.by != layer => Some(format!("the {} killed, which is switched off", d.by)),
        (_, Some(d)) if d.after_deadline_s > i64::try_from(run.bound_s).unwrap_or(i64::MAX) => {
            Some(format!("dead {} s after the deadline, {} s is the bound", d.after_deadline_s, run.bound_s))
        }
        _ => None,
    }
}

/// `None` where no run was of an able layer: that layer alone is no row.
fn row(cell: &Cell, alone: Option<Layer>, runs: &[&(&Run, Outcome)]) -> Option<Row> {
    // Slack to the bound, and past it all that is wrong first.
    let able = runs.iter().filter(|(r, _)| alone.is_none_or(|l| r.able.contains(&l)));
    let slack = |(run, outcome): &(&Run, Outcome)| {
        let bound_s = i64::try_from(run.bound_s).unwrap_or(i64::MAX);
        outcome.death.as_ref().map_or(i64::MIN, |d| bound_s.saturating_sub(d.after_deadline_s))
    };
    let bad = runs.iter().find_map(|r| Some((*r, wrong(r.0, &r.1)?)));
    let (worst, wrong) = match bad {
        Some((run, wrong)) => (run, wrong),
        None => (able.min_by_key(|r| slack(r)).copied()?, String::new()),
    };
    let (run, outcome) = worst;
    Some(Row {
        faults: cell.faults.iter().map(ToString::to_string).collect(),
        must_kill: alone,
        able: run.able.iter().copied().collect(),
        killed_by: outcome.death.map(|d| d.by),
        killed_after_deadline_s: outcome.death.map(|d| d.after_deadline_s),
        bound_s: run.bound_s,
        in_bound: wrong.is_empty(),
        how: How::Simulated,
        disabled: run.plan.disabled(),
        struck: run.plan.strikes.clone(),
        runs: runs.len(),
        wrong,
    })
}

/// Every plan, on every processor; outcomes in the plans' order.
pub fn all(plans: Vec<&Plan>, site: &Site) -> Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((i, plan)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            plans.get(i).map(|p| (i, *p))
        } {
            done.push((i, world::run(plan, site)?));
        }
        Ok(done)
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(4);
    let mut done = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let parts = handles.into_iter().map(|h| h.join().map_err(|_| anyhow!("a simulation panicked"))?);
        parts.collect::<Result<Vec<Vec<(usize, Outcome)>>>>()
    })?
    .concat();
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, outcome)| outcome).collect())
}
