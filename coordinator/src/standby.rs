//! Several coordinators on one store: one is active, the others stand by.
//!
//! ```text
//! start ─ lease is free ──────────────────────────▶ active: renews each third of the lease
//!   └──── held ─▶ stand by: refuse agents, try ────▶   │
//!                                                      └ superseded, or no word of the store for three leases: end
//! ```
//! The store fences by itself (`store::postgres`): a coordinator that was stalled while another took over writes nothing,
//! whatever it believes. Here is only who serves; and from when the lease may be another's, no beat is answered ([`Term`]).

use std::{
    future::Future,
    path::Path,
    sync::{Arc, mpsc},
    time::Duration,
};

use drums_common::{
    clock::{Clock, MonoMicros},
    telemetry::chain,
};
use tokio::sync::watch;

use crate::{
    api,
    config::{Config, Home, PostgresConfig},
    daemon::DaemonError,
    net::{self, endpoint},
    pki::Pki,
    store::{PostgresStore, StoreError, Taken},
    term::Term,
};

/// Renewals per lease: two may fail before it runs out.
const RENEWALS: u32 = 3;
/// Leases without a word of the store until an active coordinator gives way: agents then look for another one. As long as
/// the store is away for all, nobody else takes over, and this one comes back as it was.
const PATIENCE: u64 = 3;

/// Who a coordinator is among those of its store.
struct Node {
    id: String,
    name: String,
}

impl Node {
    /// The id is a file of the home, bound to that file's inode: a home that was copied is another node.
    fn of(home: &Home) -> Result<Self, DaemonError> {
        use std::os::unix::fs::MetadataExt as _;
        let path = home.node();
        let fail = |doing| {
            let path = path.clone();
            move |source| DaemonError::Io { doing, path, source }
        };
        if !path.exists() {
            let begun = path.with_extension("begun");
            std::fs::write(&begun, hex::encode(rand::random::<[u8; 16]>())).map_err(fail("write"))?;
            std::fs::rename(&begun, &path).map_err(fail("put in place"))?;
        }
        let drawn = std::fs::read_to_string(&path).map_err(fail("read"))?;
        let inode = std::fs::metadata(&path).map_err(fail("read"))?.ino();
        Ok(Self { id: format!("{}-{inode}", drawn.trim()), name: format!("{}:{}", hostname(), home.dir().display()) })
    }
}

fn hostname() -> String {
    nix::unistd::gethostname().map_or_else(|_| "?".to_owned(), |h| h.to_string_lossy().into_owned())
}

/// The store, once this coordinator leads; none if `stop` came first.
pub(crate) async fn lead(
    home: &Home,
    config: &Config,
    at: &PostgresConfig,
    pki: &Pki,
    clock: Arc<dyn Clock>,
    stop: impl Future<Output = &'static str>,
) -> Result<Option<(PostgresStore, Lease)>, DaemonError> {
    let node = Arc::new(Node::of(home)?);
    let ttl = Duration::from_millis(at.lease_ms);
    let (opened, ca) = (at.clone(), pki.fingerprint().to_string());
    let store = apart(move || open(&opened, &ca)).await?;
    let (mut store, mut taken) = take(store, node.clone(), ttl).await;
    if let Ok(Taken::Theirs { name, left_ms, .. }) = &taken {
        tracing::info!(active = name, left_ms, "another coordinator is active; standing by");
        if let Err(e) = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]) {
            tracing::debug!(error = %e, "no service manager was told");
        }
        let (shutdown, down) = watch::channel(false);
        let (active, shown) = watch::channel(name.clone());
        let agents = endpoint::agents(config.agents, pki)?;
        let enrolment = endpoint::enrolment(config.enrol, pki)?;
        let router = api::standby(shown);
        let parts = [
            api::serve_https(config.api, pki, router.clone(), down.clone()).await?.0,
            api::serve_unix(&home.socket(), router, down.clone())?,
            tokio::spawn(net::refuse(agents, down.clone())),
            tokio::spawn(net::refuse(enrolment, down)),
        ];
        let mut stop = std::pin::pin!(stop);
        let stopped = loop {
            // Cancel-safe: a signal stays pending.
            tokio::select! {
                () = tokio::time::sleep(ttl / RENEWALS) => {}
                _ = stop.as_mut() => break true,
            }
            (store, taken) = take(store, node.clone(), ttl).await;
            match &taken {
                Ok(Taken::Ours { .. }) => break false,
                Ok(Taken::Theirs { name, .. }) => {
                    active.send_if_modified(|n| {
                        let changed = n != name;
                        n.clone_from(name);
                        changed
                    });
                }
                Err(e) => tracing::warn!(error = chain(e), "the lease was not asked for; standing by"),
            }
        };
        shutdown.send_replace(true);
        for part in parts {
            // The ports are free again when these have ended.
            let _ = part.await;
        }
        if stopped {
            return Ok(None);
        }
    }
    let Taken::Ours { epoch } = taken? else { return Ok(None) };
    tracing::info!(epoch, name = node.name, "this coordinator is active");
    let mut store = apart(move || store.migrate().map(|()| store)).await?;
    let at = at.clone();
    let lease = apart(move || Lease::keep(&at, epoch, clock)).await?;
    let home = home.dir().to_owned();
    store = apart(move || whole(store, &home)).await?;
    Ok(Some((store, lease)))
}

/// The store of this home's CA.
fn open(at: &PostgresConfig, ca: &str) -> Result<PostgresStore, DaemonError> {
    let mut store = PostgresStore::open(at)?;
    match store.meta("ca")? {
        Some(held) if held == ca => Ok(store),
        Some(_) => Err(DaemonError::OtherKeys { store: at.url.clone() }),
        None => Err(DaemonError::EmptyStore { store: at.url.clone() }),
    }
}

/// A home that was made from a backup may lack workloads that were added since.
fn whole(mut store: PostgresStore, home: &Path) -> Result<PostgresStore, StoreError> {
    use crate::store::Store as _;
    for w in store.workloads()? {
        let manifest = Home::new(home).artifacts().join(w.sha256.to_string());
        if !manifest.exists() {
            tracing::error!(workload = %w.name, manifest = %manifest.display(), "this home lacks a workload; copy the former coordinator's artifacts folder, or add the workload again");
        }
    }
    Ok(store)
}

async fn take(mut store: PostgresStore, node: Arc<Node>, ttl: Duration) -> (PostgresStore, Result<Taken, StoreError>) {
    let work = move || {
        let taken = store.take(&node.id, &node.name, ttl);
        (store, taken)
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| std::panic::resume_unwind(e.into_panic()))
}

/// The store waits by itself, which a thread that drives other tasks must not.
async fn apart<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
{
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| std::panic::resume_unwind(e.into_panic()))
}

/// A lease that is held: renewed by a thread of its own over a connection of its own, so that no long transaction delays
/// it.
pub(crate) struct Lease {
    end: mpsc::SyncSender<()>,
    thread: std::thread::JoinHandle<()>,
    lost: watch::Receiver<bool>,
    term: Term,
}

impl Lease {
    fn keep(at: &PostgresConfig, epoch: u64, clock: Arc<dyn Clock>) -> Result<Self, DaemonError> {
        let mut store = PostgresStore::open(at)?;
        let ttl = Duration::from_millis(at.lease_ms);
        let (end, ended) = mpsc::sync_channel(1);
        let (tell, lost) = watch::channel(false);
        let term = Term::default();
        let mut held = Held { epoch, ttl, renewed: clock.boottime(), term: term.clone() };
        let work = move || {
            loop {
                if let Err(why) = held.renew(&mut store, &*clock) {
                    tracing::error!(epoch, "{why}");
                    tell.send_replace(true);
                    return;
                }
                // Woken early only to end.
                if !matches!(ended.recv_timeout(ttl / RENEWALS), Err(mpsc::RecvTimeoutError::Timeout)) {
                    break;
                }
            }
            held.term.over();
            if let Err(e) = store.give_up(epoch) {
                tracing::warn!(error = chain(&e), "the lease was not given up; it runs out by itself");
            }
        };
        let thread = std::thread::Builder::new().name("lease".to_owned()).spawn(work);
        let thread = thread.map_err(|source| DaemonError::Start { what: "the lease's thread", source })?;
        Ok(Self { end, thread, lost, term })
    }

    /// Until when beats may be answered.
    pub(crate) fn term(&self) -> Term {
        self.term.clone()
    }

    /// Ends when the lease is lost, or at shutdown.
    pub(crate) fn watch(&self, mut down: watch::Receiver<bool>) -> tokio::task::JoinHandle<()> {
        let mut lost = self.lost.clone();
        tokio::spawn(async move {
            // Both branches are cancel-safe.
            tokio::select! {
                _ = lost.wait_for(|lost| *lost) => {}
                _ = down.wait_for(|down| *down) => {}
            }
        })
    }

    /// Gives the lease up, so that another coordinator takes over at once. The store must have been closed.
    pub(crate) async fn give_up(self) {
        // Full only if asked twice; the thread may have ended by itself.
        let _ = self.end.try_send(());
        let _ = tokio::task::spawn_blocking(move || self.thread.join()).await;
    }
}

/// What the renewing thread knows of the lease.
pub(crate) struct Held {
    pub epoch: u64,
    pub ttl: Duration,
    /// When the store was asked for what it granted last.
    pub renewed: MonoMicros,
    pub term: Term,
}

impl Held {
    /// Renews once. An error says why this coordinator must end.
    pub fn renew(&mut self, store: &mut PostgresStore, clock: &dyn Clock) -> Result<(), String> {
        let asked = clock.boottime();
        match store.renew(self.epoch, self.ttl) {
            Ok(true) => {
                self.renewed = asked;
                self.term.renewed(asked, self.ttl);
            }
            Ok(false) => {
                self.term.over();
                return Err("another coordinator has taken over; this one ends".to_owned());
            }
            Err(e) => {
                tracing::warn!(epoch = self.epoch, error = chain(&e), "the lease was not renewed");
                let silent = clock.boottime().ms_since(self.renewed);
                if silent > PATIENCE * self.ttl.as_millis() as u64 {
                    return Err(format!("the store was not reached for {silent} ms; this coordinator gives way"));
                }
            }
        }
        Ok(())
    }
}
