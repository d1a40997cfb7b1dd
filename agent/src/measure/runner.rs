//! The measure thread: looks at the orders, does one thing, looks again.
//!
//! All decisions are `decide`'s; this is the skin that gives it what the link and the spool say, and performs what it
//! answers. It is level-triggered: an order that was overtaken was never missed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use drums_common::{
    clock::{Clock, MonoMicros},
    digest::Sha256,
    evidence::{BlockResult, Body, Closed, Preflight, Teardown},
    experiment::{Registration, WorkloadManifest},
    failure::{Failure, FailureClass},
    ids::{HostId, RunId},
    machine::HostFacts,
    telemetry::chain,
    wire::latest::{Activity, Desired, Grant, RunDesired, RunPhase},
};

use super::{
    block::{self, Bench, BlockError, Ran},
    clock,
    decide::{self, Action, HeldUp, Idle, Situation},
    journal::Journal,
    lock::{LockError, MachineLock},
    progress::Progress,
    surroundings::{self, Surroundings},
    templates::Templates,
    watch::Watch,
};
use crate::{
    engine::api::{ArmEngine, AuditReport, Workload},
    net::{FetchError, Link, Stop, View},
    spool::{KEEP_FINISHED, RunMeta, RunSpool, Spool, SpoolError},
    succession::Succession,
};

/// Leases and deadlines end by time, which changes no view: look again this often.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// A failed attempt (a workload that cannot be fetched, a full disk) is tried again after this, or when orders change.
pub(super) const TRY_AGAIN_MS: u64 = 2_000;
/// Where the guest server is in a workload's tree.
const GUEST: &str = "drums-guest";

/// Where workloads come from.
pub trait Workloads {
    /// A folder with `manifest.json` and `tree`, verified against the digest.
    fn fetch(&self, workload: Sha256) -> Result<PathBuf, FetchError>;
}

impl Workloads for Link {
    fn fetch(&self, workload: Sha256) -> Result<PathBuf, FetchError> {
        self.fetch_workload(workload)
    }
}

/// Probes the host anew, with what the engine says of its arms.
pub type ProbeFacts = Box<dyn FnMut(&dyn ArmEngine) -> HostFacts>;

/// What this agent is, and what the runner works with.
pub struct Parts<E> {
    pub host: HostId,
    pub agent_version: String,
    pub agent_sha256: Sha256,
    /// The machine's measuring lock.
    pub lock: PathBuf,
    pub engine: E,
    pub surroundings: Box<dyn Surroundings>,
    /// A fresh look at the host, asked at each preflight.
    pub facts: ProbeFacts,
    pub workloads: Box<dyn Workloads>,
    /// Builds that were ordered to take this agent's place.
    pub succession: Succession,
    pub spool: Arc<Spool>,
    pub link: Link,
    pub clock: Arc<dyn Clock>,
}

pub struct Runner<E> {
    pub(super) parts: Parts<E>,
    watch: Watch,
    pub(super) runs: BTreeMap<RunId, Run>,
    /// The view under which an ordered build was last fetched or refused, and when that may be repeated.
    pub(super) upgrade_tried: Option<(u64, MonoMicros)>,
    held_up: BTreeMap<RunId, Hold>,
    /// What the engine held before any run: its own scratch file system.
    surroundings_held: BTreeSet<String>,
    available_cpus: Vec<u32>,
}

/// One run as this process knows it.
pub(super) struct Run {
    pub(super) state: RunState,
    registration: Option<Registration>,
    workload: Option<Workload>,
    templates: Templates,
}

/// A run that is passed over.
struct Hold {
    what: HeldUp,
    why: Failure,
    /// `None` as long as this process lives.
    until: Option<MonoMicros>,
    /// The view under which the coordinator was told.
    told_at: u64,
}

pub(super) enum RunState {
    Open(Box<Journal>),
    Closed(Progress),
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot write evidence of {run}")]
    Spool { run: RunId, source: SpoolError },
    #[error("cannot read the manifest {}", path.display())]
    Manifest { path: PathBuf, source: std::io::Error },
    #[error("{} is not a workload manifest", path.display())]
    ManifestShape { path: PathBuf, source: serde_json::Error },
    #[error("workload {} holds no file named {GUEST}; build it with cargo xtask image minimal", workload.short())]
    NoGuest { workload: Sha256 },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error("cannot have the machine to try arms out")]
    Lock(#[from] LockError),
    #[error("cannot start the thread that watches for cancellations")]
    Watch(#[source] std::io::Error),
    #[error("there is no spool of {run}, although it was opened")]
    NotOpen { run: RunId },
    #[error(
        "{run} has {acked} records at the coordinator and {held} on this host: evidence was lost here, and what came next would take the numbers of what was sent"
    )]
    Lost { run: RunId, acked: u64, held: u64 },
}

impl RunError {
    /// Trying again changes nothing.
    fn permanent(&self) -> bool {
        match self {
            Self::Spool { source, .. } | Self::Block(BlockError::Evidence { source, .. }) => source.permanent(),
            Self::Lost { .. } => true,
            _ => false,
        }
    }
}

impl<E: ArmEngine> Runner<E> {
    /// Takes up every run that the spool shows as open: a block that was under way when the agent died is marked as
    /// interrupted. `audit` is what the engine undid before.
    /// A run whose evidence cannot be read stays as it is, loudly. The engine comes back with an error.
    pub fn new(mut parts: Parts<E>, audit: &AuditReport) -> Result<Self, Box<(RunError, E)>> {
        let watch = match Watch::start(parts.link.clone(), parts.clock.clone()) {
            Ok(watch) => watch,
            Err(e) => return Err(Box::new((e, parts.engine))),
        };
        parts.engine.give_up_when(watch.flag());
        let available_cpus = surroundings::available_cpus();
        let surroundings_held = held(&parts.engine).collect();
        let (runs, held_up) = (BTreeMap::new(), BTreeMap::new());
        let mut this = Self { parts, watch, runs, upgrade_tried: None, held_up, surroundings_held, available_cpus };
        for spool in this.parts.spool.runs() {
            match this.resume(&spool, audit) {
                Ok(run) => {
                    this.runs.insert(spool.meta().run, run);
                }
                Err(e) => tracing::error!(run = %spool.meta().run, error = chain(&e), "cannot be taken up"),
            }
        }
        Ok(this)
    }

    fn resume(&self, spool: &Arc<RunSpool>, audit: &AuditReport) -> Result<Run, SpoolError> {
        if spool.closed() {
            let state = RunState::Closed(Progress::of(&spool.records()?));
            return Ok(Run { state, registration: None, workload: None, templates: Templates::default() });
        }
        let mut journal = Journal::open(spool, self.parts.link.clone(), self.parts.clock.clone())?;
        if let Err(e) = recover(&mut journal, audit) {
            // It stays buffered, and every step tries to write it down.
            tracing::error!(run = %spool.meta().run, error = chain(&e), "the restart could not be written down yet");
        }
        Ok(Run::open(journal))
    }

    /// Works until it is told to stop; answers with the reason and the engine. Templates are undone by then.
    pub fn run(mut self) -> (Stop, E) {
        loop {
            let view = self.parts.link.view();
            match self.step(&view) {
                Step::Did | Step::HeldUp => {}
                Step::Idle(Idle::NoDispatch) => {
                    if !self.parts.link.wait_for_dispatch(LOOK_AGAIN) {
                        self.parts.link.set_activity(Activity::Idle);
                    }
                }
                Step::Idle(_) => {
                    self.parts.link.set_activity(Activity::Idle);
                    self.make_room(&view);
                    self.parts.link.wait(view.version, LOOK_AGAIN);
                }
                Step::Stop => {
                    let stop = view.stop.unwrap_or(Stop::Signal("its own decision"));
                    return (stop, self.parts.engine);
                }
            }
        }
    }

    /// One decision and its effect. What goes wrong holds up its own run, and nothing else.
    pub fn step(&mut self, view: &View) -> Step {
        if view.stop.is_none()
            && let Some(why) = self.parts.engine.broken()
        {
            tracing::error!(error = why, "the agent cannot go on and ends; its service manager starts it again");
            self.parts.link.stop(Stop::Broken(why));
            return Step::Did;
        }
        let now = self.parts.clock.boottime();
        self.held_up.retain(|_, h| h.until.is_none_or(|until| now < until && h.told_at == view.version));
        // Before anything is written: a disk that takes nothing must not keep the agent from ending.
        if let Action::Stop(open) = self.decide(view) {
            self.leave(&open);
            return Step::Stop;
        }
        self.write_what_is_due(view);
        if let Some(desired) = &view.desired {
            self.repeat_refusals(desired, view);
            for d in &desired.runs {
                if !self.held_up.contains_key(&d.run)
                    && let Err(e) = self.take_up(d)
                {
                    self.hold_up(d.run, HeldUp::Everything, &e, view);
                }
            }
        }
        let listed = |run: &RunId| view.desired.as_ref().and_then(|d| d.runs.iter().find(|r| &r.run == run));
        let (run, what, result) = match self.decide(view) {
            Action::Idle(why) => {
                self.forget_finished(view);
                return Step::Idle(why);
            }
            Action::Stop(open) => {
                self.leave(&open);
                return Step::Stop;
            }
            Action::Close(run, reason) => (run, HeldUp::Everything, self.close(run, &reason)),
            Action::Prepare(run) => {
                let prepared = listed(&run).map_or(Ok(()), |d| self.prepare(d));
                (run, HeldUp::Beginnings, prepared)
            }
            Action::Block(run, grant) => {
                let ran = listed(&run).map_or(Ok(()), |d| self.block(d, &grant));
                (run, HeldUp::Beginnings, ran)
            }
        };
        match result {
            Ok(()) => Step::Did,
            Err(e) => {
                self.hold_up(run, what, &e, view);
                Step::HeldUp
            }
        }
    }

    fn decide(&self, view: &View) -> Action {
        let runs: BTreeMap<RunId, Progress> = self.runs.iter().map(|(r, s)| (*r, s.progress().clone())).collect();
        let held_up = self.held_up.iter().map(|(run, h)| (*run, h.what)).collect();
        let parts = &self.parts;
        decide::next_action(&situation(view, &parts.link, &*parts.clock, parts.agent_sha256, &runs, &held_up))
    }

    /// After a failed write: what is buffered goes to disk first, and a block that it cut short gets its end.
    fn write_what_is_due(&mut self, view: &View) {
        let mut failed = Vec::new();
        for (id, run) in &mut self.runs {
            if let Some(journal) = run.journal()
                && let Err(source) = end_open_block(journal, "its evidence could not be written when it was due")
            {
                failed.push((*id, RunError::Spool { run: *id, source }));
            }
        }
        for (run, e) in failed {
            if !self.held_up.contains_key(&run) {
                self.hold_up(run, HeldUp::Beginnings, &e, view);
            }
        }
    }

    /// Passes the run over for a while, or for good, and says so.
    fn hold_up(&mut self, run: RunId, what: HeldUp, e: &RunError, view: &View) {
        let text = chain(e);
        let (why, until) = if e.permanent() {
            tracing::error!(%run, error = text, "cannot be recorded on this host; refused");
            let help = "keep the agent's state folder and report it; this host can take part in other runs";
            (Failure::new(FailureClass::Permanent, "evidence-lost", text, help), None)
        } else {
            tracing::error!(%run, error = text, "could not do what was asked; trying again");
            let help = "the agent tries again; drums-agent doctor says what its host lacks";
            let until = self.parts.clock.boottime().plus_ms(TRY_AGAIN_MS);
            (Failure::new(FailureClass::Transient, "agent-run", text, help), Some(until))
        };
        self.parts.link.refuse_demand(run, why.clone());
        self.held_up.insert(run, Hold { what, why, until, told_at: view.version });
    }

    /// What was said before a connection broke may not have arrived: a run that is refused for good and still wanted is
    /// refused again under new orders.
    fn repeat_refusals(&mut self, desired: &Desired, view: &View) {
        let wanted = |d: &&RunDesired| matches!(d.phase, RunPhase::Prepare | RunPhase::Measure);
        for d in desired.runs.iter().filter(wanted) {
            if let Some(hold) = self.held_up.get_mut(&d.run).filter(|h| h.until.is_none() && h.told_at != view.version)
            {
                hold.told_at = view.version;
                self.parts.link.refuse_demand(d.run, hold.why.clone());
            }
        }
    }

    /// Makes a spool for a listed run that has none, and reads its registration.
    fn take_up(&mut self, d: &RunDesired) -> Result<(), RunError> {
        let spool_error = |source| RunError::Spool { run: d.run, source };
        let spool = self.parts.spool.run(d.run);
        let held = spool.as_ref().map_or(0, |s| s.last_seq());
        if d.acked_seq > held {
            return Err(RunError::Lost { run: d.run, acked: d.acked_seq, held });
        }
        if !self.runs.contains_key(&d.run) {
            // A run that ended before this agent heard of it owes nothing but its last record.
            let meta = RunMeta { run: d.run, registration: d.registration, host: self.parts.host.clone() };
            let spool = self.parts.spool.create_run(meta).map_err(spool_error)?;
            let journal = Journal::open(&spool, self.parts.link.clone(), self.parts.clock.clone());
            self.runs.insert(d.run, Run::open(journal.map_err(spool_error)?));
        }
        let run = self.runs.get_mut(&d.run).ok_or(RunError::NotOpen { run: d.run })?;
        if run.registration.is_some() || run.progress().closed {
            return Ok(());
        }
        match Registration::thaw(&d.canonical, d.registration, drums_common::clock::Micros(0)) {
            Ok(r) => {
                run.registration = Some(r);
                Ok(())
            }
            Err(e) => {
                let text = chain(&e);
                let help = "the coordinator's store is damaged or of another version; compare drumsctl --version with \
                            drums-agent --version";
                let failure = Failure::new(FailureClass::Permanent, "registration-mismatch", &text, help);
                self.parts.link.refuse_demand(d.run, failure);
                self.close(d.run, &format!("refused: {text}"))
            }
        }
    }

    fn prepare(&mut self, d: &RunDesired) -> Result<(), RunError> {
        self.parts.link.set_activity(Activity::Preparing { run: d.run });
        self.room(d.run)?;
        self.unpack(d)?;
        // Trying arms out is noise to a block of somebody else's.
        let (link, clock) = (&self.parts.link, &*self.parts.clock);
        let called_off = || interruption(d.run, link, clock).is_some();
        let Some(alone) = MachineLock::acquire(&self.parts.lock, called_off)? else { return Ok(()) };
        let facts = (self.parts.facts)(&self.parts.engine);
        drop(alone);
        self.parts.link.set_facts(facts.clone());
        let Some(run) = self.runs.get_mut(&d.run) else { return Err(RunError::NotOpen { run: d.run }) };
        let arms = run.registration.iter().flat_map(|r| &r.experiment.arms);
        let unfit: Vec<String> =
            arms.filter_map(|a| Some(format!("{}: {}", a.name, facts.unfit.get(&a.kind)?))).collect();
        let preflight = Preflight {
            facts,
            agent_version: self.parts.agent_version.clone(),
            agent_sha256: self.parts.agent_sha256,
            workload_sha256: run.workload.as_ref().map_or(d.workload_sha256, |w| w.sha256),
            clock_resolution_ns: clock::resolutions_ns(),
            note: unfit.join("; "),
        };
        let Some(journal) = run.journal() else { return Err(RunError::NotOpen { run: d.run }) };
        journal
            .record(Body::Preflight(preflight))
            .and_then(|()| journal.commit())
            .map_err(|source| RunError::Spool { run: d.run, source })?;
        if !unfit.is_empty() {
            let text = format!("arms of {} cannot run on {}: {}", d.run, self.parts.host, unfit.join("; "));
            let help = "run drums-agent setup on the host, then drums-agent doctor, and start a new run";
            self.parts.link.refuse_demand(d.run, Failure::refused("arms-unfit", text, help));
        }
        Ok(())
    }

    /// The workload, unpacked and verified; fetched again only if this process does not know it yet.
    fn unpack(&mut self, d: &RunDesired) -> Result<(), RunError> {
        let known = self.runs.get(&d.run).and_then(|r| r.workload.as_ref());
        if known.is_some_and(|w| w.sha256 == d.workload_sha256) {
            return Ok(());
        }
        let folder = self.parts.workloads.fetch(d.workload_sha256)?;
        let workload = open_workload(&folder, d.workload_sha256)?;
        if let Some(run) = self.runs.get_mut(&d.run) {
            run.workload = Some(workload);
        }
        Ok(())
    }

    /// Nothing is begun whose evidence has no place: a block would be lost to it.
    fn room(&mut self, id: RunId) -> Result<(), RunError> {
        let journal = self.runs.get_mut(&id).and_then(Run::journal).ok_or(RunError::NotOpen { run: id })?;
        journal.room().map_err(|source| RunError::Spool { run: id, source })
    }

    fn block(&mut self, d: &RunDesired, grant: &Grant) -> Result<(), RunError> {
        self.room(d.run)?;
        self.unpack(d)?;
        self.watch.begin(d.run);
        let result = self.watched_block(d.run, grant);
        self.watch.end();
        let ran = result?;
        tracing::info!(run = %d.run, block = grant.block, ?ran, "block over");
        Ok(())
    }

    fn watched_block(&mut self, id: RunId, grant: &Grant) -> Result<Ran, RunError> {
        let Some(run) = self.runs.get_mut(&id) else { return Err(RunError::NotOpen { run: id }) };
        let (RunState::Open(journal), Some(registration), Some(workload)) =
            (&mut run.state, run.registration.as_ref(), run.workload.as_ref())
        else {
            return Err(RunError::NotOpen { run: id });
        };
        let (link, clock) = (&self.parts.link, &*self.parts.clock);
        let ending = || interruption(id, link, clock);
        let flag = self.watch.flag();
        let ran = block::run(
            &mut Bench {
                engine: &mut self.parts.engine,
                surroundings: &mut *self.parts.surroundings,
                link,
                journal,
                templates: &mut run.templates,
                run: id,
                experiment: &registration.experiment,
                workload,
                available_cpus: &self.available_cpus,
                lock: &self.parts.lock,
                ending: &ending,
                give_up: &|| flag.load(Ordering::Acquire),
            },
            grant,
        );
        Ok(ran?)
    }

    /// The end of a run on this host: templates undone, the last record written.
    fn close(&mut self, id: RunId, reason: &str) -> Result<(), RunError> {
        self.parts.link.set_activity(Activity::Unwinding { run: id });
        // What another run holds is no leak of this one's.
        let alone = self.runs.iter().all(|(other, r)| *other == id || r.templates.is_empty());
        let engine = &mut self.parts.engine;
        let before = &self.surroundings_held;
        let Some(run) = self.runs.get_mut(&id) else { return Err(RunError::NotOpen { run: id }) };
        let mut leaked = run.templates.discard(engine, id);
        let Some(journal) = run.journal() else { return Err(RunError::NotOpen { run: id }) };
        // Whatever is held now is leaked too, whoever forgot it; what was named before is not named twice.
        let named: Vec<String> = journal.progress().leaked.iter().chain(&leaked).cloned().collect();
        let unnamed = |h: &String| !before.contains(h) && !named.iter().any(|n| n.starts_with(h.as_str()));
        if alone {
            leaked.extend(held(engine).filter(unnamed));
        }
        let mut write = || {
            journal.leaks(&leaked)?;
            let all: Vec<String> = journal.progress().leaked.iter().cloned().collect();
            let teardown = if all.is_empty() { Teardown::Clean } else { Teardown::Leaked(all) };
            journal.record(Body::Closed(Closed { teardown, reason: reason.to_owned() }))?;
            journal.commit()
        };
        write().map_err(|source| RunError::Spool { run: id, source })?;
        run.state = RunState::Closed(journal.progress().clone());
        run.workload = None;
        tracing::info!(run = %id, reason, "run closed");
        Ok(())
    }

    /// Runs that are over here and at the coordinator, but for the newest: an agent may live for months.
    fn forget_finished(&mut self, view: &View) {
        let listed = |run: &RunId| view.desired.iter().any(|d| d.runs.iter().any(|r| r.run == *run));
        let spool = &self.parts.spool;
        if let Err(e) = spool.prune(KEEP_FINISHED, listed) {
            tracing::warn!(error = chain(&e), "a finished run stays in the spool's folder until the next start");
        }
        self.runs.retain(|id, run| matches!(run.state, RunState::Open(_)) || spool.run(*id).is_some());
    }

    /// The agent ends and the runs stay open: nothing of theirs may stay on the host.
    fn leave(&mut self, open: &[RunId]) {
        for id in open {
            let Some(run) = self.runs.get_mut(id) else { continue };
            let leaked = run.templates.discard(&mut self.parts.engine, *id);
            let Some(journal) = run.journal() else { continue };
            if let Err(e) = journal.leaks(&leaked).and_then(|()| journal.commit()) {
                tracing::error!(run = %id, error = chain(&e), "what leaked could not be written down");
            }
        }
    }
}

/// What one look came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Did,
    /// It was tried, and the run is passed over for a while.
    HeldUp,
    Idle(Idle),
    Stop,
}

impl Run {
    fn open(journal: Journal) -> Self {
        Self {
            state: RunState::Open(Box::new(journal)),
            registration: None,
            workload: None,
            templates: Templates::default(),
        }
    }

    fn progress(&self) -> &Progress {
        match &self.state {
            RunState::Open(journal) => journal.progress(),
            RunState::Closed(progress) => progress,
        }
    }

    fn journal(&mut self) -> Option<&mut Journal> {
        match &mut self.state {
            RunState::Open(journal) => Some(journal),
            RunState::Closed(_) => None,
        }
    }
}

fn held(engine: &impl ArmEngine) -> impl Iterator<Item = String> {
    engine.held().into_iter().map(|(owner, resource)| format!("{resource} of {owner}"))
}

/// Why what is under way for the run must end now, if it must.
pub(super) fn interruption(run: RunId, link: &Link, clock: &dyn Clock) -> Option<BlockResult> {
    // How far runs are, and by which agent, makes no difference to that.
    let (agent, runs, held_up) = (Sha256([0; 32]), BTreeMap::new(), BTreeMap::new());
    decide::interruption(run, &situation(&link.view(), link, clock, agent, &runs, &held_up))
}

fn situation<'a>(
    view: &'a View,
    link: &Link,
    clock: &dyn Clock,
    agent: Sha256,
    runs: &'a BTreeMap<RunId, Progress>,
    held_up: &'a BTreeMap<RunId, HeldUp>,
) -> Situation<'a> {
    Situation {
        agent,
        desired: view.desired.as_deref(),
        desired_at: view.desired_at,
        stop: view.stop.as_ref(),
        may_take_new_block: link.may_take_new_block(),
        life_expired: link.life_expired(),
        now: clock.boottime(),
        runs,
        held_up,
    }
}

/// What a restarted agent owes to a run that was open when it died.
pub fn recover(journal: &mut Journal, audit: &AuditReport) -> Result<(), SpoolError> {
    let counts = format!(
        "the agent was restarted; its audit undid {} recorded and {} unrecorded resources, {} had gone by themselves",
        audit.undone.len(),
        audit.orphans.len(),
        audit.vanished.len()
    );
    journal.log("warn", "measure", &counts)?;
    for orphan in &audit.orphans {
        journal.log("warn", "audit", &format!("{orphan} was named as ours and not recorded"))?;
    }
    journal.leaks(&audit.leaked)?;
    end_open_block(journal, "the agent was restarted")
}

/// A block that was begun and is not under way gets its end.
fn end_open_block(journal: &mut Journal, why: &str) -> Result<(), SpoolError> {
    if let Some(ended) = journal.progress().interrupted(why) {
        tracing::warn!(block = ended.block, why, "block interrupted");
        journal.record(Body::BlockEnded(ended))?;
    }
    journal.commit()
}

/// A verified workload folder as the engine wants it.
fn open_workload(folder: &Path, sha256: Sha256) -> Result<Workload, RunError> {
    let path = folder.join("manifest.json");
    let json = std::fs::read(&path).map_err(|source| RunError::Manifest { path: path.clone(), source })?;
    let manifest: WorkloadManifest =
        serde_json::from_slice(&json).map_err(|source| RunError::ManifestShape { path, source })?;
    let is_guest = |name: &str| name == GUEST || name.rsplit('/').next() == Some(GUEST);
    let guest = manifest.files.iter().find(|(name, f)| f.kind == "file" && is_guest(name));
    let Some((_, guest)) = guest else { return Err(RunError::NoGuest { workload: sha256 }) };
    Ok(Workload { tree: folder.join("tree"), sha256, guest_sha256: guest.sha256 })
}
