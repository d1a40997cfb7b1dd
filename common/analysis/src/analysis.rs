//! The verdict: all pooled runs of a registration, every bar on every machine, controls, and what it all adds up to.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    evidence::Record,
    experiment::{BarRule, Control, Experiment, Metric, Registration},
    ids::{HostId, RunId},
};

use crate::{
    collect::{RunMeta, RunState, collect},
    contrast::{Contrast, Counted, isolation},
    gates::{self, BlockFate, EffectiveState, JudgedRun, Taken, environment},
    machines::{Machines, machines},
    series::{self, Point},
    stats::{Answer, clopper_pearson, holm, median, median_interval, quantile_interval, variance},
    summary::{
        AaSummary, Accounting, ArmSummary, Controls, DelayedSummary, HarnessSummary, MetricSummary, Percentile,
        PhaseSummary, RatioSummary, RunSummary, Runs, Share, Status, Summary, TemplateSummary, Verdict,
    },
    value::{Value, percent},
};

/// Everything that the report, the tables and `summary.json` are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Analysis {
    pub summary: Summary,
    /// Every value in run order.
    pub points: Vec<Point>,
}

/// Analyses all runs of a registration. `records` may hold any order and any mixture of runs; those of runs that no
/// `RunMeta` names are reported and not read.
pub fn analyse(registration: &Registration, runs: &[RunMeta], records: &[Record]) -> Analysis {
    let experiment = &registration.experiment;
    let (evidence, unknown) = collect(registration, runs, records);
    let machines = machines(experiment, &evidence);
    let judged: Vec<JudgedRun<'_, '_>> = evidence.iter().map(|e| gates::judge(experiment, e)).collect();

    let pooled: Vec<&JudgedRun<'_, '_>> = judged.iter().filter(|r| r.state == EffectiveState::Pooled).collect();
    let mut blocks: BTreeMap<String, Vec<Counted<'_, '_, '_>>> = BTreeMap::new();
    for run in &pooled {
        for b in run.blocks.iter().filter(|b| b.fate == BlockFate::Counted) {
            // Completeness has refused a host without a preflight, so it has a machine.
            if let Some(machine) = machines.of(b.attempt.host) {
                blocks.entry(machine.machine.clone()).or_default().push(Counted {
                    run: run.evidence.meta.run,
                    host: b.attempt.host,
                    block: b,
                });
            }
        }
    }

    let mut ratios = Vec::new();
    let mut controls = Controls::default();
    for (machine, blocks) in &blocks {
        ratios.extend(ratios_of(experiment, machine, blocks));
        controls_of(experiment, machine, blocks, &mut controls);
    }
    let primary = primary_metric(experiment);
    controls.aa = controls.all_aa.iter().find(|c| Some(c.metric) == primary).cloned();
    controls.delayed = controls.all_delayed.iter().find(|c| Some(c.metric) == primary).cloned();

    let arms: Vec<ArmSummary> = machines
        .machines
        .iter()
        .flat_map(|m| {
            let of_machine = blocks.get(&m.machine).map_or(&[][..], Vec::as_slice);
            let pooled = &pooled;
            (0..experiment.arms.len())
                .map(move |arm| arm_summary(experiment, &m.machine, of_machine, pooled, &m.hosts, arm))
        })
        .collect();

    let runs = runs_summary(experiment, &judged);
    let (verdict, mut reasons) = decide(experiment, &judged, &pooled, &ratios, &controls, &arms);
    for run in unknown {
        reasons.push(format!("records of {run}, which is not a run of this registration, were not read"));
    }
    let status = status(verdict, &runs);
    let scale = machines.scale();
    let summary = Summary {
        verdict,
        status,
        headline: headline(experiment, verdict, &scale, &runs),
        reasons,
        limits_of_claim: limits_of_claim(experiment, &machines, &ratios, &runs),
        registration: registration.sha256,
        experiment: experiment.id,
        title: experiment.title.clone(),
        hypothesis: experiment.hypothesis.clone(),
        scale,
        accounting: accounting(experiment, &judged),
        harness: judged.iter().flat_map(harness).collect(),
        gates: judged.iter().flat_map(|r| r.gates.clone()).collect(),
        machines: machines.machines,
        hosts: machines.hosts,
        runs,
        arms,
        ratios,
        controls,
    };
    Analysis { summary, points: series::points(experiment, &judged) }
}

/// The metric that arms are summarised by: the first primary one, else the first.
pub fn primary_metric(experiment: &Experiment) -> Option<Metric> {
    experiment.metrics.iter().find(|m| m.primary).or(experiment.metrics.first()).map(|m| m.metric)
}

/// Bars first, each with its pair's other metrics beside it, then every mechanism's restored arm over its cold one.
fn ratios_of(experiment: &Experiment, machine: &str, blocks: &[Counted<'_, '_, '_>]) -> Vec<RatioSummary> {
    let index = |name| experiment.arms.iter().position(|a| &a.name == name);
    let mut out: Vec<RatioSummary> = Vec::new();
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    let mut done: BTreeSet<(Metric, usize, usize)> = BTreeSet::new();
    for bar in &experiment.bars {
        // Validation has refused a bar on an arm that is not there.
        let (Some(n), Some(d)) = (index(&bar.numerator), index(&bar.denominator)) else { continue };
        let contrast = Contrast::compute(experiment, machine, blocks, bar.metric, n, d);
        let mut summary = contrast.summary(experiment, machine, bar.name.clone());
        summary.bar = Some(contrast.judge(experiment, machine, bar));
        out.push(summary);
        done.insert((bar.metric, n, d));
        pairs.push((n, d));
    }
    let p: Vec<f64> = out.iter().filter_map(|r| r.bar.as_ref()).map(|b| b.p.get()).collect();
    for (bar, p) in out.iter_mut().filter_map(|r| r.bar.as_mut()).zip(holm(&p)) {
        bar.p_holm = p.into();
    }
    let plain = |i: &usize| experiment.arms[*i].control.is_none();
    for r in (0..experiment.arms.len()).filter(plain) {
        for c in (0..experiment.arms.len()).filter(plain) {
            let (restored, cold) = (experiment.arms[r].kind, experiment.arms[c].kind);
            if restored.from_template() && !cold.from_template() && restored.mechanism() == cold.mechanism() {
                pairs.push((r, c));
            }
        }
    }
    for (n, d) in pairs {
        for spec in &experiment.metrics {
            if done.insert((spec.metric, n, d)) {
                let contrast = Contrast::compute(experiment, machine, blocks, spec.metric, n, d);
                let name = format!("{} over {}", experiment.arms[n].name, experiment.arms[d].name);
                out.push(contrast.summary(experiment, machine, name));
            }
        }
    }
    out
}

fn controls_of(experiment: &Experiment, machine: &str, blocks: &[Counted<'_, '_, '_>], out: &mut Controls) {
    for (i, arm) in experiment.arms.iter().enumerate() {
        let Some(control) = &arm.control else { continue };
        let (Control::SameAs { arm: base } | Control::Delayed { arm: base, .. }) = control;
        let Some(b) = experiment.arms.iter().position(|a| &a.name == base) else { continue };
        for spec in experiment.metrics.iter().filter(|m| m.primary) {
            let c = Contrast::compute(experiment, machine, blocks, spec.metric, i, b);
            let (ratio, low, high) =
                (c.interval.ratio.map(Value::new), c.interval.interval.low, c.interval.interval.high);
            let mde = c.interval.mde.map(Value::new);
            match control {
                Control::SameAs { .. } => out.all_aa.push(AaSummary {
                    arm: arm.name.clone(),
                    base: base.clone(),
                    machine: machine.to_owned(),
                    metric: spec.metric,
                    ratio,
                    low: low.into(),
                    high: high.into(),
                    mde,
                    margin: experiment.design.margin.into(),
                    answer: c.interval.answer(experiment.design.margin),
                    units: c.units.len() as u32,
                    unit: c.unit_name().to_owned(),
                }),
                // The delay is put into create-to-ready and nothing else.
                Control::Delayed { fraction, .. } if spec.metric == Metric::CreateToReady => {
                    out.all_delayed.push(DelayedSummary {
                        arm: arm.name.clone(),
                        base: base.clone(),
                        machine: machine.to_owned(),
                        metric: spec.metric,
                        fraction: (*fraction).into(),
                        delays_ms: delays(blocks, &arm.name),
                        found: low > 1.0,
                        ratio,
                        low: low.into(),
                        high: high.into(),
                        mde,
                        units: c.units.len() as u32,
                    });
                }
                Control::Delayed { .. } => {}
            }
        }
    }
}

fn delays(blocks: &[Counted<'_, '_, '_>], arm: &drums_common::ids::ArmName) -> BTreeMap<HostId, Value> {
    let mut out = BTreeMap::new();
    for b in blocks {
        if let Some(ms) = b.block.attempt.started.delays_ms.get(arm) {
            out.insert(b.host.clone(), Value::new(*ms));
        }
    }
    out
}

fn arm_summary(
    experiment: &Experiment,
    machine: &str,
    blocks: &[Counted<'_, '_, '_>],
    pooled: &[&JudgedRun<'_, '_>],
    hosts: &[HostId],
    index: usize,
) -> ArmSummary {
    let arm = &experiment.arms[index];
    let alpha = experiment.design.alpha;
    let values = |metric| -> Vec<f64> { blocks.iter().filter_map(|b| b.value(index, metric)).collect() };
    let metrics: Vec<MetricSummary> = experiment
        .metrics
        .iter()
        .map(|spec| {
            let v = values(spec.metric);
            let q = median_interval(&v, alpha);
            let percentile = |p: f64| match quantile_interval(&v, p, alpha) {
                Some(q) if let Some(i) = q.interval => {
                    Percentile::Known { value: q.value.into(), low: i.low.into(), high: i.high.into() }
                }
                _ => Percentile::Unknown("n too small".to_owned()),
            };
            MetricSummary {
                metric: spec.metric,
                unit: spec.metric.unit().to_owned(),
                endpoint: spec.endpoint.clone(),
                position: spec.position.clone(),
                base_case: spec.base_case.clone(),
                n: v.len() as u32,
                failed: v.iter().filter(|x| x.is_infinite()).count() as u32,
                median: q.map(|q| q.value.into()),
                low: q.and_then(|q| q.interval).map(|i| i.low.into()),
                high: q.and_then(|q| q.interval).map(|i| i.high.into()),
                p95: percentile(0.95),
                p99: percentile(0.99),
            }
        })
        .collect();
    let rows = || blocks.iter().filter_map(|b| b.block.rows.iter().find(|r| r.arm == index).map(|r| (b, r)));
    let sessions = rows().count() as u64;
    let valid = rows().filter(|(_, r)| r.session_valid).count() as u64;
    let rate = clopper_pearson(valid, sessions, alpha);
    let metric = primary_metric(experiment).unwrap_or(Metric::CreateToReady);
    let first = metrics.iter().find(|m| m.metric == metric);
    let role = match &arm.control {
        None => String::new(),
        Some(Control::SameAs { arm }) => format!("A/A control of {arm}"),
        Some(Control::Delayed { arm, fraction }) => format!("{arm} delayed by {}", percent(*fraction)),
    };
    ArmSummary {
        arm: arm.name.clone(),
        kind: arm.kind,
        machine: machine.to_owned(),
        role,
        isolation: isolation(arm.kind).to_owned(),
        metric,
        n: first.map_or(0, |m| m.n),
        median: first.and_then(|m| m.median),
        low: first.and_then(|m| m.low),
        high: first.and_then(|m| m.high),
        sessions: sessions as u32,
        valid_sessions: valid as u32,
        valid_rate: rate.value().map(Value::new),
        valid_low: rate.interval.low.into(),
        valid_high: rate.interval.high.into(),
        template: template(experiment, blocks, pooled, hosts, index),
        phases: phases(blocks, index),
        variance_shares: variance_shares(blocks, index, metric, arm.kind.from_template()),
        failures: rows()
            .filter(|(_, r)| !r.failures.is_empty())
            .take(20)
            .map(|(b, r)| format!("{}: {}", b.block.attempt.place(), r.failures.join("; ")))
            .collect(),
        metrics,
    }
}

fn template(
    experiment: &Experiment,
    blocks: &[Counted<'_, '_, '_>],
    pooled: &[&JudgedRun<'_, '_>],
    hosts: &[HostId],
    index: usize,
) -> Option<TemplateSummary> {
    let arm = &experiment.arms[index];
    if !arm.kind.from_template() {
        return None;
    }
    let templates: Vec<_> = pooled
        .iter()
        .flat_map(|r| r.evidence.hosts.iter())
        .filter(|(h, _)| hosts.contains(h))
        .flat_map(|(_, run)| run.templates.iter())
        .filter(|t| t.arm == arm.name)
        .collect();
    let build_ms = median(&templates.iter().map(|t| t.duration_ms).collect::<Vec<_>>())?;
    let bytes = median(&templates.iter().map(|t| t.bytes as f64).collect::<Vec<_>>())?;
    let cold = experiment
        .arms
        .iter()
        .position(|a| a.control.is_none() && !a.kind.from_template() && a.kind.mechanism() == arm.kind.mechanism());
    let at = |i| median(&blocks.iter().filter_map(|b| b.value(i, Metric::CreateToReady)).collect::<Vec<_>>());
    let saved = cold.and_then(|c| Some(at(c)? - at(index)?)).filter(|s| s.is_finite() && *s > 0.0);
    Some(TemplateSummary {
        builds: templates.len() as u32,
        median_build_ms: build_ms.into(),
        median_bytes: bytes as u64,
        cold_arm: cold.map(|c| experiment.arms[c].name.clone()),
        break_even_sessions: saved.map(|s| (build_ms / s).ceil() as u64),
    })
}

fn phases(blocks: &[Counted<'_, '_, '_>], index: usize) -> Vec<PhaseSummary> {
    // Operation and phase → start and duration, milliseconds, one per session.
    let mut all: BTreeMap<(String, String), Vec<(f64, f64)>> = BTreeMap::new();
    for row in blocks.iter().flat_map(|b| b.block.attempt.rows.iter()).filter(|r| r.arm == index) {
        for t in &row.timelines {
            let mut of_session: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
            for p in &t.phases {
                let (start, took) = (p.start_us as f64 / 1e3, p.end_us.saturating_sub(p.start_us) as f64 / 1e3);
                // A phase entered twice is one phase: its first start and its whole time.
                of_session.entry(&p.name).and_modify(|e| e.1 += took).or_insert((start, took));
            }
            for (name, e) in of_session {
                all.entry((t.operation.clone(), name.to_owned())).or_default().push(e);
            }
        }
    }
    let mut out: Vec<PhaseSummary> = all
        .into_iter()
        .filter_map(|((operation, phase), v)| {
            Some(PhaseSummary {
                operation,
                phase,
                n: v.len() as u32,
                median_start_ms: median(&v.iter().map(|e| e.0).collect::<Vec<_>>())?.into(),
                median_ms: median(&v.iter().map(|e| e.1).collect::<Vec<_>>())?.into(),
            })
        })
        .collect();
    out.sort_by(|a, b| a.operation.cmp(&b.operation).then(a.median_start_ms.get().total_cmp(&b.median_start_ms.get())));
    out
}

fn variance_shares(blocks: &[Counted<'_, '_, '_>], index: usize, metric: Metric, builds: bool) -> Vec<Share> {
    let (mut values, mut groups) = (Vec::new(), Vec::new());
    for b in blocks {
        if let Some(v) = b.value(index, metric).filter(|v| v.is_finite()) {
            values.push(v.ln());
            let mut g = vec![b.host.to_string(), b.run.to_string()];
            if builds {
                g.push(b.block.attempt.started.template_build.to_string());
            }
            groups.push(g);
        }
    }
    let levels = if builds { &["agent", "run", "template build", "block"][..] } else { &["agent", "run", "block"][..] };
    let shares = variance::shares(&values, &groups).unwrap_or_default();
    levels.iter().zip(shares).map(|(level, s)| Share { level: (*level).to_owned(), share: s.into() }).collect()
}

fn runs_summary(experiment: &Experiment, judged: &[JudgedRun<'_, '_>]) -> Runs {
    let list: Vec<RunSummary> = judged
        .iter()
        .map(|r| RunSummary {
            run: r.evidence.meta.run,
            number: r.evidence.meta.number,
            state: r.state.as_str().to_owned(),
            reasons: r.reasons.clone(),
            voided_blocks: r.voids.len() as u32,
            voids: r.voids.clone(),
        })
        .collect();
    let pooled = judged.iter().filter(|r| r.state == EffectiveState::Pooled).count();
    Runs {
        text: format!("{pooled} of {}", judged.len()),
        pooled: pooled as u32,
        made: judged.len() as u32,
        max: experiment.design.max_runs,
        list,
    }
}

fn decide(
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
        if c.high.get() < 1.0 + c.fraction.get() {
            worse(Verdict::Invalid);
            reasons.push(format!(
                "positive control: {} was delayed by {} of {}, and [{}, {}] excludes that: the measurement does not see what it should",
                c.arm,
                percent(c.fraction.get()),
                c.base,
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

fn status(verdict: Verdict, runs: &Runs) -> Status {
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

fn headline(experiment: &Experiment, verdict: Verdict, scale: &str, runs: &Runs) -> String {
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

fn limits_of_claim(experiment: &Experiment, machines: &Machines, ratios: &[RatioSummary], runs: &Runs) -> Vec<String> {
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
    out.push("Each ratio stands for its own endpoint, position and base case and for no other.".to_owned());
    if machines.hosts.iter().any(|h| h.accelerator == "tcg") {
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

fn accounting(experiment: &Experiment, judged: &[JudgedRun<'_, '_>]) -> Accounting {
    let mut a = Accounting::default();
    let per_block = (experiment.arms.len() * experiment.metrics.len()) as u64;
    for run in judged {
        a.blocks_due += u64::from(experiment.hosts.count) * u64::from(experiment.design.blocks_per_host);
        a.late_records += run.evidence.hosts.values().map(|h| h.late).sum::<u64>();
        for b in &run.blocks {
            a.blocks_started += 1;
            a.samples_started += per_block;
            let counted = b.fate == BlockFate::Counted && run.state == EffectiveState::Pooled;
            if matches!(b.fate, BlockFate::Voided(_)) {
                a.blocks_voided += 1;
                a.samples_voided += per_block;
                continue;
            }
            a.blocks_counted += u64::from(counted);
            let (mut valid, mut failed) = (0, 0);
            for taken in b.rows.iter().flat_map(|r| r.values.values()) {
                match taken {
                    Taken::Valid(_) => valid += 1,
                    Taken::Failed => failed += 1,
                    Taken::Lost => {}
                }
            }
            a.samples_valid += valid;
            a.samples_failed += failed;
            // An arm that the block never came to owes its samples too.
            a.samples_lost += per_block.saturating_sub(valid + failed);
            if !counted {
                a.samples_not_counted += valid + failed;
            }
        }
    }
    a.balanced = a.samples_started == a.samples_valid + a.samples_failed + a.samples_voided + a.samples_lost;
    a
}

fn harness(run: &JudgedRun<'_, '_>) -> Vec<HarnessSummary> {
    let id: RunId = run.evidence.meta.run;
    environment::by_host(run.evidence)
        .filter_map(|(host, h)| {
            let readings = environment::readings(h);
            let usual = environment::host_canary(h);
            let of = |f: &dyn Fn(&drums_common::evidence::Environment) -> f64| -> Vec<f64> {
                readings.iter().map(|e| f(e)).collect()
            };
            let own = of(&|e| environment::fraction(e.harness_cpu_ms, e));
            let outside = of(&|e| environment::fraction(e.outside_cpu_ms, e));
            let steal = of(&|e| environment::fraction(e.steal_ms, e));
            let canary = of(&|e| environment::canary_ratio(e, usual));
            let settle: Vec<f64> = readings.iter().flat_map(|e| e.settle_ms.clone()).collect();
            let max = |v: &[f64]| Value::new(v.iter().copied().fold(0.0, f64::max));
            Some(HarnessSummary {
                host: host.clone(),
                run: id,
                median_cpu_fraction: median(&own)?.into(),
                max_cpu_fraction: max(&own),
                median_outside_cpu_fraction: median(&outside)?.into(),
                max_outside_cpu_fraction: max(&outside),
                max_steal_fraction: max(&steal),
                max_canary_ratio: max(&canary),
                median_settle_ms: median(&settle).unwrap_or(0.0).into(),
            })
        })
        .collect()
}
