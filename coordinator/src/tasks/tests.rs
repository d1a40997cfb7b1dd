//! The driver with a real store and fake agents that speak through the ports, across restarts.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use drums_common::{
    clock::{Clock, Micros, MonoMicros},
    digest::Sha256,
    evidence::{BlockEnded, BlockResult, BlockStarted, Body, Closed, Environment, Preflight, Record, Teardown},
    experiment::Registration,
    failure::{Failure, FailureClass},
    ids::{Generation, HostId, InstallationId, RunId},
    lease::LeaseTimes,
    machine::{HostFacts, MachineIdentity},
    spec,
    verdict::Verdict,
    wire::latest::{AgentHello, EvidenceBatch, RunPhase},
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

mod links;
mod rows;

use super::*;
use crate::{
    core::run::Ending,
    net::ports::{Peer, Ports as _, TokenStore as _},
    store::{AuditQuery, AuditRow, CertificateRow, Ownership, SqliteStore, Who},
};

/// Everything here takes milliseconds; a loaded machine gets this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time that the test moves.
#[derive(Default)]
struct TestClock(AtomicU64);
impl TestClock {
    fn pass(&self, ms: u64) {
        self.0.fetch_add(ms * 1_000, Ordering::SeqCst);
    }
}
impl Clock for TestClock {
    fn now(&self) -> Micros {
        Micros(1_800_000_000_000_000 + self.0.load(Ordering::SeqCst) as i64)
    }
    fn boottime(&self) -> MonoMicros {
        MonoMicros(1_000_000 + self.0.load(Ordering::SeqCst))
    }
}

fn facts() -> HostFacts {
    crate::samples::facts(MachineIdentity { boot_id: "b".into(), hardware: "h".into(), ..Default::default() })
}

fn test() -> Who {
    Who::new("test", "192.0.2.9:1")
}

fn registration() -> Registration {
    let text = include_str!("data/two-arms.toml");
    let mut e = spec::parse("two-arms.toml", text.as_bytes()).unwrap_or_else(|e| panic!("{e}")).experiment;
    e.workload.sha256 = Some(Sha256::of(b"tree"));
    Registration::freeze(e, Micros(1)).unwrap()
}

/// One life of a coordinator.
struct Life {
    control: Arc<Control>,
    driver: JoinHandle<()>,
    down: watch::Sender<bool>,
    store: StoreHandle,
}

impl Life {
    async fn start(home: &Path, clock: Arc<TestClock>) -> Self {
        let store = StoreHandle::start(Box::new(SqliteStore::open(&home.join("store")).unwrap())).unwrap();
        Self::start_on(store, home, clock).await
    }

    async fn start_on(store: StoreHandle, home: &Path, clock: Arc<TestClock>) -> Self {
        let artifacts = Artifacts::new(home.join("artifacts"));
        let (down, is_down) = watch::channel(false);
        let (control, driver) =
            Control::start(store.clone(), artifacts, clock, LeaseTimes::default(), None, is_down).await.unwrap();
        Self { control, driver, down, store }
    }

    async fn end(self) {
        self.down.send_replace(true);
        self.driver.await.unwrap();
        drop(self.control);
        self.store.close().await;
    }

    async fn state(&self, run: RunId) -> crate::core::run::RunState {
        self.store.call(move |s| s.run(run)).await.unwrap().unwrap().state
    }

    async fn closed(&self, run: RunId) -> Verdict {
        let mut changes = self.control.changes();
        let wait = async {
            loop {
                changes.borrow_and_update();
                if let Some(verdict) = self.state(run).await.verdict() {
                    return verdict;
                }
                changes.changed().await.unwrap();
            }
        };
        timeout(PATIENCE, wait).await.expect("the run closes")
    }

    async fn run(&self) -> RunId {
        self.control.create_run(new_run(None)).await.unwrap().id
    }
}

fn new_run(registration: Option<Sha256>) -> NewRun {
    let (id, experiment) = (RunId(rand::random()), "EXP-100".parse().unwrap());
    NewRun { id, experiment, registration, until: None, by: test() }
}

/// An agent in memory: its spool outlives coordinators.
struct Agent {
    peer: Peer,
    records: Vec<Record>,
    acked: u64,
    /// Leaves after so many blocks ended in all.
    leave_after: usize,
    blocks: usize,
}

impl Agent {
    fn new(name: &str) -> Self {
        let host: HostId = name.parse().unwrap();
        let certificate = Sha256::of(name.as_bytes());
        let peer =
            Peer { host, installation: InstallationId([1; 4]), certificate, from: "192.0.2.1:4433".parse().unwrap() };
        Self { peer, records: vec![], acked: 0, leave_after: usize::MAX, blocks: 0 }
    }

    fn hello(&self) -> AgentHello {
        AgentHello {
            agent_version: "test".into(),
            agent_sha256: Sha256::of(b"agent"),
            installation: self.peer.installation,
            instance: 1,
            facts: facts(),
            spools: vec![],
        }
    }

    fn write(&mut self, registration: Sha256, run: RunId, generation: Generation, body: Body) {
        let seq = self.records.len() as u64 + 1;
        let host = self.peer.host.clone();
        self.records.push(Record { registration, run, host, seq, at: Micros(seq as i64), generation, body });
    }

    /// Does what it is told until the run is closed for it, it leaves, or the coordinator goes.
    async fn live(mut self, control: Arc<Control>) -> Self {
        let mut accepted = control.on_connect(&self.peer, self.hello()).await.unwrap();
        let generation = accepted.welcome.generation;
        loop {
            let order = accepted.orders.borrow_and_update().clone();
            let Order::Desired(desired) = order else { return self };
            for r in &desired.runs {
                match r.phase {
                    RunPhase::Prepare if self.records.is_empty() => {
                        let preflight = Preflight {
                            facts: facts(),
                            agent_version: "test".into(),
                            agent_sha256: Sha256::of(b"agent"),
                            workload_sha256: r.workload_sha256,
                            clock_resolution_ns: Default::default(),
                            note: String::new(),
                        };
                        self.write(r.registration, r.run, generation, Body::Preflight(preflight));
                    }
                    RunPhase::Prepare => {}
                    RunPhase::Measure => {
                        if let Some(grant) = r.granted.get(self.blocks) {
                            let started = BlockStarted {
                                block: grant.block,
                                kind: grant.kind,
                                order: grant.order.clone(),
                                template_build: grant.template_build,
                                cpus: vec![0],
                                environment_bytes: 0,
                                delays_ms: Default::default(),
                            };
                            let environment = Environment { settled: true, duration_ms: 1.0, ..Default::default() };
                            let ended = BlockEnded {
                                block: grant.block,
                                kind: grant.kind,
                                result: BlockResult::Completed,
                                environment,
                            };
                            self.write(r.registration, r.run, generation, Body::BlockStarted(started));
                            self.write(r.registration, r.run, generation, Body::BlockEnded(ended));
                            self.blocks += 1;
                        }
                    }
                    RunPhase::Unwind | RunPhase::Cancel => {
                        let closed = Closed { teardown: Teardown::Clean, reason: String::new() };
                        self.write(r.registration, r.run, generation, Body::Closed(closed));
                    }
                }
            }
            if (self.acked as usize) < self.records.len() {
                // Everything is sent again each time: repeats must do nothing.
                let batch = EvidenceBatch { run: self.records[0].run, records: self.records.clone() };
                self.acked = control.commit_evidence(&self.peer, batch).await.unwrap().through_seq;
            }
            let closed = matches!(self.records.last(), Some(Record { body: Body::Closed(_), .. }));
            if closed || self.blocks >= self.leave_after || accepted.orders.changed().await.is_err() {
                control.disconnected(&self.peer, "test");
                return self;
            }
        }
    }
}

async fn prepare(life: &Life, agents: &[Agent]) -> Registration {
    let registration = registration();
    let stored = registration.clone();
    let peers: Vec<Peer> = agents.iter().map(|a| a.peer.clone()).collect();
    life.store
        .call(move |s| {
            let audit = AuditRow::new(Micros(1), test(), "register");
            s.add_registration(&stored, "spec", false, &audit)?;
            for p in peers {
                s.add_host(&p.host, "sandbox", Ownership::Adopted, &audit)?;
                let row = CertificateRow {
                    sha256: p.certificate,
                    host: p.host,
                    installation: p.installation,
                    expires: Micros(i64::MAX),
                    revoked: None,
                };
                s.add_certificate(&row, &audit)?;
            }
            Ok(())
        })
        .await
        .unwrap();
    registration
}

/// Waits until placement sees the host: an agent that has connected.
async fn connected(life: &Life, agents: &[&HostId]) {
    let mut changes = life.control.changes();
    let wait = async {
        while !agents.iter().all(|h| life.control.connected(h)) {
            changes.changed().await.unwrap();
        }
    };
    timeout(PATIENCE, wait).await.expect("the agents connect");
}

fn each_block_once(state: &crate::core::run::RunState, registration: &Registration) {
    for h in &state.hosts {
        assert_eq!(h.granted, drums_common::plan::blocks(&registration.experiment, &h.host));
        assert_eq!(h.ended.len(), h.granted.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_on_where_it_was_after_any_restart() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let life = Life::start(home.path(), clock.clone()).await;
    let mut agents = vec![Agent::new("h1"), Agent::new("h2")];
    let registration = prepare(&life, &agents).await;
    let (h1, h2): (HostId, HostId) = ("h1".parse().unwrap(), "h2".parse().unwrap());

    // First life: both leave after two blocks each.
    agents.iter_mut().for_each(|a| a.leave_after = 2);
    let mut tasks: Vec<_> = agents.into_iter().map(|a| tokio::spawn(a.live(life.control.clone()))).collect();
    connected(&life, &[&h1, &h2]).await;
    let run = life.run().await;
    let mut agents = Vec::new();
    for t in tasks.drain(..) {
        agents.push(timeout(PATIENCE, t).await.expect("the agent leaves").unwrap());
    }
    assert!(agents.iter().all(|a| a.blocks == 2));
    life.end().await;

    // More lives, each ended wherever it is.
    for leave_after in [3, 6, usize::MAX] {
        let life = Life::start(home.path(), clock.clone()).await;
        agents.iter_mut().for_each(|a| a.leave_after = leave_after);
        let mut tasks: Vec<_> = agents.drain(..).map(|a| tokio::spawn(a.live(life.control.clone()))).collect();
        for t in tasks.drain(..) {
            agents.push(timeout(PATIENCE, t).await.expect("the agent leaves").unwrap());
        }
        if leave_after == usize::MAX {
            life.closed(run).await;
            let state = life.state(run).await;
            assert_eq!(state.ending, Some(Ending::Done));
            each_block_once(&state, &registration);
            assert_eq!(state.teardown(), (vec![], vec![]));
            for a in &agents {
                let (host, n) = (a.peer.host.clone(), a.records.len());
                let rows = life.store.call(move |s| s.evidence(run, &host, 0, 10_000)).await.unwrap();
                assert_eq!(rows.len(), n, "each record once");
                assert!(rows.iter().all(|r| !r.late));
            }
        }
        life.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_never_returns_is_lost_fenced_and_its_late_words_are_kept() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let life = Life::start(home.path(), clock.clone()).await;
    let mut agent = Agent::new("h1");
    prepare(&life, std::slice::from_ref(&agent)).await;
    let mut one = registration().experiment;
    one.hosts.count = 1;
    let one = Registration::freeze(one, Micros(2)).unwrap();
    let stored = one.clone();
    let audit = AuditRow::new(Micros(2), test(), "register");
    life.store.call(move |s| s.add_registration(&stored, "spec", true, &audit)).await.unwrap();
    let h1 = agent.peer.host.clone();

    agent.leave_after = 1;
    let task = tokio::spawn(agent.live(life.control.clone()));
    connected(&life, &[&h1]).await;
    let run = life.run().await;
    let mut agent = timeout(PATIENCE, task).await.expect("the agent dies").unwrap();
    // Not before the whole life lease.
    clock.pass(29 * 60_000);
    life.control.wake.notify_one();
    assert!(life.state(run).await.live());
    clock.pass(2 * 60_000);
    // To the coordinator that was a stall: it judges after a grace of steady attention.
    for _ in 0..10 {
        looked(&life).await;
        assert!(life.state(run).await.live());
        clock.pass(1_000);
    }
    looked(&life).await;
    assert_eq!(life.closed(run).await, Verdict::Lost);
    assert_eq!(life.state(run).await.teardown().1, std::slice::from_ref(&h1));

    // It comes back after all: under a new generation, and is told to cancel what it held.
    let accepted = life.control.on_connect(&agent.peer, agent.hello()).await.unwrap();
    assert_eq!(accepted.welcome.generation, Generation(2));
    let Order::Desired(desired) = accepted.orders.borrow().clone() else { panic!("desired") };
    assert_eq!(desired.runs[0].phase, RunPhase::Cancel);
    agent.write(
        one.sha256,
        run,
        Generation(1),
        Body::Closed(Closed { teardown: Teardown::Clean, reason: "late".into() }),
    );
    let batch = EvidenceBatch { run, records: agent.records.clone() };
    let ack = life.control.commit_evidence(&agent.peer, batch).await.unwrap();
    assert_eq!(ack.through_seq, agent.records.len() as u64);
    let (host, after) = (agent.peer.host.clone(), ack.through_seq - 1);
    let rows = life.store.call(move |s| s.evidence(run, &host, after, 10)).await.unwrap();
    assert!(rows[0].late);
    let mut changes = life.control.changes();
    let told = async {
        while !life.state(run).await.teardown().1.is_empty() {
            changes.changed().await.unwrap();
        }
    };
    timeout(PATIENCE, told).await.expect("the late teardown is taken");
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_refused_in_words_and_nothing_is_recorded() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let life = Life::start(home.path(), clock.clone()).await;
    let code = |r: Result<crate::core::run::RunState, Failure>| r.unwrap_err().code;
    assert_eq!(code(life.control.create_run(new_run(None)).await), "not-registered");
    let agents = [Agent::new("h1"), Agent::new("h2")];
    prepare(&life, &agents).await;
    assert_eq!(code(life.control.create_run(new_run(None)).await), "not-enough-hosts");
    assert_eq!(code(life.control.create_run(new_run(Some(Sha256::of(b"other")))).await), "not-registered");
    let past = NewRun { until: Some(Micros(5)), ..new_run(None) };
    assert_eq!(code(life.control.create_run(past).await), "deadline-past");
    assert_eq!(code(life.control.cancel_run(RunId([9; 6]), test()).await), "no-such-run");
    assert!(life.store.call(|s| s.runs(None)).await.unwrap().is_empty());

    // A certificate that this home did not issue, and a released host.
    let mut stranger = agents[0].peer.clone();
    stranger.certificate = Sha256::of(b"foreign");
    let refused = life.control.on_connect(&stranger, agents[0].hello()).await.unwrap_err();
    assert_eq!(refused.code, "foreign-certificate");
    life.control.release("h1".parse().unwrap(), test()).await.unwrap();
    let refused = life.control.on_connect(&agents[0].peer, agents[0].hello()).await.unwrap_err();
    assert_eq!(refused.code, "released");
    life.end().await;
}

/// A statement on the store from outside, as a fault would change it.
fn sabotage(home: &Path, statement: &str) {
    let c = rusqlite::Connection::open(home.join("store")).unwrap();
    c.busy_timeout(PATIENCE).unwrap();
    c.execute_batch(statement).unwrap();
}
const REFUSE: &str = "CREATE TRIGGER full BEFORE UPDATE ON run BEGIN SELECT RAISE(ABORT, 'the disk is full'); END";
const HEAL: &str = "DROP TRIGGER full";

/// Until the driver has looked at everything after what was done before this call.
async fn looked(life: &Life) {
    // The first look may have begun before.
    for _ in 0..2 {
        let mut looks = life.control.looks.subscribe();
        life.control.wake.notify_one();
        timeout(PATIENCE, looks.changed()).await.expect("the driver looks").unwrap();
    }
}

/// A life with two hosts, h1 and h2, that are connected and do nothing; the orders keep them connected.
async fn idle_hosts(home: &Path, clock: &Arc<TestClock>) -> (Life, Vec<Agent>, Vec<crate::net::ports::Accepted>) {
    idle_hosts_of(Life::start(home, clock.clone()).await).await
}

async fn idle_hosts_of(life: Life) -> (Life, Vec<Agent>, Vec<crate::net::ports::Accepted>) {
    let agents = vec![Agent::new("h1"), Agent::new("h2")];
    prepare(&life, &agents).await;
    let mut accepted = Vec::new();
    for a in &agents {
        accepted.push(life.control.on_connect(&a.peer, a.hello()).await.unwrap());
    }
    (life, agents, accepted)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_that_was_not_stored_is_not_answered_as_done() {
    let home = tempfile::tempdir().unwrap();
    let (life, _, _accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let run = life.run().await;
    looked(&life).await;
    sabotage(home.path(), REFUSE);
    let failure = life.control.cancel_run(run, test()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::Transient);
    assert!(failure.message.contains("the disk is full"), "{failure}");
    assert_eq!(life.state(run).await.ending, None);
    sabotage(home.path(), HEAL);
    let state = life.control.cancel_run(run, test()).await.unwrap();
    assert_eq!(state.ending, Some(Ending::Cancelled { by: "test".into() }));
    assert_eq!(life.state(run).await.ending, state.ending);
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hosts_refusal_that_was_not_stored_is_stored_later() {
    let home = tempfile::tempdir().unwrap();
    let (life, agents, _accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let run = life.run().await;
    looked(&life).await;
    sabotage(home.path(), REFUSE);
    life.control.demand_refused(&agents[0].peer, run, Failure::refused("unfit", "no such tool", "")).await;
    looked(&life).await;
    assert_eq!(life.state(run).await.ending, None);
    sabotage(home.path(), HEAL);
    looked(&life).await;
    let ending = life.state(run).await.ending;
    assert!(matches!(&ending, Some(Ending::Refused { why, .. }) if why.contains("no such tool")), "{ending:?}");
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_back_closes_its_run_as_invalid_within_a_bound() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let (life, _, accepted) = idle_hosts(home.path(), &clock).await;
    let run = life.run().await;
    looked(&life).await;
    drop(accepted);
    life.end().await;
    let damaged = format!("INSERT INTO evidence VALUES ('{run}', 'h1', 1, 1, 0, '{{\"value\":null}}')");
    sabotage(home.path(), &damaged);

    let life = Life::start(home.path(), clock.clone()).await;
    looked(&life).await;
    // A passing fault is waited for.
    clock.pass(60_000);
    looked(&life).await;
    assert_eq!(life.state(run).await.ending, None);
    clock.pass(61_000);
    looked(&life).await;
    let ending = life.state(run).await.ending;
    assert!(matches!(&ending, Some(Ending::Unreadable { why }) if why.contains("record 0 of host h1")), "{ending:?}");
    clock.pass(crate::core::run::UNWIND_MS);
    looked(&life).await;
    assert_eq!(life.state(run).await.verdict(), Some(Verdict::Invalid));
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evidence_that_contradicts_what_is_stored_is_refused_for_good_and_ends_the_run() {
    let home = tempfile::tempdir().unwrap();
    let (life, mut agents, accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let run = life.run().await;
    looked(&life).await;
    let sha = registration().sha256;
    let log = |text: &str| {
        Body::Log(drums_common::evidence::Log { level: "info".into(), target: "t".into(), text: text.into() })
    };
    let agent = &mut agents[0];
    agent.write(sha, run, accepted[0].welcome.generation, log("one"));
    let batch = |a: &Agent| EvidenceBatch { run, records: a.records.clone() };
    assert_eq!(life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap().through_seq, 1);
    assert_eq!(life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap().through_seq, 1, "a repeat");
    agent.records[0].body = log("another");
    life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap_err();
    let failure = life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap_err();
    assert_eq!((failure.class, failure.code.as_str()), (FailureClass::Permanent, "evidence-differs"));
    looked(&life).await;
    let ending = life.state(run).await.ending;
    assert!(
        matches!(&ending, Some(Ending::Interrupted { why, .. }) if why.contains("record 1 of host h1")),
        "{ending:?}"
    );
    let audits = life.store.call(|s| s.audits(&AuditQuery::latest(100))).await.unwrap();
    let refusals =
        audits.iter().filter(|a| a.row.action == "evidence-refused" && a.row.detail.contains("record 1 of host h1"));
    assert_eq!(refusals.count(), 1, "{audits:?}");
    let kept = life.store.call(move |s| s.evidence(run, &"h1".parse().unwrap(), 0, 10)).await.unwrap();
    assert_eq!(kept[0].record.body, log("one"));
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_run_starts_with_a_host_that_was_fenced_and_came_back_meanwhile() {
    let home = tempfile::tempdir().unwrap();
    let (life, agents, mut accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let (first, second) = (life.run().await, life.run().await);
    looked(&life).await;
    assert!(life.state(first).await.started.is_some());
    assert!(life.state(second).await.started.is_none(), "one run at a time on a machine");
    // h1 is fenced, is gone while the first run ends, and comes back under its new generation.
    let fenced = life
        .store
        .call(|s| s.next_generation(&"h1".parse().unwrap(), &AuditRow::new(Micros(1), test(), "fenced")))
        .await
        .unwrap();
    accepted.remove(0);
    life.control.cancel_run(first, test()).await.unwrap();
    for (a, generation) in agents.iter().zip([1, 1]) {
        let mut a = Agent::new(a.peer.host.as_str());
        let closed = Body::Closed(Closed { teardown: Teardown::Clean, reason: String::new() });
        a.write(registration().sha256, first, Generation(generation), closed);
        let batch = EvidenceBatch { run: first, records: a.records };
        life.control.commit_evidence(&a.peer, batch).await.unwrap();
    }
    assert_eq!(life.closed(first).await, Verdict::Cancelled);
    looked(&life).await;
    assert!(life.state(second).await.started.is_none(), "a host of it is not connected");
    let events = life.store.call(move |s| s.events(second, 0, 100)).await.unwrap();
    assert_eq!(events.iter().filter(|e| e.note.text.contains("waits for it to connect")).count(), 1, "{events:?}");

    let back = life.control.on_connect(&agents[0].peer, agents[0].hello()).await.unwrap();
    assert_eq!(back.welcome.generation, fenced);
    looked(&life).await;
    let state = life.state(second).await;
    assert_eq!((state.phase.clone(), state.ending.clone()), (crate::core::run::Phase::Preflight, None));
    assert_eq!(state.hosts[0].generation, fenced);
    let Order::Desired(desired) = back.orders.borrow().clone() else { panic!("desired") };
    assert_eq!((desired.runs[0].run, desired.runs[0].phase), (second, RunPhase::Prepare));
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_moves_to_another_machine_by_a_new_enrolment() {
    let home = tempfile::tempdir().unwrap();
    let (life, agents, mut accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let h1 = agents[0].peer.host.clone();
    assert_eq!(life.control.machine_of(&h1).await.unwrap(), Some(facts().identity));
    let moved =
        Peer { installation: InstallationId([2; 4]), certificate: Sha256::of(b"new"), ..agents[0].peer.clone() };
    life.control.enrolled(moved.clone(), Micros(i64::MAX)).await.unwrap();
    assert_eq!(life.control.machine_of(&h1).await.unwrap(), None);
    // The agent that held the name is sent away, and does not come back.
    accepted[0].orders.changed().await.unwrap();
    assert!(matches!(&*accepted[0].orders.borrow(), Order::Retire { .. }));
    let old = life.control.on_connect(&agents[0].peer, agents[0].hello()).await.unwrap_err();
    assert_eq!(old.code, "revoked");
    let hello = AgentHello { installation: moved.installation, ..agents[0].hello() };
    assert_eq!(life.control.on_connect(&moved, hello).await.unwrap().welcome.generation, Generation(2));

    // Nobody is let in while it is not known which machine a host is.
    sabotage(home.path(), "ALTER TABLE host RENAME TO away");
    assert_eq!(life.control.machine_of(&h1).await.unwrap_err().class, FailureClass::Transient);
    life.end().await;
}

/// An image of an enrolled host that is started elsewhere while the host is down: nobody else holds the name then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_host_on_another_machine_is_refused_and_reported() {
    let home = tempfile::tempdir().unwrap();
    let (life, agents, _accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let peer = &agents[0].peer;
    life.control.disconnected(peer, "it was switched off");
    let mut copy = agents[0].hello();
    copy.facts.identity = MachineIdentity { boot_id: "c".into(), hardware: "another".into(), ..Default::default() };
    let refused = life.control.on_connect(peer, copy).await.unwrap_err();
    assert_eq!((refused.class, refused.code.as_str()), (FailureClass::Refused, "second-machine"));
    assert_eq!(life.control.machine_of(&peer.host).await.unwrap(), Some(facts().identity), "the host's own stands");
    let audits = life.store.call(|s| s.audits(&AuditQuery::latest(100))).await.unwrap();
    let told: Vec<_> = audits.iter().filter(|a| a.row.action == "refused").collect();
    assert_eq!(told.iter().map(|a| a.row.host.clone()).collect::<Vec<_>>(), [Some(peer.host.clone())], "{told:?}");
    let back = life.control.on_connect(peer, agents[0].hello()).await;
    assert!(back.is_ok(), "the host itself comes back");
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_and_complaining_hosts_cannot_fill_the_store() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let (life, agents, _accepted) = idle_hosts(home.path(), &clock).await;
    let run = life.run().await;
    let from = "10.9.9.9".parse().unwrap();
    for n in 0..500 {
        let failure = Failure::refused("handshake", format!("{n} {}", "x".repeat(10_000)), "");
        life.control.report(from, None, &failure);
        let failure = Failure::new(FailureClass::Transient, "agent-run", format!("fault {n}"), "");
        life.control.demand_refused(&agents[0].peer, run, failure).await;
    }
    clock.pass(60_000);
    looked(&life).await;
    let audits = life.store.call(|s| s.audits(&AuditQuery::latest(10_000))).await.unwrap();
    let refused: Vec<_> = audits.iter().filter(|a| a.row.action == "refused").collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].row.detail.len() < 600);
    assert_eq!(refused[1].row.detail, "499 more from 10.9.9.9 within a minute");
    let events = life.store.call(move |s| s.events(run, 0, 10_000)).await.unwrap();
    assert_eq!(events.iter().filter(|e| e.note.kind == "complaint").count(), 21);
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_whose_lease_ran_out_answers_no_beat_until_it_is_renewed() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let (life, agents, accepted) = idle_hosts(home.path(), &clock).await;
    let mut number = 0;
    let mut answered = || {
        number += 1;
        // Two seconds after the one before, so that it is owed an answer.
        clock.pass(2_000);
        life.control.beat(&agents[0].peer, &beat(&accepted[0], number), clock.boottime()).is_some()
    };
    assert!(answered(), "nobody else can lead a store of one file");
    let (term, ttl) = (Term::default(), Duration::from_secs(5));
    life.control.lead_for(term.clone());
    assert!(!answered(), "not leading yet");
    term.renewed(clock.boottime(), ttl);
    assert_eq!([answered(), answered(), answered()], [true, true, false]);
    term.renewed(clock.boottime(), ttl);
    assert!(answered());
    life.end().await;
}

fn beat(accepted: &crate::net::ports::Accepted, number: u64) -> drums_common::wire::latest::Beat {
    drums_common::wire::latest::Beat {
        generation: accepted.welcome.generation,
        number,
        sent: MonoMicros(0),
        activity: drums_common::wire::latest::Activity::Idle,
        quiet_ms: 0,
        progress: 0,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_a_host_whose_work_stands_still_is_shown_and_told_of_once() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let (life, agents, accepted) = idle_hosts(home.path(), &clock).await;
    let run = life.run().await;
    looked(&life).await;
    clock.pass(drums_common::plan::progress_bound_ms(&registration().experiment));
    for number in 1..4 {
        // h2 says nothing: it is silent, which is another thing.
        let _ = life.control.beat(&agents[0].peer, &beat(&accepted[0], number), clock.boottime());
        looked(&life).await;
    }
    let health = |a: &Agent| life.control.health(&a.peer.host).unwrap().0;
    assert!(matches!(health(&agents[0]), drums_common::lease::Health::Stuck { .. }));
    assert!(matches!(health(&agents[1]), drums_common::lease::Health::Silent { .. }));
    let audits = life.store.call(|s| s.audits(&AuditQuery::latest(100))).await.unwrap();
    let told: Vec<_> = audits.iter().filter(|a| a.row.action == "stuck").collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].row.host, Some(agents[0].peer.host.clone()));
    assert!(life.state(run).await.ending.is_none(), "shown, not judged");
    life.end().await;
}
