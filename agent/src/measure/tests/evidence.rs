//! Evidence that was damaged or lost, and disks that are full.

use std::fs;

use super::*;
use crate::net::Stop;

/// A run with one block behind it.
fn begun() -> Agent {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    assert_eq!(results(&a.records()).len(), 1);
    a
}

fn closed(records: &[Record]) -> Option<&str> {
    match &records.last()?.body {
        Body::Closed(c) => Some(&c.reason),
        _ => None,
    }
}

fn segment(a: &Agent) -> PathBuf {
    a.dir.path().join("spool").join(RUN.to_string()).join(format!("segment-{:020}", 1))
}

#[test]
fn a_run_whose_evidence_is_damaged_is_refused_and_not_begun_again() {
    let a = begun();
    let mut bytes = fs::read(segment(&a)).unwrap();
    bytes[40] ^= 1;
    fs::write(segment(&a), &bytes).unwrap();
    let mut a = a.restart(no_faults());
    a.offer(RunPhase::Measure, 2);
    assert_eq!(a.settle(), Idle::Nothing);
    let refusals = a.refusals();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert_eq!(refusals[0].class, FailureClass::Permanent);
    assert!(refusals[0].message.contains("is damaged"), "{}", refusals[0]);
    assert_eq!(fs::read(segment(&a)).unwrap(), bytes);
    assert!(a.calls.borrow().is_empty());
    // The refusal may have been lost with a connection; once the run is to end, it has arrived.
    a.offer(RunPhase::Measure, 2);
    a.settle();
    assert_eq!(a.refusals().len(), 1);
    a.offer(RunPhase::Unwind, 2);
    assert_eq!(a.settle(), Idle::Nothing);
    assert!(a.refusals().is_empty());
}

#[test]
fn a_run_of_which_less_is_here_than_was_acknowledged_is_refused() {
    for lost in [false, true] {
        let a = begun();
        let all = a.records().len() as u64;
        if lost {
            fs::remove_dir_all(a.dir.path().join("spool")).unwrap();
        }
        let mut a = a.restart(no_faults());
        let before = a.records().len();
        let mut d = a.desired(RunPhase::Measure, 2);
        d.runs[0].acked_seq = all + 10;
        a.link.offer(d);
        assert_eq!(a.settle(), Idle::Nothing);
        let refusals = a.refusals();
        assert!(matches!(&refusals[..], [f] if f.class == FailureClass::Permanent), "{refusals:?}");
        assert_eq!(a.records().len(), before, "nothing is written under numbers that others have");
        assert_eq!(a.dir.path().join("spool").join(RUN.to_string()).exists(), !lost);
    }
}

#[test]
fn a_full_disk_keeps_nothing_from_being_ended() {
    // A signal ends the agent.
    let mut a = begun().restart_on_a_full_disk();
    a.offer(RunPhase::Measure, 2);
    a.link.stop(Stop::Signal("SIGTERM"));
    assert_eq!(a.runner.take().unwrap().run().0, Stop::Signal("SIGTERM"));

    // A cancellation and a deadline end the run.
    for (phase, left, reason) in
        [(RunPhase::Cancel, 600_000, "cancelled"), (RunPhase::Measure, 0, "the run's deadline passed")]
    {
        let mut a = begun().restart_on_a_full_disk();
        let mut d = a.desired(phase, 2);
        d.runs[0].deadline_left_ms = left;
        a.link.offer(d);
        assert_eq!(a.settle(), Idle::Nothing);
        assert_eq!(closed(&a.records()), Some(reason));
    }

    // And so does the end of the host.
    let mut a = begun().restart_on_a_full_disk();
    let stop = Stop::Retired { reason: "host release".into() };
    a.link.stop(stop.clone());
    assert_eq!(a.runner.take().unwrap().run().0, stop);
    assert!(closed(&a.records()).unwrap().contains("host release"));
}

#[test]
fn on_a_full_disk_no_block_is_begun_and_the_coordinator_hears_why() {
    let mut a = begun().restart_on_a_full_disk();
    a.offer(RunPhase::Measure, 3);
    assert_eq!(a.settle(), Idle::Nothing);
    let refusals = a.refusals();
    assert!(!refusals.is_empty() && refusals.iter().all(|f| f.class == FailureClass::Transient), "{refusals:?}");
    assert!(refusals[0].message.contains("free some space"), "{}", refusals[0]);
    assert!(a.calls.borrow().is_empty());
    // With space again it goes on where it was, and the restart is in the records.
    let mut a = a.restart(no_faults());
    a.offer(RunPhase::Measure, 3);
    a.settle();
    check_accounts(&a.records());
    assert_eq!(results(&a.records()).len(), 3);
    assert!(results(&a.records()).iter().all(|(_, r)| *r == BlockResult::Completed));
}

#[test]
fn a_run_that_cannot_be_recorded_does_not_keep_another_waiting() {
    const OTHER: RunId = RunId([9; 6]);
    let a = begun();
    let mut bytes = fs::read(segment(&a)).unwrap();
    bytes[40] ^= 1;
    fs::write(segment(&a), &bytes).unwrap();
    let mut a = a.restart(no_faults());
    let mut d = a.desired(RunPhase::Measure, 2);
    let other = RunDesired { run: OTHER, ..d.runs[0].clone() };
    d.runs.push(other);
    a.link.offer(d);
    assert_eq!(a.settle(), Idle::Nothing);
    let records = a.spool.run(OTHER).unwrap().records().unwrap();
    check_accounts(&records);
    assert_eq!(results(&records).len(), 2);
}
