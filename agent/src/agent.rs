//! The running agent: everything put together, in the one order that works.
//!
//! ```text
//! lock on the state folder ─▶ shim (before any thread) ─▶ engine: audit ─▶ spool: recovery
//!      ─▶ runtime: link, signals (own threads) ─▶ this thread measures ─▶ templates, scratch, shim undone ─▶ goodbye
//! ```
//! The measuring thread is the main thread: what the shim starts may depend on its parent's thread, and nothing else
//! waits for this one.

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use drums_common::{
    arm::ArmKind,
    clock::Clock,
    digest::Sha256,
    machine::{Accelerator, HostFacts, Tool},
    token::Token,
};

use crate::{
    arms::ToolPaths,
    engine::{
        Engine, EngineConfig, OpenError,
        api::{ArmEngine, AuditReport},
    },
    facts::{Findings, Readings},
    measure::{
        clock::SystemClock,
        lock::MachineLock,
        runner::{Parts, RunError, Runner},
        surroundings::ThisMachine,
    },
    net::{
        self, DialError, EnrolError, IdentityError, KeptLease, Link, Net, NetConfig, Stop, Threads,
        instance::{self, InstanceError},
    },
    setup::{self, DoctorOptions, Ground, SetupError, ToolsDir},
    shim::{ShimClient, ShimError},
    spool::{KEEP_FINISHED, Spool, SpoolError},
    succession::{Succession, WELCOME},
    watchdog::{PaidSettings, bounds, lease},
};

/// How long the agent waits at its end for the last evidence to be acknowledged.
const FINISH: Duration = Duration::from_secs(20);

/// What the command line and the configuration file come to.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Identity, ledger, spool, workloads and scratch.
    pub state: PathBuf,
    /// Only at the first start: how to become a host of a coordinator.
    pub token: Option<Token>,
    /// Tools that are not the host's packages, and the answers of trials.
    pub tools: PathBuf,
    /// The machine's measuring lock.
    pub lock: PathBuf,
    pub scratch_bytes: u64,
    /// Evidence needs this much free disk to begin a run.
    pub min_free_bytes: u64,
    /// Certificates that a bucket is checked against.
    pub ca_file: PathBuf,
    pub paid: PaidSettings,
    /// End as soon as the coordinator's welcome has shown that this build works here.
    pub trial: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Unfit(#[from] SetupError),
    #[error("cannot {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("another agent is running on {}; stop it, or give this one its own --state", path.display())]
    Running { path: PathBuf },
    #[error(
        "this agent is not a host of any coordinator yet; give it a token from drumsctl host add (--token-file FILE, or - for standard input)"
    )]
    NotEnrolled,
    #[error("cannot read this program, whose digest goes into the evidence")]
    Program(#[source] io::Error),
    #[error("cannot start the shim")]
    Shim(#[from] ShimError),
    #[error("cannot open the engine")]
    Engine(#[from] OpenError),
    #[error("cannot open the spool")]
    Spool(#[from] SpoolError),
    #[error("cannot start the network's runtime")]
    Runtime(#[source] io::Error),
    #[error("cannot enrol")]
    Enrol(#[from] EnrolError),
    #[error("cannot read this agent's identity")]
    Identity(#[from] IdentityError),
    #[error("this machine may not be the host that its identity is of")]
    Instance(#[from] InstanceError),
    #[error("cannot start the link")]
    Dial(#[from] DialError),
    #[error("cannot take up what the spool holds")]
    Runs(#[from] RunError),
    #[error("the coordinator did not welcome this agent within {} s", WELCOME.as_secs())]
    NotWelcomed,
    #[error("cannot tell this boot from another, and so keep the life lease of this paid host")]
    Boot(#[source] lease::LeaseError),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(
        "the agent cannot go on: {0}; start it again (its unit does): the next start undoes what is left, and runs go on"
    )]
    Broken(String),
    #[error("the coordinator will not have this agent: {0}")]
    Refused(drums_common::failure::Failure),
}

/// Runs the agent until it is told to stop.
pub fn run(config: AgentConfig) -> Result<Stop, AgentError> {
    setup::install::refuse_unfit_machine()?;
    let _instance = single_instance(&config.state)?;
    let (program, build) = this_program()?;
    let shim = Arc::new(ShimClient::launch(&program)?);
    let host = HostTools::find(&config);
    let engine_config =
        EngineConfig { state: config.state.clone(), tools: host.paths.clone(), scratch_bytes: config.scratch_bytes };
    let shim_pid = u32::try_from(shim.pid()).ok();
    let (engine, audit) = Engine::open(&engine_config, shim.clone())?;
    report_audit(&audit);
    // From here on the engine's scratch file system is mounted: every way out closes it.
    let result = with_engine(&config, host, engine, &audit, build, shim_pid);
    shim.shutdown();
    result
}

/// Undoes whatever agents of this state folder left behind; none may be running.
pub fn audit(config: &AgentConfig) -> Result<AuditReport, AgentError> {
    setup::install::refuse_unfit_machine()?;
    if !config.state.exists() {
        return Ok(AuditReport::default());
    }
    let _instance = single_instance(&config.state)?;
    let program = Path::new(THIS_PROGRAM);
    let shim = Arc::new(ShimClient::launch(program)?);
    let engine = EngineConfig {
        state: config.state.clone(),
        tools: setup::tools::find(&ToolsDir::new(&config.tools)),
        scratch_bytes: config.scratch_bytes,
    };
    let report = Engine::audit_only(&engine, shim.clone())?;
    shim.shutdown();
    Ok(report)
}

/// SHA-256 of this executable: what `--version` prints and what evidence names.
pub fn build_digest() -> Result<Sha256, AgentError> {
    Ok(this_program()?.1)
}

/// Tells a service manager, if there is one.
fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(false, &[state]) {
        tracing::debug!(error = %e, "the service manager was not told");
    }
}

fn with_engine(
    config: &AgentConfig,
    host: HostTools,
    engine: Engine,
    audit: &AuditReport,
    build: Sha256,
    shim: Option<u32>,
) -> Result<Stop, AgentError> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let mut engine = Some(engine);
    let result = (|| {
        let spool = open_spool(config)?;
        let ground = engine.as_ref().map(|e| Ground::of_agent(e.site())).unwrap_or_default();
        let mut facts = Facts { state: config.state.clone(), build, host, ground, doctor: None };
        let threads = Threads::start().map_err(AgentError::Runtime)?;
        let runtime = threads.link();
        let identity = runtime.block_on(identity(config, build))?;
        let name = identity.host.clone();
        // Held by this function until the runner has it.
        let Some(held) = engine.take() else { unreachable!("put there above") };
        let net_config = NetConfig {
            identity,
            workloads: config.state.join("workloads"),
            build,
            facts: facts.now(&held),
            clock: clock.clone(),
            spool: spool.clone(),
            ca_file: config.ca_file.clone(),
            disk: threads.disk(),
        };
        let started = {
            let _inside = runtime.enter();
            Net::start(net_config).map_err(AgentError::from).and_then(|(net, link)| {
                listen_for_signals(link.clone())?;
                if let Some(kept) = kept_lease(&config.paid)? {
                    threads.disk().spawn(link.keep_lease(kept));
                }
                Ok((net, link))
            })
        };
        let (net, link) = match started {
            Ok(started) => started,
            Err(e) => {
                engine = Some(held);
                return Err(e);
            }
        };
        let succession = Succession::of(&config.state);
        if config.trial {
            engine = Some(held);
            let welcomed = runtime.block_on(async { tokio::time::timeout(WELCOME, net.welcomed()).await });
            runtime.block_on(net.finish(FINISH));
            threads.end();
            return match welcomed {
                Ok(true) => Ok(Stop::Signal("the end of its trial")),
                _ => Err(AgentError::NotWelcomed),
            };
        }
        let (welcomed, proven) = (net.welcomed(), succession.clone());
        runtime.spawn(async move {
            if welcomed.await
                && let Err(e) = proven.welcomed()
            {
                tracing::warn!(error = drums_common::telemetry::chain(&e), "that this build works was not noted");
            }
        });
        let parts = Parts {
            host: name,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            agent_sha256: build,
            lock: config.lock.clone(),
            engine: held,
            surroundings: Box::new(ThisMachine::new(shim)),
            facts: Box::new(move |engine| facts.after_trials(engine)),
            workloads: Box::new(link.clone()),
            succession: succession.clone(),
            spool: spool.clone(),
            link,
            clock,
        };
        let runner = Runner::new(parts, audit).map_err(|failed| {
            let (e, held) = *failed;
            engine = Some(held);
            e
        })?;
        notify(sd_notify::NotifyState::Ready);
        let (stop, held) = runner.run();
        notify(sd_notify::NotifyState::Stopping);
        engine = Some(held);
        tracing::info!(?stop, "measuring ended");
        runtime.block_on(net.finish(FINISH));
        threads.end();
        if let Err(e) = spool.prune(KEEP_FINISHED, |_| false) {
            tracing::warn!(error = drums_common::telemetry::chain(&e), "finished runs stay in the spool");
        }
        Ok(stop)
    })();
    if let Some(engine) = engine {
        for leak in engine.close() {
            tracing::error!(leaked = %leak, "could not be undone; the next start's audit tries again");
        }
    }
    match result {
        Ok(Stop::Broken(why)) => Err(AgentError::Broken(why)),
        Ok(Stop::Refused(failure)) => Err(AgentError::Refused(failure)),
        other => other,
    }
}

/// Locks the state folder for as long as the value lives.
fn single_instance(state: &Path) -> Result<File, AgentError> {
    let io = |what: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| AgentError::Io { what, path, source }
    };
    // The agent's key is in it.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(io("make the state folder", state))?;
    let path = state.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(io("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(AgentError::Running { path: state.to_owned() }),
        Err(TryLockError::Error(source)) => Err(io("lock", &path)(source)),
    }
}

pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// This executable and its digest.
fn this_program() -> Result<(PathBuf, Sha256), AgentError> {
    let program = PathBuf::from(THIS_PROGRAM);
    let build = Sha256::of(&fs::read(&program).map_err(AgentError::Program)?);
    Ok((program, build))
}

fn open_spool(config: &AgentConfig) -> Result<Arc<Spool>, AgentError> {
    let (spool, repairs, damaged) = Spool::open(&config.state.join("spool"), config.min_free_bytes)?;
    for r in repairs {
        tracing::warn!(run = %r.run, bytes = r.torn_bytes, last_seq = r.last_seq, "cut a torn end off the spool");
    }
    for e in damaged {
        tracing::error!(error = drums_common::telemetry::chain(&e), "a run's evidence on disk is damaged");
    }
    Ok(Arc::new(spool))
}

async fn identity(config: &AgentConfig, build: Sha256) -> Result<net::Identity, AgentError> {
    let paid = &config.paid;
    let proof = instance::bind(&config.state, paid.imds, paid.is_paid_host(), instance::PATIENCE).await?;
    match &config.token {
        Some(token) => Ok(net::enrol(&config.state, token, build, proof).await?),
        None => net::Identity::load(&config.state)?.ok_or(AgentError::NotEnrolled),
    }
}

/// The tools of this host and what its accelerator is worth, found once: they decide how sessions are made.
struct HostTools {
    dir: ToolsDir,
    paths: ToolPaths,
    described: BTreeMap<String, Tool>,
    accelerator: Accelerator,
    accelerator_detail: String,
}

impl HostTools {
    fn find(config: &AgentConfig) -> Self {
        let dir = ToolsDir::new(&config.tools);
        let mut paths = setup::tools::find(&dir);
        let (accelerator, accelerator_detail) = match &paths.qemu {
            None => (Accelerator::None, "QEMU is not installed".to_owned()),
            Some(qemu) => accelerator(&dir, qemu, &config.lock),
        };
        paths.accelerator = Some(accelerator).filter(|a| *a != Accelerator::None);
        let described = setup::tools::describe(&dir, &paths);
        Self { dir, paths, described, accelerator, accelerator_detail }
    }
}

/// Only a guest that answered counts. An answer that is kept costs nothing; trying boots a guest, which must not be
/// somebody's noise, and must not make a restarted agent wait either.
fn accelerator(dir: &ToolsDir, qemu: &Path, lock: &Path) -> (Accelerator, String) {
    let alone = MachineLock::acquire(lock, || true);
    if matches!(alone, Ok(None)) && !dir.kvm_answer().exists() {
        let detail = "KVM was not tried: the machine was measuring when the agent started; TCG is used";
        return (Accelerator::Tcg, detail.to_owned());
    }
    let answer = setup::kvm::probe(dir, qemu);
    (answer.accelerator(), answer.detail)
}

/// Looks at this host afresh each time.
struct Facts {
    state: PathBuf,
    build: Sha256,
    host: HostTools,
    /// Where arms are tried out.
    ground: Ground,
    /// Arms that failed their trial, and why; tried once in the life of an agent.
    doctor: Option<BTreeMap<ArmKind, String>>,
}

impl Facts {
    fn now(&self, engine: &dyn ArmEngine) -> HostFacts {
        let mut tools = self.host.described.clone();
        let path = fs::read_link("/proc/self/exe").unwrap_or_default().display().to_string();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        tools.insert("agent".to_owned(), Tool { path, version, sha256: self.build });
        let mut unfit: BTreeMap<ArmKind, String> =
            ArmKind::ALL.into_iter().filter_map(|k| Some((k, engine.unfit(k)?))).collect();
        for (kind, why) in self.doctor.iter().flatten() {
            unfit.entry(*kind).or_insert_with(|| why.clone());
        }
        Readings::take(&self.state).describe(Findings {
            tools,
            accelerator: self.host.accelerator,
            accelerator_detail: self.host.accelerator_detail.clone(),
            unfit,
        })
    }

    /// As `now`, with every arm's surroundings tried out. The caller has the machine.
    fn after_trials(&mut self, engine: &dyn ArmEngine) -> HostFacts {
        if self.doctor.is_none() {
            let options = DoctorOptions { ground: self.ground.clone(), ..DoctorOptions::default() };
            let report = setup::examine(&self.host.dir, &options, &mut |t| {
                tracing::info!(trial = t.name, ok = t.ok, duration_ms = t.duration_ms, detail = %t.detail, "tried");
            });
            self.doctor = Some(report.unfit());
        }
        self.now(engine)
    }
}

/// On a host that was launched and is paid for, where its watchdog is told of the life lease.
fn kept_lease(paid: &PaidSettings) -> Result<Option<KeptLease>, AgentError> {
    if !paid.is_paid_host() {
        return Ok(None);
    }
    let deadline = match bounds::read(&paid.deadline) {
        Ok(bounds) => Some(bounds.deadline),
        Err(e) => {
            // The watchdog reads it, too, and ends a host whose deadline nobody can read.
            tracing::error!(error = drums_common::telemetry::chain(&e), "this paid host's deadline is not known");
            None
        }
    };
    let kept = KeptLease { path: paid.lease_file(), boot: lease::boot_id().map_err(AgentError::Boot)?, deadline };
    tracing::info!(lease = %kept.path.display(), "a paid host: its life lease is kept for the watchdog");
    Ok(Some(kept))
}

fn listen_for_signals(link: Link) -> Result<(), AgentError> {
    use tokio::signal::unix::{SignalKind, signal};
    for (name, kind) in [("SIGTERM", SignalKind::terminate()), ("SIGINT", SignalKind::interrupt())] {
        let mut stream = signal(kind).map_err(AgentError::Signals)?;
        let link = link.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() {
                tracing::info!(signal = name, "stopping: what is under way is given up, undone and written down");
                link.stop(Stop::Signal(name));
            }
        });
    }
    Ok(())
}

fn report_audit(audit: &AuditReport) {
    for what in &audit.undone {
        tracing::warn!(resource = %what, "left by an earlier agent; undone");
    }
    for what in &audit.orphans {
        tracing::warn!(resource = %what, "named as ours but not recorded; undone");
    }
    for what in &audit.leaked {
        tracing::error!(resource = %what, "left by an earlier agent; could not be undone");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_paid_host_keeps_its_lease_and_its_deadline_comes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let deadline = dir.path().join("deadline");
        let paid = PaidSettings { deadline: deadline.clone(), folder: "/run/x".into(), ..PaidSettings::default() };
        assert!(kept_lease(&paid).unwrap().is_none());
        fs::write(&deadline, "DEADLINE_S=1796000000\nLIFETIME_S=7200\n").unwrap();
        let kept = kept_lease(&paid).unwrap().unwrap();
        assert_eq!(kept.path, Path::new("/run/x/life-lease"));
        assert_eq!(kept.deadline.unwrap().0, 1_796_000_000_000_000);
        fs::write(&deadline, "").unwrap();
        assert!(kept_lease(&paid).unwrap().unwrap().deadline.is_none(), "it is a paid host all the same");
    }
}
