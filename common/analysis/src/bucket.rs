//! A verdict from a bucket alone: what agents sealed and uploaded while their coordinator was away.
//!
//! Owns how runs are judged of which only the agents' side is known. Does no IO: who verifies hands in a [`BundleFiles`].
//! The layout is `drums_common::bucket`'s. A coordinator that is gone can say nothing about how its runs ended, so that
//! follows from the last records: a host without any, or whose records stop without an end, is lost.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    bucket::{self, HostDoc, InstallationDoc, Key, LAYOUT, RegistrationDoc, RunDoc},
    digest::Sha256,
    evidence::{Body, Closed, Record},
    experiment::Registration,
    ids::{HostId, RunId},
    segment,
    telemetry::chain,
};

use crate::{
    RunMeta, RunState, analyse,
    bundle::{BundleFiles, MAX_BYTES, Verification},
};

/// One installation's part of a bucket.
#[derive(Default)]
struct Part {
    /// With its slash; empty for a bucket that was given as the installation's folder.
    folder: String,
    registrations: BTreeSet<Sha256>,
    runs: BTreeMap<RunId, RunDoc>,
    hosts: BTreeSet<(RunId, HostId)>,
    segments: BTreeMap<(RunId, HostId), BTreeSet<u32>>,
}

/// Checks every object of one registration's runs, and computes tables and verdict from their records. `expected` chooses
/// the registration, and must when the bucket holds several.
pub fn verify(files: &dyn BundleFiles, expected: Option<Sha256>) -> Verification {
    let mut v = Verification::default();
    let paths = match files.paths() {
        Ok(paths) => paths,
        Err(why) => {
            v.problem(".", format!("the objects cannot be listed: {why}"));
            return v;
        }
    };
    let mut reader = Reader { files, left: MAX_BYTES, v: &mut v };
    let parts = parts(&mut reader, &paths);
    let Some((part, sha256)) = choose(&parts, expected, reader.v) else { return v };
    let key = format!("{}{}", part.folder, Key::Registration(sha256));
    let Some(registration) = registration(&mut reader, &key, sha256) else { return v };
    let mut runs = Vec::new();
    let mut records = Vec::new();
    for doc in part.runs.values().filter(|r| r.registration == sha256) {
        let (meta, found) = run(&mut reader, part, doc);
        runs.push(meta);
        records.extend(found);
    }
    v.records = records.len();
    numbered(&runs, &registration, &mut v);
    v.analysis = Some(analyse(&registration, &runs, &records));
    v.registration = Some(registration);
    v
}

/// Reads objects, and counts what that takes: a bucket comes from outside.
struct Reader<'a> {
    files: &'a dyn BundleFiles,
    left: u64,
    v: &'a mut Verification,
}

impl Reader<'_> {
    fn bytes(&mut self, path: &str) -> Option<Vec<u8>> {
        match self.files.read(path, self.left) {
            Ok(bytes) => {
                self.left -= (bytes.len() as u64).min(self.left);
                self.v.files += 1;
                Some(bytes)
            }
            Err(why) => {
                self.v.problem(path, format!("it cannot be read: {why}"));
                None
            }
        }
    }

    fn document<T: serde::de::DeserializeOwned>(&mut self, path: &str) -> Option<T> {
        let bytes = self.bytes(path)?;
        bucket::read(&bytes).map_err(|e| self.v.problem(path, chain(&e))).ok()
    }
}

/// What lies where. A folder is an installation's if it holds the document that says so.
fn parts(reader: &mut Reader<'_>, paths: &[String]) -> Vec<Part> {
    let mut out = Vec::new();
    for path in paths {
        let Some(folder) = path.strip_suffix(bucket::INSTALLATION) else { continue };
        if folder.matches('/').count() > 1 || !(folder.is_empty() || folder.ends_with('/')) {
            continue;
        }
        match reader.document::<InstallationDoc>(path) {
            Some(doc) if doc.layout == LAYOUT => out.push(Part { folder: folder.to_owned(), ..Part::default() }),
            Some(doc) => {
                reader.v.problem(path, format!("layout {} is not known here, {LAYOUT} is", doc.layout));
            }
            None => {}
        }
    }
    for part in &mut out {
        for path in paths {
            let Some(below) = path.strip_prefix(&part.folder) else { continue };
            match Key::parse(below) {
                None if part.folder.is_empty() && below.ends_with(bucket::INSTALLATION) => {}
                None => reader.v.notes.push(format!("{path} is no object of ours and was not read")),
                Some(Key::Installation) => {}
                Some(Key::Registration(sha256)) => {
                    part.registrations.insert(sha256);
                }
                Some(Key::Run(run)) => match reader.document::<RunDoc>(path) {
                    Some(doc) if doc.run == run => {
                        part.runs.insert(run, doc);
                    }
                    Some(doc) => reader.v.problem(path, format!("it is about {}", doc.run)),
                    None => {}
                },
                Some(Key::Host(run, host)) => {
                    part.hosts.insert((run, host));
                }
                Some(Key::Segment(run, host, index)) => {
                    part.segments.entry((run, host)).or_default().insert(index);
                }
            }
        }
    }
    out
}

fn choose<'a>(parts: &'a [Part], expected: Option<Sha256>, v: &mut Verification) -> Option<(&'a Part, Sha256)> {
    let mut there = Vec::new();
    for part in parts {
        // Also one of which no run was begun: then that is the answer.
        there.extend(part.registrations.iter().map(|sha256| (part, *sha256)));
        let lacking: BTreeSet<Sha256> = part.runs.values().map(|r| r.registration).collect();
        for sha256 in lacking.difference(&part.registrations) {
            v.problem(&format!("{}{}", part.folder, Key::Registration(*sha256)), "it is not there, and runs are");
        }
    }
    let wanted: Vec<_> = there.iter().filter(|(_, s)| expected.is_none_or(|e| e == *s)).copied().collect();
    if let [one] = wanted[..] {
        return Some(one);
    }
    let list: Vec<String> = there.iter().map(|(part, sha256)| format!("{}{sha256}", part.folder)).collect();
    let what = match (parts.is_empty(), list.is_empty(), expected) {
        (true, ..) => format!("no folder in it has an {}, so this is no bucket of evidence", bucket::INSTALLATION),
        (_, true, _) => "no registration is in it".to_owned(),
        (.., Some(e)) if wanted.is_empty() => format!("registration {e} is not in it; there are {}", list.join(", ")),
        (.., Some(_)) => format!("several installations have it; give the folder of one of {}", list.join(", ")),
        (.., None) => {
            format!("it holds {} registrations; choose one with --registration: {}", list.len(), list.join(", "))
        }
    };
    v.problem(".", what);
    None
}

fn registration(reader: &mut Reader<'_>, path: &str, sha256: Sha256) -> Option<Registration> {
    let doc: RegistrationDoc = reader.document(path)?;
    Registration::thaw(&doc.canonical, sha256, doc.registered_at).map_err(|e| reader.v.problem(path, chain(&e))).ok()
}

/// Runs are numbered as they are made. One of which the bucket knows nothing was never away from its coordinator, and may
/// have said anything.
fn numbered(runs: &[RunMeta], registration: &Registration, v: &mut Verification) {
    let numbers: BTreeSet<u32> = runs.iter().map(|r| r.number).collect();
    if numbers.len() != runs.len() {
        v.problem(".", "two runs have the same number");
    }
    let (made, max) = (numbers.last().copied().unwrap_or(0), registration.experiment.design.max_runs);
    if made > max {
        v.problem(".", format!("run {made} was made, of a registration that allows {max}"));
    }
    let lacking: Vec<String> = (1..=made.min(max)).filter(|n| !numbers.contains(n)).map(|n| n.to_string()).collect();
    if !lacking.is_empty() {
        v.notes.push(format!(
            "of run {} nothing is in the bucket: this is not the experiment's verdict",
            lacking.join(", ")
        ));
    }
    if runs.is_empty() {
        v.notes.push("no run of it is in the bucket".to_owned());
    }
}

fn run(reader: &mut Reader<'_>, part: &Part, doc: &RunDoc) -> (RunMeta, Vec<Record>) {
    let mut all = Vec::new();
    let mut ends: Vec<(HostId, HostEnd)> = Vec::new();
    for host in doc.hosts.iter().collect::<BTreeSet<_>>() {
        if part.hosts.contains(&(doc.run, host.clone())) {
            let path = format!("{}{}", part.folder, Key::Host(doc.run, host.clone()));
            if let Some(about) = reader.document::<HostDoc>(&path)
                && about.host != *host
            {
                reader.v.problem(&path, format!("it is about {}", about.host));
            }
        }
        let records = host_records(reader, part, doc, host);
        ends.push((host.clone(), HostEnd::of(&records)));
        all.extend(records);
    }
    let strangers = part.segments.keys().filter(|(run, host)| *run == doc.run && !doc.hosts.contains(host));
    for (_, host) in strangers {
        let path = format!("{}{}", part.folder, Key::Run(doc.run));
        reader.v.problem(&path, format!("it does not list host {host}, whose evidence is there"));
    }
    let (state, reason) = how_it_ended(&ends);
    (RunMeta { run: doc.run, number: doc.number, state, reason, late: BTreeMap::new() }, all)
}

/// A host's records, segment by segment. A damaged segment is named and left out; the gap that it leaves is the analysis's
/// to name.
fn host_records(reader: &mut Reader<'_>, part: &Part, doc: &RunDoc, host: &HostId) -> Vec<Record> {
    let mut out: Vec<Record> = Vec::new();
    let Some(indices) = part.segments.get(&(doc.run, host.clone())) else { return out };
    for index in 0..=indices.last().copied().unwrap_or(0) {
        let path = format!("{}{}", part.folder, Key::Segment(doc.run, host.clone(), index));
        if !indices.contains(&index) {
            reader.v.problem(&path, "it is not there, and a later one is");
            continue;
        }
        let Some(object) = reader.bytes(&path) else { continue };
        match segment_records(&object, doc, host, index) {
            Ok(records) if records.first().is_some_and(|r| out.last().is_some_and(|o| r.seq <= o.seq)) => {
                reader.v.problem(&path, "its records have numbers that earlier ones have");
            }
            Ok(records) => out.extend(records),
            Err(what) => reader.v.problem(&path, what),
        }
    }
    out
}

fn segment_records(object: &[u8], doc: &RunDoc, host: &HostId, index: u32) -> Result<Vec<Record>, String> {
    let (head, bytes) = bucket::unpack(object).map_err(|e| chain(&e))?;
    if (head.run, head.registration, &head.host, head.index) != (doc.run, doc.registration, host, index) {
        return Err(format!("it is segment {} of {} on {}", head.index, head.run, head.host));
    }
    let scan = segment::scan(bytes);
    if let Some(fault) = scan.fault {
        return Err(format!("at byte {} of the segment: {fault}", scan.good));
    }
    let mut out: Vec<Record> = Vec::new();
    for batch in &scan.batches {
        let at = |what: String| format!("at byte {} of the segment: {what}", batch.offset);
        let records = segment::records(&bytes[batch.offset as usize..]).map_err(at)?;
        if out.last().is_some_and(|o| o.seq + 1 != batch.first_seq) {
            return Err(at(format!("record {} follows {}", batch.first_seq, out.last().map_or(0, |o| o.seq))));
        }
        if let Some(other) = records.iter().find(|r| r.run != doc.run || r.host != *host) {
            return Err(at(format!("record {} is of {} on {}", other.seq, other.run, other.host)));
        }
        out.extend(records);
    }
    let ends = (out.first().map_or(0, |r| r.seq), out.last().map_or(0, |r| r.seq));
    let closed = out.last().is_some_and(|r| matches!(r.body, Body::Closed(_)));
    if (head.first_seq, head.last_seq, head.closed) != (ends.0, ends.1, closed) {
        return Err("its first line says something else of its records".to_owned());
    }
    Ok(out)
}

/// How a host's evidence ends.
enum HostEnd {
    Nothing,
    /// The last number that there is.
    Open(u64),
    Closed(String),
}

impl HostEnd {
    fn of(records: &[Record]) -> Self {
        match records.last() {
            None => Self::Nothing,
            Some(Record { body: Body::Closed(Closed { reason, .. }), .. }) => Self::Closed(reason.clone()),
            Some(r) => Self::Open(r.seq),
        }
    }
}

fn how_it_ended(ends: &[(HostId, HostEnd)]) -> (RunState, String) {
    let lost: Vec<String> = ends
        .iter()
        .filter_map(|(host, end)| match end {
            HostEnd::Nothing => Some(format!("host {host}: no evidence of it is in the bucket")),
            HostEnd::Open(seq) => Some(format!("host {host}: its evidence stops at record {seq} without an end")),
            HostEnd::Closed(_) => None,
        })
        .collect();
    if !lost.is_empty() {
        return (RunState::Lost, lost.join("; "));
    }
    let early: Vec<(&HostId, &str)> = ends
        .iter()
        .filter_map(|(host, end)| match end {
            HostEnd::Closed(why) if !why.is_empty() => Some((host, why.as_str())),
            _ => None,
        })
        .collect();
    let reason = early.iter().map(|(host, why)| format!("host {host}: {why}")).collect::<Vec<_>>().join("; ");
    if early.is_empty() {
        (RunState::Complete, reason)
    } else if early.iter().all(|(_, why)| *why == CANCELLED) {
        (RunState::Cancelled, reason)
    } else {
        (RunState::Incomplete, reason)
    }
}

/// What an agent's last record says when its coordinator ended the run early.
const CANCELLED: &str = "cancelled";

#[cfg(test)]
mod tests;
