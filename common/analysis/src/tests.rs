use drums_common::{
    evidence::{BlockKind, BlockResult, Body, Record},
    experiment::{Metric, Registration},
    ids::{ArmName, HostId},
};

use crate::{
    Analysis, RunMeta, RunState, Status, Verdict, analyse,
    stats::Answer,
    summary::{GateSummary, RatioSummary},
    synthetic::Scenario,
};

fn arm(s: &str) -> ArmName {
    s.parse().unwrap()
}
fn host(s: &str) -> HostId {
    s.parse().unwrap()
}

fn one(scenario: &Scenario) -> (Registration, RunMeta, Vec<Record>) {
    let (meta, records) = scenario.run(1);
    (scenario.registration(), meta, records)
}

fn analysed(scenario: &Scenario, change: impl FnOnce(&mut RunMeta, &mut Vec<Record>)) -> Analysis {
    let (registration, mut meta, mut records) = one(scenario);
    change(&mut meta, &mut records);
    analyse(&registration, &[meta], &records)
}

fn plain() -> Scenario {
    Scenario::exp028(1)
}

fn gate<'a>(a: &'a Analysis, name: &str) -> &'a GateSummary {
    a.summary.gates.iter().find(|g| g.name == name).unwrap()
}

fn ratio<'a>(a: &'a Analysis, num: &str, den: &str, metric: Metric) -> &'a RatioSummary {
    a.summary
        .ratios
        .iter()
        .find(|r| r.numerator.as_str() == num && r.denominator.as_str() == den && r.metric == metric)
        .unwrap()
}

fn assert_verdict(a: &Analysis, verdict: Verdict, status: Status, reason: &str) {
    let s = &a.summary;
    assert_eq!((s.verdict, s.status), (verdict, status), "{:#?}", s.reasons);
    assert!(s.reasons.iter().any(|r| r.contains(reason)), "no {reason:?} in {:#?}", s.reasons);
    // Whatever is missing is named, and nothing balances without it.
    let a = &s.accounting;
    assert_eq!(a.samples_started, a.samples_valid + a.samples_failed + a.samples_voided + a.samples_lost, "{a:?}");
    assert_eq!(a.balanced, a.samples_lost == 0 && a.unaccounted.is_empty(), "{a:?}");
    assert!(a.samples_lost == 0 || !a.unaccounted.is_empty(), "{a:?}");
}

#[test]
fn a_clean_run_passes_with_everything_said() {
    let a = analysed(&plain(), |_, _| {});
    assert_verdict(&a, Verdict::Pass, Status::Verified, "drums-over-runc-cold");
    let s = &a.summary;
    assert_eq!(s.scale, "1 machine, 2 agents");
    assert_eq!(s.runs.text, "1 of 1");
    assert!(s.gates.iter().all(|g| g.passed), "{:#?}", s.gates.iter().filter(|g| !g.passed).collect::<Vec<_>>());
    assert_eq!(s.arms.len(), 8);
    assert!(s.arms.iter().all(|a| a.n == 16 && a.low.is_some() && a.valid_sessions == 16));
    let aa = s.controls.aa.as_ref().unwrap();
    assert!(!matches!(aa.answer, Answer::Better | Answer::Worse) && aa.mde.is_some());
    assert_eq!((aa.units, aa.unit.as_str()), (8, "template build"));
    let delayed = s.controls.delayed.as_ref().unwrap();
    assert!(delayed.found && (0.2..0.3).contains(&delayed.injected.unwrap().get()), "{delayed:?}");
    assert!(s.limits_of_claim.iter().any(|l| l.contains("no queueing is measured")));
    let r = ratio(&a, "drums-restored", "drums-cold", Metric::CreateToReady);
    assert!(r.bar.is_none() && r.family == "a" && r.low.get() > 3.0);
    assert_eq!(ratio(&a, "drums-cold", "runc-cold", Metric::CreateToReady).family, "b");
    assert_eq!((s.accounting.samples_started, s.accounting.samples_valid), (2 * 8 * 8 * 4, 2 * 8 * 8 * 4));
    assert!(s.accounting.balanced && s.accounting.unaccounted.is_empty(), "{:?}", s.accounting);
    // Two measured hosts of 8 blocks of 8 arms with 4 metrics, and a warm-up block each.
    assert_eq!(a.points.len(), 2 * 9 * 8 * 4);
}

#[test]
fn the_order_of_records_does_not_matter() {
    let a = analysed(&plain(), |_, _| {});
    let b = analysed(&plain(), |_, r| r.reverse());
    assert_eq!(a, b);
    assert_eq!(serde_json::to_string(&a.summary).unwrap(), serde_json::to_string(&b.summary).unwrap());
}

#[test]
fn the_summary_has_the_promised_keys_and_reads_back() {
    let a = analysed(&plain(), |_, _| {});
    let v = serde_json::to_value(&a.summary).unwrap();
    for key in ["verdict", "registration", "machines", "hosts", "arms", "ratios", "gates", "controls"] {
        assert!(v.get(key).is_some(), "{key}");
    }
    assert_eq!(v["verdict"], "pass");
    assert_eq!(serde_json::from_value::<crate::Summary>(v).unwrap().headline, a.summary.headline);
}

#[test]
fn a_missed_bar_fails_and_a_wide_interval_is_undecided() {
    let mut s = plain();
    s.medians_ms.insert(arm("drums-cold"), 55.0);
    s.medians_ms.insert(arm("drums-cold-delayed"), 69.0);
    assert_verdict(&analysed(&s, |_, _| {}), Verdict::Fail, Status::Failed, "is above 0.6");
    let mut s = plain();
    s.medians_ms.insert(arm("drums-cold"), 62.0 * 0.59);
    s.medians_ms.insert(arm("drums-cold-delayed"), 62.0 * 0.59 * 1.25);
    assert_verdict(&analysed(&s, |_, _| {}), Verdict::Undecided, Status::Preliminary, "contains 0.6");
}

#[test]
fn a_failed_session_is_plus_infinity_and_never_dropped() {
    let mut s = plain();
    s.failing.insert((host("h1"), 3, arm("drums-cold")));
    let a = analysed(&s, |_, _| {});
    assert_verdict(&a, Verdict::Undecided, Status::Preliminary, "∞");
    let row = a.summary.arms.iter().find(|x| x.arm == arm("drums-cold")).unwrap();
    assert_eq!((row.n, row.valid_sessions, row.sessions, row.metrics[0].failed), (16, 15, 16, 1));
    assert!(row.median.unwrap().get().is_finite());
    assert_eq!(a.summary.accounting.samples_failed, 4);
    let r = ratio(&a, "drums-cold", "runc-cold", Metric::CreateToReady);
    assert_eq!((r.high.get(), r.only_denominator_valid), (f64::INFINITY, 1));
}

#[test]
fn a_noisy_block_is_voided_whole_and_replaced() {
    let mut s = plain();
    s.noisy.insert((host("h2"), 2));
    let a = analysed(&s, |_, _| {});
    assert_verdict(&a, Verdict::Pass, Status::Verified, "drums-over-runc-cold");
    assert_eq!((a.summary.accounting.blocks_voided, a.summary.accounting.blocks_counted), (1, 16));
    assert_eq!(a.summary.accounting.samples_voided, 32);
    assert!(!gate(&a, "steal").passed && gate(&a, "void-fraction").passed);
    s.noisy.insert((host("h1"), 1));
    assert_verdict(&analysed(&s, |_, _| {}), Verdict::Invalid, Status::Preliminary, "2 of 18 blocks were voided");
}

#[test]
fn row_13_a_missing_sample_arm_or_end_is_incomplete_and_leaves_no_numbers() {
    let without = |what: &dyn Fn(&Body) -> bool| {
        analysed(&plain(), |_, records| {
            let at = records.iter().position(|r| what(&r.body)).unwrap();
            records.remove(at);
        })
    };
    let a = without(&|b| matches!(b, Body::Sample(s) if s.block == 4 && s.arm == arm("runc-cold")));
    assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "lacks records");
    assert!(a.summary.ratios.is_empty() && a.summary.arms.iter().all(|x| x.median.is_none()));
    let a = without(&|b| matches!(b, Body::Closed(_)));
    assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "did not seal");
    // Without a gap in the numbers, as if it had never been written.
    let mut first = true;
    let a = never_written(&mut |b| matches!(b, Body::Sample(s) if s.block == 4) && std::mem::take(&mut first));
    assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "block 4");
    assert_eq!(a.summary.accounting.samples_lost, 1);
}

/// Evidence without these records and without a gap in its numbers, as if they had never been written.
fn never_written(what: &mut dyn FnMut(&Body) -> bool) -> Analysis {
    analysed(&plain(), |_, records| {
        let before = records.len();
        records.retain(|r| !what(&r.body));
        assert!(records.len() < before, "nothing was left out");
        let mut seq = std::collections::BTreeMap::new();
        for r in records {
            let n = seq.entry(r.host.clone()).or_insert(0);
            *n += 1;
            r.seq = *n;
        }
    })
}

/// Of one arm's turn in block 4 of either host: its place in the accounts, and whether a record is of it.
fn of_the_turn(body: &Body) -> bool {
    let (block, name, warm_up) = match body {
        Body::Sample(s) => (s.block, &s.arm, s.kind == BlockKind::WarmUp),
        Body::Timeline(t) => (t.block, &t.arm, false),
        Body::Fidelity(f) => (f.block, &f.arm, false),
        Body::Outcome(o) => (o.block, &o.arm, o.kind == BlockKind::WarmUp),
        _ => return false,
    };
    block == 4 && name == &arm("runc-cold") && !warm_up
}

#[test]
fn what_was_begun_and_has_no_end_is_lost_and_named() {
    type Change = (&'static str, fn(&Body) -> bool, u64);
    let changes: [Change; 4] = [
        ("an outcome", |b| of_the_turn(b) && matches!(b, Body::Outcome(_)), 8),
        ("a sample", |b| of_the_turn(b) && matches!(b, Body::Sample(s) if s.metric == Metric::Destroy), 2),
        ("a turn", of_the_turn, 8),
        ("a block's start", |b| matches!(b, Body::BlockStarted(s) if s.block == 4), 0),
    ];
    for (what, change, lost) in changes {
        let a = never_written(&mut |b| change(b));
        assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "block 4");
        let accounts = &a.summary.accounting;
        assert_eq!(accounts.samples_lost, lost, "{what}: {accounts:?}");
        assert!(!accounts.balanced, "{what}");
        for h in ["h1", "h2"] {
            let named = |s: &String| s.contains(h) && s.contains("block 4") && s.contains("runc-cold");
            let listed = accounts.unaccounted.iter().any(named);
            assert!(listed || lost == 0 && accounts.unaccounted.len() > 20, "{what}: {:#?}", accounts.unaccounted);
        }
    }
    let a = never_written(&mut |b| of_the_turn(b) && matches!(b, Body::Outcome(_)));
    assert!(a.summary.accounting.unaccounted[0].contains("no outcome of s"), "{:?}", a.summary.accounting);
    // One session cannot have been two.
    let a = analysed(&plain(), |_, records| {
        let mut earlier = None;
        for r in records.iter_mut() {
            if let Body::Timeline(t) = &mut r.body
                && t.operation == "destroy"
            {
                let was = t.session;
                t.session = earlier.unwrap_or(was);
                earlier = Some(was);
            }
        }
    });
    assert!(!a.summary.accounting.balanced);
    assert!(a.summary.accounting.unaccounted.iter().any(|u| u.contains("3 sessions with one outcome")));
}

/// What ran must have been read of both sessions that carry values: the created one and the one that its reset made.
#[test]
fn every_session_that_carries_values_has_a_fidelity_reading() {
    for of_successor in [false, true] {
        let mut successor_is_next = false;
        let a = never_written(&mut |b| match b {
            // Each turn of made-up evidence has the successor's reading first.
            Body::Fidelity(_) if of_the_turn(b) => {
                successor_is_next = !successor_is_next;
                successor_is_next == of_successor
            }
            _ => false,
        });
        assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "arm runc-cold: no fidelity reading of session s");
        assert_eq!(gate(&a, "completeness").findings.len(), 2, "{:?}", gate(&a, "completeness").findings);
    }
}

#[test]
fn an_arm_that_disturbs_its_windows_makes_the_run_invalid() {
    let mut s = plain();
    s.disturbing = Some(arm("qemu-cold"));
    let a = analysed(&s, |_, _| {});
    assert_verdict(&a, Verdict::Invalid, Status::Preliminary, "in the windows of qemu-cold");
    assert_eq!(a.summary.accounting.blocks_voided, 0, "what voids nothing is seen too");
    let calm = analysed(&plain(), |_, _| {});
    assert_eq!(gate(&calm, "voids-even").answer, "holds");
    assert!(gate(&calm, "voids-even").reading.contains("16 blocks"), "{}", gate(&calm, "voids-even").reading);
    // Two blocks cannot tell, so they do not say that it holds.
    s.experiment.design.blocks_per_host = 1;
    s.experiment.design.template_builds_per_host = 1;
    let a = analysed(&s, |_, _| {});
    let g = gate(&a, "voids-even");
    assert_eq!((g.passed, g.answer.as_str()), (false, "n too small"), "{}", g.reading);
    assert!(a.summary.runs.list[0].reasons.is_empty(), "{:?}", a.summary.runs.list);
}

/// Voided blocks are windows too: a disturbance that is bad enough to void must not hide itself by that.
#[test]
fn voided_blocks_count_for_evenness() {
    let mut s = plain();
    s.noisy.insert((host("h2"), 2));
    let a = analysed(&s, |_, _| {});
    assert!(gate(&a, "voids-even").reading.contains("17 blocks"), "{}", gate(&a, "voids-even").reading);
}

#[test]
fn an_interrupted_block_is_named() {
    let a = analysed(&plain(), |meta, records| {
        meta.state = RunState::Incomplete;
        meta.reason = "the agent of h1 died in block 5".to_owned();
        for r in records.iter_mut() {
            if let Body::BlockEnded(e) = &mut r.body
                && r.host == host("h1")
                && e.block == 5
            {
                e.result = BlockResult::Interrupted("the agent was restarted".to_owned());
            }
        }
    });
    assert_verdict(&a, Verdict::Incomplete, Status::Preliminary, "h1 block 5: interrupted: the agent was restarted");
}

#[test]
fn what_became_of_a_run_is_never_collapsed() {
    for (state, verdict) in [
        (RunState::Lost, Verdict::Lost),
        (RunState::Cancelled, Verdict::Cancelled),
        (RunState::Incomplete, Verdict::Incomplete),
        (RunState::Running, Verdict::Incomplete),
    ] {
        let a = analysed(&plain(), |meta, _| {
            meta.state = state;
            meta.reason = "as ordered".to_owned();
        });
        assert_verdict(&a, verdict, Status::Preliminary, "as ordered");
        assert!(a.summary.ratios.is_empty());
    }
    let none = analyse(&plain().registration(), &[], &[]);
    assert_verdict(&none, Verdict::Incomplete, Status::Planned, "no run was made");
}

#[test]
fn fidelity_faults_make_a_run_invalid() {
    type Change = (&'static str, &'static str, fn(&mut Body) -> bool);
    let changes: [Change; 8] = [
        ("mechanism", "breakpoints", |b| match b {
            Body::Fidelity(f) => {
                f.faults.push("breakpoints were used".into());
                true
            }
            _ => false,
        }),
        ("mechanism", "ran instead of", |b| match b {
            Body::Fidelity(f) if f.arm.as_str() == "runc-cold" => {
                f.kind = drums_common::arm::ArmKind::DrumsCold;
                true
            }
            _ => false,
        }),
        ("limits", "memory limit", |b| match b {
            Body::Fidelity(f) => {
                f.limits.memory_bytes += 1 << 20;
                true
            }
            _ => false,
        }),
        ("limits", "CPU set", |b| match b {
            Body::Fidelity(f) => {
                f.limits.cpus = vec![7];
                true
            }
            _ => false,
        }),
        ("equivalence", "guest servers", |b| match b {
            Body::Fidelity(f) => {
                f.guest_sha256 = drums_common::digest::Sha256::of(b"other");
                true
            }
            _ => false,
        }),
        ("samples", "clock", |b| match b {
            Body::Sample(s) if s.metric == Metric::CreateToReady => {
                s.clock = "CLOCK_REALTIME".into();
                true
            }
            _ => false,
        }),
        ("samples", "instead of ms", |b| match b {
            Body::Sample(s) if s.metric == Metric::Destroy => {
                s.unit = "s".into();
                true
            }
            _ => false,
        }),
        ("order", "another order", |b| match b {
            Body::BlockStarted(s) if s.block == 3 => {
                s.order.swap(0, 1);
                true
            }
            _ => false,
        }),
    ];
    for (name, words, change) in changes {
        let a = analysed(&plain(), |_, records| {
            // Past the warm-up block, whose faults are printed by nobody.
            let from = records.iter().position(|r| matches!(&r.body, Body::BlockEnded(_))).unwrap();
            assert!(records[from..].iter_mut().any(|r| change(&mut r.body)), "{name}");
        });
        assert_verdict(&a, Verdict::Invalid, Status::Preliminary, words);
        assert!(!gate(&a, name).passed, "{name}");
        assert!(a.summary.ratios.is_empty());
    }
    let a = analysed(&plain(), |_, records| records[9].registration = drums_common::digest::Sha256::of(b"another"));
    assert_verdict(&a, Verdict::Invalid, Status::Preliminary, "records carry registration");
}

#[test]
fn row_15_a_run_that_saw_two_agents_is_invalid() {
    // Another one on one of the hosts, or on the same host after a while.
    for again in [false, true] {
        let a = analysed(&plain(), |_, records| {
            let at = records.iter().position(|r| matches!(r.body, Body::Preflight(_))).unwrap();
            let mut other = records[at].clone();
            let Body::Preflight(p) = &mut other.body else { unreachable!("found as one") };
            p.agent_sha256 = drums_common::digest::Sha256::of(b"other");
            if again {
                let of_host = |r: &&mut Record| r.host == other.host && r.seq > other.seq;
                records.iter_mut().filter(of_host).for_each(|r| r.seq += 1);
                other.seq += 1;
                records.insert(at + 1, other);
            } else {
                records[at] = other;
            }
        });
        assert_verdict(&a, Verdict::Invalid, Status::Preliminary, "mixed agents");
        assert!(!gate(&a, "agent").passed);
        assert!(a.summary.ratios.is_empty());
    }
}

#[test]
fn siblings_that_share_an_identity_fail_the_arm() {
    fn outcomes<'r>(records: &'r mut [Record], name: &'static str) -> Vec<&'r mut drums_common::evidence::Outcome> {
        records
            .iter_mut()
            .filter_map(|r| match &mut r.body {
                Body::Outcome(o) if o.arm.as_str() == name => Some(o),
                _ => None,
            })
            .collect()
    }
    let a = analysed(&plain(), |_, r| {
        let mut o = outcomes(r, "drums-restored");
        let random = o[2].identity.random.clone();
        o[6].identity.random = random;
    });
    assert_verdict(&a, Verdict::Fail, Status::Failed, "same random stream");
    assert!(!gate(&a, "identity").passed);
    let a = analysed(&plain(), |_, r| outcomes(r, "qemu-warm")[4].state = "another".to_owned());
    assert_verdict(&a, Verdict::Fail, Status::Failed, "its template's is");
    let a = analysed(&plain(), |_, r| outcomes(r, "runc-cold")[4].state = "saved".to_owned());
    assert_verdict(&a, Verdict::Fail, Status::Failed, "its template's is \"\"");
    let a = analysed(&plain(), |_, r| {
        let mut o = outcomes(r, "runc-restored");
        o[3].identity_after_reset.machine_id = o[3].identity.machine_id.clone();
    });
    assert_verdict(&a, Verdict::Fail, Status::Failed, "after the reset same machine id");
    // What the agent saw survive a reset; the create before it stands.
    let a = analysed(&plain(), |_, r| {
        let o = &mut outcomes(r, "runc-cold")[5];
        o.valid = false;
        o.failures = vec!["reset: the planted file survived it".to_owned()];
        o.failed_metrics = vec![Metric::ResetToReady];
    });
    assert_verdict(&a, Verdict::Fail, Status::Failed, "the planted file survived it");
    let row = a.summary.arms.iter().find(|x| x.arm == arm("runc-cold")).unwrap();
    assert_eq!((row.metrics[0].failed, row.metrics[1].failed, row.valid_sessions), (0, 1, 15));
}

/// A template that cannot be built is the arm's failure, not missing evidence.
#[test]
fn an_arm_without_a_template_fails_its_sessions() {
    let mut s = plain();
    for block in [1, 5] {
        s.failing.insert((host("h1"), block, arm("runc-restored")));
    }
    let a = analysed(&s, |_, records| {
        let at = records
            .iter()
            .position(|r| matches!(&r.body, Body::Template(t) if t.arm == arm("runc-restored") && t.build == 1))
            .unwrap();
        let (h, seq) = (records[at].host.clone(), records[at].seq);
        records.remove(at);
        for r in records.iter_mut().filter(|r| r.host == h && r.seq > seq) {
            r.seq -= 1;
        }
    });
    assert_eq!(a.summary.runs.text, "1 of 1", "{:?}", a.summary.runs.list);
    assert_eq!(ratio(&a, "runc-restored", "runc-cold", Metric::CreateToReady).high.get(), f64::INFINITY);
}

#[test]
fn controls_judge_the_measurement() {
    let mut s = plain();
    s.medians_ms.insert(arm("drums-restored-b"), 75.0 * 1.8);
    assert_verdict(&analysed(&s, |_, _| {}), Verdict::Invalid, Status::Preliminary, "the measurement is biased");
    let mut s = plain();
    s.medians_ms.insert(arm("drums-cold-delayed"), 18.0);
    assert_verdict(&analysed(&s, |_, _| {}), Verdict::Invalid, Status::Preliminary, "does not see what it should");
    // What was registered is not what was injected: another control, whatever it found.
    for factor in [0.7, 1.3] {
        let mut s = plain();
        s.delay_factor = factor;
        let a = analysed(&s, |_, _| {});
        assert_verdict(&a, Verdict::Invalid, Status::Preliminary, "registered 25 %, injected");
        assert_eq!(gate(&a, "positive-control").answer, "does not hold");
    }
    let a = never_written(&mut |b| matches!(b, Body::Timeline(t) if t.arm == arm("drums-cold-delayed")));
    assert_verdict(&a, Verdict::Invalid, Status::Preliminary, "no timeline shows the injected delay");
    let mut s = plain();
    s.sigma = 0.3;
    s.medians_ms.insert(arm("drums-cold-delayed"), 18.0 * 1.1);
    let a = analysed(&s, |_, _| {});
    assert!(!a.summary.controls.delayed.as_ref().unwrap().found);
    assert_verdict(&a, Verdict::Undecided, Status::Preliminary, "the design lacks power");
}

/// Field fault: identical code came out faster because it ran later. Balanced orders keep the A/A control null.
#[test]
fn position_and_drift_keep_the_aa_control_null() {
    for world in 1..=8 {
        let mut s = Scenario::exp028(world);
        s.first_position_effect = 0.05;
        s.drift = 0.2;
        let a = analysed(&s, |_, _| {});
        let aa = a.summary.controls.aa.as_ref().unwrap();
        assert!(!matches!(aa.answer, Answer::Better | Answer::Worse), "world {world}: {aa:?}");
        assert!(aa.ratio.is_some_and(|r| (r.get() - 1.0).abs() < 0.1), "world {world}: {aa:?}");
    }
}

#[test]
fn runs_are_pooled_and_counted() {
    let s = plain();
    let (m1, mut records) = s.run(1);
    let (m2, more) = s.run(2);
    let (mut m3, rest) = s.run(3);
    m3.state = RunState::Cancelled;
    records.extend(more);
    records.extend(rest);
    let a = analyse(&s.registration(), &[m3, m1, m2], &records);
    assert_verdict(&a, Verdict::Pass, Status::Verified, "run 3 is cancelled and not pooled");
    assert_eq!((a.summary.runs.text.as_str(), a.summary.arms[0].n), ("2 of 3", 32));
    assert_eq!(a.summary.controls.aa.as_ref().unwrap().units, 16);
}

#[test]
fn few_template_builds_are_exploratory() {
    let mut s = plain();
    s.experiment.hosts.count = 1;
    s.hosts.truncate(1);
    let a = analysed(&s, |_, _| {});
    assert_verdict(&a, Verdict::Undecided, Status::Preliminary, "exploratory");
    assert_eq!(a.summary.scale, "1 machine, 1 agent");
}

#[test]
fn every_bar_must_hold_on_every_machine() {
    let mut s = plain();
    s.experiment.design.template_builds_per_host = 8;
    s.hosts[1].1 = 1;
    let a = analysed(&s, |_, _| {});
    assert_verdict(&a, Verdict::Pass, Status::Verified, "drums-over-runc-cold");
    assert_eq!((a.summary.scale.as_str(), a.summary.machines.len()), ("2 machines, 2 agents", 2));
    assert_eq!(a.summary.ratios.iter().filter(|r| r.bar.is_some()).count(), 6);
}

#[test]
fn out_of_runs_without_a_valid_one_is_a_failed_record() {
    let mut s = plain();
    s.experiment.design.max_runs = 1;
    let a = analysed(&s, |meta, _| meta.state = RunState::Lost);
    assert_verdict(&a, Verdict::Lost, Status::Failed, "run 1 is lost");
}
