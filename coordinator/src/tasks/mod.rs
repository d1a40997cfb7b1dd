//! The long-lived tasks: one driver owns the runs; [`Control`] is what the network and the API hold of it.
//!
//! ```text
//! net (agents) ─ Ports ─▶ Control ─ evidence, tokens, audit ─▶ StoreHandle (one writer thread)
//! api (operators) ──────▶    │ ── requests, wake-ups ────────▶ driver ─ step, save, order ─▶ watch per host ─▶ net
//! ```
//! Policy is in `core`; here is only what moves its inputs and outputs. Everything the driver does follows from the store
//! and the leases, so a coordinator that was killed anywhere goes on.

mod committed;
mod driver;
mod ports;
mod questions;
mod refusals;
mod requests;
#[cfg(test)]
mod tests;
mod upgrades;
mod uploads;

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use drums_common::{
    clock::{Clock, Micros, MonoMicros},
    ids::{HostId, InstallationId, RunId},
    lease::{HostLeases, LeaseTimes},
};
use tokio::sync::{Notify, mpsc, watch};

use crate::{
    artifacts::Artifacts,
    net::ports::Order,
    store::{AuditRow, StoreError, StoreHandle, Who},
    term::Term,
};

pub use driver::Driver;
pub use questions::{Analysis, Analyst, analysis_inputs};
pub use requests::{HostView, NewRun};
pub use uploads::Uploading;

/// Runs and hosts whose refused evidence is remembered; an enrolled agent that makes up more of them is only logged.
const REFUSED_EVIDENCE: usize = 1_024;

/// Requests that wait for the driver; more make callers wait.
const QUEUE: usize = 256;

type CommittedOfRuns = HashMap<RunId, HashMap<HostId, committed::Committed>>;

/// A connection of a host.
struct Linked {
    orders: watch::Sender<Order>,
    /// Whose: another one may have the name by now.
    installation: InstallationId,
}

/// Shared between the driver, the network and the API.
pub struct Control {
    pub store: StoreHandle,
    pub artifacts: Artifacts,
    pub clock: Arc<dyn Clock>,
    pub installation: InstallationId,
    pub up_since: Micros,
    leases: Mutex<HostLeases>,
    /// How long it may answer for its store; for ever if nobody else can lead it.
    term: OnceLock<Term>,
    links: Mutex<HashMap<HostId, Linked>>,
    /// How often a host was, or may have been, released or moved: connections are then held against what is stored.
    moves: AtomicU64,
    /// That is due.
    links_due: AtomicBool,
    upgrades: Mutex<upgrades::Upgrades>,
    /// How far evidence is committed, for each host of each run that is not over.
    committed: Mutex<CommittedOfRuns>,
    refusals: Mutex<refusals::Refusals>,
    /// Runs of hosts whose evidence was refused for good: reported once, however often the agent tries.
    refused_evidence: Mutex<HashSet<(RunId, HostId)>>,
    /// Where evidence goes when this coordinator is away.
    uploading: Option<Uploading>,
    requests: mpsc::Sender<requests::Request>,
    wake: Notify,
    /// A run, or the build of a host, is not what it was when orders were sent last. They follow from nothing else: a host
    /// that connects gets its own with the answer, and clocks in orders need not be news.
    orders_due: AtomicBool,
    /// How often the driver has looked at everything.
    looks: watch::Sender<u64>,
    /// Grows with every stored change of a run, for those who wait for one.
    changes: watch::Sender<u64>,
}

impl Control {
    /// Reads what is there and starts the driver, which ends after `shutdown` is true.
    pub async fn start(
        store: StoreHandle,
        artifacts: Artifacts,
        clock: Arc<dyn Clock>,
        times: LeaseTimes,
        uploading: Option<Uploading>,
        shutdown: watch::Receiver<bool>,
    ) -> Result<(Arc<Self>, tokio::task::JoinHandle<()>), StoreError> {
        artifacts.sweep().await;
        let (control, driver) = Self::open(store, artifacts, clock, times, uploading, Arc::new(Analysis)).await?;
        let task = tokio::spawn(driver.run(shutdown));
        Ok((control, task))
    }

    /// Reads what is there, and hands over the driver to whoever runs it.
    pub async fn open(
        store: StoreHandle,
        artifacts: Artifacts,
        clock: Arc<dyn Clock>,
        times: LeaseTimes,
        uploading: Option<Uploading>,
        analyst: Arc<dyn Analyst>,
    ) -> Result<(Arc<Self>, Driver), StoreError> {
        let drawn = InstallationId(rand::random()).to_string();
        let named = AuditRow::new(clock.now(), Who::coordinator(), "installation").detail(&drawn);
        let installation = store.call(move |s| s.meta_or("installation", &drawn, &named)).await?;
        let installation = installation
            .parse()
            .map_err(|_| StoreError::Corrupt { what: "installation id", got: installation.clone() })?;
        let (requests, queue) = mpsc::channel(QUEUE);
        let control = Arc::new(Self {
            leases: Mutex::new(HostLeases::new(times, clock.boottime())),
            term: OnceLock::new(),
            links: Mutex::default(),
            moves: AtomicU64::new(0),
            links_due: AtomicBool::new(false),
            upgrades: Mutex::default(),
            committed: Mutex::default(),
            refusals: Mutex::default(),
            refused_evidence: Mutex::default(),
            uploading,
            requests,
            wake: Notify::new(),
            orders_due: AtomicBool::new(false),
            looks: watch::Sender::new(0),
            changes: watch::Sender::new(0),
            up_since: clock.now(),
            store,
            artifacts,
            clock,
            installation,
        });
        let driver = Driver::load(control.clone(), queue, analyst).await?;
        Ok((control, driver))
    }

    pub fn now(&self) -> Micros {
        self.clock.now()
    }

    /// Something was stored: long polls look again when this changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn changed(&self) {
        self.changes.send_modify(|n| *n += 1);
    }

    /// The next look sends orders.
    fn orders_due(&self) {
        self.orders_due.store(true, SeqCst);
    }

    fn orders_are_due(&self) -> bool {
        self.orders_due.swap(false, SeqCst)
    }

    fn leases(&self) -> MutexGuard<'_, HostLeases> {
        // A panic while it was held leaves data that is whole: every method of the lease core is total.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<HostId, Linked>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn committed(&self) -> MutexGuard<'_, CommittedOfRuns> {
        self.committed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Others may lead this store: from now on beats are answered only while this one certainly does.
    pub(crate) fn lead_for(&self, term: Term) {
        // Given once, by whoever took the lease.
        let _ = self.term.set(term);
    }

    /// True while a connection of the host is open.
    pub fn connected(&self, host: &HostId) -> bool {
        self.links().get(host).is_some_and(|l| !l.orders.is_closed())
    }

    /// A host was released or moved, or may have been: its answer may be lost, and whoever connects just now was looked at
    /// before. The next look holds all connections against what is stored.
    fn host_moved(&self) {
        self.moves.fetch_add(1, SeqCst);
        self.links_due.store(true, SeqCst);
        self.wake.notify_one();
    }

    pub fn health(
        &self,
        host: &HostId,
    ) -> Option<(drums_common::lease::Health, drums_common::lease::HostLease, MonoMicros)> {
        let now = self.clock.boottime();
        let leases = self.leases();
        Some((leases.health(host, now)?, leases.get(host)?.clone(), now))
    }

    /// Writes down what changed nothing else; a failure is logged.
    async fn audit(&self, row: AuditRow) {
        let action = row.action.clone();
        if let Err(e) = self.store.call(move |s| s.add_audit(&row)).await {
            tracing::error!(error = drums_common::telemetry::chain(&e), action, "the audit trail was not written");
        }
    }

    pub fn audit_row(&self, who: &Who, action: &str) -> AuditRow {
        AuditRow::new(self.now(), who.clone(), action)
    }

    /// A peer was refused: the audit trail takes a bounded number of them.
    fn audit_refusal(&self, from: IpAddr, host: Option<&HostId>, action: &str, detail: &str) {
        let now = self.clock.boottime();
        if self.refusals.lock().unwrap_or_else(PoisonError::into_inner).note(from, now) {
            let who = host.map_or_else(|| "an unknown peer".to_owned(), |h| format!("host {h}"));
            let row = self.audit_row(&Who::new(who, from.to_string()), action).detail(detail);
            self.audit_soon(AuditRow { host: host.cloned(), ..row });
        }
    }

    /// Writes down what was only counted.
    fn count_refusals(&self) {
        let over = self.refusals.lock().unwrap_or_else(PoisonError::into_inner).over(self.clock.boottime());
        for (from, n) in over {
            let row = self.audit_row(&Who::new("unknown peers", from.clone()), "refused");
            self.audit_soon(row.detail(&format!("{n} more from {from} within a minute")));
        }
    }

    fn audit_soon(&self, row: AuditRow) {
        let action = row.action.clone();
        let taken = self.store.post(move |s| {
            if let Err(e) = s.add_audit(&row) {
                tracing::error!(error = drums_common::telemetry::chain(&e), "the audit trail was not written");
            }
        });
        if !taken {
            tracing::error!(action, "the audit trail was not written: the store is busy");
        }
    }
}
