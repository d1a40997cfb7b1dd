//! What the API and the network ask of the driver, and the answers that need its state.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    failure::{Failure, FailureClass},
    ids::{ExperimentId, Generation, HostId, InstallationId, RunId},
    lease::{Health, HostLease},
};
use tokio::sync::{oneshot, watch};

use super::Control;
use crate::{
    core::run::RunState,
    net::ports::Order,
    store::{HostRow, StoreError, Who},
};

/// A run to be made.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// Drawn by whoever asks.
    pub id: RunId,
    pub experiment: ExperimentId,
    /// None: the latest registration.
    pub registration: Option<Sha256>,
    /// The operator's own end, earlier than the registered deadline.
    pub until: Option<Micros>,
    pub by: Who,
}

pub(super) enum Request {
    Connected {
        host: HostId,
        installation: InstallationId,
        generation: Generation,
        reply: oneshot::Sender<watch::Receiver<Order>>,
    },
    HostRefused {
        host: HostId,
        run: RunId,
        failure: Failure,
    },
    EvidenceRefused {
        host: HostId,
        run: RunId,
        failure: Failure,
    },
    Create {
        new: NewRun,
        reply: oneshot::Sender<Result<RunState, Failure>>,
    },
    Cancel {
        run: RunId,
        by: Who,
        reply: oneshot::Sender<Result<RunState, Failure>>,
    },
    Release {
        host: HostId,
        by: Who,
        reply: oneshot::Sender<Result<(), Failure>>,
    },
}

/// A host with what is known of it now.
#[derive(Clone, Debug)]
pub struct HostView {
    pub row: HostRow,
    pub connected: bool,
    pub health: Option<Health>,
    pub lease: Option<HostLease>,
    /// Milliseconds since it was last heard.
    pub heard_ms: Option<u64>,
    /// What is left of its life lease.
    pub life_left_ms: Option<u64>,
}

fn gone() -> Failure {
    Failure::new(FailureClass::Transient, "shutting-down", "the coordinator is shutting down", "try again in a moment")
}

impl Control {
    pub(super) async fn send(&self, request: Request) {
        // Fails only while the coordinator shuts down; the agent says it again to the next one.
        let _ = self.requests.send(request).await;
    }

    async fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(make(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }

    pub(super) async fn connect(
        &self,
        host: HostId,
        installation: InstallationId,
        generation: Generation,
    ) -> Result<watch::Receiver<Order>, Failure> {
        self.ask(|reply| Request::Connected { host, installation, generation, reply }).await
    }

    pub async fn create_run(&self, new: NewRun) -> Result<RunState, Failure> {
        self.ask(|reply| Request::Create { new, reply }).await?
    }

    pub async fn cancel_run(&self, run: RunId, by: Who) -> Result<RunState, Failure> {
        self.ask(|reply| Request::Cancel { run, by, reply }).await?
    }

    /// Revokes a host; its agent is told to retire.
    pub async fn release(&self, host: HostId, by: Who) -> Result<(), Failure> {
        self.ask(|reply| Request::Release { host, by, reply }).await?
    }

    /// All hosts, released ones included.
    pub async fn host_views(&self) -> Result<Vec<HostView>, StoreError> {
        let rows = self.store.call(|s| s.hosts()).await?;
        let life_ms = self.leases().times().life_ms;
        Ok(rows
            .into_iter()
            .map(|row| {
                let known = self.health(&row.host);
                let connected = self.connected(&row.host);
                let (health, lease, heard_ms) = match known {
                    Some((health, lease, now)) => (Some(health), Some(lease.clone()), Some(now.ms_since(lease.heard))),
                    None => (None, None, None),
                };
                let life_left_ms = heard_ms.map(|ms| life_ms.saturating_sub(ms));
                HostView { row, connected, health, lease, heard_ms, life_left_ms }
            })
            .collect())
    }
}
