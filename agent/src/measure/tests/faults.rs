//! What goes wrong in a session, an arm's code or a host, and what the records say of it.

use drums_common::evidence::Teardown;
use proptest::prelude::*;

use super::*;

/// One fault in the turn of `arm` in the second block (the first measured one); everything else goes well.
fn with_fault(op: &'static str, arm: &'static str, fault: Fault) -> (Agent, Vec<Record>) {
    // Its first create is the uncounted one, its second is the warm-up's.
    let turns = Rc::new(RefCell::new(0));
    let mut a = Agent::new(faults(move |c| {
        if c.op == "create" && c.arm == Some(name(arm)) {
            *turns.borrow_mut() += 1;
        }
        (c.op == op && c.arm == Some(name(arm)) && *turns.borrow() == 3).then(|| fault.clone())
    }));
    let records = a.whole_run(3);
    check_accounts(&records);
    assert!(a.live.borrow().is_empty());
    (a, records)
}

fn failed(records: &[Record]) -> Vec<&Outcome> {
    outcomes(records).into_iter().filter(|o| !o.valid).collect()
}

#[test]
fn a_failed_session_counts_and_the_block_goes_on() {
    use Metric::{CreateCpu, CreateToReady, Destroy, ResetToReady};
    let all = vec![CreateToReady, ResetToReady, Destroy, CreateCpu];
    for (op, fault, metrics, words) in [
        ("create", Fault::Session, all, "told to fail"),
        ("create", Fault::Stranger, vec![CreateToReady, CreateCpu], "its hostname is \"localhost\""),
        ("create", Fault::Twin, vec![CreateToReady, CreateCpu], "its random stream"),
        ("dirty", Fault::Session, vec![CreateToReady, CreateCpu], "did not work when used"),
        ("dirty", Fault::Blind, vec![CreateToReady, CreateCpu], "is not seen"),
        ("reset", Fault::Session, vec![ResetToReady, Destroy], "told to fail"),
        ("reset", Fault::Dirt, vec![ResetToReady], "file /tmp/x survived it"),
        ("reset", Fault::Twin, vec![ResetToReady], "its random stream"),
        ("reset", Fault::Leak, vec![ResetToReady], "link d1 of the old session is still there"),
        ("destroy", Fault::Session, vec![Destroy], "told to fail"),
        ("destroy", Fault::Leak, vec![Destroy], "mount x is still there"),
    ] {
        let (_, records) = with_fault(op, "restored", fault.clone());
        let failed = failed(&records);
        assert_eq!(failed.len(), 1, "{op} {fault:?}");
        assert_eq!((failed[0].kind, failed[0].block, failed[0].arm.as_str()), (BlockKind::Measured, 0, "restored"));
        let (mut got, mut want) = (failed[0].failed_metrics.clone(), metrics);
        got.sort();
        want.sort();
        assert_eq!(got, want, "{op} {fault:?}");
        assert!(failed[0].failures.iter().any(|f| f.contains(words)), "{op} {fault:?}: {:?}", failed[0].failures);
        assert!(results(&records).iter().all(|(_, r)| *r == BlockResult::Completed));
    }
}

#[test]
fn a_broken_host_interrupts_the_block_and_says_nothing_of_the_arm() {
    for op in ["create", "dirty", "dirt", "reset"] {
        let (_, records) = with_fault(op, "restored", Fault::Host);
        assert!(failed(&records).is_empty(), "{op}");
        let results = results(&records);
        assert!(
            matches!(&results[1], (1, BlockResult::Interrupted(why)) if why.contains("told to break")),
            "{results:?}"
        );
        assert_eq!(results[2].1, BlockResult::Completed);
    }
}

#[test]
fn row_12_a_panic_in_an_arm_interrupts_its_block_and_the_run_goes_on() {
    for op in ["create", "dirty", "dirt", "reset", "destroy"] {
        let (a, records) = with_fault(op, "restored", Fault::Panic);
        let results = results(&records);
        assert!(
            matches!(&results[1], (1, BlockResult::Interrupted(why)) if why.contains("told to panic")),
            "{results:?}"
        );
        assert_eq!(results[2].1, BlockResult::Completed, "the next block finds templates again");
        assert!(a.calls.borrow().iter().any(|c| c.op == "reclaim"));
    }
}

#[test]
fn a_panic_while_building_templates_is_an_interrupted_block() {
    let mut a = Agent::new(faults(|c| (c.op == "build_template" && c.nth == 1).then_some(Fault::Panic)));
    let records = a.whole_run(2);
    check_accounts(&records);
    let results = results(&records);
    assert!(
        matches!(&results[0], (0, BlockResult::Interrupted(why)) if why.contains("building templates")),
        "{results:?}"
    );
    assert_eq!(results[1].1, BlockResult::Completed);
}

#[test]
fn an_arm_without_its_template_fails_and_is_tried_again() {
    let mut a = Agent::new(faults(|c| {
        (c.op == "build_template" && c.arm == Some(name("restored")) && c.nth == 0).then_some(Fault::Session)
    }));
    let records = a.whole_run(2);
    check_accounts(&records);
    let failed = failed(&records);
    assert_eq!(failed.len(), 1);
    assert_eq!((failed[0].block, failed[0].failed_metrics.len()), (0, 4));
    assert!(failed[0].failures[0].contains("template 0 of restored was not built"));
}

#[test]
fn a_first_restore_that_fails_is_told_and_charged_to_nobody() {
    let mut a = Agent::new(faults(|c| {
        (c.op == "create" && c.arm == Some(name("restored")) && c.nth == 0).then_some(Fault::Session)
    }));
    let records = a.whole_run(2);
    check_accounts(&records);
    assert!(failed(&records).is_empty(), "{:?}", failed(&records));
    let told = |r: &Record| matches!(&r.body, Body::Log(l) if l.level == "error" && l.text.contains("told to fail"));
    assert_eq!(records.iter().filter(|r| told(r)).count(), 1);
}

#[test]
fn without_a_base_there_is_no_control() {
    // The base arm fails in the warm-up, so nobody knows what 25 % of it is.
    let mut left = 10;
    let mut a = Agent::new(faults(move |c| {
        let fails = c.op == "create" && c.arm == Some(name("cold")) && left > 0;
        left -= i32::from(fails);
        fails.then_some(Fault::Session)
    }));
    let records = a.whole_run(2);
    check_accounts(&records);
    let failed = failed(&records);
    let arms: Vec<_> = failed.iter().map(|o| o.arm.as_str()).collect();
    assert_eq!(arms, [["cold"; 10].as_slice(), &["delayed"]].concat(), "and the base is not tried for ever");
    assert!(failed[10].failures[0].contains("no valid warm-up session"));
}

#[test]
fn an_agent_without_its_shim_charges_no_arm_and_ends() {
    let mut a = Agent::new(faults(|c| (c.op == "create" && c.nth == 6).then_some(Fault::Broken)));
    a.offer(RunPhase::Measure, 1);
    let (stop, _) = a.runner.take().unwrap().run();
    assert_eq!(stop, crate::net::Stop::Broken("told to break for good".to_owned()));
    let records = a.records();
    check_accounts(&records);
    assert!(failed(&records).is_empty(), "{:?}", failed(&records));
    assert!(matches!(&results(&records)[..], [(0, BlockResult::Interrupted(_))]), "{:?}", results(&records));
    assert!(!matches!(&records.last().unwrap().body, Body::Closed(_)), "the next start goes on with the run");
}

#[test]
fn leaks_are_in_the_last_record_also_after_a_restart() {
    let mut a = Agent::new(faults(|c| (c.op == "destroy" && c.nth == 0).then_some(Fault::Leak)));
    a.offer(RunPhase::Measure, 1);
    a.settle();
    let mut a = a.restart(faults(|c| (c.op == "discard_templates").then_some(Fault::Leak)));
    a.offer(RunPhase::Unwind, 1);
    a.settle();
    let records = a.records();
    let Body::Closed(closed) = &records.last().unwrap().body else { panic!("not closed") };
    assert_eq!(closed.teardown, Teardown::Leaked(vec!["folder t".into(), "mount x".into()]));
}

#[test]
fn a_grant_of_an_unknown_arm_is_answered_with_an_interrupted_block() {
    let mut a = Agent::new(no_faults());
    let mut d = a.desired(RunPhase::Measure, 1);
    d.runs[0].granted[0].order[0] = name("unheard-of");
    a.link.offer(d);
    a.settle();
    let results = results(&a.records());
    assert!(matches!(&results[0], (0, BlockResult::Interrupted(why)) if why.contains("unheard-of")));
}

const OPS: [&str; 7] = ["next_session", "build_template", "create", "dirty", "dirt", "reset", "destroy"];
const FAULTS: [Fault; 8] =
    [Fault::Session, Fault::Host, Fault::Panic, Fault::Leak, Fault::Twin, Fault::Stranger, Fault::Dirt, Fault::Blind];

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// M26: started = valid + failed + voided + lost, whatever goes wrong and however often, and nothing stays alive.
    #[test]
    fn every_session_is_accounted_for(plan in prop::collection::vec((0usize..7, 0u32..30, 0usize..8), 0..12)) {
        let mut a = Agent::new(faults(move |c| {
            plan.iter().find(|(op, nth, _)| OPS[*op] == c.op && *nth == c.nth).map(|(_, _, f)| FAULTS[*f].clone())
        }));
        let records = a.whole_run(4);
        check_accounts(&records);
        prop_assert_eq!(results(&records).len(), 4);
        prop_assert!(a.live.borrow().is_empty());
        prop_assert!(matches!(&records.last().unwrap().body, Body::Closed(_)), "the last record closes the run");
    }
}
