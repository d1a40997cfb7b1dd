//! The report's sections on what came out, in reading order.

use std::{collections::BTreeMap, fmt::Write as _};

use drums_common::{
    experiment::{BarRule, Metric, Registration},
    ids::{ArmName, HostId},
};

use super::{
    colour, esc,
    plot::{self, Curve, Dot, ForestRow, Panel, PhaseRow, RunPoint},
    tone, utc,
};
use crate::{
    Analysis, Summary, Verdict,
    delay::shares,
    series::{Mark, Point},
    stats::Answer,
    summary::{ArmSummary, Percentile, RatioSummary},
    value::{Value, percent},
};

pub(super) fn section(h: &mut String, id: &str, title: &str) {
    let _ = write!(h, r#"<section id="{id}"><h2>{}</h2>"#, esc(title));
}

pub(super) fn end(h: &mut String) {
    h.push_str("</section>\n");
}

pub(super) fn list<'a>(h: &mut String, items: impl Iterator<Item = &'a String>) {
    h.push_str("<ul>");
    for i in items {
        let _ = write!(h, "<li>{}</li>", esc(i));
    }
    h.push_str("</ul>");
}

/// A table; columns whose header ends in `#` are numbers and lose the mark. Cells are HTML already.
pub(super) fn table(h: &mut String, header: &[&str], rows: &[Vec<String>]) {
    let class = |c: &str| if c.ends_with('#') { r#" class="n""# } else { "" };
    h.push_str(r#"<div class="wrap"><table><thead><tr>"#);
    for c in header {
        let _ = write!(h, "<th{}>{}</th>", class(c), esc(c.trim_end_matches('#')));
    }
    h.push_str("</tr></thead><tbody>");
    for row in rows {
        h.push_str("<tr>");
        for (c, cell) in header.iter().zip(row) {
            let _ = write!(h, "<td{}>{cell}</td>", class(c));
        }
        h.push_str("</tr>");
    }
    h.push_str("</tbody></table></div>");
}

fn opt(v: Option<Value>) -> String {
    v.map_or("–".to_owned(), |v| v.to_string())
}

fn interval(low: Option<Value>, high: Option<Value>) -> String {
    match (low, high) {
        (Some(l), Some(h)) => format!("{l} – {h}"),
        _ => "–".to_owned(),
    }
}

pub(super) fn tag(class: &str, text: &str) -> String {
    format!(r#"<span class="tag {class}">{}</span>"#, esc(text))
}

fn answer_tag(v: Verdict) -> String {
    let class = match v {
        Verdict::Pass => "t-good",
        Verdict::Fail => "t-bad",
        _ => "t-warn",
    };
    tag(class, v.as_str())
}

/// With more than one machine, every row says which.
pub(super) fn on_machine(s: &Summary, machine: &str) -> String {
    if s.machines.len() > 1 { format!(" on {machine}") } else { String::new() }
}

pub(super) fn head(h: &mut String, registration: &Registration, s: &Summary) {
    let _ = write!(
        h,
        r##"<div class="eyebrow">{} · DrumsBench report · record: {}</div><h1>{}</h1><p class="soft">{}</p>
<div class="verdict {}"><div class="word">{}</div><div><p><b>{}</b></p>"##,
        s.experiment,
        s.status.as_str(),
        esc(&s.title),
        esc(&s.hypothesis),
        tone(s.verdict),
        s.verdict,
        esc(&s.headline)
    );
    list(h, s.reasons.iter());
    h.push_str("</div></div>");
    h.push_str(r#"<h3>What this verdict does not say</h3>"#);
    list(h, s.limits_of_claim.iter());
    let a = &s.accounting;
    let valid: u32 = s.arms.iter().map(|a| a.valid_sessions).sum();
    let sessions: u32 = s.arms.iter().map(|a| a.sessions).sum();
    let _ = write!(
        h,
        r#"<div class="facts"><div><b>{}</b><span>what counts</span></div><div><b>{}</b><span>runs pooled of made (at most {})</span></div>
<div><b>{}</b><span>blocks counted, {} voided</span></div><div><b>{valid} of {sessions}</b><span>sessions valid</span></div><div><b class="mono">{}</b><span>registration, {}</span></div></div>"#,
        esc(&s.scale),
        esc(&s.runs.text),
        s.runs.max,
        a.blocks_counted,
        a.blocks_voided,
        s.registration.short(),
        utc(registration.registered_at)
    );
    h.push_str("<nav>");
    for (id, text) in [
        ("bars", "Bars and ratios"),
        ("arms", "Medians"),
        ("samples", "Every sample"),
        ("ecdf", "Distributions"),
        ("phases", "Phases"),
        ("controls", "Controls"),
        ("gates", "Gates"),
        ("accounting", "Accounting"),
        ("hosts", "Hosts"),
        ("registered", "Registered"),
        ("reproduce", "Reproduce"),
    ] {
        let _ = write!(h, r##"<a href="#{id}">{text}</a>"##);
    }
    h.push_str("</nav>\n");
}

fn forest_row(s: &Summary, r: &RatioSummary) -> ForestRow {
    let tone = match (&r.bar, r.answer) {
        (Some(b), _) if b.answer == Verdict::Pass => "var(--good)",
        (Some(b), _) if b.answer == Verdict::Fail => "var(--bad)",
        (Some(_), _) => "var(--warn)",
        _ => "var(--accent)",
    };
    let text = format!("{} [{}, {}]", opt(r.ratio), r.low, r.high);
    ForestRow {
        label: if r.bar.is_some() { r.name.clone() } else { format!("{} / {}", r.numerator, r.denominator) },
        detail: if r.bar.is_some() {
            format!("{} / {}{}", r.numerator, r.denominator, on_machine(s, &r.machine))
        } else {
            format!("no bar, family ({}){}", r.family, on_machine(s, &r.machine))
        },
        ratio: r.ratio.map(Value::get),
        low: r.low.get(),
        high: r.high.get(),
        bar: r.bar.as_ref().map(|b| b.at_most.get()),
        tone,
        text,
    }
}

pub(super) fn bars(h: &mut String, s: &Summary) {
    section(h, "bars", "Ratios against their bars");
    if s.ratios.is_empty() {
        h.push_str("<p>No complete run, so no numbers.</p>");
        return end(h);
    }
    let primary = s.ratios.first().map_or(Metric::CreateToReady, |r| r.metric);
    let rows: Vec<ForestRow> =
        s.ratios.iter().filter(|r| r.bar.is_some() || r.metric == primary).map(|r| forest_row(s, r)).collect();
    let _ = write!(
        h,
        "<figure><figcaption>{}: geometric mean of paired ratios with its 95 % interval (paired bootstrap-t). The thick tick is the bar; the shaded side passes. Left of 1 the first-named arm is faster.</figcaption>{}</figure>",
        primary.as_str(),
        plot::forest(&rows)
    );
    let rule = |r: BarRule| match r {
        BarRule::Bound => "upper bound",
        BarRule::Median => "ratio of medians",
        BarRule::P95 => "ratio of p95",
    };
    let rows: Vec<Vec<String>> = s
        .ratios
        .iter()
        .filter_map(|r| {
            let b = r.bar.as_ref()?;
            Some(vec![
                format!("{}{}", esc(&r.name), on_machine(s, &r.machine)),
                format!("{}, {}, {}; {}", esc(&r.endpoint), esc(&r.position), esc(&r.base_case), esc(&r.isolation)),
                format!("{} ≤ {}", rule(b.rule), b.at_most.get()),
                opt(b.tested),
                answer_tag(b.answer),
                esc(&b.reason),
                b.p_holm.to_string(),
                b.chance_for_identical_arms.to_string(),
            ])
        })
        .collect();
    let header = ["bar", "cell", "rule#", "tested#", "answer", "why", "p (Holm)#", "identical arms pass#"];
    table(h, &header, &rows);
    h.push_str(r#"<p class="small soft">All bars must pass, so the verdict needs no correction; Holm's p is for a claim on one bar alone. The last column is the chance that the rule passes two identical arms.</p><details><summary>All ratios: the other measured cells of the same pairs</summary>"#);
    let rows: Vec<Vec<String>> = s
        .ratios
        .iter()
        .map(|r| {
            vec![
                format!("{} / {}{}", r.numerator, r.denominator, on_machine(s, &r.machine)),
                r.metric.as_str().to_owned(),
                opt(r.ratio),
                interval(Some(r.low), Some(r.high)),
                opt(r.ratio_of_medians),
                format!("{} {}{}", r.units, r.unit, if r.units == 1 { "" } else { "s" }),
                format!("({})", r.family),
                format!("{}{}", r.answer.as_str(), if r.exploratory { ", exploratory" } else { "" }),
                format!("{} / {} (p {})", r.only_numerator_valid, r.only_denominator_valid, r.mcnemar_p),
            ]
        })
        .collect();
    let header = [
        "arms",
        "metric",
        "ratio#",
        "interval#",
        "of medians#",
        "resampled",
        "family",
        "at the margin",
        "only one valid (McNemar)",
    ];
    table(h, &header, &rows);
    h.push_str(r#"<p class="small soft">Families: (a) within a mechanism, (b) between mechanisms at one position, endpoint and path, (c) a product contrast.</p></details>"#);
    end(h);
}

/// Arms in the order of registration on one machine, and their colour.
fn arm_index(s: &Summary) -> BTreeMap<&ArmName, usize> {
    let mut out = BTreeMap::new();
    for a in &s.arms {
        let next = out.len();
        out.entry(&a.arm).or_insert(next);
    }
    out
}

pub(super) fn arms(h: &mut String, s: &Summary) {
    section(h, "arms", "Medians");
    let Some(first) = s.arms.first() else {
        h.push_str("<p>No host left evidence.</p>");
        return end(h);
    };
    let _ = write!(
        h,
        r#"<p>{}, with distribution-free 95 % intervals. A failed session counts as plus infinity; the rate of valid sessions stands beside it (Clopper-Pearson).</p>"#,
        first.metric.as_str()
    );
    let rows: Vec<Vec<String>> = s
        .arms
        .iter()
        .map(|a| {
            let role = if a.role.is_empty() { esc(&a.isolation) } else { esc(&a.role) };
            let template = a.template.as_ref().map_or("–".to_owned(), |t| {
                let even = t.break_even_sessions.map_or("never".to_owned(), |n| n.to_string());
                format!("{} ms × {}, break-even: {even}", t.median_build_ms, t.builds)
            });
            vec![
                format!("<b>{}</b>{}", a.arm, on_machine(s, &a.machine)),
                role,
                a.n.to_string(),
                format!("<b>{}</b>", opt(a.median)),
                interval(a.low, a.high),
                format!("{} / {}", a.valid_sessions, a.sessions),
                format!("{} – {}", a.valid_low, a.valid_high),
                template,
            ]
        })
        .collect();
    let header = ["arm", "isolation or role", "n#", "median#", "interval#", "valid#", "rate, 95 %#", "template"];
    table(h, &header, &rows);
    h.push_str("<details><summary>All metrics</summary>");
    let rows: Vec<Vec<String>> = s.arms.iter().flat_map(|a| metric_rows(s, a)).collect();
    let header =
        ["arm", "metric", "endpoint, position, base case", "n#", "failed#", "median#", "interval#", "p95#", "p99#"];
    table(h, &header, &rows);
    h.push_str("</details>");
    let failures: Vec<String> =
        s.arms.iter().flat_map(|a| a.failures.iter().map(|f| format!("{}: {f}", a.arm))).collect();
    if !failures.is_empty() {
        h.push_str("<h3>Failed sessions</h3>");
        list(h, failures.iter());
    }
    end(h);
}

fn metric_rows(s: &Summary, a: &ArmSummary) -> Vec<Vec<String>> {
    let percentile = |p: &Percentile| match p {
        Percentile::Known { value, low, high } => format!("{value} ({low} – {high})"),
        Percentile::Unknown(why) => format!(r#"<span class="soft">{}</span>"#, esc(why)),
    };
    a.metrics
        .iter()
        .map(|m| {
            vec![
                format!("{}{}", a.arm, on_machine(s, &a.machine)),
                m.metric.as_str().to_owned(),
                esc(&format!("{}, {}, {}", m.endpoint, m.position, m.base_case)),
                m.n.to_string(),
                m.failed.to_string(),
                opt(m.median),
                interval(m.low, m.high),
                percentile(&m.p95),
                percentile(&m.p99),
            ]
        })
        .collect()
}

/// Metrics that have points, the primary one first.
fn metrics_of(a: &Analysis) -> Vec<Metric> {
    let mut out: Vec<Metric> = Metric::ALL.into_iter().filter(|m| a.points.iter().any(|p| p.metric == *m)).collect();
    if let Some(first) = a.summary.arms.first().map(|x| x.metric) {
        out.sort_by_key(|m| *m != first);
    }
    out
}

fn dot_of(p: &Point) -> Dot {
    match p.mark {
        Mark::Counted => Dot::Counted,
        Mark::Failed => Dot::Failed,
        Mark::Voided => Dot::Void,
        Mark::NotCounted => Dot::NotCounted,
        Mark::Lost => Dot::Lost,
        Mark::WarmUp => Dot::WarmUp,
    }
}

pub(super) fn samples(h: &mut String, a: &Analysis) {
    let s = &a.summary;
    section(h, "samples", "Every sample in run order");
    let hosts: BTreeMap<&HostId, usize> = s.hosts.iter().enumerate().map(|(i, x)| (&x.host, i)).collect();
    h.push_str(r#"<div class="legend">"#);
    for (host, i) in &hosts {
        let _ = write!(h, r#"<span><i style="background:{}"></i>{}</span>"#, colour(*i), esc(host.as_str()));
    }
    h.push_str("<span>○ warm-up or not counted</span><span>□ voided block</span><span>✕ at the top: failed, plus infinity</span><span>✕ at the foot: lost</span><span>┄ median</span></div>");
    for (k, metric) in metrics_of(a).into_iter().enumerate() {
        let panels: Vec<Panel> = arm_index_ordered(s)
            .into_iter()
            .map(|arm| Panel {
                title: arm.to_string(),
                points: a
                    .points
                    .iter()
                    .filter(|p| p.metric == metric && &p.arm == arm)
                    .map(|p| RunPoint {
                        value: p.value.map(Value::get),
                        dot: dot_of(p),
                        host: hosts.get(&p.host).copied().unwrap_or(0),
                        title: point_title(p),
                    })
                    .collect(),
                // One line would mislead where machines differ.
                median: if s.machines.len() == 1 { median_of(s, arm, metric) } else { None },
            })
            .collect();
        let figure = format!(
            "<figure><figcaption>{}: each arm on its own logarithmic axis.</figcaption>{}</figure>",
            metric.as_str(),
            plot::run_order(&panels, metric.unit())
        );
        if k == 0 {
            h.push_str(&figure);
        } else {
            let _ = write!(h, "<details><summary>{}</summary>{figure}</details>", metric.as_str());
        }
    }
    end(h);
}

fn arm_index_ordered(s: &Summary) -> Vec<&ArmName> {
    let mut v: Vec<(&ArmName, usize)> = arm_index(s).into_iter().collect();
    v.sort_by_key(|(_, i)| *i);
    v.into_iter().map(|(a, _)| a).collect()
}

fn median_of(s: &Summary, arm: &ArmName, metric: Metric) -> Option<f64> {
    let a = s.arms.iter().find(|a| &a.arm == arm)?;
    a.metrics.iter().find(|m| m.metric == metric)?.median.map(Value::get)
}

fn point_title(p: &Point) -> String {
    let value = p.value.map_or("no value".to_owned(), |v| format!("{v} {}", p.unit));
    let note = if p.note.is_empty() { String::new() } else { format!(": {}", p.note) };
    format!(
        "run {} {} block {} position {}: {value} ({}{note})",
        p.run_number,
        p.host,
        p.block,
        p.position + 1,
        p.mark.as_str()
    )
}

pub(super) fn distributions(h: &mut String, a: &Analysis) {
    let s = &a.summary;
    section(h, "ecdf", "Distributions");
    let counted = |p: &&Point| matches!(p.mark, Mark::Counted | Mark::Failed);
    let mut any = false;
    for (k, metric) in metrics_of(a).into_iter().enumerate() {
        for m in &s.machines {
            let curves: Vec<Curve> = arm_index_ordered(s)
                .into_iter()
                .map(|arm| Curve {
                    label: arm.to_string(),
                    values: a
                        .points
                        .iter()
                        .filter(|p| p.metric == metric && &p.arm == arm && m.hosts.contains(&p.host))
                        .filter(counted)
                        .map(|p| p.value.map_or(f64::INFINITY, Value::get))
                        .collect(),
                })
                .collect();
            if curves.iter().all(|c| c.values.is_empty()) {
                continue;
            }
            any = true;
            let figure = format!(
                "<figure><figcaption>{}{}: share of sessions at most so long. A curve that ends below 1 has failed sessions.</figcaption>{}</figure>",
                metric.as_str(),
                on_machine(s, &m.machine),
                plot::ecdf(&curves, &format!("{}, logarithmic", metric.unit()))
            );
            if k == 0 {
                h.push_str(&figure);
            } else {
                let _ = write!(h, "<details><summary>{}</summary>{figure}</details>", metric.as_str());
            }
        }
    }
    if !any {
        h.push_str("<p>No counted sample.</p>");
    }
    end(h);
}

pub(super) fn phases(h: &mut String, s: &Summary) {
    section(h, "phases", "Where the time goes");
    let mut operations: Vec<&str> = s.arms.iter().flat_map(|a| a.phases.iter().map(|p| p.operation.as_str())).collect();
    operations.sort_unstable();
    operations.dedup();
    if operations.is_empty() {
        h.push_str("<p>No timeline of a counted block.</p>");
    }
    for operation in operations {
        let rows: Vec<PhaseRow> = s
            .arms
            .iter()
            .filter_map(|a| {
                let phases: Vec<(String, f64, f64)> = a
                    .phases
                    .iter()
                    .filter(|p| p.operation == operation)
                    .map(|p| (p.phase.clone(), p.median_start_ms.get(), p.median_ms.get()))
                    .collect();
                let label = format!("{}{}", a.arm, on_machine(s, &a.machine));
                (!phases.is_empty()).then_some(PhaseRow { label, phases })
            })
            .collect();
        let figure = format!(
            "<figure><figcaption>{}: medians of start and length of each phase; each arm on its own scale, ending at the time on the right.</figcaption>{}</figure>",
            esc(operation),
            plot::phases(&rows)
        );
        if operation == "create" {
            h.push_str(&figure);
        } else {
            let _ = write!(h, "<details><summary>{}</summary>{figure}</details>", esc(operation));
        }
    }
    end(h);
}

pub(super) fn controls(h: &mut String, s: &Summary) {
    section(h, "controls", "Controls of the measurement");
    let mut rows: Vec<Vec<String>> = Vec::new();
    for c in &s.controls.all_aa {
        let class = if matches!(c.answer, Answer::Better | Answer::Worse) { "t-bad" } else { "t-good" };
        rows.push(vec![
            "A/A: one arm under two names".to_owned(),
            format!("{} / {}{}", c.arm, c.base, on_machine(s, &c.machine)),
            c.metric.as_str().to_owned(),
            opt(c.ratio),
            interval(Some(c.low), Some(c.high)),
            c.mde.map_or("–".to_owned(), |m| percent(m.get())),
            tag(class, c.answer.as_str()),
            format!("must not be better or worse at a margin of {}", percent(c.margin.get())),
        ]);
    }
    for c in &s.controls.all_delayed {
        let delays: Vec<String> = c.injected_ms.iter().map(|(h, d)| format!("{h} {d} ms")).collect();
        rows.push(vec![
            format!("positive: delay {}", shares(c.fraction.get(), c.injected.map(Value::get))),
            format!("{} / {}{}", c.arm, c.base, on_machine(s, &c.machine)),
            c.metric.as_str().to_owned(),
            opt(c.ratio),
            interval(Some(c.low), Some(c.high)),
            c.mde.map_or("–".to_owned(), |m| percent(m.get())),
            if c.found { tag("t-good", "found") } else { tag("t-bad", "not found") },
            format!("must be found: interval above 1 (timelines: {})", esc(&delays.join(", "))),
        ]);
    }
    if rows.is_empty() {
        h.push_str("<p>No control was computed.</p>");
    } else {
        table(h, &["control", "arms", "metric", "ratio#", "interval#", "detectable#", "answer", "rule"], &rows);
        h.push_str(r#"<p class="small soft">Detectable: the smallest effect that this number of units finds with 80 % power at the registered alpha.</p>"#);
    }
    end(h);
}
