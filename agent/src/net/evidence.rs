//! Sending evidence: from the spool, in order, until the coordinator has committed it. What is sent when is `sending`'s
//! decision; here is what carries it. Nothing is sent in a quiet interval.

use std::time::Duration;

use drums_common::{
    ids::RunId,
    telemetry::chain,
    wire::{
        frame::Lane,
        latest::{EvidenceAck, EvidenceBatch},
    },
};
use quinn::{Connection, RecvStream, SendStream};

use super::{
    io::{self, StreamError},
    link::Shared,
    sending::{Held, PAUSE_MS, Sending, Taken},
};
use crate::spool::{RunSpool, Spool};

/// Well below the lane's cap; a frame is what is lost when a connection breaks.
pub const BATCH_BYTES: usize = 256 << 10;

/// Sends for as long as the connection lives; returns when it does not.
pub(super) async fn run(connection: &Connection, spool: &Spool, shared: &Shared) -> quinn::ConnectionError {
    let mut sending = Sending::default();
    loop {
        let failed = match open(connection).await {
            Ok((send, recv)) => send_all(send, recv, spool, shared, &mut sending).await,
            Err(e) => (None, e),
        };
        if let Some(reason) = connection.close_reason() {
            return reason;
        }
        match failed {
            (Some(run), e) => {
                // The others go on at once.
                if sending.refused(run, shared.clock.boottime()) {
                    tracing::warn!(%run, error = %chain(&e), "evidence of this run was not taken; it will be tried again");
                }
            }
            (None, e) => {
                tracing::warn!(error = %chain(&e), "no evidence can be sent; trying again");
                tokio::time::sleep(Duration::from_millis(PAUSE_MS)).await;
            }
        }
    }
}

async fn open(connection: &Connection) -> Result<(SendStream, RecvStream), StreamError> {
    let (mut send, recv) = connection.open_bi().await.map_err(StreamError::Connection)?;
    io::write_bytes(&mut send, &[Lane::Evidence.tag()]).await?;
    Ok((send, recv))
}

/// Until the stream breaks; says whose evidence it broke over.
async fn send_all(
    mut send: SendStream,
    mut recv: RecvStream,
    spool: &Spool,
    shared: &Shared,
    sending: &mut Sending,
) -> (Option<RunId>, StreamError) {
    loop {
        let now = shared.clock.boottime();
        let held: Vec<Held> = spool.runs().iter().map(|r| Held::from(&**r)).collect();
        let Some((id, cursor)) = sending.next(&held, now) else {
            let rested = sending.rested(now).map(|end| Duration::from_micros(end.us_since(now)));
            let rested = async {
                match rested {
                    Some(rest) => tokio::time::sleep(rest).await,
                    None => std::future::pending().await,
                }
            };
            // Both branches are cancel-safe: they only wait.
            tokio::select! {
                () = spool.committed() => {}
                () = rested => {}
            }
            continue;
        };
        let Some(run) = spool.run(id) else { continue };
        match send_some(&mut send, &mut recv, &run, cursor, shared).await {
            Ok(Some(ack)) => {
                if sending.answered(&ack, cursor, shared.clock.boottime()) == Taken::Again {
                    tracing::info!(run = %id, "evidence of this run is taken again");
                }
            }
            Ok(None) => sending.unreadable(id),
            Err(e) => return (Some(id), e),
        }
    }
}

/// One batch of one run and its answer; none if it cannot be read.
async fn send_some(
    send: &mut SendStream,
    recv: &mut RecvStream,
    spool: &RunSpool,
    cursor: u64,
    shared: &Shared,
) -> Result<Option<EvidenceAck>, StreamError> {
    let run = spool.meta().run;
    // Reading the disk is work too: it waits for the end of a quiet interval as sending does.
    shared.not_quiet().await;
    let records = match spool.read_after(cursor, BATCH_BYTES) {
        Ok(records) => records,
        Err(e) => {
            tracing::error!(%run, error = %chain(&e), "evidence cannot be read from the spool");
            return Ok(None);
        }
    };
    shared.not_quiet().await;
    io::write(send, Lane::Evidence, &EvidenceBatch { run, records }).await?;
    let ack: EvidenceAck = io::read(recv, Lane::Evidence).await?.ok_or(StreamError::CutShort)?;
    if ack.run != run {
        return Err(StreamError::OtherRun);
    }
    if let Err(e) = spool.set_acked(ack.through_seq) {
        tracing::error!(%run, error = %chain(&e), "acknowledgement not recorded");
    }
    Ok(Some(ack))
}
