//! What must not kill: the fault of EXP-011, where a host's own backstop ended it while it booted.

use anyhow::Result;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha20Rng;

use super::{
    cell::{Fault, LAYERS, Moment, SOON_S, Strike, able},
    row::{How, Row},
    rows::all,
    world::{Jitter, Outcome, Plan, Site, Trial},
};

/// Everything one after the other, and time after it.
const LIFE_S: u64 = 150 * 60;
const BOOT_S: u64 = 6 * 60;
const QUIET_S: u64 = 40 * 60;
/// The coordinator pays attention again for ten seconds before it judges anybody: two of those.
const GRACES_S: u64 = 20;
/// Nearly a life lease, of thirty minutes: a laptop that was closed.
const NEARLY_A_LEASE_S: u64 = 28 * 60;
/// When the coordinator goes away: after boot and silence.
const AWAY_AT_S: u64 = 70 * 60;

/// Faults that concern nothing that a healthy host lives by.
const ELSEWHERE: [Fault; 3] = [Fault::ScheduleMissing, Fault::ScheduleRole, Fault::Sweeper];

fn trials() -> Vec<(Vec<&'static str>, Trial)> {
    let boot = Trial { boot_s: Some(BOOT_S), ..Trial::default() };
    let quiet = Trial { quiet_s: Some(QUIET_S), ..Trial::default() };
    let away = |at_s, s| Trial { outage_s: Some((at_s, s)), ..Trial::default() };
    vec![
        (vec!["boot of 6 minutes"], boot),
        (vec!["silence of 40 minutes"], quiet),
        (vec!["coordinator away for 20 s, two grace periods"], away(AWAY_AT_S, GRACES_S)),
        (vec!["coordinator away for 28 minutes"], away(AWAY_AT_S, NEARLY_A_LEASE_S)),
        (vec!["boot of 6 minutes", "coordinator away meanwhile"], Trial { outage_s: Some((60, BOOT_S)), ..boot }),
        (
            vec!["silence of 40 minutes", "coordinator away within it"],
            Trial { outage_s: Some((30 * 60, NEARLY_A_LEASE_S)), ..quiet },
        ),
        (
            vec!["boot of 6 minutes", "silence of 40 minutes", "coordinator away for 28 minutes"],
            Trial { boot_s: Some(BOOT_S), quiet_s: Some(QUIET_S), outage_s: Some((AWAY_AT_S, NEARLY_A_LEASE_S)) },
        ),
    ]
}

/// Each of them alone, and with a fault elsewhere.
pub fn rows(site: &Site, seed: u64, draws: u32) -> Result<Vec<Row>> {
    let mut draw = ChaCha20Rng::seed_from_u64(seed);
    let mut rows = Vec::new();
    let mut plans = Vec::new();
    for (names, trial) in trials() {
        for fault in [None].into_iter().chain(ELSEWHERE.map(Some)) {
            let strikes: Vec<Strike> = fault.into_iter().map(|f| (f, Moment::Working)).collect();
            let names: Vec<String> =
                names.iter().map(ToString::to_string).chain(fault.map(|f| f.to_string())).collect();
            let jitters = [Jitter::SLOWEST].into_iter().chain((0..draws).map(|_| Jitter::drawn(draw.random())));
            let of_row: Vec<Plan> = jitters
                .map(|jitter| Plan { life_s: LIFE_S, strikes: strikes.clone(), trial, left: LAYERS.into(), jitter })
                .collect();
            rows.push((names, of_row.len()));
            plans.extend(of_row);
        }
    }
    let outcomes = all(plans.iter().collect(), site)?;
    let mut done = plans.iter().zip(outcomes);
    Ok(rows.into_iter().map(|(names, n)| row(names, &done.by_ref().take(n).collect::<Vec<_>>())).collect())
}

/// Dead in time, and not a second before its deadline.
fn wrong(trial: &Trial, outcome: &Outcome) -> Option<String> {
    let Some(death) = outcome.death else { return Some("it outlives its bound".to_owned()) };
    if death.after_deadline_s < 0 {
        return Some(format!("the {} killed it {} s before its deadline", death.by, -death.after_deadline_s));
    }
    if outcome.instances != 1 {
        return Some(format!("it took {} instances: a healthy one was given up", outcome.instances));
    }
    let silent_s =
        trial.quiet_s.max(trial.outage_s.map(|(from_s, s)| if from_s < BOOT_S { 0 } else { s })).unwrap_or(0);
    let booted = outcome.first_beat_s.is_some_and(|s| s >= trial.boot_s.unwrap_or(0));
    if !booted || outcome.longest_silence_s < silent_s {
        return Some(format!("it was not put through it: {outcome:?}"));
    }
    let late = death.after_deadline_s > i64::try_from(SOON_S).unwrap_or(i64::MAX);
    late.then(|| format!("dead {} s after the deadline, {SOON_S} s is the bound", death.after_deadline_s))
}

fn row(names: Vec<String>, runs: &[(&Plan, Outcome)]) -> Row {
    // The earliest end is the worst one here.
    let earliest = |(_, o): &&(&Plan, Outcome)| o.death.map_or(i64::MIN, |d| d.after_deadline_s);
    let bad = runs.iter().find_map(|r| Some((r, wrong(&r.0.trial, &r.1)?)));
    let worst = bad.as_ref().map(|(r, _)| *r).or_else(|| runs.iter().min_by_key(earliest));
    let death = worst.and_then(|(_, o)| o.death);
    let wrong = bad.map_or_else(String::new, |(_, wrong)| wrong);
    Row {
        faults: names,
        must_kill: None,
        able: worst.map(|(p, _)| able(&p.strikes).into_iter().collect()).unwrap_or_default(),
        killed_by: death.map(|d| d.by),
        killed_after_deadline_s: death.map(|d| d.after_deadline_s),
        bound_s: SOON_S,
        in_bound: wrong.is_empty() && worst.is_some(),
        how: How::Simulated,
        disabled: Vec::new(),
        struck: worst.map(|(p, _)| p.strikes.clone()).unwrap_or_default(),
        runs: runs.len(),
        wrong,
    }
}
