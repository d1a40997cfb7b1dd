//! What someone edits behind a launch: it is put right, or it shortens.

use drums_common::clock::Micros;
use drums_provider::{
    alarm::AlarmKind,
    cloud::{Attributes, InstanceState},
    failure::FailureKind,
    launch::{Reply, State, View, Why},
    tags,
};

use super::{
    coordinator::{Coordinator, LIFE_MS, ready, turns},
    support::{self, MINUTE_MS, START, World},
};

#[test]
fn protection_and_shutdown_that_someone_edits_later_are_put_right_and_told_of() {
    type Edit = fn(&mut Attributes);
    let edits: [(Edit, &str); 3] = [
        (|a| a.terminate_on_shutdown = false, "shutdown behaviour"),
        (|a| a.protected = true, "termination protection"),
        (|a| a.stop_protected = true, "stop protection"),
    ];
    for armed_only in [true, false] {
        for (edit, what) in edits {
            let mut c = Coordinator::new(World::new());
            c.boot_ms = if armed_only { 5 * MINUTE_MS } else { 0 };
            turns(&mut c, MINUTE_MS);
            assert_eq!(matches!(c.launch.state(), State::Armed { .. }), armed_only, "{:?}", c.launch.state());
            c.world.attributes("i-00000000000000001", edit);
            let alarms = c.launch.decide(&c.view(), c.world.now, &c.patience).alarms;
            assert!(alarms.len() == 1 && alarms[0].message.contains(what), "{alarms:?}");
            turns(&mut c, MINUTE_MS);
            assert_eq!(c.world.instances[0].attributes, Some(Ok(Attributes::MORTAL)), "{what}");
            assert!(c.launch.instance().is_some(), "and the host lives: {:?}", c.launch.state());
        }
    }
}

#[test]
fn a_mend_that_is_denied_keeps_no_schedule_from_being_made_again_and_none_keeps_a_mend() {
    for (schedule, mend) in [(Some(FailureKind::Throttled), None), (None, Some(FailureKind::Denied))] {
        let mut c = ready();
        (c.world.schedule_fails, c.world.mend_fails) = (schedule, mend);
        c.world.attributes("i-00000000000000001", |a| a.protected = true);
        c.world.schedules.clear();
        turns(&mut c, MINUTE_MS);
        assert_eq!(c.world.schedules.is_empty(), schedule.is_some());
        assert_eq!(c.world.instances[0].attributes == Some(Ok(Attributes::MORTAL)), mend.is_none());
    }
    let mut c = ready();
    c.world.mend_fails = Some(FailureKind::Denied);
    let reply = Reply::Mended(c.world.mend("i-00000000000000001"));
    let alarms = c.launch.heard(&reply, c.world.now, &c.patience).alarms;
    assert_eq!(alarms.iter().map(|a| a.kind).collect::<Vec<_>>(), [AlarmKind::Powerless]);
}

#[test]
fn a_deadline_that_was_shortened_stays_so_whatever_is_shown_later() {
    let sooner = START.plus_ms(30 * MINUTE_MS);
    let at = |c: &Coordinator| c.world.schedules.values().map(|s| s.at).collect::<Vec<_>>();
    let shorten = |c: &mut Coordinator| {
        let text = drums_provider::words::instant_text(sooner);
        c.world.instances[0].tags.insert(tags::DEADLINE.to_owned(), text);
        turns(c, 15_000);
        assert_eq!(at(c), [sooner]);
    };
    // A look that fails, one that shows nothing, and a tag that is taken away or moved back.
    let mut c = ready();
    shorten(&mut c);
    let alarms = c.launch.decide(&c.view(), c.world.now, &c.patience).alarms;
    assert_eq!(alarms, [], "told of once");
    let failed = View { instances: Err(support::error(FailureKind::Throttled, "DescribeInstances")), ..c.view() };
    let d = c.launch.decide(&failed, c.world.now, &c.patience);
    assert_eq!((d.launch.due(), d.act), (sooner, None));
    let late = c.launch.decide(&failed, sooner, &c.patience).launch;
    assert!(matches!(late.state(), State::Closed { why: Why::Deadline }), "{:?}", late.state());
    c.world.shown_after_ms = u64::MAX;
    turns(&mut c, MINUTE_MS);
    assert_eq!(at(&c), [sooner]);
    c.world.shown_after_ms = 0;
    for tag in ["2999-01-01T00:00:00Z", "", "2026-11-30T02:53:20Z"] {
        c.world.instances[0].tags.insert(tags::DEADLINE.to_owned(), tag.to_owned());
        turns(&mut c, MINUTE_MS);
        assert_eq!((at(&c), c.launch.due()), (vec![sooner], sooner), "{tag}");
    }

    // A schedule that was moved earlier is not moved back; one that was moved later is.
    let mut c = ready();
    let name = c.launch.host().token().to_string();
    c.world.schedules.get_mut(&name).unwrap().at = sooner;
    turns(&mut c, MINUTE_MS);
    assert_eq!((at(&c), c.launch.due()), (vec![sooner], sooner));
    c.world.schedules.get_mut(&name).unwrap().at = sooner.plus_ms(MINUTE_MS);
    turns(&mut c, MINUTE_MS);
    assert_eq!(at(&c), [sooner]);

    // And another attempt has it from the beginning.
    let mut c = Coordinator::new(World::new());
    c.boot_ms = 5 * MINUTE_MS;
    turns(&mut c, 30_000);
    shorten(&mut c);
    c.world.instances[0].state = InstanceState::Terminated;
    c.boot_ms = 0;
    c.work().unwrap();
    c.check("relaunched");
    let second = &c.world.instances[1];
    assert_eq!(second.tags[tags::DEADLINE], drums_provider::words::instant_text(sooner));
    let schedule = &c.world.schedules[&c.launch.host().token().to_string()];
    assert_eq!((schedule.at, &schedule.instance), (sooner, &second.id));
}

#[test]
fn a_schedule_that_vanishes_is_made_again_and_the_host_lives() {
    let mut c = ready();
    c.world.schedules.clear();
    let decision = c.launch.decide(&c.view(), c.world.now, &c.patience);
    assert_eq!(decision.alarms.len(), 1, "{:?}", decision.alarms);
    c.turn().unwrap();
    c.check("armed again");
}

#[test]
fn a_shortened_tag_moves_the_schedule_and_ends_the_host_and_a_lengthened_one_does_nothing() {
    let deadline = START.plus_ms(LIFE_MS);
    let edit = |c: &mut Coordinator, at: Micros| {
        let text = drums_provider::words::instant_text(at);
        c.world.instances[0].tags.insert(tags::DEADLINE.to_owned(), text);
        c.turn().unwrap();
        c.turn().unwrap();
    };
    let at = |c: &Coordinator| c.world.schedules.values().next().map(|s| s.at);
    let mut c = ready();
    edit(&mut c, deadline.plus_ms(LIFE_MS));
    assert_eq!(at(&c), Some(deadline));
    let sooner = START.plus_ms(30 * MINUTE_MS);
    edit(&mut c, sooner);
    assert_eq!(at(&c), Some(sooner));
    c.check("not due yet");
    c.world.now = sooner;
    c.turn().unwrap();
    assert!(matches!(c.launch.state(), State::Closed { why: Why::Deadline }));
}

#[test]
fn one_that_someone_protected_in_whatever_way_is_ended_all_the_same() {
    let edits: [fn(&mut Attributes); 3] =
        [|a| a.protected = true, |a| a.stop_protected = true, |a| (a.protected, a.stop_protected) = (true, true)];
    for edit in edits {
        let mut c = ready();
        c.world.attributes("i-00000000000000001", edit);
        c.unwanted = true;
        let asked = c.world.now;
        c.work().unwrap();
        c.check("protected and not wanted");
        let receipt = c.reaps.values().next().unwrap().receipt().unwrap();
        assert!(receipt.charged_until <= asked.plus_ms(30_000), "{receipt:?}");
    }
}
