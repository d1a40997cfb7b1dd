//! An agent of the message simulation: the real link, spool, decisions and sending, carried by simulated messages.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use drums_agent::{
    net::{
        Link, NextBeat,
        sending::{Held, Sending},
    },
    spool::Spool,
};
use drums_common::{
    clock::{Clock as _, MonoMicros},
    draw::Draw,
    ids::{HostId, RunId},
    wire::latest::{AgentHello, BeatAck, EvidenceAck, EvidenceBatch, ToAgent, Welcome},
};
use futures_util::FutureExt as _;

use super::network::Conn;
use crate::{
    fleet,
    measurer::{Locks, Manners, Measurer, SharedTruth, lock},
    time::{MS, MachineClock, S},
    truth::Broken,
};

/// Between attempts to connect, as the real link has it.
const BACKOFF_FIRST_US: u64 = 200 * MS;
const BACKOFF_MAX_US: u64 = 5 * S;

/// A host: what outlives its agent, and the agent if there is one.
pub struct Host {
    pub name: HostId,
    pub machine: &'static str,
    pub clock: MachineClock,
    pub dir: PathBuf,
    pub manners: Manners,
    pub stalled_until: u64,
    pub agent: Option<Agent>,
    /// Agents that have run here.
    pub lives: u64,
}

pub struct Agent {
    pub life: u64,
    pub link: Link,
    pub spool: Arc<Spool>,
    pub measurer: Measurer,
    instance: u64,
    pub conn: Option<Connection>,
    backoff_us: u64,
    /// Looks that were asked for later than this one are void.
    pub ticket: u64,
    name: HostId,
    truth: SharedTruth,
}

pub struct Connection {
    pub id: Conn,
    hello_sent: MonoMicros,
    hello_sent_us: u64,
    pub welcome: Option<Welcome>,
    sending: Sending,
    /// What was sent and is not answered.
    outstanding: Option<(RunId, u64)>,
    /// When the newest beats were sent.
    sent: BTreeMap<u64, u64>,
}

/// What becomes of a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Goes {
    On,
    /// Dials again after a pause.
    Ends,
}

impl Agent {
    pub fn start(host: &mut Host, draw: &mut Draw, truth: &SharedTruth, locks: &Locks) -> Result<Self, Broken> {
        host.lives += 1;
        let (spool, _, damaged) = Spool::open(&host.dir, 0).map_err(|e| format!("{}: {e}", host.name))?;
        if let Some(e) = damaged.first() {
            return Err(format!("{} finds its spool damaged: {}", host.name, drums_common::telemetry::chain(e)));
        }
        let spool = Arc::new(spool);
        let link = Link::unplugged(Arc::new(host.clock.clone()), fleet::facts(host.machine));
        let measurer = Measurer::start(
            host.name.clone(),
            host.machine,
            link.clone(),
            host.clock.clone(),
            spool.clone(),
            Draw::new(draw.next_u64(), &["agent"]),
            host.manners,
            truth.clone(),
            locks.clone(),
        )?;
        Ok(Self {
            life: host.lives,
            link,
            spool,
            measurer,
            instance: draw.next_u64(),
            conn: None,
            backoff_us: BACKOFF_FIRST_US,
            ticket: 0,
            name: host.name.clone(),
            truth: truth.clone(),
        })
    }

    /// How long until the next attempt.
    pub fn pause(&mut self, draw: &mut Draw) -> u64 {
        let pause = self.backoff_us / 2 + draw.below(self.backoff_us / 2);
        self.backoff_us = (2 * self.backoff_us).min(BACKOFF_MAX_US);
        pause
    }

    pub fn quiet(&self) -> bool {
        self.link.network_side().not_quiet().now_or_never().is_none()
    }

    pub fn dial(&mut self, id: Conn, clock: &MachineClock, now_us: u64) -> AgentHello {
        let hello = AgentHello {
            agent_version: "simulated".into(),
            agent_sha256: fleet::build(),
            installation: fleet::peer(self.name.as_str()).installation,
            instance: self.instance,
            facts: self.link.network_side().facts(),
            spools: self.spool.states(),
        };
        self.conn = Some(Connection {
            id,
            hello_sent: clock.boottime(),
            hello_sent_us: now_us,
            welcome: None,
            sending: Sending::default(),
            outstanding: None,
            sent: BTreeMap::new(),
        });
        hello
    }

    pub fn hang_up(&mut self) {
        if self.conn.take().is_some_and(|c| c.welcome.is_some()) {
            self.link.network_side().disconnected();
        }
    }

    /// A message on the control stream.
    pub fn told(&mut self, message: ToAgent) -> Result<Goes, Broken> {
        let Some(conn) = &mut self.conn else { return Ok(Goes::On) };
        match message {
            ToAgent::Welcome(welcome) => {
                if self.link.network_side().welcomed(&welcome, conn.hello_sent).is_err() {
                    return Err(format!("{} was welcomed under old generation {}", self.name, welcome.generation));
                }
                lock(&self.truth).answered(&self.name, conn.hello_sent_us);
                conn.welcome = Some(welcome);
                self.backoff_us = BACKOFF_FIRST_US;
            }
            ToAgent::Desired(desired) => {
                for d in &desired.runs {
                    if let Some(spool) = self.spool.run(d.run) {
                        spool.set_acked(d.acked_seq).map_err(|e| format!("{}: {e}", self.name))?;
                        lock(&self.truth).acknowledged(&self.name, d.run, d.acked_seq)?;
                    }
                }
                self.link.network_side().desired(desired);
            }
            ToAgent::Goodbye => return Ok(Goes::Ends),
            // There is no bucket here, and nothing grows old.
            ToAgent::Uploads(_) | ToAgent::Renewal(_) | ToAgent::Upgrade(_) => {}
            ToAgent::Refused(failure) if failure.class == drums_common::failure::FailureClass::Transient => {
                return Ok(Goes::Ends);
            }
            ToAgent::Refused(failure) => return Err(format!("{} was refused for good: {failure}", self.name)),
            ToAgent::Retire { reason } => return Err(format!("{} was retired: {reason}", self.name)),
        }
        Ok(Goes::On)
    }

    /// The beat that is due, if any; or the end of a connection on which nothing was answered for too long.
    pub fn beat(&mut self, now_us: u64) -> (NextBeat, Goes) {
        let Some(conn) = &mut self.conn else { return (NextBeat::Hush, Goes::On) };
        let Some(welcome) = &conn.welcome else { return (NextBeat::Hush, Goes::On) };
        let patience_ms = welcome.dispatch_lease_ms.max(2 * welcome.beat_ms);
        if self.link.network_side().unanswered_ms() > patience_ms {
            return (NextBeat::Hush, Goes::Ends);
        }
        let next = self.link.network_side().next_beat();
        if let NextBeat::Send(beat) = &next {
            conn.sent.insert(beat.number, now_us);
            while conn.sent.len() > 64 {
                conn.sent.pop_first();
            }
        }
        (next, Goes::On)
    }

    pub fn acked(&mut self, ack: &BeatAck) {
        let Some(conn) = &mut self.conn else { return };
        self.link.network_side().acked(ack);
        if let Some(sent_us) = conn.sent.get(&ack.number)
            && ack.generation == self.link.generation()
        {
            lock(&self.truth).answered(&self.name, *sent_us);
        }
    }

    /// The batch to send now; or how long until there may be one, if time alone makes one.
    pub fn next_batch(&mut self, clock: &MachineClock) -> Result<Result<EvidenceBatch, Option<u64>>, Broken> {
        if self.quiet() {
            return Ok(Err(None));
        }
        let Some(conn) = self.conn.as_mut().filter(|c| c.welcome.is_some() && c.outstanding.is_none()) else {
            return Ok(Err(None));
        };
        let now = clock.boottime();
        let held: Vec<Held> = self.spool.runs().iter().map(|r| Held::from(&**r)).collect();
        let Some((run, cursor)) = conn.sending.next(&held, now) else {
            return Ok(Err(conn.sending.rested(now).map(|end| end.us_since(now) + MS)));
        };
        let Some(spool) = self.spool.run(run) else { return Ok(Err(None)) };
        let records = spool.read_after(cursor, drums_agent::net::BATCH_BYTES);
        let records = records.map_err(|e| format!("{} cannot read its spool: {e}", self.name))?;
        conn.outstanding = Some((run, cursor));
        Ok(Ok(EvidenceBatch { run, records }))
    }

    pub fn answered(&mut self, ack: &EvidenceAck, clock: &MachineClock) -> Result<(), Broken> {
        let Some(conn) = &mut self.conn else { return Ok(()) };
        let Some((run, cursor)) = conn.outstanding.take() else { return Ok(()) };
        if ack.run != run {
            return Err(format!("{} sent {run} and was answered for {}", self.name, ack.run));
        }
        if let Some(spool) = self.spool.run(run) {
            lock(&self.truth).acknowledged(&self.name, run, ack.through_seq)?;
            spool.set_acked(ack.through_seq).map_err(|e| format!("{}: {e}", self.name))?;
        }
        conn.sending.answered(ack, cursor, clock.boottime());
        Ok(())
    }

    pub fn not_taken(&mut self, clock: &MachineClock) {
        if let Some(conn) = &mut self.conn
            && let Some((run, _)) = conn.outstanding.take()
        {
            conn.sending.refused(run, clock.boottime());
        }
    }
}

/// What a kill in the middle of a write leaves: the beginning of a batch, which nobody was told of.
pub fn tear(dir: &std::path::Path, draw: &mut Draw) {
    let Ok(runs) = std::fs::read_dir(dir) else { return };
    for run in runs.flatten() {
        let Ok(files) = std::fs::read_dir(run.path()) else { continue };
        let segments = files.flatten().map(|f| f.path());
        let last =
            segments.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("segment-"))).max();
        if let Some(path) = last
            && let Ok(bytes) = std::fs::read(&path)
            && bytes.len() > 40
        {
            let mut torn = bytes.clone();
            torn.extend_from_slice(&bytes[..1 + draw.index(39)]);
            let _ = std::fs::write(&path, torn);
        }
    }
}
