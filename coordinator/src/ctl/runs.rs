//! Runs: making, listing, reading, cancelling.

use std::{process::ExitCode, str::FromStr};

use clap::Args;
use drums_common::{
    digest::Sha256,
    evidence::Body,
    ids::{ExperimentId, RunId},
};
use drums_common::{note, say, telemetry::chain};

use super::{Client, CtlError, Global, client::segment, output, watch};
use crate::api::views::{CreateRun, EventsView, EvidenceView, RegistrationView, RunView, RunsView};

#[derive(Debug, Args)]
pub struct Run {
    /// The experiment, EXP-NNN.
    pub experiment: ExperimentId,
    /// Stay until the run is closed: progress, time left, the experiment's verdict as exit code. Ctrl-C detaches; the run goes on.
    #[arg(long)]
    pub watch: bool,
    /// Make no run: watch the experiment's latest one.
    #[arg(long, conflicts_with_all = ["registration", "deadline"])]
    pub attach: bool,
    /// Which registration; default the latest.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
    /// End by then, earlier than registered: UTC, as in 2027-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME")]
    pub deadline: Option<Instant>,
}

/// A time on the command line.
#[derive(Clone, Copy, Debug)]
pub struct Instant(pub i64);
impl FromStr for Instant {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let at: jiff::Timestamp =
            s.parse().map_err(|_| format!("{s:?} is not a UTC time; expected one as 2027-01-31T12:00:00Z"))?;
        Ok(Self(at.as_microsecond()))
    }
}

#[derive(Debug, Args)]
pub struct Runs {
    /// Only those of this experiment.
    pub experiment: Option<ExperimentId>,
}

#[derive(Debug, Args)]
pub struct Logs {
    /// The run, as drumsctl runs prints it.
    pub run: RunId,
}

#[derive(Debug, Args)]
pub struct Cancel {
    /// The run, as drumsctl runs prints it.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub run: Option<RunId>,
    /// Every run that is not closed.
    #[arg(long)]
    pub all: bool,
}

pub(super) async fn run(global: &Global, c: Run) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    if let Some(Instant(us)) = c.deadline
        && us <= jiff::Timestamp::now().as_microsecond()
    {
        let at = crate::api::views::utc(drums_common::clock::Micros(us));
        return Err(CtlError::bad(format!("the deadline {at} is in the past"), "give a time to come, in UTC"));
    }
    let view: RunView = if c.attach {
        let list: RunsView = client.get(&format!("/runs?experiment={}", c.experiment)).await?;
        list.runs.into_iter().next_back().ok_or_else(|| {
            CtlError::bad(
                format!("{} has no run to attach to", c.experiment),
                format!("drumsctl run {} --watch makes one", c.experiment),
            )
        })?
    } else {
        let body =
            CreateRun { experiment: c.experiment, registration: c.registration, until_us: c.deadline.map(|d| d.0) };
        client.post("/runs", &body).await?
    };
    if c.watch || c.attach {
        return watch::watch(global, &client, view).await;
    }
    if global.json {
        output::json(&view)?;
    } else {
        say!("{}", view.run)?;
        note!(
            "run {} of {} of {}; drumsctl run {} --attach watches it",
            view.number,
            view.max_runs,
            view.experiment,
            view.experiment
        );
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn runs(global: &Global, c: Runs) -> Result<ExitCode, CtlError> {
    let path = c.experiment.map_or_else(|| "/runs".to_owned(), |e| format!("/runs?experiment={e}"));
    let client = Client::new(global);
    let list: RunsView = client.get(&path).await?;
    if let Some(e) = c.experiment
        && list.runs.is_empty()
        && client.get::<Vec<RegistrationView>>(&format!("/registrations?experiment={e}")).await?.is_empty()
    {
        return Err(CtlError::bad(format!("{e} is not registered here"), "drumsctl register SPEC registers it"));
    }
    if global.json {
        output::json(&list)?;
        return Ok(ExitCode::SUCCESS);
    }
    if list.runs.is_empty() {
        say!("no runs yet; drumsctl run EXP-NNN makes one")?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = list
        .runs
        .iter()
        .map(|r| {
            let hosts: Vec<_> = r.hosts.iter().map(|h| h.host.as_str()).collect();
            let teardown = if !r.leaked.is_empty() {
                format!("leaked {}", r.leaked.len())
            } else if !r.unreported.is_empty() {
                "unreported".to_owned()
            } else if r.verdict.is_some() {
                "clean".to_owned()
            } else {
                "-".to_owned()
            };
            vec![
                r.run.to_string(),
                r.experiment.to_string(),
                format!("{} of {}", r.number, r.max_runs),
                r.registration.short(),
                r.verdict.map_or_else(|| r.phase.clone(), |v| v.to_string()),
                teardown,
                format!("{}/{}", r.blocks_done, r.blocks_total),
                hosts.join(" "),
                output::time(&r.created),
                r.ending.clone().unwrap_or_default(),
            ]
        })
        .collect();
    output::table(
        &[
            "run",
            "experiment",
            "number",
            "registration",
            "state",
            "teardown",
            "blocks",
            "hosts",
            "made (UTC)",
            "ending",
        ],
        &rows,
    )?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn logs(global: &Global, c: Logs) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    // (time, who, level or kind, text)
    let mut lines: Vec<(i64, String, String, String)> = Vec::new();
    let mut after = 0;
    let view = loop {
        let page: EventsView = client.get(&format!("/runs/{}/events?after={after}", segment(c.run))).await?;
        let Some(last) = page.events.last().map(|e| e.number) else { break page.run };
        after = last;
        for e in page.events {
            let who = e.host.map_or_else(|| "run".to_owned(), |h| h.to_string());
            lines.push((e.at_us, who, e.kind, e.text));
        }
    };
    for h in &view.hosts {
        for_each_record(&client, c.run, h.host.as_str(), |row| {
            if let Body::Log(log) = row.record.body {
                lines.push((row.record.at.0, h.host.to_string(), log.level, format!("{}: {}", log.target, log.text)));
            }
        })
        .await?;
    }
    // Stable: lines of one source stay in their order.
    lines.sort_by_key(|l| l.0);
    if global.json {
        let rows: Vec<_> = lines
            .into_iter()
            .map(|(at, who, kind, text)| {
                let at = crate::api::views::utc(drums_common::clock::Micros(at));
                serde_json::json!({ "at": at, "source": who, "kind": kind, "text": text })
            })
            .collect();
        output::json(&rows)?;
    } else {
        for (at, who, kind, text) in lines {
            say!("{}  {who:<10} {kind:<12} {text}", crate::api::views::utc(drums_common::clock::Micros(at)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Every record of a run on a host, in order.
pub(super) async fn for_each_record(
    client: &Client,
    run: RunId,
    host: &str,
    mut each: impl FnMut(crate::api::views::EvidenceRow),
) -> Result<(), CtlError> {
    let mut after = 0;
    loop {
        let page: EvidenceView = client.get(&format!("/runs/{run}/evidence/{host}?after={after}")).await?;
        if page.rows.is_empty() {
            return Ok(());
        }
        after = page.last;
        page.rows.into_iter().for_each(&mut each);
    }
}

pub(super) async fn cancel(global: &Global, c: Cancel) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    let runs: Vec<RunId> = match c.run {
        Some(run) => vec![run],
        None => {
            let list: RunsView = client.get("/runs").await?;
            list.runs.into_iter().filter(|r| r.verdict.is_none()).map(|r| r.run).collect()
        }
    };
    let (out, failed) = cancel_each(&client, &runs).await;
    // All that were open are to end, and one that closed meanwhile has.
    let over = |e: &CtlError| c.all && matches!(e, CtlError::Refused(f) if f.code == "closed");
    let mut failed = failed.into_iter().filter(|(_, e)| !over(e));
    let first = failed.next();
    match (out.is_empty(), &first) {
        // Nothing came of it but the error.
        (true, Some(_)) => {}
        _ if global.json => output::json(&RunsView { runs: out })?,
        (true, None) => say!("no run is open")?,
        (false, _) => {
            for r in out {
                say!("{} is {}: {}", r.run, r.phase, r.ending.unwrap_or_default())?;
            }
        }
    }
    let Some((_, first)) = first else { return Ok(ExitCode::SUCCESS) };
    for (run, e) in failed {
        note!("{run} is not cancelled either: {}", chain(&e));
    }
    Err(first)
}

/// Asks for each, whatever came of the one before: what was cancelled, and what was not and why.
pub(super) async fn cancel_each(client: &Client, runs: &[RunId]) -> (Vec<RunView>, Vec<(RunId, CtlError)>) {
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for run in runs {
        match client.post(&format!("/runs/{run}/cancel"), &serde_json::json!({})).await {
            Ok(view) => done.push(view),
            Err(e) => failed.push((*run, e)),
        }
    }
    (done, failed)
}
