//! What is read back after a launch: each difference is seen, and what is not shown yet is not a difference.

use drums_common::clock::Micros;
use drums_provider::{
    alarm::AlarmKind,
    cloud::{Attributes, Instance, KillSchedule},
    failure::FailureKind,
    launch::{Guest, Launch, Patience, ReadBack, Reply, State, View, Why, read_back},
    tags,
    words::instant_text,
};

use super::support::{self, MINUTE_MS, START};

const LIFE_MS: u64 = 120 * MINUTE_MS;

fn after(change: impl FnOnce(&mut Instance)) -> ReadBack {
    let launch = support::launch(LIFE_MS);
    let mut seen = support::instance_of(&launch.order(), 1, START);
    change(&mut seen);
    read_back(&launch.order(), &seen)
}

#[test]
fn what_was_ordered_and_is_shown_is_the_same() {
    assert_eq!(after(|_| {}), ReadBack::Same);
    let sooner = instant_text(START.plus_ms(MINUTE_MS));
    let shortened = after(|i| drop(i.tags.insert(tags::DEADLINE.to_owned(), sooner)));
    assert_eq!(shortened, ReadBack::Same, "someone shortened it already");
}

#[test]
fn every_difference_is_seen_and_named() {
    type Change = (&'static str, fn(&mut Instance));
    let changes: [Change; 16] = [
        ("the type", |i| i.kind = Some("c8i.large".parse().unwrap())),
        ("the image", |i| i.image = Some("ami-00000001".parse().unwrap())),
        ("the subnet", |i| i.subnet = Some("subnet-0000000c".parse().unwrap())),
        ("nested virtualisation", |i| i.nested = Some(false)),
        ("instance metadata", |i| i.imds_v2 = Some(false)),
        ("public address", |i| i.public_address = true),
        ("security groups", |i| i.security_groups.push("sg-00000002".parse().unwrap())),
        ("security groups", |i| i.security_groups.clear()),
        ("shutdown behaviour", |i| {
            i.attributes = Some(Ok(Attributes { terminate_on_shutdown: false, ..Attributes::MORTAL }));
        }),
        ("termination protection", |i| {
            i.attributes = Some(Ok(Attributes { protected: true, ..Attributes::MORTAL }));
        }),
        ("stop protection", |i| {
            i.attributes = Some(Ok(Attributes { stop_protected: true, ..Attributes::MORTAL }));
        }),
        ("instance profile", |i| i.profile = Some("another".parse().unwrap())),
        ("delete on termination", |i| i.volumes[0].delete_on_termination = false),
        (tags::INSTALLATION, |i| drop(i.tags.remove(tags::INSTALLATION))),
        (tags::TOKEN, |i| drop(i.tags.insert(tags::TOKEN.to_owned(), "another".to_owned()))),
        (tags::DEADLINE, |i| drop(i.tags.insert(tags::DEADLINE.to_owned(), "2999-01-01T00:00:00Z".to_owned()))),
    ];
    for (what, change) in changes {
        match after(change) {
            ReadBack::Differs(said) => assert!(said.contains(what), "{what}: {said}"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn what_is_not_shown_yet_is_waited_for() {
    let hide: [fn(&mut Instance); 8] = [
        |i| i.kind = None,
        |i| i.nested = None,
        |i| i.imds_v2 = None,
        |i| i.attributes = None,
        |i| i.attributes = Some(Err(support::error(FailureKind::Denied, "DescribeInstanceAttribute"))),
        |i| i.profile = None,
        |i| i.volumes.clear(),
        |i| i.tags.clear(),
    ];
    for change in hide {
        assert!(matches!(after(change), ReadBack::NotYet(_)), "{:?}", after(change));
    }
}

#[test]
fn a_launch_given_up_because_attributes_could_not_be_asked_for_says_why() {
    let (launch, mut view) = launched();
    let denied = support::error(FailureKind::Denied, "DescribeInstanceAttribute");
    view.instances.as_mut().unwrap()[0].attributes = Some(Err(denied.clone()));
    let patience = Patience { arm_ms: u64::MAX, ..Patience::default() };
    let d = launch.decide(&view, START.plus_ms(patience.appear_ms), &patience);
    match d.launch.state() {
        State::Closed { why: Why::ReadBack(why) } => assert!(why.contains(&denied.to_string()), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// A launch that has its instance, and a look at it.
fn launched() -> (Launch, View) {
    let launch = support::launch(LIFE_MS);
    let seen = support::instance_of(&launch.order(), 1, START);
    let launch = launch.heard(&Reply::Ran(Ok(Box::new(seen))), START, &Patience::default()).launch;
    // The intent alone was stored: an answer that was not waited for counts all the same.
    assert!(matches!(launch.state(), State::Launched { .. }));
    let view = View {
        instances: Ok(vec![support::instance_of(&launch.order(), 1, START)]),
        schedule: Ok(None),
        enrolled: false,
        guest: Guest::NotYet,
        attentive_since: Micros(0),
        unwanted: None,
        unaffordable: None,
    };
    (launch, view)
}

#[test]
fn a_second_instance_under_one_token_is_ended_and_the_one_that_is_known_stays() {
    let (launch, mut view) = launched();
    view.instances.as_mut().unwrap().insert(0, support::instance_of(&launch.order(), 2, START));
    let d = launch.decide(&view, START, &Patience::default());
    let reaped: Vec<_> = d.reap.iter().map(|(o, _)| o.id().as_str()).collect();
    assert_eq!(reaped, ["i-00000000000000002"]);
    assert_eq!(d.alarms.iter().map(|a| a.kind).collect::<Vec<_>>(), [AlarmKind::Twice]);
    assert_eq!(d.launch.instance().unwrap().id().as_str(), "i-00000000000000001");
    // Also while only the second is shown.
    view.instances.as_mut().unwrap().truncate(1);
    let d = launch.decide(&view, START, &Patience::default());
    assert_eq!(d.reap.iter().map(|(o, _)| o.id().as_str()).collect::<Vec<_>>(), ["i-00000000000000002"]);
    assert_eq!(d.launch.instance().unwrap().id().as_str(), "i-00000000000000001");
}

#[test]
fn nobody_enrols_before_the_host_is_armed_and_read_back() {
    let (launch, mut view) = launched();
    assert!(!launch.may_enrol());
    view.enrolled = true;
    let d = launch.decide(&view, START, &Patience::default());
    assert!(!d.launch.may_enrol(), "without its schedule");
    let instance = launch.instance().unwrap().clone();
    let schedule = launch.schedule(&instance);
    view.schedule = Ok(Some(schedule.clone()));
    let armed = launch.decide(&view, START, &Patience::default()).launch;
    assert!(armed.may_enrol());
    view.schedule = Ok(Some(KillSchedule { at: schedule.at.plus_ms(MINUTE_MS), ..schedule }));
    let d = launch.decide(&view, START, &Patience::default());
    assert!(!d.launch.may_enrol() && d.act.is_some(), "a schedule that comes too late is made anew");
}
