//! One world of real connections: processes that can be killed without a word, paths that can be cut.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drums_agent::{
    net::{Identity, Net, NetConfig, Sockets},
    spool::Spool,
};
use drums_common::{
    clock::{Clock, Micros, MonoMicros},
    digest::Sha256,
    draw::Draw,
    failure::Failure,
    ids::{HostId, RunId},
    lease::LeaseTimes,
    machine::{HostFacts, MachineIdentity},
    telemetry::chain,
    token::Address,
    wire::latest::{AgentHello, Beat, BeatAck, EvidenceAck, EvidenceBatch, Upgrade},
};
use drums_coordinator::{
    artifacts::Content,
    net::{
        endpoint,
        ports::{Accepted, Peer, Ports},
        serve_agents,
    },
    pki::{Pki, SigningRequest},
    store::Who,
    tasks::{Control, NewRun},
};
use quinn::{Endpoint, EndpointConfig, Runtime, TokioRuntime};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

use super::wire::{Road, Wire};
use crate::{
    fleet::{self, HOSTS},
    home::{Home, renews},
    measurer::{Locks, Manners, Measurer, SharedTruth, lock},
    message::{Ended, Setup, Temper},
    time::{HOUR, MINUTE, MachineClock, S, TrueTime},
    truth::{Broken, Truth},
};

const COORDINATOR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 100)), 7400);
/// The measuring side hears of changes by looking.
const LOOK: Duration = Duration::from_secs(1);

/// A shorter life lease than the default, so that it lapses in many runs; beats as many as fifty hours in a minute allow.
pub const TIMES: LeaseTimes = LeaseTimes {
    beat_ms: 6_000,
    dispatch_ms: 20_000,
    life_ms: 300_000,
    silent_ms: 15_000,
    quiet_slack_ms: 2_500,
    grace_ms: 10_000,
};

pub fn run(setup: &Setup) -> Result<Ended, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|e| format!("no runtime: {e}"))?;
    let ended = runtime.block_on(async {
        let mut world = World::new(setup).await?;
        world.live(setup.hours * HOUR).await?;
        world.come_to_rest().await?;
        let (packets, _) = world.wire.counted();
        let counted = lock(&world.truth).counted.clone();
        Ok(Ended { digest: 0, events: packets, hours: world.time.get() as f64 / HOUR as f64, counted })
    });
    runtime.shutdown_background();
    ended.map_err(|broken: Broken| format!("seed {} with quinn ({} hours): {broken}", setup.seed, setup.hours))
}

/// A broken invariant, wherever it was seen.
#[derive(Clone, Default)]
struct Verdict(Arc<Mutex<Option<Broken>>>);

impl Verdict {
    fn note<T>(&self, result: Result<T, Broken>) {
        if let Err(e) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }
    fn holds(&self) -> Result<(), Broken> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(e) => Err(e.clone()),
            None => Ok(()),
        }
    }
}

struct Host {
    name: HostId,
    machine: &'static str,
    ip: IpAddr,
    clock: MachineClock,
    dir: PathBuf,
    certificate: String,
    key: String,
    agent: Option<Agent>,
}

struct Agent {
    net: Net,
    plugged: Arc<AtomicBool>,
    measurer: Arc<Mutex<Option<Measurer>>>,
    measuring: JoinHandle<()>,
}

struct Coordinator {
    control: Arc<Control>,
    plugged: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

struct World {
    time: Arc<TrueTime>,
    wire: Arc<Wire>,
    hosts: Vec<Host>,
    home: Home,
    pki: Arc<Pki>,
    clock: MachineClock,
    coordinator: Option<Coordinator>,
    truth: SharedTruth,
    locks: Locks,
    verdict: Verdict,
    draw: Draw,
    manners: Manners,
    temper: Temper,
    /// What is to come back, and when.
    due: BTreeMap<(Instant, u64), Due>,
    number: u64,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Copy, Debug)]
enum Due {
    Agent(usize),
    Coordinator,
    Heal(usize),
    Fault,
    Operator,
}

/// Sockets of one process.
struct Process {
    wire: Arc<Wire>,
    ip: IpAddr,
    plugged: Arc<AtomicBool>,
}

impl Sockets for Process {
    fn open(&self, _: SocketAddr) -> std::io::Result<Endpoint> {
        let socket = self.wire.socket(self.ip, None, self.plugged.clone());
        Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, socket, self.runtime())
    }

    /// Simulated time is Tokio's.
    fn runtime(&self) -> Arc<dyn Runtime> {
        Arc::new(TokioRuntime)
    }
}

/// Control's ports, and the truth beside them.
struct Watched {
    control: Arc<Control>,
    truth: SharedTruth,
    verdict: Verdict,
    time: Arc<TrueTime>,
    clocks: BTreeMap<HostId, MachineClock>,
}

impl Watched {
    /// When something that a host stamped was sent, in true time.
    fn sent_us(&self, host: &HostId, sent: MonoMicros) -> u64 {
        let since = self.clocks.get(host).map_or(0, |c| c.boottime().us_since(sent));
        self.time.get().saturating_sub(since)
    }
}

impl Ports for Watched {
    async fn machine_of(&self, host: &HostId) -> Result<Option<MachineIdentity>, Failure> {
        self.control.machine_of(host).await
    }

    async fn on_connect(&self, peer: &Peer, hello: AgentHello) -> Result<Accepted, Failure> {
        let accepted = self.control.on_connect(peer, hello).await?;
        let mut truth = lock(&self.truth);
        truth.heard(&peer.host, 0, self.time.get());
        truth.answered(&peer.host, self.time.get());
        Ok(accepted)
    }

    async fn facts(&self, peer: &Peer, facts: HostFacts) {
        lock(&self.truth).heard(&peer.host, 0, self.time.get());
        self.control.facts(peer, facts).await;
    }

    async fn renewed(&self, peer: &Peer, certificate: Sha256, expires: Micros) -> Result<(), Failure> {
        self.control.renewed(peer, certificate, expires).await
    }

    async fn upgrade_failed(&self, peer: &Peer, upgrade: Upgrade, failure: Failure) {
        self.control.upgrade_failed(peer, upgrade, failure).await;
    }

    async fn demand_refused(&self, peer: &Peer, run: RunId, failure: Failure) {
        lock(&self.truth).heard(&peer.host, 0, self.time.get());
        self.control.demand_refused(peer, run, failure).await;
    }

    async fn commit_evidence(&self, peer: &Peer, batch: EvidenceBatch) -> Result<EvidenceAck, Failure> {
        lock(&self.truth).heard(&peer.host, 0, self.time.get());
        let ack = self.control.commit_evidence(peer, batch).await?;
        self.verdict.note(lock(&self.truth).acknowledged(&peer.host, ack.run, ack.through_seq));
        Ok(ack)
    }

    fn beat(&self, peer: &Peer, beat: &Beat, received: MonoMicros) -> Option<BeatAck> {
        let ack = self.control.beat(peer, beat, received);
        let sent_us = self.sent_us(&peer.host, beat.sent);
        let mut truth = lock(&self.truth);
        if ack.is_some() || renews(&self.control, peer, beat) {
            truth.heard(&peer.host, beat.quiet_ms, self.time.get());
        }
        if ack.is_some() {
            truth.answered(&peer.host, sent_us);
        }
        ack
    }

    fn disconnected(&self, peer: &Peer, reason: &str) {
        self.control.disconnected(peer, reason);
    }

    async fn artifact(&self, sha256: Sha256, offset: u64) -> Result<Content, Failure> {
        self.control.artifact(sha256, offset).await
    }

    fn report(&self, from: IpAddr, host: Option<&HostId>, failure: &Failure) {
        // Nobody in here is a stranger, and each host has one agent.
        if host.is_some() {
            self.verdict.note::<()>(Err(format!("a host of the fleet was refused: {failure}")));
        }
        self.control.report(from, host, failure);
    }
}

impl World {
    async fn new(setup: &Setup) -> Result<Self, Broken> {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).map_err(|e| chain(&e))?;
        let mut draw = Draw::new(setup.seed, &["quic"]);
        let time = Arc::new(TrueTime::Paused(Instant::now()));
        // Certificates are checked by the calendar of this machine.
        let today = drums_coordinator::clock::SystemClock.now();
        let (pki, _) = Pki::open_or_create(&dir.path().join("pki"), today).map_err(|e| chain(&e))?;
        let mut machines: BTreeMap<&str, MachineClock> = BTreeMap::new();
        let (mut hosts, mut roads, mut peers) = (Vec::new(), BTreeMap::new(), Vec::new());
        for (i, (name, machine)) in (1u8..).zip(HOSTS) {
            let clock = machines.entry(machine).or_insert_with(|| MachineClock::draw(&time, &mut draw)).clone();
            let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 0, i));
            let mut peer = fleet::peer(name);
            let (certificate, key, sha256) = enrol(&pki, &peer, today)?;
            peer.certificate = sha256;
            peers.push(peer);
            let latency = Duration::from_micros(500 + draw.below(60_000));
            roads.insert(ip, Road { latency, up_cut: false, down_cut: false, loss_percent: 0 });
            let dir = dir.path().join(name);
            hosts.push(Host { name: fleet::host(name), machine, ip, clock, dir, certificate, key, agent: None });
        }
        let home = Home::furnish(dir.path(), &peers).map_err(|e| chain(&e))?;
        let mut world = Self {
            clock: MachineClock::draw(&time, &mut draw),
            wire: Wire::new(roads, Draw::new(setup.seed, &["wire"])),
            time,
            hosts,
            home,
            pki: Arc::new(pki),
            coordinator: None,
            truth: Arc::new(Mutex::new(Truth::new(TIMES, &HOSTS))),
            locks: Locks::default(),
            verdict: Verdict::default(),
            draw,
            manners: setup.manners,
            temper: setup.temper,
            due: BTreeMap::new(),
            number: 0,
            _dir: dir,
        };
        for host in &world.hosts {
            lock(&world.truth).host(&host.name).ppm = host.clock.ppm();
        }
        world.start_coordinator().await?;
        for host in 0..world.hosts.len() {
            world.start_agent(host)?;
        }
        world.schedule(5 * S, Due::Operator);
        world.schedule_fault();
        Ok(world)
    }

    fn schedule(&mut self, us: u64, due: Due) {
        self.number += 1;
        self.due.insert((Instant::now() + Duration::from_micros(us), self.number), due);
    }

    fn schedule_fault(&mut self) {
        let mean = match self.temper {
            Temper::Never => return,
            Temper::Calm => 15 * MINUTE,
            Temper::Rough => 5 * MINUTE,
            Temper::Wild => 2 * MINUTE,
        };
        let wait = (-(self.draw.unit().ln()) * mean as f64) as u64;
        self.schedule(wait, Due::Fault);
    }

    async fn live(&mut self, us: u64) -> Result<(), Broken> {
        let end = Instant::now() + Duration::from_micros(us);
        loop {
            let next = self.due.first_key_value().map_or(end, |((at, _), _)| *at).min(end);
            sleep_until(next).await;
            self.verdict.holds()?;
            if next == end {
                return Ok(());
            }
            if let Some((_, due)) = self.due.pop_first() {
                self.perform(due).await?;
            }
        }
    }

    async fn perform(&mut self, due: Due) -> Result<(), Broken> {
        match due {
            Due::Agent(host) => self.start_agent(host),
            Due::Coordinator => self.start_coordinator().await,
            Due::Heal(host) => {
                self.wire.road(self.hosts[host].ip, |r| (r.up_cut, r.down_cut, r.loss_percent) = (false, false, 0));
                Ok(())
            }
            Due::Fault => {
                self.schedule_fault();
                self.fault();
                Ok(())
            }
            Due::Operator => {
                let next = MINUTE + self.draw.below(14 * MINUTE);
                self.schedule(next, Due::Operator);
                self.operate().await
            }
        }
    }

    fn fault(&mut self) {
        let host = self.draw.index(self.hosts.len());
        let us = match self.draw.below(12) {
            0 => 6 * MINUTE + self.draw.below(10 * MINUTE),
            1..=3 => self.draw.below(3 * MINUTE),
            _ => self.draw.below(20 * S),
        };
        let ip = self.hosts[host].ip;
        let kind = match self.draw.below(8) {
            0 | 1 => {
                self.kill_agent(host, us);
                "agent killed"
            }
            2 | 3 => {
                self.kill_coordinator(us);
                "coordinator killed"
            }
            4 | 5 => {
                self.wire.road(ip, |r| (r.up_cut, r.down_cut) = (true, true));
                self.schedule(us, Due::Heal(host));
                "partition"
            }
            6 => {
                let up = self.draw.below(2) == 0;
                self.wire.road(ip, |r| if up { r.up_cut = true } else { r.down_cut = true });
                self.schedule(us, Due::Heal(host));
                "one-way partition"
            }
            _ => {
                let percent = 5 + self.draw.below(30);
                self.wire.road(ip, |r| r.loss_percent = percent);
                self.schedule(us, Due::Heal(host));
                "loss"
            }
        };
        lock(&self.truth).fault(kind);
    }

    async fn start_coordinator(&mut self) -> Result<(), Broken> {
        if self.coordinator.is_some() {
            return Ok(());
        }
        let clock: Arc<dyn Clock> = Arc::new(self.clock.clone());
        let (control, driver) = self.home.open(clock.clone(), TIMES).await.map_err(|e| chain(&e))?;
        let plugged = Arc::new(AtomicBool::new(true));
        let (config, server) = endpoint::for_agents(&self.pki).map_err(|e| chain(&e))?;
        let socket = self.wire.socket(COORDINATOR.ip(), Some(COORDINATOR.port()), plugged.clone());
        let endpoint = Endpoint::new_with_abstract_socket(config, Some(server), socket, Arc::new(TokioRuntime));
        let endpoint = endpoint.map_err(|e| chain(&e))?;
        let ports = Arc::new(Watched {
            control: control.clone(),
            truth: self.truth.clone(),
            verdict: self.verdict.clone(),
            time: self.time.clone(),
            clocks: self.hosts.iter().map(|h| (h.name.clone(), h.clock.clone())).collect(),
        });
        // Nobody shuts it down: it is killed.
        let (alive, down) = watch::channel(false);
        let build = Sha256::of(b"coordinator");
        let serving = tokio::spawn(serve_agents(endpoint, ports, self.pki.clone(), TIMES, clock, build, down.clone()));
        let driving = tokio::spawn(async move {
            let _alive = alive;
            driver.run(down).await;
        });
        let checking = tokio::spawn(check(
            control.clone(),
            self.home.clone(),
            self.truth.clone(),
            self.verdict.clone(),
            self.time.clone(),
        ));
        {
            let mut truth = lock(&self.truth);
            truth.up_us = Some(self.time.get());
            truth.coordinator(true, self.time.get());
        }
        self.coordinator = Some(Coordinator { control, plugged, tasks: vec![serving, driving, checking] });
        Ok(())
    }

    fn kill_coordinator(&mut self, down_us: u64) {
        let Some(coordinator) = self.coordinator.take() else { return };
        self.verdict.note(self.home.tell_fences(&mut lock(&self.truth), self.time.get()));
        coordinator.plugged.store(false, Ordering::Relaxed);
        coordinator.tasks.iter().for_each(JoinHandle::abort);
        {
            let mut truth = lock(&self.truth);
            truth.up_us = None;
            truth.coordinator(false, self.time.get());
        }
        self.schedule(down_us, Due::Coordinator);
    }

    fn start_agent(&mut self, i: usize) -> Result<(), Broken> {
        let host = &mut self.hosts[i];
        if host.agent.is_some() {
            return Ok(());
        }
        let (spool, _, damaged) = Spool::open(&host.dir, 0).map_err(|e| format!("{}: {e}", host.name))?;
        if let Some(e) = damaged.first() {
            return Err(format!("{} finds its spool damaged: {}", host.name, drums_common::telemetry::chain(e)));
        }
        let spool = Arc::new(spool);
        let plugged = Arc::new(AtomicBool::new(true));
        let sockets = Arc::new(Process { wire: self.wire.clone(), ip: host.ip, plugged: plugged.clone() });
        let config = NetConfig {
            identity: identity(&self.pki, host)?,
            workloads: host.dir.join("workloads"),
            ca_file: host.dir.join("no-bucket.pem"),
            build: fleet::build(),
            facts: fleet::facts(host.machine),
            clock: Arc::new(host.clock.clone()),
            spool: spool.clone(),
            disk: tokio::runtime::Handle::current(),
        };
        let (net, link) = Net::start_on(sockets, config).map_err(|e| chain(&e))?;
        let measurer = Measurer::start(
            host.name.clone(),
            host.machine,
            link,
            host.clock.clone(),
            spool,
            Draw::new(self.draw.next_u64(), &["agent"]),
            self.manners,
            self.truth.clone(),
            self.locks.clone(),
        )?;
        let measurer = Arc::new(Mutex::new(Some(measurer)));
        let measuring = tokio::spawn(measure(measurer.clone(), self.time.clone(), self.verdict.clone()));
        host.agent = Some(Agent { net, plugged, measurer, measuring });
        Ok(())
    }

    fn kill_agent(&mut self, i: usize, down_us: u64) {
        let Some(agent) = self.hosts[i].agent.take() else { return };
        agent.plugged.store(false, Ordering::Relaxed);
        agent.measuring.abort();
        agent.net.abort();
        if let Some(measurer) = agent.measurer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            measurer.die();
        }
        self.schedule(down_us, Due::Agent(i));
    }

    async fn operate(&mut self) -> Result<(), Broken> {
        let Some(control) = self.coordinator.as_ref().map(|c| c.control.clone()) else { return Ok(()) };
        let live: Vec<RunId> = lock(&self.truth).runs().filter(|s| s.live()).map(|s| s.id).collect();
        if self.draw.below(8) == 0 && !live.is_empty() {
            let run = live[self.draw.index(live.len())];
            lock(&self.truth).cancelled.insert(run);
            let _ = control.cancel_run(run, Who::new("operator", "")).await;
            return Ok(());
        }
        let registrations = fleet::registrations();
        let experiment = registrations[self.draw.index(registrations.len())].experiment.id;
        let mut id = [0; 6];
        id.copy_from_slice(&self.draw.next_u64().to_be_bytes()[..6]);
        let new = NewRun { id: RunId(id), experiment, registration: None, until: None, by: Who::new("operator", "") };
        if let Ok(state) = control.create_run(new).await {
            lock(&self.truth).run(&state, self.time.get())?;
        }
        Ok(())
    }

    /// Everything comes back and heals; then nothing may stay open or owed.
    async fn come_to_rest(&mut self) -> Result<(), Broken> {
        self.due.clear();
        for host in 0..self.hosts.len() {
            self.perform(Due::Heal(host)).await?;
            self.start_agent(host)?;
        }
        self.start_coordinator().await?;
        for _ in 0..180 {
            sleep(Duration::from_secs(60)).await;
            self.verdict.holds()?;
            let truth = self.truth.clone();
            if lock(&truth).rest().is_ok() {
                let ids: Vec<_> =
                    lock(&truth).runs().flat_map(|s| s.hosts.iter().map(|h| (s.id, h.host.clone()))).collect();
                for (run, host) in ids {
                    let rows = self.home.read(|s| s.evidence(run, &host, 0, 100_000))?;
                    let rows: Vec<_> = rows.into_iter().map(|r| (r.record, r.late)).collect();
                    lock(&truth).stored(&host, run, &rows)?;
                }
                return Ok(());
            }
        }
        lock(&self.truth).rest().map_err(|e| format!("three quiet hours later {e}"))
    }
}

/// The measuring side of one agent.
async fn measure(measurer: Arc<Mutex<Option<Measurer>>>, time: Arc<TrueTime>, verdict: Verdict) {
    loop {
        let wait = match measurer.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(m) => m.look(time.get()),
            None => return,
        };
        match wait {
            Ok(wait) => sleep(wait.map_or(LOOK, Duration::from_micros).min(LOOK)).await,
            Err(e) => {
                verdict.note::<()>(Err(e));
                return;
            }
        }
    }
}

/// Looks at every run whenever one changed.
async fn check(control: Arc<Control>, home: Home, truth: SharedTruth, verdict: Verdict, time: Arc<TrueTime>) {
    let mut changes = control.changes();
    loop {
        let ids: Vec<RunId> = lock(&truth).unsettled().collect();
        for id in ids {
            let row = home.read(|s| s.run(id)).and_then(|r| r.ok_or_else(|| format!("{id} is not in the store")));
            verdict.note(row.and_then(|row| {
                let mut truth = lock(&truth);
                if !truth.differs(&row.state) {
                    return Ok(());
                }
                if truth.loses(&row.state) {
                    home.tell_fences(&mut truth, time.get())?;
                }
                truth.run(&row.state, time.get())
            }));
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// A certificate for a host, without the enrolment that others test.
fn enrol(pki: &Pki, peer: &Peer, today: Micros) -> Result<(String, String, Sha256), Broken> {
    let key = rcgen::KeyPair::generate().map_err(|e| e.to_string())?;
    let request = rcgen::CertificateParams::default().serialize_request(&key).map_err(|e| e.to_string())?;
    let request = SigningRequest::parse(request.der()).map_err(|e| chain(&e))?;
    let issued = pki.issue_agent(&request, &peer.host, peer.installation, today);
    let issued = issued.map_err(|e| chain(&e))?;
    Ok((issued.pem, key.serialize_pem(), issued.sha256))
}

fn identity(pki: &Pki, host: &Host) -> Result<Identity, Broken> {
    let leaf = CertificateDer::from_pem_slice(host.certificate.as_bytes()).map_err(|e| e.to_string())?;
    let key = PrivatePkcs8KeyDer::from_pem_slice(host.key.as_bytes()).map_err(|e| e.to_string())?;
    Ok(Identity {
        host: host.name.clone(),
        installation: fleet::peer(host.name.as_str()).installation,
        addresses: vec![Address { host: COORDINATOR.ip().to_string(), agents: COORDINATOR.port(), enrol: 1 }],
        ca: pki.ca_der().clone(),
        chain: vec![leaf],
        key: PrivateKeyDer::from(key),
        // Not within the hours of a world.
        renew_at: Micros(i64::MAX),
        folder: host.dir.clone(),
    })
}
