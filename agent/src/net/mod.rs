//! The link to the coordinator.
//!
//! Owns the connection (dialling, enrolment, reconnecting for ever), beats, leases as shared with the measuring side, and
//! the sending of evidence from the spool. Refuses to know what a run does: `Desired` goes to the measuring side as it
//! came, and evidence is only carried.
//!
//! ```text
//! measure thread ── Link (lock, condition) ── session: dial → hello → desired … ⟲ backoff
//!                                             ├ beats, quiet intervals, leases
//!                                             ├ evidence: spool → batches → acks
//!                                             └ fetch: workloads by digest
//!                         no connection ── upload: sealed segments → the places handed out ahead
//! ```
//! **Invariant:** while a quiet interval is declared, nothing is sent by this module.

mod enrol;
mod evidence;
mod identity;
pub mod imds;
pub mod instance;
mod io;
pub(crate) mod life;
mod link;
mod put;
mod renew;
pub mod sending;
mod session;
mod threads;
mod timer;
mod tls;
mod upload;
mod workload;

use std::{path::PathBuf, sync::Arc, time::Duration};

use drums_common::{
    clock::Clock,
    digest::Sha256,
    failure::{Failure, FailureClass},
    machine::HostFacts,
    telemetry::chain,
};
use quinn::Connection;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

pub use self::{
    enrol::{EnrolError, enrol},
    evidence::BATCH_BYTES,
    identity::{Identity, IdentityError, installation},
    link::{Fetch, FetchError, KeptLease, Link, NextBeat, QuietGuard, Shared as NetworkSide, Stop, View},
    threads::Threads,
    tls::{DialError, Sockets, Udp},
    workload::WorkloadError,
};
use self::{
    link::{FetchRequest, Shared},
    renew::Credentials,
    session::{Context, End},
    upload::{Offers, Uploader},
};
use crate::spool::Spool;

/// How an enrolled agent dials: TLS and transport settings.
pub fn client_config(identity: &Identity) -> Result<quinn::ClientConfig, DialError> {
    tls::enrolled(identity)
}

/// Between attempts to connect: doubling, with jitter so that a fleet does not come back all at once.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A workload waits this long for a connection before the measuring side is told.
const FETCH_PATIENCE: Duration = Duration::from_secs(60);

/// What the link needs to know.
pub struct NetConfig {
    pub identity: Identity,
    /// `workloads/` of the state folder.
    pub workloads: PathBuf,
    /// SHA-256 of this executable.
    pub build: Sha256,
    pub facts: HostFacts,
    pub clock: Arc<dyn Clock>,
    pub spool: Arc<Spool>,
    /// Certificates that a bucket is checked against, PEM.
    pub ca_file: PathBuf,
    /// Where tasks run that may have to wait for a disk (`Threads::disk`).
    pub disk: Handle,
}

/// The network side of a running agent.
pub struct Net {
    leave: watch::Sender<bool>,
    sessions: JoinHandle<()>,
    fetches: JoinHandle<()>,
    uploads: JoinHandle<()>,
    current: watch::Receiver<Option<Connection>>,
    spool: Arc<Spool>,
    offers: Arc<Offers>,
    shared: Arc<Shared>,
}

impl Net {
    /// Starts the tasks on the current runtime.
    pub fn start(config: NetConfig) -> Result<(Self, Link), DialError> {
        Self::start_on(Arc::new(Udp), config)
    }

    /// On sockets of the caller's.
    pub fn start_on(sockets: Arc<dyn Sockets>, config: NetConfig) -> Result<(Self, Link), DialError> {
        let (addresses, installation) = session::describe(&config.identity);
        tracing::info!(host = %config.identity.host, %installation, coordinator = %addresses, "link starts");
        let credentials = Arc::new(Credentials::new(config.identity)?);
        let (link, requests) = Link::new(config.clock, config.facts);
        let (leave, left) = watch::channel(false);
        let (current, connection) = watch::channel(None);
        if let Some(life_ms) = life::noted(config.spool.dir()) {
            link.shared.resumed(life_ms);
        }
        let offers = Arc::new(Offers::load(config.spool.dir()));
        let uploader = Uploader {
            shared: link.shared.clone(),
            spool: config.spool.clone(),
            offers: offers.clone(),
            current: connection.clone(),
            ca_file: config.ca_file,
        };
        let context = Arc::new(Context {
            credentials,
            sockets,
            shared: link.shared.clone(),
            spool: config.spool.clone(),
            offers: offers.clone(),
            build: config.build,
            instance: rand::random(),
            leave: left,
            current,
            preferred: Default::default(),
            disk: config.disk.clone(),
        });
        let sessions = tokio::spawn(keep_connected(context));
        let fetches = config.disk.spawn(serve_fetches(requests, config.workloads, connection.clone(), link.clone()));
        let uploads = config.disk.spawn(uploader.run());
        let shared = link.shared.clone();
        let net = Self { leave, sessions, fetches, uploads, current: connection, spool: config.spool, offers, shared };
        Ok((net, link))
    }

    /// Ends when a coordinator has welcomed this agent; false if none ever will.
    pub fn welcomed(&self) -> impl Future<Output = bool> + Send + use<> {
        let mut current = self.current.clone();
        async move { current.wait_for(Option::is_some).await.is_ok() }
    }

    /// Ends at once and without a word, as a killed process does.
    pub fn abort(self) {
        self.sessions.abort();
        self.fetches.abort();
    }

    /// Waits, at most `patience`, until everything in the spool is acknowledged or in its bucket; says goodbye; ends the
    /// tasks. What is neither stays in the spool for the next start. True if nothing is left.
    pub async fn finish(self, patience: Duration) -> bool {
        self.shared.rest();
        let left = |r: &Arc<crate::spool::RunSpool>| r.acked() < r.last_seq() && !self.offers.all_uploaded(r);
        let unsent = || self.spool.runs().iter().filter(|r| left(r)).count();
        let drained = async {
            // Acknowledgements have no event of their own; this is the end of the process, not a timed window.
            while unsent() > 0 && !self.sessions.is_finished() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let _ = timeout(patience, drained).await;
        let left = unsent();
        if left > 0 {
            tracing::warn!(runs = left, "evidence is left in the spool; it is sent when the agent runs again");
        }
        self.leave.send_replace(true);
        let _ = timeout(Duration::from_secs(3), self.sessions).await;
        self.fetches.abort();
        self.uploads.abort();
        left == 0
    }
}

async fn keep_connected(context: Arc<Context>) {
    let mut backoff = BACKOFF_FIRST;
    let mut leave = context.leave.clone();
    let mut last_words = String::new();
    loop {
        // Cancelled only to leave: a session says goodbye by itself, a dial has nobody to say it to.
        let (end, held_ms) = tokio::select! {
            ended = session::run(&context) => ended,
            () = left_while_dialling(&context, &mut leave) => return,
        };
        if matches!(end, End::Left | End::Final) {
            tracing::info!(reason = %end, "link ends");
            return;
        }
        let words = chain(&end);
        // The same trouble once a while, not once an attempt.
        if words == last_words {
            tracing::debug!(error = %words, "still not connected");
        } else {
            tracing::warn!(error = %words, "not connected; trying again");
            last_words = words;
        }
        // A connection that held for as long as the longest pause is a new start: that is how seldom this makes anybody dial.
        if Duration::from_millis(held_ms) >= BACKOFF_MAX || matches!(end, End::Goodbye) {
            backoff = BACKOFF_FIRST;
            last_words.clear();
        }
        let jitter = backoff.mul_f64(rand::random_range(0.5..1.0));
        tokio::select! {
            () = sleep(jitter) => {}
            _ = leave.wait_for(|leave| *leave) => return,
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Returns when the agent leaves and there is no connection that would have to say goodbye.
async fn left_while_dialling(context: &Context, leave: &mut watch::Receiver<bool>) {
    let _ = leave.wait_for(|leave| *leave).await;
    if context.current.borrow().is_some() {
        std::future::pending::<()>().await;
    }
}

/// One workload at a time; a transfer that broke is resumed on the next connection.
async fn serve_fetches(
    mut requests: mpsc::Receiver<FetchRequest>,
    workloads: PathBuf,
    mut current: watch::Receiver<Option<Connection>>,
    link: Link,
) {
    while let Some(request) = requests.recv().await {
        let result = fetch(&workloads, request.what, &mut current, &link).await;
        // The measuring side may have ended meanwhile.
        let _ = request.answer.send(result);
    }
}

async fn fetch(
    workloads: &std::path::Path,
    what: Fetch,
    current: &mut watch::Receiver<Option<Connection>>,
    link: &Link,
) -> Result<PathBuf, Failure> {
    if let Fetch::Workload(workload) = what {
        let folder = workloads.to_owned();
        let present = tokio::task::spawn_blocking(move || workload::present(&folder, workload)).await;
        match present {
            Ok(Ok(Some(dir))) => return Ok(dir),
            Ok(Ok(None)) => {}
            Ok(Err(e)) => {
                tracing::warn!(%workload, error = %chain(&e), "a workload on disk is damaged; fetching it again");
            }
            Err(e) => {
                return Err(Failure::new(FailureClass::Bug, "fetch", e.to_string(), "report it"));
            }
        }
    }
    loop {
        if link.shared.stopping().is_some() {
            return Err(Failure::new(FailureClass::Transient, "stopping", "the agent is stopping", ""));
        }
        let connection = match timeout(FETCH_PATIENCE, current.wait_for(Option::is_some)).await {
            Ok(Ok(connection)) => connection.clone(),
            Ok(Err(_)) | Err(_) => None,
        };
        let Some(connection) = connection else {
            let message = format!("{what} is not here and there is no connection to fetch it over");
            return Err(Failure::new(FailureClass::Transient, "not-connected", message, "it will be tried again"));
        };
        let fetched = match what {
            Fetch::Workload(workload) => workload::fetch(&connection, workloads, workload).await,
            Fetch::File(sha256, bytes) => workload::fetch_file(&connection, workloads, sha256, bytes).await,
        };
        match fetched {
            Ok(path) => {
                tracing::info!(%what, "fetched");
                return Ok(path);
            }
            Err(e) if e.broken_transfer() => {
                tracing::warn!(%what, error = %chain(&e), "fetching was interrupted; it will go on");
                // The transfer may have broken without its connection; do not spin.
                sleep(BACKOFF_FIRST).await;
            }
            Err(e) => return Err(e.failure()),
        }
    }
}
