//! What came out: results, report, export, verify. Every number is computed here from raw evidence, as `verify` does it
//! from a bundle.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use drums_analysis::{
    Analysis, RunMeta, analyse,
    bundle::{self, BundleFiles},
    tables,
};
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

#[derive(Debug, Args)]
pub struct Verify {
    /// The bundle: a folder, or a .tar.zst file.
    pub bundle: PathBuf,
    /// The registration it must be of, as `drumsctl register` printed it.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
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

/// Names cost memory, too.
const MAX_FILES: usize = 100_000;

pub(super) fn verify(global: &Global, c: &Verify) -> Result<ExitCode, CtlError> {
    let files: Box<dyn BundleFiles> = if c.bundle.is_dir() {
        Box::new(Folder(c.bundle.clone()))
    } else if c.bundle.is_file() {
        Box::new(Archive::read(&c.bundle)?)
    } else {
        fs::metadata(&c.bundle).map_err(CtlError::file("read", &c.bundle))?;
        return Err(CtlError::bad(
            format!("{} is neither a folder nor a file", c.bundle.display()),
            "give a folder or a .tar.zst file that drumsctl export made",
        ));
    };
    let found = bundle::verify(files.as_ref(), c.registration);
    let verdict = found.analysis.as_ref().map(|a| a.summary.verdict);
    if global.json {
        output::json(&serde_json::json!({
            "bundle": c.bundle.display().to_string(),
            "bundle_sha256": found.bundle_sha256,
            "holds": found.holds(),
            "registration": found.registration.as_ref().map(|r| r.sha256),
            "files": found.files,
            "records": found.records,
            "problems": found.problems,
            "notes": found.notes,
            "verdict": verdict,
            "summary": found.analysis.as_ref().map(|a| &a.summary),
        }))?;
    } else {
        let state = if found.holds() { "holds" } else { "DOES NOT HOLD" };
        say!("{} {state}: {} files, {} records recomputed", c.bundle.display(), found.files, found.records)?;
        for n in &found.notes {
            say!("note: {n}")?;
        }
        if let Some(a) = &found.analysis {
            for line in tables::verdict_lines(&a.summary) {
                say!("{line}")?;
            }
        }
    }
    for p in &found.problems {
        // On one line: a path from a bundle must not look like another message.
        note!("tampered or damaged: {}", say::one_line(&p.to_string()));
    }
    if !found.holds() {
        note!("help:  get the bundle again from where it was exported, and compare bundle_sha256 in manifest.json");
        return Ok(ExitCode::from(1));
    }
    Ok(ExitCode::from(verdict.map_or(1, Verdict::exit_code)))
}

struct Folder(PathBuf);

impl BundleFiles for Folder {
    fn paths(&self) -> Result<Vec<String>, String> {
        let mut out = Vec::new();
        let mut open = vec![self.0.clone()];
        while let Some(dir) = open.pop() {
            let entries = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
            for entry in entries {
                let entry = entry.map_err(|e| format!("{}: {e}", dir.display()))?;
                let kind = entry.file_type().map_err(|e| format!("{}: {e}", entry.path().display()))?;
                if kind.is_dir() {
                    open.push(entry.path());
                } else {
                    let path = entry.path();
                    let relative = path.strip_prefix(&self.0).unwrap_or(&path);
                    out.push(relative.to_string_lossy().into_owned());
                }
                if out.len() > MAX_FILES {
                    return Err(format!("more than {MAX_FILES} files"));
                }
            }
        }
        out.sort();
        Ok(out)
    }

    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        let full = self.0.join(path);
        let meta = fs::symlink_metadata(&full).map_err(|e| e.to_string())?;
        if !meta.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        if meta.len() > most {
            return Err(bundle::too_long(meta.len(), most));
        }
        let mut bytes = Vec::new();
        let file = fs::File::open(&full).map_err(|e| e.to_string())?;
        // It may have grown since.
        file.take(most + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }
}

/// An archive's entries by name; `None` is one that is no regular file.
struct Archive(BTreeMap<String, Option<Vec<u8>>>);

impl Archive {
    fn read(path: &Path) -> Result<Self, CtlError> {
        let file = fs::File::open(path).map_err(CtlError::file("read", path))?;
        Self::unpack(file).map_err(|why| {
            CtlError::bad(
                format!("{} is not a bundle: {why}", path.display()),
                "give a folder or a .tar.zst file that drumsctl export made",
            )
        })
    }

    fn unpack(packed: impl Read) -> Result<Self, String> {
        let text = |e: io::Error| e.to_string();
        // Also names may be long: nothing that is read goes beyond files, their headers and padding.
        let most = bundle::MAX_BYTES + 1024 * MAX_FILES as u64;
        let mut archive = tar::Archive::new(zstd::Decoder::new(packed).map_err(text)?.take(most));
        let (mut out, mut left) = (BTreeMap::new(), bundle::MAX_BYTES);
        for entry in archive.entries().map_err(text)? {
            let entry = entry.map_err(text)?;
            let name = entry.path().map_err(text)?.to_string_lossy().into_owned();
            // Asked before anything is unpacked: a small file may unpack to any size.
            left = left
                .checked_sub(entry.size())
                .ok_or_else(|| format!("it unpacks to more than {} bytes", bundle::MAX_BYTES))?;
            let content = if entry.header().entry_type().is_file() {
                let (mut bytes, size) = (Vec::new(), entry.size());
                entry.take(size).read_to_end(&mut bytes).map_err(text)?;
                Some(bytes)
            } else {
                None
            };
            if out.insert(name.clone(), content).is_some() {
                return Err(format!("it has {name} twice"));
            }
            if out.len() > MAX_FILES {
                return Err(format!("it has more than {MAX_FILES} files"));
            }
        }
        Ok(Self(out))
    }
}

impl BundleFiles for Archive {
    fn paths(&self) -> Result<Vec<String>, String> {
        Ok(self.0.keys().cloned().collect())
    }

    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        match self.0.get(path) {
            None => Err("there is no such file".to_owned()),
            Some(None) => Err("it is not a regular file".to_owned()),
            Some(Some(bytes)) if bytes.len() as u64 > most => Err(bundle::too_long(bytes.len() as u64, most)),
            Some(Some(bytes)) => Ok(bytes.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<zstd::Encoder<'static, Vec<u8>>>)) -> Vec<u8> {
        let mut tar = tar::Builder::new(zstd::Encoder::new(Vec::new(), 1).unwrap());
        fill(&mut tar);
        tar.into_inner().unwrap().finish().unwrap()
    }

    fn header(size: u64) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_size(size);
        header
    }

    #[test]
    fn what_is_no_file_in_an_archive_is_named() {
        let packed = archive(|tar| {
            tar.append_data(&mut header(2), "manifest.json", &b"{}"[..]).unwrap();
            let mut link = header(0);
            link.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut link, "samples/x.jsonl", "/etc/passwd").unwrap();
        });
        let found = Archive::unpack(packed.as_slice()).unwrap();
        assert_eq!(found.paths().unwrap(), ["manifest.json", "samples/x.jsonl"]);
        assert_eq!(found.read("manifest.json", 2).unwrap(), b"{}");
        assert!(found.read("samples/x.jsonl", 100).unwrap_err().contains("not a regular file"));
    }

    #[test]
    fn a_bomb_is_refused_before_it_is_unpacked() {
        let size = bundle::MAX_BYTES + 1;
        let packed = archive(|tar| {
            // Its header is enough; what follows breaks off.
            let mut header = header(size);
            header.set_path("samples/x.jsonl").unwrap();
            header.set_cksum();
            std::io::Write::write_all(tar.get_mut(), header.as_bytes()).unwrap();
        });
        let why = Archive::unpack(packed.as_slice()).err().unwrap();
        assert!(why.contains("unpacks to more than"), "{why}");
    }
    #[test]
    fn fuzz_archives() {
        let packed = archive(|tar| {
            tar.append_data(&mut header(2), "manifest.json", &b"{}"[..]).unwrap();
            tar.append_data(&mut header(3), format!("samples/{}.jsonl", "x".repeat(120)), &b"{}\n"[..]).unwrap();
        });
        let plain = zstd::decode_all(packed.as_slice()).unwrap();
        drums_fuzz::decoder!(vec![packed, plain], |bytes: &[u8]| {
            // As the file, and as what the file unpacks to.
            for packed in [bytes.to_vec(), zstd::encode_all(bytes, 1).unwrap()] {
                if let Ok(found) = Archive::unpack(packed.as_slice()) {
                    for path in found.paths().unwrap() {
                        let _ = found.read(&path, 100);
                    }
                }
            }
        });
    }
}
