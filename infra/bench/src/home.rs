//! A coordinator to be measured: a home with a thousand enrolled hosts, and the real daemon on it.
//!
//! Hosts get their certificates from the home's CA as enrolment gives them, without its round trips: the same rows are
//! written while no daemon runs.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::SocketAddr,
    os::unix::{
        fs::{OpenOptionsExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::LazyLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use drums_agent::net::Identity;
use drums_common::{
    clock::{Clock as _, Micros},
    digest::Sha256,
    experiment::{Experiment, Registration},
    ids::{HostId, InstallationId, RunId},
    lease::LeaseTimes,
    token::Address,
};
use drums_coordinator::{
    clock::SystemClock,
    config::{Home as Layout, RawConfig},
    pki::{Pki, SigningRequest},
    store::{AuditRow, CertificateRow, Ownership, Registered, SqliteStore, Store as _, Who},
};
use drums_infra::loopback::Loopback;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use serde_json::{Value, json};

use crate::{
    agents::Host,
    process::{Running, dying_with_us, pause},
};

const START: Duration = Duration::from_secs(60);

/// One enrolled host, as often as it is wanted.
#[derive(Clone)]
struct Enrolled {
    host: HostId,
    installation: InstallationId,
    certificate_pem: String,
    key_pem: String,
}

pub struct Home {
    pub dir: PathBuf,
    program: PathBuf,
    pub agents: SocketAddr,
    enrol: u16,
    ca_pem: String,
    hosts: Vec<Enrolled>,
}

/// An address for a server that nobody else takes.
pub fn free_address() -> Result<SocketAddr> {
    static HERE: LazyLock<std::io::Result<Loopback>> = LazyLock::new(Loopback::claim);
    let here = HERE.as_ref().map_err(|e| anyhow!("no loopback address can be had: {e}"))?;
    here.socket().context("no port is free")
}

pub fn host_name(n: usize) -> HostId {
    format!("sim-{n:04}").parse().expect("letters and digits")
}

impl Home {
    /// Makes a home below `dir` with `hosts` enrolled hosts and these experiments registered.
    pub fn make(
        dir: &Path,
        program: &Path,
        hosts: usize,
        leases: LeaseTimes,
        experiments: &[Experiment],
    ) -> Result<Self> {
        let now = SystemClock.now();
        let layout = Layout::new(dir);
        fs::create_dir_all(layout.artifacts()).with_context(|| format!("cannot create {}", dir.display()))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
        let mut store = SqliteStore::open(&layout.store())?;
        store.meta_or("installation", &InstallationId(rand::random()).to_string(), &audit(now, "init"))?;
        let (pki, _) = Pki::open_or_create(&layout.pki(), now)?;
        let (agents, enrol, api) = (free_address()?, free_address()?.port(), free_address()?);
        let config = RawConfig {
            listen: agents.ip(),
            agents_port: agents.port(),
            enrol_port: enrol,
            api,
            advertise: vec![agents.ip().to_string()],
            leases,
            ..RawConfig::default()
        };
        fs::write(layout.config(), toml::to_string(&config)?)?;
        let mut enrolled = Vec::with_capacity(hosts);
        // A sync of the disk for all.
        store.begin_together()?;
        for n in 0..hosts {
            enrolled.push(enrol_host(&mut store, &pki, host_name(n), now)?);
        }
        store.commit_together()?;
        for experiment in experiments {
            let registration = Registration::freeze(experiment.clone(), now)?;
            let audit = audit(now, "register").detail(&experiment.id.to_string());
            let registered = store.add_registration(&registration, "", false, &audit)?;
            ensure!(registered == Registered::New, "{} was not registered: {registered:?}", experiment.id);
        }
        let (dir, program, ca_pem) = (dir.to_owned(), program.to_owned(), pki.ca_pem().to_owned());
        Ok(Self { dir, program, agents, enrol, ca_pem, hosts: enrolled })
    }

    fn identity(&self, n: usize) -> Result<Identity> {
        let e = &self.hosts[n];
        let key = PrivatePkcs8KeyDer::from_pem_slice(e.key_pem.as_bytes())?;
        Ok(Identity {
            host: e.host.clone(),
            installation: e.installation,
            addresses: vec![self.address()],
            ca: CertificateDer::from_pem_slice(self.ca_pem.as_bytes())?,
            chain: vec![CertificateDer::from_pem_slice(e.certificate_pem.as_bytes())?],
            key: key.into(),
            // In memory, for as long as the bench.
            renew_at: Micros(i64::MAX),
            folder: PathBuf::new(),
        })
    }

    fn address(&self) -> Address {
        Address { host: self.agents.ip().to_string(), agents: self.agents.port(), enrol: self.enrol }
    }

    /// Agents for the hosts in the range.
    pub fn hosts(&self, range: std::ops::Range<usize>) -> Result<Vec<Host>> {
        range.map(|n| Ok(Host { identity: self.identity(n)?, machine: u32::try_from(n)? })).collect()
    }

    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// A host's state folder as the real agent keeps it, for another process.
    pub fn write_state(&self, n: usize) -> Result<PathBuf> {
        let e = &self.hosts[n];
        let state = self.dir.join("agents").join(e.host.as_str());
        let dir = state.join("identity");
        fs::create_dir_all(&dir)?;
        let file = json!({ "host": e.host, "addresses": [self.address()] });
        fs::write(state.join("installation"), e.installation.to_string())?;
        fs::write(dir.join("coordinator.json"), file.to_string())?;
        fs::write(dir.join("ca.pem"), &self.ca_pem)?;
        fs::write(dir.join("cert.pem"), &e.certificate_pem)?;
        let mut key = File::options().create(true).truncate(true).write(true).mode(0o600).open(dir.join("key.pem"))?;
        key.write_all(e.key_pem.as_bytes())?;
        Ok(state)
    }

    /// Starts the daemon; returns once it answers.
    pub fn start(&self) -> Result<Coordinator> {
        let log = File::options().create(true).append(true).open(self.dir.join("coordinator.log"))?;
        let mut command = dying_with_us(&self.program);
        command.arg("--home").arg(&self.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // A line for each of a thousand hosts is not what a bench is about; warnings are kept.
        command.env("NO_COLOR", "1").env("DRUMS_LOG", std::env::var("DRUMS_LOG").unwrap_or("warn".to_owned()));
        let mut running = Running::start(&mut command)?;
        let socket = Layout::new(&self.dir).socket();
        let deadline = Instant::now() + START;
        while UnixStream::connect(&socket).is_err() {
            ensure!(running.lives(), "the coordinator ended before it was ready; its log is in {}", self.dir.display());
            ensure!(Instant::now() < deadline, "the coordinator is not ready; its log is in {}", self.dir.display());
            pause();
        }
        Ok(Coordinator { running, socket })
    }
}

fn audit(now: Micros, action: &str) -> AuditRow {
    AuditRow::new(now, Who::new("bench", ""), action)
}

fn enrol_host(store: &mut SqliteStore, pki: &Pki, host: HostId, now: Micros) -> Result<Enrolled> {
    let key = KeyPair::generate()?;
    let request = CertificateParams::default().serialize_request(&key)?;
    let installation = InstallationId(rand::random());
    let issued = pki.issue_agent(&SigningRequest::parse(request.der())?, &host, installation, now)?;
    store.add_host(&host, "sandbox", Ownership::Adopted, &audit(now, "host-add").host(&host))?;
    let (sha256, expires) = (issued.sha256, issued.expires);
    let row = CertificateRow { sha256, host: host.clone(), installation, expires, revoked: None };
    store.add_certificate(&row, &audit(now, "enrolled").host(&row.host))?;
    Ok(Enrolled { host, installation, certificate_pem: issued.pem, key_pem: key.serialize_pem() })
}

/// The daemon on a home, and its operator's API.
pub struct Coordinator {
    pub running: Running,
    socket: PathBuf,
}

impl Coordinator {
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// A request to the unix socket of the home.
    pub fn api(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let attempt = || format!("{method} {path}");
        let mut stream = UnixStream::connect(&self.socket).with_context(attempt)?;
        stream.set_read_timeout(Some(START))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} /api/v1/{path} HTTP/1.1\r\nhost: drums\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).with_context(attempt)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).with_context(attempt)?;
        let text = String::from_utf8_lossy(&answer);
        let (head, body) = text.split_once("\r\n\r\n").with_context(attempt)?;
        if !head.starts_with("HTTP/1.1 2") {
            bail!("{method} {path}: {}: {body}", head.lines().next().unwrap_or_default());
        }
        ensure!(!head.to_lowercase().contains("transfer-encoding: chunked"), "{method} {path} was answered in chunks");
        serde_json::from_str(body).with_context(|| format!("{method} {path}: {body}"))
    }

    pub fn run(&self, experiment: &Experiment) -> Result<RunId> {
        let made = self.api("POST", "runs", Some(&json!({ "experiment": experiment.id })))?;
        Ok(made["run"].as_str().context("a run without an id")?.parse()?)
    }

    pub fn cancel(&self, run: RunId) -> Result<()> {
        self.api("POST", &format!("runs/{run}/cancel"), Some(&json!({}))).map(|_| ())
    }

    pub fn runs(&self) -> Result<Vec<Value>> {
        Ok(self.api("GET", "runs", None)?["runs"].as_array().cloned().unwrap_or_default())
    }

    /// A host's state, as people are shown it.
    pub fn states(&self) -> Result<Vec<(String, String)>> {
        let fleet = self.api("GET", "hosts", None)?;
        let hosts = fleet["hosts"].as_array().context("a fleet without hosts")?;
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        Ok(hosts.iter().map(|h| (text(&h["name"]), text(&h["state"]))).collect())
    }
}

/// An experiment of two arms on these hosts (none named: on any `count`), whose canonical form, which is what a host is
/// sent, has `bytes` bytes.
pub fn experiment(id: u16, names: Vec<HostId>, count: u32, blocks: u32, bytes: usize) -> Result<Experiment> {
    let mut e = drums_analysis::synthetic::exp028();
    e.id = drums_common::ids::ExperimentId(id);
    e.arms.retain(|a| ["drums-cold", "runc-cold"].contains(&a.name.as_str()));
    e.bars.retain(|b| b.name == "drums-over-runc-cold");
    e.workload.sha256 = Some(Sha256::of(b"a workload that no simulated agent unpacks"));
    e.design.blocks_per_host = blocks;
    e.design.template_builds_per_host = 1;
    e.design.max_runs = 100;
    e.hosts.names = names;
    e.hosts.count = count;
    e.deadline_ms = 3_600_000 * 24;
    let length = |e: &Experiment| Ok::<_, anyhow::Error>(Registration::freeze(e.clone(), Micros(0))?.canonical.len());
    let short = length(&e)?;
    e.hypothesis.push_str(&".".repeat(bytes.saturating_sub(short)));
    e.check()?;
    Ok(e)
}
