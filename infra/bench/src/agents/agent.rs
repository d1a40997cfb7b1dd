//! One simulated agent: the real wire over real QUIC, and no arms.
//!
//! ```text
//! dial → hello → welcome → desired … ⟲ backoff, as the real agent does
//!                ├ beats and their answers
//!                ├ work: what is desired becomes records (level-triggered, from the whole order)
//!                └ evidence: batches in order, forgotten once committed
//! ```

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::net::Identity;
use drums_common::{
    clock::{Clock as _, MonoMicros},
    digest::Sha256,
    evidence::{BlockEnded, BlockResult, Body, Closed, Preflight, Teardown},
    ids::{Generation, RunId},
    wire::{
        SERVER_NAME,
        codec::{self, CodecError},
        frame::Lane,
        latest::{
            Activity, AgentHello, Beat, BeatAck, Desired, EvidenceAck, Grant, RunPhase, ToAgent, ToCoordinator, Welcome,
        },
    },
};
use drums_coordinator::clock::SystemClock;
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, timeout},
};

use super::{Pace, Totals, log::RunLog, script::Script, wire};

/// As the real agent waits.
const DIAL: Duration = Duration::from_secs(5);
const HELLO: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

pub(super) struct Agent {
    pub identity: Identity,
    pub config: quinn::ClientConfig,
    pub coordinator: SocketAddr,
    pub machine: u32,
    pub preflight: Preflight,
    pub instance: u64,
    pub pace: watch::Receiver<Pace>,
    pub totals: Arc<Totals>,
    pub state: Mutex<State>,
    /// Of the connection, as QUIC estimates it; the most there is while there is none.
    pub rtt_us: AtomicU64,
    /// The order changed: there may be work.
    pub ordered: Notify,
    /// There are new records.
    pub written: Notify,
    pub build: Sha256,
}

#[derive(Default)]
pub(super) struct State {
    generation: Generation,
    desired: Option<Desired>,
    pub logs: BTreeMap<RunId, RunLog>,
    /// When the coordinator answered last.
    answered: MonoMicros,
    /// None: idle.
    activity: Option<Activity>,
    progress: u64,
}

/// What the order asks for next.
enum Step {
    Prepare(RunId, Sha256),
    Measure(RunId, Grant),
    Close(RunId),
}

impl Agent {
    pub fn state(&self) -> MutexGuard<'_, State> {
        // Plain assignments: a panic elsewhere leaves nothing half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For ever.
    pub async fn live(self: Arc<Self>) {
        // Both only end with the task.
        tokio::join!(self.keep_connected(), self.work());
    }

    async fn keep_connected(&self) {
        let (mut backoff, mut endpoint) = (BACKOFF_FIRST, None);
        loop {
            let mut held = Duration::ZERO;
            if let Err(e) = self.session(&mut endpoint, &mut held).await {
                self.totals.note(&e);
            }
            if held >= BACKOFF_MAX {
                backoff = BACKOFF_FIRST;
            }
            let go_on = self.pace.borrow().connect;
            if !go_on {
                let mut pace = self.pace.clone();
                // The sender lives as long as the swarm.
                let _ = pace.wait_for(|p| p.connect).await;
                continue;
            }
            sleep(backoff.mul_f64(rand::random_range(0.5..1.0))).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// `endpoint` is kept from one to the next: the three megabytes that each receives into would be paid for by the cores
    /// that the coordinator runs on. `held`: how long after the welcome.
    async fn session(&self, endpoint: &mut Option<Endpoint>, held: &mut Duration) -> Result<()> {
        let endpoint = match endpoint {
            Some(endpoint) => endpoint,
            None => endpoint.insert(Endpoint::client(([127, 0, 0, 1], 0).into()).context("cannot open a UDP socket")?),
        };
        let connecting = endpoint.connect_with(self.config.clone(), self.coordinator, SERVER_NAME)?;
        let connection = timeout(DIAL, connecting).await.context("no answer")??;
        let (send, recv, welcome) = timeout(HELLO, self.greet(&connection)).await.context("no welcome")??;
        self.totals.connected.fetch_add(1, SeqCst);
        self.totals.connects.fetch_add(1, SeqCst);
        let welcomed = SystemClock.boottime();
        let end = self.stay(&connection, send, recv, &welcome).await;
        *held = Duration::from_millis(SystemClock.boottime().ms_since(welcomed));
        self.totals.connected.fetch_sub(1, SeqCst);
        self.rtt_us.store(u64::MAX, Relaxed);
        end
    }

    async fn greet(&self, connection: &Connection) -> Result<(SendStream, RecvStream, Welcome)> {
        let (mut send, mut recv) = connection.open_bi().await?;
        wire::shake_hands(&mut send, &mut recv, self.build).await?;
        let spools = self.state().logs.values().map(RunLog::state).collect();
        let hello = AgentHello {
            agent_version: "simulated".to_owned(),
            agent_sha256: self.build,
            installation: self.identity.installation,
            instance: self.instance,
            facts: self.preflight.facts.clone(),
            spools,
        };
        wire::write(&mut send, Lane::Control, &ToCoordinator::Hello(Box::new(hello))).await?;
        match wire::read(&mut recv, Lane::Control).await? {
            Some(ToAgent::Welcome(welcome)) => Ok((send, recv, welcome)),
            Some(ToAgent::Refused(failure)) => bail!("refused: {failure}"),
            _ => bail!("no welcome"),
        }
    }

    async fn stay(&self, connection: &Connection, send: SendStream, recv: RecvStream, welcome: &Welcome) -> Result<()> {
        {
            let mut state = self.state();
            state.generation = welcome.generation;
            state.answered = SystemClock.boottime();
        }
        let (to, from) = connection.open_bi().await?;
        let mut leave = self.pace.clone();
        // Whichever ends first ends the connection; nothing that another half did is lost, since all of it is repeated
        // after the next hello.
        let end = tokio::select! {
            end = self.listen(recv) => end,
            end = self.beat(connection, welcome) => end,
            end = self.hear(connection) => end,
            end = self.tell(to, from) => end,
            _ = leave.wait_for(|p| !p.connect) => Ok(()),
        };
        // The control stream is open for as long as the connection is.
        drop(send);
        end
    }

    async fn listen(&self, mut recv: RecvStream) -> Result<()> {
        loop {
            match wire::read(&mut recv, Lane::Control).await? {
                Some(ToAgent::Desired(desired)) => {
                    self.totals.orders.fetch_add(1, Relaxed);
                    let at = SystemClock.now();
                    let mut state = self.state();
                    for run in &desired.runs {
                        if let Some(log) = state.logs.get_mut(&run.run) {
                            log.committed(run.acked_seq, at);
                        }
                    }
                    state.desired = Some(desired);
                    drop(state);
                    self.ordered.notify_one();
                }
                Some(ToAgent::Retire { reason }) => bail!("retired: {reason}"),
                // Its records are in memory, and the coordinator comes back.
                Some(ToAgent::Uploads(_)) => {}
                Some(ToAgent::Goodbye) | None => bail!("the coordinator said goodbye"),
                Some(_) => bail!("the coordinator said something else"),
            }
        }
    }

    async fn beat(&self, connection: &Connection, welcome: &Welcome) -> Result<()> {
        let mut pace = self.pace.clone();
        let mut number = 0;
        // As the real agent does: a path that died silently shows here.
        let patience_ms = welcome.dispatch_lease_ms.max(2 * welcome.beat_ms);
        // A fleet does not beat in step.
        let own = pace.borrow_and_update().beat.unwrap_or(Duration::from_millis(welcome.beat_ms));
        let mut next = tokio::time::Instant::now() + own.mul_f64(rand::random_range(0.0..1.0));
        loop {
            let every = match *pace.borrow_and_update() {
                Pace { beating: false, .. } => None,
                Pace { beat, .. } => Some(beat.unwrap_or(Duration::from_millis(welcome.beat_ms))),
            };
            let Some(every) = every else {
                pace.changed().await?;
                // Nobody answers what is not sent.
                self.state().answered = SystemClock.boottime();
                next = tokio::time::Instant::now() + own.mul_f64(rand::random_range(0.0..1.0));
                continue;
            };
            // Both branches are cancel-safe: they only wait.
            let due = tokio::select! {
                () = tokio::time::sleep_until(next) => true,
                changed = pace.changed() => { changed?; false }
            };
            if !due {
                continue;
            }
            next = (next + every).max(tokio::time::Instant::now());
            number += 1;
            self.rtt_us.store(u64::try_from(connection.rtt().as_micros()).unwrap_or(u64::MAX), Relaxed);
            let silent_ms = SystemClock.boottime().ms_since(self.state().answered);
            ensure!(silent_ms <= patience_ms, "no beat was answered");
            let beat = {
                let state = self.state();
                Beat {
                    generation: state.generation,
                    number,
                    sent: SystemClock.boottime(),
                    activity: state.activity.clone().unwrap_or(Activity::Idle),
                    quiet_ms: 0,
                    progress: state.progress,
                }
            };
            connection.send_datagram(codec::encode(Lane::Datagram, &beat)?.into())?;
            self.totals.beats.fetch_add(1, Relaxed);
        }
    }

    /// Answers of beats.
    async fn hear(&self, connection: &Connection) -> Result<()> {
        loop {
            let datagram = connection.read_datagram().await?;
            if datagram.len() > 1 {
                let ack: BeatAck = codec::decode(Lane::Datagram, &datagram)?;
                let now = SystemClock.boottime();
                ensure!(ack.sent <= now, "an answer to a beat of another clock");
                self.state().answered = now;
                self.totals.answers.fetch_add(1, Relaxed);
            }
        }
    }

    /// Evidence in order; the coordinator's answers say how far it is committed.
    async fn tell(&self, mut to: SendStream, mut from: RecvStream) -> Result<()> {
        to.write_all(&[Lane::Evidence.tag()]).await?;
        loop {
            let batch = {
                let state = self.state();
                let batch = state.logs.values().find(|l| l.acked < l.last()).map(RunLog::unsent);
                batch.map(|b| Ok::<_, CodecError>((b.run, codec::encode(Lane::Evidence, &b)?))).transpose()?
            };
            let Some((run, batch)) = batch else {
                self.written.notified().await;
                continue;
            };
            wire::write_encoded(&mut to, Lane::Evidence, batch).await?;
            let ack: EvidenceAck = wire::read(&mut from, Lane::Evidence).await?.context("evidence was not taken")?;
            ensure!(ack.run == run, "an acknowledgement for another run");
            let at = SystemClock.now();
            if let Some(log) = self.state().logs.get_mut(&run) {
                let before = log.acked;
                log.committed(ack.through_seq, at);
                self.totals.committed.fetch_add(log.acked - before, SeqCst);
            }
        }
    }

    async fn work(&self) {
        loop {
            while let Some(step) = self.next_step() {
                match step {
                    Step::Prepare(run, registration) => self.prepare(run, registration),
                    Step::Measure(run, grant) => self.measure(run, &grant).await,
                    Step::Close(run) => {
                        self.set_activity(Some(Activity::Unwinding { run }));
                        self.write(
                            run,
                            vec![Body::Closed(Closed { teardown: Teardown::Clean, reason: String::new() })],
                        );
                        self.set_activity(None);
                    }
                }
            }
            self.ordered.notified().await;
        }
    }

    fn next_step(&self) -> Option<Step> {
        let state = self.state();
        for run in &state.desired.as_ref()?.runs {
            let log = state.logs.get(&run.run);
            if log.is_some_and(|l| l.closed) {
                continue;
            }
            match run.phase {
                RunPhase::Unwind | RunPhase::Cancel if log.is_some() => return Some(Step::Close(run.run)),
                RunPhase::Unwind | RunPhase::Cancel | RunPhase::Prepare | RunPhase::Measure
                    if !log.is_some_and(|l| l.prepared) =>
                {
                    return Some(Step::Prepare(run.run, run.registration));
                }
                RunPhase::Measure => {
                    let open = run.granted.iter().find(|g| !log.is_some_and(|l| l.ended(g.kind, g.block)));
                    if let Some(grant) = open {
                        return Some(Step::Measure(run.run, grant.clone()));
                    }
                }
                _ => {}
            }
        }
        None
    }

    fn prepare(&self, run: RunId, registration: Sha256) {
        let mut preflight = self.preflight.clone();
        {
            let mut state = self.state();
            let desired = state.desired.as_ref().and_then(|d| d.runs.iter().find(|r| r.run == run));
            if let Some(workload) = desired.map(|r| r.workload_sha256) {
                preflight.workload_sha256 = workload;
            }
            state.logs.entry(run).or_insert_with(|| RunLog::new(run, registration));
        }
        self.write(run, vec![Body::Preflight(preflight)]);
    }

    async fn measure(&self, run: RunId, grant: &Grant) {
        let order = {
            let state = self.state();
            let desired = state.desired.as_ref().and_then(|d| d.runs.iter().find(|r| r.run == run));
            desired.map(|r| (r.registration, r.canonical.clone()))
        };
        let Some((sha256, canonical)) = order else { return };
        let Some(registration) = self.totals.registration(sha256, &canonical) else { return };
        let (templates, block) = {
            let mut state = self.state();
            let Some(log) = state.logs.get_mut(&run) else { return };
            let (host, machine) = (&self.identity.host, self.machine);
            let script = log.script.get_or_insert_with(|| Script::new(&registration.experiment, host, machine));
            let templates = script.templates();
            let block = script.block(grant).map(<[Body]>::to_vec).unwrap_or_default();
            (templates, block)
        };
        let Some((started, rest)) = block.split_first() else {
            self.totals.note(&anyhow::anyhow!("a block was granted that the registration does not have: {grant:?}"));
            return sleep(BACKOFF_MAX).await;
        };
        let arm = grant.order.first().cloned();
        if let Some(arm) = arm {
            self.set_activity(Some(Activity::Measuring { run, block: grant.block, arm }));
        }
        self.write(run, templates.into_iter().chain([started.clone()]).collect());
        let pause = self.pace.borrow().block.mul_f64(rand::random_range(0.75..1.25));
        // Both branches are cancel-safe: they only wait.
        let cancelled = tokio::select! {
            () = sleep(pause) => false,
            () = self.told_to_stop(run) => true,
        };
        if cancelled {
            let end = rest.iter().filter_map(|body| match body {
                Body::BlockEnded(end) => Some(BlockEnded { result: BlockResult::Cancelled, ..end.clone() }),
                _ => None,
            });
            self.write(run, end.map(Body::BlockEnded).collect());
        } else {
            self.write(run, rest.to_vec());
        }
        self.set_activity(None);
    }

    /// The last order has the run.
    pub fn is_ordered(&self, run: RunId) -> bool {
        self.state().desired.as_ref().is_some_and(|d| d.runs.iter().any(|r| r.run == run))
    }

    /// Until the order wants no more blocks of the run. Whoever waits looks at the whole order afterwards.
    async fn told_to_stop(&self, run: RunId) {
        let wanted = || {
            let state = self.state();
            let runs = state.desired.as_ref().map_or(&[][..], |d| &d.runs);
            runs.iter().any(|r| r.run == run && r.phase == RunPhase::Measure)
        };
        while wanted() {
            self.ordered.notified().await;
        }
    }

    pub fn write(&self, run: RunId, bodies: Vec<Body>) {
        let mut state = self.state();
        let (generation, at) = (state.generation, SystemClock.now());
        state.progress += 1;
        if let Some(log) = state.logs.get_mut(&run) {
            for body in bodies {
                log.push(&self.identity.host, generation, at, body);
            }
        }
        drop(state);
        self.written.notify_one();
    }

    fn set_activity(&self, activity: Option<Activity>) {
        self.state().activity = activity;
    }
}
