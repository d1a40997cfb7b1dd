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

/// Sends the present order unless it is `ordered` already, then every change of it; and what comes by `mail`. Whoever waits
/// here waits for as long as the connection lives: nothing is kept that is not needed for it.
pub(super) async fn push_orders(
    send: &mut SendStream,
    orders: &mut watch::Receiver<Order>,
    ordered: bool,
    mail: &Mail,
    shutdown: &mut watch::Receiver<bool>,
) -> End {
    let mut first = (!ordered).then_some(Next::Order);
    loop {
        // All branches are cancel-safe: they only wait for a value to change.
        let next = match first.take() {
            Some(first) => first,
            None => tokio::select! {
                changed = orders.changed() => if changed.is_ok() { Next::Order } else { Next::Goodbye },
                () = mail.there.notified() => Next::Mail,
                _ = shutdown.wait_for(|down| *down) => Next::Goodbye,
            },
        };
        // An order comes rarely, and has its memory then.
        if let Some(end) = Box::pin(say(send, next, orders, mail)).await {
            return end;
        }
    }
}

/// What is said next.
enum Next {
    Order,
    Mail,
    Goodbye,
}

/// Says it, and whether the connection ends with it.
async fn say(send: &mut SendStream, next: Next, orders: &mut watch::Receiver<Order>, mail: &Mail) -> Option<End> {
    let (messages, end) = match next {
        Next::Order => {
            let (message, end) = message_of(&orders.borrow_and_update());
            (vec![message], end)
        }
        Next::Mail => (mail.take(), None),
        Next::Goodbye => (vec![ToAgent::Goodbye], Some(End::Shutdown)),
    };
    for message in messages {
        let written = async { io::write_bytes(send, &io::wrapped(Lane::Control, &message)?).await };
        if let Err(source) = written.await {
            return Some(End::Stream { what: "sending an order", source });
        }
    }
    end
}

/// What is for an agent beside its orders, until it is sent. Of each kind the newest counts.
#[derive(Default)]
pub(super) struct Mail {
    waiting: Mutex<Waiting>,
    there: Notify,
}

#[derive(Default)]
struct Waiting {
    certificate: Option<Box<EnrolReply>>,
    places: Option<Uploads>,
}

impl Mail {
    /// The agent's next certificate.
    pub fn certificate(&self, reply: EnrolReply) {
        self.put(|waiting| waiting.certificate = Some(Box::new(reply)));
    }

    /// Places for its evidence.
    pub fn places(&self, uploads: Uploads) {
        self.put(|waiting| waiting.places = Some(uploads));
    }

    fn put(&self, put: impl FnOnce(&mut Waiting)) {
        put(&mut self.waiting());
        self.there.notify_one();
    }

    fn take(&self) -> Vec<ToAgent> {
        let Waiting { certificate, places } = std::mem::take(&mut *self.waiting());
        let certificate = certificate.map(|reply| ToAgent::Renewal(*reply));
        certificate.into_iter().chain(places.map(ToAgent::Uploads)).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Plain assignments: a panic elsewhere leaves nothing half-changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
