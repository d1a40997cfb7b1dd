use std::sync::atomic::{AtomicU64, Ordering};

use drums_common::{
    clock::Micros,
    machine::{Accelerator, MachineIdentity},
};

use super::*;

#[derive(Default)]
struct Hand(AtomicU64);
impl Clock for Hand {
    fn now(&self) -> Micros {
        Micros(0)
    }
    fn boottime(&self) -> MonoMicros {
        MonoMicros(self.0.load(Ordering::Relaxed))
    }
}
impl Hand {
    fn go(&self, ms: u64) {
        self.0.fetch_add(ms * 1_000, Ordering::Relaxed);
    }
}

fn facts() -> HostFacts {
    HostFacts {
        identity: MachineIdentity::default(),
        hostname: String::new(),
        kernel: String::new(),
        os: String::new(),
        cpu_model: String::new(),
        microcode: String::new(),
        mitigations: Default::default(),
        cpus: 2,
        memory_bytes: 0,
        disk_free_bytes: 0,
        cgroup_version: 1,
        accelerator: Accelerator::None,
        accelerator_detail: String::new(),
        tools: Default::default(),
        unfit: Default::default(),
    }
}

fn welcome() -> Welcome {
    Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(1),
        beat_ms: 1_000,
        dispatch_lease_ms: 10_000,
        life_lease_ms: 60_000,
    }
}

fn link() -> (Link, Arc<Hand>) {
    let clock = Arc::new(Hand::default());
    (Link::new(clock.clone(), facts()).0, clock)
}

fn sent(link: &Link) -> Beat {
    match link.shared.next_beat() {
        NextBeat::Send(beat) => beat,
        NextBeat::Hush => panic!("silence where a beat was due"),
    }
}

/// The network side: announces a silence and has it acknowledged while `quiet` waits. The beat that announced it.
fn announcing(link: &Link) -> std::thread::JoinHandle<Beat> {
    let network = link.clone();
    std::thread::spawn(move || {
        loop {
            let NextBeat::Send(beat) = network.shared.next_beat() else { panic!("not announced") };
            network.shared.acked(&ack(&beat));
            if beat.quiet_ms > 0 {
                return beat;
            }
        }
    })
}

fn ack(beat: &Beat) -> BeatAck {
    BeatAck { generation: beat.generation, number: beat.number, sent: beat.sent }
}

#[test]
fn silence_without_a_connection_is_not_announced_later() {
    let (link, _) = link();
    let guard = link.quiet(Duration::from_secs(1));
    link.shared.welcomed(&welcome(), MonoMicros(0)).unwrap();
    assert_eq!(link.shared.next_beat(), NextBeat::Hush);
    drop(guard);
    assert_eq!(sent(&link).quiet_ms, 0);
}

#[test]
fn the_announcement_is_the_last_beat_before_the_silence() {
    let (link, clock) = link();
    link.shared.welcomed(&welcome(), MonoMicros(0)).unwrap();
    assert_eq!(sent(&link).quiet_ms, 0);
    let announce = announcing(&link);
    let guard = link.quiet(Duration::from_secs(5));
    assert_eq!(announce.join().unwrap().quiet_ms, 5_000);
    assert_eq!(link.shared.next_beat(), NextBeat::Hush);
    clock.go(4_999);
    assert!(!guard.overrun());
    assert_eq!(link.shared.unanswered_ms(), 0, "nobody is expected to answer silence");
    clock.go(1);
    assert!(guard.overrun());
    assert_eq!(link.shared.next_beat(), NextBeat::Hush, "an overrun does not break the silence");
    drop(guard);
    clock.go(700);
    assert_eq!(link.shared.unanswered_ms(), 700, "counted from the end of the silence");
    assert_eq!(sent(&link).quiet_ms, 0);
}

#[test]
fn an_unacknowledged_announcement_delays_the_silence_only_a_little() {
    let (link, _) = link();
    link.shared.welcomed(&welcome(), MonoMicros(0)).unwrap();
    let guard = link.quiet(Duration::from_secs(5));
    // The beat task comes too late: the interval has begun, and it keeps quiet.
    assert_eq!(link.shared.next_beat(), NextBeat::Hush);
    drop(guard);
}

#[test]
fn leases_are_seen_through_the_link() {
    let (link, clock) = link();
    assert!(!link.may_take_new_block());
    link.shared.welcomed(&welcome(), MonoMicros(0)).unwrap();
    assert!(link.may_take_new_block() && link.generation() == Generation(1));
    clock.go(10_000);
    assert!(!link.may_take_new_block());
    assert!(!link.wait_for_dispatch(Duration::from_millis(1)));
    let beat = sent(&link);
    link.shared.acked(&ack(&beat));
    assert!(link.wait_for_dispatch(Duration::ZERO));
    clock.go(60_000);
    assert!(link.life_expired());
}

#[test]
fn views_change_with_orders_and_stops_and_the_first_stop_stays() {
    let (link, _) = link();
    let before = link.view().version;
    link.offer(Desired { generation: Generation(0), runs: Vec::new() });
    let view = link.wait(before, Duration::ZERO);
    assert!(view.version > before && view.desired.is_some());
    link.stop(Stop::Signal("SIGTERM"));
    link.stop(Stop::Retired { reason: "late".into() });
    assert_eq!(link.view().stop, Some(Stop::Signal("SIGTERM")));
}

#[test]
fn a_full_outbox_drops_its_oldest() {
    let (link, _) = link();
    for n in 0..20u8 {
        link.refuse_demand(RunId([n; 6]), Failure::refused("x", "y", ""));
    }
    let Some(ToCoordinator::Refused { run, .. }) = link.shared.next_to_say() else { panic!("nothing to say") };
    assert_eq!(run, RunId([4; 6]));
}

/// Runs what waits on the runtime until it waits again.
fn drive(runtime: &tokio::runtime::Runtime) {
    runtime.block_on(async {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn the_lease_is_kept_as_a_coordinator_gave_it_and_never_written_within_a_silence() {
    let (link, clock) = link();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("life-lease");
    let kept = KeptLease { path: path.clone(), boot: "b".to_owned(), deadline: Some(Micros(9)) };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.spawn(link.keep_lease(kept));
    let ends = || {
        drive(&runtime);
        crate::watchdog::lease::Lease::read(&path).map_or(0, |l| l.life_ends.0 / 1_000)
    };
    let renew = || {
        let beat = sent(&link);
        link.shared.acked(&ack(&beat));
    };
    assert_eq!(ends(), 0, "nobody gave it any");
    link.shared.resumed(60_000);
    assert_eq!(ends(), 0, "an agent that is started again gives itself none");
    link.shared.welcomed(&welcome(), MonoMicros(0)).unwrap();
    assert_eq!(ends(), 60_000);
    clock.go(3_000);
    renew();
    assert_eq!(ends(), 60_000, "that little is not worth a write");
    clock.go(1_000);
    renew();
    assert_eq!(ends(), 64_000);

    let announce = announcing(&link);
    let guard = link.quiet(Duration::from_secs(100));
    let beat = announce.join().unwrap();
    assert_eq!(ends(), 104_000, "the silence that was agreed is in it before the silence begins");
    clock.go(90_000);
    // An answer that comes late renews the lease, and waits.
    link.shared.acked(&BeatAck { sent: MonoMicros(94_000_000), ..ack(&beat) });
    assert_eq!(ends(), 104_000);
    drop(guard);
    assert_eq!(ends(), 154_000);
    let lease = crate::watchdog::lease::Lease::read(&path).unwrap();
    assert_eq!((lease.boot.as_str(), lease.life_ms, lease.deadline), ("b", 60_000, Some(Micros(9))));
}
