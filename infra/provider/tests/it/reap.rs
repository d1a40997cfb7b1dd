//! The reaper on bad days: it never gives up, and closes only on what it saw.

use std::collections::BTreeSet;

use drums_common::clock::Micros;
use drums_provider::{
    alarm::AlarmKind,
    cloud::{Attributes, Instance, InstanceState},
    failure::{CloudError, FailureKind},
    host::OwnedInstance,
    launch::Why,
    reap::{Account, Act, CEILING_MS, Reap, View, strays},
    receipt,
    sweep::{Mode, Regions, Scope},
    tags,
    words::VolumeId,
};
use proptest::prelude::*;

use super::support::{self, MINUTE_MS, START, error};

const HOUR_MS: u64 = 60 * MINUTE_MS;

fn instance(state: InstanceState) -> (Instance, OwnedInstance) {
    let launch = support::launch(HOUR_MS);
    let mut seen = support::instance_of(&launch.order(), 1, START);
    seen.state = state;
    let owned = launch.host().claim(&seen).unwrap();
    (seen, owned)
}

/// A reap, its cloud and what it raised.
struct Case {
    reap: Reap,
    seen: Option<Instance>,
    volumes: Vec<VolumeId>,
    now: Micros,
    alarms: Vec<AlarmKind>,
    acts: Vec<(Micros, Act)>,
    fails: Option<FailureKind>,
    blind: Option<CloudError>,
}

impl Case {
    fn new(state: InstanceState) -> Self {
        let (seen, owned) = instance(state);
        let account = Account {
            host: "h1".parse().unwrap(),
            campaign: "c1".parse().unwrap(),
            experiment: Some("EXP-028".parse().unwrap()),
            rates: support::rates(),
            from: START,
        };
        Self {
            reap: Reap::begin(owned, account, Why::Deadline, START),
            seen: Some(seen),
            volumes: Vec::new(),
            now: START,
            alarms: Vec::new(),
            acts: Vec::new(),
            fails: None,
            blind: None,
        }
    }

    fn turn(&mut self) {
        let instance = self.blind.clone().map_or_else(|| Ok(self.seen.clone()), Err);
        let view = View { instance, volumes: Ok(self.volumes.clone()) };
        let d = self.reap.decide(&view, self.now);
        assert_eq!(d.again.is_none(), d.reap.is_closed(), "it always says when to look again");
        assert!(d.again.is_none_or(|at| at <= self.now.plus_ms(CEILING_MS)));
        self.reap = d.reap;
        self.alarms.extend(d.alarms.iter().map(|a| a.kind));
        if let Some(act) = d.act {
            let reply = match (self.fails, &act) {
                (Some(FailureKind::Protected), Act::Unprotect(_)) => {
                    self.fails = None;
                    Ok(())
                }
                (Some(kind), _) => Err(error(kind, "TerminateInstances")),
                (None, Act::Terminate(_)) => {
                    if let Some(seen) = &mut self.seen {
                        seen.state = InstanceState::ShuttingDown;
                    }
                    Ok(())
                }
                (None, _) => Ok(()),
            };
            self.acts.push((self.now, act.clone()));
            let (reap, alarms) = self.reap.heard(&act, &reply, self.now);
            self.reap = reap;
            self.alarms.extend(alarms.iter().map(|a| a.kind));
        }
    }

    fn run(&mut self, ms: u64) {
        let end = self.now.plus_ms(ms);
        while self.now < end {
            self.turn();
            self.now = self.now.plus_ms(5_000);
        }
    }

    fn state(&mut self, state: InstanceState) {
        self.seen.as_mut().unwrap().state = state;
    }
}

#[test]
fn row_01_for_a_day_of_failing_terminates_it_asks_on_raises_the_alarm_and_closes_only_on_terminated() {
    for kind in [FailureKind::Unknown, FailureKind::Denied, FailureKind::Throttled, FailureKind::Expired] {
        let mut c = Case::new(InstanceState::Running);
        c.fails = Some(kind);
        c.run(24 * HOUR_MS);
        assert!(c.reap.receipt().is_none() && !c.reap.is_closed(), "{kind:?}");
        let asks: Vec<_> = c.acts.iter().map(|(at, _)| *at).collect();
        let longest = asks.windows(2).map(|w| w[1].ms_since(w[0])).max().unwrap();
        assert!(longest <= CEILING_MS, "{kind:?}: {longest} ms between two asks");
        assert!(asks.len() > 1_000);
        let person = matches!(kind, FailureKind::Denied | FailureKind::Expired);
        assert_eq!(c.alarms, if person { vec![AlarmKind::Powerless] } else { vec![] }, "{kind:?}: once");
        c.fails = None;
        c.run(2 * CEILING_MS);
        assert!(c.reap.receipt().is_none(), "shutting down is not terminated");
        c.state(InstanceState::Terminated);
        c.run(MINUTE_MS);
        assert!(c.reap.is_closed());
    }
}

#[test]
fn a_receipt_says_when_it_died_what_it_left_and_what_it_cost() {
    let mut c = Case::new(InstanceState::Running);
    c.now = START.plus_ms(HOUR_MS);
    c.run(10_000);
    c.state(InstanceState::Terminated);
    c.volumes = vec!["vol-00000001".parse().unwrap()];
    c.run(MINUTE_MS);
    assert!(c.reap.receipt().is_none(), "volumes are still going");
    c.volumes.clear();
    c.run(MINUTE_MS);
    let receipt = c.reap.receipt().unwrap().clone();
    assert!(c.reap.is_closed() && c.alarms.is_empty(), "{:?}", c.alarms);
    assert_eq!(receipt.after_deadline_ms(), Some(10_000));
    assert_eq!(receipt.billed_ms(), HOUR_MS + 5_000, "to the first look at it shutting down");
    assert_eq!(receipt.cost, support::rates().cost(HOUR_MS + 5_000));
    let sums = receipt::by_experiment(&[receipt.clone(), receipt]);
    let sum = sums[&Some("EXP-028".parse().unwrap())];
    assert_eq!((sum.hosts, sum.billed_ms), (2, 2 * (HOUR_MS + 5_000)));
    assert_eq!(sum.per_valid_session(0), None);
    assert!(sum.per_valid_session(3).unwrap().times(3) >= sum.cost);
    assert_eq!(sum.measured_ppm(sum.billed_ms / 2), Some(500_000));
}

#[test]
fn volumes_that_stay_are_named_and_alarmed() {
    let mut c = Case::new(InstanceState::Terminated);
    c.volumes = vec!["vol-00000001".parse().unwrap()];
    c.run(15 * MINUTE_MS);
    assert_eq!(c.alarms, [AlarmKind::VolumesLeft]);
    assert_eq!(c.reap.receipt().unwrap().volumes_left, c.volumes);
}

#[test]
fn stopped_and_stopping_are_not_gone() {
    for state in [InstanceState::Stopped, InstanceState::Stopping] {
        let mut c = Case::new(state);
        c.turn();
        assert!(matches!(c.acts[0].1, Act::Terminate(_)), "{state:?}");
        assert_eq!(c.alarms, [AlarmKind::Stopped]);
    }
}

#[test]
fn one_that_hangs_on_its_way_out_is_asked_on_and_alarmed_once() {
    for state in [InstanceState::ShuttingDown, InstanceState::Stopping] {
        let mut c = Case::new(state);
        c.fails = Some(FailureKind::Unknown);
        c.run(9 * MINUTE_MS);
        assert!(!c.alarms.contains(&AlarmKind::Hangs));
        c.run(5 * HOUR_MS);
        assert_eq!(c.alarms.iter().filter(|a| **a == AlarmKind::Hangs).count(), 1, "{state:?}");
        assert!(!c.reap.is_closed() && c.acts.len() > 250, "{} asks", c.acts.len());
    }
}

#[test]
fn protection_that_someone_switched_on_is_switched_off_and_then_it_is_terminated() {
    let mut c = Case::new(InstanceState::Running);
    c.seen.as_mut().unwrap().attributes = Some(Ok(Attributes { protected: true, ..Attributes::MORTAL }));
    c.fails = Some(FailureKind::Protected);
    c.run(MINUTE_MS);
    let acts: Vec<_> = c.acts.iter().take(3).map(|(_, a)| a.clone()).collect();
    assert!(matches!(acts[..], [Act::Terminate(_), Act::Unprotect(_), Act::Terminate(_)]), "{acts:?}");
    assert!(c.acts[2].0.ms_since(c.acts[0].0) <= 10_000, "at once");
    assert_eq!(c.alarms, [AlarmKind::Protected]);
}

#[test]
fn one_that_is_shown_no_longer_was_not_observed_to_end_and_is_closed_by_a_person_only() {
    let mut c = Case::new(InstanceState::Running);
    c.run(10_000);
    c.seen = None;
    c.run(HOUR_MS - MINUTE_MS);
    assert!(c.alarms.is_empty(), "not found soon after a terminate is no evidence");
    c.run(24 * HOUR_MS);
    assert_eq!(c.alarms, [AlarmKind::NotObserved]);
    assert!(!c.reap.is_closed() && c.reap.receipt().is_none());
    let closed = c.reap.close_by_hand("operator anna", c.now);
    assert!(closed.is_closed());
    let receipt = closed.receipt().unwrap();
    assert_eq!((receipt.terminated, receipt.after_deadline_ms()), (None, None), "it does not claim to have seen it");
    assert!(receipt.billed_ms() < MINUTE_MS);
}

#[test]
fn one_that_cannot_be_looked_at_is_asked_to_end_all_the_same() {
    let mut c = Case::new(InstanceState::Running);
    c.blind = Some(error(FailureKind::Throttled, "DescribeInstances"));
    c.run(MINUTE_MS);
    assert!(c.acts.len() >= 3 && c.acts.iter().all(|(_, a)| matches!(a, Act::Terminate(_))));
}

#[test]
fn a_schedule_with_nothing_left_to_end_is_removed_and_one_that_fired_stays() {
    let mut early = Case::new(InstanceState::Terminated);
    early.run(MINUTE_MS);
    assert!(matches!(early.acts[..], [(_, Act::DeleteSchedule(_))]), "{:?}", early.acts);
    let mut late = Case::new(InstanceState::Terminated);
    late.now = START.plus_ms(HOUR_MS);
    late.run(MINUTE_MS);
    assert!(late.acts.is_empty() && late.reap.is_closed());
}

#[test]
fn a_reap_is_stored_and_read_again_as_it_was() {
    let mut c = Case::new(InstanceState::Terminated);
    for _ in 0..3 {
        let text = serde_json::to_string(&c.reap).unwrap();
        assert_eq!(serde_json::from_str::<Reap>(&text).unwrap(), c.reap);
        c.turn();
    }
}

#[test]
fn what_no_launch_and_no_reap_knows_is_a_stray_and_a_launch_under_way_is_not() {
    let (seen, owned) = instance(InstanceState::Running);
    let token = owned.token().unwrap();
    let canaries = BTreeSet::from([support::canary()]);
    let scope = Scope::new(support::OURS, Regions::All, canaries, Mode::Armed, HOUR_MS).unwrap();
    let mut theirs = seen.clone();
    theirs.token = Some(seen.token.as_ref().unwrap().replace("01010101", "02020202"));
    let strays = |all: &[Instance], tokens, reaps| strays(&scope, all, &tokens, &reaps);
    let all = &[seen.clone(), theirs];
    assert!(strays(all, BTreeSet::from([token]), BTreeSet::new()).is_empty(), "its launch may not know it yet");
    assert!(strays(all, BTreeSet::new(), BTreeSet::from([owned.clone()])).is_empty());
    assert!(strays(&[instance(InstanceState::ShuttingDown).0], BTreeSet::new(), BTreeSet::new()).is_empty());
    let found = strays(all, BTreeSet::new(), BTreeSet::new());
    assert_eq!(found.len(), 1);
    assert_eq!((&found[0].0, found[0].1.kind), (&owned, AlarmKind::Stray));
}

#[test]
fn a_canary_is_no_stray() {
    let scope = Scope::new(support::OURS, Regions::All, BTreeSet::from([support::canary()]), Mode::Armed, HOUR_MS);
    let scope = scope.unwrap();
    let found = |seen: Instance| strays(&scope, &[seen], &BTreeSet::new(), &BTreeSet::new()).len();
    let canary = support::canary_instance(None);
    assert_eq!(found(canary.clone()), 0);
    assert_eq!(
        found(Instance { state: InstanceState::Running, ..canary.clone() }),
        0,
        "one that was named, whatever it does"
    );
    let mut unnamed = Instance { id: "i-0000000000000000d".parse().unwrap(), ..canary };
    assert_eq!(found(unnamed.clone()), 0, "the sweep tells of it");
    unnamed.state = InstanceState::Running;
    assert_eq!(found(unnamed), 1);
    let (mut host, _) = instance(InstanceState::Running);
    host.tags.insert(tags::ROLE.to_owned(), tags::CANARY.to_owned());
    assert_eq!(found(host), 1, "no tag makes a host a canary");
}

proptest! {
    /// Whatever is shown, in whatever order: it closes if and only if `terminated` was among it.
    #[test]
    fn it_closes_on_an_observed_terminated_and_on_nothing_else(
        shown in prop::collection::vec(
            prop_oneof![
                Just(None), Just(Some(InstanceState::Pending)), Just(Some(InstanceState::Running)),
                Just(Some(InstanceState::Stopping)), Just(Some(InstanceState::Stopped)),
                Just(Some(InstanceState::ShuttingDown)), Just(Some(InstanceState::Terminated)),
            ],
            1..40,
        ),
        step_ms in 1_000u64..HOUR_MS,
    ) {
        let mut c = Case::new(InstanceState::Running);
        let whole = c.seen.clone();
        let mut terminated = false;
        for state in shown {
            c.seen = whole.clone().zip(state).map(|(i, state)| Instance { state, ..i });
            terminated |= state == Some(InstanceState::Terminated);
            c.turn();
            prop_assert_eq!(c.reap.receipt().is_some(), terminated);
            c.now = c.now.plus_ms(step_ms);
        }
    }
}
