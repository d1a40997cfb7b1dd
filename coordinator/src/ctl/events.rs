//! The audit trail.

use std::{process::ExitCode, str::FromStr};

use clap::Args;
use drums_common::{
    clock::{Clock as _, Micros},
    ids::{HostId, RunId},
    say,
};

use super::{Client, CtlError, Global, client::segment, output};
use crate::{api::views::AuditView, clock::SystemClock};

/// The coordinator answers a long poll after this at the latest.
const WAIT_S: u64 = 30;

#[derive(Debug, Args)]
pub struct Events {
    /// Only what happened since: a UTC time as 2027-01-31T12:00:00Z, or a while ago as 2h.
    #[arg(long, value_name = "TIME")]
    pub since: Option<Since>,
    /// Only what concerns this run.
    #[arg(long)]
    pub run: Option<RunId>,
    /// Only what concerns this host.
    #[arg(long)]
    pub host: Option<HostId>,
    /// How many: the latest, or with --since the first.
    #[arg(long, default_value_t = 50)]
    pub limit: u32,
    /// Go on until Ctrl-C with what comes; with --json one object a line.
    #[arg(long)]
    pub follow: bool,
}

/// A time, given as such or as how long ago it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since(Micros);

impl FromStr for Since {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if let Ok(at) = s.parse::<jiff::Timestamp>() {
            return Ok(Self(Micros(at.as_microsecond())));
        }
        let ago: jiff::SignedDuration = s
            .parse()
            .map_err(|_| format!("{s:?} is no time; expected one as 2027-01-31T12:00:00Z, or a while as 90m or 2h"))?;
        let us = i64::try_from(ago.abs().as_micros()).map_err(|_| format!("{s:?} is too long ago"))?;
        Ok(Self(Micros(SystemClock.now().0.saturating_sub(us))))
    }
}

impl Events {
    fn path(&self, after: Option<u64>, wait_s: u64) -> String {
        let mut path = format!("/events?limit={}&wait_s={wait_s}", self.limit);
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                path += &format!("&{name}={value}");
            }
        };
        add("since_us", self.since.map(|s| s.0.0.to_string()));
        add("run", self.run.map(segment));
        add("host", self.host.as_ref().map(segment));
        add("after", after.map(|n| n.to_string()));
        path
    }
}

pub(super) async fn events(global: &Global, c: Events) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    let mut rows: Vec<AuditView> = client.get(&c.path(None, 0)).await?;
    if !c.follow {
        if global.json {
            output::json(&rows)?;
        } else {
            let rows: Vec<Vec<String>> = rows.into_iter().map(cells).collect();
            output::table(&["when (UTC)", "who", "from", "what", "run", "host", "detail"], &rows)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut after = 0;
    loop {
        for row in rows {
            after = row.number;
            if global.json {
                output::json_line(&row)?;
            } else {
                let cells = cells(row);
                say!("{}", say::one_line(&cells.join("  ")))?;
            }
        }
        let path = c.path(Some(after), WAIT_S);
        // Both branches are cancel-safe: a row that was not printed is asked for again by nobody, and stays stored.
        rows = tokio::select! {
            rows = client.get(&path) => rows?,
            _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
        };
    }
}

fn cells(row: AuditView) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    vec![
        output::time(&row.at),
        row.actor,
        or_dash(Some(row.peer).filter(|p| !p.is_empty())),
        row.action,
        or_dash(row.run.map(|r| r.to_string())),
        or_dash(row.host.map(|h| h.to_string())),
        row.detail,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_in_time_is_given_as_such_or_as_a_while_ago() {
        assert_eq!("1970-01-01T00:00:01Z".parse(), Ok(Since(Micros(1_000_000))));
        let Since(two_hours) = "2h".parse().unwrap();
        let ago = SystemClock.now().0 - two_hours.0;
        assert!((7_200_000_000..7_260_000_000).contains(&ago), "{ago}");
        for bad in ["", "yesterday", "2", "h"] {
            assert!(bad.parse::<Since>().is_err(), "{bad}");
        }
    }
}
