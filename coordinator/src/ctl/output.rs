//! How things are printed: tables, JSON, times, sizes. No policy.

use std::io::IsTerminal as _;

use comfy_table::{ContentArrangement, Table, presets};
use drums_common::say;
use serde::Serialize;

use super::CtlError;

/// Colours only on a terminal and without NO_COLOR.
pub(super) fn colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

pub(super) fn json<T: Serialize>(value: &T) -> Result<(), CtlError> {
    let text = serde_json::to_string_pretty(value).map_err(unwritten)?;
    Ok(say::text(&(say::json_text(&text) + "\n"))?)
}

/// On one line, for what is told piece by piece.
pub(super) fn json_line<T: Serialize>(value: &T) -> Result<(), CtlError> {
    let text = serde_json::to_string(value).map_err(unwritten)?;
    Ok(say::text(&(say::json_text(&text) + "\n"))?)
}

fn unwritten(e: serde_json::Error) -> CtlError {
    CtlError::failed("writing JSON", e, "this is a fault of drumsctl")
}

pub(super) fn table<R: AsRef<[String]>>(header: &[&str], rows: &[R]) -> Result<(), CtlError> {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header.to_vec());
    for row in rows {
        table.add_row(row.as_ref().iter().map(|cell| say::one_line(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    Ok(say::text(&(table.trim_fmt() + "\n"))?)
}

/// `1 h 02 min`, `3 min 20 s`, `4.2 s`, `12 ms`.
pub(super) fn duration(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        60_000..3_600_000 => format!("{} min {:02} s", ms / 60_000, ms / 1_000 % 60),
        _ => format!("{} h {:02} min", ms / 3_600_000, ms / 60_000 % 60),
    }
}

pub(super) fn bytes(n: u64) -> String {
    if n < 1 << 20 { format!("{} KiB", n.div_ceil(1 << 10)) } else { format!("{} MiB", n >> 20) }
}

/// `2026-11-29 20:00:00Z` out of RFC 3339.
pub(super) fn time(rfc3339: &str) -> String {
    match rfc3339.split_once('T') {
        Some((day, rest)) => format!("{day} {}Z", rest.get(..8).unwrap_or(rest.trim_end_matches('Z'))),
        None => rfc3339.to_owned(),
    }
}

pub(super) fn short(sha: drums_common::digest::Sha256) -> String {
    sha.short()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_times_read_well() {
        assert_eq!(duration(12), "12 ms");
        assert_eq!(duration(4_250), "4.2 s");
        assert_eq!(duration(200_000), "3 min 20 s");
        assert_eq!(duration(3_720_000), "1 h 02 min");
        assert_eq!(time("2026-11-29T20:00:00.123456Z"), "2026-11-29 20:00:00Z");
        assert_eq!(time("2026-11-29T20:00:00Z"), "2026-11-29 20:00:00Z");
    }
}
