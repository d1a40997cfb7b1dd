//! One agent's connection, from the TLS handshake to its end.
//!
//! ```text
//! handshake → certificate → hello → (refused | welcome) → desired …, beats, evidence, artifacts → goodbye
//! ```
//! Anything a peer does wrong ends its own connection and nothing else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use drums_common::{
    clock::{Clock, MonoMicros},
    digest::Sha256,
    failure::{Failure, FailureClass},
    lease::{LeaseTimes, longest_quiet_ms},
    telemetry::chain,
    wire::{
        close::Close,
        codec,
        frame::Lane,
        latest::{Beat, EvidenceBatch, ToCoordinator},
    },
};
use quinn::{Connection, Incoming, RecvStream, SendStream};
use tokio::{sync::watch, task::JoinSet, time::timeout};

use super::{
    artifact,
    io::{self, StreamError},
    orders::{Mail, push_orders},
    places,
    ports::{Order, Peer, Ports},
    registry::Registry,
    renew,
    welcome::{Greeted, HANDSHAKE, Streams, Welcomed, welcome},
};
use crate::pki::Pki;

/// After a goodbye or a refusal the peer closes; then we do.
pub(super) const FAREWELL: Duration = Duration::from_secs(2);

/// What all connections share.
pub(super) struct Context<P> {
    pub ports: Arc<P>,
    pub pki: Arc<Pki>,
    pub registry: Registry,
    pub leases: LeaseTimes,
    pub clock: Arc<dyn Clock>,
    pub build: Sha256,
    pub shutdown: watch::Receiver<bool>,
}

/// Why a connection ended, for `disconnected` and the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the agent said goodbye: {0}")]
    Goodbye(String),
    #[error("the coordinator is shutting down")]
    Shutdown,
    #[error("the host was retired: {0}")]
    Retired(String),
    #[error("another connection of this agent took over")]
    Replaced,
    #[error("nothing was heard for {0} s")]
    Silent(u64),
    #[error("the connection broke")]
    Broken(#[from] quinn::ConnectionError),
    #[error("{what} failed")]
    Stream { what: &'static str, source: StreamError },
    #[error("the agent sent {0}")]
    Nonsense(&'static str),
}

/// Takes a peer that dials in a box: this task lives as long as the connection, and what dials does not.
pub(super) async fn serve<P: Ports>(incoming: Box<Incoming>, context: Arc<Context<P>>, unfinished: super::Unfinished) {
    // What comes before the welcome takes the most memory, and is given back before the long time after it.
    let Some(welcomed) = Box::pin(welcome(*incoming, &context)).await else { return };
    drop(unfinished);
    let mut tasks = JoinSet::new();
    let (connection, peer, heard) = spawn_tasks(welcomed, &mut tasks, &context);
    let end = attend(&connection, &peer, &heard, &mut tasks, &context).await;
    Box::pin(part(&connection, &peer, end, tasks, &context)).await;
}

/// For a peer of a coordinator that is not the active one: it is to try the others.
pub(super) async fn stand_by(incoming: Incoming) {
    if let Ok(Ok(connection)) = timeout(HANDSHAKE, async { incoming.accept()?.await }).await {
        close(&connection, Close::Standby, Close::Standby.words());
        let _ = timeout(FAREWELL, connection.closed()).await;
    }
}

/// Until one side ends it.
async fn attend<P: Ports>(
    connection: &Connection,
    peer: &Peer,
    heard: &Heard,
    tasks: &mut JoinSet<End>,
    context: &Context<P>,
) -> End {
    let beats = async {
        let end = read_beats(connection, peer, context, heard).await;
        if connection.close_reason().is_some() {
            // The others see it too, and the agent's last words may be on a stream.
            tokio::time::sleep(FAREWELL).await;
        }
        end
    };
    let end = tokio::select! {
        end = beats => end,
        Some(ended) = tasks.join_next() => ended.unwrap_or_else(|e| {
            tracing::error!(host = %peer.host, error = %e, "connection task died");
            End::Nonsense("something that broke its connection's task")
        }),
    };
    match end {
        End::Broken(quinn::ConnectionError::LocallyClosed) => End::Replaced,
        other => other,
    }
}

/// What is left to do once it is known why a connection ends.
async fn part<P: Ports>(connection: &Connection, peer: &Peer, end: End, mut tasks: JoinSet<End>, context: &Context<P>) {
    if matches!(end, End::Shutdown | End::Retired(_)) {
        // The agent was told in a message and closes; whoever receives last closes first.
        let _ = timeout(FAREWELL, connection.closed()).await;
    }
    close_for(connection, &end);
    tasks.shutdown().await;
    let reason = chain(&end);
    tracing::info!(host = %peer.host, %reason, "agent disconnected");
    if context.registry.release(&peer.host, connection) {
        context.ports.disconnected(peer, &reason);
    }
}

/// What seldom happens shares one task, and beats have the connection's own: a thousand idle agents are two thousand tasks,
/// and a beat looks at nothing else.
fn spawn_tasks<P: Ports>(
    welcomed: Welcomed,
    tasks: &mut JoinSet<End>,
    context: &Arc<Context<P>>,
) -> (Connection, Arc<Peer>, Heard) {
    let Welcomed { connection, peer, greeted: Greeted { streams, accepted, ordered } } = welcomed;
    tracing::info!(host = %peer.host, remote = %connection.remote_address(), generation = %accepted.welcome.generation, "agent connected");
    let heard = Heard::new(context.clock.boottime().0.into());
    let mail = Arc::new(Mail::default());
    if context.ports.has_bucket() {
        tasks.spawn(places::offer(peer.clone(), accepted.orders.clone(), mail.clone(), context.clone()));
    }
    let seldom = Seldom {
        connection: connection.clone(),
        peer: peer.clone(),
        context: context.clone(),
        heard: heard.clone(),
        mail,
    };
    tasks.spawn(seldom.run(streams, accepted.orders, ordered));
    (connection, peer, heard)
}

/// Everything of a connection but its beats.
struct Seldom<P> {
    connection: Connection,
    peer: Arc<Peer>,
    context: Arc<Context<P>>,
    heard: Heard,
    mail: Arc<Mail>,
}

impl<P: Ports> Seldom<P> {
    async fn run(self, (mut send, mut recv): Streams, mut orders: watch::Receiver<Order>, ordered: bool) -> End {
        let mut shutdown = self.context.shutdown.clone();
        // The first to end ends the connection, and with it the others. What the agent said last says more than that it is
        // gone.
        tokio::select! {
            biased;
            end = self.read_control(&mut recv) => end,
            end = push_orders(&mut send, &mut orders, ordered, &self.mail, &mut shutdown) => end,
            end = self.accept_streams() => end,
            end = watch_silence(&self.heard, &self.context) => end,
        }
    }

    async fn read_control(&self, recv: &mut RecvStream) -> End {
        let mut last_renewal: Option<MonoMicros> = None;
        loop {
            let message = match io::read(recv, Lane::Control).await {
                Ok(Some(message)) => message,
                Ok(None) => return End::Nonsense("the end of its control stream"),
                Err(StreamError::Read(quinn::ReadError::ConnectionLost(e))) => return e.into(),
                Err(source) => return End::Stream { what: "reading the control stream", source },
            };
            account(&self.heard, self.context.clock.boottime());
            // What comes rarely has its memory then.
            if let Some(end) = Box::pin(self.heed(message, &mut last_renewal)).await {
                return end;
            }
        }
    }

    /// What a message asks for, and whether the connection ends with it.
    async fn heed(&self, message: ToCoordinator, last_renewal: &mut Option<MonoMicros>) -> Option<End> {
        let Self { peer, context, .. } = self;
        match message {
            ToCoordinator::Facts(facts) => context.ports.facts(peer, *facts).await,
            ToCoordinator::Refused { run, failure } => context.ports.demand_refused(peer, run, failure).await,
            ToCoordinator::UpgradeFailed { upgrade, failure } => {
                context.ports.upgrade_failed(peer, upgrade, failure).await;
            }
            ToCoordinator::Goodbye { reason } => return Some(End::Goodbye(reason)),
            ToCoordinator::Renew { csr_der } => {
                let now = context.clock.boottime();
                if last_renewal.replace(now).is_some_and(|last| now.ms_since(last) < renew::APART_MS) {
                    return Some(End::Nonsense("requests for certificates one after the other"));
                }
                self.mail.certificate(renew::answer(peer, &csr_der, context).await);
            }
            ToCoordinator::Hello(_) => return Some(End::Nonsense("a second hello")),
        }
        None
    }

    /// Evidence and artifact streams. quinn lets the peer open a fixed few, so the tasks are as few.
    async fn accept_streams(&self) -> End {
        let mut streams = JoinSet::new();
        loop {
            // Cancel-safe: neither accept_bi nor join_next loses anything.
            let (send, recv) = tokio::select! {
                stream = self.connection.accept_bi() => match stream {
                    Ok(stream) => stream,
                    Err(e) => return e.into(),
                },
                Some(ended) = streams.join_next() => match ended {
                    Ok(Err(end)) => return end,
                    // A stream that ended in order, or panicked, which is reported already.
                    Ok(Ok(())) | Err(_) => continue,
                },
            };
            let (peer, context, heard) = (self.peer.clone(), self.context.clone(), self.heard.clone());
            streams.spawn(async move { stream(send, recv, &peer, &context, &heard).await });
        }
    }
}

/// Until when the agent is accounted for, CLOCK_BOOTTIME in microseconds.
type Heard = Arc<AtomicU64>;

fn account(heard: &AtomicU64, at: MonoMicros) {
    heard.fetch_max(at.0, Relaxed);
}

async fn read_beats<P: Ports>(connection: &Connection, peer: &Peer, context: &Context<P>, heard: &Heard) -> End {
    loop {
        let datagram = match connection.read_datagram().await {
            Ok(datagram) => datagram,
            Err(e) => return e.into(),
        };
        let received = context.clock.boottime();
        let beat: Beat = match codec::decode(Lane::Datagram, &datagram) {
            Ok(beat) => beat,
            Err(e) => return End::Stream { what: "reading a beat", source: e.into() },
        };
        // Silence that was declared is not counted.
        account(heard, received.plus_ms(beat.quiet_ms.min(longest_quiet_ms(context.leases.life_ms))));
        let Some(ack) = context.ports.beat(peer, &beat, received) else { continue };
        let answer = match codec::encode(Lane::Datagram, &ack) {
            Ok(answer) => answer,
            Err(e) => return End::Stream { what: "answering a beat", source: e.into() },
        };
        // A lost or dropped answer is what the next beat is for.
        if let Err(quinn::SendDatagramError::ConnectionLost(e)) = connection.send_datagram(answer.into()) {
            return e.into();
        }
    }
}

async fn stream<P: Ports>(
    mut send: SendStream,
    mut recv: RecvStream,
    peer: &Peer,
    context: &Context<P>,
    heard: &Heard,
) -> Result<(), End> {
    let mut tag = [0];
    let opening = |source| End::Stream { what: "opening a stream", source };
    timeout(HANDSHAKE, io::exact(&mut recv, &mut tag))
        .await
        .map_err(|_| opening(StreamError::Stalled))?
        .map_err(opening)?;
    match Lane::of_tag(tag[0]).map_err(|e| opening(e.into()))? {
        Lane::Artifact => {
            judge("sending an artifact", Box::pin(artifact::send(&mut send, &mut recv, &*context.ports)).await)
        }
        _ => evidence(send, recv, peer, context, heard).await,
    }
}

/// A peer's fault ends the connection; a stream that merely broke is opened again by the agent.
fn judge(what: &'static str, result: Result<(), StreamError>) -> Result<(), End> {
    match result {
        Err(source) if source.peers_fault() => Err(End::Stream { what, source }),
        Err(e) => {
            tracing::debug!(error = %chain(&e), what, "stream ended");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

async fn evidence<P: Ports>(
    mut send: SendStream,
    mut recv: RecvStream,
    peer: &Peer,
    context: &Context<P>,
    heard: &Heard,
) -> Result<(), End> {
    const WHAT: &str = "receiving evidence";
    loop {
        let batch = match io::read::<EvidenceBatch>(&mut recv, Lane::Evidence).await {
            Ok(Some(batch)) => batch,
            Ok(None) => return Ok(()),
            Err(e) => return judge(WHAT, Err(e)),
        };
        account(heard, context.clock.boottime());
        let run = batch.run;
        let first = batch.records.first().map_or(0, |r| r.seq);
        let whole = first > 0
            && batch.records.iter().zip(first..).all(|(r, seq)| r.seq == seq && r.run == run && r.host == peer.host);
        if !whole {
            return Err(End::Nonsense("a batch that is empty, has gaps, or speaks for another run or host"));
        }
        match Box::pin(context.ports.commit_evidence(peer, batch)).await {
            // Only now, after the commit.
            Ok(ack) => judge(WHAT, io::write(&mut send, Lane::Evidence, &ack).await)?,
            Err(failure) => {
                tracing::warn!(host = %peer.host, %run, error = %failure, "evidence not committed");
                let code = match failure.class {
                    FailureClass::Transient => Close::Internal,
                    _ => Close::Refused,
                };
                let _ = send.reset(code.code().into());
                let _ = recv.stop(code.code().into());
                return Ok(());
            }
        }
    }
}

/// Closes what has been silent for a whole life lease: its agent has stopped by then, and would come with a new one.
async fn watch_silence<P: Ports>(heard: &Heard, context: &Context<P>) -> End {
    loop {
        let silent = context.clock.boottime().ms_since(MonoMicros(heard.load(Relaxed)));
        let left = context.leases.life_ms.saturating_sub(silent);
        if left == 0 {
            return End::Silent(silent / 1_000);
        }
        tokio::time::sleep(Duration::from_millis(left)).await;
    }
}

pub(super) fn close(connection: &Connection, code: Close, words: &str) {
    // A close must fit one packet.
    let cut = words.len().min(200);
    let cut = (0..=cut).rev().find(|&i| words.is_char_boundary(i)).unwrap_or(0);
    connection.close(code.code().into(), &words.as_bytes()[..cut]);
}

pub(super) fn close_for(connection: &Connection, end: &End) {
    let code = match end {
        End::Goodbye(_) => Close::Goodbye,
        End::Shutdown => Close::ShuttingDown,
        End::Retired(_) => Close::Refused,
        End::Replaced => Close::Replaced,
        End::Silent(_) => Close::TooSlow,
        End::Nonsense(_) => Close::BadPeer,
        End::Stream { source: StreamError::Stalled, .. } => Close::TooSlow,
        End::Stream { source, .. } if source.peers_fault() => Close::BadPeer,
        End::Broken(_) | End::Stream { .. } => Close::Internal,
    };
    close(connection, code, &chain(end));
}

/// What a failure of this side's own is on the wire.
pub(super) fn internal(message: String) -> Failure {
    Failure::new(FailureClass::Transient, "coordinator", message, "it will be tried again")
}
