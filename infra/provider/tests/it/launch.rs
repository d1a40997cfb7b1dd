//! The launch against a cloud in memory, killed at every line.

use drums_common::clock::Micros;
use drums_provider::{
    ask::RawHost,
    books::Books,
    cloud::InstanceState,
    failure::FailureKind,
    gates,
    launch::{Guest, Launch, State, Why},
};
use proptest::prelude::*;

use super::{
    coordinator::{Coordinator, LIFE_MS, ready},
    support::{self, MINUTE_MS, Run, START, World},
};

/// One way for a launch to go, and whether a host comes of it.
type Story = (&'static str, fn(&mut Coordinator), bool);

fn stories() -> [Story; 20] {
    use FailureKind::{Capacity, Denied, NotSent, Throttled, TokenReused};
    [
        ("plain", |_| {}, true),
        ("the reply is lost", |c| c.world.runs.extend([Run::ReplyLost]), true),
        ("the reply is lost twice", |c| c.world.runs.extend([Run::Lost, Run::ReplyLost]), true),
        ("it is done after nobody waits", |c| c.world.runs.extend([Run::Late]), true),
        ("never arrived, then no room", |c| c.world.runs.extend([Run::Lost, Run::Fails(Capacity)]), true),
        ("late, then no room", |c| c.world.runs.extend([Run::Late, Run::Fails(Capacity)]), true),
        ("late, then denied", |c| c.world.runs.extend([Run::Late, Run::Fails(Denied)]), false),
        ("token used with other arguments", |c| c.world.runs.extend([Run::Fails(TokenReused)]), true),
        ("throttled", |c| c.world.runs.extend([Run::Fails(Throttled), Run::Fails(NotSent)]), true),
        ("no room in one subnet", |c| c.world.runs.extend([Run::Fails(Capacity)]), true),
        ("no room anywhere", |c| c.world.runs.extend([Run::Fails(Capacity); 100]), false),
        ("denied", |c| c.world.runs.extend([Run::Fails(Denied)]), false),
        ("shown late", |c| c.world.shown_after_ms = 90_000, true),
        (
            "shown late and the reply lost",
            |c| {
                c.world.shown_after_ms = 90_000;
                c.world.runs.extend([Run::ReplyLost]);
            },
            true,
        ),
        ("nested virtualisation dropped", |c| c.world.drops_nested = true, false),
        ("the schedule is denied", |c| c.world.schedule_fails = Some(Denied), false),
        ("the schedule is throttled for ever", |c| c.world.schedule_fails = Some(Throttled), false),
        ("not wanted any more", |c| c.unwanted = true, false),
        ("no guest", |c| c.guest = Guest::Failed("no /dev/kvm".to_owned()), false),
        ("a slow boot", |c| c.boot_ms = 6 * MINUTE_MS, true),
    ]
}

#[test]
fn row_03_killed_at_every_line_of_a_launch_there_is_one_instance_or_none() {
    for (name, prepare, host) in stories() {
        let fresh = || {
            let mut c = Coordinator::new(World::new());
            prepare(&mut c);
            c
        };
        let mut whole = fresh();
        whole.work().unwrap();
        whole.check(name);
        assert_eq!(matches!(whole.launch.state(), State::Ready { .. }), host, "{name}: {:?}", whole.launch.state());
        // Waiting turns are alike: of long stories the first lines and a sample of the rest.
        for line in (0..whole.lines).filter(|l| *l < 150 || l % 29 == 0) {
            let mut c = fresh();
            c.fuse = Some(line);
            assert!(c.work().is_err(), "{name}: not killed at line {line} of {}", whole.lines);
            c.fuse = None;
            // It was away for a while.
            c.world.pass(7_000);
            c.work().unwrap();
            c.check(&format!("{name}, killed at line {line}"));
            // An answer that was given to a dead one is not given again.
            let same = fresh().world.runs.is_empty();
            assert!(!same || matches!(c.launch.state(), State::Ready { .. }) == host, "{name}, line {line}");
        }
    }
}

#[test]
fn cancelled_while_it_was_dead_nothing_is_left() {
    for (name, prepare, _) in stories() {
        for line in 0..60 {
            let mut c = Coordinator::new(World::new());
            prepare(&mut c);
            c.fuse = Some(line);
            if c.work().is_ok() {
                break;
            }
            c.fuse = None;
            c.unwanted = true;
            c.work().unwrap();
            c.check(&format!("{name}, killed at line {line} and cancelled"));
            assert!(c.launch.is_closed(), "{name}, line {line}");
        }
    }
}

fn run() -> impl Strategy<Value = Run> {
    use FailureKind::{AlreadyDone, Capacity, Invalid, Throttled, Unknown};
    let kinds = [Capacity, Throttled, Unknown, AlreadyDone, Invalid];
    prop_oneof![
        Just(Run::Done),
        Just(Run::ReplyLost),
        Just(Run::Late),
        Just(Run::Lost),
        proptest::sample::select(kinds.to_vec()).prop_map(Run::Fails),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn whatever_fails_and_whenever_it_is_killed_there_is_one_instance_or_none(
        runs in prop::collection::vec(run(), 0..8),
        kills in prop::collection::vec(0u32..60, 0..4),
        shown_after_ms in 0u64..120_000,
        cancel in any::<bool>(),
    ) {
        let mut c = Coordinator::new(World::new());
        c.world.runs.extend(runs);
        c.world.shown_after_ms = shown_after_ms;
        for kill in kills {
            c.fuse = Some(kill);
            let _ = c.work();
            c.world.pass(3_000);
        }
        c.fuse = None;
        c.unwanted = cancel;
        // A settled launch that was cancelled has one more thing to do.
        c.turn().unwrap();
        c.work().unwrap();
        c.check("in the end");
    }
}

#[test]
fn row_04_a_host_whose_timer_could_not_be_armed_is_ended_at_once_and_never_ready() {
    for kind in [FailureKind::Denied, FailureKind::Throttled, FailureKind::Unknown] {
        let mut c = Coordinator::new(World::new());
        c.world.schedule_fails = Some(kind);
        c.boot_ms = 0;
        for _ in 0..10_000 {
            c.turn().unwrap();
            c.world.pass(1_000);
            assert!(!matches!(c.launch.state(), State::Armed { .. } | State::Enrolled { .. } | State::Ready { .. }));
            if c.settled() {
                break;
            }
        }
        c.check("not armed");
        assert!(matches!(c.launch.state(), State::Closed { why: Why::NotArmed(_) }), "{:?}", c.launch.state());
        let took_ms = c.world.now.ms_since(START);
        assert!(took_ms <= c.patience.arm_ms + 10_000, "{kind:?}: {took_ms} ms");
    }
}

#[test]
fn row_04_of_a_batch_the_host_that_cannot_be_armed_is_ended_and_each_other_is_ready_and_armed() {
    let mut raw = support::raw_ask(LIFE_MS);
    let one = raw.hosts[0].clone();
    raw.hosts = ["h1", "h2", "h3"].map(|name| RawHost { name: name.to_owned(), ..one.clone() }).to_vec();
    let ask = raw.read().unwrap();
    let (table, cleared) = gates::judge(&ask, &support::limits(), &support::facts(&ask));
    let launches = cleared.unwrap_or_else(|| panic!("{table}")).confirm(&Books::default(), START).unwrap();
    let cases = [FailureKind::Denied, FailureKind::Throttled, FailureKind::Unknown];
    for (unarmed, kind) in (0..launches.len()).flat_map(|k| cases.map(|kind| (k, kind))) {
        let with = |launch: &Launch| Coordinator { launch: launch.clone(), ..Coordinator::new(World::default()) };
        let mut all: Vec<Coordinator> = launches.iter().map(with).collect();
        // They share one cloud.
        let mut world = World::new();
        while !all.iter().all(Coordinator::settled) {
            for (k, c) in all.iter_mut().enumerate() {
                c.world = std::mem::take(&mut world);
                c.world.schedule_fails = (k == unarmed).then_some(kind);
                c.turn().unwrap();
                world = std::mem::take(&mut c.world);
                let armed =
                    matches!(c.launch.state(), State::Armed { .. } | State::Enrolled { .. } | State::Ready { .. });
                assert!(k != unarmed || !armed, "{:?}", c.launch.state());
            }
            world.pass(1_000);
            assert!(world.now.ms_since(START) < 10 * MINUTE_MS, "not settled");
        }
        assert_eq!(world.alive().len(), 2);
        for (k, c) in all.iter().enumerate() {
            match c.launch.state() {
                State::Closed { why: Why::NotArmed(_) } => assert_eq!(k, unarmed),
                State::Ready { instance } => {
                    let schedule = &world.schedules[&instance.token().unwrap().to_string()];
                    assert!(k != unarmed && schedule.instance == *instance.id());
                }
                other => panic!("host {k}: {other:?}"),
            }
        }
    }
}

#[test]
fn row_19_a_slow_boot_is_counted_from_running_and_not_from_the_request() {
    let mut c = Coordinator::new(World::new());
    c.boot_ms = u64::MAX;
    // It waits for a machine for ten minutes before it runs.
    let mut began: Option<Micros> = None;
    while c.launch.host().attempt() == 1 && !c.launch.is_closed() {
        c.turn().unwrap();
        let waits = c.world.now.ms_since(START) < 10 * MINUTE_MS;
        for instance in &mut c.world.instances {
            if !instance.state.is_going() {
                instance.state = if waits { InstanceState::Pending } else { InstanceState::Running };
                began = began.or((!waits).then_some(c.world.now));
            }
        }
        c.world.pass(1_000);
    }
    let boot_ms = c.world.now.ms_since(began.unwrap());
    assert!((c.patience.boot_ms..c.patience.boot_ms + 5_000).contains(&boot_ms), "{boot_ms} ms after running");
}

#[test]
fn a_coordinator_that_was_away_does_not_hold_the_time_against_a_booting_host() {
    let mut c = Coordinator::new(World::new());
    c.boot_ms = 6 * MINUTE_MS;
    while !matches!(c.launch.state(), State::Armed { running: Some(_), .. }) {
        c.turn().unwrap();
        c.world.pass(1_000);
    }
    // It boots meanwhile, and has nobody to tell.
    c.boot_ms = u64::MAX;
    c.world.pass(20 * MINUTE_MS);
    c.attentive_since = c.world.now;
    for _ in 0..10 {
        c.turn().unwrap();
        c.world.pass(1_000);
    }
    c.boot_ms = 0;
    c.work().unwrap();
    c.check("heard at last");
    assert_eq!(c.launch.host().attempt(), 1);
}

#[test]
fn an_instance_that_is_not_shown_yet_is_not_absent() {
    let mut c = Coordinator::new(World::new());
    c.world.shown_after_ms = c.patience.appear_ms - 10_000;
    c.world.runs.extend([Run::ReplyLost]);
    c.work().unwrap();
    c.check("shown at last");
    assert_eq!(c.world.tokens.len(), 1, "no second token was called with");
}

#[test]
fn what_is_ready_is_not_doubted_because_it_is_not_shown_for_a_while() {
    let mut c = ready();
    c.world.shown_after_ms = u64::MAX;
    for _ in 0..60 {
        c.turn().unwrap();
        c.world.pass(MINUTE_MS);
    }
    assert!(matches!(c.launch.state(), State::Ready { .. }));
    assert!(c.reaps.is_empty());
}

#[test]
fn a_launch_is_stored_and_read_again_as_it_was_and_its_user_data_is_not_printed() {
    let launch = ready().launch;
    let text = serde_json::to_string(&launch).unwrap();
    assert_eq!(serde_json::from_str::<Launch>(&text).unwrap(), launch);
    assert!(!format!("{launch:?}").contains("#!/bin/sh"));
}
