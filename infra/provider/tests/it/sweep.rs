//! The sweep: exact, complete or failed, and never blind without saying so.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    alarm::AlarmKind,
    cloud::{Attributes, Instance, InstanceState},
    deadline::{Campaign, TagSays},
    failure::FailureKind,
    host::OwnedHost,
    sweep::{self, BadScope, Mode, Regions, Scope, Spare, View},
    tags,
    words::{Region, instant_text},
};

use super::{
    memory::Memory,
    support::{self, MINUTE_MS, OURS, START, THEIRS, World, canary, error, ready},
};

const LIFE_MS: u64 = 60 * MINUTE_MS;
const LONGEST_MS: u64 = 24 * 60 * MINUTE_MS;

fn scope(mode: Mode) -> Scope {
    Scope::new(OURS, Regions::All, BTreeSet::from([canary()]), mode, LONGEST_MS).unwrap()
}

fn view(instances: Vec<Instance>, now: Micros) -> View {
    let region = support::region();
    View {
        enabled: Ok(vec![region.clone()]),
        regions: BTreeMap::from([(region, Ok(instances))]),
        aws: Ok(now),
        local: now,
    }
}

/// A host of an installation, launched at [`START`] with a life of [`LIFE_MS`].
fn host(installation: InstallationId, number: u64) -> Instance {
    let launch = support::launch(LIFE_MS);
    let mut order = launch.order();
    let campaign = Campaign::new("c1".parse().unwrap(), START.plus_ms(LIFE_MS), None).unwrap();
    order.host = OwnedHost::first(installation, format!("h{number}").parse().unwrap(), campaign);
    support::instance_of(&order, number, START)
}

fn with(mut instance: Instance, key: &str, value: &str) -> Instance {
    instance.tags.insert(key.to_owned(), value.to_owned());
    instance
}

fn after(minutes: u64) -> Micros {
    START.plus_ms(minutes * MINUTE_MS)
}

fn killed(sweep: &sweep::Sweep) -> Vec<String> {
    sweep.orders().iter().map(|k| k.instance().to_string()).collect()
}

fn kinds(sweep: &sweep::Sweep) -> Vec<AlarmKind> {
    sweep.alarms.iter().map(|a| a.kind).collect()
}

#[test]
fn what_is_overdue_is_ended_and_what_is_not_is_spared() {
    let (canary, host) = (support::canary_instance(None), host(OURS, 1));
    let early = sweep::decide(&scope(Mode::Armed), &view(vec![canary.clone(), host.clone()], after(59)));
    assert!(killed(&early).is_empty() && early.is_complete());
    let why: Vec<_> = early.spared.iter().map(|s| (s.why, s.due)).collect();
    assert_eq!(why, [(Spare::Canary, None), (Spare::NotDue, Some(after(60)))]);
    let due = sweep::decide(&scope(Mode::Armed), &view(vec![canary, host], after(60)));
    assert_eq!(killed(&due), ["i-00000000000000001"]);
    assert!(due.is_complete() && due.alarms.is_empty(), "{:?}", due.alarms);
}

#[test]
fn in_shadow_it_says_and_does_not() {
    let all = vec![support::canary_instance(None), host(OURS, 1)];
    let sweep = sweep::decide(&scope(Mode::Shadow), &view(all, after(60)));
    assert_eq!((sweep.doomed.len(), sweep.orders().len()), (1, 0));
}

#[test]
fn row_02_without_its_canary_a_sweep_that_found_nothing_has_failed() {
    for shown in [Vec::new(), vec![host(OURS, 1)]] {
        let sweep = sweep::decide(&scope(Mode::Armed), &view(shown.clone(), after(60)));
        assert_eq!(kinds(&sweep), [AlarmKind::CanaryMissing]);
        assert!(!sweep.is_complete());
        assert_eq!(killed(&sweep).len(), shown.len(), "what it did find is ended all the same");
    }
    let mut gone = support::canary_instance(None);
    gone.state = InstanceState::Terminated;
    assert!(!sweep::decide(&scope(Mode::Armed), &view(vec![gone], after(60))).is_complete(), "a dead canary sings not");
}

#[test]
fn row_02_without_a_database_hosts_launched_by_hand_with_our_tags_are_found_in_every_region() {
    let other: Region = "us-east-1".parse().unwrap();
    // More than a page of them: a listing goes through all pages or fails, so here they are simply many.
    let by_hand: Vec<Instance> = (1..=1_500)
        .map(|n| {
            let mut it = host(OURS, n);
            it.token = None;
            it.region = other.clone();
            it
        })
        .collect();
    let mut view = view(vec![support::canary_instance(None)], after(60));
    view.enabled = Ok(vec![support::region(), other.clone()]);
    view.regions.insert(other.clone(), Ok(by_hand));
    let sweep = sweep::decide(&scope(Mode::Armed), &view);
    assert!(sweep.is_complete(), "{:?}", sweep.alarms);
    assert_eq!(killed(&sweep).len(), 1_500);
    view.regions.insert(other.clone(), Err(error(FailureKind::Denied, "DescribeInstances")));
    assert_eq!(kinds(&sweep::decide(&scope(Mode::Armed), &view)), [AlarmKind::RegionUnseen]);
    view.regions.remove(&other);
    assert!(!sweep::decide(&scope(Mode::Armed), &view).is_complete(), "a region that was left out");
    view.enabled = Err(error(FailureKind::Denied, "DescribeRegions"));
    assert!(!sweep::decide(&scope(Mode::Armed), &view).is_complete(), "regions that nobody knows");
}

#[test]
fn two_installations_in_one_account_never_touch_each_other() {
    let theirs = host(THEIRS, 2);
    let relabelled = with(host(THEIRS, 3), tags::INSTALLATION, &OURS.to_string());
    let all = vec![support::canary_instance(None), host(OURS, 1), theirs, relabelled];
    let sweep = sweep::decide(&scope(Mode::Armed), &view(all, after(600)));
    assert_eq!(killed(&sweep), ["i-00000000000000001"]);
    assert_eq!(kinds(&sweep), [AlarmKind::Conflict]);
}

#[test]
fn tags_edited_by_hand_shorten_a_life_and_never_lengthen_it() {
    let sooner = with(host(OURS, 1), tags::DEADLINE, &instant_text(after(30)));
    let later = with(host(OURS, 2), tags::DEADLINE, "2999-01-01T00:00:00Z");
    let nonsense = with(host(OURS, 3), tags::DEADLINE, "never");
    let mut stripped = host(OURS, 4);
    stripped.tags.clear();
    let given_away = with(host(OURS, 5), tags::INSTALLATION, &THEIRS.to_string());
    let canary_by_tag = with(host(OURS, 6), tags::ROLE, tags::CANARY);
    let all = vec![support::canary_instance(None), sooner, later, nonsense, stripped, given_away, canary_by_tag];
    let at = |minutes| sweep::decide(&scope(Mode::Armed), &view(all.clone(), after(minutes)));
    assert_eq!(killed(&at(30)), ["i-00000000000000001"]);
    assert_eq!(killed(&at(60)).len(), 6);
    assert_eq!(kinds(&at(30)), [AlarmKind::TagEdited; 4]);
    assert_eq!(at(60).doomed[1].tag, TagSays::Later);
}

#[test]
fn stopped_is_not_gone_and_what_hangs_is_told_of() {
    let state = |n, state| Instance { state, ..host(OURS, n) };
    let all = vec![
        support::canary_instance(None),
        state(1, InstanceState::Stopped),
        state(2, InstanceState::Stopping),
        state(3, InstanceState::ShuttingDown),
        state(4, InstanceState::Terminated),
        state(5, InstanceState::Pending),
    ];
    let due = sweep::decide(&scope(Mode::Armed), &view(all.clone(), after(60)));
    assert_eq!(killed(&due), ["i-00000000000000001", "i-00000000000000002", "i-00000000000000005"]);
    assert_eq!(kinds(&due), [AlarmKind::Stopped; 2]);
    let later = sweep::decide(&scope(Mode::Armed), &view(all, after(70)));
    assert_eq!(kinds(&later).iter().filter(|k| **k == AlarmKind::Hangs).count(), 1);
}

#[test]
fn awss_clock_counts_and_a_wrong_one_here_is_told_of() {
    let mut view = view(vec![support::canary_instance(None), host(OURS, 1)], after(60));
    view.local = Micros(0);
    let sweep = sweep::decide(&scope(Mode::Armed), &view);
    assert_eq!((killed(&sweep).len(), kinds(&sweep)), (1, vec![AlarmKind::Clock]));
    view.aws = Ok(after(1));
    view.local = after(600);
    assert!(killed(&sweep::decide(&scope(Mode::Armed), &view)).is_empty(), "a clock that is ahead kills nobody");
    view.aws = Err(error(FailureKind::NotSent, "GetCallerIdentity"));
    view.local = after(60);
    assert_eq!(killed(&sweep::decide(&scope(Mode::Armed), &view)).len(), 1, "without it this machine's counts");
}

#[test]
fn a_canary_that_nobody_named_is_spared_while_it_costs_nothing_and_told_of() {
    let mut unknown = support::canary_instance(None);
    unknown.id = "i-0000000000000000d".parse().unwrap();
    let mut running = Instance { state: InstanceState::Running, ..unknown.clone() };
    running.id = "i-0000000000000000e".parse().unwrap();
    let sweep =
        sweep::decide(&scope(Mode::Armed), &view(vec![support::canary_instance(None), unknown, running], after(60)));
    assert_eq!(killed(&sweep), ["i-0000000000000000e"], "one that runs is no canary");
    assert_eq!(kinds(&sweep), [AlarmKind::CanaryUnknown]);
}

#[test]
fn a_scope_that_could_see_nothing_is_refused() {
    let new = |regions, canaries, life| Scope::new(OURS, regions, canaries, Mode::Armed, life).unwrap_err();
    let here = BTreeSet::from([canary()]);
    assert_eq!(new(Regions::All, BTreeSet::new(), 1), BadScope::NoCanary);
    assert_eq!(new(Regions::Only(BTreeSet::new()), here.clone(), 1), BadScope::NoRegion);
    let elsewhere = BTreeSet::from(["us-east-1".parse().unwrap()]);
    assert_eq!(new(Regions::Only(elsewhere), here.clone(), 1), BadScope::CanaryOutside(canary()));
    assert_eq!(new(Regions::All, here, 0), BadScope::NoLife);
}

#[test]
fn row_07_with_nothing_but_the_cloud_a_sweep_ends_each_by_a_call_of_its_own_protected_ones_too() {
    let mut world = World::new();
    world.pass(60 * MINUTE_MS);
    let protected = Some(Ok(Attributes { protected: true, stop_protected: true, ..Attributes::MORTAL }));
    world.instances = vec![
        support::canary_instance(None),
        host(OURS, 1),
        Instance { attributes: protected, ..host(OURS, 2) },
        host(OURS, 3),
        host(THEIRS, 4),
    ];
    // The first call fails for good: the others are made all the same.
    world.terminate_fails.push_back(FailureKind::Unknown);
    let cloud = Memory::new(world);
    let scope = scope(Mode::Armed);
    let sweep_once = || {
        let view = ready(sweep::look(&cloud, &scope, after(60)));
        let sweep = sweep::decide(&scope, &view);
        (ready(sweep::carry_out(&cloud, &sweep)), sweep)
    };
    let (done, sweep) = sweep_once();
    assert!(sweep.is_complete());
    let ok: Vec<_> = done.iter().map(|(_, r)| r.is_ok()).collect();
    assert_eq!(ok, [false, true, true]);
    assert_eq!(cloud.noted(), [], "launches are told of a sweep that ended what it should, and of no other");
    assert_eq!(sweep_once().0.len(), 1, "the next sweep has the one that is left");
    assert_eq!(cloud.noted(), [canary()]);
    let shadow = sweep::decide(&self::scope(Mode::Shadow), &ready(sweep::look(&cloud, &scope, after(60))));
    assert!(shadow.is_complete() && ready(sweep::carry_out(&cloud, &shadow)).is_empty());
    assert_eq!(cloud.noted(), [], "a shadow ends nothing");
    let alive: Vec<_> = cloud.world().alive().iter().map(|i| i.id.to_string()).collect();
    assert_eq!(alive, ["i-0000000000000000c", "i-00000000000000004"], "the canary, and another installation's");
}
