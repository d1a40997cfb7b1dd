//! Rows of docs/field-faults.md that are shown in simulated time, each named for its row.

use std::time::Duration;

use drums_agent::net::{Link, QuietGuard};
use drums_common::{
    evidence::Body,
    ids::{ExperimentId, RunId},
    lease::{BadLeaseTimes, Health, LeaseTimes},
    spec,
    verdict::Verdict,
};
use drums_coordinator::core::run::{Phase, RunState};
use drums_sim::{
    measurer::{Manners, lock},
    message::{Setup, Temper, World},
    time::{MINUTE, MS, S},
};

/// Life leases of five minutes, shorter than any deadline of the fleet.
fn times() -> LeaseTimes {
    LeaseTimes { life_ms: 300_000, ..LeaseTimes::default() }
}

/// A world in which only what a test does goes wrong.
fn world(times: LeaseTimes) -> World {
    let manners = Manners { overruns: 0, unsettled: 0, breaks: 0, mute: false };
    let calm = Setup::of_seed(3, 1);
    let setup = Setup { temper: Temper::Never, operator: false, times, held_to: times, manners, ..calm };
    let mut world = World::new(&setup).unwrap();
    world.until(10 * S).unwrap();
    world
}

fn run(world: &mut World, experiment: u16) -> RunId {
    world.create(ExperimentId(experiment)).unwrap().expect("its hosts are connected").id
}

fn state(world: &World, run: RunId) -> RunState {
    world.home.read(|s| s.run(run)).unwrap().expect("a run").state
}

fn measuring(world: &World, host: usize) -> bool {
    let name = world.hosts[host].name.clone();
    lock(&world.truth).host(&name).measuring.is_some()
}

/// Goes on until `condition`, and fails after half an hour.
fn until(world: &mut World, what: &str, condition: impl Fn(&World) -> bool) {
    let end = world.now_us + 30 * MINUTE;
    while !condition(world) {
        assert!(world.now_us < end, "never came to hold: {what}");
        let next = world.now_us + 100 * MS;
        world.until(next).unwrap_or_else(|e| panic!("{e}"));
    }
}

fn pass(world: &mut World, us: u64) {
    let end = world.now_us + us;
    world.until(end).unwrap_or_else(|e| panic!("{e}"));
}

const H3: usize = 2;
const H4: usize = 3;

/// h4 is silent, agreed on for forty minutes, in a run that counts on it.
fn forty_quiet_minutes(world: &mut World) -> (RunId, Link, QuietGuard) {
    world.hosts[H4].agent.as_mut().unwrap().measurer.mute();
    let id = run(world, 904);
    pass(world, 5 * S);
    let link = world.hosts[H4].agent.as_ref().unwrap().link.clone();
    let silence = link.declare_quiet(Duration::from_secs(40 * 60));
    pass(world, 5 * S);
    silence.begin();
    assert!(silence.announced());
    (id, link, silence)
}

fn health(world: &World, host: usize) -> Health {
    let control = &world.coordinator.as_ref().unwrap().control;
    control.health(&world.hosts[host].name).unwrap().0
}

#[test]
fn row_05_forty_quiet_minutes_are_not_reaped_and_overrunning_them_is() {
    let mut world = world(LeaseTimes::default());
    let (id, link, silence) = forty_quiet_minutes(&mut world);
    pass(&mut world, 39 * MINUTE);
    assert!(matches!(health(&world, H4), Health::Quiet { .. }), "{:?}", health(&world, H4));
    assert!(!link.life_expired() && !silence.overrun());
    assert!(state(&world, id).live());
    // Longer than declared, and than a life lease: its bound is over.
    pass(&mut world, 2 * MINUTE);
    assert!(silence.overrun() && link.life_expired());
    let state = state(&world, id);
    assert_eq!((state.verdict(), state.hosts[2].lost), (Some(Verdict::Lost), true), "{:?}", state.ending);
}

#[test]
fn row_05_a_coordinator_that_is_restarted_meanwhile_does_not_reap_them_either() {
    let mut world = world(LeaseTimes::default());
    let (id, link, silence) = forty_quiet_minutes(&mut world);
    pass(&mut world, 2 * MINUTE);
    world.kill_coordinator(5 * S).unwrap();
    pass(&mut world, 37 * MINUTE);
    assert!(!link.life_expired() && !silence.overrun());
    assert!(matches!(health(&world, H4), Health::Silent { .. }), "{:?}", health(&world, H4));
    drop(silence);
    until(&mut world, "it is heard again", |w| health(w, H4) == Health::Alive);
    let state = state(&world, id);
    assert!(state.live() && !state.hosts[2].lost, "{:?}", state.ending);
}

#[test]
fn row_09_a_partitioned_host_begins_nothing_stops_by_itself_and_its_late_records_are_marked() {
    let mut world = world(times());
    let id = run(&mut world, 903);
    until(&mut world, "h3 measures", |w| measuring(w, H3));
    let cut = world.now_us;
    (world.paths[H3].up_cut_until, world.paths[H3].down_cut_until) = (u64::MAX, u64::MAX);
    pass(&mut world, 11 * S);
    let link = world.hosts[H3].agent.as_ref().unwrap().link.clone();
    assert!(!link.may_take_new_block(), "past the dispatch lease");
    let begun = lock(&world.truth).counted.blocks;
    let host = world.hosts[H3].name.clone();
    // Past its life lease, by the host's own clock, and before the coordinator judges it.
    let gone = world.now_us - cut;
    pass(&mut world, 5 * MINUTE - gone + 5 * S);
    assert!(link.life_expired() && !measuring(&world, H3));
    assert_eq!(lock(&world.truth).counted.blocks, begun, "no new block");
    pass(&mut world, MINUTE);
    let records = world.spool(H3).unwrap().run(id).unwrap().records().unwrap();
    assert!(matches!(records.last().unwrap().body, Body::Closed(_)), "it undid the run by itself");
    until(&mut world, "the run closes", |w| !state(w, id).live());
    assert_eq!(state(&world, id).phase, Phase::Closed { verdict: Verdict::Lost });
    let rows = |w: &World| w.home.read(|s| s.evidence(id, &host, 0, 1_000)).unwrap();
    let before = rows(&world).len();
    assert!(before < records.len(), "something was left to send");
    world.paths[H3].heal();
    until(&mut world, "everything arrives", |w| rows(w).len() == records.len());
    assert!(rows(&world)[before..].iter().all(|r| r.late), "what arrives after the fence is late");
    assert!(rows(&world)[..before].iter().all(|r| !r.late));
    assert_eq!(state(&world, id).verdict(), Some(Verdict::Lost), "and changes nothing");
}

#[test]
fn row_11_a_coordinator_that_was_away_for_three_leases_declares_nobody_dead() {
    let three = 3 * 300 * S;
    for stalled in [true, false] {
        let mut world = world(times());
        let ids = [run(&mut world, 902), run(&mut world, 905)];
        until(&mut world, "both measure", |w| measuring(w, H3) && measuring(w, H4));
        if stalled {
            world.stall_coordinator(three);
        } else {
            world.kill_coordinator(three).unwrap();
        }
        pass(&mut world, three);
        // A full grace and more: whoever was silent is heard by then.
        pass(&mut world, 3 * MINUTE);
        assert_eq!(lock(&world.truth).counted.lost_hosts, 0);
        for id in ids {
            let state = state(&world, id);
            assert!(state.hosts.iter().all(|h| !h.lost), "{:?}", state.ending);
        }
        let control = &world.coordinator.as_ref().unwrap().control;
        for h in &world.hosts {
            assert_eq!(control.health(&h.name).unwrap().0, Health::Alive, "{}", h.name);
        }
    }
}

/// How long the others' blocks took, from the first grant to the last end.
fn took(world: &World, id: RunId, host: &str) -> (usize, u64) {
    let state = state(world, id);
    let h = state.hosts.iter().find(|h| h.host.as_str() == host).unwrap();
    let first = state.started.unwrap();
    (h.ended.len(), h.ended.iter().map(|e| e.at.ms_since(first)).max().unwrap_or(0))
}

#[test]
fn row_17_a_host_that_takes_orders_and_never_answers_slows_nobody() {
    // Alone in its run, and in a run with others after it was prepared.
    let with = |mute: bool| {
        let mut world = world(LeaseTimes::default());
        let (own, others) = (run(&mut world, 905), run(&mut world, 902));
        if mute {
            world.hosts[H4].agent.as_mut().unwrap().measurer.mute();
        }
        until(&mut world, "the others end", |w| !state(w, others).live());
        assert_eq!(state(&world, others).verdict(), Some(Verdict::Pass));
        assert!(!mute || state(&world, own).verdict() != Some(Verdict::Pass));
        took(&world, others, "h3")
    };
    let ((n, alone), (m, beside)) = (with(false), with(true));
    assert_eq!(n, m);
    assert!(alone.abs_diff(beside) <= alone / 20 + 2_000, "{alone} ms alone, {beside} ms beside a mute host");

    let in_one_run = |mute: bool| {
        let mut world = world(LeaseTimes::default());
        let id = run(&mut world, 904);
        until(&mut world, "all are prepared", |w| state(w, id).phase == Phase::Running);
        if mute {
            world.hosts[H4].agent.as_mut().unwrap().measurer.mute();
        }
        until(&mut world, "h3 has done its blocks", |w| took(w, id, "h3").0 == 5);
        let h3 = took(&world, id, "h3").1;
        // Its deadline, and what unwinding may take then.
        pass(&mut world, 48 * MINUTE);
        let verdict = state(&world, id).verdict();
        assert_eq!(verdict, Some(if mute { Verdict::Incomplete } else { Verdict::Pass }), "by the deadline");
        (h3, took(&world, id, "h1").0)
    };
    let ((alone, n), (beside, m)) = (in_one_run(false), in_one_run(true));
    assert_eq!((n, m), (5, 5));
    assert!(alone.abs_diff(beside) <= alone / 20 + 2_000, "{alone} ms alone, {beside} ms beside a mute host");
}

#[test]
fn row_18_zero_and_absent_limits_are_refused_or_mean_zero() {
    // Leases.
    let zero: [fn(&mut LeaseTimes); 6] = [
        |t| t.beat_ms = 0,
        |t| t.dispatch_ms = 0,
        |t| t.life_ms = 0,
        |t| t.silent_ms = 0,
        |t| t.quiet_slack_ms = 0,
        |t| t.grace_ms = 0,
    ];
    for set in zero {
        let mut times = LeaseTimes::default();
        set(&mut times);
        assert!(matches!(times.validate(), Err(BadLeaseTimes::Zero(_))));
    }
    // A spec's numbers: refused at zero and when absent, but for those that mean what they say.
    let good = include_str!("../../../../coordinator/src/tasks/data/two-arms.toml");
    assert!(spec::parse("good.toml", good.as_bytes()).is_ok());
    let numbers: Vec<&str> = good
        .lines()
        .filter(|l| l.split_once(" = ").is_some_and(|(_, v)| v.trim().starts_with(|c: char| c.is_ascii_digit())))
        .collect();
    assert!(numbers.len() >= 13, "{numbers:?}");
    for line in numbers {
        let (name, _) = line.split_once(" = ").unwrap();
        let with = |new: &str| spec::parse("changed.toml", good.replacen(line, new, 1).as_bytes());
        let at_zero = with(&format!("{name} = 0"));
        // No overhead, any seed: none of them bounds anything.
        let means_zero = ["vmm_memory_overhead_mib", "seed"].contains(&name);
        assert_eq!(at_zero.is_ok(), means_zero, "{name} = 0");
        if let Ok(parsed) = with("") {
            // Absent is a default that bounds.
            let e = parsed.experiment;
            assert!(e.deadline_ms > 0 && e.design.max_runs > 0 && e.design.ready_timeout_ms > 0, "{name} absent");
            assert!(e.limits.memory_bytes > 0 && e.limits.cpu_milli > 0 && e.hosts.count > 0, "{name} absent");
        }
    }
}
