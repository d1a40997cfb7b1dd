//! The report: one HTML file that needs nothing else. No script, no outside resource, nothing for a browser to ask for.
//!
//! Verdict first; then what it rests on, down to every sample in run order.

mod plot;
mod record;
mod sections;

use std::fmt::Write as _;

use drums_common::experiment::Registration;

use crate::{Analysis, Verdict};

const STYLE: &str = include_str!("style.css");

/// Text for an element or a quoted attribute.
pub(crate) fn esc(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Control characters have no place in HTML; what a log or a name smuggled in is shown as such.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

pub(crate) fn colour(i: usize) -> String {
    format!("var(--c{})", i % 8)
}

fn tone(v: Verdict) -> &'static str {
    match v {
        Verdict::Pass => "pass",
        Verdict::Fail => "fail",
        Verdict::Undecided => "undecided",
        _ => "other",
    }
}

/// UTC, as `2026-11-29 20:41:05 UTC`.
pub(crate) fn utc(at: drums_common::clock::Micros) -> String {
    let seconds = at.0.div_euclid(1_000_000);
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days to civil date in the proleptic Gregorian calendar, years beginning in March.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

/// The whole page.
pub fn render_html(registration: &Registration, analysis: &Analysis) -> String {
    let s = &analysis.summary;
    let mut h = String::with_capacity(256 * 1024);
    let title = format!("{} {}: {}", s.experiment, s.verdict, s.title);
    let _ = write!(
        h,
        r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>
"#,
        esc(&title)
    );
    sections::head(&mut h, registration, s);
    sections::bars(&mut h, s);
    sections::arms(&mut h, s);
    sections::samples(&mut h, analysis);
    sections::distributions(&mut h, analysis);
    sections::phases(&mut h, s);
    sections::controls(&mut h, s);
    record::gates(&mut h, s);
    record::accounting(&mut h, s);
    record::hosts(&mut h, s);
    record::registered(&mut h, registration);
    record::reproduce(&mut h, s);
    h.push_str("</main></body></html>\n");
    h
}

#[cfg(test)]
mod tests {
    use drums_common::clock::Micros;

    use super::*;
    use crate::{RunState, analyse, synthetic::Scenario};

    fn page(s: &Scenario, state: RunState) -> String {
        let (mut meta, records) = s.run(1);
        meta.state = state;
        let r = s.registration();
        render_html(&r, &analyse(&r, &[meta], &records))
    }

    #[test]
    fn a_page_asks_for_nothing_and_says_the_verdict_first() {
        let html = page(&Scenario::exp028(1), RunState::Complete);
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("<script"));
        assert!(!html.contains("src="));
        let verdict = html.find(r#"<div class="word">pass"#).unwrap();
        assert!(verdict < html.find("<h2").unwrap());
        for word in ["1 machine, 2 agents", "drumsctl verify", "A/A", "in run order", "TCG"] {
            assert!(html.contains(word), "{word}");
        }
        // Every opened element of these kinds is closed.
        for tag in ["svg", "table", "figure", "details", "section", "ul"] {
            assert_eq!(html.matches(&format!("<{tag}")).count(), html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        assert!(!html.contains("NaN"));
    }

    #[test]
    fn a_run_without_numbers_has_a_page_too() {
        let html = page(&Scenario::exp028(1), RunState::Lost);
        assert!(html.contains(r#"<div class="word">lost"#));
        let s = Scenario::exp028(1);
        let none = render_html(&s.registration(), &analyse(&s.registration(), &[], &[]));
        assert!(none.contains("no run was made"));
    }

    #[test]
    fn what_evidence_says_cannot_break_the_page() {
        let mut s = Scenario::exp028(1);
        s.experiment.title = "<script>alert(1)</script>".to_owned();
        assert!(!page(&s, RunState::Complete).contains("<script"));
        assert_eq!(esc("a<b>&\"'\u{7}"), "a&lt;b&gt;&amp;&quot;&#39;\u{fffd}");
    }

    #[test]
    fn instants_are_written_in_utc() {
        assert_eq!(utc(Micros(0)), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(Micros(1_709_210_096_000_000)), "2024-02-29 12:34:56 UTC");
        assert_eq!(utc(Micros(-1)), "1969-12-31 23:59:59 UTC");
    }
}
