//! What it all adds up to: verdict, status of the record, reasons, and the limits of the claim.

use drums_common::{
    arm::ArmKind,
    experiment::{BarRule, Experiment},
};

use crate::{
    collect::RunState,
    delay::shares,
    gates::{EffectiveState, JudgedRun},
    machines::Machines,
    stats::Answer,
    summary::{ArmSummary, Controls, RatioSummary, Runs, Status, Verdict},
    value::Value,
};

pub(crate) fn decide(
    experiment: &Experiment,
    judged: &[JudgedRun<'_, '_>],
    pooled: &[&JudgedRun<'_, '_>],
    ratios: &[RatioSummary],
    controls: &Controls,
    arms: &[ArmSummary],
) -> (Verdict, Vec<String>) {
    if pooled.is_empty() {
        return not_pooled(judged);
    }
    let mut reasons = Vec::new();
    let mut verdict = Verdict::Pass;
    // Worse verdicts win over better ones, in this order.
    let rank = |v: Verdict| match v {
        Verdict::Pass => 0,
        Verdict::Undecided => 1,
        Verdict::Fail => 2,
        _ => 3,
    };
    let mut worse = |v: Verdict| {
        if rank(v) > rank(verdict) {
            verdict = v;
        }
    };
    for c in &controls.all_aa {
        if matches!(c.answer, Answer::Better | Answer::Worse) {
            worse(Verdict::Invalid);
            reasons.push(format!(
                "A/A control: {} and {} are the same arm, and {} came out {} [{}, {}]: the measurement is biased",
                c.arm,
                c.base,
                c.metric.as_str(),
                c.answer.as_str(),
                c.low,
                c.high
            ));
        }
    }
    for c in controls.all_delayed.iter().filter(|c| !c.found) {
        let injected = c.injected.map(Value::get);
        // A run without the registered delay has been refused, so the plan is only a way to print one.
        if c.high.get() < 1.0 + injected.unwrap_or(c.fraction.get()) {
            worse(Verdict::Invalid);
            reasons.push(format!(
                "positive control: {} is {} with a delay ({}), and [{}, {}] excludes that: the measurement does not see what it should",
                c.arm,
                c.base,
                shares(c.fraction.get(), injected),
                c.low,
                c.high
            ));
        } else {
            worse(Verdict::Undecided);
            reasons.push(format!(
                "positive control: the delay of {} was not found: [{}, {}] contains 1, so the design lacks power",
                c.arm, c.low, c.high
            ));
        }
    }
    for run in pooled {
        for (arm, what) in &run.breaches {
            worse(Verdict::Fail);
            reasons.push(format!(
                "run {}: arm {} breached a gate: {what}",
                run.evidence.meta.number, experiment.arms[*arm].name
            ));
        }
    }
    for r in ratios {
        if let Some(bar) = &r.bar {
            worse(bar.answer);
            reasons.push(bar_sentence(r, arms));
        }
    }
    if experiment.bars.is_empty() {
        worse(Verdict::Undecided);
        reasons.push("no bar is registered, so nothing can be passed".to_owned());
    }
    for run in judged.iter().filter(|r| r.state != EffectiveState::Pooled) {
        let why = run.reasons.first().map(|r| format!(": {r}")).unwrap_or_default();
        reasons.push(format!("run {} is {} and not pooled{why}", run.evidence.meta.number, run.state.as_str()));
    }
    (verdict, reasons)
}

/// No complete run: the verdict is what became of the last one.
fn not_pooled(judged: &[JudgedRun<'_, '_>]) -> (Verdict, Vec<String>) {
    let Some(last) = judged.last() else {
        return (Verdict::Incomplete, vec!["no run was made".to_owned()]);
    };
    let verdict = match last.state {
        EffectiveState::Invalid => Verdict::Invalid,
        EffectiveState::Other(RunState::Lost) => Verdict::Lost,
        EffectiveState::Other(RunState::Cancelled) => Verdict::Cancelled,
        EffectiveState::Other(_) | EffectiveState::Pooled => Verdict::Incomplete,
    };
    let mut reasons = Vec::new();
    for run in judged.iter().rev() {
        reasons.push(format!("run {} is {}", run.evidence.meta.number, run.state.as_str()));
        reasons.extend(run.reasons.iter().cloned());
    }
    (verdict, reasons)
}

/// Endpoint, position, base case, isolation, template cost: a claim names its cell.
fn bar_sentence(r: &RatioSummary, arms: &[ArmSummary]) -> String {
    let Some(bar) = &r.bar else { return String::new() };
    let rule = match bar.rule {
        BarRule::Bound => "bound",
        BarRule::Median => "median",
        BarRule::P95 => "p95",
    };
    let ratio = r.ratio.map_or("unknown".to_owned(), |v| v.to_string());
    let mut s = format!(
        "{}: {} of {} over {} ({}, {}, {}) {ratio} [{}, {}], at most {} by {rule}: {} ({}); {}",
        r.name,
        r.metric.as_str(),
        r.numerator,
        r.denominator,
        r.endpoint,
        r.position,
        r.base_case,
        r.low,
        r.high,
        bar.at_most.get(),
        bar.answer,
        bar.reason,
        r.isolation,
    );
    if r.family == "c" {
        s.push_str("; a product contrast, not a mechanism's");
    }
    for arm in arms.iter().filter(|a| a.machine == r.machine && (a.arm == r.numerator || a.arm == r.denominator)) {
        if let Some(t) = &arm.template {
            let even = match t.break_even_sessions {
                None => "never breaks even".to_owned(),
                Some(1) => "breaks even with the first session".to_owned(),
                Some(n) => format!("breaks even after {n} sessions"),
            };
            s.push_str(&format!("; a template of {} costs {} ms and {even}", arm.arm, t.median_build_ms));
        }
    }
    s
}

pub(crate) fn status(verdict: Verdict, runs: &Runs) -> Status {
    match verdict {
        Verdict::Pass => Status::Verified,
        Verdict::Fail => Status::Failed,
        _ if runs.made == 0 => Status::Planned,
        // No run is left to make it.
        Verdict::Invalid | Verdict::Incomplete | Verdict::Lost | Verdict::Cancelled
            if runs.made >= runs.max && runs.list.iter().all(|r| r.state != "running") =>
        {
            Status::Failed
        }
        _ => Status::Preliminary,
    }
}

pub(crate) fn headline(experiment: &Experiment, verdict: Verdict, scale: &str, runs: &Runs) -> String {
    let s = if runs.pooled == 1 { "" } else { "s" };
    format!(
        "{}: {} on {scale}; {} run{s} of {} made pooled, at most {} registered",
        experiment.id,
        verdict.as_str().to_uppercase(),
        runs.pooled,
        runs.made,
        runs.max
    )
}

pub(crate) fn limits_of_claim(
    experiment: &Experiment,
    machines: &Machines,
    ratios: &[RatioSummary],
    runs: &Runs,
) -> Vec<String> {
    let mut out = Vec::new();
    let agents = machines.hosts.len();
    match machines.machines.len() {
        0 => {}
        1 => out.push(format!(
            "{}: it speaks of this machine; nothing is claimed about other machines{}.",
            machines.scale(),
            if agents > 1 { ", nor between its agents" } else { "" }
        )),
        n => out.push(format!("{n} machines: every bar must hold on each; arms are never compared across machines.")),
    }
    out.push("Closed loop: the next session starts after the last one settled; no queueing is measured.".to_owned());
    out.push("Each ratio stands for its own endpoint, position and base case and for no other.".to_owned());
    let qemu = experiment.arms.iter().any(|a| matches!(a.kind, ArmKind::QemuCold | ArmKind::QemuWarm));
    if qemu && machines.hosts.iter().any(|h| h.accelerator == "tcg") {
        out.push("QEMU ran under TCG (no usable KVM): its times compare with TCG only.".to_owned());
    }
    if ratios.iter().any(|r| r.family == "c" && r.bar.is_some()) {
        out.push("A bar between arms on different paths or positions is a product contrast.".to_owned());
    }
    if ratios.iter().any(|r| r.exploratory) {
        out.push("Contrasts with fewer than eight template builds on a machine are exploratory.".to_owned());
    }
    if ratios.iter().any(|r| r.family == "a" && r.bar.is_none()) {
        out.push("Restored against cold within a mechanism has no bar here: it is a result, not a claim.".to_owned());
    }
    let blocks = experiment.design.blocks_per_host;
    out.push(format!(
        "{} blocks per agent and run, {} pooled; percentiles above the median are given only where n allows.",
        blocks, runs.pooled
    ));
    out
}
