//! Runs: making, watching, cancelling, reading their evidence.

use std::time::Duration;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use drums_analysis::RunMeta;
use drums_common::{
    clock::Micros,
    experiment::Experiment,
    failure::Failure,
    ids::{ExperimentId, HostId, RunId},
    plan,
};
use serde::Deserialize;

use super::{
    ApiError, Body, Context, Operator, Shared,
    hosts::activity,
    views::{CreateRun, EventView, EventsView, EvidenceRow, EvidenceView, RunHostView, RunView, RunsView, utc},
};
use crate::{
    core::{
        run::{Ending, RunState, block_name},
        turns,
    },
    store::RunRow,
    tasks::{NewRun, analysis_inputs},
};

/// A long poll is answered after this at the latest; clients ask again.
const MAX_WAIT_S: u64 = 60;
const PAGE: u32 = 1_000;

fn run_id(text: &str) -> Result<RunId, ApiError> {
    text.parse().map_err(|e: drums_common::ids::BadId| {
        Failure::refused("bad-run", e.to_string(), "drumsctl runs lists them").into()
    })
}

#[derive(Deserialize)]
pub(super) struct OfExperiment {
    experiment: Option<ExperimentId>,
}

pub(super) async fn list(State(c): Shared, Query(q): Query<OfExperiment>) -> Result<Json<RunsView>, ApiError> {
    let (rows, registrations) =
        c.control.store.call(move |s| Ok((s.runs(q.experiment)?, s.registrations(q.experiment)?))).await?;
    let view = |row: &RunRow| {
        let r = registrations.iter().find(|r| r.sha256 == row.state.registration)?;
        Some(run_view(&c, row, &r.experiment))
    };
    Ok(Json(RunsView { runs: rows.iter().filter_map(view).collect() }))
}

async fn load(c: &Context, run: RunId) -> Result<(RunRow, Experiment), ApiError> {
    let found = c
        .control
        .store
        .call(move |s| {
            let Some(row) = s.run(run)? else { return Ok(None) };
            Ok(s.registration(row.state.registration)?.map(|r| (row, r.experiment)))
        })
        .await?;
    found.ok_or_else(|| ApiError::missing("run", &run.to_string(), "drumsctl runs lists them"))
}

pub(super) async fn one(State(c): Shared, Path(run): Path<String>) -> Result<Json<RunView>, ApiError> {
    let (row, experiment) = load(&c, run_id(&run)?).await?;
    Ok(Json(run_view(&c, &row, &experiment)))
}

pub(super) async fn create(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<CreateRun>,
) -> Result<(StatusCode, Json<RunView>), ApiError> {
    let new = NewRun {
        id: RunId(rand::random()),
        experiment: body.experiment,
        registration: body.registration,
        until: body.until_us.map(Micros),
        by,
    };
    let state = c.control.create_run(new).await?;
    let (row, experiment) = load(&c, state.id).await?;
    Ok((StatusCode::CREATED, Json(run_view(&c, &row, &experiment))))
}

pub(super) async fn cancel(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Path(run): Path<String>,
) -> Result<Json<RunView>, ApiError> {
    let run = run_id(&run)?;
    c.control.cancel_run(run, by).await?;
    let (row, experiment) = load(&c, run).await?;
    Ok(Json(run_view(&c, &row, &experiment)))
}

#[derive(Deserialize)]
pub(super) struct After {
    after: Option<u64>,
    wait_s: Option<u64>,
}

/// Events after a number. With `wait_s` the answer comes when there is one, when the run's progress changed, or then.
pub(super) async fn events(
    State(c): Shared,
    Path(run): Path<String>,
    Query(q): Query<After>,
) -> Result<Json<EventsView>, ApiError> {
    let run = run_id(&run)?;
    let after = q.after.unwrap_or(0);
    let wait = Duration::from_secs(q.wait_s.unwrap_or(0).min(MAX_WAIT_S));
    let deadline = tokio::time::Instant::now() + wait;
    let mut changes = c.control.changes();
    loop {
        // Seen before the look, so that a change during the look wakes us again.
        changes.borrow_and_update();
        let (row, experiment) = load(&c, run).await?;
        let rows = c.control.store.call(move |s| s.events(run, after, PAGE)).await?;
        let over = !row.state.live() || wait.is_zero();
        if !rows.is_empty() || over || tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
            let events = rows
                .into_iter()
                .map(|e| EventView {
                    number: e.number,
                    at: utc(e.at),
                    at_us: e.at.0,
                    kind: e.note.kind,
                    host: e.note.host,
                    text: e.note.text,
                })
                .collect();
            return Ok(Json(EventsView { events, run: run_view(&c, &row, &experiment) }));
        }
    }
}

/// What the analysis gets of a run beside its records.
pub(super) async fn meta(State(c): Shared, Path(run): Path<String>) -> Result<Json<RunMeta>, ApiError> {
    let (row, _) = load(&c, run_id(&run)?).await?;
    let (meta, _) = c.control.store.call(move |s| analysis_inputs(s, &row.state)).await?;
    Ok(Json(meta))
}

pub(super) async fn evidence(
    State(c): Shared,
    Path((run, host)): Path<(String, String)>,
    Query(q): Query<After>,
) -> Result<Json<EvidenceView>, ApiError> {
    let run = run_id(&run)?;
    let host: HostId =
        host.parse().map_err(|e: drums_common::ids::BadId| Failure::refused("bad-host", e.to_string(), ""))?;
    let after = q.after.unwrap_or(0);
    let rows = c.control.store.call(move |s| s.evidence(run, &host, after, PAGE)).await?;
    let last = rows.last().map_or(after, |r| r.record.seq);
    let rows =
        rows.into_iter().map(|r| EvidenceRow { record: r.record, received_us: r.received.0, late: r.late }).collect();
    Ok(Json(EvidenceView { rows, last }))
}

fn run_view(c: &Context, row: &RunRow, experiment: &Experiment) -> RunView {
    let s = &row.state;
    let (leaked, unreported) = s.teardown();
    let hosts = s
        .hosts
        .iter()
        .map(|h| RunHostView {
            host: h.host.clone(),
            machine: h.machine.key(),
            prepared: h.prepared,
            lost: h.lost,
            blocks_done: h.ended.len() as u32,
            blocks_total: h.total_blocks(experiment),
            block: h.open_block().map(|g| block_name(g.kind, g.block)),
            activity: match c.control.health(&h.host) {
                Some((_, lease, _)) if s.live() && c.control.connected(&h.host) => activity(&lease.activity),
                _ => String::new(),
            },
            teardown: h.teardown.as_ref().map(|t| match t {
                drums_common::evidence::Teardown::Clean => "clean".to_owned(),
                drums_common::evidence::Teardown::Leaked(_) => "leaked".to_owned(),
            }),
        })
        .collect::<Vec<_>>();
    RunView {
        run: s.id,
        experiment: row.experiment,
        registration: s.registration,
        number: s.number,
        max_runs: experiment.design.max_runs,
        phase: s.phase.as_str().to_owned(),
        verdict: s.verdict(),
        ending: s.ending.as_ref().map(Ending::in_words),
        created: utc(s.created),
        started: s.started.map(utc),
        deadline: s.deadline.or(s.until).map(utc),
        closed: s.closed.map(utc),
        blocks_done: hosts.iter().map(|h| h.blocks_done).sum(),
        blocks_total: hosts.iter().map(|h| h.blocks_total).sum(),
        left_ms: left_ms(s, experiment, c.control.now()),
        hosts,
        leaked,
        // A live run's hosts have nothing to report yet.
        unreported: if s.live() { Vec::new() } else { unreported },
    }
}

/// What is left until every block ended: the machine that needs longest, at the pace of this run so far.
fn left_ms(s: &RunState, experiment: &Experiment, now: Micros) -> Option<u64> {
    if s.ending.is_some() || s.started.is_none() {
        return None;
    }
    let mut longest: f64 = 0.0;
    for group in turns::machines(s.hosts.iter().map(|h| &h.machine)) {
        let total: u32 = group.iter().map(|&i| s.hosts[i].total_blocks(experiment)).sum();
        let mut ends: Vec<Micros> = group.iter().flat_map(|&i| s.hosts[i].ended.iter().map(|e| e.at)).collect();
        ends.sort_unstable();
        let done = ends.len() as u32;
        // The first block's own length is not seen: its start is not in the state.
        let pace = match (ends.first(), ends.last()) {
            (Some(first), Some(last)) if done >= 2 => last.ms_since(*first) as f64 / f64::from(done - 1),
            _ => plan::guessed_block_ms(experiment),
        };
        let since = ends.last().map_or(0.0, |last| now.ms_since(*last) as f64);
        longest = longest.max((pace * f64::from(total.saturating_sub(done)) - since.min(pace)).max(0.0));
    }
    Some(longest as u64)
}
