//! A run from its first record to its last: in order, cancelled, restarted, stopped.

use std::sync::atomic::{AtomicU64, Ordering};

use drums_common::{
    clock::MonoMicros,
    evidence::{Closed, Teardown, Template},
};

use super::*;
use crate::spool::KEEP_FINISHED;

#[test]
fn a_run_leaves_every_record() {
    let mut a = Agent::new(no_faults());
    let records = a.whole_run(4);
    check_accounts(&records);
    assert!(matches!(records[0].body, Body::Preflight(_)), "the first record is the preflight");
    let closed = Closed { teardown: Teardown::Clean, reason: String::new() };
    assert_eq!(records.last().unwrap().body, Body::Closed(closed));
    assert!(results(&records).iter().all(|(_, r)| *r == BlockResult::Completed));
    // Four arms in four blocks, and the further turns of the delayed arm's base.
    assert_eq!(outcomes(&records).len(), 20);
    assert!(outcomes(&records).iter().all(|o| o.valid), "{:?}", outcomes(&records));
    let count = |f: fn(&Body) -> bool| records.iter().filter(|r| f(&r.body)).count();
    assert_eq!(count(|b| matches!(b, Body::Sample(_))), 80);
    assert_eq!(count(|b| matches!(b, Body::Timeline(_))), 60);
    assert_eq!(
        count(|b| matches!(b, Body::Fidelity(f) if f.faults.is_empty())),
        40,
        "of each session and of its successor"
    );
    for r in &records {
        if let Body::Fidelity(f) = &r.body {
            assert_eq!(f.mechanism["session"], f.session.to_string(), "a reading is of the session that it names");
        }
    }
    let of =
        |pick: fn(&Body) -> Option<SessionRef>| records.iter().filter_map(|r| pick(&r.body)).collect::<BTreeSet<_>>();
    let read = of(|b| if let Body::Fidelity(f) = b { Some(f.session) } else { None });
    assert_eq!(read, of(|b| if let Body::Timeline(t) = b { Some(t.session) } else { None }));
    // The first restore from each of two builds of two arms' templates.
    assert_eq!(count(|b| matches!(b, Body::Log(l) if l.level == "info" && l.text.starts_with("first restore"))), 4);
    assert_eq!(count(|b| matches!(b, Body::Log(_))), 4);
    assert!(a.live.borrow().is_empty());
}

#[test]
fn templates_are_built_per_arm_and_build_before_their_block() {
    let mut a = Agent::new(no_faults());
    let records = a.whole_run(4);
    let built: Vec<(String, u32)> = records
        .iter()
        .filter_map(|r| match &r.body {
            Body::Template(Template { arm, build, .. }) => Some((arm.to_string(), *build)),
            _ => None,
        })
        .collect();
    // The first restore from each is over, and not counted, before the block begins.
    let text = |r: &Record| match &r.body {
        Body::Template(_) => Some("template"),
        Body::Log(l) if l.text.starts_with("first restore") => Some("first restore"),
        Body::BlockStarted(_) => Some("block"),
        _ => None,
    };
    let course: Vec<_> = records.iter().filter_map(text).collect();
    let build = ["template", "template", "first restore", "first restore", "block", "block"];
    assert_eq!(course, [build, build].concat());
    // The A/A control has templates of its own.
    let want = [("restored", 0), ("restored-b", 0), ("restored", 1), ("restored-b", 1)];
    assert_eq!(built, want.map(|(a, b)| (a.to_owned(), b)));
    let discards = a.calls.borrow().iter().filter(|c| c.op == "discard_templates").count();
    assert_eq!(discards, 3, "before each build and at the end");
}

#[test]
fn the_control_is_delayed_by_the_warm_up_of_its_base_arm() {
    let mut a = Agent::new(no_faults());
    let records = a.whole_run(2);
    let mut delays = records.iter().filter_map(|r| match &r.body {
        Body::BlockStarted(b) => Some(b.delays_ms.clone()),
        _ => None,
    });
    assert_eq!(delays.next(), Some(BTreeMap::new()), "none in the warm-up block itself");
    assert_eq!(delays.next(), Some(BTreeMap::from([(name("delayed"), 2.5)])));
    let value = |kind: BlockKind, arm: &str| {
        records.iter().find_map(|r| match &r.body {
            Body::Sample(s) if s.kind == kind && s.arm == name(arm) && s.metric == Metric::CreateToReady => {
                Some(s.value)
            }
            _ => None,
        })
    };
    assert_eq!((value(BlockKind::WarmUp, "delayed"), value(BlockKind::WarmUp, "cold")), (Some(10.0), Some(10.0)));
    assert_eq!((value(BlockKind::Measured, "delayed"), value(BlockKind::Measured, "cold")), (Some(12.5), Some(10.0)));
    let resets = records.iter().filter_map(|r| match &r.body {
        Body::Sample(s) if s.metric == Metric::ResetToReady => Some(s.value),
        _ => None,
    });
    assert!(resets.into_iter().all(|ms| ms == 10.0), "the delay is in create-to-ready and in nothing else");
}

#[test]
fn the_delay_comes_from_five_sessions_of_its_base_arm() {
    let mut a = Agent::new(no_faults());
    let records = a.whole_run(2);
    check_accounts(&records);
    let turns =
        |kind: BlockKind, arm: &str| outcomes(&records).iter().filter(|o| o.kind == kind && o.arm == name(arm)).count();
    assert_eq!((turns(BlockKind::WarmUp, "cold"), turns(BlockKind::Measured, "cold")), (5, 1));
    assert_eq!((turns(BlockKind::WarmUp, "restored"), turns(BlockKind::WarmUp, "delayed")), (1, 1));
    // Failed sessions are no part of the five.
    let mut a = Agent::new(faults(|c| {
        (c.op == "create" && c.arm == Some(name("cold")) && c.nth % 2 == 0).then_some(Fault::Session)
    }));
    let records = a.whole_run(1);
    check_accounts(&records);
    let cold: Vec<bool> = outcomes(&records).iter().filter(|o| o.arm == name("cold")).map(|o| o.valid).collect();
    assert_eq!((cold.len(), cold.iter().filter(|valid| **valid).count()), (10, 5));
}

#[test]
fn sessions_never_share_a_number_and_resets_have_their_own() {
    let mut a = Agent::new(no_faults());
    let records = a.whole_run(2);
    let of = |metric: Metric| -> BTreeSet<u32> {
        let samples = records.iter().filter_map(move |r| match &r.body {
            Body::Sample(s) if s.metric == metric => Some(s.session.number),
            _ => None,
        });
        samples.collect()
    };
    let (created, reset) = (of(Metric::CreateToReady), of(Metric::ResetToReady));
    assert_eq!((created.len(), reset.len()), (12, 12));
    assert!(created.is_disjoint(&reset));
    assert_eq!(of(Metric::Destroy), reset, "what is destroyed is the successor");
    assert!(records.iter().all(|r| r.generation == Generation(1)));
}

#[test]
fn a_restart_in_a_block_marks_it_and_goes_on() {
    // Dies while the second block's second arm is created: the process ends, so nothing more is written.
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    let spool = a.spool.run(RUN).unwrap();
    drop(a.runner.take());
    {
        // What a killed agent leaves: a committed beginning without an end.
        let started = drums_common::evidence::BlockStarted {
            block: 0,
            kind: BlockKind::Measured,
            order: grants(2)[1].order.clone(),
            template_build: 0,
            cpus: vec![0],
            environment_bytes: 0,
            delays_ms: BTreeMap::new(),
        };
        let mut w = spool.writer().unwrap();
        w.append(Generation(1), Micros(0), Body::BlockStarted(started)).unwrap();
        w.commit().unwrap();
    }
    drop(spool);
    let mut a = a.restart(no_faults());
    // Before any order: the block has its end already.
    assert_eq!(results(&a.records())[1], (1, BlockResult::Interrupted("the agent was restarted".into())));
    let view = a.link.view();
    assert!(matches!(a.runner.as_mut().unwrap().step(&view), Step::Idle(Idle::NoOrders)));
    a.offer(RunPhase::Measure, 3);
    a.settle();
    a.offer(RunPhase::Unwind, 3);
    a.settle();
    let records = a.records();
    check_accounts(&records);
    assert_eq!(results(&records)[2], (2, BlockResult::Completed));
    assert_eq!(records.iter().filter(|r| matches!(r.body, Body::Preflight(_))).count(), 1);
    let ended = records.iter().find_map(|r| match &r.body {
        Body::BlockEnded(b) if b.kind == BlockKind::Measured && b.block == 0 => Some(b),
        _ => None,
    });
    assert!(!ended.unwrap().environment.settled, "no reading is no quiet machine");
    assert_eq!(records.last().unwrap().generation, Generation(2));
}

/// A row of the field's faults: an update put another agent in the place of the one that had begun the run.
#[test]
fn row_15_an_agent_that_was_replaced_in_the_middle_of_a_run_says_so_before_it_measures() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    let mut a = a.restart_as(b"another agent");
    a.offer(RunPhase::Measure, 2);
    a.settle();
    let records = a.records();
    let seen: Vec<(usize, drums_common::digest::Sha256)> = records
        .iter()
        .enumerate()
        .filter_map(|(at, r)| if let Body::Preflight(p) = &r.body { Some((at, p.agent_sha256)) } else { None })
        .collect();
    let digests: Vec<_> = seen.iter().map(|(_, digest)| *digest).collect();
    assert_eq!(digests, [BUILD, b"another agent"].map(drums_common::digest::Sha256::of));
    let second = records.iter().rposition(|r| matches!(r.body, Body::BlockStarted(_))).unwrap();
    assert!(seen[1].0 < second, "before its first block");
}

#[test]
fn what_is_said_before_the_welcome_is_said_under_the_old_lease() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    let before = a.records().len();
    let a = a.restart_under(0, no_faults());
    let records = a.records();
    assert!(records.len() > before, "the restart is written down");
    assert!(records.iter().all(|r| r.generation == Generation(1)), "a record under no lease would count as late");
}

#[test]
fn a_closed_run_stays_closed_over_a_restart() {
    let mut a = Agent::new(no_faults());
    let before = a.whole_run(1);
    let mut a = a.restart(no_faults());
    a.offer(RunPhase::Measure, 4);
    assert_eq!(a.settle(), Idle::Nothing);
    assert_eq!(a.records(), before);
}

/// An agent may live for months: what is over, and acknowledged, must not wait for its end to be removed.
#[test]
fn finished_runs_do_not_gather_while_the_agent_lives() {
    let mut a = Agent::new(no_faults());
    let runs: Vec<RunId> = (0..KEEP_FINISHED as u8 + 4).map(|n| RunId([n; 6])).collect();
    for run in &runs {
        let mut order = a.desired(RunPhase::Unwind, 0);
        order.runs[0].run = *run;
        a.link.offer(order);
        a.settle();
        let spool = a.spool.run(*run).unwrap();
        assert!(spool.closed());
        spool.set_acked(spool.last_seq()).unwrap();
    }
    a.link.offer(Desired { generation: a.link.generation(), runs: Vec::new() });
    a.settle();
    assert_eq!(a.spool.runs().len(), KEEP_FINISHED);
    assert!(a.spool.run(runs[0]).is_none() && a.spool.run(runs[runs.len() - 1]).is_some(), "the newest stay");
}

#[test]
fn a_cancellation_reaches_a_create_under_way() {
    let canceller = Rc::new(RefCell::new(None::<Box<dyn FnOnce()>>));
    let hook = canceller.clone();
    let mut a = Agent::new(faults(move |c| {
        (c.op == "create" && c.nth == 4).then(|| {
            (hook.borrow_mut().take().unwrap())();
            Fault::Hang
        })
    }));
    let (link, desired) = (a.link.clone(), a.desired(RunPhase::Cancel, 1));
    *canceller.borrow_mut() = Some(Box::new(move || link.offer(desired)));
    a.offer(RunPhase::Measure, 1);
    assert_eq!(a.settle(), Idle::Nothing);
    let records = a.records();
    check_accounts(&records);
    assert_eq!(results(&records), [(0, BlockResult::Cancelled)]);
    assert_eq!(outcomes(&records).len(), 2, "the session that was given up has no outcome");
    assert!(matches!(&records.last().unwrap().body, Body::Closed(c) if c.reason == "cancelled"));
    assert!(a.live.borrow().is_empty());
}

#[test]
fn a_run_that_is_no_longer_listed_is_closed() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    a.link.offer(Desired { generation: Generation(1), runs: vec![] });
    a.settle();
    assert!(matches!(&a.records().last().unwrap().body, Body::Closed(c) if c.reason.contains("no longer lists")));
}

#[test]
fn a_signal_leaves_the_run_open_for_the_next_start() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    a.link.stop(crate::net::Stop::Signal("SIGTERM"));
    assert_eq!(a.runner.take().unwrap().run().0, crate::net::Stop::Signal("SIGTERM"));
    assert!(!a.records().iter().any(|r| matches!(r.body, Body::Closed(_))));
    assert_eq!(a.calls.borrow().last().unwrap().op, "discard_templates");
    let mut a = a.restart(no_faults());
    a.offer(RunPhase::Measure, 2);
    a.settle();
    check_accounts(&a.records());
    assert_eq!(results(&a.records()).len(), 2);
}

#[test]
fn a_registration_that_does_not_match_is_refused_and_closed() {
    let mut a = Agent::new(no_faults());
    let mut d = a.desired(RunPhase::Measure, 1);
    d.runs[0].canonical.push(' ');
    a.link.offer(d);
    assert_eq!(a.settle(), Idle::Nothing);
    let records = a.records();
    assert!(matches!(&records[0].body, Body::Closed(c) if c.reason.starts_with("refused: ")), "{records:?}");
}

#[test]
fn the_machine_is_not_taken_from_another_measurement() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Prepare, 0);
    a.settle();
    let lock = crate::measure::lock::MachineLock::acquire(&a.dir.path().join("lock"), || true).unwrap();
    let (link, cancel) = (a.link.clone(), a.desired(RunPhase::Cancel, 1));
    a.offer(RunPhase::Measure, 1);
    std::thread::scope(|s| {
        s.spawn(move || {
            // Whichever comes first, the block must not begin.
            link.offer(cancel);
        });
        a.settle();
    });
    drop(lock);
    assert!(results(&a.records()).is_empty());
    assert!(matches!(&a.records().last().unwrap().body, Body::Closed(c) if c.reason == "cancelled"));
}

#[test]
fn a_deadline_in_the_past_closes_the_run() {
    let mut a = Agent::new(no_faults());
    a.offer(RunPhase::Measure, 1);
    a.settle();
    let mut d = a.desired(RunPhase::Measure, 2);
    d.runs[0].deadline_left_ms = 0;
    a.link.offer(d);
    a.settle();
    assert!(matches!(&a.records().last().unwrap().body, Body::Closed(c) if c.reason.contains("deadline")));
    assert_eq!(results(&a.records()).len(), 1);
    assert!(a.link.view().desired_at > MonoMicros(0));
}

#[test]
fn nothing_waits_for_the_disk_in_a_timed_window_and_a_turn_is_on_disk_before_the_next() {
    // Each operation, and how much evidence was on disk when it began.
    let seen: Rc<RefCell<Vec<(&'static str, u64)>>> = Rc::default();
    let spool: Rc<RefCell<Option<Arc<Spool>>>> = Rc::default();
    let (log, of) = (seen.clone(), spool.clone());
    let mut a = Agent::new(faults(move |call| {
        let on_disk = of.borrow().as_ref().and_then(|s| s.run(RUN)).map_or(0, |r| r.last_seq());
        log.borrow_mut().push((call.op, on_disk));
        None
    }));
    *spool.borrow_mut() = Some(a.spool.clone());
    let records = a.whole_run(3);
    let outcomes_until = |seq| records.iter().filter(|r| r.seq <= seq && matches!(r.body, Body::Outcome(_))).count();
    let (mut turns, mut begun) = (0, None);
    for (op, on_disk) in seen.borrow().iter() {
        match *op {
            "create" => begun = Some(*on_disk),
            // Only a turn resets; a template is also tried by a session that is not counted.
            "reset" => {
                assert_eq!(begun, Some(*on_disk), "evidence was written between create and reset");
                assert_eq!(outcomes_until(*on_disk), turns, "what came before is not on disk");
                turns += 1;
            }
            "destroy" => assert_eq!(begun, Some(*on_disk), "evidence was written between create and destroy"),
            _ => {}
        }
    }
    assert!(turns > 10, "{turns}");
}

/// The machine's clock, and what has been added to it.
#[derive(Default)]
struct Ahead(AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> Micros {
        SystemClock.now()
    }
    fn boottime(&self) -> MonoMicros {
        SystemClock.boottime().plus_ms(self.0.load(Ordering::Relaxed))
    }
}

#[test]
fn no_block_begins_when_the_dispatch_lease_ends_while_its_templates_are_built() {
    let clock = Arc::new(Ahead::default());
    let passes = clock.clone();
    let while_building = faults(move |c| {
        if c.op == "build_template" {
            passes.0.fetch_add(600_000, Ordering::Relaxed);
        }
        None
    });
    let mut a = Agent::start_with(clock.clone(), tempfile::tempdir().unwrap(), while_building, 1, 0, BUILD);
    let offer = |a: &Agent, phase, blocks| {
        let mut desired = a.desired(phase, blocks);
        // Longer than what passes: only the lease ends.
        desired.runs[0].deadline_left_ms = 3_600_000;
        a.link.offer(desired);
    };
    offer(&a, RunPhase::Prepare, 0);
    a.settle();
    offer(&a, RunPhase::Measure, 1);
    assert_eq!(a.settle(), Idle::NoDispatch);
    let begun = |a: &Agent| a.records().iter().any(|r| matches!(r.body, Body::BlockStarted(_)));
    assert!(!begun(&a));
    // The coordinator is there again; the templates were kept.
    a.link.network_side().welcomed(&welcome(1), clock.boottime()).unwrap();
    a.settle();
    assert!(begun(&a));
    assert_eq!(a.calls.borrow().iter().filter(|c| c.op == "build_template").count(), 2);
}
