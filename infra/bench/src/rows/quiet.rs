//! How much the link disturbs what is measured. The subject is the real agent's link (`drums_agent::net`) in a process of
//! its own, connected to the real coordinator.

use std::path::Path;

use anyhow::{Context as _, Result};
use drums_common::lease::LeaseTimes;

use super::{Bench, told};
use crate::{
    home::{Home, experiment},
    process::Helper,
    row::{Goal, Reading, Row, order, ratio, worst},
};

/// Registered margin of equivalence, and the one that would be nice to have.
const MARGIN: f64 = 0.02;
const FINER: f64 = 0.005;

pub(super) async fn rows(bench: &Bench, dir: &Path) -> Result<Vec<Row>> {
    let any = experiment(900, Vec::new(), 2, 2, 4096)?;
    let home =
        Home::make(&dir.join("home"), &bench.coordinator(), 1, LeaseTimes::default(), std::slice::from_ref(&any))?;
    let _coordinator = home.start()?;
    let state = home.write_state(0)?;
    let agent = bench.programs.join("drums-agent");
    let mut subject = Helper::start(&["link", &state.display().to_string(), &agent.display().to_string()])?;

    // Several beats would fall into it.
    let quiet_ms = bench.size.quiet_ms;
    let mut wakeups = Vec::new();
    let mut around = Vec::new();
    for n in 0..bench.size.silences {
        let quiet = subject.ask(&format!("quiet {quiet_ms}"))?;
        let number = |v: &serde_json::Value, key: &str| v[key].as_f64().with_context(|| format!("no {key}: {v}"));
        wakeups.push(Reading { value: number(&quiet, "wakeups")?, cpu_us: number(&quiet, "cpu_us")? });
        let beating = subject.ask(&format!("beat {quiet_ms}"))?;
        #[allow(clippy::cast_precision_loss)] // two seconds
        let share = number(&beating, "cpu_us")? / (quiet_ms as f64 * 1e3);
        around.push(Reading { value: share * 100.0, cpu_us: f64::NAN });
        eprintln!("quiet: silence {} of {}: {quiet}, around it {beating}", n + 1, bench.size.silences);
    }
    let mut rows = vec![
        worst(
            &format!("wake-ups of the link in a quiet interval of {quiet_ms} ms"),
            &wakeups,
            "wake-ups",
            Goal::AtMost(0.0),
        ),
        worst("the link's share of a core around quiet intervals", &around, "% of a core", Goal::AtMost(0.1)),
    ];

    let mut readings: [Vec<Reading>; 2] = Default::default();
    let (rounds, creations) = (bench.size.latency_rounds, bench.size.creations);
    for (n, round) in order(bench.seed, "quiet", 2, rounds).into_iter().enumerate() {
        for arm in round {
            let word = if arm == 0 { "live" } else { "closed" };
            let took = subject.ask(&format!("create {word} {creations}"))?;
            let ms = took["median_ms"].as_f64().with_context(|| format!("no median: {took}"))?;
            readings[arm].push(Reading { value: ms, cpu_us: f64::NAN });
        }
        if (n + 1) % 20 == 0 {
            told("quiet", n, rounds, &["live", "closed"], &readings);
        }
    }
    let [live, closed] = &readings;
    let row =
        ratio("creating a process, link live / closed", live, "closed", closed, "ms", Goal::Within(MARGIN), bench.seed);
    let half = (row.high / row.low).ln() / 2.0;
    rows.push(if half.is_finite() {
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        // some thousands
        let wanted = (row.n as f64 * (half / (1.0 + FINER).ln()).powi(2)).ceil() as u64;
        row.with_note(&format!("a margin of 0.5 % would need about n = {wanted} rounds"))
    } else {
        row
    });
    Ok(rows)
}
