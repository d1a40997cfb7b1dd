//! A coordinator whose store is in memory and may be told to fail, and agents made of the real `net` and `spool`.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use drums_agent::{
    measure::clock::SystemClock as AgentClock,
    net::{Identity, Link, Net, NetConfig, enrol},
    spool::{RunMeta, RunSpool, Spool},
};
use drums_common::{
    bucket::Key,
    clock::{Clock, Micros, MonoMicros},
    digest::Sha256,
    evidence::{Body, Log, Record},
    failure::{Failure, FailureClass},
    ids::{Generation, HostId, InstallationId, RunId},
    lease::{Health, HostLeases, LeaseTimes},
    machine::{Accelerator, HostFacts, MachineIdentity},
    token::{Address, Secret, Token},
    wire::latest::{
        AgentHello, Beat, BeatAck, Desired, EvidenceAck, EvidenceBatch, RunUploads, Upgrade, Uploads, Welcome,
    },
};
use drums_coordinator::{
    artifacts::Content,
    bucket::Bucket,
    clock::SystemClock,
    net::{
        endpoint,
        ports::{Accepted, Bound, Order, Peer, Ports, Redemption, TokenRefusal, TokenStore},
        serve_agents, serve_enrolment,
    },
    pki::Pki,
};
use tokio::{
    runtime::Runtime,
    sync::{Notify, watch},
};

/// Nothing here takes this long; a condition that does not come to hold by then never will.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const TIMES: LeaseTimes =
    LeaseTimes { beat_ms: 40, dispatch_ms: 400, life_ms: 30_000, silent_ms: 200, quiet_slack_ms: 200, grace_ms: 1_000 };

/// The coordinator's, in a bucket.
pub const INSTALLATION: InstallationId = InstallationId([1, 2, 3, 4]);

pub fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

pub fn facts(machine: &str) -> HostFacts {
    HostFacts {
        identity: MachineIdentity {
            boot_id: machine.into(),
            machine_id: machine.into(),
            dmi_uuid: String::new(),
            btime_s: 1,
            hardware: "x2".into(),
        },
        hostname: machine.into(),
        kernel: "6".into(),
        os: "Debian 12".into(),
        cpu_model: "cpu".into(),
        microcode: String::new(),
        mitigations: BTreeMap::new(),
        cpus: 2,
        memory_bytes: 1 << 30,
        disk_free_bytes: 1 << 30,
        cgroup_version: 1,
        accelerator: Accelerator::None,
        accelerator_detail: String::new(),
        tools: BTreeMap::new(),
        unfit: BTreeMap::new(),
    }
}

#[derive(Clone, Debug)]
pub struct TokenRow {
    pub host: HostId,
    pub expires: Micros,
    pub used_by: Option<Sha256>,
}

pub struct State {
    pub tokens: BTreeMap<Sha256, TokenRow>,
    pub enrolled: Vec<Peer>,
    pub renewed: Vec<Peer>,
    /// Certificates that were shown with a hello.
    pub shown: Vec<Sha256>,
    pub refusals: Vec<Failure>,
    pub reports: Vec<Failure>,
    pub connects: Vec<(HostId, u64)>,
    pub disconnects: Vec<(HostId, String)>,
    pub beats: Vec<(HostId, Beat, MonoMicros)>,
    pub machines: BTreeMap<HostId, MachineIdentity>,
    pub generations: BTreeMap<HostId, u32>,
    pub committed: BTreeMap<(RunId, HostId, u64), Record>,
    /// Batches received, also repeated ones.
    pub batches: u32,
    /// Commit this many batches and then fail before the answer.
    pub lose_answers: u32,
    /// Runs that do not exist here.
    pub unknown_runs: Vec<RunId>,
    pub leases: HostLeases,
    pub orders: BTreeMap<HostId, watch::Sender<Order>>,
    pub refuse: Option<Failure>,
    /// For sealed evidence.
    pub bucket: Option<Bucket>,
}

/// The store of the fake coordinator: outlives its restarts.
pub struct Store {
    state: Mutex<State>,
    changed: Notify,
    pub artifacts: PathBuf,
}

impl Store {
    pub fn new(artifacts: PathBuf) -> Arc<Self> {
        std::fs::create_dir_all(&artifacts).unwrap();
        let state = State {
            tokens: BTreeMap::new(),
            enrolled: Vec::new(),
            renewed: Vec::new(),
            shown: Vec::new(),
            refusals: Vec::new(),
            reports: Vec::new(),
            connects: Vec::new(),
            disconnects: Vec::new(),
            beats: Vec::new(),
            machines: BTreeMap::new(),
            generations: BTreeMap::new(),
            committed: BTreeMap::new(),
            batches: 0,
            lose_answers: 0,
            unknown_runs: vec![],
            leases: HostLeases::new(TIMES, SystemClock.boottime()),
            orders: BTreeMap::new(),
            refuse: None,
            bucket: None,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new(), artifacts })
    }

    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let out = f(&mut self.state.lock().unwrap());
        self.changed.notify_waiters();
        out
    }

    /// Waits until the condition yields something.
    pub async fn until<T>(&self, what: &str, mut condition: impl FnMut(&State) -> Option<T>) -> T {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if let Some(out) = condition(&self.state.lock().unwrap()) {
                    return out;
                }
                changed.await;
            }
        };
        match tokio::time::timeout(PATIENCE, wait).await {
            Ok(out) => out,
            Err(_) => panic!("never came to hold: {what}"),
        }
    }

    pub fn order(&self, name: &str, order: Order) {
        self.with(|s| s.orders[&host(name)].send_replace(order));
    }

    pub fn health(&self, name: &str) -> Health {
        self.with(|s| s.leases.health(&host(name), SystemClock.boottime()).unwrap())
    }

    pub async fn connected(&self, name: &str, times: usize) {
        let host = host(name);
        self.until(&format!("{name} connected {times} times"), |s| {
            (s.connects.iter().filter(|(h, _)| *h == host).count() >= times).then_some(())
        })
        .await;
    }
}

impl Ports for Store {
    async fn machine_of(&self, host: &HostId) -> Result<Option<MachineIdentity>, Failure> {
        Ok(self.with(|s| s.machines.get(host).cloned()))
    }

    async fn on_connect(&self, peer: &Peer, hello: AgentHello) -> Result<Accepted, Failure> {
        self.with(|s| {
            if let Some(failure) = &s.refuse {
                return Err(failure.clone());
            }
            let generation = *s.generations.entry(peer.host.clone()).or_insert(1);
            let generation = Generation(generation);
            s.machines.insert(peer.host.clone(), hello.facts.identity.clone());
            s.shown.push(peer.certificate);
            s.connects.push((peer.host.clone(), hello.instance));
            s.leases.welcomed(peer.host.clone(), generation, SystemClock.boottime()).unwrap();
            let orders = s
                .orders
                .entry(peer.host.clone())
                .or_insert_with(|| watch::channel(Order::Desired(Desired { generation, runs: Vec::new() })).0)
                .subscribe();
            let welcome = Welcome {
                host: peer.host.clone(),
                generation,
                beat_ms: TIMES.beat_ms,
                dispatch_lease_ms: TIMES.dispatch_ms,
                life_lease_ms: TIMES.life_ms,
            };
            Ok(Accepted { welcome, orders })
        })
    }

    async fn facts(&self, _: &Peer, _: HostFacts) {}

    async fn renewed(&self, peer: &Peer, certificate: Sha256, _: Micros) -> Result<(), Failure> {
        self.with(|s| s.renewed.push(Peer { certificate, ..peer.clone() }));
        Ok(())
    }

    async fn upgrade_failed(&self, _: &Peer, _: Upgrade, failure: Failure) {
        self.with(|s| s.refusals.push(failure));
    }

    async fn demand_refused(&self, _: &Peer, _: RunId, failure: Failure) {
        self.with(|s| s.refusals.push(failure));
    }

    async fn commit_evidence(&self, _: &Peer, batch: EvidenceBatch) -> Result<EvidenceAck, Failure> {
        self.with(|s| {
            s.batches += 1;
            if s.unknown_runs.contains(&batch.run) {
                return Err(Failure::new(FailureClass::Permanent, "no-such-run", "not here", ""));
            }
            let host = batch.records[0].host.clone();
            let through = |s: &State| {
                s.committed.keys().filter(|(r, h, _)| *r == batch.run && *h == host).map(|k| k.2).max().unwrap_or(0)
            };
            for record in &batch.records {
                if record.seq == through(s) + 1 {
                    let old = s.committed.insert((batch.run, host.clone(), record.seq), record.clone());
                    assert!(old.is_none());
                }
            }
            if s.lose_answers > 0 {
                s.lose_answers -= 1;
                return Err(Failure::new(FailureClass::Transient, "test", "answer lost", ""));
            }
            Ok(EvidenceAck { run: batch.run, through_seq: through(s) })
        })
    }

    fn beat(&self, peer: &Peer, beat: &Beat, received: MonoMicros) -> Option<BeatAck> {
        self.with(|s| {
            s.beats.push((peer.host.clone(), beat.clone(), received));
            s.leases.beat(&peer.host, beat, received)
        })
    }

    fn disconnected(&self, peer: &Peer, reason: &str) {
        self.with(|s| s.disconnects.push((peer.host.clone(), reason.to_owned())));
    }

    async fn artifact(&self, sha256: Sha256, offset: u64) -> Result<Content, Failure> {
        let content = Content::of_file(self.artifacts.join(sha256.to_string()), offset).await.unwrap();
        content.ok_or_else(|| Failure::refused("no-artifact", "not here", ""))
    }

    fn has_bucket(&self) -> bool {
        self.with(|s| s.bucket.is_some())
    }

    async fn uploads(&self, peer: &Peer, runs: &[RunId]) -> Result<Uploads, Failure> {
        let bucket = self.with(|s| s.bucket.clone()).unwrap();
        let mut out = Uploads::default();
        for run in runs {
            let mut segments = Vec::new();
            for index in 0..3 {
                let key = Key::Segment(*run, peer.host.clone(), index).of(INSTALLATION);
                segments.push(bucket.place(&key, Duration::from_secs(60)).await.unwrap());
            }
            out.runs.push(RunUploads { run: *run, segments, valid_ms: 60_000 });
        }
        Ok(out)
    }

    fn report(&self, _: std::net::IpAddr, _: Option<&HostId>, failure: &Failure) {
        self.with(|s| s.reports.push(failure.clone()));
    }
}

impl TokenStore for Store {
    /// Nothing is launched here.
    async fn bound(&self, _: Sha256, _: Option<Sha256>) -> Result<Bound, TokenRefusal> {
        Ok(Bound::default())
    }

    async fn redeem(&self, r: Redemption) -> Result<(), TokenRefusal> {
        self.with(|s| {
            let row = s.tokens.get_mut(&r.secret_sha256).ok_or(TokenRefusal::Unknown)?;
            if row.host != r.host {
                return Err(TokenRefusal::WrongHost(row.host.clone()));
            }
            if r.now >= row.expires {
                return Err(TokenRefusal::Expired);
            }
            match row.used_by {
                Some(key) if key != r.key_sha256 => Err(TokenRefusal::Reused),
                _ => {
                    row.used_by = Some(r.key_sha256);
                    Ok(())
                }
            }
        })
    }

    async fn enrolled(&self, peer: Peer, _: Micros) -> Result<(), TokenRefusal> {
        self.with(|s| s.enrolled.push(peer));
        Ok(())
    }

    fn refused(&self, _: std::net::IpAddr, _: &HostId, failure: &Failure) {
        self.with(|s| s.refusals.push(failure.clone()));
    }
}

/// The network side of a coordinator, in a runtime of its own so that it can be killed without a word.
pub struct Coordinator {
    pub store: Arc<Store>,
    pub pki: Arc<Pki>,
    pub agents: SocketAddr,
    pub enrol: SocketAddr,
    runtime: Option<Runtime>,
    shutdown: watch::Sender<bool>,
    _dir: Arc<tempfile::TempDir>,
}

impl Coordinator {
    pub fn start() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let (pki, _) = Pki::open_or_create(&dir.path().join("pki"), SystemClock.now()).unwrap();
        let store = Store::new(dir.path().join("artifacts"));
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut out = Self {
            store,
            pki: Arc::new(pki),
            agents: any,
            enrol: any,
            runtime: None,
            shutdown: watch::channel(false).0,
            _dir: dir,
        };
        out.run();
        out
    }

    /// Runs on the ports of before.
    pub fn run(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let _in = runtime.enter();
        let agents = endpoint::agents(self.agents, &self.pki).unwrap();
        let enrol = endpoint::enrolment(self.enrol, &self.pki).unwrap();
        self.agents = agents.local_addr().unwrap();
        self.enrol = enrol.local_addr().unwrap();
        let (shutdown, down) = watch::channel(false);
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let build = Sha256::of(b"coordinator");
        runtime.spawn(serve_agents(
            agents,
            self.store.clone(),
            self.pki.clone(),
            TIMES,
            clock.clone(),
            build,
            down.clone(),
        ));
        runtime.spawn(serve_enrolment(
            enrol,
            self.store.clone(),
            self.pki.clone(),
            Default::default(),
            clock,
            build,
            down,
        ));
        self.shutdown = shutdown;
        drop(_in);
        self.runtime = Some(runtime);
    }

    /// As `kill -9`: no goodbye, no close.
    pub async fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(5))).await.unwrap();
    }

    /// An orderly end.
    pub fn shut_down(&self) {
        self.shutdown.send_replace(true);
    }

    pub fn token(&self, name: &str) -> Token {
        self.token_until(name, SystemClock.now().plus_ms(60_000))
    }

    pub fn token_until(&self, name: &str, expires: Micros) -> Token {
        let secret = Secret::new(std::array::from_fn(|i| (i as u8).wrapping_mul(7) ^ random_byte()));
        let row = TokenRow { host: host(name), expires, used_by: None };
        self.store.with(|s| s.tokens.insert(secret.sha256(), row));
        Token {
            addresses: vec![Address {
                host: self.enrol.ip().to_string(),
                agents: self.agents.port(),
                enrol: self.enrol.port(),
            }],
            ca: self.pki.fingerprint(),
            host: host(name),
            secret,
            expires,
        }
    }

    /// A workload in the artifacts: its digest.
    pub fn add_workload(&self, files: &[(&str, &[u8])]) -> Sha256 {
        use drums_common::experiment::{ManifestFile, WorkloadManifest};
        let mut manifest = WorkloadManifest { version: 1, files: BTreeMap::new() };
        let dir =
            |mode| ManifestFile { kind: "dir".into(), mode, bytes: 0, sha256: Sha256::of(b""), target: String::new() };
        for folder in ["tree", "tree/bin"] {
            manifest.files.insert(folder.into(), dir(0o755));
        }
        for (path, content) in files {
            let sha256 = Sha256::of(content);
            std::fs::write(self.store.artifacts.join(sha256.to_string()), content).unwrap();
            let file = ManifestFile {
                kind: "file".into(),
                mode: 0o755,
                bytes: content.len() as u64,
                sha256,
                target: String::new(),
            };
            manifest.files.insert((*path).to_owned(), file);
        }
        let target = "tool".to_owned();
        let sha256 = Sha256::of(target.as_bytes());
        manifest.files.insert(
            "tree/bin/link".into(),
            ManifestFile { kind: "symlink".into(), mode: 0o777, bytes: 0, sha256, target },
        );
        std::fs::write(self.store.artifacts.join(manifest.sha256().to_string()), manifest.canonical()).unwrap();
        manifest.sha256()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn random_byte() -> u8 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0u8) as u8
}

/// An agent without a measuring side.
pub struct Agent {
    pub spool: Arc<Spool>,
    pub link: Link,
    pub net: Option<Net>,
    pub host: HostId,
}

impl Agent {
    /// Enrols in `state` if need be, and connects.
    pub async fn start(coordinator: &Coordinator, name: &str, state: &Path) -> Self {
        if Identity::load(state).unwrap().is_none() {
            enrol(state, &coordinator.token(name), Sha256::of(b"agent"), None).await.unwrap();
        }
        Self::run(name, state, "m1").await
    }

    /// Runs with the identity that is in `state`.
    pub async fn run(name: &str, state: &Path, machine: &str) -> Self {
        Self::run_at(name, state, machine, Arc::new(AgentClock)).await
    }

    /// By a clock of its own.
    pub async fn run_at(name: &str, state: &Path, machine: &str, clock: Arc<dyn Clock>) -> Self {
        let here = tokio::runtime::Handle::current();
        Self::run_on(name, state, machine, clock, &here, here.clone())
    }

    /// On other threads than the test's: connections and beats on `link`, and on `disk` what may have to wait for one.
    pub fn run_on(
        name: &str,
        state: &Path,
        machine: &str,
        clock: Arc<dyn Clock>,
        link: &tokio::runtime::Handle,
        disk: tokio::runtime::Handle,
    ) -> Self {
        let (spool, _, damaged) = Spool::open(&state.join("spool"), 0).unwrap();
        assert!(damaged.is_empty());
        let spool = Arc::new(spool);
        let config = NetConfig {
            identity: Identity::load(state).unwrap().unwrap(),
            workloads: state.join("workloads"),
            build: Sha256::of(b"agent"),
            facts: facts(machine),
            clock,
            spool: spool.clone(),
            ca_file: "/etc/ssl/certs/ca-certificates.crt".into(),
            disk,
        };
        let _inside = link.enter();
        let (net, link) = Net::start(config).unwrap();
        Self { spool, link, net: Some(net), host: host(name) }
    }

    pub fn run_spool(&self, run: RunId) -> Arc<RunSpool> {
        let meta = RunMeta { run, registration: Sha256::of(b"registration"), host: self.host.clone() };
        self.spool.create_run(meta).unwrap()
    }

    /// Waits until the view is as wanted.
    pub async fn until(&self, what: &str, mut condition: impl FnMut(&drums_agent::net::View) -> bool + Send + 'static) {
        let link = self.link.clone();
        let what = what.to_owned();
        let wait = move || {
            let deadline = std::time::Instant::now() + PATIENCE;
            let mut view = link.view();
            while !condition(&view) {
                assert!(std::time::Instant::now() < deadline, "never came to hold: {what}; {view:?}");
                view = link.wait(view.version, Duration::from_millis(200));
            }
        };
        tokio::task::spawn_blocking(wait).await.unwrap();
    }
}

pub fn log(text: &str) -> Body {
    Body::Log(Log { level: "info".into(), target: "test".into(), text: text.into() })
}

pub const RUN: RunId = RunId([9; 6]);
pub const OTHER_INSTALLATION: InstallationId = InstallationId([0xee; 4]);
