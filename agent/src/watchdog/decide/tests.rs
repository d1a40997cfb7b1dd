use drums_common::{
    ids::Generation,
    lease::AgentLease,
    wire::latest::{BeatAck, Welcome},
};
use proptest::prelude::*;

use super::*;

const MINUTE_MS: u64 = 60_000;
const FINISH_MS: u64 = 5 * MINUTE_MS;
const LIFE_MS: u64 = 30 * MINUTE_MS;
/// The wall clock at boot.
const BOOTED: Micros = Micros(1_796_000_000_000_000);

fn at(ms: u64) -> MonoMicros {
    MonoMicros(0).plus_ms(ms)
}

fn bounds(lifetime_ms: u64) -> Bounds {
    Bounds { deadline: BOOTED.plus_ms(lifetime_ms), lifetime_ms }
}

fn lease(life_ends_ms: u64) -> Lease {
    Lease { boot: "this".to_owned(), life_ends: at(life_ends_ms), life_ms: LIFE_MS, deadline: None }
}

fn watch(lifetime_ms: u64, given_ms: Option<u64>) -> Watch {
    let mut watch = Watch::begin("this".to_owned(), at(0), FINISH_MS, 0, given_ms);
    watch.saw_bounds(bounds(lifetime_ms));
    watch
}

/// When it powers off if nothing more is ever seen, by clocks that go on together from `now_ms`; with why. It is looked at
/// when it asked for it and never between.
fn ends(watch: &Watch, mut now_ms: u64, wall_at_boot: Micros) -> (u64, Why) {
    for _ in 0..10_000 {
        match watch.next(at(now_ms), wall_at_boot.plus_ms(now_ms)) {
            Next::PowerOff(why) => return (now_ms, why),
            Next::Wait { boottime, realtime } => {
                let by_wall = realtime.map_or(u64::MAX, |r| r.ms_since(wall_at_boot));
                let next_ms = boottime.ms_since(at(0)).min(by_wall);
                assert!(next_ms > now_ms, "it asked to be woken in the past, at {next_ms} ms");
                now_ms = next_ms;
            }
        }
    }
    panic!("it never powers off");
}

#[test]
fn with_nothing_but_its_bounds_it_ends_at_its_deadline() {
    assert_eq!(ends(&watch(90 * MINUTE_MS, None), 0, BOOTED), (90 * MINUTE_MS, Why::Deadline));
}

#[test]
fn a_clock_that_is_years_wrong_extends_nothing() {
    let year_us = 365 * 24 * 3_600 * 1_000_000;
    let watch = watch(90 * MINUTE_MS, None);
    let behind = Micros(BOOTED.0 - 10 * year_us);
    assert_eq!(ends(&watch, 0, behind), (90 * MINUTE_MS, Why::Lifetime));
    // Ahead it ends early: too early is what a wrong clock may cost, too late is not.
    let ahead = Micros(BOOTED.0 + 10 * year_us);
    assert_eq!(ends(&watch, 0, ahead), (0, Why::Deadline));
    // Set back while it waits.
    assert!(matches!(watch.next(at(80 * MINUTE_MS), behind), Next::Wait { .. }));
    assert_eq!(ends(&watch, 80 * MINUTE_MS, behind), (90 * MINUTE_MS, Why::Lifetime));
}

#[test]
fn the_lifetime_is_counted_over_all_boots() {
    let mut watch = Watch::begin("this".to_owned(), at(10_000), FINISH_MS, 50 * MINUTE_MS, None);
    watch.saw_bounds(bounds(90 * MINUTE_MS));
    let behind = Micros(0);
    assert_eq!(ends(&watch, 10_000, behind), (40 * MINUTE_MS, Why::Lifetime));
    let mut late = Watch::begin("this".to_owned(), at(10_000), FINISH_MS, 100 * MINUTE_MS, None);
    late.saw_bounds(bounds(90 * MINUTE_MS));
    assert_eq!(late.next(at(10_000), behind), Next::PowerOff(Why::Lifetime));
}

#[test]
fn a_lease_that_nobody_renews_ends_it_after_the_time_to_finish() {
    let mut watch = watch(600 * MINUTE_MS, None);
    watch.saw_lease(&lease(LIFE_MS + 6 * MINUTE_MS), at(6 * MINUTE_MS)).unwrap();
    let over_ms = 36 * MINUTE_MS + step_ms(LIFE_MS) + FINISH_MS;
    assert_eq!(ends(&watch, 6 * MINUTE_MS, BOOTED), (over_ms, Why::LifeLease));
    // The host slept through it: the first look after that ends it.
    assert_eq!(watch.next(at(100 * MINUTE_MS), BOOTED), Next::PowerOff(Why::LifeLease));
    // Renewed, also at the last moment.
    watch.saw_lease(&lease(over_ms + LIFE_MS - 1), at(over_ms - 1)).unwrap();
    assert!(matches!(watch.next(at(over_ms), BOOTED), Next::Wait { .. }));
}

#[test]
fn no_lease_reaches_beyond_the_deadline_and_the_lifetime() {
    let mut watch = watch(40 * MINUTE_MS, None);
    watch.saw_lease(&lease(35 * MINUTE_MS + LIFE_MS), at(35 * MINUTE_MS)).unwrap();
    assert_eq!(ends(&watch, 35 * MINUTE_MS, BOOTED), (40 * MINUTE_MS, Why::Deadline));
    assert_eq!(ends(&watch, 35 * MINUTE_MS, Micros(0)), (40 * MINUTE_MS, Why::Lifetime));
}

#[test]
fn a_deadline_only_comes_closer_whoever_says_it() {
    let mut watch = watch(90 * MINUTE_MS, None);
    let told = |ms| Lease { deadline: Some(BOOTED.plus_ms(ms)), ..lease(LIFE_MS) };
    watch.saw_lease(&told(900 * MINUTE_MS), at(0)).unwrap();
    watch.saw_bounds(bounds(900 * MINUTE_MS));
    assert_eq!(watch.next(at(0), BOOTED.plus_ms(90 * MINUTE_MS)), Next::PowerOff(Why::Deadline));
    // Also from a lease that is not usable otherwise.
    let other = Lease { boot: "other".to_owned(), ..told(20 * MINUTE_MS) };
    assert_eq!(watch.saw_lease(&other, at(0)), Err(Unusable::OtherBoot));
    assert_eq!(ends(&watch, 0, BOOTED), (20 * MINUTE_MS, Why::Deadline));
}

#[test]
fn what_cannot_be_gone_by_takes_nothing_back() {
    let mut watch = watch(600 * MINUTE_MS, None);
    watch.saw_lease(&lease(LIFE_MS), at(0)).unwrap();
    let before = ends(&watch, 0, BOOTED);
    assert_eq!(before, (LIFE_MS + step_ms(LIFE_MS) + FINISH_MS, Why::LifeLease));
    let forever = Lease { life_ends: MonoMicros(u64::MAX), ..lease(0) };
    assert!(matches!(watch.saw_lease(&forever, at(1)), Err(Unusable::TooLong { .. })));
    assert_eq!(watch.saw_lease(&Lease { life_ms: 0, ..lease(0) }, at(1)), Err(Unusable::Zero));
    let other = Lease { boot: "other".to_owned(), ..lease(2 * LIFE_MS) };
    assert_eq!(watch.saw_lease(&other, at(1)), Err(Unusable::OtherBoot));
    assert_eq!(ends(&watch, 1, BOOTED), before);
}

#[test]
fn after_a_reboot_or_without_its_file_it_is_one_lease_more_and_never_unlimited() {
    let given = watch(600 * MINUTE_MS, Some(LIFE_MS));
    assert_eq!(ends(&given, 0, BOOTED), (LIFE_MS + FINISH_MS, Why::LifeLease));
    let mut left = watch(600 * MINUTE_MS, None);
    let other = Lease { boot: "other".to_owned(), ..lease(5 * LIFE_MS) };
    assert_eq!(left.saw_lease(&other, at(0)), Err(Unusable::OtherBoot));
    assert_eq!(ends(&left, 0, BOOTED), (LIFE_MS + FINISH_MS, Why::LifeLease));
    // A short lease does not end a slow boot.
    assert_eq!(ends(&watch(600 * MINUTE_MS, Some(1_000)), 0, BOOTED), (BOOT_MS + FINISH_MS, Why::LifeLease));
}

#[test]
fn bounds_that_nobody_can_read_end_it_within_a_boot() {
    let watch = Watch::begin("this".to_owned(), at(0), FINISH_MS, 0, None);
    let Next::Wait { boottime, .. } = watch.next(at(0), BOOTED) else { panic!("it waits for them") };
    assert_eq!(boottime, at(LOOK_MS), "it looks again soon");
    assert_eq!(ends(&watch, 0, BOOTED), (BOOT_MS, Why::Unbounded));
    // With a lease too, which says nothing of the lifetime.
    let mut told = watch.clone();
    let with_deadline = Lease { deadline: Some(BOOTED.plus_ms(5 * MINUTE_MS)), ..lease(LIFE_MS) };
    told.saw_lease(&with_deadline, at(0)).unwrap();
    assert_eq!(ends(&told, 0, BOOTED), (5 * MINUTE_MS, Why::Deadline));
    assert_eq!(ends(&told, 0, Micros(0)), (BOOT_MS, Why::Unbounded));
}

/// An agent's lease as it is, and what its watchdog is told of it.
struct Host {
    lease: AgentLease,
    watch: Watch,
    written: Option<MonoMicros>,
}

impl Host {
    fn look(&mut self, now: MonoMicros) {
        let Some((life_ends, life_ms)) = self.lease.given() else { return };
        if crate::watchdog::lease::is_due(self.written, life_ends, life_ms) {
            let lease = Lease { boot: "this".to_owned(), life_ends, life_ms, deadline: None };
            self.watch.saw_lease(&lease, now).unwrap();
            self.written = Some(life_ends);
        }
    }
}

/// EXP-011 was a host that its own backstop killed while it booted. A boot of six minutes, a declared silence of forty,
/// and an outage of the coordinator of twenty-eight (two of its grace periods are seconds) under a life lease of thirty:
/// the host lives, and no wake-up falls into the silence.
#[test]
fn a_slow_boot_forty_quiet_minutes_and_an_outage_power_no_healthy_host_off() {
    let welcome = Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(1),
        beat_ms: 500,
        dispatch_lease_ms: 10_000,
        life_lease_ms: LIFE_MS,
    };
    let mut host = Host { lease: AgentLease::default(), watch: watch(240 * MINUTE_MS, None), written: None };
    let (boot, quiet, outage) = (6 * MINUTE_MS, 10..50, 60..88);
    for s in 0..200 * 60 {
        let (now, minute) = (at(s * 1_000), s / 60);
        let heard = s * 1_000 >= boot && !quiet.contains(&minute) && !outage.contains(&minute);
        if s * 1_000 == boot {
            host.lease.welcomed(&welcome, now).unwrap();
        } else if heard {
            host.lease.acked(&BeatAck { generation: Generation(1), number: s, sent: now }, now);
        }
        if minute == quiet.start && s % 60 == 0 {
            host.lease.silence_agreed(now, 40 * MINUTE_MS);
        }
        // Written when it begins, and then not before it ends.
        if !quiet.contains(&minute) || s == quiet.start * 60 {
            host.look(now);
        }
        match host.watch.next(now, BOOTED.plus_ms(s * 1_000)) {
            Next::PowerOff(why) => panic!("powered off in minute {minute}: {why}"),
            Next::Wait { boottime, .. } if quiet.contains(&minute) => {
                assert!(boottime >= at(quiet.end * MINUTE_MS), "it would wake up at {boottime:?}, within the silence");
            }
            Next::Wait { .. } => {}
        }
        if outage.contains(&minute) {
            assert!(!host.lease.life_expired(now), "the agent's own lease");
        }
    }
    // And what it is for: heard no more, it is off.
    let (off_ms, why) = ends(&host.watch, 200 * MINUTE_MS, BOOTED);
    assert_eq!(why, Why::LifeLease);
    assert!((230..=236).contains(&(off_ms / MINUTE_MS)), "{off_ms}");
}

proptest! {
    /// Whatever is seen, in whatever order, at whatever times: the deadline and the lifetime hold.
    #[test]
    fn nothing_that_is_seen_gives_more_time_than_the_bounds(
        lifetime in 1u64..10_000, lived in 0u64..10_000, given in proptest::option::of(any::<u64>()),
        seen in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<bool>(), proptest::option::of(any::<i64>())), 0..20),
        more in proptest::collection::vec((any::<i64>(), any::<u64>()), 0..5), skew_s in -100_000i64..100_000,
    ) {
        let mut watch = Watch::begin("this".to_owned(), at(0), FINISH_MS, lived, given);
        watch.saw_bounds(bounds(lifetime));
        for (ends, life_ms, this, deadline) in seen {
            let boot = if this { "this" } else { "other" }.to_owned();
            let _ = watch.saw_lease(&Lease { boot, life_ends: MonoMicros(ends), life_ms, deadline: deadline.map(Micros) }, at(0));
        }
        for (deadline, lifetime_ms) in more {
            watch.saw_bounds(Bounds { deadline: Micros(deadline), lifetime_ms });
        }
        let off = |ms: u64, wall: Micros| matches!(watch.next(at(ms), wall), Next::PowerOff(_));
        prop_assert!(off(0, BOOTED.plus_ms(lifetime)));
        prop_assert!(off(lifetime.saturating_sub(lived), Micros(BOOTED.0 + skew_s * 1_000_000)));
    }
}
