//! The launch against a cloud in memory, killed at every line.

use std::collections::BTreeMap;

use drums_common::clock::Micros;
use drums_provider::{
    alarm::AlarmKind,
    cloud::{Attributes, Instance, InstanceState},
    failure::FailureKind,
    host::OwnedInstance,
    launch::{Act, Guest, Launch, Look, Patience, Reply, State, View, Why},
    reap::{self, Reap},
    spend::Until,
    tags,
};
use proptest::prelude::*;

use super::support::{self, MINUTE_MS, Run, START, World};

const LIFE_MS: u64 = 120 * MINUTE_MS;

/// The process died here.
#[derive(Debug)]
struct Killed;

/// A coordinator in front of the cloud: what it has on disk, and when it is killed.
struct Coordinator {
    // On disk.
    launch: Launch,
    reaps: BTreeMap<OwnedInstance, Reap>,
    /// Lines until it is killed.
    fuse: Option<u32>,
    lines: u32,
    world: World,
    patience: Patience,
    unwanted: bool,
    /// The caps allow nothing more.
    unaffordable: bool,
    attentive_since: Micros,
    guest: Guest,
    /// How long an instance takes from made to enrolled.
    boot_ms: u64,
}

impl Coordinator {
    fn new(world: World) -> Self {
        Self {
            launch: support::launch(LIFE_MS),
            reaps: BTreeMap::new(),
            fuse: None,
            lines: 0,
            world,
            patience: Patience::default(),
            unwanted: false,
            unaffordable: false,
            attentive_since: START,
            guest: Guest::Booted,
            boot_ms: 60_000,
        }
    }

    /// Between any two of these it can be killed.
    fn line(&mut self) -> Result<(), Killed> {
        self.lines += 1;
        match &mut self.fuse {
            Some(0) => Err(Killed),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn view(&self) -> View {
        let instances: Vec<Instance> = match self.launch.look() {
            Look::Token(_, token) => {
                let token = Some(token.to_string());
                self.world.shown().into_iter().filter(|i| i.token == token).collect()
            }
            Look::Instance(_, id) => self.world.shown().into_iter().filter(|i| i.id == id).collect(),
            Look::Nothing => Vec::new(),
        };
        let up = instances
            .iter()
            .any(|i| i.state == InstanceState::Running && i.launched.plus_ms(self.boot_ms) <= self.world.now);
        View {
            instances: Ok(instances),
            schedule: Ok(self.world.schedules.get(&self.launch.host().token().to_string()).cloned()),
            enrolled: up,
            guest: if up { self.guest.clone() } else { Guest::NotYet },
            attentive_since: self.attentive_since,
            unwanted: self.unwanted.then(|| "cancelled".to_owned()),
            unaffordable: self.unaffordable.then(|| "the cap of the day is spent".to_owned()),
        }
    }

    fn store(&mut self, launch: Launch, reap: Vec<(OwnedInstance, Why)>) {
        self.launch = launch;
        let account = self.launch.account();
        for (instance, why) in reap {
            let account = account.clone();
            let now = self.world.now;
            self.reaps.entry(instance.clone()).or_insert_with(|| Reap::begin(instance, account, why, now));
        }
    }

    fn turn(&mut self) -> Result<(), Killed> {
        let view = self.view();
        self.line()?;
        let decision = self.launch.decide(&view, self.world.now, &self.patience);
        self.line()?;
        self.store(decision.launch, decision.reap);
        self.line()?;
        if let Some(act) = decision.act {
            let reply = match act {
                Act::Prepare { host, .. } => Reply::Prepared(Ok(support::user_data(&host, self.world.now))),
                Act::Run(order, user_data) => Reply::Ran(self.world.run(&order, &user_data).map(Box::new)),
                Act::PutSchedule(schedule) => Reply::Scheduled(self.world.put_schedule(&schedule)),
                Act::Mend(kill, _) => Reply::Mended(self.world.mend(kill.instance().as_str())),
            };
            // Done in the cloud, and not known here.
            self.line()?;
            let decision = self.launch.heard(&reply, self.world.now, &self.patience);
            self.line()?;
            self.store(decision.launch, decision.reap);
            self.line()?;
        }
        for instance in self.reaps.keys().cloned().collect::<Vec<_>>() {
            self.reap(&instance)?;
        }
        Ok(())
    }

    fn reap(&mut self, instance: &OwnedInstance) -> Result<(), Killed> {
        let shown = self.world.shown().into_iter().find(|i| i.id == *instance.id());
        self.line()?;
        let view = reap::View { instance: Ok(shown), volumes: Ok(Vec::new()) };
        let decision = self.reaps[instance].decide(&view, self.world.now);
        self.reaps.insert(instance.clone(), decision.reap);
        self.line()?;
        if let Some(act) = decision.act {
            let reply = match &act {
                reap::Act::Terminate(kill) => self.world.terminate(kill.instance().as_str()),
                reap::Act::Unprotect(kill) => {
                    self.world.unprotect(kill.instance().as_str());
                    Ok(())
                }
                reap::Act::DeleteSchedule(name) => {
                    self.world.schedules.remove(name.as_str());
                    Ok(())
                }
            };
            self.line()?;
            let (reap, _) = self.reaps[instance].heard(&act, &reply, self.world.now);
            self.reaps.insert(instance.clone(), reap);
            self.line()?;
        }
        Ok(())
    }

    fn settled(&self) -> bool {
        let launch = matches!(self.launch.state(), State::Ready { .. } | State::Closed { .. });
        launch && self.reaps.values().all(Reap::is_closed) && !self.world.pending()
    }

    /// Turns until it is killed or nothing is left to do.
    fn work(&mut self) -> Result<(), Killed> {
        for _ in 0..10_000 {
            let before = (self.launch.clone(), self.reaps.clone());
            self.turn()?;
            // Where nothing happens, longer.
            self.world.pass(if before == (self.launch.clone(), self.reaps.clone()) { 10_000 } else { 1_000 });
            if self.settled() {
                return Ok(());
            }
        }
        panic!("not settled: {:?}, {:?}", self.launch.state(), self.reaps);
    }

    /// Nothing is unknown: one instance, which is ready, or none.
    #[track_caller]
    fn check(&self, what: &str) {
        let alive = self.world.alive();
        match self.launch.state() {
            State::Ready { instance } => {
                assert_eq!(alive.len(), 1, "{what}: {alive:?}");
                assert_eq!(alive[0].id, *instance.id(), "{what}");
                let schedule = self.world.schedules.get(&instance.token().unwrap().to_string());
                assert_eq!(schedule.map(|s| &s.instance), Some(instance.id()), "{what}: ready and not armed");
            }
            State::Closed { why } => assert!(alive.is_empty(), "{what}: closed for {why:?}, and alive is {alive:?}"),
            other => panic!("{what}: {other:?}"),
        }
        for instance in self.world.instances.iter().filter(|i| i.state.is_going()) {
            let known = self.reaps.keys().any(|o| *o.id() == instance.id);
            assert!(known, "{what}: nobody knows of {}", instance.id);
        }
    }
}

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

fn ready() -> Coordinator {
    let mut c = Coordinator::new(World::new());
    c.work().unwrap();
    assert!(matches!(c.launch.state(), State::Ready { .. }));
    c
}

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

/// Turns for so long.
fn turns(c: &mut Coordinator, ms: u64) {
    let end = c.world.now.plus_ms(ms);
    while c.world.now < end {
        c.turn().unwrap();
        c.world.pass(5_000);
    }
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
    for (token, (_, user_data)) in &c.world.tokens {
        assert!(user_data.0.contains(token), "made for another attempt: {}", user_data.0);
    }
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
