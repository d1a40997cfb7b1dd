//! Simulated hours in every test run. `cargo xtask sim` runs more of them.

use std::sync::Arc;

use drums_common::{clock::Clock as _, draw::Draw, lease::DRIFT_PPM};
use drums_sim::{
    message::{self, Setup, Temper},
    pool, quic,
    time::{HOUR, MachineClock, S, TrueTime},
};

/// Of the protocol cores on the message network.
const HOURS: u64 = 1_000;
/// With quinn in memory.
const QUIC_HOURS: u64 = 50;
const QUIC_WORLD_HOURS: u64 = 5;

fn worlds(first: u64, hours: u64, of: u64) -> Vec<Setup> {
    (first..first + hours.div_ceil(of)).map(|seed| Setup::of_seed(seed, of)).collect()
}

fn holds(report: &pool::Report) {
    println!("{report}");
    assert!(report.broken.is_empty(), "{}", report.broken.join("\n\n"));
}

#[test]
fn a_thousand_hours_of_the_protocol_cores_break_no_invariant() {
    let report = pool::run(worlds(1, HOURS, pool::WORLD_HOURS), message::run);
    holds(&report);
    assert!(report.hours >= HOURS as f64);
    // What never happened was not tried.
    for verdict in ["pass", "incomplete", "lost", "cancelled", "invalid"] {
        assert!(report.counted.by_verdict.contains_key(verdict), "no run ended as {verdict}");
    }
    assert_eq!(report.counted.faults.len(), 9, "{:?}", report.counted.faults);
    assert!(report.counted.late > 0 && report.counted.lost_hosts > 0);
}

#[test]
fn fifty_hours_with_quinn_in_memory_break_no_invariant() {
    let report = pool::run(worlds(1, QUIC_HOURS, QUIC_WORLD_HOURS), quic::run);
    holds(&report);
    assert!(report.hours >= QUIC_HOURS as f64);
    assert!(report.counted.by_verdict.contains_key("pass"));
    assert_eq!(report.counted.faults.len(), 5, "{:?}", report.counted.faults);
}

/// `cargo xtask sim -- --host-hours 100000` does ten times as many.
#[test]
fn in_ten_thousand_host_hours_of_leases_nobody_is_judged_wrongly() {
    let judged = pool::host_hours(1, 10_000).unwrap_or_else(|e| panic!("{e}"));
    println!("{judged:?}");
    assert!(judged.lost > 100 && judged.faults > 10_000 && judged.beats > 50_000_000, "{judged:?}");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = |seed| message::run(&Setup::of_seed(seed, 2)).unwrap_or_else(|e| panic!("{e}"));
    let (a, b, c) = (run(7), run(7), run(8));
    assert_eq!((a.digest, a.events), (b.digest, b.events));
    assert_ne!(a.digest, c.digest);
}

#[test]
fn seeds_that_failed_once_hold() {
    let kept = include_str!("../../seeds.txt").lines().filter(|l| !l.starts_with('#') && !l.trim().is_empty());
    let setups: Vec<Setup> = kept
        .map(|line| {
            let mut words = line.split_whitespace().map(|w| w.parse::<u64>());
            match (words.next(), words.next()) {
                (Some(Ok(seed)), Some(Ok(hours))) => Setup::of_seed(seed, hours),
                _ => panic!("seeds.txt: not a seed and hours: {line}"),
            }
        })
        .collect();
    holds(&pool::run(setups, message::run));
}

/// The invariants can break: worlds that are held to less than what they do are caught.
#[test]
fn worlds_that_are_held_to_stricter_leases_are_caught() {
    let caught = |strict: fn(&mut Setup), words: &str| {
        let setups = (1..=6).map(|seed| {
            let mut setup = Setup { temper: Temper::Rough, ..Setup::of_seed(seed, 4) };
            strict(&mut setup);
            setup
        });
        let report = pool::run(setups.collect(), message::run);
        assert!(report.broken.iter().any(|b| b.contains(words)), "never caught: {words}\n{:?}", report.broken);
    };
    caught(|s| s.held_to.dispatch_ms = 300, "its dispatch lease was renewed");
    caught(|s| s.held_to.life_ms *= 2, "was judged lost");
}

/// Calm weather: nothing is lost, late or unfinished.
#[test]
fn an_undisturbed_world_passes_every_run() {
    let calm = |seed| {
        let mut setup = Setup { temper: Temper::Never, ..Setup::of_seed(seed, 3) };
        (setup.manners.breaks, setup.manners.overruns, setup.manners.unsettled) = (0, 0, 0);
        setup
    };
    let report = pool::run((1..=4).map(calm).collect(), message::run);
    holds(&report);
    let verdicts: Vec<_> = report.counted.by_verdict.keys().copied().collect();
    assert!(verdicts.iter().all(|v| ["pass", "cancelled"].contains(v)), "{verdicts:?}");
    assert_eq!((report.counted.late, report.counted.lost_hosts), (0, 0));
    assert!(report.counted.blocks > 100 && report.took.as_micros() < u128::from(600 * S));
}

#[test]
fn two_clocks_drift_apart_by_no_more_than_clocks_may() {
    let time = Arc::new(TrueTime::default());
    let mut draw = Draw::new(1, &["clocks"]);
    let clocks: Vec<_> = (0..50).map(|_| MachineClock::draw(&time, &mut draw)).collect();
    let at: Vec<_> = clocks.iter().map(|c| c.boottime()).collect();
    time.set(HOUR);
    let passed: Vec<_> = clocks.iter().zip(&at).map(|(c, at)| c.boottime().us_since(*at)).collect();
    let (least, most) = (passed.iter().min().unwrap(), passed.iter().max().unwrap());
    assert!(most - least <= HOUR / 1_000_000 * DRIFT_PPM && most - least > HOUR / 1_000_000 * DRIFT_PPM / 2);
}
