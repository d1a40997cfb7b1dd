//! Drawings as inline SVG: no script, no outside resource, colours from the page's variables.

use std::fmt::Write as _;

use super::{colour, esc};
use crate::value::Value;

/// A logarithmic axis between two positive values, in pixels.
#[derive(Clone, Copy)]
pub(super) struct LogAxis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl LogAxis {
    /// An axis that shows all positive finite values with some air; 1 to 10 if there is none.
    pub(super) fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for v in values.filter(|v| v.is_finite() && *v > 0.0) {
            low = low.min(v);
            high = high.max(v);
        }
        if low > high {
            (low, high) = (1.0, 10.0);
        }
        let air = ((high / low).ln() * 0.07).max(0.06).exp();
        Self { low: low / air, high: high * air, from, to }
    }

    pub(super) fn at(&self, v: f64) -> f64 {
        let share = (v.max(self.low * 1e-9) / self.low).ln() / (self.high / self.low).ln();
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    pub(super) fn contains(&self, v: f64) -> bool {
        self.low <= v && v <= self.high
    }

    /// Round values within the axis, at most about seven.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        if decades < 0.6 {
            return self.linear_ticks();
        }
        let steps: &[f64] = if decades > 3.5 {
            &[1.0]
        } else if decades > 1.8 {
            &[1.0, 3.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        (first..=last)
            .flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)))
            .filter(|v| self.contains(*v))
            .collect()
    }

    /// On less than two thirds of a decade multiples of one round step, three to seven of them.
    fn linear_ticks(&self) -> Vec<f64> {
        let rough = (self.high - self.low) / 4.0;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|s| s * decade).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..first + 8).map(|k| k as f64 * step).filter(|v| self.contains(*v)).collect()
    }
}

/// A tick's text without needless digits.
pub(super) fn tick(v: f64) -> String {
    let text = if v >= 100.0 {
        format!("{v:.0}")
    } else if v >= 1.0 {
        format!("{v:.1}")
    } else {
        format!("{v:.4}")
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn open(width: f64, height: f64, label: &str) -> String {
    format!(r#"<svg viewBox="0 0 {width:.0} {height:.0}" role="img" aria-label="{}">"#, esc(label))
}

fn x_axis(svg: &mut String, axis: &LogAxis, top: f64, bottom: f64, unit: &str) {
    for t in axis.ticks() {
        let x = axis.at(t);
        let _ = write!(
            svg,
            r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{top:.1}" y2="{bottom:.1}"/><text class="s" x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            bottom + 14.0,
            tick(t)
        );
    }
    let _ = write!(
        svg,
        r#"<text class="s" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
        axis.to,
        bottom + 28.0,
        esc(unit)
    );
}

/// One line of a forest plot.
pub(super) struct ForestRow {
    pub(super) label: String,
    pub(super) detail: String,
    pub(super) ratio: Option<f64>,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) bar: Option<f64>,
    /// CSS colour of the mark.
    pub(super) tone: &'static str,
    pub(super) text: String,
}

/// Ratios with their intervals on one logarithmic axis; a bar is a tick with the passing side shaded.
pub(super) fn forest(rows: &[ForestRow]) -> String {
    const WIDTH: f64 = 1060.0;
    const LEFT: f64 = 330.0;
    const RIGHT: f64 = 850.0;
    const STEP: f64 = 40.0;
    let values = rows.iter().flat_map(|r| [r.ratio.unwrap_or(f64::NAN), r.low, r.high, r.bar.unwrap_or(f64::NAN)]);
    let axis = LogAxis::over(values.chain([1.0]), LEFT, RIGHT);
    let height = rows.len() as f64 * STEP + 44.0;
    let bottom = height - 36.0;
    let mut svg = open(WIDTH, height, "Ratios with their intervals");
    x_axis(&mut svg, &axis, 4.0, bottom, "ratio, logarithmic");
    let one = axis.at(1.0);
    let _ = write!(svg, r#"<line class="one" x1="{one:.1}" x2="{one:.1}" y1="4" y2="{bottom:.1}"/>"#);
    for (i, r) in rows.iter().enumerate() {
        let y = i as f64 * STEP + STEP / 2.0 + 4.0;
        if let Some(bar) = r.bar {
            let x = axis.at(bar);
            let _ = write!(
                svg,
                r#"<rect x="{LEFT}" y="{:.1}" width="{:.1}" height="24" fill="var(--good)" opacity=".09"/><line x1="{x:.1}" x2="{x:.1}" y1="{:.1}" y2="{:.1}" stroke="var(--fg)" stroke-width="2"/>"#,
                y - 12.0,
                (x - LEFT).max(0.0),
                y - 12.0,
                y + 12.0
            );
        }
        let (low, high) = (axis.at(r.low), axis.at(r.high));
        let _ = write!(
            svg,
            r#"<line x1="{low:.1}" x2="{high:.1}" y1="{y:.1}" y2="{y:.1}" stroke="{tone}" stroke-width="3" stroke-linecap="round"/>"#,
            tone = r.tone
        );
        // An end that is not on the axis is an arrow.
        for (out, x, dir) in [(!axis.contains(r.low), low, -1.0), (!axis.contains(r.high), high, 1.0)] {
            if out {
                let _ = write!(
                    svg,
                    r#"<path d="M{:.1} {:.1}L{x:.1} {y:.1}L{:.1} {:.1}" fill="none" stroke="{tone}" stroke-width="2"/>"#,
                    x - 7.0 * dir,
                    y - 5.0,
                    x - 7.0 * dir,
                    y + 5.0,
                    tone = r.tone
                );
            }
        }
        if let Some(ratio) = r.ratio.filter(|v| axis.contains(*v)) {
            let x = axis.at(ratio);
            let _ = write!(
                svg,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="5.5" fill="{tone}" stroke="var(--card)" stroke-width="1.5"/>"#,
                tone = r.tone
            );
        }
        let _ = write!(
            svg,
            r#"<text class="b" x="0" y="{:.1}">{}</text><text class="s" x="0" y="{:.1}">{}</text><text x="{:.1}" y="{:.1}">{}</text>"#,
            y - 2.0,
            esc(&r.label),
            y + 13.0,
            esc(&r.detail),
            RIGHT + 16.0,
            y + 4.0,
            esc(&r.text)
        );
    }
    svg.push_str("</svg>");
    svg
}

/// How a point of a run is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dot {
    Counted,
    Void,
    WarmUp,
    NotCounted,
    /// Plus infinity: at the upper edge.
    Failed,
    /// Due and not there: at the lower edge.
    Lost,
}

pub(super) struct RunPoint {
    pub(super) value: Option<f64>,
    pub(super) dot: Dot,
    /// Index of the host, for the colour.
    pub(super) host: usize,
    pub(super) title: String,
}

pub(super) struct Panel {
    pub(super) title: String,
    pub(super) points: Vec<RunPoint>,
    pub(super) median: Option<f64>,
}

/// Small panels, one an arm: every sample in run order, logarithmic, each panel with its own axis.
pub(super) fn run_order(panels: &[Panel], unit: &str) -> String {
    const COLUMNS: usize = 4;
    const W: f64 = 265.0;
    const H: f64 = 158.0;
    let lines = panels.len().div_ceil(COLUMNS).max(1);
    let mut svg = open(W * COLUMNS as f64, H * lines as f64, "Every sample in run order");
    for (i, panel) in panels.iter().enumerate() {
        let (x0, y0) = ((i % COLUMNS) as f64 * W, (i / COLUMNS) as f64 * H);
        let (left, right, top, bottom) = (x0 + 40.0, x0 + W - 12.0, y0 + 24.0, y0 + H - 20.0);
        let axis = LogAxis::over(panel.points.iter().filter_map(|p| p.value), bottom - 6.0, top + 10.0);
        let _ = write!(svg, r#"<text class="b" x="{left:.1}" y="{:.1}">{}</text>"#, y0 + 14.0, esc(&panel.title));
        let ticks = axis.ticks();
        let every = ticks.len().div_ceil(4).max(1);
        for t in ticks.iter().step_by(every) {
            let y = axis.at(*t);
            let _ = write!(
                svg,
                r#"<line class="grid" x1="{left:.1}" x2="{right:.1}" y1="{y:.1}" y2="{y:.1}"/><text class="s" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                left - 5.0,
                y + 4.0,
                tick(*t)
            );
        }
        let _ = write!(svg, r#"<line class="axis" x1="{left:.1}" x2="{right:.1}" y1="{bottom:.1}" y2="{bottom:.1}"/>"#);
        if let Some(m) = panel.median.filter(|m| axis.contains(*m)) {
            let y = axis.at(m);
            let _ = write!(
                svg,
                r#"<line x1="{left:.1}" x2="{right:.1}" y1="{y:.1}" y2="{y:.1}" stroke="var(--soft)" stroke-dasharray="2 3"/>"#
            );
        }
        let step = (right - left - 10.0) / (panel.points.len().max(2) - 1) as f64;
        for (k, p) in panel.points.iter().enumerate() {
            let x = left + 5.0 + k as f64 * step;
            dot(&mut svg, x, p, &axis, top, bottom);
        }
        let _ = write!(svg, r#"<text class="s" x="{left:.1}" y="{:.1}">run order →</text>"#, bottom + 14.0);
        let _ = write!(svg, r#"<text class="s" x="{right:.1}" y="{:.1}" text-anchor="end">{unit}</text>"#, y0 + 14.0);
    }
    svg.push_str("</svg>");
    svg
}

fn dot(svg: &mut String, x: f64, p: &RunPoint, axis: &LogAxis, top: f64, bottom: f64) {
    let title = esc(&p.title);
    let c = colour(p.host);
    let y = p.value.map_or(top + 4.0, |v| axis.at(v));
    let cross = |svg: &mut String, y: f64, tone: &str| {
        let _ = write!(
            svg,
            r#"<path d="M{:.1} {:.1}l8 8m0 -8l-8 8" stroke="{tone}" stroke-width="2.2" fill="none"><title>{title}</title></path>"#,
            x - 4.0,
            y - 4.0
        );
    };
    let _ = match (p.dot, p.value) {
        (Dot::Failed, _) => {
            cross(svg, top + 4.0, "var(--bad)");
            Ok(())
        }
        (Dot::Lost, _) => {
            cross(svg, bottom - 5.0, "var(--soft)");
            Ok(())
        }
        (Dot::Void, _) => write!(
            svg,
            r#"<rect x="{:.1}" y="{:.1}" width="7" height="7" fill="none" stroke="var(--warn)" stroke-width="1.6"><title>{title}</title></rect>"#,
            x - 3.5,
            y - 3.5
        ),
        (Dot::NotCounted, None) => {
            cross(svg, top + 4.0, "var(--soft)");
            Ok(())
        }
        (Dot::WarmUp | Dot::NotCounted, _) => write!(
            svg,
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="none" stroke="{c}" opacity=".55"><title>{title}</title></circle>"#
        ),
        (Dot::Counted, _) => {
            write!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.2" fill="{c}"><title>{title}</title></circle>"#)
        }
    };
}

pub(super) struct Curve {
    pub(super) label: String,
    /// Plus infinity for failures: the curve then ends below 1.
    pub(super) values: Vec<f64>,
}

/// Empirical distribution functions on a logarithmic axis.
pub(super) fn ecdf(curves: &[Curve], unit: &str) -> String {
    const WIDTH: f64 = 1060.0;
    const HEIGHT: f64 = 330.0;
    let (left, right, top, bottom) = (44.0, WIDTH - 190.0, 10.0, HEIGHT - 40.0);
    let axis = LogAxis::over(curves.iter().flat_map(|c| c.values.iter().copied()), left, right);
    let mut svg = open(WIDTH, HEIGHT, "Empirical distribution functions");
    x_axis(&mut svg, &axis, top, bottom, unit);
    let y_at = |share: f64| bottom - share * (bottom - top);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let y = y_at(share);
        let _ = write!(
            svg,
            r#"<line class="grid" x1="{left}" x2="{right}" y1="{y:.1}" y2="{y:.1}"/><text class="s" x="{:.1}" y="{:.1}" text-anchor="end">{share}</text>"#,
            left - 6.0,
            y + 4.0
        );
    }
    for (i, curve) in curves.iter().enumerate() {
        let mut values = curve.values.clone();
        values.sort_by(f64::total_cmp);
        let n = values.len() as f64;
        let mut path = String::new();
        for (k, v) in values.iter().filter(|v| v.is_finite()).enumerate() {
            let x = axis.at(*v);
            let after = y_at((k as f64 + 1.0) / n);
            let _ = match k {
                0 => write!(path, "M{x:.1} {bottom:.1}V{after:.1}"),
                _ => write!(path, "H{x:.1}V{after:.1}"),
            };
        }
        let dash = if i >= 6 { r#" stroke-dasharray="5 3""# } else { "" };
        let _ = write!(svg, r#"<path d="{path}" fill="none" stroke="{}" stroke-width="2"{dash}/>"#, colour(i));
        let y = top + 14.0 + i as f64 * 21.0;
        let _ = write!(
            svg,
            r#"<line x1="{:.1}" x2="{:.1}" y1="{:.1}" y2="{:.1}" stroke="{}" stroke-width="3"{dash}/><text x="{:.1}" y="{y:.1}">{}</text>"#,
            right + 16.0,
            right + 38.0,
            y - 4.0,
            y - 4.0,
            colour(i),
            right + 46.0,
            esc(&curve.label)
        );
    }
    svg.push_str("</svg>");
    svg
}

pub(super) struct PhaseRow {
    pub(super) label: String,
    /// Name, median start and median length, milliseconds.
    pub(super) phases: Vec<(String, f64, f64)>,
}

/// One bar an arm, its phases side by side, each arm on its own scale: arms differ by orders of magnitude, and the
/// question is where an arm's time goes.
pub(super) fn phases(rows: &[PhaseRow]) -> String {
    const WIDTH: f64 = 1060.0;
    const LEFT: f64 = 170.0;
    const RIGHT: f64 = 960.0;
    const STEP: f64 = 44.0;
    let mut svg = open(WIDTH, rows.len() as f64 * STEP + 6.0, "Phases");
    for (i, row) in rows.iter().enumerate() {
        let y = i as f64 * STEP + 6.0;
        let end = row.phases.iter().map(|p| p.1 + p.2).fold(0.0, f64::max);
        let _ = write!(svg, r#"<text class="b" x="0" y="{:.1}">{}</text>"#, y + 15.0, esc(&row.label));
        let _ = write!(svg, r#"<text x="{:.1}" y="{:.1}">{} ms</text>"#, RIGHT + 12.0, y + 15.0, Value::new(end));
        if end <= 0.0 {
            continue;
        }
        let mut free_from = LEFT;
        for (k, (name, start, took)) in row.phases.iter().enumerate() {
            let x = LEFT + start / end * (RIGHT - LEFT);
            let w = (took / end * (RIGHT - LEFT)).max(1.0);
            let _ = write!(
                svg,
                r#"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="21" fill="{}" stroke="var(--card)"><title>{}: {} ms from {} ms</title></rect>"#,
                colour(k),
                esc(name),
                Value::new(*took),
                Value::new(*start)
            );
            let text = format!("{name} {}", Value::new(*took));
            let room = text.chars().count() as f64 * 5.8;
            if room + 10.0 <= w {
                let _ = write!(
                    svg,
                    r#"<text x="{:.1}" y="{:.1}" style="fill:var(--card);font-size:11px">{}</text>"#,
                    x + 5.0,
                    y + 14.5,
                    esc(&text)
                );
            } else if x >= free_from && x + room < WIDTH {
                // What does not fit in its bar stands under it, and never over its neighbour's.
                let _ = write!(svg, r#"<text class="s" x="{x:.1}" y="{:.1}">{}</text>"#, y + 33.0, esc(&text));
                free_from = x + room + 6.0;
            }
        }
    }
    svg.push_str("</svg>");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_stay_in_their_pixels_and_have_ticks() {
        for (low, high) in [(1.0, 1.1), (0.1, 5.0), (3.0, 4000.0), (1e-6, 1e6)] {
            let a = LogAxis::over([low, high, f64::INFINITY, 0.0].into_iter(), 10.0, 110.0);
            assert!(a.at(low) >= 10.0 && a.at(high) <= 110.0);
            assert_eq!((a.at(0.0), a.at(f64::INFINITY)), (10.0, 110.0));
            assert!((1..=14).contains(&a.ticks().len()), "{low} to {high}: {:?}", a.ticks());
        }
        let empty = LogAxis::over(std::iter::empty(), 0.0, 1.0);
        assert!(empty.at(5.0).is_finite());
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!([0.25, 0.5, 1.0, 2.5, 30.0, 1000.0].map(tick), ["0.25", "0.5", "1", "2.5", "30", "1000"]);
    }
}
