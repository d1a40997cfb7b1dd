//! The driver: the only one that changes runs.
//!
//! Woken by evidence, connections, requests and a timer, it looks at everything again: folds committed evidence into the
//! states, counts leases, lets runs start, asks the analysis, and sends each connected host its order when that differs.

mod leases;
mod operators;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use drums_common::{
    clock::{Micros, MonoMicros},
    experiment::Registration,
    failure::{Failure, FailureClass},
    ids::{Generation, HostId, RunId},
    lease::Health,
    plan,
    telemetry::chain,
};
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::{mpsc, watch};

use super::{
    Control, Linked,
    committed::{Committed, of_host, read_evidence},
    questions::Analyst,
    requests::{NewRun, Request},
    upgrades,
};
use crate::{
    core::{
        desired::{self, RunOfHost},
        placement::{self, Candidate},
        run::{Denied, Event, HostRun, Observed, RunState},
    },
    net::ports::Order,
    store::{AuditRow, RunRow, Store, StoreError, Who},
};

/// Leases, deadlines and unwinding are looked at this often, whatever else happens.
const TICK: Duration = Duration::from_millis(500);
/// After a look the driver rests this many times as long as the look took, at most a tick: a thousand hosts that report
/// one after the other are looked at together, and looking takes a tenth of a CPU at most.
const REST: u32 = 9;
/// Records read from the store in one go.
pub(super) const PAGE: u32 = 1_000;
/// Between attempts to read evidence that the store did not give.
const READ_AGAIN_MS: u64 = 1_000;
/// A run whose evidence was not readable for this long is closed: a busy disk takes seconds, and what is damaged stays so.
const UNREADABLE_MS: u64 = 120_000;
/// Complaints of one host about one run that its history takes; the log has all of them.
const COMPLAINTS: u32 = 20;

/// A run that is live, or closed with hosts that have not reported their teardown.
struct Active {
    row: RunRow,
    registration: Arc<Registration>,
    /// The analysis of it runs on another thread.
    asking: bool,
    /// Its evidence could not be read the last time.
    unread: Option<Unread>,
}

#[derive(Clone, Copy)]
struct Unread {
    since: MonoMicros,
    last: MonoMicros,
}

impl Active {
    fn new(row: RunRow, registration: Registration) -> Self {
        Self { row, registration: Arc::new(registration), asking: false, unread: None }
    }

    /// False for a while after its evidence could not be read.
    fn may_read(&self, now: MonoMicros) -> bool {
        self.unread.is_none_or(|u| now.ms_since(u.last) >= READ_AGAIN_MS)
    }
}

/// What a host complained of last, so that a repeated complaint is noted once, and how often that changed.
#[derive(Default)]
struct Complaints {
    last: String,
    noted: u32,
}

pub struct Driver {
    control: Arc<Control>,
    queue: mpsc::Receiver<Request>,
    runs: Vec<Active>,
    analyst: Arc<dyn Analyst>,
    answers: FuturesUnordered<BoxFuture<'static, (RunId, Result<Event, StoreError>)>>,
    complaints: BTreeMap<(RunId, HostId), Complaints>,
    /// Hosts whose work did not move at the last look.
    stuck: BTreeSet<HostId>,
    /// What hosts said that ends a run and was not stored when it came: nobody says it again.
    owed: Vec<(RunId, HostId, Event)>,
    /// Runs of which it is not known whether they were stored: the store went away before it answered.
    unsure: Vec<RunId>,
}

fn unsettled(state: &RunState) -> bool {
    state.live() || (state.started.is_some() && state.hosts.iter().any(|h| h.teardown.is_none()))
}

fn failure(e: &StoreError) -> Failure {
    let help = match e.is_away() {
        true => {
            "it may have been done all the same: drumsctl runs and drumsctl fleet show what is, once the store is back"
        }
        false => "see the coordinator's log and try again",
    };
    Failure::new(FailureClass::Transient, "store", chain(e), help)
}

impl Driver {
    pub(super) async fn load(
        control: Arc<Control>,
        queue: mpsc::Receiver<Request>,
        analyst: Arc<dyn Analyst>,
    ) -> Result<Self, StoreError> {
        let (rows, hosts) = control.store.call(|s| Ok((s.runs(None)?, s.hosts()?))).await?;
        let mut driver = Self {
            control,
            queue,
            runs: Vec::new(),
            analyst,
            answers: FuturesUnordered::new(),
            complaints: BTreeMap::new(),
            stuck: BTreeSet::new(),
            owed: Vec::new(),
            unsure: Vec::new(),
        };
        for row in rows.into_iter().filter(|r| unsettled(&r.state)) {
            driver.adopt(row).await?;
        }
        *driver.control.upgrades() = upgrades::pending(&hosts);
        let mut leases = driver.control.leases();
        for host in hosts.into_iter().filter(|h| h.released.is_none() && h.welcomed.is_some()) {
            leases.expect(host.host, host.generation);
        }
        drop(leases);
        let live = driver.runs.iter().filter(|r| r.row.state.live()).count();
        if live > 0 {
            tracing::info!(runs = live, "going on with the runs that were there");
        }
        Ok(driver)
    }

    async fn adopt(&mut self, row: RunRow) -> Result<(), StoreError> {
        let sha = row.state.registration;
        let (run, hosts) = (row.state.id, row.state.hosts.iter().map(|h| h.host.clone()).collect::<Vec<_>>());
        let (registration, acked) = self
            .control
            .store
            .call(move |s| {
                let registration = s
                    .registration(sha)?
                    .ok_or_else(|| StoreError::Missing { what: "registration", id: sha.to_string() })?;
                let acked =
                    hosts.into_iter().map(|h| Ok((s.acked(run, &h)?, h))).collect::<Result<Vec<_>, StoreError>>()?;
                Ok((registration, acked))
            })
            .await?;
        let hosts = acked.into_iter().map(|(through, host)| (host, Committed::through(through))).collect();
        self.control.committed().insert(run, hosts);
        self.runs.push(Active::new(row, registration));
        self.control.orders_due();
        Ok(())
    }

    pub async fn run(mut self, mut shutdown: watch::Receiver<bool>) {
        let mut timer = tokio::time::interval(TICK);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        enum Woken {
            Request(Option<Request>),
            Answer(RunId, Result<Event, StoreError>),
            Look,
            Rested,
            Down,
        }
        let mut due = true;
        let mut rested = tokio::time::Instant::now();
        loop {
            // All branches are cancel-safe; what was received is dealt with outside. A look that is due comes first, so that
            // nobody can keep the driver from it; after it requests have its rest to themselves.
            let woken = tokio::select! {
                biased;
                _ = shutdown.wait_for(|down| *down) => Woken::Down,
                () = tokio::time::sleep_until(rested), if due => Woken::Rested,
                request = self.queue.recv() => Woken::Request(request),
                Some((run, answer)) = self.answers.next() => Woken::Answer(run, answer),
                () = self.control.wake.notified(), if !due => Woken::Look,
                _ = timer.tick(), if !due => Woken::Look,
            };
            match woken {
                Woken::Request(Some(request)) => self.request(request).await,
                Woken::Answer(run, answer) => self.answer(run, answer).await,
                Woken::Look => {}
                Woken::Rested => {
                    let began = tokio::time::Instant::now();
                    due = self.reconcile().await;
                    rested = began + (began.elapsed() * (1 + REST)).min(TICK);
                    continue;
                }
                Woken::Request(None) | Woken::Down => break,
            }
            due = true;
        }
    }

    /// What waits, and then one look at everything: for whoever keeps the time instead of `run`. True if another turn may
    /// find more.
    pub async fn turn(&mut self) -> bool {
        let mut waited = false;
        while let Ok(request) = self.queue.try_recv() {
            waited = true;
            self.request(request).await;
        }
        while let Some(Some((run, answer))) = self.answers.next().now_or_never() {
            waited = true;
            self.answer(run, answer).await;
        }
        self.reconcile().await || waited
    }

    /// The runs that it has something to do for, as they are stored.
    pub fn runs(&self) -> impl Iterator<Item = &RunState> {
        self.runs.iter().map(|r| &r.row.state)
    }

    async fn request(&mut self, request: Request) {
        match request {
            Request::Connected { host, installation, generation, reply } => {
                let order = self.order(&host, generation);
                let (orders, receiver) = watch::channel(order);
                // The sender of an older connection goes, and ends it.
                self.control.links().insert(host, Linked { orders, installation });
                self.control.changed();
                let _ = reply.send(receiver);
            }
            Request::HostRefused { host, run, failure } => {
                if failure.class == FailureClass::Transient {
                    // The agent tries again and says so each time; the deadline bounds that.
                    self.complain(run, host, failure.message).await;
                } else {
                    let event = Event::Refused { host: host.clone(), why: failure.to_string() };
                    self.owe(run, host, event).await;
                }
            }
            Request::EvidenceRefused { host, run, failure } => {
                let event = Event::EvidenceRefused { host: host.clone(), why: failure.message };
                self.owe(run, host, event).await;
            }
            Request::Create { new, reply } => {
                let result = self.create(new).await;
                let _ = reply.send(result);
            }
            Request::Cancel { run, by, reply } => {
                let result = self.cancel(run, by).await;
                let _ = reply.send(result);
            }
            Request::Release { host, by, reply } => {
                let result = self.release(host, by).await;
                let _ = reply.send(result);
            }
        }
    }

    /// Stores what a host said, now or later.
    async fn owe(&mut self, run: RunId, host: HostId, event: Event) {
        let stored = self.event(run, &event).await;
        if stored.is_err() && !self.owed.iter().any(|(r, h, _)| *r == run && *h == host) {
            self.owed.push((run, host, event));
        }
    }

    async fn complain(&mut self, run: RunId, host: HostId, what: String) {
        let (noted, repeated) =
            self.complaints.get(&(run, host.clone())).map_or((0, false), |c| (c.noted, c.last == what));
        if repeated || noted > COMPLAINTS {
            return;
        }
        let text =
            if noted == COMPLAINTS { "more complaints of it are in the log only".to_owned() } else { what.clone() };
        let stored = self.event(run, &Event::Complaint { host: host.clone(), what: text }).await;
        if matches!(stored, Ok(true)) {
            self.complaints.insert((run, host), Complaints { last: what, noted: noted + 1 });
        }
    }

    async fn answer(&mut self, run: RunId, answer: Result<Event, StoreError>) {
        if let Some(active) = self.runs.iter_mut().find(|r| r.row.state.id == run) {
            active.asking = false;
        }
        match answer {
            Ok(event) => {
                self.read(run);
                // One that was not stored is asked for again.
                let _ = self.event(run, &event).await;
            }
            Err(e) => self.unread(run, String::new(), &e).await,
        }
    }

    /// A run's evidence could be read.
    fn read(&mut self, run: RunId) {
        if let Some(active) = self.runs.iter_mut().find(|r| r.row.state.id == run) {
            active.unread = None;
        }
    }

    /// A run's evidence could not be read: tried again after a pause, and given up after a bound. A store that is away is
    /// waited for without one: it says nothing about the evidence.
    async fn unread(&mut self, run: RunId, place: String, e: &StoreError) {
        let now = self.control.clock.boottime();
        let Some(active) = self.runs.iter_mut().find(|r| r.row.state.id == run) else { return };
        let since = active.unread.filter(|_| !e.is_away()).map_or(now, |u| u.since);
        let why = place + &chain(e);
        if active.unread.is_none() {
            tracing::error!(run = %run, error = why, "evidence was not read; it will be tried again");
        }
        active.unread = Some(Unread { since, last: now });
        if now.ms_since(since) >= UNREADABLE_MS {
            let _ = self.event(run, &Event::Unreadable { why }).await;
        }
    }

    /// Looks at everything once. True if there is more to see.
    async fn reconcile(&mut self) -> bool {
        self.control.count_refusals();
        self.look_for_unsure().await;
        self.part_with_moved().await;
        for (run, host, event) in std::mem::take(&mut self.owed) {
            self.owe(run, host, event).await;
        }
        let more = self.fold_evidence().await;
        self.count_leases().await;
        self.watch_progress().await;
        self.start_runs().await;
        let now = self.control.now();
        let due: Vec<RunId> = self.runs.iter().map(|r| &r.row.state).filter(|s| s.due(now)).map(|s| s.id).collect();
        for id in due {
            let _ = self.event(id, &Event::Tick).await;
        }
        self.ask_analysis();
        self.runs.retain(|r| unsettled(&r.row.state));
        let runs = &self.runs;
        self.complaints.retain(|(run, _), _| runs.iter().any(|r| r.row.state.id == *run));
        let here: HashSet<RunId> = runs.iter().map(|r| r.row.state.id).collect();
        self.control.committed().retain(|run, _| here.contains(run));
        if self.control.orders_are_due() {
            self.send_orders();
        }
        self.control.looks.send_modify(|n| *n += 1);
        more
    }

    /// Steps a run and stores the result. True if it changed. What could not be stored did not happen.
    async fn event(&mut self, run: RunId, event: &Event) -> Result<bool, StoreError> {
        self.event_asked(run, event, None).await
    }

    /// `asked` goes with the change if somebody asked for it.
    async fn event_asked(&mut self, run: RunId, event: &Event, asked: Option<AuditRow>) -> Result<bool, StoreError> {
        let now = self.control.now();
        let Some(active) = self.runs.iter_mut().find(|r| r.row.state.id == run) else { return Ok(false) };
        let (state, notes) = match active.row.state.step(&active.registration.experiment, event, now) {
            Ok(t) => (t.next, t.notes),
            // A host that is lost twice, a cancel of a run that ends: nothing to do.
            Err(Denied::Closed | Denied::Ending) => return Ok(false),
            Err(e) => {
                tracing::warn!(run = %run, error = %e, "an event did not fit the run");
                return Ok(false);
            }
        };
        if state == active.row.state && notes.is_empty() {
            return Ok(false);
        }
        let expected = active.row.generation;
        // A state of a thousand hosts is lent to the store's thread rather than copied.
        let save = move |s: &mut dyn Store| {
            s.save_run(&state, expected, &notes, now, asked.as_ref())?;
            Ok((state, notes))
        };
        let stored = self.control.store.call(save).await;
        match stored {
            Ok((state, notes)) => {
                for n in &notes {
                    let host = n.host.as_ref().map(tracing::field::display);
                    tracing::info!(run = %run, host, kind = n.kind, "{}", n.text);
                }
                active.row.state = state;
                active.row.generation += 1;
                self.control.orders_due();
                self.control.changed();
                Ok(true)
            }
            Err(e) => {
                // Nothing in memory changed either: the next look tries again from what is stored.
                tracing::error!(run = %run, error = chain(&e), "a run's state was not stored");
                if matches!(e, StoreError::Conflict { .. }) {
                    self.reload(run).await;
                }
                Err(e)
            }
        }
    }

    /// A write whose answer was lost is known by the next one: what is stored stands.
    async fn reload(&mut self, run: RunId) {
        let stored = self.control.store.call(move |s| s.run(run)).await;
        let active = self.runs.iter_mut().find(|r| r.row.state.id == run);
        if let (Ok(Some(row)), Some(active)) = (stored, active) {
            active.row = row;
            self.control.orders_due();
            self.control.changed();
        }
    }

    async fn look_for_unsure(&mut self) {
        for run in std::mem::take(&mut self.unsure) {
            let known = match self.control.store.call(move |s| s.run(run)).await {
                Ok(Some(row)) => self.adopt(row).await,
                Ok(None) => Ok(()),
                Err(e) => Err(e),
            };
            if known.is_err() {
                self.unsure.push(run);
            }
        }
    }

    /// Takes what was committed into the states, all hosts of a run together. True if there is more than one page of it.
    async fn fold_evidence(&mut self) -> bool {
        let now = self.control.clock.boottime();
        let mut work = Vec::new();
        {
            let mut committed = self.control.committed();
            for active in self.runs.iter().filter(|r| r.may_read(now)) {
                let Some(hosts) = committed.get_mut(&active.row.state.id) else { continue };
                let behind = active.row.state.hosts.iter().filter_map(|h| {
                    let told = hosts.get_mut(&h.host).filter(|c| c.through > h.applied_seq)?;
                    Some((h.host.clone(), h.applied_seq, told.take(h.applied_seq)))
                });
                let behind: Vec<_> = behind.collect();
                if !behind.is_empty() {
                    work.push((active.row.state.id, behind));
                }
            }
        }
        let mut more = false;
        for (run, hosts) in work {
            let (mut all, mut unknown) = (Vec::new(), Vec::new());
            for (host, after, told) in hosts {
                match told {
                    Some(told) => all.extend(of_host(&host, told)),
                    // An earlier life of the coordinator committed it, or it could not be stored when it came.
                    None => unknown.push((host, after)),
                }
            }
            let read = match unknown.is_empty() {
                true => Ok(Vec::new()),
                false => self.control.store.call(move |s| Ok(read_evidence(s, run, unknown))).await,
            };
            let mut failed = None;
            match read {
                Ok(read) => {
                    for (host, after, rows) in read {
                        match rows {
                            Ok(rows) => {
                                more |= rows.len() == PAGE as usize;
                                let told = rows
                                    .iter()
                                    .map(|r| (r.record.seq, Observed::from(&r.record.body), r.late))
                                    .collect();
                                all.extend(of_host(&host, told));
                            }
                            Err(e) => failed = Some((format!("after record {after} of host {host}: "), e)),
                        }
                    }
                }
                Err(e) => failed = Some((String::new(), e)),
            }
            match failed {
                Some((place, e)) => self.unread(run, place, &e).await,
                None => self.read(run),
            }
            if !all.is_empty() {
                // What was not stored is read again from the store.
                let _ = self.event(run, &Event::Told(all)).await;
            }
        }
        more
    }

    /// Starts each run whose machines are free, with its hosts as they are now: they may have been fenced or have moved
    /// while it waited.
    async fn start_runs(&mut self) {
        let waits = |s: &RunState| s.started.is_none() && s.ending.is_none() && s.live();
        if !self.runs.iter().any(|r| waits(&r.row.state)) {
            return;
        }
        let rows = match self.control.store.call(|s| s.hosts()).await {
            Ok(rows) => rows,
            Err(e) => {
                tracing::error!(error = chain(&e), "no run was started: the hosts were not read");
                return;
            }
        };
        for i in 0..self.runs.len() {
            let mut state = self.runs[i].row.state.clone();
            if !waits(&state) {
                continue;
            }
            let mut hosts = Vec::new();
            for h in &mut state.hosts {
                if let Some(row) = rows.iter().find(|r| r.host == h.host)
                    && let Some(facts) = &row.facts
                {
                    h.machine = facts.identity.clone();
                    hosts.push((h.host.clone(), h.machine.clone(), row.generation));
                }
            }
            let earlier: Vec<&RunState> = self.runs[..i].iter().map(|r| &r.row.state).collect();
            if !placement::machines_free(&state, &earlier) {
                continue;
            }
            let absent = state.hosts.iter().map(|h| &h.host).find(|h| !self.control.connected(h)).cloned();
            match absent {
                None if hosts.len() == state.hosts.len() => {
                    let _ = self.event(state.id, &Event::Started { hosts }).await;
                }
                None => {}
                Some(host) => match self.control.health(&host) {
                    // The life lease bounds the wait.
                    Some((Health::Lost { .. }, ..)) => {
                        let _ = self.event(state.id, &Event::HostLost { host }).await;
                    }
                    _ => self.complain(state.id, host, "the run waits for it to connect".to_owned()).await,
                },
            }
        }
    }

    fn ask_analysis(&mut self) {
        let (now, boottime) = (self.control.now(), self.control.clock.boottime());
        for active in &mut self.runs {
            let Some(pending) = active.row.state.pending(now) else { continue };
            if active.asking || !active.may_read(boottime) {
                continue;
            }
            active.asking = true;
            let run = active.row.state.id;
            let answer = self.analyst.answer(
                self.control.store.clone(),
                active.registration.clone(),
                active.row.state.clone(),
                pending,
            );
            self.answers.push(Box::pin(answer.map(move |a| (run, a))));
        }
    }

    fn order(&self, host: &HostId, generation: Generation) -> Order {
        let parts = self.runs.iter().filter_map(|r| Some((r, r.row.state.host(host)?)));
        self.order_of(host, generation, &parts.collect::<Vec<_>>())
    }

    /// From all parts that a host has in runs; or, when it has none, the build that it is to run.
    fn order_of(&self, host: &HostId, generation: Generation, parts: &[(&Active, &HostRun)]) -> Order {
        let committed = self.control.committed();
        let acked = |run: RunId, host| committed.get(&run).and_then(|hosts| hosts.get(host)).map_or(0, |c| c.through);
        let runs: Vec<RunOfHost<'_>> = parts
            .iter()
            .map(|(run, part)| RunOfHost {
                state: &run.row.state,
                part,
                registration: &run.registration,
                acked_seq: acked(run.row.state.id, &part.host),
            })
            .collect();
        let desired = desired::desired(generation, &runs, self.control.now());
        match self.control.upgrades().get(host) {
            Some(upgrade) if desired.runs.is_empty() => Order::Upgrade(upgrade.clone()),
            _ => Order::Desired(desired),
        }
    }

    fn send_orders(&self) {
        let mut parts_of: HashMap<&HostId, Vec<(&Active, &HostRun)>> = HashMap::new();
        for run in &self.runs {
            for part in &run.row.state.hosts {
                parts_of.entry(&part.host).or_default().push((run, part));
            }
        }
        let hosts: Vec<HostId> = self.control.links().keys().cloned().collect();
        for host in hosts {
            let generation = self.control.leases().get(&host).map(|l| l.generation).unwrap_or_default();
            let new = self.order_of(&host, generation, parts_of.get(&host).map_or(&[], Vec::as_slice));
            let mut links = self.control.links();
            let Some(link) = links.get(&host) else { continue };
            if link.orders.is_closed() {
                links.remove(&host);
                continue;
            }
            link.orders.send_if_modified(|order| {
                let differs = match (&*order, &new) {
                    // Nothing comes after it.
                    (Order::Retire { .. }, _) => false,
                    (Order::Desired(old), Order::Desired(new)) => desired::differs(old, new),
                    (old, new) => old != new,
                };
                if differs {
                    *order = new;
                }
                differs
            });
        }
    }
}
