//! An agent's measuring side in simulated time: the real decisions, journal and spool, and sessions that only take time.
//!
//! What the measure thread does by blocking is a state here: whoever keeps time calls [`Measurer::look`] when something
//! changed or the time that it answered with has come.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drums_agent::{
    engine::api::AuditReport,
    measure::{
        decide::{self, Action, Idle, Situation},
        journal::Journal,
        progress::Progress,
        runner::recover,
    },
    net::{Link, QuietGuard, View},
    spool::{Spool, SpoolError},
};
use drums_common::{
    clock::Clock,
    digest::Sha256,
    draw::Draw,
    evidence::{BlockEnded, BlockResult, BlockStarted, Body, Closed, Environment, Log, Preflight, Teardown},
    ids::{HostId, RunId},
    wire::latest::{Activity, Desired, Grant, RunDesired},
};

use crate::{
    fleet,
    time::{MS, MachineClock, S},
    truth::{Broken, Truth},
};

/// The real one looks twice a second whether a lease or a deadline has ended, which changes no view. Here it is known when
/// that will be, and only how late it is seen is drawn.
const LOOK_AGAIN_US: u64 = 500 * MS;
/// As long as the real one waits for its announcement.
const ANNOUNCE_US: u64 = 100 * MS;
/// As long as the real one waits for a renewal before it begins a block.
const RENEWAL_US: u64 = 3 * S;

pub type SharedTruth = Arc<Mutex<Truth>>;

pub fn lock(truth: &SharedTruth) -> std::sync::MutexGuard<'_, Truth> {
    truth.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who holds each machine's measuring lock.
pub type Locks = Arc<Mutex<BTreeMap<String, HostId>>>;

/// How a host behaves.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// Of a hundred operations, so many overrun what was declared.
    pub overruns: u64,
    /// Of a hundred blocks, so many do not settle, and are voided.
    pub unsettled: u64,
    /// Of a thousand operations, so many break the host.
    pub breaks: u64,
    /// Takes its orders and does nothing.
    pub mute: bool,
}

pub struct Measurer {
    host: HostId,
    machine: String,
    link: Link,
    clock: MachineClock,
    spool: Arc<Spool>,
    journals: BTreeMap<RunId, Journal>,
    progress: BTreeMap<RunId, Progress>,
    doing: Doing,
    draw: Draw,
    manners: Manners,
    truth: SharedTruth,
    locks: Locks,
}

enum Doing {
    Nothing,
    Preparing {
        run: RunId,
        until: u64,
    },
    /// Wants the machine.
    Waiting {
        run: RunId,
        grant: Grant,
    },
    /// Has the machine.
    Block {
        run: RunId,
        grant: Grant,
        at: At,
    },
    Closing {
        run: RunId,
        reason: String,
        until: u64,
    },
}

/// How far a block is.
enum At {
    Templates {
        until: u64,
    },
    Renewing {
        until: u64,
    },
    Settling {
        position: usize,
        until: u64,
    },
    Announcing {
        position: usize,
        until: u64,
        guard: QuietGuard,
    },
    Timed {
        position: usize,
        until: u64,
        guard: QuietGuard,
    },
    /// Undoes what it made, and then says how the block ended.
    Undoing {
        result: BlockResult,
        until: u64,
    },
}

impl Measurer {
    /// Takes up what the spool shows as open, as the runner does.
    #[expect(clippy::too_many_arguments, reason = "the parts of an agent")]
    pub fn start(
        host: HostId,
        machine: &str,
        link: Link,
        clock: MachineClock,
        spool: Arc<Spool>,
        draw: Draw,
        manners: Manners,
        truth: SharedTruth,
        locks: Locks,
    ) -> Result<Self, Broken> {
        let mut this = Self {
            host,
            machine: machine.to_owned(),
            link,
            clock,
            spool,
            journals: BTreeMap::new(),
            progress: BTreeMap::new(),
            doing: Doing::Nothing,
            draw,
            manners,
            truth,
            locks,
        };
        for spool in this.spool.runs() {
            let run = spool.meta().run;
            let found = spool.records().map_err(|e| this.words("read", &e))?;
            lock(&this.truth).on_disk(&this.host, run, &found)?;
            if spool.closed() {
                this.progress.insert(run, Progress::of(&found));
                continue;
            }
            let journal = Journal::open(&spool, this.link.clone(), Arc::new(this.clock.clone()));
            let mut journal = journal.map_err(|e| this.words("open", &e))?;
            if journal.progress().open.is_some() {
                lock(&this.truth).host(&this.host).troubled.insert(run);
            }
            recover(&mut journal, &AuditReport::default()).map_err(|e| this.words("recover", &e))?;
            this.journals.insert(run, journal);
            this.written(run)?;
        }
        Ok(this)
    }

    fn words(&self, what: &str, e: &SpoolError) -> Broken {
        format!("{} cannot {what} its spool: {}", self.host, drums_common::telemetry::chain(e))
    }

    /// From here on it takes its orders and does nothing.
    pub fn mute(&mut self) {
        self.manners.mute = true;
    }

    /// Does what is due; answers with how long until it wants to look again, or nothing until something changes.
    pub fn look(&mut self, now_us: u64) -> Result<Option<u64>, Broken> {
        if self.manners.mute {
            return Ok(None);
        }
        loop {
            let view = self.link.view();
            self.interrupt(&view, now_us)?;
            if let Some(until) = self.until()
                && now_us < until
            {
                return Ok(Some((until - now_us).min(self.ends_us(&view))));
            }
            if let Some(wait) = self.go_on(&view, now_us)? {
                return Ok((wait < u64::MAX).then_some(wait));
            }
        }
    }

    /// An answer to a beat may be what it waits for.
    pub fn awaits_answer(&self) -> bool {
        match &self.doing {
            Doing::Nothing => !self.link.may_take_new_block() || !self.journals.is_empty(),
            Doing::Block { at, .. } => matches!(at, At::Announcing { .. } | At::Renewing { .. }),
            _ => false,
        }
    }

    /// In how long it sees the next lease or deadline end.
    fn ends_us(&mut self, view: &View) -> u64 {
        let now = self.clock.boottime();
        let deadlines = view.desired.iter().flat_map(|d| &d.runs).map(|d| view.desired_at.plus_ms(d.deadline_left_ms));
        match self.link.life_left_ms(deadlines.filter(|at| *at > now).min()) {
            u64::MAX => u64::MAX,
            ms => ms * MS + self.draw.below(LOOK_AGAIN_US) + MS,
        }
    }

    /// When what is under way goes on by itself.
    fn until(&self) -> Option<u64> {
        match &self.doing {
            Doing::Nothing | Doing::Waiting { .. } => None,
            Doing::Preparing { until, .. } | Doing::Closing { until, .. } => Some(*until),
            Doing::Block { at, .. } => match at {
                At::Announcing { guard, .. } if guard.announced() => None,
                At::Renewing { .. } if self.link.may_take_new_block() => None,
                At::Templates { until }
                | At::Renewing { until }
                | At::Settling { until, .. }
                | At::Announcing { until, .. }
                | At::Timed { until, .. }
                | At::Undoing { until, .. } => Some(*until),
            },
        }
    }

    /// What the watch beside the measure thread does.
    fn interrupt(&mut self, view: &View, now_us: u64) -> Result<(), Broken> {
        let run = match &self.doing {
            Doing::Block { at: At::Undoing { .. }, .. } | Doing::Nothing | Doing::Closing { .. } => return Ok(()),
            Doing::Preparing { run, .. } | Doing::Waiting { run, .. } | Doing::Block { run, .. } => *run,
        };
        let Some(result) = self.situation(view, |s| decide::interruption(run, s)) else { return Ok(()) };
        if let BlockResult::Expired(_) | BlockResult::Interrupted(_) = result {
            lock(&self.truth).host(&self.host).troubled.insert(run);
        }
        match std::mem::replace(&mut self.doing, Doing::Nothing) {
            Doing::Block { run, grant, at } if begun(&at) => {
                // An operation under way notices at its next step.
                let until = now_us + 200 * MS + self.draw.below(2 * S);
                self.doing = Doing::Block { run, grant, at: At::Undoing { result, until } };
            }
            Doing::Block { .. } => self.give_machine_back(),
            _ => {}
        }
        Ok(())
    }

    /// One thing that is due. Answers with a time to wait when there is none; `u64::MAX` waits for a change.
    fn go_on(&mut self, view: &View, now_us: u64) -> Result<Option<u64>, Broken> {
        match std::mem::replace(&mut self.doing, Doing::Nothing) {
            Doing::Nothing => return self.decide(view, now_us),
            Doing::Preparing { run, .. } => self.preflight(run)?,
            Doing::Waiting { run, grant } => {
                let free = {
                    let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
                    *locks.entry(self.machine.clone()).or_insert_with(|| self.host.clone()) == self.host
                };
                if !free {
                    self.doing = Doing::Waiting { run, grant };
                    return Ok(Some(50 * MS));
                }
                let until = now_us + self.draw.below(8 * S);
                self.doing = Doing::Block { run, grant, at: At::Templates { until } };
            }
            Doing::Block { run, grant, at } => self.block(run, grant, at, now_us)?,
            Doing::Closing { run, reason, .. } => {
                self.write(run, Body::Closed(Closed { teardown: Teardown::Clean, reason }))?;
                self.journals.remove(&run);
            }
        }
        Ok(None)
    }

    fn situation<T>(&self, view: &View, f: impl FnOnce(&Situation<'_>) -> T) -> T {
        f(&Situation {
            agent: fleet::build(),
            desired: view.desired.as_deref(),
            desired_at: view.desired_at,
            stop: view.stop.as_ref(),
            may_take_new_block: self.link.may_take_new_block(),
            life_expired: self.link.life_expired(),
            now: self.clock.boottime(),
            runs: &self.progress,
            held_up: &BTreeMap::new(),
        })
    }

    fn decide(&mut self, view: &View, now_us: u64) -> Result<Option<u64>, Broken> {
        if let Some(desired) = &view.desired {
            self.take_up(desired)?;
        }
        let action = self.situation(view, decide::next_action);
        let waits = self.journals.is_empty();
        self.doing = match action {
            Action::Idle(idle) => {
                self.link.set_activity(Activity::Idle);
                // What is held ends by time, and with nothing held there is nothing to end.
                return Ok(Some(if waits && idle == Idle::Nothing { u64::MAX } else { self.ends_us(view) }));
            }
            Action::Stop(_) => return Ok(Some(u64::MAX)),
            Action::Prepare(run) => {
                self.link.set_activity(Activity::Preparing { run });
                Doing::Preparing { run, until: now_us + S + self.draw.below(20 * S) }
            }
            Action::Block(run, grant) => Doing::Waiting { run, grant },
            Action::Close(run, reason) => {
                // Whatever else closes a run is an end that was ordered.
                if reason.contains("life lease") || reason.contains("deadline") {
                    lock(&self.truth).host(&self.host).troubled.insert(run);
                }
                self.link.set_activity(Activity::Unwinding { run });
                Doing::Closing { run, reason, until: now_us + 100 * MS + self.draw.below(10 * S) }
            }
        };
        Ok(None)
    }

    /// A spool for each listed run that has none. What the coordinator has of a run, this host must have written.
    fn take_up(&mut self, desired: &Desired) -> Result<(), Broken> {
        for d in &desired.runs {
            let held = self.spool.run(d.run).map_or(0, |s| s.last_seq());
            if d.acked_seq > held {
                return Err(format!(
                    "{} of {} are acknowledged to {}, which has {held}",
                    d.acked_seq, d.run, self.host
                ));
            }
            if self.progress.contains_key(&d.run) {
                continue;
            }
            let spool = self.spool.create_run(fleet::run_meta(d.run, d.registration, &self.host));
            let spool = spool.map_err(|e| self.words("make", &e))?;
            let journal = Journal::open(&spool, self.link.clone(), Arc::new(self.clock.clone()));
            self.journals.insert(d.run, journal.map_err(|e| self.words("open", &e))?);
            self.progress.insert(d.run, Progress::default());
        }
        Ok(())
    }

    fn listed(view: &View, run: RunId) -> Option<&RunDesired> {
        view.desired.as_ref()?.runs.iter().find(|d| d.run == run)
    }

    fn preflight(&mut self, run: RunId) -> Result<(), Broken> {
        if Self::listed(&self.link.view(), run).is_none() {
            return Ok(());
        }
        self.write(
            run,
            Body::Preflight(Preflight {
                facts: fleet::facts(&self.machine),
                agent_version: "simulated".into(),
                agent_sha256: fleet::build(),
                workload_sha256: Sha256::of(b"workload"),
                clock_resolution_ns: BTreeMap::new(),
                note: String::new(),
            }),
        )
    }

    fn block(&mut self, run: RunId, grant: Grant, at: At, now_us: u64) -> Result<(), Broken> {
        let at = match at {
            At::Templates { .. } => At::Renewing { until: now_us + RENEWAL_US },
            At::Renewing { .. } => {
                if !self.link.may_take_new_block() {
                    self.give_machine_back();
                    return Ok(());
                }
                lock(&self.truth).begins(&self.host, (run, grant.kind, grant.block), now_us)?;
                let started = BlockStarted {
                    block: grant.block,
                    kind: grant.kind,
                    order: grant.order.clone(),
                    template_build: grant.template_build,
                    cpus: vec![0],
                    environment_bytes: 0,
                    delays_ms: BTreeMap::new(),
                };
                self.write(run, Body::BlockStarted(started))?;
                At::Settling { position: 0, until: now_us + self.draw.below(2 * S) }
            }
            At::Settling { position, .. } if position == grant.order.len() => {
                self.end_block(run, &grant, BlockResult::Completed)?;
                return Ok(());
            }
            At::Settling { position, .. } => {
                let arm = grant.order[position].clone();
                self.link.set_activity(Activity::Measuring { run, block: grant.block, arm });
                let guard = self.link.declare_quiet(Duration::from_secs(50));
                At::Announcing { position, until: now_us + ANNOUNCE_US, guard }
            }
            At::Announcing { position, guard, .. } => {
                guard.begin();
                let takes = match self.draw.below(100) {
                    n if n < self.manners.overruns => 50 * S + self.draw.below(40 * S),
                    n if n < 80 => 10 * MS + self.draw.below(5 * S),
                    _ => self.draw.below(50 * S),
                };
                At::Timed { position, until: now_us + takes, guard }
            }
            At::Timed { position, guard, .. } => {
                drop(guard);
                if self.draw.below(1_000) < self.manners.breaks {
                    lock(&self.truth).host(&self.host).troubled.insert(run);
                    let result = BlockResult::Interrupted("the host is broken".into());
                    At::Undoing { result, until: now_us + self.draw.below(2 * S) }
                } else {
                    let text = format!("{} in block {} at {now_us}", grant.order[position], grant.block);
                    self.write(run, Body::Log(Log { level: "info".into(), target: "sample".into(), text }))?;
                    At::Settling { position: position + 1, until: now_us + self.draw.below(2 * S) }
                }
            }
            At::Undoing { result, .. } => {
                self.end_block(run, &grant, result)?;
                return Ok(());
            }
        };
        self.doing = Doing::Block { run, grant, at };
        Ok(())
    }

    fn end_block(&mut self, run: RunId, grant: &Grant, result: BlockResult) -> Result<(), Broken> {
        let settled = self.draw.below(100) >= self.manners.unsettled;
        let environment = Environment { settled, ..Environment::default() };
        self.write(run, Body::BlockEnded(BlockEnded { block: grant.block, kind: grant.kind, result, environment }))?;
        lock(&self.truth).stops(&self.host);
        self.give_machine_back();
        Ok(())
    }

    fn give_machine_back(&self) {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.get(&self.machine) == Some(&self.host) {
            locks.remove(&self.machine);
        }
    }

    fn write(&mut self, run: RunId, body: Body) -> Result<(), Broken> {
        let Some(journal) = self.journals.get_mut(&run) else {
            return Err(format!("{} would write to {run} after its end", self.host));
        };
        let wrote = journal.record(body).and_then(|()| journal.commit());
        wrote.map_err(|e| self.words("write to", &e))?;
        self.written(run)
    }

    fn written(&mut self, run: RunId) -> Result<(), Broken> {
        if let Some(journal) = self.journals.get(&run) {
            self.progress.insert(run, journal.progress().clone());
        }
        let Some(spool) = self.spool.run(run) else { return Ok(()) };
        let mut truth = lock(&self.truth);
        let known = truth.host(&self.host).written.get(&run).map_or(0, |w| w.len() as u64);
        let new = spool.read_after(known, usize::MAX).map_err(|e| self.words("read", &e))?;
        truth.appended(&self.host, run, new)
    }

    /// The process dies: what is in memory is gone, and the kernel frees its locks.
    pub fn die(self) {
        lock(&self.truth).stops(&self.host);
        if let Doing::Block { run, .. } = &self.doing {
            lock(&self.truth).host(&self.host).troubled.insert(*run);
        }
        self.give_machine_back();
    }
}

/// It has its first record.
fn begun(at: &At) -> bool {
    !matches!(at, At::Templates { .. } | At::Renewing { .. })
}
