//! Places for an agent's evidence, renewed for as long as its connection lives.

use std::{sync::Arc, time::Duration};

use drums_common::ids::RunId;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    connection::{Context, End},
    orders::Mail,
    ports::{Order, Peer, Ports},
};

/// After a failure: a bucket that is not there now may be in a while.
const AGAIN: Duration = Duration::from_secs(10);

/// Makes places whenever the host's runs change, and before those that it holds end. Never returns: what goes wrong with a
/// bucket ends no connection.
pub(super) async fn offer<P: Ports>(
    peer: Arc<Peer>,
    mut orders: watch::Receiver<Order>,
    mail: Arc<Mail>,
    context: Arc<Context<P>>,
) -> End {
    let mut held: Vec<RunId> = Vec::new();
    // Nothing is held, so nothing is to be renewed.
    let mut renew: Option<Instant> = None;
    loop {
        let runs = runs_of(&orders.borrow_and_update());
        let due = renew.is_some_and(|at| Instant::now() >= at);
        if runs.iter().any(|r| !held.contains(r)) || (due && !runs.is_empty()) {
            match context.ports.uploads(&peer, &runs).await {
                Ok(uploads) => {
                    let valid_ms = uploads.runs.iter().map(|r| r.valid_ms).min().unwrap_or(u64::from(u32::MAX));
                    renew = Some(Instant::now() + Duration::from_millis(valid_ms / 2));
                    held = runs;
                    mail.places(uploads);
                }
                Err(failure) => {
                    tracing::warn!(host = %peer.host, error = %failure, "no places for evidence; trying again");
                    renew = Some(Instant::now() + AGAIN);
                    // Asked again when it is due, and not at every order.
                    held = runs;
                }
            }
        } else if due {
            renew = None;
        }
        let end = async {
            match renew {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // Both branches are cancel-safe: they only wait.
        let going_on = tokio::select! {
            changed = orders.changed() => changed.is_ok(),
            () = end => true,
        };
        if !going_on {
            // Nobody gives orders any more: the connection is about to end.
            return std::future::pending().await;
        }
    }
}

fn runs_of(order: &Order) -> Vec<RunId> {
    match order {
        Order::Desired(desired) => desired.runs.iter().map(|r| r.run).collect(),
        Order::Upgrade(_) | Order::Retire { .. } => Vec::new(),
    }
}
