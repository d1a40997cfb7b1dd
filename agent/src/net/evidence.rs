//! Sending evidence: from the spool, in order, until the coordinator has committed it.
//!
//! The coordinator's answers are the truth: where it says that less is committed than we believed, sending goes back to
//! there. Nothing is sent in a quiet interval. A run whose evidence is not taken rests for a while, and holds up no other.

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
use tokio::time::Instant;

use super::{
    io::{self, StreamError},
    link::Shared,
};
use crate::spool::{RunSpool, Spool};

/// Well below the lane's cap; a frame is what is lost when a connection breaks.
const BATCH_BYTES: usize = 256 << 10;
/// Between attempts while the coordinator cannot commit; for one run it doubles up to the maximum, since it may be that
/// the coordinator never takes it.
const PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Runs that were not taken when they were last tried.
#[derive(Default)]
struct Resting(HashMap<RunId, Rest>);

struct Rest {
    until: Instant,
    pause: Duration,
}

impl Resting {
    fn rests(&self, run: RunId, now: Instant) -> bool {
        self.0.get(&run).is_some_and(|r| now < r.until)
    }

    /// A run was not taken. True if that is news.
    fn refused(&mut self, run: RunId, now: Instant) -> bool {
        let before = self.0.get(&run).map(|r| r.pause);
        let pause = before.map_or(PAUSE, |p| (2 * p).min(MAX_PAUSE));
        self.0.insert(run, Rest { until: now + pause, pause });
        before.is_none()
    }

    /// A run was taken. True if that is news.
    fn taken(&mut self, run: RunId) -> bool {
        self.0.remove(&run).is_some()
    }

    /// When the next rest ends.
    fn next_end(&self, now: Instant) -> Option<Instant> {
        self.0.values().map(|r| r.until).filter(|end| *end > now).min()
    }
}

/// Sends for as long as the connection lives; returns when it does not.
pub(super) async fn run(connection: &Connection, spool: &Spool, shared: &Shared) -> quinn::ConnectionError {
    let mut cursors = HashMap::new();
    let mut resting = Resting::default();
    loop {
        let failed = match open(connection).await {
            Ok((send, recv)) => send_all(send, recv, spool, shared, &mut cursors, &mut resting).await,
            Err(e) => (None, e),
        };
        if let Some(reason) = connection.close_reason() {
            return reason;
        }
        match failed {
            (Some(run), e) => {
                // The others go on at once.
                if resting.refused(run, Instant::now()) {
                    tracing::warn!(%run, error = %chain(&e), "evidence of this run was not taken; it will be tried again");
                }
            }
            (None, e) => {
                tracing::warn!(error = %chain(&e), "no evidence can be sent; trying again");
                tokio::time::sleep(PAUSE).await;
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
    cursors: &mut HashMap<RunId, u64>,
    resting: &mut Resting,
) -> (Option<RunId>, StreamError) {
    loop {
        let mut sent_any = false;
        for run in spool.runs() {
            let id = run.meta().run;
            if resting.rests(id, Instant::now()) {
                continue;
            }
            match send_some(&mut send, &mut recv, &run, shared, cursors).await {
                Ok(Sent::Nothing) => {}
                Ok(Sent::Taken) => {
                    sent_any = true;
                    if resting.taken(id) {
                        tracing::info!(run = %id, "evidence of this run is taken again");
                    }
                }
                // Neither committed nor told to go back: do not spin.
                Ok(Sent::NotTaken) => {
                    resting.refused(id, Instant::now());
                }
                Err(e) => return (Some(id), e),
            }
        }
        if !sent_any {
            let rested = resting.next_end(Instant::now());
            let rested = async {
                match rested {
                    Some(end) => tokio::time::sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            // Both branches are cancel-safe: they only wait.
            tokio::select! {
                () = spool.committed() => {}
                () = rested => {}
            }
        }
    }
}

enum Sent {
    /// There was nothing to send.
    Nothing,
    Taken,
    NotTaken,
}

/// One batch of one run.
async fn send_some(
    send: &mut SendStream,
    recv: &mut RecvStream,
    spool: &RunSpool,
    shared: &Shared,
    cursors: &mut HashMap<RunId, u64>,
) -> Result<Sent, StreamError> {
    let run = spool.meta().run;
    let cursor = *cursors.entry(run).or_insert_with(|| spool.acked());
    if cursor >= spool.last_seq() {
        return Ok(Sent::Nothing);
    }
    // Reading the disk is work too: it waits for the end of a quiet interval as sending does.
    shared.not_quiet().await;
    let records = match spool.read_after(cursor, BATCH_BYTES) {
        Ok(records) => records,
        Err(e) => {
            tracing::error!(%run, error = %chain(&e), "evidence cannot be read from the spool");
            // The other runs go on; this one is looked at again on the next connection.
            cursors.insert(run, u64::MAX);
            return Ok(Sent::Nothing);
        }
    };
    shared.not_quiet().await;
    io::write(send, Lane::Evidence, &EvidenceBatch { run, records }).await?;
    let ack: EvidenceAck = io::read(recv, Lane::Evidence).await?.ok_or(StreamError::CutShort)?;
    if ack.run != run {
        return Err(StreamError::OtherRun);
    }
    cursors.insert(run, ack.through_seq);
    if let Err(e) = spool.set_acked(ack.through_seq) {
        tracing::error!(%run, error = %chain(&e), "acknowledgement not recorded");
    }
    Ok(if ack.through_seq == cursor { Sent::NotTaken } else { Sent::Taken })
}
