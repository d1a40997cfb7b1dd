//! One arm on one machine: medians, rates, template cost, phases, where its variance arises.

use std::collections::BTreeMap;

use drums_common::{
    experiment::{Control, Experiment, Metric},
    ids::HostId,
};

use crate::{
    analysis::primary_metric,
    contrast::{Counted, isolation},
    delay::{injected, shares},
    gates::JudgedRun,
    stats::{clopper_pearson, median, median_interval, quantile_interval, variance},
    summary::{ArmSummary, MetricSummary, Percentile, PhaseSummary, Share, TemplateSummary},
    value::Value,
};

/// The arm with index `index` over the counted `blocks` of the machine with these `hosts`.
pub(crate) fn arm_summary(
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
        Some(Control::Delayed { arm: base, fraction }) => {
            let got = experiment
                .arms
                .iter()
                .position(|a| &a.name == base)
                .and_then(|b| injected(blocks.iter().map(|b| b.block), index, b));
            format!("{base} delayed: {}", shares(*fraction, got.map(|i| i.share)))
        }
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
