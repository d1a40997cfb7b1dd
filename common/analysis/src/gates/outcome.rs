//! Outcome gates: did the arm do its job? Nothing here voids a sample: a failure counts, as plus infinity, and a breach of
//! identity, saved state or reset fails the arm.

use std::collections::BTreeMap;

use drums_common::{
    evidence::{Identity, Teardown},
    experiment::{Experiment, Metric},
    ids::HostId,
};

use super::{Effect, Gate};
use crate::{collect::RunEvidence, summary::GateKind};

pub(super) struct Judged<'a> {
    /// By host, attempt and arm: what fails the arm and leaves no value of the session standing.
    pub(super) breaches: BTreeMap<(&'a HostId, usize, usize), Vec<String>>,
    /// The same for resets, which leave what came before them standing.
    pub(super) resets: BTreeMap<(&'a HostId, usize, usize), Vec<String>>,
    pub(super) gates: Vec<Gate>,
}

/// Where an identity was first seen: within one host for names and addresses (two hosts' sessions never meet on one
/// network), over the whole run for machine ids and random streams.
#[derive(Default)]
struct Seen<'a> {
    hostname: BTreeMap<(&'a HostId, &'a str), String>,
    address: BTreeMap<(&'a HostId, &'a str), String>,
    machine_id: BTreeMap<&'a str, String>,
    random: BTreeMap<&'a str, String>,
}

impl<'a> Seen<'a> {
    fn add(&mut self, host: &'a HostId, id: &'a Identity, who: &str, after_reset: bool) -> Vec<String> {
        let mut clashes = Vec::new();
        let mut clash = |what: &str, first: Option<&String>| {
            if let Some(first) = first {
                clashes.push(format!("same {what} as {first}"));
            }
        };
        // A reset may keep name and address of the session that it replaces; it never keeps secrets.
        if !after_reset {
            clash("hostname", self.hostname.get(&(host, id.hostname.as_str())));
            clash("address", self.address.get(&(host, id.address.as_str())));
        }
        clash("machine id", self.machine_id.get(id.machine_id.as_str()));
        clash("random stream", self.random.get(id.random.as_str()));
        self.remember(host, id, who, after_reset);
        clashes
    }

    fn remember(&mut self, host: &'a HostId, id: &'a Identity, who: &str, after_reset: bool) {
        if !after_reset {
            self.hostname.entry((host, &id.hostname)).or_insert_with(|| who.to_owned());
            self.address.entry((host, &id.address)).or_insert_with(|| who.to_owned());
        }
        self.machine_id.entry(&id.machine_id).or_insert_with(|| who.to_owned());
        self.random.entry(&id.random).or_insert_with(|| who.to_owned());
    }
}

pub(super) fn judge<'a>(experiment: &Experiment, evidence: &RunEvidence<'a>) -> Judged<'a> {
    let gate = |name, limit: &str| Gate::new(name, GateKind::Outcome, Effect::CountsAgainstArm, limit);
    let mut function = gate("function", "every session is ready in time and does its job");
    let mut identity =
        gate("identity", "siblings differ in hostname and address (per host), machine id and random stream (per run)");
    let mut state = gate("state", "restored sessions carry their template's state, cold ones carry none");
    let mut reset = gate("reset", "a reset leaves nothing behind and gives a new machine id and random stream");
    let mut teardown = Gate::new("teardown", GateKind::Outcome, Effect::Printed, "nothing is left on the host");
    let mut breaches: BTreeMap<(&'a HostId, usize, usize), Vec<String>> = BTreeMap::new();
    let mut resets: BTreeMap<(&'a HostId, usize, usize), Vec<String>> = BTreeMap::new();
    let mut seen = Seen::default();
    let (mut sessions, mut failed) = (0, 0);

    for (host, run) in &evidence.hosts {
        let mut states: BTreeMap<(&str, u32), &str> = BTreeMap::new();
        for t in &run.templates {
            let who = format!("the template of {} (build {} on {host})", t.arm, t.build);
            // Every sibling must differ from its template; templates are images of machines that never met.
            seen.remember(host, &t.identity, &who, false);
            states.insert((t.arm.as_str(), t.build), &t.state);
        }
        for (i, attempt) in run.attempts.iter().enumerate() {
            for row in &attempt.rows {
                let arm = &experiment.arms[row.arm];
                let Some(o) = row.outcome() else { continue };
                let place = format!("{}, arm {}", attempt.place(), arm.name);
                if attempt.measured() {
                    sessions += 1;
                    if !o.valid {
                        failed += 1;
                        let what = if o.failures.is_empty() { "failed".to_owned() } else { o.failures.join("; ") };
                        function.found(format!("{place}: {what}"));
                    }
                }
                // What never became ready has no identity to compare; its failure is on record above.
                if o.identity == Identity::default() {
                    if o.valid && attempt.measured() {
                        let what = "a valid session that says nothing of its identity";
                        identity.found(format!("{place}: {what}"));
                        breaches.entry((*host, i, row.arm)).or_default().push(what.to_owned());
                    }
                    continue;
                }
                let mut breach = |gate: &mut Gate, what: String| {
                    gate.found(format!("{place}: {what}"));
                    breaches.entry((*host, i, row.arm)).or_default().push(what);
                };
                for clash in seen.add(host, &o.identity, &place, false) {
                    breach(&mut identity, clash);
                }
                let want = if arm.kind.from_template() {
                    states.get(&(arm.name.as_str(), attempt.started.template_build)).copied()
                } else {
                    Some("")
                };
                // A template without a record is a matter of completeness.
                if let Some(want) = want
                    && want != o.state
                {
                    breach(&mut state, format!("its state is {:?}, its template's is {want:?}", o.state));
                }
                if arm.kind.from_template() && want == Some("") {
                    breach(&mut state, "its template has no state to carry".to_owned());
                }
                if o.identity_after_reset != Identity::default() {
                    // It came up again, so what the agent found wrong with the reset is a breach and no mere failure.
                    let mut found: Vec<String> = if o.failed_metrics.contains(&Metric::ResetToReady) {
                        o.failures.iter().filter(|f| f.starts_with("reset: ")).cloned().collect()
                    } else {
                        Vec::new()
                    };
                    let who = format!("{place} before its reset or another session");
                    let clashes = seen.add(host, &o.identity_after_reset, &who, true);
                    found.extend(clashes.into_iter().map(|c| format!("after the reset {c}")));
                    for what in found {
                        reset.found(format!("{place}: {what}"));
                        resets.entry((*host, i, row.arm)).or_default().push(what);
                    }
                }
            }
        }
        if let Some(c) = run.closed
            && let Teardown::Leaked(what) = &c.teardown
        {
            teardown.found(format!("{host} leaked {}", what.join(", ")));
        }
    }
    function.reading = format!("{} of {sessions} sessions valid", sessions - failed);
    identity.reading = format!("{} machine ids", seen.machine_id.len());
    state.reading = format!("{sessions} sessions");
    reset.reading = format!("{} random streams", seen.random.len());
    teardown.reading = if teardown.passed() { "clean".to_owned() } else { "leaked".to_owned() };
    Judged { breaches, resets, gates: vec![function, identity, state, reset, teardown] }
}
