//! Sending evidence: from the spool, in order, until the coordinator has committed it.
//!
//! The coordinator's answers are the truth: where it says that less is committed than we believed, sending goes back to
//! there. Nothing is sent in a quiet interval.

use std::{collections::HashMap, time::Duration};

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
};
use crate::spool::{RunSpool, Spool};

/// Well below the lane's cap; a frame is what is lost when a connection breaks.
const BATCH_BYTES: usize = 256 << 10;
/// Between attempts while the coordinator cannot commit.
const PAUSE: Duration = Duration::from_secs(1);

/// Sends for as long as the connection lives; returns when it does not.
pub(super) async fn run(connection: &Connection, spool: &Spool, shared: &Shared) -> quinn::ConnectionError {
    let mut cursors = HashMap::new();
    loop {
        let failed = match open(connection).await {
            Ok((send, recv)) => send_all(send, recv, spool, shared, &mut cursors).await,
            Err(e) => e,
        };
        if let Some(reason) = connection.close_reason() {
            return reason;
        }
        tracing::warn!(error = %chain(&failed), "evidence was not taken; trying again");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn open(connection: &Connection) -> Result<(SendStream, RecvStream), StreamError> {
    let (mut send, recv) = connection.open_bi().await.map_err(StreamError::Connection)?;
    io::write_bytes(&mut send, &[Lane::Evidence.tag()]).await?;
    Ok((send, recv))
}

async fn send_all(
    mut send: SendStream,
    mut recv: RecvStream,
    spool: &Spool,
    shared: &Shared,
    cursors: &mut HashMap<RunId, u64>,
) -> StreamError {
    loop {
        let mut sent_any = false;
        for run in spool.runs() {
            match send_some(&mut send, &mut recv, &run, shared, cursors).await {
                Ok(sent) => sent_any |= sent,
                Err(e) => return e,
            }
        }
        if !sent_any {
            spool.committed().await;
        }
    }
}

/// One batch of one run. False if there was nothing to send.
async fn send_some(
    send: &mut SendStream,
    recv: &mut RecvStream,
    spool: &RunSpool,
    shared: &Shared,
    cursors: &mut HashMap<RunId, u64>,
) -> Result<bool, StreamError> {
    let run = spool.meta().run;
    let cursor = *cursors.entry(run).or_insert_with(|| spool.acked());
    if cursor >= spool.last_seq() {
        return Ok(false);
    }
    // Reading the disk is work too: it waits for the end of a quiet interval as sending does.
    shared.not_quiet().await;
    let records = match spool.read_after(cursor, BATCH_BYTES) {
        Ok(records) => records,
        Err(e) => {
            tracing::error!(%run, error = %chain(&e), "evidence cannot be read from the spool");
            // The other runs go on; this one is looked at again on the next connection.
            cursors.insert(run, u64::MAX);
            return Ok(false);
        }
    };
    shared.not_quiet().await;
    io::write(send, Lane::Evidence, &EvidenceBatch { run, records }).await?;
    let ack: EvidenceAck = io::read(recv, Lane::Evidence).await?.ok_or(StreamError::CutShort)?;
    if ack.run != run {
        return Err(StreamError::OtherRun);
    }
    if ack.through_seq == cursor {
        // Neither committed nor told to go back: do not spin.
        tokio::time::sleep(PAUSE).await;
    }
    cursors.insert(run, ack.through_seq);
    if let Err(e) = spool.set_acked(ack.through_seq) {
        tracing::error!(%run, error = %chain(&e), "acknowledgement not recorded");
    }
    Ok(true)
}
