//! What runs ask of the analysis, and what it is given: a run's evidence as the store has it.
//!
//! Reads and computes off the driver's task; changes no run.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use drums_analysis::{self as analysis, RunMeta};
use drums_common::{evidence::Record, experiment::Registration, ids::HostId, verdict::Verdict};
use futures_util::future::BoxFuture;

use super::driver::PAGE;
use crate::{
    core::run::{Ending, Event, Pending, RunState},
    store::{Store, StoreError, StoreHandle},
};

/// What the analysis gets of a run: its meta data and every record.
pub fn analysis_inputs(s: &mut dyn Store, state: &RunState) -> Result<(RunMeta, Vec<Record>), StoreError> {
    let mut late: BTreeMap<HostId, BTreeSet<u64>> = BTreeMap::new();
    let mut records = Vec::new();
    for h in &state.hosts {
        let mut after = 0;
        loop {
            let rows = s.evidence(state.id, &h.host, after, PAGE)?;
            let Some(last) = rows.last().map(|r| r.record.seq) else { break };
            after = last;
            for row in rows {
                if row.late {
                    late.entry(h.host.clone()).or_default().insert(row.record.seq);
                }
                records.push(row.record);
            }
        }
    }
    Ok((run_meta(state, late), records))
}

fn run_meta(state: &RunState, late: BTreeMap<HostId, BTreeSet<u64>>) -> RunMeta {
    use analysis::RunState as Meta;
    let ended = match &state.ending {
        None => Meta::Running,
        Some(Ending::Done) => Meta::Complete,
        Some(Ending::Cancelled { .. }) => Meta::Cancelled,
        Some(Ending::Lost { .. }) => Meta::Lost,
        Some(Ending::Deadline | Ending::Interrupted { .. } | Ending::Refused { .. } | Ending::Unreadable { .. }) => {
            Meta::Incomplete
        }
    };
    let reason = match &state.ending {
        None | Some(Ending::Done) => String::new(),
        Some(ending) => ending.in_words(),
    };
    RunMeta { run: state.id, number: state.number, state: ended, reason, late }
}

/// Who answers what a run has to find out.
pub trait Analyst: Send + Sync {
    fn answer(
        &self,
        store: StoreHandle,
        registration: Arc<Registration>,
        state: RunState,
        pending: Pending,
    ) -> BoxFuture<'static, Result<Event, StoreError>>;
}

/// The analysis, on the evidence that is stored.
pub struct Analysis;

impl Analyst for Analysis {
    fn answer(
        &self,
        store: StoreHandle,
        registration: Arc<Registration>,
        state: RunState,
        pending: Pending,
    ) -> BoxFuture<'static, Result<Event, StoreError>> {
        // A task of its own: whoever waits for the answer does not always listen, and the store's queue must not wait for
        // one that stands in it.
        let answer = tokio::spawn(answered(store, registration, state, pending));
        Box::pin(async move { answer.await.unwrap_or(Err(StoreError::Closed)) })
    }
}

/// Reads a run's evidence and asks the analysis.
async fn answered(
    store: StoreHandle,
    registration: Arc<Registration>,
    state: RunState,
    pending: Pending,
) -> Result<Event, StoreError> {
    let (meta, records) = inputs(&store, &state).await?;
    let computed = tokio::task::spawn_blocking(move || match pending {
        Pending::FindVoids => Event::Voids(voids(&registration, meta, &records)),
        Pending::Analyse => {
            Event::Analysed { verdict: analysis::analyse(&registration, &[meta], &records).summary.verdict }
        }
    });
    Ok(match computed.await {
        Ok(event) => event,
        Err(e) => {
            // A panic of the analysis must not keep a run open for ever: the evidence stays, and the verdict says that
            // it could not be judged here.
            tracing::error!(run = %state.id, error = %e, "the analysis failed");
            match pending {
                Pending::FindVoids => Event::Voids(Vec::new()),
                Pending::Analyse => Event::Analysed { verdict: Verdict::Invalid },
            }
        }
    })
}

async fn inputs(store: &StoreHandle, state: &RunState) -> Result<(RunMeta, Vec<Record>), StoreError> {
    let state = state.clone();
    store.call(move |s| analysis_inputs(s, &state)).await
}

/// Measured blocks that an environment gate voids.
fn voids(registration: &Registration, mut meta: RunMeta, records: &[Record]) -> Vec<(HostId, u32)> {
    // Every block ended, as the caller knows: judged as if the run were over.
    meta.state = analysis::RunState::Complete;
    let metas = [meta];
    let (evidence, _) = analysis::collect::collect(registration, &metas, records);
    evidence
        .iter()
        .map(|e| analysis::gates::judge(&registration.experiment, e))
        .flat_map(|judged| {
            judged
                .blocks
                .iter()
                .filter(|b| matches!(b.fate, analysis::gates::BlockFate::Voided(_)))
                .map(|b| (b.attempt.host.clone(), b.attempt.started.block))
                .collect::<Vec<_>>()
        })
        .collect()
}
