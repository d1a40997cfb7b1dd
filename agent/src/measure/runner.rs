//! The measure thread: looks at the orders, does one thing, looks again.
//!
//! All decisions are `decide`'s; this is the skin that gives it what the link and the spool say, and performs what it
//! answers. It is level-triggered: an order that was overtaken was never missed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drums_common::{
    clock::Clock,
    digest::Sha256,
    evidence::{Body, Closed, Preflight, Teardown},
    experiment::{Registration, WorkloadManifest},
    failure::{Failure, FailureClass},
    ids::{HostId, RunId},
    machine::HostFacts,
    telemetry::chain,
    wire::latest::{Activity, Desired, Grant, RunDesired},
};

use super::{
    block::{self, Bench, BlockError, Ran},
    clock,
    decide::{self, Action, Idle, Situation},
    journal::Journal,
    lock::{LockError, MachineLock},
    progress::Progress,
    surroundings::{self, Surroundings},
    templates::Templates,
};
use crate::{
    engine::api::{ArmEngine, AuditReport, Workload},
    net::{FetchError, Link, Stop, View},
    spool::{RunMeta, RunSpool, Spool, SpoolError},
};

/// Leases and deadlines end by time, which changes no view: look again this often.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// A failed attempt (a workload that cannot be fetched, a full disk) is tried again after this.
const TRY_AGAIN: Duration = Duration::from_secs(2);
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
    pub spool: Arc<Spool>,
    pub link: Link,
    pub clock: Arc<dyn Clock>,
}

pub struct Runner<E> {
    parts: Parts<E>,
    watch: Watch,
    runs: BTreeMap<RunId, Run>,
    /// What the engine held before any run: its own scratch file system.
    surroundings_held: BTreeSet<String>,
    available_cpus: Vec<u32>,
}

/// One run as this process knows it.
struct Run {
    state: RunState,
    registration: Option<Registration>,
    workload: Option<Workload>,
    templates: Templates,
}

enum RunState {
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
        let mut this = Self { parts, watch, runs: BTreeMap::new(), surroundings_held, available_cpus };
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
        recover(&mut journal, audit)?;
        Ok(Run::open(journal))
    }

    /// Works until it is told to stop; answers with the reason and the engine. Templates are undone by then.
    pub fn run(mut self) -> (Stop, E) {
        loop {
            let view = self.parts.link.view();
            match self.step(&view) {
                Ok(Step::Did) => {}
                Ok(Step::Idle(Idle::NoDispatch)) => {
                    self.parts.link.wait_for_dispatch(LOOK_AGAIN);
                }
                Ok(Step::Idle(_)) => {
                    self.parts.link.set_activity(Activity::Idle);
                    self.parts.link.wait(view.version, LOOK_AGAIN);
                }
                Ok(Step::Stop) => {
                    let stop = view.stop.unwrap_or(Stop::Signal("its own decision"));
                    return (stop, self.parts.engine);
                }
                Err((run, e)) => {
                    let text = chain(&e);
                    tracing::error!(%run, error = text, "could not do what was asked; trying again");
                    let help = "the agent tries again; drums-agent doctor says what its host lacks";
                    self.parts.link.refuse_demand(run, Failure::new(FailureClass::Transient, "agent-run", text, help));
                    self.parts.link.wait(view.version, TRY_AGAIN);
                }
            }
        }
    }

    /// One decision and its effect.
    pub fn step(&mut self, view: &View) -> Result<Step, (RunId, RunError)> {
        let desired = view.desired.clone();
        for (id, run) in &mut self.runs {
            // After a failed write: what is buffered goes to disk first, and a block that it cut short gets its end.
            if let Some(journal) = run.journal() {
                end_open_block(journal, "its evidence could not be written when it was due")
                    .map_err(|source| (*id, RunError::Spool { run: *id, source }))?;
            }
        }
        if let Some(desired) = &desired {
            self.take_up(desired)?;
        }
        let action = {
            let runs: BTreeMap<RunId, Progress> = self.runs.iter().map(|(r, s)| (*r, s.progress().clone())).collect();
            decide::next_action(&situation(view, &self.parts.link, &*self.parts.clock, &runs))
        };
        let listed = |run: &RunId| desired.as_ref().and_then(|d| d.runs.iter().find(|r| &r.run == run));
        match action {
            Action::Idle(why) => return Ok(Step::Idle(why)),
            Action::Stop(open) => {
                self.leave(&open);
                return Ok(Step::Stop);
            }
            Action::Close(run, reason) => self.close(run, &reason).map_err(|e| (run, e))?,
            Action::Prepare(run) => {
                if let Some(d) = listed(&run) {
                    self.prepare(d).map_err(|e| (run, e))?;
                }
            }
            Action::Block(run, grant) => {
                if let Some(d) = listed(&run) {
                    self.block(d, &grant).map_err(|e| (run, e))?;
                }
            }
        }
        Ok(Step::Did)
    }

    /// Makes a spool for every listed run that has none, and reads its registration.
    fn take_up(&mut self, desired: &Desired) -> Result<(), (RunId, RunError)> {
        for d in &desired.runs {
            let spool_error = |source| (d.run, RunError::Spool { run: d.run, source });
            if !self.runs.contains_key(&d.run) {
                // A run that ended before this agent heard of it owes nothing but its last record.
                let meta = RunMeta { run: d.run, registration: d.registration, host: self.parts.host.clone() };
                let spool = self.parts.spool.create_run(meta).map_err(spool_error)?;
                let journal = Journal::open(&spool, self.parts.link.clone(), self.parts.clock.clone());
                self.runs.insert(d.run, Run::open(journal.map_err(spool_error)?));
            }
            let run = self.runs.get_mut(&d.run).ok_or((d.run, RunError::NotOpen { run: d.run }))?;
            if run.registration.is_some() || run.progress().closed {
                continue;
            }
            match Registration::thaw(&d.canonical, d.registration, drums_common::clock::Micros(0)) {
                Ok(r) => run.registration = Some(r),
                Err(e) => {
                    let text = chain(&e);
                    let help = "the coordinator's store is damaged or of another version; compare drumsctl --version \
                                with drums-agent --version";
                    let failure = Failure::new(FailureClass::Permanent, "registration-mismatch", &text, help);
                    self.parts.link.refuse_demand(d.run, failure);
                    self.close(d.run, &format!("refused: {text}")).map_err(|e| (d.run, e))?;
                }
            }
        }
        Ok(())
    }

    fn prepare(&mut self, d: &RunDesired) -> Result<(), RunError> {
        self.parts.link.set_activity(Activity::Preparing { run: d.run });
        self.unpack(d)?;
        // Trying arms out is noise to a block of somebody else's.
        let none = BTreeMap::new();
        let (link, clock) = (&self.parts.link, &*self.parts.clock);
        let called_off = || decide::interruption(d.run, &situation(&link.view(), link, clock, &none)).is_some();
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

    fn block(&mut self, d: &RunDesired, grant: &Grant) -> Result<(), RunError> {
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
        let none = BTreeMap::new();
        let ending = || decide::interruption(id, &situation(&link.view(), link, clock, &none));
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

fn situation<'a>(view: &'a View, link: &Link, clock: &dyn Clock, runs: &'a BTreeMap<RunId, Progress>) -> Situation<'a> {
    Situation {
        desired: view.desired.as_deref(),
        desired_at: view.desired_at,
        stop: view.stop.as_ref(),
        may_take_new_block: link.may_take_new_block(),
        life_expired: link.life_expired(),
        now: clock.boottime(),
        runs,
    }
}

/// What a restarted agent owes to a run that was open when it died.
fn recover(journal: &mut Journal, audit: &AuditReport) -> Result<(), SpoolError> {
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

/// Looks at the orders while the measure thread is busy in the engine, so that a cancellation reaches an operation
/// under way.
struct Watch {
    shared: Arc<WatchShared>,
    flag: Arc<AtomicBool>,
}

struct WatchShared {
    run: Mutex<Option<RunId>>,
    over: AtomicBool,
}

impl Watch {
    fn start(link: Link, clock: Arc<dyn Clock>) -> Result<Self, RunError> {
        let shared = Arc::new(WatchShared { run: Mutex::new(None), over: AtomicBool::new(false) });
        let flag = Arc::new(AtomicBool::new(false));
        let this = Self { shared: shared.clone(), flag: flag.clone() };
        let watch = move || {
            let none = BTreeMap::new();
            while !shared.over.load(Ordering::Acquire) {
                let view = link.view();
                {
                    // Held over the decision, so that `end` and `begin` cannot fall between it and the flag.
                    let run = shared.run.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(run) = *run
                        && decide::interruption(run, &situation(&view, &link, &*clock, &none)).is_some()
                    {
                        flag.store(true, Ordering::Release);
                    }
                }
                link.wait(view.version, LOOK_AGAIN);
            }
        };
        let spawned = std::thread::Builder::new().name("watch".to_owned()).spawn(watch);
        spawned.map(|_| this).map_err(RunError::Watch)
    }

    fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    fn begin(&self, run: RunId) {
        let mut held = self.shared.run.lock().unwrap_or_else(PoisonError::into_inner);
        self.flag.store(false, Ordering::Release);
        *held = Some(run);
    }

    fn end(&self) {
        let mut held = self.shared.run.lock().unwrap_or_else(PoisonError::into_inner);
        *held = None;
        self.flag.store(false, Ordering::Release);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}
