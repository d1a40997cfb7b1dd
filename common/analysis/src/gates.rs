//! Gates: what a run must be before its numbers count.
//!
//! Three kinds. *Environment* readings (blind to the arm) void whole blocks; too many voids, or voids that favour an arm,
//! make the run invalid. *Fidelity* asks whether the registered thing ran; a no makes the run invalid. *Outcome* asks
//! whether an arm did its job; it voids nothing: a failed session's latency is plus infinity, and a breach of identity,
//! state or reset fails the arm.

pub mod environment;
mod even;
pub mod fidelity;
pub mod outcome;

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    evidence::BlockResult,
    experiment::{Experiment, Metric},
    ids::{HostId, RunId, SessionRef},
};

use crate::{
    collect::{Attempt, HostRun, Row, RunEvidence, RunState},
    delay,
    summary::{GateKind, GateSummary},
};

/// Findings beyond this number are counted, not listed.
const LISTED: usize = 20;

/// What became of one attempt at a measured block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockFate {
    /// One of the first registered number of blocks without a void: counted.
    Counted,
    /// The environment was not fit.
    Voided(Vec<String>),
    /// Beyond the registered number: printed, not counted.
    Surplus,
    /// It did not complete.
    Broken(String),
}

/// A value of a metric as the analysis takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Taken {
    Valid(f64),
    /// Plus infinity.
    Failed,
    /// Neither a value nor a failure on record.
    Lost,
}

impl Taken {
    pub fn value(self) -> Option<f64> {
        match self {
            Self::Valid(v) => Some(v),
            Self::Failed => Some(f64::INFINITY),
            Self::Lost => None,
        }
    }
}

/// One arm in one block, judged.
#[derive(Clone, Debug)]
pub struct JudgedRow {
    pub arm: usize,
    pub position: usize,
    pub session_valid: bool,
    pub failures: Vec<String>,
    pub values: BTreeMap<Metric, Taken>,
}

#[derive(Debug)]
pub struct JudgedBlock<'e, 'a> {
    pub attempt: &'e Attempt<'a>,
    pub fate: BlockFate,
    /// In the order in which the block ran.
    pub rows: Vec<JudgedRow>,
}

/// A run after its gates. `pooled` runs carry the verdict.
#[derive(Debug)]
pub struct JudgedRun<'e, 'a> {
    pub evidence: &'e RunEvidence<'a>,
    pub state: EffectiveState,
    pub reasons: Vec<String>,
    pub gates: Vec<GateSummary>,
    /// Measured attempts, per host in order.
    pub blocks: Vec<JudgedBlock<'e, 'a>>,
    /// Breaches that fail an arm: arm, what.
    pub breaches: Vec<(usize, String)>,
    pub voids: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectiveState {
    Pooled,
    Invalid,
    Other(RunState),
}

impl EffectiveState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pooled => "complete",
            Self::Invalid => "invalid",
            Self::Other(s) => s.as_str(),
        }
    }
}

/// What a gate's failure does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    VoidsBlock,
    Invalidates,
    MakesIncomplete,
    CountsAgainstArm,
    /// Printed beside the verdict.
    Printed,
}

impl Effect {
    fn words(self) -> &'static str {
        match self {
            Self::VoidsBlock => "voids the block",
            Self::Invalidates => "makes the run invalid",
            Self::MakesIncomplete => "makes the run incomplete",
            Self::CountsAgainstArm => "counts against the arm",
            Self::Printed => "printed beside the verdict",
        }
    }
}

/// Collects findings of one gate.
#[derive(Debug)]
pub(crate) struct Gate {
    name: &'static str,
    kind: GateKind,
    effect: Effect,
    limit: String,
    pub(crate) reading: String,
    findings: Vec<String>,
    unanswered: bool,
}

impl Gate {
    pub(crate) fn new(name: &'static str, kind: GateKind, effect: Effect, limit: impl Into<String>) -> Self {
        Self {
            name,
            kind,
            effect,
            limit: limit.into(),
            reading: String::new(),
            findings: Vec::new(),
            unanswered: false,
        }
    }
    pub(crate) fn found(&mut self, what: impl Into<String>) {
        self.findings.push(what.into());
    }
    /// There is too little to answer from: neither a pass nor a finding.
    pub(crate) fn unanswered(&mut self, reading: String) {
        self.reading = reading;
        self.unanswered = true;
    }
    pub(crate) fn passed(&self) -> bool {
        self.findings.is_empty() && !self.unanswered
    }
    /// One line for the reasons of a run.
    fn reason(&self) -> Option<String> {
        let first = self.findings.first()?;
        let more = self.findings.len() - 1;
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        Some(format!("{}: {first}{more}", self.name))
    }
    fn summary(mut self, run: RunId) -> GateSummary {
        let passed = self.passed();
        if self.findings.len() > LISTED {
            let more = self.findings.len() - LISTED;
            self.findings.truncate(LISTED);
            self.findings.push(format!("and {more} more"));
        }
        GateSummary {
            run,
            name: self.name.to_owned(),
            kind: self.kind,
            passed,
            answer: match (passed, self.unanswered) {
                (true, _) => "holds",
                (false, true) => "n too small",
                (false, false) => "does not hold",
            }
            .to_owned(),
            effect: self.effect.words().to_owned(),
            limit: self.limit,
            reading: self.reading,
            findings: self.findings,
        }
    }
}

/// An attempt in a run's evidence: host and place in its list.
pub(crate) type AttemptKey<'a> = (&'a HostId, usize);

/// Judges one run.
pub fn judge<'e, 'a>(experiment: &Experiment, evidence: &'e RunEvidence<'a>) -> JudgedRun<'e, 'a> {
    let environment = environment::judge(experiment, evidence);
    let outcome = outcome::judge(experiment, evidence);

    let mut blocks = Vec::new();
    let wanted = experiment.design.blocks_per_host as usize;
    for (host, run) in &evidence.hosts {
        let mut counted = 0;
        for (i, attempt) in run.attempts.iter().enumerate().filter(|(_, a)| a.measured()) {
            let fate = match (attempt.ended, environment.voids.get(&(*host, i))) {
                (None, _) => BlockFate::Broken("it has no end".to_owned()),
                (Some(end), _) if !attempt.completed() => BlockFate::Broken(describe(&end.result)),
                (_, Some(reasons)) => BlockFate::Voided(reasons.clone()),
                _ if counted < wanted => {
                    counted += 1;
                    BlockFate::Counted
                }
                _ => BlockFate::Surplus,
            };
            let rows = attempt
                .rows
                .iter()
                .map(|row| {
                    let of = |all: &BTreeMap<(&HostId, usize, usize), Vec<String>>| {
                        all.get(&(*host, i, row.arm)).cloned().unwrap_or_default()
                    };
                    judged_row(experiment, row, &of(&outcome.breaches), &of(&outcome.resets))
                })
                .collect();
            blocks.push(JudgedBlock { attempt, fate, rows });
        }
    }

    let mut gates = environment.gates;
    gates.extend(fidelity::judge(experiment, evidence));
    gates.extend(delay::gate(experiment, evidence, &blocks));
    gates.push(completeness(experiment, evidence, &blocks));
    gates.extend(outcome.gates);

    let reasons_of = |effect: Effect| gates.iter().filter(|g| g.effect == effect).filter_map(Gate::reason).collect();
    let (invalid, incomplete): (Vec<String>, Vec<String>) =
        (reasons_of(Effect::Invalidates), reasons_of(Effect::MakesIncomplete));
    let mut reasons = Vec::new();
    let state = match evidence.meta.state {
        RunState::Complete if !invalid.is_empty() => {
            reasons.extend(invalid);
            EffectiveState::Invalid
        }
        RunState::Complete if !incomplete.is_empty() => {
            reasons.extend(incomplete);
            EffectiveState::Other(RunState::Incomplete)
        }
        RunState::Complete => EffectiveState::Pooled,
        other => {
            if !evidence.meta.reason.is_empty() {
                reasons.push(evidence.meta.reason.clone());
            }
            reasons.extend(invalid);
            // The missing pieces of a run that goes on are no news.
            if other != RunState::Running {
                reasons.extend(incomplete);
            }
            EffectiveState::Other(other)
        }
    };
    let breaches = outcome
        .breaches
        .iter()
        .chain(&outcome.resets)
        .flat_map(|((_, _, arm), what)| what.iter().map(|w| (*arm, w.clone())))
        .collect();
    let voids = blocks
        .iter()
        .filter_map(|b| match &b.fate {
            BlockFate::Voided(why) => Some(format!("{}: {}", b.attempt.place(), why.join("; "))),
            _ => None,
        })
        .collect();
    let gates = gates.into_iter().map(|g| g.summary(evidence.meta.run)).collect();
    JudgedRun { evidence, state, reasons, gates, blocks, breaches, voids }
}

fn describe(result: &BlockResult) -> String {
    match result {
        BlockResult::Completed => "it completed".to_owned(),
        BlockResult::Interrupted(why) => format!("interrupted: {why}"),
        BlockResult::Cancelled => "cancelled".to_owned(),
        BlockResult::Expired(why) => format!("expired: {why}"),
    }
}

fn judged_row(experiment: &Experiment, row: &Row<'_>, breaches: &[String], resets: &[String]) -> JudgedRow {
    let outcome = row.outcome();
    let mut failures: Vec<String> = outcome.map(|o| o.failures.clone()).unwrap_or_default();
    failures.extend(breaches.iter().chain(resets).filter(|b| !failures.contains(b)).cloned().collect::<Vec<_>>());
    let session_valid = outcome.is_some_and(|o| o.valid) && breaches.is_empty() && resets.is_empty();
    let values = experiment
        .metrics
        .iter()
        .map(|spec| {
            let value = row.samples.get(&spec.metric).and_then(|s| s.first()).map(|s| s.value);
            // Nothing takes no time: a zero is a reading that failed.
            let value = value.filter(|v| v.is_finite() && *v > 0.0);
            let taken = match outcome {
                None => Taken::Lost,
                Some(_) if !breaches.is_empty() => Taken::Failed,
                Some(_) if spec.metric == Metric::ResetToReady && !resets.is_empty() => Taken::Failed,
                Some(o) if o.failed_metrics.contains(&spec.metric) => Taken::Failed,
                Some(o) if !o.valid && o.failed_metrics.is_empty() => Taken::Failed,
                Some(o) => match value {
                    Some(v) => Taken::Valid(v),
                    // A session that failed owes nothing after its failure.
                    None if !o.valid => Taken::Failed,
                    None => Taken::Lost,
                },
            };
            (spec.metric, taken)
        })
        .collect();
    JudgedRow { arm: row.arm, position: row.position, session_valid, failures, values }
}

/// M15 and M26: every due thing is there, to the sample.
fn completeness(experiment: &Experiment, evidence: &RunEvidence<'_>, blocks: &[JudgedBlock<'_, '_>]) -> Gate {
    let wanted = experiment.design.blocks_per_host;
    let mut gate = Gate::new(
        "completeness",
        GateKind::Fidelity,
        Effect::MakesIncomplete,
        format!("{} hosts with {wanted} counted blocks of {} arms", experiment.hosts.count, experiment.arms.len()),
    );
    for host in experiment.hosts.names.iter().filter(|h| !evidence.hosts.contains_key(h)) {
        gate.found(format!("{host} left no evidence"));
    }
    if evidence.hosts.len() < experiment.hosts.count as usize {
        gate.found(format!("{} of {} hosts left evidence", evidence.hosts.len(), experiment.hosts.count));
    }
    for (host, run) in &evidence.hosts {
        host_completeness(experiment, host, run, &mut gate);
        let of_host = || blocks.iter().filter(|b| b.attempt.host == *host);
        for b in of_host() {
            if let BlockFate::Broken(why) = &b.fate {
                gate.found(format!("{}: {why}", b.attempt.place()));
            }
        }
        let counted: Vec<_> = of_host().filter(|b| b.fate == BlockFate::Counted).collect();
        if counted.len() < wanted as usize {
            let voided = of_host().filter(|b| matches!(b.fate, BlockFate::Voided(_))).count();
            gate.found(format!("{host} has {} of {wanted} blocks, {voided} more were voided", counted.len()));
        }
        let builds: BTreeSet<u32> = counted.iter().map(|b| b.attempt.started.template_build).collect();
        let due = experiment.design.template_builds_per_host as usize;
        if experiment.arms.iter().any(|a| a.kind.from_template()) && builds.len() < due {
            gate.found(format!("{host} used {} of {due} template builds", builds.len()));
        }
        for b in &counted {
            for (index, arm) in experiment.arms.iter().enumerate() {
                let place = || format!("{}, arm {}", b.attempt.place(), arm.name);
                let Some(row) = b.rows.iter().find(|r| r.arm == index) else {
                    gate.found(format!("{}: no session", place()));
                    continue;
                };
                for (metric, taken) in &row.values {
                    if *taken == Taken::Lost {
                        gate.found(format!("{}: no {}", place(), metric.as_str()));
                    }
                }
                for session in unread(b.attempt.rows.iter().filter(|r| r.arm == index)) {
                    gate.found(format!("{}: no fidelity reading of session {session}", place()));
                }
            }
        }
    }
    let counted = blocks.iter().filter(|b| b.fate == BlockFate::Counted).count();
    gate.reading = format!("{} hosts, {counted} counted blocks", evidence.hosts.len());
    gate
}

/// Sessions that carry values, the created one and the one that its reset made, and of which nobody read what ran.
fn unread<'r>(rows: impl Iterator<Item = &'r Row<'r>>) -> BTreeSet<SessionRef> {
    let mut out = BTreeSet::new();
    for row in rows {
        out.extend(row.outcomes.iter().filter(|o| o.valid).map(|o| o.session));
        out.extend(row.samples.values().flatten().map(|s| s.session));
        for read in &row.fidelity {
            out.remove(&read.session);
        }
    }
    out
}

fn host_completeness(experiment: &Experiment, host: &HostId, run: &HostRun<'_>, gate: &mut Gate) {
    if run.preflights.is_empty() {
        gate.found(format!("{host} has no preflight"));
    }
    match run.closed {
        None => gate.found(format!("{host} did not seal its evidence")),
        Some(c) if !c.reason.is_empty() => gate.found(format!("{host} ended early: {}", c.reason)),
        Some(_) => {}
    }
    if let (Some(first), Some(last)) = (run.gaps.first(), run.gaps.last()) {
        gate.found(format!("{host} lacks records between {first} and {last}"));
    }
    for s in &run.stray {
        gate.found(s.clone());
    }
    // Every template that a session came from has its record. One that could not be built has none, and its sessions'
    // failures count against the arm.
    let built: BTreeSet<(&str, u32)> = run.templates.iter().map(|t| (t.arm.as_str(), t.build)).collect();
    let mut missing = BTreeSet::new();
    for a in run.attempts.iter().filter(|a| a.measured() && a.completed()) {
        for row in a.rows.iter().filter(|r| r.outcome().is_some_and(|o| o.valid)) {
            let arm = &experiment.arms[row.arm];
            if arm.kind.from_template() && !built.contains(&(arm.name.as_str(), a.started.template_build)) {
                missing.insert((&arm.name, a.started.template_build));
            }
        }
    }
    for (arm, build) in missing {
        gate.found(format!("{host}: no record of template build {build} of arm {arm}"));
    }
}
