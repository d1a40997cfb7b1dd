//! What an agent is told: the whole truth each time, from the runs' states alone.

use drums_common::{
    clock::Micros,
    experiment::Registration,
    ids::Generation,
    wire::latest::{Desired, RunDesired, RunPhase},
};

use super::run::{Ending, HostRun, Phase, RunState};

/// A run beside its registration, one host's part in it, and what is committed of that host's evidence.
pub struct RunOfHost<'r> {
    pub state: &'r RunState,
    pub part: &'r HostRun,
    pub registration: &'r Registration,
    pub acked_seq: u64,
}

/// The order for one host, which has a part in all of these.
pub fn desired(generation: Generation, runs: &[RunOfHost<'_>], now: Micros) -> Desired {
    let runs = runs.iter().filter_map(|r| run_desired(generation, r, now)).collect();
    Desired { generation, runs }
}

/// None when the host has nothing to do for the run, or has done it all.
fn run_desired(generation: Generation, run: &RunOfHost<'_>, now: Micros) -> Option<RunDesired> {
    let h = run.part;
    if h.teardown.is_some() || run.state.started.is_none() {
        return None;
    }
    // Work given under an older generation was given to an earlier life of this host: it unwinds, whatever the run does.
    let fenced = h.lost || h.generation != generation;
    let phase = match (&run.state.phase, &run.state.ending) {
        _ if fenced => RunPhase::Cancel,
        (Phase::Planned | Phase::Placed, _) => return None,
        (Phase::Preflight, _) => RunPhase::Prepare,
        (Phase::Running | Phase::Collecting, _) => RunPhase::Measure,
        (Phase::Unwinding, Some(Ending::Done)) => RunPhase::Unwind,
        // A run that cannot be complete any more is not worth a minute of the machine.
        (Phase::Unwinding | Phase::Closed { .. }, _) => RunPhase::Cancel,
    };
    let deadline_left_ms = match run.state.deadline {
        Some(deadline) if run.state.live() => deadline.ms_since(now),
        _ => 0,
    };
    let experiment = &run.registration.experiment;
    Some(RunDesired {
        run: run.state.id,
        registration: run.registration.sha256,
        canonical: run.registration.canonical.clone(),
        // `register` refuses a spec whose workload cannot be pinned.
        workload_sha256: experiment.workload.sha256?,
        phase,
        granted: h.granted.clone(),
        acked_seq: run.acked_seq,
        deadline_left_ms,
    })
}

/// True if `new` must be sent although `old` was: something that an agent acts on differs. The clock and the
/// acknowledgement go their own ways (they are in the message for an agent that comes back).
pub fn differs(old: &Desired, new: &Desired) -> bool {
    let key = |d: &Desired| {
        let runs = d.runs.iter().map(|r| (r.run, r.phase, r.granted.clone())).collect::<Vec<_>>();
        (d.generation, runs)
    };
    key(old) != key(new)
}
