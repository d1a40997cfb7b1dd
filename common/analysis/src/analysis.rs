//! The way from records to the summary: runs judged, complete ones pooled, every bar tested on every machine, controls.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    evidence::Record,
    experiment::{Control, Experiment, Metric, Registration},
    ids::RunId,
};

use crate::{
    accounting::accounting,
    arms::arm_summary,
    collect::{RunMeta, collect},
    contrast::{Contrast, Counted},
    delay::injected,
    gates::{self, BlockFate, EffectiveState, JudgedRun, environment},
    machines::machines,
    series::{self, Point},
    stats::{holm, median},
    summary::{
        AaSummary, ArmSummary, Controls, DelayedSummary, HarnessSummary, RatioSummary, RunSummary, Runs, Summary,
    },
    value::Value,
    verdict::{decide, headline, limits_of_claim, status},
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
                    let injected = injected(blocks.iter().map(|b| b.block), i, b);
                    out.all_delayed.push(DelayedSummary {
                        arm: arm.name.clone(),
                        base: base.clone(),
                        machine: machine.to_owned(),
                        metric: spec.metric,
                        fraction: (*fraction).into(),
                        injected: injected.as_ref().map(|i| i.share.into()),
                        injected_ms: injected
                            .map(|i| i.ms.into_iter().map(|(host, ms)| (host, ms.into())).collect())
                            .unwrap_or_default(),
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
