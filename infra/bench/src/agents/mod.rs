//! Simulated agents: real certificates, real QUIC, the real wire, and records that the analysis accepts; no arms.
//!
//! A thousand of them live in one process. Each has a socket of its own, as real agents do.

mod agent;
mod log;
mod script;
mod wire;

pub use self::script::preflight;

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use anyhow::{Result, ensure};
use drums_agent::net::{Identity, client_config};
use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{Body, Log},
    experiment::{Experiment, Registration},
    ids::RunId,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep},
};

use self::agent::{Agent, State};

/// How a swarm lives; may be changed at any time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub connect: bool,
    pub beating: bool,
    /// Instead of what the welcome says.
    pub beat: Option<Duration>,
    /// How long a block takes.
    pub block: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { connect: true, beating: true, beat: None, block: Duration::from_millis(500) }
    }
}

/// Between looks at all agents.
const LOOK: Duration = Duration::from_millis(5);

/// What all agents of a swarm did.
#[derive(Default)]
pub struct Totals {
    pub connected: AtomicUsize,
    pub connects: AtomicU64,
    pub beats: AtomicU64,
    pub answers: AtomicU64,
    pub orders: AtomicU64,
    /// Records that were acknowledged.
    pub committed: AtomicU64,
    registrations: Mutex<HashMap<Sha256, Arc<Registration>>>,
    /// Why sessions ended, and how often.
    ends: Mutex<BTreeMap<String, u64>>,
}

impl Totals {
    fn note(&self, e: &anyhow::Error) {
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner).entry(format!("{e:#}")).or_default() += 1;
    }

    /// What went wrong so far, in words.
    pub fn ends(&self) -> BTreeMap<String, u64> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A registration, read once for all agents.
    fn registration(&self, sha256: Sha256, canonical: &str) -> Option<Arc<Registration>> {
        let mut known = self.registrations.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registration) = known.get(&sha256) {
            return Some(registration.clone());
        }
        match Registration::thaw(canonical, sha256, Micros(0)) {
            Ok(registration) => Some(known.entry(sha256).or_insert(Arc::new(registration)).clone()),
            Err(e) => {
                self.note(&e.into());
                None
            }
        }
    }
}

/// An agent that may be made: who it is, and which machine it runs on.
pub struct Host {
    pub identity: Identity,
    /// Its own, so that runs need not take turns.
    pub machine: u32,
}

/// Agents that live until the swarm is dropped.
pub struct Swarm {
    agents: Vec<Arc<Agent>>,
    pace: watch::Sender<Pace>,
    pub totals: Arc<Totals>,
    _tasks: JoinSet<()>,
}

impl Swarm {
    /// `experiment` is one that the hosts can run: their facts are made to fit it.
    pub fn start(hosts: Vec<Host>, coordinator: SocketAddr, experiment: &Experiment, pace: Pace) -> Result<Self> {
        let totals = Arc::new(Totals::default());
        let (pace, paced) = watch::channel(pace);
        let mut agents = Vec::with_capacity(hosts.len());
        let mut tasks = JoinSet::new();
        for Host { identity, machine } in hosts {
            let agent = Arc::new(Agent {
                config: client_config(&identity)?,
                coordinator,
                machine,
                preflight: script::preflight(experiment, &identity.host, machine),
                instance: rand::random(),
                pace: paced.clone(),
                totals: totals.clone(),
                state: Mutex::new(State::default()),
                rtt_us: AtomicU64::new(u64::MAX),
                ordered: Notify::new(),
                written: Notify::new(),
                build: Sha256::of(b"simulated agent"),
                identity,
            });
            agents.push(agent.clone());
            tasks.spawn(agent.live());
        }
        Ok(Self { agents, pace, totals, _tasks: tasks })
    }

    pub fn len(&self) -> usize {
        self.agents.len()
    }

    pub fn is_empty(&self) -> bool {
        self.agents.is_empty()
    }

    pub fn set_pace(&self, change: impl FnOnce(&mut Pace)) {
        self.pace.send_modify(change);
    }

    /// Waits until all are connected.
    pub async fn connected(&self, patience: Duration) -> Result<()> {
        let all = self.len();
        self.until(patience, "agents are connected", |t| (t.connected.load(SeqCst), all)).await
    }

    /// Waits until every connection's round trip is estimated below `rtt`: a crowd on two cores takes seconds to answer, and
    /// whoever measures what comes after it measures those first.
    pub async fn calm(&self, rtt: Duration, patience: Duration) -> Result<()> {
        let most = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
        let left = self.poll(patience, || self.agents.iter().filter(|a| a.rtt_us.load(Relaxed) > most).count()).await;
        ensure!(left == 0, "{left} agents' round trips take longer than {rtt:?} after {patience:?}");
        Ok(())
    }

    /// Waits until none is.
    pub async fn gone(&self, patience: Duration) -> Result<()> {
        let all = self.len();
        self.until(patience, "agents have left", |t| (all - t.connected.load(SeqCst), all)).await
    }

    /// Waits until every agent's first record of a run is committed; answers when the last was.
    pub async fn acknowledged(&self, run: RunId, patience: Duration) -> Result<Micros> {
        let when = |agent: &Arc<Agent>| agent.state().logs.get(&run).and_then(|l| l.acknowledged);
        self.all_of(run, patience, |agent| when(agent).is_some()).await?;
        Ok(self.agents.iter().filter_map(when).max().unwrap_or(Micros(0)))
    }

    /// Waits until all of every agent's records of a run, one at least, are committed.
    pub async fn settled(&self, run: RunId, patience: Duration) -> Result<()> {
        let settled = |agent: &Arc<Agent>| {
            agent.state().logs.get(&run).is_some_and(|log| log.last() > 0 && log.acked == log.last())
        };
        self.all_of(run, patience, settled).await
    }

    async fn all_of(&self, run: RunId, patience: Duration, committed: impl Fn(&Arc<Agent>) -> bool) -> Result<()> {
        // What is committed stays so: each look goes on where the last one ended. A look at a thousand agents every time
        // would be work that no floor's clients have.
        let mut open: Vec<&Arc<Agent>> = self.agents.iter().collect();
        let seen = self.poll(patience, || {
            while open.pop_if(|agent| committed(agent)).is_some() {}
            open.len()
        });
        let left = seen.await;
        ensure!(
            left == 0,
            "records of {run} of up to {left} agents are not committed after {patience:?}: {:?}",
            self.totals.ends()
        );
        Ok(())
    }

    /// So much for each agent to say: texts of 64 KiB.
    pub fn texts(&self, bytes: usize) -> Vec<Vec<Body>> {
        const TEXT: usize = 64 << 10;
        let line = |n, i| format!("agent {n} says line {i} of what a run's tools print; ");
        let text = |line: String| line.repeat(TEXT / line.len() + 1)[..TEXT - 256].to_owned();
        let log = |text| Body::Log(Log { level: "info".to_owned(), target: "bench".to_owned(), text });
        (0..self.len()).map(|n| (0..bytes / TEXT).map(|i| log(text(line(n, i)))).collect()).collect()
    }

    /// Each agent has more to say of a run: what stands at its place.
    pub fn say(&self, run: RunId, bodies: Vec<Vec<Body>>) {
        for (agent, bodies) in self.agents.iter().zip(bodies) {
            agent.write(run, bodies);
        }
    }

    /// How many records of a run are committed.
    pub fn committed(&self, run: RunId) -> u64 {
        self.agents.iter().filter_map(|a| a.state().logs.get(&run).map(|l| l.acked)).sum()
    }

    /// Forgets a run that is over, once no agent's order has it: an agent would begin it anew.
    pub async fn forget(&self, run: RunId, patience: Duration) -> Result<()> {
        let ordered = |agent: &Arc<Agent>| agent.is_ordered(run);
        let left = self.poll(patience, || self.agents.iter().filter(|a| ordered(a)).count()).await;
        ensure!(left == 0, "{left} agents' orders have {run} after {patience:?}: {:?}", self.totals.ends());
        for agent in &self.agents {
            agent.state().logs.remove(&run);
        }
        Ok(())
    }

    pub fn beats(&self) -> u64 {
        self.totals.beats.load(Relaxed)
    }

    async fn until(&self, patience: Duration, what: &str, count: impl Fn(&Totals) -> (usize, usize)) -> Result<()> {
        let left = self
            .poll(patience, || {
                let (have, want) = count(&self.totals);
                want.saturating_sub(have)
            })
            .await;
        let all = self.len();
        ensure!(left == 0, "{} of {all} {what} after {patience:?}: {:?}", all - left, self.totals.ends());
        Ok(())
    }

    /// Counts what is left until nothing is, at most `patience`; answers what was left at last.
    async fn poll(&self, patience: Duration, mut left: impl FnMut() -> usize) -> usize {
        let deadline = Instant::now() + patience;
        loop {
            let last = left();
            if last == 0 || Instant::now() >= deadline {
                return last;
            }
            // Looking at a thousand agents after each of their steps would be work of its own.
            sleep(LOOK).await;
        }
    }
}
