//! What to do next: a pure function of the orders, the leases, what the spool holds and `now`.
//!
//! ```text
//! stop ──▶ Stop          run not listed, Unwind, Cancel, deadline or life lease over ──▶ Close
//! no preflight of this agent ──▶ Prepare          granted and never begun, dispatch lease holds ──▶ Block          else ──▶ Idle
//! ```
//! Closing comes before preparing and preparing before measuring: an end must not wait behind a beginning. A run that is
//! held up is passed over, so that it keeps neither the others nor a stop waiting.

use std::collections::BTreeMap;

use drums_common::{
    clock::MonoMicros,
    digest::Sha256,
    evidence::BlockResult,
    ids::RunId,
    wire::latest::{Desired, Grant, RunDesired, RunPhase},
};

use super::progress::{Progress, block_key};
use crate::net::Stop;

/// Everything that a decision is made from.
#[derive(Clone, Copy)]
pub struct Situation<'a> {
    /// Digest of this agent.
    pub agent: Sha256,
    pub desired: Option<&'a Desired>,
    pub desired_at: MonoMicros,
    pub stop: Option<&'a Stop>,
    pub may_take_new_block: bool,
    pub life_expired: bool,
    pub now: MonoMicros,
    /// Runs with a spool here, closed ones included.
    pub runs: &'a BTreeMap<RunId, Progress>,
    /// Runs for which something was tried that cannot be done for now.
    pub held_up: &'a BTreeMap<RunId, HeldUp>,
}

/// What is not tried for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeldUp {
    /// Nothing is begun for it; it may be closed.
    Beginnings,
    /// Its end cannot be written either.
    Everything,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Prepare(RunId),
    Block(RunId, Grant),
    /// Undo templates, write `Closed` with this reason (empty after an orderly end).
    Close(RunId, String),
    Idle(Idle),
    /// Undo templates and end; the runs named stay open for the next start.
    Stop(Vec<RunId>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Nothing is asked.
    Nothing,
    /// A block is granted, but the dispatch lease is lost.
    NoDispatch,
    /// Orders are not known yet since the agent started.
    NoOrders,
}

pub fn next_action(s: &Situation<'_>) -> Action {
    let open = || s.runs.iter().filter(|(_, p)| !p.closed).map(|(r, _)| *r);
    let held_up = |run: &RunId| s.held_up.get(run);
    let closable = || open().filter(|r| held_up(r) != Some(&HeldUp::Everything));
    let or_stop = |reason: &str| match closable().next() {
        Some(run) => Action::Close(run, reason.to_owned()),
        None => Action::Stop(open().collect()),
    };
    match s.stop {
        // The coordinator may see us again: open runs go on then.
        Some(Stop::Signal(_) | Stop::Broken(_) | Stop::Upgrade(_)) => return Action::Stop(open().collect()),
        Some(Stop::Retired { reason }) => {
            return or_stop(&format!("the host was retired: {reason}"));
        }
        Some(Stop::Refused(f)) => {
            return or_stop(&format!("the coordinator refused this agent: {f}"));
        }
        None => {}
    }
    if s.life_expired
        && let Some(run) = closable().next()
    {
        return Action::Close(run, "the life lease ended without word from the coordinator".to_owned());
    }
    let Some(desired) = s.desired else { return Action::Idle(Idle::NoOrders) };
    let listed = |run: &RunId| desired.runs.iter().find(|d| &d.run == run);
    if let Some(run) = closable().find(|r| listed(r).is_none()) {
        return Action::Close(run, "the coordinator no longer lists this run".to_owned());
    }
    let live = || {
        let over = |r: &RunId| s.runs.get(r).is_some_and(|p| p.closed) || held_up(r) == Some(&HeldUp::Everything);
        desired.runs.iter().filter(move |d| !over(&d.run))
    };
    if let Some((run, reason)) = live().find_map(|d| Some((d.run, end_of(d, s)?))) {
        return Action::Close(run, reason);
    }
    let ready = || live().filter(|d| held_up(&d.run).is_none());
    // By this agent: one that was put in another's place in the middle of a run says so before it measures.
    let prepared = |d: &RunDesired| s.runs.get(&d.run).is_some_and(|p| p.preflight == Some(s.agent));
    if let Some(d) = ready().find(|d| !prepared(d)) {
        return if s.may_take_new_block { Action::Prepare(d.run) } else { Action::Idle(Idle::NoDispatch) };
    }
    let next = ready().filter(|d| d.phase == RunPhase::Measure).find_map(|d| {
        let begun = &s.runs.get(&d.run)?.started;
        Some((d.run, d.granted.iter().find(|g| !begun.contains(&block_key(g.kind, g.block)))?))
    });
    match next {
        Some((run, grant)) if s.may_take_new_block => Action::Block(run, grant.clone()),
        Some(_) => Action::Idle(Idle::NoDispatch),
        None => Action::Idle(Idle::Nothing),
    }
}

/// Why this run is to be closed, if it is; empty for an orderly end.
fn end_of(d: &RunDesired, s: &Situation<'_>) -> Option<String> {
    match d.phase {
        RunPhase::Unwind => Some(String::new()),
        RunPhase::Cancel => Some("cancelled".to_owned()),
        RunPhase::Prepare | RunPhase::Measure => {
            deadline_passed(d, s.desired_at, s.now).then(|| "the run's deadline passed".to_owned())
        }
    }
}

/// On this machine's clock: what was left when the order arrived has gone by.
pub fn deadline_passed(d: &RunDesired, desired_at: MonoMicros, now: MonoMicros) -> bool {
    now >= desired_at.plus_ms(d.deadline_left_ms)
}

/// Why a block of `run` that is under way must end now, if it must. An `Unwind` lets it finish; a lost dispatch lease
/// does too.
pub fn interruption(run: RunId, s: &Situation<'_>) -> Option<BlockResult> {
    match s.stop {
        Some(Stop::Signal(name)) => {
            return Some(BlockResult::Interrupted(format!("the agent was stopped by {name}")));
        }
        Some(Stop::Broken(why)) => return Some(BlockResult::Interrupted(format!("the agent cannot go on: {why}"))),
        Some(Stop::Retired { reason }) => {
            return Some(BlockResult::Interrupted(format!("the host was retired: {reason}")));
        }
        Some(Stop::Refused(f)) => {
            return Some(BlockResult::Interrupted(format!("the coordinator refused this agent: {f}")));
        }
        // Asked for by this thread, between runs.
        Some(Stop::Upgrade(_)) | None => {}
    }
    if s.life_expired {
        return Some(BlockResult::Expired("the life lease ended".to_owned()));
    }
    let d = s.desired?.runs.iter().find(|d| d.run == run);
    match d {
        None => Some(BlockResult::Cancelled),
        Some(d) if d.phase == RunPhase::Cancel => Some(BlockResult::Cancelled),
        Some(d) if deadline_passed(d, s.desired_at, s.now) => {
            Some(BlockResult::Expired("the run's deadline passed".to_owned()))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use drums_common::{evidence::BlockKind, ids::Generation};

    use super::*;

    const RUN: RunId = RunId([1; 6]);
    const OTHER: RunId = RunId([2; 6]);
    const AGENT: Sha256 = Sha256([7; 32]);

    fn grant(block: u32) -> Grant {
        Grant { block, kind: BlockKind::Measured, order: vec![], template_build: 0, seed: u64::from(block) }
    }

    fn run(run: RunId, phase: RunPhase, blocks: &[u32]) -> RunDesired {
        RunDesired {
            run,
            registration: Sha256([0; 32]),
            canonical: String::new(),
            workload_sha256: Sha256([0; 32]),
            phase,
            granted: blocks.iter().map(|b| grant(*b)).collect(),
            acked_seq: 0,
            deadline_left_ms: 1_000,
        }
    }

    fn progress(preflight: bool, closed: bool, started: &[u32]) -> Progress {
        Progress {
            preflight: preflight.then_some(AGENT),
            closed,
            started: started.iter().map(|b| block_key(BlockKind::Measured, *b)).collect(),
            ..Progress::default()
        }
    }

    struct Case {
        runs: Vec<RunDesired>,
        spool: Vec<(RunId, Progress)>,
        stop: Option<Stop>,
        dispatch: bool,
        life_expired: bool,
        now_ms: u64,
        known: bool,
        held_up: BTreeMap<RunId, HeldUp>,
    }

    fn case(runs: Vec<RunDesired>, spool: Vec<(RunId, Progress)>) -> Case {
        let held_up = BTreeMap::new();
        Case { runs, spool, stop: None, dispatch: true, life_expired: false, now_ms: 0, known: true, held_up }
    }

    impl Case {
        fn with<T>(&self, f: impl FnOnce(&Situation<'_>) -> T) -> T {
            let desired = Desired { generation: Generation(1), runs: self.runs.clone() };
            f(&Situation {
                agent: AGENT,
                desired: self.known.then_some(&desired),
                desired_at: MonoMicros(0),
                stop: self.stop.as_ref(),
                may_take_new_block: self.dispatch,
                life_expired: self.life_expired,
                now: MonoMicros(self.now_ms * 1_000),
                runs: &self.spool.iter().cloned().collect(),
                held_up: &self.held_up,
            })
        }
        fn decide(&self) -> Action {
            self.with(next_action)
        }
    }

    fn reason(a: &Action) -> &str {
        match a {
            Action::Close(_, r) => r,
            other => panic!("not a close: {other:?}"),
        }
    }

    #[test]
    fn a_run_goes_from_prepare_over_its_blocks_to_closed() {
        use RunPhase::{Measure, Prepare, Unwind};
        assert_eq!(case(vec![], vec![]).decide(), Action::Idle(Idle::Nothing));
        assert_eq!(case(vec![run(RUN, Prepare, &[])], vec![]).decide(), Action::Prepare(RUN));
        let ready = || (RUN, progress(true, false, &[]));
        assert_eq!(case(vec![run(RUN, Prepare, &[])], vec![ready()]).decide(), Action::Idle(Idle::Nothing));
        // Prepared by another agent.
        let others = Progress { preflight: Some(Sha256([8; 32])), ..progress(true, false, &[0]) };
        assert_eq!(case(vec![run(RUN, Measure, &[0, 1])], vec![(RUN, others)]).decide(), Action::Prepare(RUN));
        // A grant without a preflight (a restart lost nothing, but the order may come in one piece).
        assert_eq!(case(vec![run(RUN, Measure, &[0])], vec![]).decide(), Action::Prepare(RUN));
        assert_eq!(case(vec![run(RUN, Measure, &[0, 1])], vec![ready()]).decide(), Action::Block(RUN, grant(0)));
        let one = vec![(RUN, progress(true, false, &[0]))];
        assert_eq!(case(vec![run(RUN, Measure, &[0, 1])], one.clone()).decide(), Action::Block(RUN, grant(1)));
        assert_eq!(case(vec![run(RUN, Measure, &[0])], one.clone()).decide(), Action::Idle(Idle::Nothing));
        assert_eq!(case(vec![run(RUN, Unwind, &[0, 1])], one).decide(), Action::Close(RUN, String::new()));
        let closed = vec![(RUN, progress(true, true, &[0]))];
        assert_eq!(case(vec![run(RUN, Measure, &[0, 1])], closed).decide(), Action::Idle(Idle::Nothing));
        // Closed without ever having been prepared: it still owes its last record.
        assert_eq!(case(vec![run(RUN, Unwind, &[])], vec![]).decide(), Action::Close(RUN, String::new()));
    }

    #[test]
    fn warm_up_and_measured_blocks_are_numbered_apart() {
        let mut d = run(RUN, RunPhase::Measure, &[0, 0]);
        d.granted[0].kind = BlockKind::WarmUp;
        let done = Progress {
            started: [block_key(BlockKind::WarmUp, 0)].into(),
            preflight: Some(AGENT),
            ..Progress::default()
        };
        assert_eq!(case(vec![d], vec![(RUN, done)]).decide(), Action::Block(RUN, grant(0)));
    }

    #[test]
    fn without_the_dispatch_lease_nothing_begins() {
        let spool = vec![(RUN, progress(true, false, &[]))];
        let mut c = case(vec![run(RUN, RunPhase::Measure, &[0])], spool);
        c.dispatch = false;
        assert_eq!(c.decide(), Action::Idle(Idle::NoDispatch));
        c.spool.clear();
        assert_eq!(c.decide(), Action::Idle(Idle::NoDispatch));
        c.runs[0].phase = RunPhase::Cancel;
        assert_eq!(reason(&c.decide()), "cancelled");
    }

    #[test]
    fn ends_come_before_beginnings() {
        let spool = vec![(RUN, progress(true, false, &[])), (OTHER, progress(true, false, &[]))];
        let c = case(vec![run(RUN, RunPhase::Measure, &[0]), run(OTHER, RunPhase::Unwind, &[])], spool.clone());
        assert_eq!(c.decide(), Action::Close(OTHER, String::new()));
        let c = case(vec![run(RUN, RunPhase::Measure, &[0])], spool);
        assert_eq!(reason(&c.decide()), "the coordinator no longer lists this run");
    }

    #[test]
    fn leases_and_deadlines_end_a_run() {
        let spool = vec![(RUN, progress(true, false, &[]))];
        let mut c = case(vec![run(RUN, RunPhase::Measure, &[0])], spool);
        c.now_ms = 999;
        assert_eq!(c.decide(), Action::Block(RUN, grant(0)));
        assert_eq!(c.with(|s| interruption(RUN, s)), None);
        c.now_ms = 1_000;
        assert_eq!(reason(&c.decide()), "the run's deadline passed");
        assert!(matches!(c.with(|s| interruption(RUN, s)), Some(BlockResult::Expired(_))));
        c.now_ms = 0;
        c.life_expired = true;
        assert!(reason(&c.decide()).contains("life lease"));
        assert!(matches!(c.with(|s| interruption(RUN, s)), Some(BlockResult::Expired(_))));
    }

    #[test]
    fn before_the_first_order_open_runs_are_left_alone() {
        let mut c = case(vec![], vec![(RUN, progress(true, false, &[]))]);
        c.known = false;
        assert_eq!(c.decide(), Action::Idle(Idle::NoOrders));
        assert_eq!(c.with(|s| interruption(RUN, s)), None);
    }

    #[test]
    fn a_signal_leaves_runs_open_and_a_retirement_closes_them() {
        let spool = vec![(RUN, progress(true, false, &[])), (OTHER, progress(true, true, &[]))];
        let mut c = case(vec![run(RUN, RunPhase::Measure, &[0])], spool);
        c.stop = Some(Stop::Signal("SIGTERM"));
        assert_eq!(c.decide(), Action::Stop(vec![RUN]));
        assert_eq!(
            c.with(|s| interruption(RUN, s)),
            Some(BlockResult::Interrupted("the agent was stopped by SIGTERM".into()))
        );
        c.stop = Some(Stop::Retired { reason: "host release".into() });
        assert!(reason(&c.decide()).contains("host release"));
        c.spool[0].1.closed = true;
        assert_eq!(c.decide(), Action::Stop(vec![]));
    }

    #[test]
    fn a_run_that_is_held_up_keeps_nobody_waiting() {
        let spool = vec![(RUN, progress(true, false, &[])), (OTHER, progress(true, false, &[]))];
        let both = || vec![run(RUN, RunPhase::Measure, &[0]), run(OTHER, RunPhase::Measure, &[3])];
        let mut c = case(both(), spool);
        c.held_up.insert(RUN, HeldUp::Beginnings);
        assert_eq!(c.decide(), Action::Block(OTHER, grant(3)));
        c.held_up.insert(OTHER, HeldUp::Beginnings);
        assert_eq!(c.decide(), Action::Idle(Idle::Nothing));
        // Ends are still due.
        c.runs[0].phase = RunPhase::Cancel;
        assert_eq!(reason(&c.decide()), "cancelled");
        c.held_up.insert(RUN, HeldUp::Everything);
        assert_eq!(c.decide(), Action::Idle(Idle::Nothing));
        c.runs.remove(0);
        assert_eq!(c.decide(), Action::Idle(Idle::Nothing));
        c.life_expired = true;
        assert!(matches!(c.decide(), Action::Close(OTHER, _)));
        c.stop = Some(Stop::Retired { reason: "host release".into() });
        assert!(matches!(c.decide(), Action::Close(OTHER, _)));
        // An end that cannot be written does not keep the agent from ending.
        c.held_up.insert(OTHER, HeldUp::Everything);
        assert_eq!(c.decide(), Action::Stop(vec![RUN, OTHER]));
        c.stop = Some(Stop::Signal("SIGTERM"));
        assert_eq!(c.decide(), Action::Stop(vec![RUN, OTHER]));
    }

    #[test]
    fn only_a_cancellation_stops_a_block() {
        let spool = vec![(RUN, progress(true, false, &[0]))];
        for (phase, want) in [
            (RunPhase::Measure, None),
            (RunPhase::Prepare, None),
            (RunPhase::Unwind, None),
            (RunPhase::Cancel, Some(BlockResult::Cancelled)),
        ] {
            let mut c = case(vec![run(RUN, phase, &[0])], spool.clone());
            c.dispatch = false;
            assert_eq!(c.with(|s| interruption(RUN, s)), want, "{phase:?}");
        }
        let c = case(vec![run(OTHER, RunPhase::Measure, &[])], spool);
        assert_eq!(c.with(|s| interruption(RUN, s)), Some(BlockResult::Cancelled));
    }
}
