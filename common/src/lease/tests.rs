use proptest::prelude::*;

use super::*;

const S: u64 = 1_000_000;

fn at(seconds: f64) -> MonoMicros {
    MonoMicros((seconds * S as f64) as u64)
}
fn host() -> HostId {
    "h1".parse().unwrap()
}
fn welcome(g: u32) -> Welcome {
    Welcome {
        host: host(),
        generation: Generation(g),
        beat_ms: 1_000,
        dispatch_lease_ms: 10_000,
        life_lease_ms: 1_800_000,
    }
}
fn ack(g: u32, sent: MonoMicros) -> BeatAck {
    BeatAck { generation: Generation(g), number: 1, sent }
}
fn beat(g: u32, number: u64, quiet_ms: u64) -> Beat {
    Beat { generation: Generation(g), number, sent: at(0.0), activity: Activity::Idle, quiet_ms, progress: number }
}

#[test]
fn an_agent_that_comes_back_and_hears_nobody_ends_what_it_held() {
    let mut lease = AgentLease::default();
    assert_eq!(lease.life_left_ms(MonoMicros(0), None), u64::MAX);
    lease.resumed(1_000, MonoMicros(5_000));
    assert!(!lease.may_take_new_block(MonoMicros(5_000)));
    assert!(!lease.life_expired(MonoMicros(1_003_000)) && lease.life_expired(MonoMicros(1_005_000)));
    let times = LeaseTimes::default();
    let welcome = Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(1),
        beat_ms: times.beat_ms,
        dispatch_lease_ms: times.dispatch_ms,
        life_lease_ms: times.life_ms,
    };
    lease.welcomed(&welcome, MonoMicros(900_000)).unwrap();
    assert_eq!(lease.life_left_ms(MonoMicros(900_000), None), times.life_ms);
}

#[test]
fn an_agent_that_was_never_welcomed_takes_nothing() {
    let mut lease = AgentLease::default();
    assert!(!lease.may_take_new_block(at(0.0)));
    assert!(!lease.life_expired(at(1e6)));
    assert!(!lease.acked(&ack(0, at(0.0)), at(0.0)));
    assert_eq!(lease.life_left_ms(at(1.0), Some(at(3.0))), 2_000);
}

#[test]
fn leases_count_from_when_the_beat_was_sent() {
    let mut lease = AgentLease::default();
    lease.welcomed(&welcome(3), at(0.0)).unwrap();
    // Sent at 5 s, acknowledged at 9 s: dispatch ends at 15 s, not at 19 s.
    assert!(lease.acked(&ack(3, at(5.0)), at(9.0)));
    assert!(lease.may_take_new_block(at(14.9)));
    assert!(!lease.may_take_new_block(at(15.0)));
    assert!(!lease.life_expired(at(1804.9)));
    assert!(lease.life_expired(at(1805.0)));
    assert_eq!(lease.life_left_ms(at(805.0), Some(at(1000.0))), 195_000);
}

#[test]
fn stale_future_and_late_acknowledgements_renew_nothing() {
    let mut lease = AgentLease::default();
    lease.welcomed(&welcome(3), at(10.0)).unwrap();
    assert!(!lease.acked(&ack(2, at(11.0)), at(12.0)), "older generation");
    assert!(!lease.acked(&ack(3, at(13.0)), at(12.0)), "not sent yet");
    assert!(!lease.acked(&ack(3, at(9.0)), at(12.0)), "older than what is held");
    assert_eq!(lease.welcomed(&welcome(2), at(12.0)), Err(Stale { got: Generation(2), held: Generation(3) }));
    assert!(lease.may_take_new_block(at(19.9)));
}

#[test]
fn silence_is_shown_then_judged_and_never_before_a_full_grace_of_uptime() {
    let times = LeaseTimes::default();
    let mut leases = HostLeases::new(times, at(100.0));
    leases.welcomed(host(), Generation(1), at(100.0)).unwrap();
    let health = |l: &HostLeases, t| l.health(&host(), at(t)).unwrap();
    assert_eq!(health(&leases, 100.0), Health::Alive);
    assert_eq!(health(&leases, 102.5), Health::Silent { for_ms: 2_500 });
    assert_eq!(health(&leases, 1899.0), Health::Silent { for_ms: 1_799_000 });
    assert!(matches!(health(&leases, 1901.7), Health::Silent { .. }), "its clock may be the slower one");
    assert!(matches!(health(&leases, 1901.81), Health::Lost { .. }));
    // It comes back.
    leases.welcomed(host(), Generation(1), at(1902.0)).unwrap();
    assert_eq!(health(&leases, 1902.0), Health::Alive);
    assert_eq!(leases.health(&"h9".parse().unwrap(), at(0.0)), None);
}

#[test]
fn a_coordinator_that_was_stalled_judges_nobody_before_it_has_read_what_arrived() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    (0..=10).for_each(|s| leases.looked(at(f64::from(s))));
    // Stopped for an hour, in which the host went on beating.
    leases.looked(at(3610.0));
    assert!(matches!(leases.health(&host(), at(3610.0)), Some(Health::Silent { .. })));
    let mut read = leases.clone();
    read.beat(&host(), &beat(1, 1, 0), at(3611.0)).unwrap();
    assert_eq!(read.health(&host(), at(3611.0)), Some(Health::Alive));
    // One that sent nothing is judged once the grace is over.
    (3611..=3620).for_each(|s| leases.looked(at(f64::from(s))));
    assert!(matches!(leases.health(&host(), at(3619.9)), Some(Health::Silent { .. })));
    assert!(matches!(leases.health(&host(), at(3620.0)), Some(Health::Lost { .. })));
}

#[test]
fn an_agent_that_lives_and_whose_work_does_not_move_is_stuck() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    let mut n = 0;
    let mut health = |leases: &mut HostLeases, t: f64, progress: u64| {
        n += 1;
        let beat = Beat { progress, ..beat(1, n, 0) };
        leases.beat(&host(), &beat, at(t));
        leases.health(&host(), at(t)).unwrap()
    };
    assert_eq!(health(&mut leases, 500.0, 7), Health::Alive, "nothing is expected of it");
    let bound = BTreeMap::from([(host(), 60_000)]);
    leases.expect_progress(&bound, at(600.0));
    leases.expect_progress(&bound, at(630.0));
    assert_eq!(health(&mut leases, 659.0, 7), Health::Alive);
    assert_eq!(health(&mut leases, 660.0, 7), Health::Stuck { for_ms: 60_000 });
    assert_eq!(leases.health(&host(), at(663.0)), Some(Health::Silent { for_ms: 3_000 }), "silence says less");
    assert_eq!(health(&mut leases, 670.0, 8), Health::Alive);
    assert_eq!(health(&mut leases, 730.0, 8), Health::Stuck { for_ms: 60_000 });
    leases.expect_progress(&BTreeMap::new(), at(731.0));
    assert_eq!(health(&mut leases, 731.0, 8), Health::Alive);
    // Its agent is started anew and counts from nothing.
    leases.welcomed(host(), Generation(1), at(740.0)).unwrap();
    leases.expect_progress(&bound, at(740.0));
    leases.beat(&host(), &Beat { progress: 1, ..beat(1, 1, 0) }, at(799.0)).unwrap();
    leases.heard(&host(), at(800.0));
    assert_eq!(leases.health(&host(), at(800.0)), Some(Health::Alive));
}

#[test]
fn declared_silence_is_expected_and_overrunning_it_is_a_failure() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    leases.beat(&host(), &beat(1, 1, 40 * 60_000), at(1.0)).unwrap();
    let health = |l: &HostLeases, t| l.health(&host(), at(t)).unwrap();
    assert_eq!(health(&leases, 21.0), Health::Quiet { left_ms: 2_380_000 });
    leases.beat(&host(), &beat(1, 2, 30_000), at(22.0)).unwrap();
    assert_eq!(health(&leases, 51.0), Health::Quiet { left_ms: 1_000 });
    assert_eq!(health(&leases, 55.5), Health::QuietOverrun { by_ms: 1_000 });
    leases.beat(&host(), &beat(1, 3, 0), at(56.0)).unwrap();
    assert_eq!(health(&leases, 56.0), Health::Alive);
}

#[test]
fn silence_that_was_agreed_on_may_be_longer_than_the_life_lease_and_no_longer_than_declared() {
    let (mut leases, mut agent) = (HostLeases::new(LeaseTimes::default(), at(0.0)), AgentLease::default());
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    agent.welcomed(&welcome(1), at(0.0)).unwrap();
    leases.beat(&host(), &beat(1, 1, 40 * 60_000), at(1.0)).unwrap();
    agent.silence_agreed(at(1.0), 40 * 60_000);
    // 40 minutes from second 1, the slack, and what clocks may be apart after an hour.
    let (end, judged) = (2401.0, 2401.0 + 2.5 + 3.61);
    (0..5_000).for_each(|s| leases.looked(at(f64::from(s))));
    assert!(!agent.life_expired(at(end - 0.1)) && agent.life_expired(at(end)));
    assert!(!agent.may_take_new_block(at(11.0)), "silence renews no dispatch lease");
    assert!(matches!(leases.health(&host(), at(judged - 0.1)), Some(Health::QuietOverrun { .. })));
    assert!(matches!(leases.health(&host(), at(judged)), Some(Health::Lost { .. })));
    // What is declared for ever is cut.
    leases.beat(&host(), &beat(1, 2, u64::MAX), at(2401.0)).unwrap();
    agent.silence_agreed(at(2401.0), u64::MAX);
    assert!(agent.life_expired(at(2401.0 + 3600.0)));
    assert!(matches!(leases.health(&host(), at(2401.0 + 3606.2)), Some(Health::Lost { .. })));
}

#[test]
fn a_coordinator_that_was_restarted_waits_out_any_silence_that_was_agreed_on_before() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.expect(host(), Generation(1));
    let mut agent = AgentLease::default();
    agent.welcomed(&welcome(1), at(0.0)).unwrap();
    // Declared to the one before, a moment before its end.
    agent.silence_agreed(at(0.0), u64::MAX);
    (0..4_000).for_each(|s| leases.looked(at(f64::from(s))));
    for (t, stopped, lost) in [(3599.9, false, false), (3603.5, true, false), (3603.7, true, true)] {
        assert_eq!(agent.life_expired(at(t)), stopped, "{t}");
        assert_eq!(matches!(leases.health(&host(), at(t)), Some(Health::Lost { .. })), lost, "{t}");
    }
    // Once it is heard, this one knows.
    leases.heard(&host(), at(1.0));
    assert!(matches!(leases.health(&host(), at(1803.0)), Some(Health::Lost { .. })));
}

#[test]
fn a_fenced_host_renews_nothing_under_its_old_generation() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    leases.fence(&host(), Generation(2));
    assert_eq!(leases.beat(&host(), &beat(1, 1, 0), at(1.0)), None);
    assert!(leases.welcomed(host(), Generation(1), at(1.0)).is_err());
    assert!(leases.welcomed(host(), Generation(2), at(1.0)).is_ok());
}

#[test]
fn beats_of_another_generation_or_out_of_order_say_nothing_about_the_present() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(2), at(0.0)).unwrap();
    assert_eq!(leases.beat(&host(), &beat(1, 9, 0), at(1.0)), None);
    assert!(leases.beat(&host(), &beat(2, 5, 10_000), at(2.0)).is_some());
    assert_eq!(leases.beat(&host(), &beat(2, 4, 0), at(2.1)), None, "heard, and answered a moment ago");
    assert!(matches!(leases.health(&host(), at(3.0)), Some(Health::Quiet { .. })), "beat 4 was overtaken");
    assert_eq!(leases.get(&host()).unwrap().progress, 5);
    assert!(leases.welcomed(host(), Generation(1), at(3.0)).is_err());
}

#[test]
fn a_beat_in_an_eighth_of_the_dispatch_lease_is_answered_and_so_is_every_announcement() {
    let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
    leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
    let mut n = 0;
    let mut answered = |t: f64, quiet_ms| {
        n += 1;
        leases.beat(&host(), &beat(1, n, quiet_ms), at(t)).is_some()
    };
    let answers: Vec<bool> = (0..8).map(|i| answered(f64::from(i) * 0.5, 0)).collect();
    assert_eq!(answers, [true, false, false, true, false, false, true, false]);
    assert!(answered(4.0, 2_000) && answered(4.1, 2_000), "whoever wants to be silent waits for the answer");
}

#[test]
fn lease_times_that_mean_never_or_always_are_refused() {
    assert_eq!(LeaseTimes::default().validate(), Ok(()));
    let zero = LeaseTimes { life_ms: 0, ..Default::default() };
    assert_eq!(zero.validate(), Err(BadLeaseTimes::Zero("life_ms")));
    let short = LeaseTimes { dispatch_ms: 900, ..Default::default() };
    assert!(short.validate().unwrap_err().to_string().contains("twice beat_ms"));
}

proptest! {
    /// Whatever the order and delay of acknowledgements, an agent never believes longer in its lease than
    /// `dispatch` after the newest beat that it really sent and that was acknowledged.
    #[test]
    fn the_agent_never_outlives_its_newest_acknowledged_beat(
        acks in proptest::collection::vec((0u64..100, 0u64..100, 0u32..3), 0..40),
    ) {
        let mut lease = AgentLease::default();
        lease.welcomed(&welcome(1), MonoMicros(0)).unwrap();
        let mut newest = 0;
        for (sent, delay, generation) in acks {
            lease.acked(&ack(generation, MonoMicros(sent * S)), MonoMicros((sent + delay) * S));
            if generation == 1 { newest = newest.max(sent); }
        }
        prop_assert!(!lease.may_take_new_block(MonoMicros((newest + 10) * S)));
        prop_assert!(lease.may_take_new_block(MonoMicros((newest + 10) * S - 1)));
        prop_assert!(lease.life_expired(MonoMicros((newest + 1800) * S)));
    }

    /// The agent stops before the coordinator judges it: with clocks that differ by what clocks may and any delays, a
    /// host judged lost by the coordinator has a lapsed life lease.
    #[test]
    fn a_lost_host_has_already_stopped(
        beats in proptest::collection::vec((0u64..3600, 0u64..5, any::<bool>()), 0..20),
        now in 0u64..8000,
        slow_ppm in 0..=DRIFT_PPM,
    ) {
        let by_agent = |us: u64| MonoMicros(us - us * slow_ppm / 1_000_000);
        let mut agent = AgentLease::default();
        let mut leases = HostLeases::new(LeaseTimes::default(), MonoMicros(0));
        agent.welcomed(&welcome(1), MonoMicros(0)).unwrap();
        leases.welcomed(host(), Generation(1), MonoMicros(0)).unwrap();
        for (n, (sent, delay, ack_arrives)) in beats.into_iter().enumerate() {
            if sent + delay > now { continue; }
            let b = Beat { sent: by_agent(sent * S), ..beat(1, n as u64 + 1, 0) };
            let received = MonoMicros((sent + delay) * S);
            if let Some(a) = leases.beat(&host(), &b, received) && ack_arrives {
                agent.acked(&a, by_agent((sent + delay) * S));
            }
        }
        if matches!(leases.health(&host(), MonoMicros(now * S)), Some(Health::Lost { .. })) {
            prop_assert!(agent.life_expired(by_agent(now * S)));
        }
    }
}
