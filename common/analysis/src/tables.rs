//! The summary as tables of text: what the command line prints and CSV files hold. No layout, no colour.

use crate::{
    Analysis, Summary,
    delay::shares,
    summary::{Percentile, RatioSummary},
    value::{Value, percent},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub title: String,
    pub header: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
}

fn opt(v: Option<Value>) -> String {
    v.map_or("-".to_owned(), |v| v.to_string())
}

/// `[low, high]`, or `-` where there is none.
fn interval(low: Option<Value>, high: Option<Value>) -> String {
    match (low, high) {
        (Some(l), Some(h)) => format!("[{l}, {h}]"),
        _ => "-".to_owned(),
    }
}

/// The verdict first, then why, then what it does not say.
pub fn verdict_lines(s: &Summary) -> Vec<String> {
    let mut out = vec![s.headline.clone(), format!("record: {}; registration {}", s.status.as_str(), s.registration)];
    out.extend(s.reasons.iter().map(|r| format!("- {r}")));
    out.extend(s.limits_of_claim.iter().map(|r| format!("limit: {r}")));
    out
}

/// Every arm on its primary metric, with the valid-session rate beside it.
pub fn arms(s: &Summary) -> Table {
    let rows = s
        .arms
        .iter()
        .map(|a| {
            vec![
                a.arm.to_string(),
                a.machine.clone(),
                a.metric.as_str().to_owned(),
                a.n.to_string(),
                opt(a.median),
                interval(a.low, a.high),
                format!("{}/{}", a.valid_sessions, a.sessions),
                format!("[{}, {}]", a.valid_low, a.valid_high),
                a.isolation.clone(),
                a.role.clone(),
            ]
        })
        .collect();
    Table {
        title: "Arms".to_owned(),
        header: vec!["arm", "machine", "metric", "n", "median", "95 %", "valid", "rate 95 %", "isolation", "role"],
        rows,
    }
}

/// Every metric of every arm.
pub fn metrics(s: &Summary) -> Table {
    let percentile = |p: &Percentile| match p {
        Percentile::Known { value, low, high } => format!("{value} [{low}, {high}]"),
        Percentile::Unknown(why) => why.clone(),
    };
    let rows = s
        .arms
        .iter()
        .flat_map(|a| {
            a.metrics.iter().map(move |m| {
                vec![
                    a.arm.to_string(),
                    a.machine.clone(),
                    m.metric.as_str().to_owned(),
                    m.endpoint.clone(),
                    m.position.clone(),
                    m.base_case.clone(),
                    m.n.to_string(),
                    m.failed.to_string(),
                    opt(m.median),
                    interval(m.low, m.high),
                    percentile(&m.p95),
                ]
            })
        })
        .collect();
    Table {
        title: "Metrics".to_owned(),
        header: vec![
            "arm",
            "machine",
            "metric",
            "endpoint",
            "position",
            "base case",
            "n",
            "failed",
            "median",
            "interval",
            "p95",
        ],
        rows,
    }
}

fn ratio_row(r: &RatioSummary) -> Vec<String> {
    let mut row = vec![
        r.name.clone(),
        r.metric.as_str().to_owned(),
        opt(r.ratio),
        interval(Some(r.low), Some(r.high)),
        format!("{} {}{}", r.units, r.unit, if r.units == 1 { "" } else { "s" }),
        r.family.clone(),
        r.answer.as_str().to_owned(),
        r.machine.clone(),
    ];
    match &r.bar {
        Some(b) => row.extend([format!("≤ {}", b.at_most.get()), b.answer.to_string()]),
        None => row.extend([String::new(), if r.exploratory { "exploratory".to_owned() } else { String::new() }]),
    }
    row
}

const RATIO_HEADER: [&str; 10] =
    ["ratio", "metric", "estimate", "interval", "units", "family", "at the margin", "machine", "bar", "answer"];

/// Ratios that carry a bar.
pub fn bars(s: &Summary) -> Table {
    Table {
        title: "Bars".to_owned(),
        header: RATIO_HEADER.to_vec(),
        rows: s.ratios.iter().filter(|r| r.bar.is_some()).map(ratio_row).collect(),
    }
}

/// Every ratio, the measured cells beside the bars included.
pub fn ratios(s: &Summary) -> Table {
    Table { title: "Ratios".to_owned(), header: RATIO_HEADER.to_vec(), rows: s.ratios.iter().map(ratio_row).collect() }
}

pub fn controls(s: &Summary) -> Table {
    let mut rows: Vec<Vec<String>> = s
        .controls
        .all_aa
        .iter()
        .map(|c| {
            vec![
                "A/A".to_owned(),
                format!("{} over {}", c.arm, c.base),
                c.metric.as_str().to_owned(),
                opt(c.ratio),
                interval(Some(c.low), Some(c.high)),
                c.mde.map_or("-".to_owned(), |m| percent(m.get())),
                c.answer.as_str().to_owned(),
            ]
        })
        .collect();
    rows.extend(s.controls.all_delayed.iter().map(|c| {
        vec![
            format!("delayed: {}", shares(c.fraction.get(), c.injected.map(Value::get))),
            format!("{} over {}", c.arm, c.base),
            c.metric.as_str().to_owned(),
            opt(c.ratio),
            interval(Some(c.low), Some(c.high)),
            c.mde.map_or("-".to_owned(), |m| percent(m.get())),
            if c.found { "found" } else { "not found" }.to_owned(),
        ]
    }));
    Table {
        title: "Controls".to_owned(),
        header: vec!["control", "arms", "metric", "ratio", "interval", "detectable", "answer"],
        rows,
    }
}

pub fn gates(s: &Summary) -> Table {
    let rows = s
        .gates
        .iter()
        .map(|g| {
            vec![
                g.run.to_string(),
                g.kind.as_str().to_owned(),
                g.name.clone(),
                g.answer.clone(),
                g.reading.clone(),
                g.limit.clone(),
                g.effect.clone(),
                g.findings.join(" | "),
            ]
        })
        .collect();
    Table {
        title: "Gates".to_owned(),
        header: vec!["run", "kind", "gate", "answer", "reading", "limit", "effect", "findings"],
        rows,
    }
}

pub fn runs(s: &Summary) -> Table {
    let rows = s
        .runs
        .list
        .iter()
        .map(|r| {
            vec![
                format!("{} of {}", r.number, s.runs.made),
                r.run.to_string(),
                r.state.clone(),
                r.voided_blocks.to_string(),
                r.reasons.join(" | "),
            ]
        })
        .collect();
    Table { title: "Runs".to_owned(), header: vec!["number", "run", "state", "voided blocks", "reasons"], rows }
}

/// Every value in run order: one row a session and metric.
pub fn samples(a: &Analysis) -> Table {
    let rows = a
        .points
        .iter()
        .map(|p| {
            vec![
                a.summary.registration.to_string(),
                p.run.to_string(),
                p.host.to_string(),
                p.block.to_string(),
                p.position.to_string(),
                p.arm.to_string(),
                p.session.clone(),
                p.template_build.to_string(),
                p.metric.as_str().to_owned(),
                // Full digits: this is data, not a table for people.
                p.value.map_or(String::new(), |v| v.get().to_string()),
                p.unit.clone(),
                p.intended_start_us.map_or(String::new(), |v| v.to_string()),
                p.mark.as_str().to_owned(),
                p.note.clone(),
            ]
        })
        .collect();
    Table {
        title: "Samples".to_owned(),
        header: vec![
            "registration",
            "run",
            "host",
            "block",
            "position",
            "arm",
            "session",
            "template_build",
            "metric",
            "value",
            "unit",
            "intended_start_us",
            "mark",
            "note",
        ],
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{analyse, synthetic::Scenario};

    #[test]
    fn every_table_has_as_many_cells_as_columns() {
        let s = Scenario::exp028(2);
        let (meta, records) = s.run(1);
        let a = analyse(&s.registration(), &[meta], &records);
        let sum = &a.summary;
        for t in [arms(sum), metrics(sum), bars(sum), ratios(sum), controls(sum), gates(sum), runs(sum), samples(&a)] {
            assert!(!t.rows.is_empty(), "{}", t.title);
            assert!(t.rows.iter().all(|r| r.len() == t.header.len()), "{}", t.title);
        }
        assert_eq!(bars(sum).rows.len(), 3);
        assert!(verdict_lines(sum)[0].starts_with("EXP-028: PASS on 1 machine, 2 agents"));
    }
}
