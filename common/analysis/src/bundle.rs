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
mod tests {
    use super::*;
    use crate::{Verdict, synthetic::Scenario};

    fn bundle() -> BTreeMap<String, Vec<u8>> {
        let s = Scenario::exp028(1);
        let (meta, records) = s.run(1);
        files(&s.registration(), &[meta], 1, &records).unwrap().into_iter().map(|f| (f.path, f.bytes)).collect()
    }

    #[test]
    fn an_untouched_bundle_holds_and_gives_the_verdict_again() {
        let b = bundle();
        let v = verify(&b, Some(Scenario::exp028(1).registration().sha256));
        assert!(v.holds(), "{:#?}", v.problems);
        assert_eq!(v.analysis.unwrap().summary.verdict, Verdict::Pass);
        assert!(v.notes.is_empty());
        assert_eq!(v.files + 1, b.len());
    }

    #[test]
    fn one_changed_byte_anywhere_is_seen_and_named() {
        let b = bundle();
        for path in b.keys() {
            let mut changed = b.clone();
            let bytes = changed.get_mut(path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] = if bytes[middle] == b'1' { b'2' } else { b'1' };
            let v = verify(&changed, None);
            assert!(!v.holds(), "{path}");
            assert!(v.problems.iter().any(|p| p.path.starts_with(path.as_str())), "{path}: {:#?}", v.problems);
        }
        let mut spaced = b.clone();
        spaced.get_mut(MANIFEST).unwrap().push(b' ');
        assert_eq!(verify(&spaced, None).problems[0].path, MANIFEST);
    }

    #[test]
    fn missing_and_added_files_are_named() {
        let mut b = bundle();
        let log = b.keys().find(|p| p.starts_with("logs/")).unwrap().clone();
        b.remove(&log);
        b.insert("extra.txt".to_owned(), Vec::new());
        let v = verify(&b, None);
        let named: Vec<&str> = v.problems.iter().map(|p| p.path.as_str()).collect();
        assert!(named.contains(&log.as_str()) && named.contains(&"extra.txt"), "{named:?}");
    }

    /// Who rewrites a sample and the manifest too is caught by the summary.
    #[test]
    fn a_consistent_forgery_of_a_sample_contradicts_the_summary() {
        let mut b = bundle();
        let path = b.keys().find(|p| p.starts_with("samples/")).unwrap().clone();
        let text = String::from_utf8(b[&path].clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for line in &mut lines {
            let mut r: Record = serde_json::from_str(line).unwrap();
            if let Body::Sample(s) = &mut r.body
                && s.arm.as_str() == "drums-cold"
            {
                s.value *= 0.5;
            }
            *line = serde_json::to_string(&r).unwrap();
        }
        b.insert(path.clone(), (lines.join("\n") + "\n").into_bytes());
        let mut m: Manifest = serde_json::from_slice(&b[MANIFEST]).unwrap();
        for e in &mut m.files {
            e.bytes = b[&e.path].len() as u64;
            e.sha256 = Sha256::of(&b[&e.path]);
        }
        m.bundle_sha256 = m.digest();
        b.insert(MANIFEST.to_owned(), m.text().into_bytes());
        let v = verify(&b, None);
        assert!(v.problems.iter().all(|p| p.path == SUMMARY) && !v.holds(), "{:#?}", v.problems);
    }

    /// A bundle whose manifest fits what was changed in it.
    fn forged(mut b: BTreeMap<String, Vec<u8>>, change: impl FnOnce(&mut Manifest)) -> BTreeMap<String, Vec<u8>> {
        let mut m: Manifest = serde_json::from_slice(&b[MANIFEST]).unwrap();
        for e in &mut m.files {
            e.bytes = b[&e.path].len() as u64;
            e.sha256 = Sha256::of(&b[&e.path]);
        }
        change(&mut m);
        m.bundle_sha256 = m.digest();
        b.insert(MANIFEST.to_owned(), m.text().into_bytes());
        b
    }

    /// Whatever is in a bundle's files, and even if its manifest fits: an answer, never a panic.
    #[test]
    fn fuzz_bundles() {
        // A part of the records: an input is verified in a moment.
        let mut b = bundle();
        for (path, bytes) in &mut b {
            let lines =
                bytes.split_inclusive(|b| *b == b'\n').take(if path.ends_with(".jsonl") { 8 } else { usize::MAX });
            *bytes = lines.collect::<Vec<_>>().concat();
        }
        let paths: Vec<String> = b.keys().cloned().collect();
        let seeds = b.values().cloned().collect();
        drums_fuzz::decoder!(100, seeds, |bytes: &[u8]| {
            // In place of the file that it resembles.
            let start = &bytes[..bytes.len().min(16)];
            let path = paths.iter().find(|p| b[*p].starts_with(start)).unwrap_or(&paths[0]);
            let mut changed = b.clone();
            changed.insert(path.clone(), bytes.to_vec());
            let _ = verify(&changed, None);
            if path != MANIFEST {
                let _ = verify(&forged(changed, |_| {}), None);
            }
        });
    }

    #[test]
    fn a_run_that_was_left_out_leaves_a_gap() {
        let s = Scenario::exp028(1);
        let of = |numbers: &[u32], made| {
            let (metas, records): (Vec<_>, Vec<_>) = numbers.iter().map(|n| s.run(*n)).unzip();
            let files = files(&s.registration(), &metas, made, &records.concat()).unwrap();
            let b: BTreeMap<_, _> = files.into_iter().map(|f| (f.path, f.bytes)).collect();
            verify(&b, None).problems
        };
        assert_eq!(of(&[1, 2, 3], 3), []);
        assert_eq!(of(&[2], 3), [], "the export of one run");
        for (numbers, made) in [(&[1, 3][..], 2), (&[1, 3], 3), (&[2], 1), (&[1, 2], 1), (&[], 0)] {
            let problems = of(numbers, made);
            let seen = problems.iter().any(|p| p.path == RUNS);
            assert_eq!(seen, made > 0, "{numbers:?} of {made}: {problems:?}");
        }
        let max = s.registration().experiment.design.max_runs;
        assert_eq!(of(&[1], max + 1)[0].path, MANIFEST);
    }

    #[test]
    fn records_of_a_run_that_is_not_listed_are_seen() {
        let mut b = bundle();
        b.insert(RUNS.to_owned(), b"[]\n".to_vec());
        let v = verify(&forged(b, |m| m.runs_made = 0), None);
        assert!(v.problems.iter().any(|p| p.path == RUNS && p.what.contains("of which there are records")));
    }

    #[test]
    fn a_registration_that_no_spec_could_give_is_refused() {
        let mut b = bundle();
        let mut json: Json = serde_json::from_slice(&b[REGISTRATION]).unwrap();
        json["design"]["alpha"] = 2.5.into();
        let text = json.to_string();
        let sha = Sha256::of(text.as_bytes());
        b.insert(REGISTRATION.to_owned(), text.into_bytes());
        let v = verify(&forged(b, |m| m.registration = sha), None);
        assert!(v.problems[0].what.contains("alpha is 2.5"), "{:?}", v.problems);
        assert!(v.analysis.is_none());
    }

    #[test]
    fn what_is_larger_than_it_says_is_not_read() {
        let v = verify(&forged(bundle(), |m| m.files[0].bytes = MAX_BYTES), None);
        assert!(v.problems[0].what.contains("more than the"), "{:?}", v.problems);
        let mut long = bundle();
        long.get_mut(SUMMARY).unwrap().push(b' ');
        assert!(verify(&long, None).problems.iter().any(|p| p.path == SUMMARY && p.what.contains("are expected")));
    }

    #[test]
    fn another_registration_garbage_and_a_part_are_told_apart() {
        let v = verify(&bundle(), Some(Sha256::of(b"another")));
        assert_eq!(v.problems[0].path, MANIFEST);
        assert!(!verify(&BTreeMap::<String, Vec<u8>>::new(), None).holds());
        let garbage = BTreeMap::from([(MANIFEST.to_owned(), vec![0xff; 100])]);
        assert!(!verify(&garbage, None).holds());

        let s = Scenario::exp028(1);
        let (meta, records) = s.run(1);
        let part = files(&s.registration(), &[meta], 2, &records).unwrap();
        let v = verify(&part.into_iter().map(|f| (f.path, f.bytes)).collect::<BTreeMap<_, _>>(), None);
        assert!(v.holds() && v.notes[0].contains("1 of 2 runs"));
    }
}
