//! What must hold however much went wrong, looked at from outside: from agents' spools, from the exported evidence, from
//! the run's history and from the log of the faults.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use drums_agent::spool::Spool;
use drums_analysis::{
    RunMeta, analyse,
    bundle::{MANIFEST, Manifest, REGISTRATION, RUNS},
};
use drums_common::{
    clock::Micros,
    evidence::{Body, Record},
    experiment::Registration,
    ids::{HostId, RunId},
};
use serde::Serialize;
use serde_json::Value;

use super::{
    field::{Happened, LIFE_MS},
    schedule::Target,
};

/// How long a run may take to close after its deadline: its hosts undo it within two minutes or are not waited for, and
/// the coordinator may be away meanwhile.
const CLOSING_MS: i64 = 150_000;
/// An agent that could reach its coordinator again is back by then: its start, its longest pause between attempts (five
/// seconds) and an attempt.
const BACK_AFTER_US: i64 = 8_000_000;
/// Beats come four times a second; in so long one arrives.
const BEATS_US: i64 = 1_000_000;

/// What was looked at, and what does not hold.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    pub runs: usize,
    pub verdicts: BTreeMap<String, usize>,
    /// Records and samples in the store.
    pub records: usize,
    pub samples: usize,
    /// Records that agents hold as acknowledged, each compared with the store's.
    pub acknowledged: usize,
    /// Verdicts that were computed again from the evidence of their run alone.
    pub recomputed: usize,
    pub hosts_judged_lost: usize,
    /// Empty when every invariant holds.
    pub violations: Vec<String>,
}

impl Findings {
    pub fn violated(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }
}

type Key = (RunId, HostId, u64);

/// The evidence of a bundle that was exported.
pub struct Evidence {
    pub registration: Registration,
    pub runs: Vec<RunMeta>,
    pub records: Vec<Record>,
}

impl Evidence {
    pub fn read(bundle: &Path) -> Result<Self> {
        let text = |name: &str| fs::read_to_string(bundle.join(name)).with_context(|| format!("cannot read {name}"));
        let manifest: Manifest = serde_json::from_str(&text(MANIFEST)?).context(MANIFEST)?;
        let canonical = text(REGISTRATION)?;
        let registration = Registration::thaw(&canonical, manifest.registration, manifest.registered_at)?;
        let runs = serde_json::from_str(&text(RUNS)?).context(RUNS)?;
        let mut records = Vec::new();
        for folder in ["samples", "events", "logs"] {
            for entry in fs::read_dir(bundle.join(folder)).into_iter().flatten().flatten() {
                for line in fs::read_to_string(entry.path())?.lines() {
                    records.push(serde_json::from_str(line).with_context(|| format!("{line:?}"))?);
                }
            }
        }
        Ok(Self { registration, runs, records })
    }
}

/// Every record once and without gaps, every measured place sampled once, and everything that an agent holds as
/// acknowledged is among them, byte for byte.
pub fn once(evidence: &[Evidence], states: &[(HostId, std::path::PathBuf)], found: &mut Findings) -> Result<()> {
    let mut stored: BTreeMap<Key, &Record> = BTreeMap::new();
    let mut places = BTreeSet::new();
    for record in evidence.iter().flat_map(|e| &e.records) {
        if stored.insert((record.run, record.host.clone(), record.seq), record).is_some() {
            found.violated(format!("record {} of {} on {} is there twice", record.seq, record.run, record.host));
        }
        if let Body::Sample(s) = &record.body {
            found.samples += 1;
            let place = (record.run, record.host.clone(), format!("{:?} {}", s.kind, s.block), s.position, s.metric);
            if !places.insert(place) {
                found.violated(format!(
                    "{} on {}: block {} sampled twice at {}",
                    record.run, record.host, s.block, s.position
                ));
            }
        }
    }
    found.records += stored.len();
    let mut last: BTreeMap<(RunId, &HostId), u64> = BTreeMap::new();
    for (run, host, seq) in stored.keys() {
        let before = last.insert((*run, host), *seq).unwrap_or(0);
        if *seq != before + 1 {
            found.violated(format!("{run} on {host}: record {seq} follows {before}"));
        }
    }
    for (host, state) in states {
        let (spool, _, faults) = Spool::open(&state.join("spool"), 0)?;
        for fault in faults {
            found.violated(format!("the spool of {host} is damaged: {}", drums_common::telemetry::chain(&fault)));
        }
        for run in spool.runs() {
            for record in run.records()?.into_iter().filter(|r| r.seq <= run.acked()) {
                found.acknowledged += 1;
                match stored.get(&(record.run, record.host.clone(), record.seq)) {
                    Some(theirs) if **theirs == record => {}
                    Some(_) => {
                        found.violated(format!("{} on {host}: record {} is stored otherwise", record.run, record.seq))
                    }
                    None => found.violated(format!(
                        "{} on {host}: record {} was acknowledged and is not stored",
                        record.run, record.seq
                    )),
                }
            }
        }
    }
    Ok(())
}

/// Every run that was answered as made is closed, by its deadline, and no cancel that was answered is forgotten.
pub fn closed(runs: &Value, made: &[String], cancelled: &[String], found: &mut Findings) {
    let list = runs["runs"].as_array().cloned().unwrap_or_default();
    found.runs = list.len();
    let find = |id: &String| list.iter().find(|r| r["run"].as_str() == Some(id));
    for id in made.iter().filter(|id| find(id).is_none()) {
        found.violated(format!("{id} was answered as made and is not there"));
    }
    for run in &list {
        let text = |key: &str| run[key].as_str().unwrap_or_default();
        let (id, verdict) = (text("run"), text("verdict"));
        *found.verdicts.entry(verdict.to_owned()).or_default() += 1;
        let time = |key: &str| run[key].as_str().and_then(|t| t.parse::<jiff::Timestamp>().ok());
        match (time("closed"), time("deadline")) {
            (None, _) => found.violated(format!("{id} is not closed: {}", text("phase"))),
            (Some(closed), Some(deadline)) if closed.as_millisecond() > deadline.as_millisecond() + CLOSING_MS => {
                found.violated(format!("{id} closed at {closed}, long after its deadline {deadline}"));
            }
            _ => {}
        }
        if !run["leaked"].as_array().is_none_or(Vec::is_empty) {
            found.violated(format!("{id} leaked {}", run["leaked"]));
        }
    }
    for id in cancelled {
        let ending = find(id).and_then(|r| r["ending"].as_str()).unwrap_or_default();
        if !ending.starts_with("cancelled") {
            found.violated(format!("the cancel of {id} was answered, and it ended otherwise: {ending:?}"));
        }
    }
}

/// The verdict that each run got is the one that its evidence alone gives, computed here without any disturbance.
pub fn verdicts(evidence: &[Evidence], runs: &Value, found: &mut Findings) {
    for e in evidence {
        for meta in &e.runs {
            let id = meta.run.to_string();
            let list = runs["runs"].as_array().cloned().unwrap_or_default();
            let told = list.iter().find(|r| r["run"].as_str() == Some(&id)).map(|r| r["verdict"].clone());
            let records: Vec<Record> = e.records.iter().filter(|r| r.run == meta.run).cloned().collect();
            let again = analyse(&e.registration, std::slice::from_ref(meta), &records).summary.verdict;
            found.recomputed += 1;
            if told != serde_json::to_value(again).ok() {
                found.violated(format!("{id} was closed as {told:?}, and its evidence says {again}"));
            }
        }
    }
}

/// When a host's run was told that it is lost, and of which host.
#[derive(Clone, Debug)]
pub struct Judged {
    pub run: String,
    pub host: usize,
    pub at: Micros,
}

/// Nobody was judged dead who was heard within the life lease before, as far as that can be told from outside.
pub fn judged(judgements: &[Judged], faults: &[Happened], found: &mut Findings) {
    found.hosts_judged_lost = judgements.len();
    for j in judgements {
        let from = j.at.0 - LIFE_MS as i64 * 1_000;
        if let Some(heard) = last_heard(j.host, j.at.0, faults).filter(|heard| *heard > from) {
            let ago = (j.at.0 - heard) / 1_000;
            found.violated(format!("{}: host {} was judged lost, and was heard {ago} ms before", j.run, j.host));
        }
    }
}

/// When a host was certainly heard last before `at`: shortly before the end of a stretch without any fault that cuts it
/// off, if the stretch was long enough for it to be back.
fn last_heard(host: usize, at: i64, faults: &[Happened]) -> Option<i64> {
    let mut cuts: Vec<(i64, i64)> = faults
        .iter()
        .filter(|h| h.fault.kind.cuts_off())
        .filter(|h| h.fault.target == Target::Coordinator || h.fault.target == Target::Host(host))
        .map(|h| (h.began.0, h.ended.map_or(i64::MAX, |e| e.0)))
        .filter(|(began, _)| *began < at)
        .collect();
    cuts.sort_unstable();
    // Before the first fault everybody was connected.
    let (mut well_from, mut heard) = (i64::MIN / 2, None);
    for (began, ended) in cuts.into_iter().chain([(at, at)]) {
        if began - well_from >= BACK_AFTER_US + BEATS_US {
            heard = Some(began - BEATS_US);
        }
        well_from = well_from.max(ended);
    }
    heard
}

#[cfg(test)]
mod tests {
    use super::{
        super::schedule::{Fault, Kind},
        *,
    };

    fn cut(from_s: i64, to_s: i64, kind: Kind, target: Target) -> Happened {
        let fault = Fault { at_ms: 0, for_ms: 0, kind, target, amount: 0 };
        Happened { fault, began: Micros(from_s * 1_000_000), ended: Some(Micros(to_s * 1_000_000)) }
    }

    fn wrong(at_s: i64, faults: &[Happened]) -> bool {
        let mut found = Findings::default();
        let judgement = Judged { run: "run".to_owned(), host: 0, at: Micros(at_s * 1_000_000) };
        judged(&[judgement], faults, &mut found);
        !found.violations.is_empty()
    }

    #[test]
    fn a_judgement_needs_a_whole_life_lease_of_silence() {
        let partition = cut(10, 30, Kind::Partition, Target::Host(0));
        assert!(!wrong(25, &[partition]));
        assert!(wrong(18, &[partition]), "eight seconds of silence are no life lease");
        assert!(wrong(25, &[]));
        assert!(wrong(25, &[cut(10, 30, Kind::Partition, Target::Host(1))]), "another host's");
        assert!(wrong(25, &[cut(10, 30, Kind::Loss, Target::Host(0))]), "loss is no silence");
        assert!(!wrong(25, &[cut(10, 18, Kind::Kill, Target::Host(0)), cut(20, 30, Kind::Stall, Target::Coordinator)]));
        assert!(wrong(40, &[partition]), "it was back for ten seconds");
    }

    #[test]
    fn what_is_left_open_or_forgotten_is_found() {
        let run = |closed: Value, ending: &str| {
            serde_json::json!({"runs": [{
                "run": "run-1", "verdict": "pass", "phase": "running", "closed": closed, "ending": ending, "leaked": [],
                "deadline": "2027-01-01T00:00:00Z",
            }]})
        };
        let look = |runs: Value, cancelled: &[String]| {
            let mut found = Findings::default();
            closed(&runs, &["run-1".to_owned()], cancelled, &mut found);
            found.violations
        };
        let done = "every block ended";
        assert_eq!(look(run("2027-01-01T00:02:00Z".into(), done), &[]), [""; 0]);
        assert!(look(run(Value::Null, done), &[])[0].contains("not closed"));
        assert!(look(run("2027-01-01T00:03:00Z".into(), done), &[])[0].contains("long after"));
        assert!(look(run("2027-01-01T00:02:00Z".into(), done), &["run-1".to_owned()])[0].contains("otherwise"));
        assert!(look(serde_json::json!({"runs": []}), &[])[0].contains("not there"));
    }
}
