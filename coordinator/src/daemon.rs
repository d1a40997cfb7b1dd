//! The daemon: puts the parts of a coordinator together in order, and takes them apart in reverse.
//!
//! ```text
//! lock home → CA → store → control (driver) → agents' and enrolment endpoints → API → ready
//! stop: goodbye to agents, open requests end → driver → store closed
//! ```

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions, TryLockError},
    io,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use drums_common::{digest::Sha256, telemetry::chain};
use sha2::{Digest as _, Sha256 as Hasher};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

use crate::{
    api::{self, ServeError},
    artifacts::Artifacts,
    bucket::{Bucket, BucketError},
    clock::SystemClock,
    config::{Config, Home},
    disk,
    net::{
        endpoint::{self, EndpointError},
        serve_agents, serve_enrolment,
    },
    pki::{Pki, PkiError},
    store::{SqliteStore, Store, StoreError, StoreHandle},
    tasks::{Control, Uploading},
};

#[cfg(feature = "postgres")]
use crate::standby::Lease;
#[cfg(not(feature = "postgres"))]
use crate::term::Term;

/// Without another store than the home's own there is no lease to hold.
#[cfg(not(feature = "postgres"))]
enum Lease {}

#[cfg(not(feature = "postgres"))]
impl Lease {
    fn watch(&self, _: watch::Receiver<bool>) -> JoinHandle<()> {
        match *self {}
    }

    fn term(&self) -> Term {
        match *self {}
    }

    async fn give_up(self) {
        match self {}
    }
}

/// Everything has been told to end and has its own, shorter bounds.
const STOP: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error("{} is no coordinator home; make one with drumsctl init --home {}", home.display(), home.display())]
    NoHome { home: PathBuf },
    #[error("the home {} has lost its store {}; restore it from a backup", home.display(), store.display())]
    NoStore { home: PathBuf, store: PathBuf },
    #[error("there are {} MiB free at {}; at least {} MiB are needed", free >> 20, home.display(), disk::MIN_TO_START >> 20)]
    DiskFull { home: PathBuf, free: u64 },
    #[error("another coordinator is running on {}", home.display())]
    Running { home: PathBuf },
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot open the home's CA")]
    Pki(#[from] PkiError),
    #[error("cannot open the home's store")]
    Store(#[from] StoreError),
    #[error("cannot open the agents' endpoints")]
    Endpoint(#[from] EndpointError),
    #[error("cannot open the API")]
    Api(#[from] ServeError),
    #[error("cannot open the bucket")]
    Bucket(#[from] BucketError),
    #[error("cannot start {what}")]
    Start { what: &'static str, source: io::Error },
    #[error("this build has no PostgreSQL, so it cannot use {store}; build with --features postgres")]
    NoPostgres { store: String },
    #[error(
        "the store {store} is another home's: its CA is not this one's; a further coordinator's home is made from a backup of the first one's"
    )]
    OtherKeys { store: String },
    #[error("the store {store} is empty; make it with drumsctl init --store, or restore it from a backup")]
    EmptyStore { store: String },
    #[error("{0} ended by itself; its message is above")]
    Ended(&'static str),
}

impl DaemonError {
    /// True if the same will happen again until somebody changes the home or its settings.
    pub fn is_bad_input(&self) -> bool {
        matches!(
            self,
            Self::NoHome { .. }
                | Self::NoStore { .. }
                | Self::NoPostgres { .. }
                | Self::OtherKeys { .. }
                | Self::EmptyStore { .. }
                | Self::Store(StoreError::BadPlace { .. })
        )
    }
}

/// SHA-256 of this executable.
pub fn build_digest() -> io::Result<Sha256> {
    let mut hasher = Hasher::new();
    io::copy(&mut File::open("/proc/self/exe")?, &mut hasher)?;
    Ok(Sha256(hasher.finalize().into()))
}

/// Runs until a signal.
pub fn run(home: &Home, config: &Config) -> Result<(), DaemonError> {
    let _lock = lock(home)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|source| DaemonError::Start { what: "the runtime", source })?;
    runtime.block_on(serve(home, config))
}

/// The home's one daemon. Released by the kernel when the process ends, however it ends.
fn lock(home: &Home) -> Result<File, DaemonError> {
    match std::fs::metadata(home.pki()) {
        Ok(m) if m.is_dir() => {}
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            return Err(DaemonError::Io { doing: "open", path: home.pki(), source });
        }
        _ => return Err(DaemonError::NoHome { home: home.dir().to_owned() }),
    }
    let path = home.lock();
    let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|source| DaemonError::Io {
        doing: "open",
        path: path.clone(),
        source,
    })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DaemonError::Running { home: home.dir().to_owned() }),
        Err(TryLockError::Error(source)) => Err(DaemonError::Io { doing: "lock", path, source }),
    }
}

/// The store that `init` made. An empty one in its place would pass for a new home's, and every run would be forgotten.
fn open_store(home: &Home) -> Result<SqliteStore, DaemonError> {
    let io = |source| DaemonError::Io { doing: "look at the disk of", path: home.dir().to_owned(), source };
    let free = disk::free(home.dir()).map_err(io)?;
    if free < disk::MIN_TO_START {
        return Err(DaemonError::DiskFull { home: home.dir().to_owned(), free });
    }
    let lost = || DaemonError::NoStore { home: home.dir().to_owned(), store: home.store() };
    match std::fs::metadata(home.store()) {
        Ok(m) if m.len() > 0 => {}
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(DaemonError::Io { doing: "open", path: home.store(), source });
        }
        _ => return Err(lost()),
    }
    let store = SqliteStore::open(&home.store())?;
    if store.installation()?.is_none() {
        return Err(lost());
    }
    Ok(store)
}

async fn serve(home: &Home, config: &Config) -> Result<(), DaemonError> {
    let exe = || PathBuf::from("/proc/self/exe");
    let build = build_digest().map_err(|source| DaemonError::Io { doing: "read", path: exe(), source })?;
    let pki = Arc::new(Pki::open(&home.pki())?);
    let advertise = if config.advertise.is_empty() { own_addresses() } else { config.advertise.clone() };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        build = %build.short(),
        home = %home.dir().display(),
        ca = %pki.fingerprint().short(),
        agents = %config.agents,
        enrolment = %config.enrol,
        api = %config.api,
        advertise = %advertise.join(", "),
        leases = ?config.leases,
        bucket = config.bucket.as_ref().map(|b| &b.url),
        "coordinator starts"
    );
    let clock = Arc::new(SystemClock);
    let mut stop = std::pin::pin!(stop_signal());
    let Some((store, lease)) = lead(home, config, &pki, clock.clone(), stop.as_mut()).await? else { return Ok(()) };
    let store =
        StoreHandle::start(store).map_err(|source| DaemonError::Start { what: "the store's thread", source })?;
    let (shutdown, down) = watch::channel(false);
    let bucket = config.bucket.as_ref().map(Bucket::open).transpose()?;
    let artifacts = match (&bucket, &config.bucket) {
        #[cfg(feature = "s3")]
        (Some(Bucket::S3(s3)), Some(config)) if config.artifacts => Artifacts::S3(s3.clone()),
        _ => Artifacts::new(home.artifacts()),
    };
    let uploading = bucket.map(|b| Uploading::new(b, pki.fingerprint()));
    let (control, driver) =
        Control::start(store.clone(), artifacts, clock.clone(), config.leases, uploading, down.clone()).await?;
    if let Some(lease) = &lease {
        control.lead_for(lease.term());
    }

    let agents = endpoint::agents(config.agents, &pki)?;
    let enrolment = endpoint::enrolment(config.enrol, &pki)?;
    let context = Arc::new(api::Context {
        control: control.clone(),
        enrolment: api::Enrolment {
            ca: pki.fingerprint(),
            addresses: advertise,
            agents_port: config.agents.port(),
            enrol_port: config.enrol.port(),
        },
        home: home.dir().display().to_string(),
        build,
        pki: pki.clone(),
    });
    api::register_first(&context).await?;
    let rotations = tokio::spawn(api::audit_rotations(context.clone(), down.clone()));
    let router = api::router(context);
    let https = api::serve_https(config.api, &pki, router.clone(), down.clone()).await?.0;
    let unix = api::serve_unix(&home.socket(), router, down.clone())?;
    let agents = tokio::spawn(serve_agents(
        agents,
        control.clone(),
        pki.clone(),
        config.leases,
        clock.clone(),
        build,
        down.clone(),
    ));
    let enrolment = tokio::spawn(serve_enrolment(
        enrolment,
        control.clone(),
        pki,
        config.certificates.clone(),
        clock.clone(),
        build,
        down.clone(),
    ));
    drop(control);
    if let Err(e) = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]) {
        tracing::debug!(error = %e, "no service manager was told");
    }
    tracing::info!("ready");

    let mut parts: Vec<(&'static str, JoinHandle<()>)> = vec![
        ("the driver", driver),
        ("the agents' endpoint", agents),
        ("the enrolment endpoint", enrolment),
        ("the API over HTTPS", https),
        ("the API over the unix socket", unix),
        ("the trail of rotations", rotations),
    ];
    parts.extend(lease.as_ref().map(|l| ("the lease", l.watch(down))));
    // Cancel-safe: a signal stays pending, and a finished part stays finished.
    let ended = tokio::select! {
        name = stop => {
            tracing::info!(signal = name, "stopping in order");
            None
        }
        what = first_to_end(&mut parts) => Some(what),
    };
    if let Err(e) = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]) {
        tracing::debug!(error = %e, "no service manager was told");
    }
    shutdown.send_replace(true);
    for (what, part) in parts.iter_mut().filter(|(_, p)| !p.is_finished()) {
        match timeout(STOP, part).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::error!(part = what, error = %e, "ended badly"),
            Err(_) => tracing::error!(part = what, "did not end in time"),
        }
    }
    // The parts hold handles of the store's; with them gone, what was handed in is written and the store closed.
    drop(parts);
    if timeout(STOP, store.close()).await.is_err() {
        tracing::error!("the store did not close in time; it recovers from its journal");
    }
    if let Some(lease) = lease {
        lease.give_up().await;
    }
    match ended {
        None => Ok(()),
        Some(what) => Err(DaemonError::Ended(what)),
    }
}

type Lead = (Box<dyn Store>, Option<Lease>);

/// The store, once this coordinator is the one that writes to it; none if a signal came first.
async fn lead(
    home: &Home,
    config: &Config,
    pki: &Pki,
    clock: Arc<SystemClock>,
    stop: impl Future<Output = &'static str>,
) -> Result<Option<Lead>, DaemonError> {
    let Some(at) = &config.postgres else {
        return Ok(Some((Box::new(open_store(home)?), None)));
    };
    #[cfg(feature = "postgres")]
    {
        let lead = crate::standby::lead(home, config, at, pki, clock, stop).await?;
        Ok(lead.map(|(store, lease)| (Box::new(store) as Box<dyn Store>, Some(lease))))
    }
    #[cfg(not(feature = "postgres"))]
    {
        let _ = (pki, clock, stop);
        Err(DaemonError::NoPostgres { store: at.url.clone() })
    }
}

async fn stop_signal() -> &'static str {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("signals cannot be handled; only kill -9 ends this process");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = int.recv() => "SIGINT",
    }
}

/// Parts end only when told to; one that ends by itself takes the daemon with it, for a service manager to start anew.
async fn first_to_end(parts: &mut [(&'static str, JoinHandle<()>)]) -> &'static str {
    let waits = parts.iter_mut().map(|(what, part)| {
        Box::pin(async move {
            if let Err(e) = part.await {
                tracing::error!(part = *what, error = %chain(&e), "ended badly");
            }
            *what
        })
    });
    futures_util::future::select_all(waits).await.0
}

/// Addresses of this machine that an agent elsewhere may reach; loopback if there is nothing else.
fn own_addresses() -> Vec<String> {
    let mut found = BTreeSet::new();
    match nix::ifaddrs::getifaddrs() {
        Ok(all) => {
            for one in all.filter_map(|i| i.address) {
                let ip = one
                    .as_sockaddr_in()
                    .map(|a| IpAddr::from(a.ip()))
                    .or_else(|| one.as_sockaddr_in6().map(|a| IpAddr::from(a.ip())));
                found.extend(ip.filter(is_reachable));
            }
        }
        Err(e) => tracing::warn!(error = %e, "cannot list this machine's addresses; set advertise in coordinator.toml"),
    }
    if found.is_empty() {
        found.insert(IpAddr::from([127, 0, 0, 1]));
    }
    // A token takes a few.
    found.into_iter().take(8).map(|ip| ip.to_string()).collect()
}

fn is_reachable(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !ip.is_loopback() && !ip.is_unspecified() && !link_local
}

#[cfg(test)]
mod tests {
    use super::*;
    use drums_common::clock::Micros;

    use crate::store::{AuditRow, Who};

    #[test]
    fn only_addresses_that_others_can_reach_are_advertised() {
        for (ip, reachable) in [
            ("127.0.0.1", false),
            ("::1", false),
            ("0.0.0.0", false),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("10.0.0.1", true),
            ("2001:db8::1", true),
        ] {
            assert_eq!(is_reachable(&ip.parse().unwrap()), reachable, "{ip}");
        }
        assert!(!own_addresses().is_empty());
    }

    #[test]
    fn a_folder_that_is_no_home_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let e = lock(&Home::new(dir.path())).unwrap_err().to_string();
        assert!(e.contains("drumsctl init"), "{e}");
        std::fs::create_dir(dir.path().join("pki")).unwrap();
        let held = lock(&Home::new(dir.path())).unwrap();
        assert!(matches!(lock(&Home::new(dir.path())), Err(DaemonError::Running { .. })));
        drop(held);
        assert!(lock(&Home::new(dir.path())).is_ok());
    }

    #[test]
    fn a_lost_store_does_not_pass_for_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        assert!(matches!(open_store(&home), Err(DaemonError::NoStore { .. })));
        std::fs::write(home.store(), "").unwrap();
        assert!(matches!(open_store(&home), Err(DaemonError::NoStore { .. })));
        let mut store = SqliteStore::open(&home.store()).unwrap();
        assert!(matches!(open_store(&home), Err(DaemonError::NoStore { .. })), "tables alone");
        let audit = AuditRow::new(Micros(1), Who::coordinator(), "init");
        store.meta_or("installation", "01020304", &audit).unwrap();
        assert!(open_store(&home).is_ok());
    }
}
