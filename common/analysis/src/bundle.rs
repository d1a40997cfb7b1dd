//! Bundles: everything that a verdict rests on, as files whose every byte is accounted for.
//!
//! Owns the layout, the manifest and the check. Does no IO: who writes takes [`files`], who verifies hands in a
//! [`BundleFiles`].
//!
//! ```text
//! manifest.json                      path, bytes and SHA-256 of every other file, and a digest over all of that
//! registration.json                  the canonical form; its SHA-256 is the registration
//! runs.json                          what the store knows of each run
//! samples/RUN-HOST.jsonl             sample records
//! events/RUN-HOST.jsonl              all other records but logs
//! logs/RUN-HOST.jsonl                log records
//! summary.json                       every number and the verdict, as computed at export
//! ```

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{Body, Record},
    experiment::{Registration, ThawError},
    ids::ExperimentId,
};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::{Analysis, RunMeta, analyse};

pub const VERSION: u32 = 1;
pub const MANIFEST: &str = "manifest.json";
pub const REGISTRATION: &str = "registration.json";
pub const RUNS: &str = "runs.json";
pub const SUMMARY: &str = "summary.json";

/// One file of a bundle to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleFile {
    /// Relative, with `/`.
    pub path: String,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub version: u32,
    pub experiment: ExperimentId,
    pub registration: Sha256,
    pub registered_at: Micros,
    /// Runs of the registration that had been made at export; a bundle with fewer is not the experiment's verdict.
    pub runs_made: u32,
    pub files: Vec<ManifestEntry>,
    /// Over the canonical JSON of all fields above: the bundle's name.
    pub bundle_sha256: Sha256,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestEntry {
    pub path: String,
    pub bytes: u64,
    pub sha256: Sha256,
}

impl Manifest {
    /// The digest that `bundle_sha256` must be.
    fn digest(&self) -> Sha256 {
        let mut value = serde_json::to_value(self).expect("a manifest is strings and integers");
        if let Json::Object(map) = &mut value {
            map.remove("bundle_sha256");
        }
        Sha256::of(value.to_string().as_bytes())
    }

    fn text(&self) -> String {
        pretty(self).expect("a manifest is strings and integers")
    }
}

fn pretty<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("writing record {seq} of {place} as JSON")]
    Record { place: String, seq: u64, source: serde_json::Error },
    #[error("writing {0} as JSON")]
    File(&'static str, #[source] serde_json::Error),
}

fn folder(body: &Body) -> &'static str {
    match body {
        Body::Sample(_) => "samples",
        Body::Log(_) => "logs",
        _ => "events",
    }
}

/// All files of the bundle of these runs, manifest last. `runs_made` counts all runs of the registration, exported or not.
///
/// The summary is computed from the lines as written, so that whoever reads them gets the same.
pub fn files(
    registration: &Registration,
    runs: &[RunMeta],
    runs_made: u32,
    records: &[Record],
) -> Result<Vec<BundleFile>, WriteError> {
    let mut ordered: Vec<&Record> = records.iter().collect();
    ordered.sort_by(|a, b| (a.run, &a.host, a.seq).cmp(&(b.run, &b.host, b.seq)));
    let mut lines: BTreeMap<String, String> = BTreeMap::new();
    let mut reread = Vec::with_capacity(records.len());
    for r in ordered {
        let place = format!("{}-{}", r.run, r.host);
        let error = |source| WriteError::Record { place: place.clone(), seq: r.seq, source };
        let line = serde_json::to_string(r).map_err(error)?;
        reread.push(serde_json::from_str(&line).map_err(error)?);
        let file = lines.entry(format!("{}/{place}.jsonl", folder(&r.body))).or_default();
        file.push_str(&line);
        file.push('\n');
    }
    let summary = analyse(registration, runs, &reread).summary;
    let mut out = vec![
        BundleFile { path: REGISTRATION.to_owned(), bytes: registration.canonical.clone().into_bytes() },
        BundleFile { path: RUNS.to_owned(), bytes: pretty(&runs).map_err(|e| WriteError::File(RUNS, e))?.into_bytes() },
        BundleFile {
            path: SUMMARY.to_owned(),
            bytes: pretty(&summary).map_err(|e| WriteError::File(SUMMARY, e))?.into_bytes(),
        },
    ];
    out.extend(lines.into_iter().map(|(path, text)| BundleFile { path, bytes: text.into_bytes() }));
    out.sort_by(|a, b| a.path.cmp(&b.path));
    let mut manifest = Manifest {
        version: VERSION,
        experiment: registration.experiment.id,
        registration: registration.sha256,
        registered_at: registration.registered_at,
        runs_made,
        files: out
            .iter()
            .map(|f| ManifestEntry { path: f.path.clone(), bytes: f.bytes.len() as u64, sha256: Sha256::of(&f.bytes) })
            .collect(),
        bundle_sha256: Sha256([0; 32]),
    };
    manifest.bundle_sha256 = manifest.digest();
    out.push(BundleFile { path: MANIFEST.to_owned(), bytes: manifest.text().into_bytes() });
    Ok(out)
}

/// A bundle comes from outside: what one may make us read is bounded. The evidence of the largest experiment that may be
/// registered stays below.
pub const MAX_BYTES: u64 = 1 << 30;
/// Of a hundred thousand files.
const MAX_MANIFEST: u64 = 32 << 20;

/// Why a file of more than `most` bytes is not read.
pub fn too_long(bytes: u64, most: u64) -> String {
    format!("it has {bytes} bytes, {most} are expected")
}

/// A bundle to read: a folder, an archive, or a map in a test.
pub trait BundleFiles {
    /// Relative paths of all that is in it, with `/`; also of what is no file and cannot be read.
    fn paths(&self) -> Result<Vec<String>, String>;
    /// Content of one of them, which has at most `most` bytes; the error says why it cannot be read.
    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String>;
}

impl BundleFiles for BTreeMap<String, Vec<u8>> {
    fn paths(&self) -> Result<Vec<String>, String> {
        Ok(self.keys().cloned().collect())
    }
    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        let bytes = self.get(path).ok_or("there is no such file")?;
        if bytes.len() as u64 > most { Err(too_long(bytes.len() as u64, most)) } else { Ok(bytes.clone()) }
    }
}

/// Something that does not hold, and the file that it is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub path: String,
    pub what: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// What verification found. The bundle holds if there is no problem.
#[derive(Debug, Default)]
pub struct Verification {
    pub bundle_sha256: Option<Sha256>,
    pub registration: Option<Registration>,
    pub files: usize,
    pub records: usize,
    pub problems: Vec<Problem>,
    /// What a reader must know although nothing is wrong.
    pub notes: Vec<String>,
    /// Recomputed from the records; also present when it differs from `summary.json`.
    pub analysis: Option<Analysis>,
}

impl Verification {
    pub fn holds(&self) -> bool {
        self.problems.is_empty()
    }
    pub(crate) fn problem(&mut self, path: &str, what: impl Into<String>) {
        self.problems.push(Problem { path: path.to_owned(), what: what.into() });
    }
}

/// Checks every byte against the manifest, then recomputes the summary from the records and compares. `expected` is the
/// registration that the caller knows from elsewhere: only that tells a rewritten bundle from the registered one.
pub fn verify(bundle: &dyn BundleFiles, expected: Option<Sha256>) -> Verification {
    let mut v = Verification::default();
    let present: BTreeSet<String> = match bundle.paths() {
        Ok(paths) => paths.into_iter().collect(),
        Err(why) => {
            v.problem(".", format!("the files cannot be listed: {why}"));
            return v;
        }
    };
    let Some(manifest) = manifest(bundle, &mut v) else { return v };
    v.bundle_sha256 = Some(manifest.bundle_sha256);
    let contents = contents(bundle, &manifest, &present, &mut v);
    let Some(registration) = registration(&contents, &manifest, expected, &mut v) else { return v };
    let runs: Vec<RunMeta> = match contents.get(RUNS).map(|b| serde_json::from_slice(b)) {
        Some(Ok(runs)) => runs,
        Some(Err(e)) => {
            v.problem(RUNS, format!("not a list of runs: {e}"));
            return v;
        }
        None => return v,
    };
    numbered(&runs, &manifest, &registration, &mut v);
    let records = records(&contents, &mut v);
    v.records = records.len();
    let known: BTreeSet<_> = runs.iter().map(|r| r.run).collect();
    let unknown: BTreeSet<_> = records.iter().map(|r| r.run).filter(|run| !known.contains(run)).collect();
    for run in unknown {
        v.problem(RUNS, format!("it does not list {run}, of which there are records"));
    }
    let analysis = analyse(&registration, &runs, &records);
    compare(&contents, &analysis, &mut v);
    if (runs.len() as u32) < manifest.runs_made {
        v.notes.push(format!(
            "this bundle has {} of {} runs: it is not the experiment's verdict",
            runs.len(),
            manifest.runs_made
        ));
    }
    v.registration = Some(registration);
    v.analysis = Some(analysis);
    v
}

/// Runs are numbered as they are made; a bundle has all of them, or is the export of one. A run that was left out because
/// of what it found leaves a gap.
fn numbered(runs: &[RunMeta], manifest: &Manifest, registration: &Registration, v: &mut Verification) {
    let (made, max) = (manifest.runs_made, registration.experiment.design.max_runs);
    if made > max {
        v.problem(MANIFEST, format!("{made} runs were made, of a registration that allows {max}"));
    }
    if runs.iter().map(|r| r.run).collect::<BTreeSet<_>>().len() != runs.len() {
        v.problem(RUNS, "it lists a run twice");
    }
    let mut numbers: Vec<u32> = runs.iter().map(|r| r.number).collect();
    numbers.sort_unstable();
    let whole = numbers.iter().copied().eq(1..=made);
    let one_of_them = made > 1 && numbers.len() == 1 && (1..=made).contains(&numbers[0]);
    if !whole && !one_of_them {
        v.problem(RUNS, format!("it lists the runs {numbers:?}, but {made} were made: neither all nor a single one"));
    }
}

fn manifest(bundle: &dyn BundleFiles, v: &mut Verification) -> Option<Manifest> {
    let bytes = match bundle.read(MANIFEST, MAX_MANIFEST) {
        Ok(bytes) => bytes,
        Err(why) => {
            v.problem(MANIFEST, format!("it cannot be read, so this is not a bundle: {why}"));
            return None;
        }
    };
    let manifest: Manifest = match serde_json::from_slice(&bytes) {
        Ok(m) => m,
        Err(e) => {
            v.problem(MANIFEST, format!("not a manifest of version {VERSION}: {e}"));
            return None;
        }
    };
    if manifest.version != VERSION {
        v.problem(MANIFEST, format!("version {} is not known here, {VERSION} is", manifest.version));
        return None;
    }
    if manifest.digest() != manifest.bundle_sha256 || manifest.text().as_bytes() != bytes {
        v.problem(MANIFEST, "it was changed after export: its own digest does not fit");
    }
    Some(manifest)
}

/// Reads every listed file, and reports those that are missing, changed or not listed.
fn contents(
    bundle: &dyn BundleFiles,
    manifest: &Manifest,
    present: &BTreeSet<String>,
    v: &mut Verification,
) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut listed = BTreeSet::new();
    let total = manifest.files.iter().fold(0u64, |sum, f| sum.saturating_add(f.bytes));
    if total > MAX_BYTES {
        v.problem(MANIFEST, format!("its files have {total} bytes, more than the {MAX_BYTES} that a bundle may have"));
        return out;
    }
    for entry in &manifest.files {
        listed.insert(entry.path.as_str());
        if !present.contains(&entry.path) {
            v.problem(&entry.path, "it is in the manifest and not in the bundle");
            continue;
        }
        match bundle.read(&entry.path, entry.bytes) {
            Err(why) => v.problem(&entry.path, format!("it cannot be read: {why}")),
            Ok(bytes) => {
                v.files += 1;
                let got = Sha256::of(&bytes);
                if bytes.len() as u64 != entry.bytes {
                    let what = format!("it was changed: {} bytes instead of {}", bytes.len(), entry.bytes);
                    v.problem(&entry.path, what);
                } else if got != entry.sha256 {
                    v.problem(&entry.path, format!("it was changed: SHA-256 {got} instead of {}", entry.sha256));
                }
                out.insert(entry.path.clone(), bytes);
            }
        }
    }
    for path in present.iter().filter(|p| p.as_str() != MANIFEST && !listed.contains(p.as_str())) {
        v.problem(path, "it is in the bundle and not in the manifest");
    }
    for path in [REGISTRATION, RUNS, SUMMARY] {
        if !listed.contains(path) {
            v.problem(path, "the manifest does not list it");
        }
    }
    out
}

fn registration(
    contents: &BTreeMap<String, Vec<u8>>,
    manifest: &Manifest,
    expected: Option<Sha256>,
    v: &mut Verification,
) -> Option<Registration> {
    let bytes = contents.get(REGISTRATION)?;
    let Ok(text) = std::str::from_utf8(bytes) else {
        v.problem(REGISTRATION, "not UTF-8");
        return None;
    };
    if let Some(expected) = expected
        && expected != manifest.registration
    {
        v.problem(
            MANIFEST,
            format!("it is of registration {}, and the one that was asked for is {expected}", manifest.registration),
        );
    }
    match Registration::thaw(text, manifest.registration, manifest.registered_at) {
        Ok(r) => Some(r),
        Err(e @ ThawError::Digest { .. }) => {
            v.problem(REGISTRATION, e.to_string());
            None
        }
        Err(e @ (ThawError::Shape(_) | ThawError::Unsound(_))) => {
            let cause = std::error::Error::source(&e).map(ToString::to_string).unwrap_or_default();
            v.problem(REGISTRATION, format!("{e}: {cause}"));
            None
        }
    }
}

fn records(contents: &BTreeMap<String, Vec<u8>>, v: &mut Verification) -> Vec<Record> {
    let mut out: Vec<Record> = Vec::new();
    for (path, bytes) in contents.iter().filter(|(p, _)| p.ends_with(".jsonl")) {
        for (i, line) in bytes.split(|b| *b == b'\n').enumerate().filter(|(_, l)| !l.is_empty()) {
            let place = format!("{path}:{}", i + 1);
            match serde_json::from_slice::<Record>(line) {
                Ok(r) => {
                    let want = format!("{}/{}-{}.jsonl", folder(&r.body), r.run, r.host);
                    if want != *path {
                        v.problem(&place, format!("record {} belongs to {want}", r.seq));
                    }
                    out.push(r);
                }
                Err(e) => v.problem(&place, format!("not a record: {e}")),
            }
        }
    }
    out
}

fn compare(contents: &BTreeMap<String, Vec<u8>>, analysis: &Analysis, v: &mut Verification) {
    let Some(bytes) = contents.get(SUMMARY) else { return };
    let recorded: Json = match serde_json::from_slice(bytes) {
        Ok(j) => j,
        Err(e) => return v.problem(SUMMARY, format!("not JSON: {e}")),
    };
    let computed = serde_json::to_value(&analysis.summary).expect("a summary has no map with keys other than text");
    let mut differences = Vec::new();
    differ("", &recorded, &computed, &mut differences);
    for d in differences.iter().take(5) {
        v.problem(SUMMARY, d.clone());
    }
    if differences.len() > 5 {
        v.problem(SUMMARY, format!("and {} more numbers differ from the records'", differences.len() - 5));
    }
}

/// Numbers may differ by what another machine's mathematics library may do to the last printed digit.
fn differ(at: &str, recorded: &Json, computed: &Json, out: &mut Vec<String>) {
    match (recorded, computed) {
        (Json::Object(a), Json::Object(b)) => {
            for key in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
                let null = &Json::Null;
                differ(&format!("{at}/{key}"), a.get(key).unwrap_or(null), b.get(key).unwrap_or(null), out);
            }
        }
        (Json::Array(a), Json::Array(b)) if a.len() == b.len() => {
            for (i, (x, y)) in a.iter().zip(b).enumerate() {
                differ(&format!("{at}/{i}"), x, y, out);
            }
        }
        (Json::Number(a), Json::Number(b)) => {
            let (x, y) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
            if (x - y).abs() > 2e-5 * x.abs().max(y.abs()) {
                out.push(format!("{at} is {x}, the records give {y}"));
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push(format!("{at} is {}, the records give {}", short(a), short(b))),
    }
}

fn short(j: &Json) -> String {
    let text = j.to_string();
    if text.chars().count() <= 80 { text } else { text.chars().take(79).chain(['…']).collect() }
}

#[cfg(test)]
mod tests;
