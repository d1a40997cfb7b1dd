//! Where every sample went. What was begun comes from the orders of started blocks and from every session that any record
//! names; what became of it comes from outcomes and samples. The two are held against each other, and whatever has no end
//! on record is lost, and named.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    experiment::Experiment,
    ids::{HostId, RunId, SessionRef},
};

use crate::{
    collect::Row,
    gates::{BlockFate, EffectiveState, JudgedBlock, JudgedRow, JudgedRun, Taken},
    summary::Accounting,
};

/// Names beyond this number are counted, not listed.
const LISTED: usize = 20;

pub(crate) fn accounting(experiment: &Experiment, judged: &[JudgedRun<'_, '_>]) -> Accounting {
    let mut a = Accounting::default();
    let mut unaccounted: Vec<String> = Vec::new();
    let mut turn_of: BTreeMap<(RunId, &HostId, SessionRef), String> = BTreeMap::new();
    for run in judged {
        a.blocks_due += u64::from(experiment.hosts.count) * u64::from(experiment.design.blocks_per_host);
        for host in run.evidence.hosts.values() {
            a.late_records += host.late;
            unaccounted.extend(host.stray.iter().map(|s| format!("run {}: {s}", run.evidence.meta.number)));
        }
        for b in &run.blocks {
            let pooled = run.state == EffectiveState::Pooled;
            block(experiment, b, pooled, &mut a);
            for (position, name) in b.attempt.started.order.iter().enumerate() {
                let place = format!("run {}, {}, arm {name}", run.evidence.meta.number, b.attempt.place());
                let turn = b.attempt.rows.iter().zip(&b.rows).find(|(r, _)| r.position == position);
                let Some((row, judged)) = turn else {
                    unaccounted.push(format!("{place}: no such arm"));
                    continue;
                };
                unaccounted.extend(missing(b, row, judged).map(|what| format!("{place}: {what}")));
                for session in sessions(row) {
                    if let Some(other) = turn_of.insert((run.evidence.meta.run, b.attempt.host, session), place.clone())
                    {
                        unaccounted.push(format!("{place}: session {session} is also that of {other}"));
                    }
                }
            }
        }
    }
    a.balanced = unaccounted.is_empty()
        && a.samples_started == a.samples_valid + a.samples_failed + a.samples_voided + a.samples_lost;
    if unaccounted.len() > LISTED {
        let more = unaccounted.len() - LISTED;
        unaccounted.truncate(LISTED);
        unaccounted.push(format!("and {more} more"));
    }
    a.unaccounted = unaccounted;
    a
}

/// Counts of one started block.
fn block(experiment: &Experiment, b: &JudgedBlock<'_, '_>, pooled: bool, a: &mut Accounting) {
    let metrics = experiment.metrics.len() as u64;
    a.blocks_started += 1;
    a.samples_started += b.attempt.started.order.len() as u64 * metrics;
    let voided = matches!(b.fate, BlockFate::Voided(_));
    let counted = b.fate == BlockFate::Counted && pooled;
    a.blocks_voided += u64::from(voided);
    a.blocks_counted += u64::from(counted);
    for (row, judged) in b.attempt.rows.iter().zip(&b.rows) {
        // A second outcome claims its samples too, and nobody began them.
        for _ in &row.outcomes {
            let of = |t: fn(&Taken) -> bool| judged.values.values().filter(|v| t(v)).count() as u64;
            let (valid, failed) = (of(|t| matches!(t, Taken::Valid(_))), of(|t| matches!(t, Taken::Failed)));
            a.samples_lost += metrics - valid - failed;
            if voided {
                a.samples_voided += valid + failed;
                continue;
            }
            a.samples_valid += valid;
            a.samples_failed += failed;
            if !counted {
                a.samples_not_counted += valid + failed;
            }
        }
        if row.outcomes.is_empty() {
            a.samples_lost += metrics;
        }
    }
}

/// What a turn that was begun does not say.
fn missing<'r>(
    b: &'r JudgedBlock<'_, '_>,
    row: &'r Row<'_>,
    judged: &'r JudgedRow,
) -> impl Iterator<Item = String> + use<'r> {
    let seen: Vec<String> = sessions(row).iter().map(ToString::to_string).collect();
    let whole = match row.outcomes.len() {
        0 => {
            let seen = if seen.is_empty() { String::new() } else { format!(" of {}", seen.join(" and ")) };
            let why = if let BlockFate::Broken(why) = &b.fate { format!(" ({why})") } else { String::new() };
            Some(format!("no outcome{seen}{why}"))
        }
        // A session and the one that its reset made.
        1 if seen.len() <= 2 => None,
        1 => Some(format!("{} sessions with one outcome: {}", seen.len(), seen.join(", "))),
        n => Some(format!("{n} outcomes")),
    };
    let lost = judged.values.iter().filter(|(_, t)| **t == Taken::Lost && !row.outcomes.is_empty());
    whole.into_iter().chain(lost.map(|(metric, _)| format!("no {}", metric.as_str())))
}

/// Every session that any record of a turn names.
fn sessions(row: &Row<'_>) -> BTreeSet<SessionRef> {
    let samples = row.samples.values().flatten().map(|s| s.session);
    samples
        .chain(row.timelines.iter().map(|t| t.session))
        .chain(row.fidelity.iter().map(|f| f.session))
        .chain(row.outcomes.iter().map(|o| o.session))
        .collect()
}
