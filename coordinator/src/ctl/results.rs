//! What came out: results, report, export, verify. Every number is computed here from raw evidence, as `verify` does it
//! from a bundle.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use drums_analysis::{Analysis, RunMeta, analyse, bundle, tables};
use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::Record,
    experiment::Registration,
    ids::{ExperimentId, RunId},
    verdict::Verdict,
};
use drums_common::{note, say};

use super::{Client, CtlError, Global, output, place, runs::for_each_record};
use crate::api::views::{RegistrationBody, RegistrationView, RunsView};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
    /// One row per sample.
    Csv,
}

#[derive(Debug, Args)]
pub struct Results {
    /// The experiment, EXP-NNN.
    pub experiment: ExperimentId,
    /// Which registration; default the latest.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

#[derive(Debug, Args)]
pub struct Report {
    /// The experiment, EXP-NNN.
    pub experiment: ExperimentId,
    /// Which registration; default the latest.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
    /// The HTML file to write.
    #[arg(long, short, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub struct Export {
    /// The experiment, EXP-NNN.
    pub experiment: ExperimentId,
    /// Which registration; default the latest.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
    /// Only this run; a bundle of one run is not the experiment's verdict.
    #[arg(long)]
    pub run: Option<RunId>,
    /// A folder that does not exist, or a file that ends in .tar.zst.
    #[arg(long, short, value_name = "PATH")]
    pub out: PathBuf,
}

/// All that the analysis takes.
struct Evidence {
    registration: Registration,
    runs: Vec<RunMeta>,
    runs_made: u32,
    records: Vec<Record>,
}

async fn fetch(
    client: &Client,
    experiment: ExperimentId,
    registration: Option<Sha256>,
    only: Option<RunId>,
) -> Result<Evidence, CtlError> {
    let list: Vec<RegistrationView> = client.get(&format!("/registrations?experiment={experiment}")).await?;
    let chosen = match registration {
        Some(sha) => list.iter().find(|r| r.sha256 == sha),
        None => list.last(),
    };
    let chosen = chosen.ok_or_else(|| {
        let which = registration.map(|s| format!(" as {}", s.short())).unwrap_or_default();
        CtlError::bad(
            format!("{experiment} is not registered here{which}"),
            "drumsctl register SPEC stores it before anything runs",
        )
    })?;
    let body: RegistrationBody = client.get(&format!("/registrations/{}", chosen.sha256)).await?;
    let registration = Registration::thaw(&body.canonical, body.sha256, Micros(body.registered_us))
        .map_err(|e| CtlError::failed("reading the registration", e, "restore the home from a backup"))?;
    let all: RunsView = client.get(&format!("/runs?experiment={experiment}")).await?;
    let of_it: Vec<_> = all.runs.into_iter().filter(|r| r.registration == registration.sha256).collect();
    let runs_made = of_it.len() as u32;
    let mut runs = Vec::new();
    let mut records = Vec::new();
    for run in of_it.into_iter().filter(|r| only.is_none_or(|o| o == r.run)) {
        runs.push(client.get::<RunMeta>(&format!("/runs/{}/meta", run.run)).await?);
        for h in &run.hosts {
            for_each_record(client, run.run, h.host.as_str(), |row| records.push(row.record)).await?;
        }
    }
    if let Some(run) = only
        && runs.is_empty()
    {
        return Err(CtlError::bad(format!("{run} is not a run of this registration"), "drumsctl runs lists them"));
    }
    Ok(Evidence { registration, runs, runs_made, records })
}

fn analysed(e: &Evidence) -> Analysis {
    analyse(&e.registration, &e.runs, &e.records)
}

/// The verdict on all runs of a registration.
pub(super) async fn verdict(
    client: &Client,
    experiment: ExperimentId,
    registration: Sha256,
) -> Result<Verdict, CtlError> {
    Ok(analysed(&fetch(client, experiment, Some(registration), None).await?).summary.verdict)
}

/// Why a run of a registration is not pooled with the others.
pub(super) async fn reasons(
    client: &Client,
    experiment: ExperimentId,
    registration: Sha256,
    run: RunId,
) -> Result<Vec<String>, CtlError> {
    let summary = analysed(&fetch(client, experiment, Some(registration), None).await?).summary;
    let of_run = summary.runs.list.into_iter().find(|r| r.run == run);
    Ok(of_run.map(|r| [r.reasons, r.voids].concat()).unwrap_or_default())
}

pub(super) async fn results(global: &Global, c: Results) -> Result<ExitCode, CtlError> {
    if global.json && c.format == Format::Csv {
        return Err(CtlError::bad("--json and --format csv contradict each other", "give one of them"));
    }
    let evidence = fetch(&Client::new(global), c.experiment, c.registration, None).await?;
    let analysis = analysed(&evidence);
    match c.format {
        Format::Json => output::json(&analysis.summary)?,
        Format::Table if global.json => output::json(&analysis.summary)?,
        Format::Csv => csv(&tables::samples(&analysis))?,
        Format::Table => show(&analysis)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn show(a: &Analysis) -> Result<(), CtlError> {
    let s = &a.summary;
    for line in tables::verdict_lines(s) {
        say!("{line}")?;
    }
    for t in
        [tables::arms(s), tables::bars(s), tables::ratios(s), tables::controls(s), tables::gates(s), tables::runs(s)]
    {
        if t.rows.is_empty() {
            continue;
        }
        say!("")?;
        say!("{}", t.title)?;
        output::table(&t.header, &t.rows)?;
    }
    Ok(())
}

fn csv(table: &tables::Table) -> Result<(), CtlError> {
    let fail = |e: csv::Error| CtlError::failed("writing CSV", e, "");
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&table.header).map_err(fail)?;
    for row in &table.rows {
        writer.write_record(row).map_err(fail)?;
    }
    let bytes = writer.into_inner().map_err(|e| CtlError::failed("writing CSV", e, ""))?;
    // CSV for programs: as it is.
    Ok(say::text(&String::from_utf8_lossy(&bytes))?)
}

pub(super) async fn report(global: &Global, c: Report) -> Result<ExitCode, CtlError> {
    let evidence = fetch(&Client::new(global), c.experiment, c.registration, None).await?;
    let analysis = analysed(&evidence);
    let html = drums_analysis::report::render_html(&evidence.registration, &analysis);
    fs::write(&c.out, html).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => CtlError::bad(
            format!("cannot write {}: {e}", c.out.display()),
            "make the folder first, and name a file in it",
        ),
        _ => CtlError::file("write", &c.out)(e),
    })?;
    if global.json {
        output::json(&serde_json::json!({ "report": c.out }))?;
    } else {
        say!("{}", c.out.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn export(global: &Global, c: Export) -> Result<ExitCode, CtlError> {
    let archive = is_archive(&c.out);
    // Before the work; it is decided when the bundle is put in place.
    place::free(&c.out)?;
    let evidence = fetch(&Client::new(global), c.experiment, c.registration, c.run).await?;
    let files = bundle::files(&evidence.registration, &evidence.runs, evidence.runs_made, &evidence.records)
        .map_err(|e| CtlError::failed("making the bundle", e, "this is a fault of drumsctl"))?;
    if archive {
        place::file(&c.out, 0o666, |out| write_archive(&c.out, out, &files))?;
    } else {
        place::folder(&c.out, |dir| write_folder(dir, &files))?;
    }
    if global.json {
        let registration = evidence.registration.sha256;
        output::json(&serde_json::json!({ "bundle": c.out, "files": files.len(), "registration": registration }))?;
        return Ok(ExitCode::SUCCESS);
    }
    say!("{}", c.out.display())?;
    note!("{} files; drumsctl verify {} --registration {}", files.len(), c.out.display(), evidence.registration.sha256);
    Ok(ExitCode::SUCCESS)
}

fn is_archive(path: &Path) -> bool {
    path.to_string_lossy().ends_with(".tar.zst")
}

fn write_folder(dir: &Path, files: &[bundle::BundleFile]) -> Result<(), CtlError> {
    for f in files {
        let path = dir.join(&f.path);
        let parent = path.parent().unwrap_or(dir);
        fs::create_dir_all(parent).map_err(CtlError::file("create", parent))?;
        fs::write(&path, &f.bytes).map_err(CtlError::file("write", &path))?;
    }
    Ok(())
}

fn write_archive(path: &Path, out: &mut fs::File, files: &[bundle::BundleFile]) -> Result<(), CtlError> {
    let fail = |e| CtlError::file("write", path)(e);
    let mut tar = tar::Builder::new(zstd::Encoder::new(out, 9).map_err(fail)?);
    for f in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(f.bytes.len() as u64);
        header.set_mode(0o644);
        // No time and no owner: the same evidence gives the same archive.
        header.set_mtime(0);
        tar.append_data(&mut header, &f.path, f.bytes.as_slice()).map_err(fail)?;
    }
    tar.into_inner().map_err(fail)?.finish().map_err(fail)?.flush().map_err(fail)
}
