//! What the measuring side sees of the network: a handle of plain, synchronous calls.
//!
//! State is level-triggered: `view` is the whole truth at an instant, `wait` returns when it changed. The network tasks
//! are the other users of the same state.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use drums_common::{
    clock::{Clock, MonoMicros},
    digest::Sha256,
    failure::Failure,
    ids::{Generation, RunId},
    lease::AgentLease,
    machine::HostFacts,
    wire::latest::{Activity, Beat, BeatAck, Desired, ToCoordinator, Upgrade, Welcome},
};
use tokio::sync::{Notify, mpsc, oneshot};

mod keep;

use keep::Keeper;
pub use keep::KeptLease;

/// Messages waiting for a connection; more than this and the oldest are dropped (they are for people, evidence is not
/// among them).
const OUTBOX: usize = 16;
/// A quiet interval waits this long for its announcement to be acknowledged. On a lost datagram the interval begins
/// anyway: the coordinator then shows the host as silent, which harms nobody.
const ANNOUNCE_WAIT: Duration = Duration::from_millis(100);
/// QUIC acknowledges the answer to the announcement after 25 ms at most; the interval begins after that, so that the
/// packet does not come into it.
const LAST_PACKET: Duration = Duration::from_millis(30);
/// A young connection has timers of its own: keys of the handshake are discarded three probe time-outs after it, the path's
/// packet size is searched.
const SETTLED_MS: u64 = 1_000;

/// A started agent gives its coordinator as long as the dispatch lease is by default before it takes it for gone.
const FIRST_CONTACT_MS: u64 = 10_000;
/// No beat has this number.
const NOT_ANNOUNCED: u64 = 0;

/// Why the agent is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A signal: finish orderly.
    Signal(&'static str),
    /// The agent cannot go on; whoever started it starts it again.
    Broken(String),
    /// The coordinator let this host go.
    Retired { reason: String },
    /// The coordinator will not have this agent.
    Refused(Failure),
    /// Another build, which was fetched, is to take this agent's place.
    Upgrade(Upgrade),
}

/// The whole truth at an instant.
#[derive(Clone, Debug)]
pub struct View {
    /// Grows with every change but lease renewals; pass it to `wait`.
    pub version: u64,
    pub connected: bool,
    pub generation: Generation,
    /// The last order, also while disconnected. `None` until the first one since the agent started.
    pub desired: Option<Arc<Desired>>,
    /// CLOCK_BOOTTIME when it arrived: what is left of a deadline counts from here.
    pub desired_at: MonoMicros,
    /// The last order was for another build of this agent.
    pub upgrade: Option<Upgrade>,
    pub stop: Option<Stop>,
}

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("cannot fetch {what}: {failure}")]
    Failed { what: Fetch, failure: Box<Failure> },
    #[error("cannot fetch {what}: the network side has ended")]
    Ended { what: Fetch },
}

/// What the coordinator keeps for agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    Workload(Sha256),
    /// One artifact of this many bytes.
    File(Sha256, u64),
}

impl std::fmt::Display for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Workload(sha256) => write!(f, "workload {}", sha256.short()),
            Self::File(sha256, _) => write!(f, "artifact {}", sha256.short()),
        }
    }
}

pub(super) struct FetchRequest {
    pub what: Fetch,
    pub answer: oneshot::Sender<Result<PathBuf, Failure>>,
}

#[derive(Debug)]
struct Quiet {
    declared: MonoMicros,
    until: MonoMicros,
    bound_ms: u64,
    /// Number of the announcing beat once it was sent.
    announced: Option<u64>,
    acknowledged: bool,
}

#[derive(Debug)]
struct State {
    version: u64,
    lease: AgentLease,
    connected: bool,
    desired: Option<Arc<Desired>>,
    desired_at: MonoMicros,
    upgrade: Option<Upgrade>,
    stop: Option<Stop>,
    quiet: Option<Quiet>,
    activity: Activity,
    progress: u64,
    beats: u64,
    /// When this link was made.
    began: MonoMicros,
    /// When this connection was welcomed.
    welcomed: MonoMicros,
    /// When the last acknowledgement (or welcome) arrived, and when the last quiet interval ended.
    answered: MonoMicros,
    hushed: MonoMicros,
    facts: HostFacts,
    outbox: VecDeque<ToCoordinator>,
}

/// The same state as the network tasks see it, and as whoever plays them in a simulation does.
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the beat task: a quiet interval began or ended.
    pub(super) beat_now: Notify,
    /// Wakes the link task: something is in the outbox, or the agent is to stop.
    pub(super) outbox_filled: Notify,
    /// Wakes senders that wait for the end of a quiet interval.
    pub(super) quiet_ended: Notify,
    /// Only on a paid host.
    keeper: OnceLock<Keeper>,
    /// Wakes who writes the lease down: it was renewed.
    renewed: Notify,
    pub(super) clock: Arc<dyn Clock>,
}

/// The measuring side's handle. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    pub(super) shared: Arc<Shared>,
    fetch: mpsc::Sender<FetchRequest>,
}

impl Link {
    pub(super) fn new(clock: Arc<dyn Clock>, facts: HostFacts) -> (Self, mpsc::Receiver<FetchRequest>) {
        let (fetch, requests) = mpsc::channel(4);
        let state = State {
            version: 1,
            lease: AgentLease::default(),
            connected: false,
            desired: None,
            desired_at: MonoMicros(0),
            upgrade: None,
            stop: None,
            quiet: None,
            activity: Activity::Idle,
            progress: 0,
            beats: 0,
            began: clock.boottime(),
            welcomed: MonoMicros(0),
            answered: MonoMicros(0),
            hushed: MonoMicros(0),
            facts,
            outbox: VecDeque::new(),
        };
        let shared = Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            beat_now: Notify::new(),
            outbox_filled: Notify::new(),
            quiet_ended: Notify::new(),
            keeper: OnceLock::new(),
            renewed: Notify::new(),
            clock,
        };
        (Self { shared: Arc::new(shared), fetch }, requests)
    }

    /// A link whose network side is played by the caller.
    pub fn unplugged(clock: Arc<dyn Clock>, facts: HostFacts) -> Self {
        Self::new(clock, facts).0
    }

    pub fn network_side(&self) -> &Shared {
        &self.shared
    }

    /// A link without a network, for tests of the measuring side: orders are given by `offer`, beats are not sent, and
    /// the leases are whatever `welcome` says from now on.
    pub fn detached(clock: Arc<dyn Clock>, facts: HostFacts, welcome: &Welcome) -> Self {
        let (link, _) = Self::new(clock, facts);
        let now = link.shared.clock.boottime();
        // A fresh lease holds generation 0, so no welcome is stale.
        let _ = link.shared.lock().lease.welcomed(welcome, now);
        link
    }

    /// Replaces the order, as an arriving `Desired` does.
    pub fn offer(&self, desired: Desired) {
        self.shared.desired(desired);
    }

    /// What a detached link would say next.
    pub fn said(&self) -> Option<ToCoordinator> {
        self.shared.next_to_say()
    }

    pub fn view(&self) -> View {
        self.shared.lock().view()
    }

    /// Returns when the view's version is no longer `seen`, or after `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) -> View {
        let state = self.shared.lock();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |s| s.version == seen)
            .unwrap_or_else(PoisonError::into_inner);
        state.view()
    }

    /// The dispatch lease holds. After a quiet interval it may take a beat's round trip until it does again.
    pub fn may_take_new_block(&self) -> bool {
        let now = self.shared.clock.boottime();
        self.shared.lock().lease.may_take_new_block(now)
    }

    /// Waits until the dispatch lease holds, at most `timeout`.
    pub fn wait_for_dispatch(&self, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |s| {
                s.stop.is_none() && !s.lease.may_take_new_block(self.shared.clock.boottime())
            })
            .unwrap_or_else(PoisonError::into_inner);
        state.lease.may_take_new_block(self.shared.clock.boottime())
    }

    /// The life lease lapsed: stop, unwind, seal.
    pub fn life_expired(&self) -> bool {
        let now = self.shared.clock.boottime();
        self.shared.lock().lease.life_expired(now)
    }

    /// Milliseconds until the life lease or the deadline ends, whichever is first. `deadline` is on CLOCK_BOOTTIME:
    /// `view.desired_at` plus what was left then.
    pub fn life_left_ms(&self, deadline: Option<MonoMicros>) -> u64 {
        let now = self.shared.clock.boottime();
        self.shared.lock().lease.life_left_ms(now, deadline)
    }

    /// The generation to put on records and into names.
    pub fn generation(&self) -> Generation {
        self.shared.lock().lease.generation()
    }

    /// What beats say this agent is doing.
    pub fn set_activity(&self, activity: Activity) {
        self.shared.lock().activity = activity;
    }

    /// A run made progress (evidence was written).
    pub fn progressed(&self) {
        self.shared.lock().progress += 1;
    }

    /// Declares silence of at most `bound` and begins it: from the return until the guard is dropped, the network side
    /// sends nothing. Overrunning the bound is a failure that the coordinator sees.
    pub fn quiet(&self, bound: Duration) -> QuietGuard {
        let guard = self.declare_quiet(bound);
        let waiting = |s: &mut State| s.connected && s.quiet.as_ref().is_some_and(|q| !q.acknowledged);
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), ANNOUNCE_WAIT, waiting);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        guard.begin();
        // The coordinator may have agreed to more than the lease's own end.
        self.shared.write_lease(true);
        let state = self.shared.lock();
        let age_ms = self.shared.clock.boottime().ms_since(state.welcomed);
        let last_packet = LAST_PACKET.max(Duration::from_millis(SETTLED_MS.saturating_sub(age_ms)));
        // Nothing else ends this wait than the end of the connection.
        drop(self.shared.changed.wait_timeout_while(state, last_packet, |s| s.connected));
        guard
    }

    /// Declares silence: one more beat announces it, for which whoever declares waits a little before it begins.
    pub fn declare_quiet(&self, bound: Duration) -> QuietGuard {
        let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX).max(1);
        let mut state = self.shared.lock();
        let declared = self.shared.clock.boottime();
        // Without a connection there is nobody to announce it to; one that is made meanwhile keeps silent too.
        let announced = if state.connected { None } else { Some(NOT_ANNOUNCED) };
        let until = declared.plus_ms(bound_ms);
        state.quiet = Some(Quiet { declared, until, bound_ms, announced, acknowledged: false });
        drop(state);
        self.shared.beat_now.notify_one();
        QuietGuard { shared: self.shared.clone() }
    }

    /// A declared silence lasts: a timed window is open.
    pub fn is_quiet(&self) -> bool {
        self.shared.lock().quiet.is_some()
    }

    /// Fetches a workload by digest, verifies it, and returns its folder (with `manifest.json` and `tree`). Blocks; a
    /// workload that is there already is only verified. Not to be called from an async task.
    pub fn fetch_workload(&self, workload: Sha256) -> Result<PathBuf, FetchError> {
        self.fetch(Fetch::Workload(workload))
    }

    /// As `fetch_workload`, for one artifact: a verified file, which is the caller's to move away.
    pub fn fetch_file(&self, sha256: Sha256, bytes: u64) -> Result<PathBuf, FetchError> {
        self.fetch(Fetch::File(sha256, bytes))
    }

    fn fetch(&self, what: Fetch) -> Result<PathBuf, FetchError> {
        let (answer, answered) = oneshot::channel();
        let ended = || FetchError::Ended { what };
        self.fetch.blocking_send(FetchRequest { what, answer }).map_err(|_| ended())?;
        let answer = answered.blocking_recv().map_err(|_| ended())?;
        answer.map_err(|failure| FetchError::Failed { what, failure: Box::new(failure) })
    }

    /// Tells the coordinator that what it ordered did not take over.
    pub fn upgrade_failed(&self, upgrade: Upgrade, failure: Failure) {
        self.shared.say(ToCoordinator::UpgradeFailed { upgrade, failure });
    }

    /// Tells the coordinator at once why a run's demand cannot be met. For people; the run ends by evidence.
    pub fn refuse_demand(&self, run: RunId, failure: Failure) {
        self.shared.say(ToCoordinator::Refused { run, failure });
    }

    /// Facts after a fresh preflight.
    pub fn set_facts(&self, facts: HostFacts) {
        self.shared.lock().facts = facts.clone();
        self.shared.say(ToCoordinator::Facts(Box::new(facts)));
    }

    /// Asks everything to end. The first reason stays.
    pub fn stop(&self, stop: Stop) {
        self.shared.stop(stop);
    }
}

/// Silence, until dropped.
#[must_use = "silence ends when the guard is dropped"]
pub struct QuietGuard {
    shared: Arc<Shared>,
}

impl QuietGuard {
    /// From here on nothing is sent, announced or not: a beat that comes too late must not come into it.
    pub fn begin(&self) {
        if let Some(q) = &mut self.shared.lock().quiet {
            q.announced.get_or_insert(NOT_ANNOUNCED);
        }
    }

    /// The coordinator knows of it, or there is none to know.
    pub fn announced(&self) -> bool {
        let state = self.shared.lock();
        !state.connected || state.quiet.as_ref().is_none_or(|q| q.acknowledged)
    }

    /// True once the declared bound has passed.
    pub fn overrun(&self) -> bool {
        let now = self.shared.clock.boottime();
        self.shared.lock().quiet.as_ref().is_some_and(|q| now >= q.until)
    }
}

impl Drop for QuietGuard {
    fn drop(&mut self) {
        let now = self.shared.clock.boottime();
        {
            let mut state = self.shared.lock();
            state.quiet = None;
            state.hushed = now;
        }
        self.shared.beat_now.notify_one();
        self.shared.quiet_ended.notify_waiters();
    }
}

impl State {
    fn view(&self) -> View {
        View {
            version: self.version,
            connected: self.connected,
            generation: self.lease.generation(),
            desired: self.desired.clone(),
            desired_at: self.desired_at,
            upgrade: self.upgrade.clone(),
            stop: self.stop.clone(),
        }
    }
}

/// What the beat task does next.
#[derive(Debug, PartialEq, Eq)]
pub enum NextBeat {
    Send(Beat),
    /// A quiet interval: nothing until `beat_now`.
    Hush,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a few plain assignments; a panic elsewhere cannot leave the state half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        f(&mut state);
        state.version += 1;
        drop(state);
        self.changed.notify_all();
    }

    pub fn stop(&self, stop: Stop) {
        self.change(|s| {
            s.stop.get_or_insert(stop);
        });
        self.outbox_filled.notify_one();
    }

    pub fn stopping(&self) -> Option<Stop> {
        self.lock().stop.clone()
    }

    pub fn facts(&self) -> HostFacts {
        self.lock().facts.clone()
    }

    pub fn say(&self, message: ToCoordinator) {
        {
            let mut state = self.lock();
            if state.outbox.len() == OUTBOX {
                state.outbox.pop_front();
            }
            state.outbox.push_back(message);
        }
        self.outbox_filled.notify_one();
    }

    pub fn next_to_say(&self) -> Option<ToCoordinator> {
        self.lock().outbox.pop_front()
    }

    pub fn welcomed(&self, welcome: &Welcome, sent: MonoMicros) -> Result<(), drums_common::lease::Stale> {
        let now = self.clock.boottime();
        let mut state = self.lock();
        state.lease.welcomed(welcome, sent)?;
        state.answered = now;
        state.connected = true;
        state.welcomed = now;
        state.version += 1;
        drop(state);
        self.changed.notify_all();
        self.renewed.notify_one();
        Ok(())
    }

    /// What an earlier life of this agent held was given under a life lease of so long.
    pub fn resumed(&self, life_ms: u64) {
        let now = self.clock.boottime();
        self.change(|s| s.lease.resumed(life_ms, now));
    }

    pub fn disconnected(&self) {
        self.change(|s| s.connected = false);
    }

    pub fn desired(&self, desired: Desired) {
        let now = self.clock.boottime();
        self.change(|s| {
            // An order under an older generation is not obeyed.
            if desired.generation >= s.lease.generation() {
                s.desired = Some(Arc::new(desired));
                s.desired_at = now;
                s.upgrade = None;
            }
        });
    }

    /// No run is desired, and another build of this agent is.
    pub fn upgrade(&self, upgrade: Upgrade) {
        let now = self.clock.boottime();
        self.change(|s| {
            s.desired = Some(Arc::new(Desired { generation: s.lease.generation(), runs: Vec::new() }));
            s.desired_at = now;
            s.upgrade = Some(upgrade);
        });
    }

    pub fn acked(&self, ack: &BeatAck) {
        let now = self.clock.boottime();
        {
            let state = &mut *self.lock();
            state.lease.acked(ack, now);
            state.answered = now;
            if let Some(q) = &mut state.quiet
                && q.announced == Some(ack.number)
            {
                q.acknowledged = true;
                state.lease.silence_agreed(q.declared, q.bound_ms);
            }
        }
        self.changed.notify_all();
        self.renewed.notify_one();
    }

    /// The next beat, or silence. The announcement of a quiet interval is the last beat before it.
    pub fn next_beat(&self) -> NextBeat {
        let sent = self.clock.boottime();
        let mut state = self.lock();
        if state.quiet.as_ref().is_some_and(|q| q.announced.is_some()) {
            return NextBeat::Hush;
        }
        state.beats += 1;
        let number = state.beats;
        let mut quiet_ms = 0;
        if let Some(q) = &mut state.quiet {
            q.announced = Some(number);
            quiet_ms = q.bound_ms;
        }
        NextBeat::Send(Beat {
            generation: state.lease.generation(),
            number,
            sent,
            activity: state.activity.clone(),
            quiet_ms,
            progress: state.progress,
        })
    }

    /// Milliseconds since the newest acknowledged beat, or 0 while that says nothing (a quiet interval, or one that ended
    /// so recently that no beat has come back).
    pub fn unanswered_ms(&self) -> u64 {
        let now = self.clock.boottime();
        let state = self.lock();
        if state.quiet.is_some() {
            return 0;
        }
        now.ms_since(state.answered.max(state.hushed))
    }

    /// The coordinator has been gone for longer than the dispatch lease, and this agent measures nothing.
    pub fn away(&self) -> bool {
        let now = self.clock.boottime();
        let state = self.lock();
        let settled = state.answered > MonoMicros(0) || now.ms_since(state.began) >= FIRST_CONTACT_MS;
        let gone = settled && !state.connected && !state.lease.may_take_new_block(now);
        gone && state.activity == Activity::Idle
    }

    /// The measuring side has ended.
    pub fn rest(&self) {
        self.lock().activity = Activity::Idle;
    }

    /// Returns once no quiet interval is declared.
    pub async fn not_quiet(&self) {
        loop {
            let ended = self.quiet_ended.notified();
            tokio::pin!(ended);
            // Registered before the check, so that an end between the two is not missed.
            ended.as_mut().enable();
            if self.lock().quiet.is_none() {
                return;
            }
            ended.await;
        }
    }
}

#[cfg(test)]
mod tests;
