//! Workloads, artifacts, plans, registrations.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, Request, State},
    http::StatusCode,
};
use drums_common::{
    digest::Sha256,
    evidence::BlockKind,
    experiment::{Experiment, Registration},
    failure::Failure,
    ids::ExperimentId,
    plan,
    spec::{self, BadSpec, Known, Parsed},
    workload,
};
use futures_util::StreamExt as _;
use serde::Deserialize;

use super::{
    ApiError, Body, Context, Operator, Shared,
    views::{
        AddWorkload, PlanBlock, PlanHost, PlanView, RegistrationBody, RegistrationView, SpecBody, WorkloadView, utc,
    },
};
use crate::{
    artifacts::ArtifactError,
    core::{
        placement::{self, Candidate},
        turns,
    },
    store::{Registered, RunRow, StoreError, WorkloadRow},
};

pub(super) async fn workloads(State(c): Shared) -> Result<Json<Vec<WorkloadView>>, ApiError> {
    let rows = c.control.store.call(|s| s.workloads()).await?;
    Ok(Json(rows.into_iter().map(workload_view).collect()))
}

fn workload_view(row: WorkloadRow) -> WorkloadView {
    WorkloadView { name: row.name, sha256: row.sha256, bytes: row.bytes, files: row.files, added: utc(row.added) }
}

/// Stores a manifest whose files are all there.
pub(super) async fn add_workload(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<AddWorkload>,
) -> Result<(StatusCode, Json<WorkloadView>), ApiError> {
    let manifest = body.manifest;
    workload::check(&manifest).map_err(|e| {
        ApiError::bad(
            "bad-manifest",
            drums_common::telemetry::chain(&e),
            "make the workload again with cargo xtask image",
        )
    })?;
    for (path, file) in manifest.files.iter().filter(|(_, f)| f.kind == "file") {
        if !c.control.artifacts.has(file.sha256).await {
            let message = format!("the content of {path} ({}) was not uploaded", file.sha256.short());
            return Err(ApiError::bad("missing-artifact", message, "drumsctl workload add uploads every file first"));
        }
    }
    let canonical = manifest.canonical();
    let sha256 = manifest.sha256();
    store_artifact(&c, sha256, canonical.as_bytes()).await?;
    let row = WorkloadRow {
        sha256,
        name: body.name,
        bytes: manifest.files.values().map(|f| f.bytes).sum(),
        files: manifest.files.len() as u64,
        added: c.control.now(),
    };
    let audit = c.control.audit_row(&by, "workload-add").detail(&format!("{} {sha256}", row.name));
    let wanted = row.clone();
    let (new, known) = c.control.store.call(move |s| Ok((s.add_workload(&row, &audit)?, s.workloads()?))).await?;
    let stored = known.into_iter().find(|w| w.sha256 == sha256).unwrap_or_else(|| wanted.clone());
    if stored.name != wanted.name {
        let message = format!("this workload is here already, under the name {}", stored.name);
        let help = format!("name = \"{}\" in the spec; a workload has one name", stored.name);
        return Err(ApiError::bad("workload-has-a-name", message, &help));
    }
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(workload_view(stored))))
}

async fn store_artifact(c: &Context, sha256: Sha256, bytes: &[u8]) -> Result<(), ApiError> {
    if c.control.artifacts.has(sha256).await {
        return Ok(());
    }
    let mut upload = c.control.artifacts.begin(sha256, workload::MAX_MANIFEST_BYTES).await.map_err(artifact_error)?;
    upload.write(bytes).await.map_err(artifact_error)?;
    upload.finish().await.map_err(artifact_error)
}

pub(super) fn artifact_error(e: ArtifactError) -> ApiError {
    let text = drums_common::telemetry::chain(&e);
    match e {
        ArtifactError::Digest { .. } => {
            ApiError::bad("wrong-digest", text, "the file changed while it was sent: try again")
        }
        ArtifactError::TooLarge { .. } | ArtifactError::Broken(_) => ApiError::bad("bad-artifact", text, ""),
        _ => {
            tracing::error!(error = text, "an artifact was not stored");
            let class = drums_common::failure::FailureClass::Transient;
            Failure::new(class, "artifact", text, "is the disk of the coordinator's home full?").into()
        }
    }
}

fn digest(text: &str) -> Result<Sha256, ApiError> {
    text.parse().map_err(|e: drums_common::digest::BadDigest| ApiError::bad("bad-digest", e.to_string(), ""))
}

pub(super) async fn has_artifact(State(c): Shared, Path(sha): Path<String>) -> Result<StatusCode, ApiError> {
    let sha = digest(&sha)?;
    Ok(if c.control.artifacts.has(sha).await { StatusCode::OK } else { StatusCode::NOT_FOUND })
}

/// An upload may be long, but not stand still.
const SLOW_CHUNK: std::time::Duration = std::time::Duration::from_secs(30);

pub(super) async fn put_artifact(
    State(c): Shared,
    Path(sha): Path<String>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let sha = digest(&sha)?;
    if c.control.artifacts.has(sha).await {
        return Ok(StatusCode::OK);
    }
    let mut upload = c.control.artifacts.begin(sha, workload::MAX_TOTAL_BYTES).await.map_err(artifact_error)?;
    let mut body = request.into_body().into_data_stream();
    while let Some(chunk) = tokio::time::timeout(SLOW_CHUNK, body.next())
        .await
        .map_err(|_| artifact_error(ArtifactError::Broken("the upload stood still".to_owned())))?
    {
        let chunk = chunk.map_err(|e| artifact_error(ArtifactError::Broken(format!("the upload broke off: {e}"))))?;
        upload.write(&chunk).await.map_err(artifact_error)?;
    }
    upload.finish().await.map_err(artifact_error)?;
    Ok(StatusCode::CREATED)
}

struct Snapshot {
    known: Known,
    registrations: Vec<Registration>,
    runs: Vec<RunRow>,
    candidates: Vec<Candidate>,
}

async fn snapshot(c: &Arc<Context>, amend: bool) -> Result<Snapshot, ApiError> {
    let (registrations, runs, hosts, workloads) =
        c.control.store.call(|s| Ok((s.registrations(None)?, s.runs(None)?, s.hosts()?, s.workloads()?))).await?;
    let mut known = Known { now: c.control.now(), amend, ..Known::default() };
    for r in &registrations {
        // In order: the latest stays.
        known.registered.insert(r.experiment.id, r.sha256);
    }
    for w in workloads {
        known.workloads.entry(w.name).or_default().push(w.sha256);
    }
    let candidates: Vec<Candidate> = hosts
        .into_iter()
        .filter(|h| h.released.is_none())
        .map(|h| Candidate { connected: c.control.connected(&h.host), facts: h.facts, host: h.host })
        .collect();
    known.hosts = candidates.iter().map(|x| x.host.clone()).collect();
    Ok(Snapshot { known, registrations, runs, candidates })
}

fn read_spec(body: &SpecBody) -> Result<Parsed, ApiError> {
    spec::parse(&body.file, body.source.as_bytes()).map_err(ApiError::bad_spec)
}

pub(super) async fn register(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<SpecBody>,
) -> Result<(StatusCode, Json<RegistrationView>), ApiError> {
    let parsed = read_spec(&body)?;
    let mut s = snapshot(&c, body.amend).await?;
    parsed.check(&s.known).map_err(ApiError::bad_spec)?;
    let frozen = Registration::freeze(parsed.pinned(&s.known), s.known.now).map_err(|e| {
        let text = format!("the spec has no canonical form: {e}");
        ApiError::bad_spec(BadSpec::whole(&body.file, "not-canonical", text, "are all numbers finite?"))
    })?;
    let id = frozen.experiment.id;
    let audit = c.control.audit_row(&by, "register").detail(&format!("{id} {}", frozen.sha256));
    let (registration, source, amends) = (frozen.clone(), body.source, body.amend);
    let (registered, all) = c
        .control
        .store
        .call(move |s| {
            let registered = s.add_registration(&registration, &source, amends, &audit)?;
            Ok((registered, s.registrations(Some(id))?))
        })
        .await?;
    let new = match registered {
        Registered::New => true,
        Registered::Before => false,
        Registered::Taken { latest } => {
            // Somebody registered the id since we looked: the same answer as to who comes later.
            s.known.registered.insert(id, latest);
            parsed.check(&s.known).map_err(ApiError::bad_spec)?;
            let message = format!("{id} is registered already with other content, as {}", latest.short());
            return Err(Failure::refused("taken-id", message, "register a later version with --amend").into());
        }
        Registered::NothingToAmend => {
            let message = format!("{id} is not registered here, so there is nothing to amend");
            return Err(ApiError::bad(
                "nothing-to-amend",
                message,
                "is the id right? A first version takes no --amend",
            ));
        }
    };
    let latest = all.last().map(|r| r.sha256);
    // An earlier time stands when this very registration was there.
    let stored = all.into_iter().find(|r| r.sha256 == frozen.sha256).unwrap_or(frozen);
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(registration_view(&stored, latest.unwrap_or(stored.sha256), &s.runs, new))))
}

fn registration_view(r: &Registration, latest: Sha256, runs: &[RunRow], new: bool) -> RegistrationView {
    RegistrationView {
        sha256: r.sha256,
        experiment: r.experiment.id,
        title: r.experiment.title.clone(),
        registered: utc(r.registered_at),
        registered_us: r.registered_at.0,
        max_runs: r.experiment.design.max_runs,
        runs: runs.iter().filter(|x| x.state.registration == r.sha256).count() as u32,
        new,
        latest,
    }
}

#[derive(Deserialize)]
pub(super) struct OfExperiment {
    experiment: Option<ExperimentId>,
}

pub(super) async fn registrations(
    State(c): Shared,
    Query(q): Query<OfExperiment>,
) -> Result<Json<Vec<RegistrationView>>, ApiError> {
    let (registrations, runs) =
        c.control.store.call(move |s| Ok((s.registrations(q.experiment)?, s.runs(q.experiment)?))).await?;
    // In order: the latest stays.
    let latest: BTreeMap<ExperimentId, Sha256> = registrations.iter().map(|r| (r.experiment.id, r.sha256)).collect();
    let view = |r: &Registration| registration_view(r, latest[&r.experiment.id], &runs, false);
    Ok(Json(registrations.iter().map(view).collect()))
}

pub(super) async fn registration(
    State(c): Shared,
    Path(sha): Path<String>,
) -> Result<Json<RegistrationBody>, ApiError> {
    let sha = digest(&sha)?;
    let found = c
        .control
        .store
        .call(move |s| {
            let Some(r) = s.registration(sha)? else { return Ok(None) };
            let spec = s.spec_of(sha)?.ok_or_else(|| StoreError::Missing { what: "spec", id: sha.to_string() })?;
            Ok(Some((r, spec)))
        })
        .await?;
    let (r, spec) = found
        .ok_or_else(|| ApiError::missing("registration", &sha.to_string(), "drumsctl register prints the digest"))?;
    Ok(Json(RegistrationBody { sha256: r.sha256, canonical: r.canonical, registered_us: r.registered_at.0, spec }))
}

/// The dry run: nothing is recorded.
pub(super) async fn plan(State(c): Shared, Body(body): Body<SpecBody>) -> Result<Json<PlanView>, ApiError> {
    let parsed = read_spec(&body)?;
    // A plan may be asked for anything that could be registered, so an amendment is not refused here.
    let s = snapshot(&c, true).await?;
    let mut missing = Vec::new();
    // What can still be supplied (hosts, workloads) is listed as missing; a spec that could never be registered is refused.
    if let Err(mut bad) = parsed.check(&s.known) {
        let later = ["absent-host", "absent-workload"];
        missing.extend(
            bad.faults
                .iter()
                .filter(|f| later.contains(&f.code.as_str()))
                .map(|f| format!("{}; {}", f.message, f.help)),
        );
        if bad.more > 0 {
            missing.push(format!("and {} more", bad.more));
        }
        bad.faults.retain(|f| !later.contains(&f.code.as_str()));
        if !bad.faults.is_empty() {
            return Err(ApiError::bad_spec(bad));
        }
    }
    let experiment = parsed.pinned(&s.known);
    let registration = Registration::freeze(experiment.clone(), s.known.now).ok().map(|r| r.sha256);
    let registered = s.registrations.iter().any(|r| Some(r.sha256) == registration);
    if !registered {
        missing.push("it is not registered; drumsctl register SPEC".to_owned());
    }
    let chosen = match placement::place(&experiment, &s.candidates) {
        Ok(chosen) => chosen,
        Err(e) => {
            missing.push(e.message);
            Vec::new()
        }
    };
    let hosts = plan_hosts(&experiment, &s.candidates, &chosen);
    let identities: Vec<_> = chosen
        .iter()
        .filter_map(|h| s.candidates.iter().find(|x| x.host == *h)?.facts.as_ref())
        .map(|f| &f.identity)
        .collect();
    let groups = turns::machines(identities.into_iter());
    let together = groups.iter().map(Vec::len).max().unwrap_or(experiment.hosts.count as usize);
    let (expected_ms, expected_from) = expected(&experiment, &s.runs, together);
    let notes = notes(&experiment, groups.len());
    Ok(Json(PlanView {
        experiment,
        registration,
        registered,
        hosts,
        missing,
        machines: groups.len(),
        expected_ms,
        expected_from,
        notes,
    }))
}

fn plan_hosts(
    experiment: &Experiment,
    candidates: &[Candidate],
    chosen: &[drums_common::ids::HostId],
) -> Vec<PlanHost> {
    let blocks = |host| {
        plan::blocks(experiment, host)
            .into_iter()
            .map(|g| PlanBlock {
                kind: match g.kind {
                    BlockKind::WarmUp => "warm-up".to_owned(),
                    BlockKind::Measured => "measured".to_owned(),
                },
                block: g.block,
                template_build: g.template_build,
                order: g.order.iter().map(ToString::to_string).collect(),
            })
            .collect()
    };
    candidates
        .iter()
        .map(|c| {
            let is_chosen = chosen.contains(&c.host);
            PlanHost {
                host: c.host.clone(),
                chosen: is_chosen,
                machine: c.facts.as_ref().map(|f| f.identity.key()),
                lacks: placement::lacks(experiment, c),
                blocks: if is_chosen { blocks(&c.host) } else { Vec::new() },
            }
        })
        .collect()
}

/// From earlier runs of the same experiment that came to their end, else guessed.
fn expected(experiment: &Experiment, runs: &[RunRow], together: usize) -> (u64, String) {
    let past: Vec<u64> = runs
        .iter()
        .filter(|r| r.experiment == experiment.id && r.state.ending == Some(crate::core::run::Ending::Done))
        .filter_map(|r| Some(r.state.closed?.ms_since(r.state.started?)))
        .collect();
    if past.is_empty() {
        let ms = plan::guessed_run_ms(experiment, u32::try_from(together).unwrap_or(1)) as u64;
        return (ms, "a guess from the kinds of arms".to_owned());
    }
    (past.iter().sum::<u64>() / past.len() as u64, format!("the mean of {} earlier runs", past.len()))
}

fn notes(e: &Experiment, machines: usize) -> Vec<String> {
    let mut out = Vec::new();
    let per_machine = e.design.template_builds_per_host * e.hosts.count / u32::try_from(machines.max(1)).unwrap_or(1);
    if e.arms.iter().any(|a| a.kind.from_template()) && per_machine < 8 {
        out.push(format!("{per_machine} template builds per machine: claims on restored arms are exploratory below 8"));
    }
    let mut controls: BTreeMap<&str, u32> = BTreeMap::new();
    for arm in &e.arms {
        match &arm.control {
            Some(drums_common::experiment::Control::SameAs { .. }) => *controls.entry("A/A").or_default() += 1,
            Some(drums_common::experiment::Control::Delayed { .. }) => *controls.entry("positive").or_default() += 1,
            None => {}
        }
    }
    for (name, help) in
        [("A/A", "control = { same_as = ARM }"), ("positive", "control = { delayed = ARM, fraction = MARGIN }")]
    {
        if !controls.contains_key(name) {
            out.push(format!("no {name} control: add an arm with {help}"));
        }
    }
    if e.bars.is_empty() {
        out.push("no bars: nothing can pass or fail".to_owned());
    }
    out
}

#[cfg(test)]
mod tests {
    use drums_common::{clock::Micros, lease::LeaseTimes};

    use super::*;
    use crate::{
        api::Enrolment,
        artifacts::Artifacts,
        clock::SystemClock,
        config::Home,
        store::{AuditQuery, AuditRow, Ownership, SqliteStore, Store as _, StoreHandle, Who},
        tasks::Control,
    };

    const SPEC: &str = include_str!("../../../common/src/spec/good/two-arms.toml");

    type Answer = Result<RegistrationView, ApiError>;

    async fn ask(c: &Arc<Context>, source: String, amend: bool) -> Answer {
        let body = SpecBody { file: "x".to_owned(), source, amend };
        register(State(c.clone()), Extension(Operator(Who::new("ada", "test"))), Body(body))
            .await
            .map(|(_, Json(view))| view)
    }

    fn code(answer: Answer) -> String {
        answer.unwrap_err().body.error.code
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_registrations_at_once_one_gets_the_id() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let mut store = SqliteStore::open(&home.store()).unwrap();
        let name = "minimal".parse().unwrap();
        let row = WorkloadRow { sha256: Sha256::of(b"tree"), name, bytes: 1, files: 1, added: Micros(1) };
        let audit = AuditRow::new(Micros(1), Who::new("test", "test"), "workload-add");
        store.add_workload(&row, &audit).unwrap();
        for host in ["h1", "h2"] {
            store.add_host(&host.parse().unwrap(), "sandbox", Ownership::Adopted, &audit).unwrap();
        }
        let (down, is_down) = tokio::sync::watch::channel(false);
        let store = StoreHandle::start(Box::new(store)).unwrap();
        let artifacts = Artifacts::new(home.artifacts());
        let times = LeaseTimes::default();
        let (control, driver) =
            Control::start(store.clone(), artifacts, Arc::new(SystemClock), times, None, is_down).await.unwrap();
        let sha = Sha256::of(b"-");
        let enrolment = Enrolment { ca: sha, addresses: vec![], agents_port: 1, enrol_port: 2 };
        let pki = Arc::new(crate::pki::Pki::open_or_create(&home.pki(), Micros(1_790_000_000_000_000)).unwrap().0);
        let c = Arc::new(Context { control, enrolment, home: String::new(), build: sha, pki });

        let seeded = |n: u32| SPEC.replace("seed = 1", &format!("seed = {n}"));
        let all = futures_util::future::join_all((1..9).map(|n| ask(&c, seeded(n), false))).await;
        let winner = all.iter().position(|a| a.is_ok()).unwrap();
        for (i, answer) in all.into_iter().enumerate().filter(|(i, _)| *i != winner) {
            assert_eq!(code(answer), "bad-spec", "{i}");
        }
        let first = seeded(winner as u32 + 1);

        let later = ask(&c, seeded(20), true).await.unwrap();
        assert!(later.new && later.latest == later.sha256);
        // What was amended is there, and a run does not take it by itself.
        let again = ask(&c, first, true).await.unwrap();
        assert!(!again.new && again.latest == later.sha256 && again.sha256 != later.sha256);
        assert_eq!(code(ask(&c, SPEC.replace("EXP-100", "EXP-101"), true).await), "nothing-to-amend");
        let audits = store.call(|s| s.audits(&AuditQuery::latest(100))).await.unwrap();
        assert_eq!(audits.iter().filter(|a| a.row.action == "register").count(), 2);

        down.send_replace(true);
        driver.await.unwrap();
    }
}
