//! Puts the records of all runs in their places: run, host, block, arm. Judges nothing.
//!
//! A block is read from its `BlockStarted` on; a record belongs to the latest started block of its number on its host. A
//! block that an agent began twice (it died in between) is two attempts.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    digest::Sha256,
    evidence::{
        BlockEnded, BlockKind, BlockResult, BlockStarted, Body, Closed, Fidelity, Outcome, Preflight, Record, Sample,
        Template, Timeline,
    },
    experiment::{Experiment, Metric, Registration},
    ids::{ArmName, HostId, RunId},
};
use serde::{Deserialize, Serialize};

/// How a run ended, as the coordinator's store knows it: evidence alone cannot tell a lost run from a slow one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    Running,
    /// Every host sealed its evidence and all of it was committed.
    Complete,
    Incomplete,
    Lost,
    Cancelled,
}

impl RunState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Complete => "complete",
            Self::Incomplete => "incomplete",
            Self::Lost => "lost",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What the store knows of a run beyond its records. `runs.json` of a bundle is a list of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunMeta {
    pub run: RunId,
    /// 1, 2, 3 ... of the registration, in order of start.
    pub number: u32,
    pub state: RunState,
    /// Why it is not complete; empty for a complete one.
    pub reason: String,
    /// Sequence numbers of records that arrived under an old lease generation: kept and printed, not counted.
    #[serde(default)]
    pub late: BTreeMap<HostId, BTreeSet<u64>>,
}

/// Everything one arm left in one block.
#[derive(Debug, Default)]
pub struct Row<'a> {
    pub arm: usize,
    pub position: usize,
    pub outcomes: Vec<&'a Outcome>,
    pub fidelity: Vec<&'a Fidelity>,
    pub samples: BTreeMap<Metric, Vec<&'a Sample>>,
    pub timelines: Vec<&'a Timeline>,
}

impl<'a> Row<'a> {
    pub fn outcome(&self) -> Option<&'a Outcome> {
        self.outcomes.first().copied()
    }
}

/// One start of one block on one host.
#[derive(Debug)]
pub struct Attempt<'a> {
    pub host: &'a HostId,
    pub started: &'a BlockStarted,
    pub ended: Option<&'a BlockEnded>,
    /// In the order in which the block ran its arms.
    pub rows: Vec<Row<'a>>,
}

impl Attempt<'_> {
    pub fn measured(&self) -> bool {
        self.started.kind == BlockKind::Measured
    }
    pub fn completed(&self) -> bool {
        self.ended.is_some_and(|e| e.result == BlockResult::Completed)
    }
    /// For findings: `h1 block 3`, `h1 warm-up block 0`.
    pub fn place(&self) -> String {
        let kind = if self.measured() { "" } else { "warm-up " };
        format!("{} {kind}block {}", self.host, self.started.block)
    }
}

#[derive(Debug, Default)]
pub struct HostRun<'a> {
    pub preflights: Vec<&'a Preflight>,
    pub templates: Vec<&'a Template>,
    pub attempts: Vec<Attempt<'a>>,
    pub closed: Option<&'a Closed>,
    pub last_seq: u64,
    pub records: u64,
    pub late: u64,
    /// Sequence numbers that no record has.
    pub gaps: Vec<u64>,
    /// Things that fit nowhere, in words.
    pub stray: Vec<String>,
}

#[derive(Debug)]
pub struct RunEvidence<'a> {
    pub meta: &'a RunMeta,
    pub hosts: BTreeMap<&'a HostId, HostRun<'a>>,
    /// Digests of other registrations that records of this run carry.
    pub foreign: BTreeSet<Sha256>,
}

/// All runs in order of their number, and records of runs that no [`RunMeta`] names.
pub fn collect<'a>(
    registration: &Registration,
    runs: &'a [RunMeta],
    records: &'a [Record],
) -> (Vec<RunEvidence<'a>>, BTreeSet<RunId>) {
    let mut metas: Vec<&RunMeta> = runs.iter().collect();
    metas.sort_by_key(|m| (m.number, m.run));
    let mut by_run: BTreeMap<RunId, BTreeMap<&HostId, Vec<&Record>>> = BTreeMap::new();
    for r in records {
        by_run.entry(r.run).or_default().entry(&r.host).or_default().push(r);
    }
    let mut out = Vec::new();
    for meta in metas {
        let mut evidence = RunEvidence { meta, hosts: BTreeMap::new(), foreign: BTreeSet::new() };
        for (host, mut records) in by_run.remove(&meta.run).unwrap_or_default() {
            records.sort_by_key(|r| r.seq);
            evidence.foreign.extend(records.iter().map(|r| r.registration).filter(|s| *s != registration.sha256));
            let late = meta.late.get(host);
            evidence.hosts.insert(host, host_run(&registration.experiment, host, &records, late));
        }
        out.push(evidence);
    }
    (out, by_run.into_keys().collect())
}

fn host_run<'a>(
    experiment: &Experiment,
    host: &'a HostId,
    records: &[&'a Record],
    late: Option<&BTreeSet<u64>>,
) -> HostRun<'a> {
    let mut run = HostRun::default();
    for record in records {
        if record.seq == run.last_seq {
            run.stray.push(format!("{host} has two records number {}", record.seq));
            continue;
        }
        // Listing a million missing numbers helps nobody; the first few name the place.
        run.gaps.extend((run.last_seq + 1..record.seq).take(20));
        run.last_seq = record.seq;
        run.records += 1;
        if late.is_some_and(|l| l.contains(&record.seq)) {
            run.late += 1;
            continue;
        }
        place(experiment, host, &mut run, record);
    }
    run
}

fn place<'a>(experiment: &Experiment, host: &'a HostId, run: &mut HostRun<'a>, record: &'a Record) {
    let lost = |what: &str, block: u32, arm: &ArmName| {
        format!(
            "{host} record {}: {what} of arm {arm} in block {block}, which never started or has no such arm",
            record.seq
        )
    };
    let stray = match &record.body {
        Body::Preflight(p) => {
            run.preflights.push(p);
            None
        }
        Body::Template(t) => {
            run.templates.push(t);
            None
        }
        Body::BlockStarted(b) => {
            run.attempts.push(attempt(experiment, host, b));
            None
        }
        Body::Sample(s) => match row(experiment, run, s.block, Some(s.kind), &s.arm) {
            Some(row) => {
                row.samples.entry(s.metric).or_default().push(s);
                None
            }
            None => Some(lost("a sample", s.block, &s.arm)),
        },
        Body::Timeline(t) => match row(experiment, run, t.block, None, &t.arm) {
            Some(row) => {
                row.timelines.push(t);
                None
            }
            None => Some(lost("a timeline", t.block, &t.arm)),
        },
        Body::Fidelity(f) => match row(experiment, run, f.block, None, &f.arm) {
            Some(row) => {
                row.fidelity.push(f);
                None
            }
            None => Some(lost("a fidelity reading", f.block, &f.arm)),
        },
        Body::Outcome(o) => match row(experiment, run, o.block, Some(o.kind), &o.arm) {
            Some(row) => {
                row.outcomes.push(o);
                None
            }
            None => Some(lost("an outcome", o.block, &o.arm)),
        },
        Body::BlockEnded(e) => {
            let open = run.attempts.iter_mut().rev().find(|a| a.started.block == e.block && a.started.kind == e.kind);
            match open {
                Some(a) if a.ended.is_none() => {
                    a.ended = Some(e);
                    None
                }
                _ => Some(format!("{host} record {}: the end of block {}, which never started", record.seq, e.block)),
            }
        }
        Body::Closed(c) => {
            run.closed = Some(c);
            None
        }
        // Logs are for people, and a later version's records are not for this one.
        _ => None,
    };
    run.stray.extend(stray);
}

fn attempt<'a>(experiment: &Experiment, host: &'a HostId, started: &'a BlockStarted) -> Attempt<'a> {
    let rows = started
        .order
        .iter()
        .enumerate()
        .filter_map(|(position, name)| {
            let arm = experiment.arms.iter().position(|a| &a.name == name)?;
            Some(Row { arm, position, ..Row::default() })
        })
        .collect();
    Attempt { host, started, ended: None, rows }
}

fn row<'r, 'a>(
    experiment: &Experiment,
    run: &'r mut HostRun<'a>,
    block: u32,
    kind: Option<BlockKind>,
    arm: &ArmName,
) -> Option<&'r mut Row<'a>> {
    let arm = experiment.arms.iter().position(|a| &a.name == arm)?;
    run.attempts
        .iter_mut()
        .rev()
        .find(|a| a.started.block == block && kind.is_none_or(|k| a.started.kind == k))?
        .rows
        .iter_mut()
        .find(|r| r.arm == arm)
}
