//! What is said to a welcomed agent: its order, places for evidence, certificates.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drums_common::wire::{
    frame::Lane,
    latest::{EnrolReply, ToAgent, Uploads},
};
use quinn::SendStream;
use tokio::sync::{Notify, watch};

use super::{connection::End, io, ports::Order};

pub(super) fn message_of(order: &Order) -> (ToAgent, Option<End>) {
    match order.clone() {
        Order::Desired(desired) => (ToAgent::Desired(desired), None),
        Order::Upgrade(upgrade) => (ToAgent::Upgrade(upgrade), None),
        Order::Retire { reason } => (ToAgent::Retire { reason: reason.clone() }, Some(End::Retired(reason))),
    }
}

/// Sends the present order unless it is `ordered` already, then every change of it; and places for evidence and certificates
/// as they are made.
pub(super) async fn push_orders(
    mut send: SendStream,
    mut orders: watch::Receiver<Order>,
    ordered: bool,
    mut offered: Option<watch::Receiver<Uploads>>,
    renewal: &Renewal,
    mut shutdown: watch::Receiver<bool>,
) -> End {
    let mut first = (!ordered).then_some(Next::Order);
    loop {
        // All branches are cancel-safe: they only wait for a value to change.
        let next = match first.take() {
            Some(first) => first,
            None => tokio::select! {
                changed = orders.changed() => if changed.is_ok() { Next::Order } else { Next::Goodbye },
                places = next_places(&mut offered) => Next::Places(places),
                reply = renewal.next() => Next::Renewal(reply),
                _ = shutdown.wait_for(|down| *down) => Next::Goodbye,
            },
        };
        // An order comes rarely, and has its memory then.
        if let Some(end) = Box::pin(say(&mut send, next, &mut orders)).await {
            return end;
        }
    }
}

/// What is said next.
enum Next {
    Order,
    Places(Uploads),
    Renewal(EnrolReply),
    Goodbye,
}

/// Says it, and whether the connection ends with it.
async fn say(send: &mut SendStream, next: Next, orders: &mut watch::Receiver<Order>) -> Option<End> {
    let (message, end) = match next {
        Next::Order => message_of(&orders.borrow_and_update()),
        Next::Places(places) => (ToAgent::Uploads(places), None),
        Next::Renewal(reply) => (ToAgent::Renewal(reply), None),
        Next::Goodbye => (ToAgent::Goodbye, Some(End::Shutdown)),
    };
    let written = async { io::write_bytes(send, &io::wrapped(Lane::Control, &message)?).await };
    match written.await {
        Ok(()) => end,
        Err(source) => Some(End::Stream { what: "sending an order", source }),
    }
}

/// New places, whenever there are any.
async fn next_places(offered: &mut Option<watch::Receiver<Uploads>>) -> Uploads {
    if let Some(offered) = offered
        && offered.changed().await.is_ok()
    {
        return offered.borrow_and_update().clone();
    }
    std::future::pending().await
}

/// The agent's next certificate, until it is sent.
#[derive(Default)]
pub(super) struct Renewal {
    waiting: Mutex<Option<EnrolReply>>,
    there: Notify,
}

impl Renewal {
    pub fn put(&self, reply: EnrolReply) {
        *self.waiting() = Some(reply);
        self.there.notify_one();
    }

    async fn next(&self) -> EnrolReply {
        loop {
            self.there.notified().await;
            if let Some(reply) = self.waiting().take() {
                return reply;
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Option<EnrolReply>> {
        // Plain assignments: a panic elsewhere leaves nothing half-changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
