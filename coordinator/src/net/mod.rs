//! The coordinator's network: the agents' endpoint and the enrolment endpoint.
//!
//! Owns connections, streams, limits on what a peer may send, and who a peer is (by its certificate). Refuses to know
//! runs, blocks and verdicts: parsed messages leave through `ports`.
//!
//! **Invariant:** whatever a peer sends ends at most its own connection.

mod artifact;
mod connection;
pub mod endpoint;
mod enrol;
mod instance;
mod io;
mod orders;
mod places;
pub mod ports;
mod registry;
mod renew;
mod welcome;

use std::{future::Future, sync::Arc, time::Duration};

use drums_common::{clock::Clock, digest::Sha256, lease::LeaseTimes};
use drums_identity::Certificates;
use quinn::{Endpoint, Incoming};
use tokio::{sync::watch, task::JoinSet};

use self::ports::{Ports, TokenStore};
pub use self::{
    registry::may_be_rebooted,
    welcome::{SECOND_MACHINE, shows_identity_of},
};
use crate::pki::Pki;

/// Connections at once. An idle one takes some 40 KiB, and a fleet of a thousand that lost its path has its old
/// connections still open when it dials again.
const MAX_AGENTS: usize = 4_096;
const MAX_ENROLMENTS: usize = 32;
/// Beyond so many unfinished handshakes a peer must first show that its address is its own. A fleet of a thousand that
/// comes back at once is no attack.
const UNVALIDATED: usize = 1_024;
/// For the last packets of closed connections.
const DRAIN: Duration = Duration::from_secs(3);

/// Serves agents until `shutdown` is true, then says goodbye to each and returns.
pub async fn serve_agents<P: Ports>(
    endpoint: Endpoint,
    ports: Arc<P>,
    pki: Arc<Pki>,
    leases: LeaseTimes,
    clock: Arc<dyn Clock>,
    build: Sha256,
    shutdown: watch::Receiver<bool>,
) {
    let registry = registry::Registry::default();
    let down = shutdown.clone();
    let context = Arc::new(connection::Context { ports, pki, registry, leases, clock, build, shutdown: down });
    let serve = |incoming, unfinished| connection::serve(Box::new(incoming), context.clone(), unfinished);
    accept(&endpoint, MAX_AGENTS, shutdown, serve).await;
}

/// Serves enrolments until `shutdown` is true. Launched hosts are believed by the certificates.
pub async fn serve_enrolment<T: TokenStore>(
    endpoint: Endpoint,
    store: Arc<T>,
    pki: Arc<Pki>,
    certificates: Certificates,
    clock: Arc<dyn Clock>,
    build: Sha256,
    shutdown: watch::Receiver<bool>,
) {
    let context = Arc::new(enrol::Context { store, pki, certificates, clock, build });
    accept(&endpoint, MAX_ENROLMENTS, shutdown, |incoming, _| enrol::serve(incoming, context.clone())).await;
}

/// Tells every peer that this coordinator stands by, until `shutdown` is true.
pub async fn refuse(endpoint: Endpoint, shutdown: watch::Receiver<bool>) {
    accept(&endpoint, MAX_ENROLMENTS, shutdown, |incoming, _| connection::stand_by(incoming)).await;
}

/// Held while a peer has not said hello.
type Unfinished = Arc<()>;

async fn accept<F>(
    endpoint: &Endpoint,
    max: usize,
    mut shutdown: watch::Receiver<bool>,
    serve: impl Fn(Incoming, Unfinished) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let unfinished = Unfinished::default();
    let mut tasks = JoinSet::new();
    loop {
        // All branches are cancel-safe.
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            Some(ended) = tasks.join_next() => {
                if let Err(e) = ended {
                    tracing::error!(error = %e, "connection task died");
                }
                continue;
            }
            _ = shutdown.wait_for(|down| *down) => break,
        };
        let Some(incoming) = incoming else { break };
        if tasks.len() >= max {
            tracing::warn!(remote = %incoming.remote_address(), max, "too many connections; peer turned away");
            incoming.refuse();
        } else if Arc::strong_count(&unfinished) > UNVALIDATED
            && !incoming.remote_address_validated()
            && incoming.may_retry()
        {
            // Only fails if it may not be retried, which was asked just now.
            let _ = incoming.retry();
        } else {
            tasks.spawn(serve(incoming, unfinished.clone()));
        }
    }
    // New peers are turned away while the present ones say goodbye.
    endpoint.set_server_config(None);
    let farewell = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, farewell).await.is_err() {
        tracing::warn!(left = tasks.len(), "connections did not end in time");
        tasks.shutdown().await;
    }
    endpoint.close(drums_common::wire::close::Close::ShuttingDown.code().into(), b"");
    let _ = tokio::time::timeout(DRAIN, endpoint.wait_idle()).await;
}
