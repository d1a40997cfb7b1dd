//! One attempt after another: when there is a next one, and what it does not share.

use drums_provider::{
    cloud::InstanceState,
    failure::FailureKind,
    launch::{Act, Reply, State, Why},
    spend::Until,
};

use super::{
    coordinator::{Coordinator, LIFE_MS, ready, turns},
    support::{MINUTE_MS, Run, START, World},
};

#[test]
fn a_relaunch_inherits_the_deadline_and_nothing_else_is_shared() {
    let mut c = Coordinator::new(World::new());
    c.boot_ms = 5 * MINUTE_MS;
    let deadline = c.launch.host().deadline();
    while !matches!(c.launch.state(), State::Armed { .. }) {
        c.turn().unwrap();
        c.world.pass(1_000);
    }
    c.world.instances[0].state = InstanceState::Terminated;
    c.work().unwrap();
    c.check("relaunched");
    assert_eq!((c.launch.host().attempt(), c.launch.host().deadline()), (2, deadline));
    assert_eq!(c.world.tokens.len(), 2);
    assert_eq!(c.reaps.len(), 1, "the first one has its receipt");
}

#[test]
fn no_other_instance_is_launched_before_the_one_given_up_is_seen_going() {
    let mut c = Coordinator::new(World::new());
    c.boot_ms = u64::MAX;
    // Nobody may end it: it is given up after its boot bound, and goes on.
    c.world.terminate_fails.extend([FailureKind::Denied; 10_000]);
    turns(&mut c, 90 * MINUTE_MS);
    assert_eq!((c.world.instances.len(), c.world.tokens.len()), (1, 1), "{:?}", c.launch.state());
    assert!(matches!(c.launch.state(), State::Leaving { why: Why::NotEnrolled, .. }), "{:?}", c.launch.state());
    // A second one under its token is not gone either.
    let mut second = c.world.instances[0].clone();
    (second.id, second.state) = ("i-00000000000000009".parse().unwrap(), InstanceState::Running);
    c.world.instances[0].state = InstanceState::ShuttingDown;
    let mut view = c.view();
    view.instances.as_mut().unwrap().push(second);
    let d = c.launch.decide(&view, c.world.now, &c.patience);
    assert_eq!((d.launch.host().attempt(), d.reap.len()), (1, 1), "{:?}", d.launch.state());
    // Stopped is not gone, and not shown is not gone.
    c.world.instances[0].state = InstanceState::Stopped;
    turns(&mut c, MINUTE_MS);
    c.world.shown_after_ms = u64::MAX;
    turns(&mut c, MINUTE_MS);
    assert_eq!(c.world.tokens.len(), 1, "{:?}", c.launch.state());
    c.world.shown_after_ms = 0;
    c.boot_ms = 0;
    c.world.terminate_fails.clear();
    c.work().unwrap();
    c.check("ended at last");
    assert!(matches!(c.launch.state(), State::Ready { .. }));
    assert_eq!((c.world.instances.len(), c.launch.host().attempt()), (2, 2));
}

#[test]
fn one_that_never_goes_is_waited_for_no_longer_than_another_could_live() {
    let mut c = Coordinator::new(World::new());
    c.boot_ms = u64::MAX;
    c.world.terminate_fails.extend([FailureKind::Denied; 10_000]);
    let least_ms = c.patience.least_life_ms;
    turns(&mut c, LIFE_MS - least_ms - MINUTE_MS);
    assert!(matches!(c.launch.state(), State::Leaving { .. }), "{:?}", c.launch.state());
    turns(&mut c, 2 * MINUTE_MS);
    assert!(matches!(c.launch.state(), State::Closed { why: Why::NotEnrolled }), "{:?}", c.launch.state());
    assert_eq!((c.world.instances.len(), c.reaps.len()), (1, 1), "it stays the reaper's");
}

#[test]
fn caps_are_judged_before_each_attempts_call() {
    let mut c = Coordinator::new(World::new());
    c.unaffordable = true;
    c.work().unwrap();
    assert!(matches!(c.launch.state(), State::Closed { why: Why::Unaffordable(_) }), "{:?}", c.launch.state());
    assert!(c.world.tokens.is_empty());

    let mut c = Coordinator::new(World::new());
    c.turn().unwrap();
    assert!(serde_json::to_string(&c.launch).unwrap().contains("#!/bin/sh"));
    c.unaffordable = true;
    c.work().unwrap();
    let text = serde_json::to_string(&c.launch).unwrap();
    assert!(!text.contains("#!/bin/sh"), "what holds a token is not kept for nothing: {text}");

    let mut c = ready();
    c.unaffordable = true;
    turns(&mut c, MINUTE_MS);
    c.check("what was launched is not ended for it");

    let mut c = Coordinator::new(World::new());
    c.boot_ms = u64::MAX;
    turns(&mut c, 10 * MINUTE_MS);
    c.unaffordable = true;
    c.work().unwrap();
    assert!(matches!(c.launch.state(), State::Closed { why: Why::Unaffordable(_) }), "{:?}", c.launch.state());
    assert_eq!(c.world.tokens.len(), 1, "no second attempt");

    // A call that may have made something is found out about, and then it is over.
    let mut c = Coordinator::new(World::new());
    c.world.runs.extend([Run::Late]);
    c.turn().unwrap();
    c.unaffordable = true;
    c.work().unwrap();
    c.check("made after nobody waits, and not affordable");
    assert!(matches!(c.launch.state(), State::Closed { why: Why::Unaffordable(_) }), "{:?}", c.launch.state());
}

#[test]
fn user_data_are_made_for_each_attempt_and_repeated_to_the_letter() {
    // A call whose answer is lost, and again; a boot that ends before it is enrolled; another attempt.
    let mut c = Coordinator::new(World::new());
    c.world.runs.extend([Run::Lost, Run::Lost]);
    c.boot_ms = 5 * MINUTE_MS;
    while !matches!(c.launch.state(), State::Armed { .. }) {
        c.turn().unwrap();
        c.world.pass(1_000);
    }
    let text = serde_json::to_string(&c.launch).unwrap();
    assert!(!text.contains("#!/bin/sh"), "what holds a token is not kept once nothing is called with it: {text}");
    c.world.instances[0].state = InstanceState::Terminated;
    c.work().unwrap();
    c.check("relaunched");
    let called: Vec<_> = c.world.tokens.values().map(|(_, user_data)| &user_data.0).collect();
    assert_eq!(called.len(), 2);
    assert_ne!(called[0], called[1]);
}

#[test]
fn nothing_is_called_with_user_data_that_are_too_old() {
    let made_at = |c: &Coordinator, token: &str| -> i64 {
        let (_, user_data) = &c.world.tokens[token];
        user_data.0.rsplit(' ').next().unwrap().parse().unwrap()
    };
    // Killed before the first call, and away for an hour: made anew, under the same token.
    let mut c = Coordinator::new(World::new());
    c.turn().unwrap();
    assert!(c.world.tokens.is_empty(), "made, stored, and not called with yet");
    c.world.pass(60 * MINUTE_MS);
    let later = c.world.now;
    c.work().unwrap();
    c.check("away before the call");
    assert_eq!((c.world.tokens.len(), made_at(&c, &c.launch.host().token().to_string())), (1, later.0));

    // Called and never answered until they are too old: looked for, and then there is another token.
    let mut c = Coordinator::new(World::new());
    c.world.runs.extend([Run::Lost; 1_000]);
    turns(&mut c, 12 * MINUTE_MS);
    assert!(matches!(c.launch.state(), State::Resolving { .. }), "{:?}", c.launch.state());
    c.world.runs.clear();
    c.work().unwrap();
    c.check("answered at last");
    assert_eq!(c.launch.host().attempt(), 2);

    // Throttled for as long: nothing was made, and EC2 may remember the token.
    let mut c = Coordinator::new(World::new());
    c.world.runs.extend([Run::Fails(FailureKind::Throttled); 1_000]);
    turns(&mut c, 12 * MINUTE_MS);
    assert_eq!(c.launch.host().attempt(), 2, "{:?}", c.launch.state());
}

#[test]
fn user_data_that_cannot_be_made_are_tried_on_and_told_of() {
    let mut c = Coordinator::new(World::new());
    let d = c.launch.decide(&c.view(), c.world.now, &c.patience);
    assert!(matches!(&d.act, Some(Act::Prepare { host, due }) if host == c.launch.host() && *due == c.launch.due()));
    let d = c.launch.heard(&Reply::Prepared(Err("no bucket".to_owned())), c.world.now, &c.patience);
    assert!(d.alarms[0].message.contains("no bucket"), "{:?}", d.alarms);
    c.launch = d.launch;
    assert_eq!(c.launch.decide(&c.view(), c.world.now, &c.patience).act, None, "not at once");
    c.work().unwrap();
    c.check("made at last");
}

#[test]
fn a_meter_runs_from_each_attempts_intent_until_its_instance_is_the_reapers_and_there_until_it_is_seen_going() {
    let mut c = Coordinator::new(World::new());
    assert_eq!(c.launch.meter().map(|m| (m.from, m.until)), Some((START, Until::Deadline(c.launch.due()))));
    c.boot_ms = u64::MAX;
    c.world.terminate_fails.extend([FailureKind::Denied; 10_000]);
    turns(&mut c, 20 * MINUTE_MS);
    assert!(matches!(c.launch.state(), State::Leaving { .. }));
    let meter = |c: &Coordinator| c.reaps.values().next().unwrap().meter();
    assert_eq!((c.launch.meter(), meter(&c).from), (None, START), "one meter for one instance");
    assert!(meter(&c).is_running());
    c.world.terminate_fails.clear();
    c.boot_ms = 0;
    c.work().unwrap();
    assert!(matches!(meter(&c).until, Until::Ended(at) if at > START.plus_ms(20 * MINUTE_MS)));
    let second = c.launch.meter().unwrap();
    assert!(second.is_running() && second.from > START.plus_ms(20 * MINUTE_MS), "{second:?}");
}

#[test]
fn no_room_falls_back_to_the_next_subnet_and_round_again() {
    let mut c = Coordinator::new(World::new());
    c.world.runs.extend([Run::Fails(FailureKind::Capacity); 3]);
    c.work().unwrap();
    c.check("with room at last");
    let placed: Vec<_> = c.world.instances.iter().map(|i| i.subnet.as_ref().unwrap().as_str()).collect();
    assert_eq!(placed, ["subnet-0000000b"], "a, b, a, and then b");
}
