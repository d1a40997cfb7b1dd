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
        latest::{AgentHello, Beat, EnrolReply, EvidenceBatch, ToAgent, ToCoordinator, Uploads},
    },
};
use quinn::{Connection, Incoming, RecvStream, SendStream};
use tokio::{sync::watch, task::JoinSet, time::timeout};

use super::{
    artifact,
    io::{self, StreamError},
    places,
    ports::{Accepted, Order, Peer, Ports},
    registry::{Claim, Registry, may_be_rebooted},
    renew,
};
use crate::pki::{Pki, Subject, subject_of};

/// From the first packet to the hello. Generous on a slow path, short enough that half-made connections do not gather.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// After a goodbye or a refusal the peer closes; then we do.
const FAREWELL: Duration = Duration::from_secs(2);

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

pub(super) async fn serve<P: Ports>(incoming: Incoming, context: Arc<Context<P>>, unfinished: super::Unfinished) {
    let remote = incoming.remote_address();
    let connection = match timeout(HANDSHAKE, async { incoming.accept()?.await }).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(e)) => {
            tracing::warn!(%remote, error = %chain(&e), "handshake refused");
            let message = format!("a peer at {remote} was refused in the handshake: {}", chain(&e));
            context.ports.report(remote.ip(), None, &Failure::refused("handshake", message, certificate_help(&e)));
            return;
        }
        Err(_) => {
            tracing::debug!(%remote, "handshake not finished in time");
            return;
        }
    };
    let peer = match peer_of(&connection) {
        Ok(peer) => peer,
        Err(failure) => {
            tracing::warn!(%remote, error = %failure, "peer is no agent");
            context.ports.report(remote.ip(), None, &failure);
            close(&connection, Close::Refused, &failure.message);
            return;
        }
    };
    // What a greeting needs is given back before the long time that follows it.
    let greeted = Box::pin(timeout(HANDSHAKE, greet(&connection, &peer, &context))).await;
    drop(unfinished);
    match greeted {
        Ok(Ok(Some((hello_streams, accepted)))) => attend(connection, peer, hello_streams, accepted, &context).await,
        Ok(Ok(None)) => {}
        Ok(Err(end)) => {
            tracing::warn!(%remote, host = %peer.host, error = %chain(&end), "hello failed");
            close_for(&connection, &end);
        }
        Err(_) => {
            tracing::warn!(%remote, host = %peer.host, "no hello in time");
            close(&connection, Close::TooSlow, "no hello in time");
        }
    }
}

/// For a peer of a coordinator that is not the active one: it is to try the others.
pub(super) async fn stand_by(incoming: Incoming) {
    if let Ok(Ok(connection)) = timeout(HANDSHAKE, async { incoming.accept()?.await }).await {
        close(&connection, Close::Standby, Close::Standby.words());
        let _ = timeout(FAREWELL, connection.closed()).await;
    }
}

/// Who the peer is, by the certificate that TLS has verified.
fn peer_of(connection: &Connection) -> Result<Peer, Failure> {
    let chain =
        connection.peer_identity().and_then(|i| i.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>().ok());
    let remote = connection.remote_address();
    let refuse = |why: String| {
        Failure::refused(
            "not-an-agent",
            format!("the peer at {remote} may not speak on the agents' endpoint: {why}"),
            "enrol the host with a token from drumsctl host add",
        )
    };
    let leaf = chain.as_ref().and_then(|c| c.first()).ok_or_else(|| refuse("it has no certificate".into()))?;
    match subject_of(leaf) {
        Ok(Subject::Agent { host, installation, certificate }) => {
            Ok(Peer { host, installation, certificate, from: remote })
        }
        Ok(Subject::Person { role, name, .. }) => Err(refuse(format!("its certificate is {role} {name}'s"))),
        Err(e) => Err(refuse(e.to_string())),
    }
}

type Streams = (SendStream, RecvStream);

/// The hello. `None` if the agent was refused and told so.
async fn greet<P: Ports>(
    connection: &Connection,
    peer: &Peer,
    context: &Context<P>,
) -> Result<Option<(Streams, Accepted)>, End> {
    let (mut send, mut recv) = connection.accept_bi().await?;
    let hello = |source| End::Stream { what: "the hello", source };
    if let Err(e) = io::shake_hands(&mut send, &mut recv, context.build).await {
        let _ = send.finish();
        // Wait for the peer to read the reply, which tells it what is spoken here.
        let _ = timeout(FAREWELL, send.stopped()).await;
        return Err(hello(e));
    }
    let message = io::read::<ToCoordinator>(&mut recv, Lane::Control).await.map_err(hello)?;
    let Some(ToCoordinator::Hello(agent)) = message else {
        return Err(End::Nonsense("something else before its hello"));
    };
    match admit(connection, peer, *agent, context).await {
        Ok(accepted) => {
            let welcome = ToAgent::Welcome(accepted.welcome.clone());
            io::write(&mut send, Lane::Control, &welcome).await.map_err(hello)?;
            Ok(Some(((send, recv), accepted)))
        }
        Err(failure) => {
            tracing::warn!(host = %peer.host, error = %failure, "agent refused");
            io::write(&mut send, Lane::Control, &ToAgent::Refused(failure.clone())).await.map_err(hello)?;
            let _ = send.finish();
            let _ = timeout(FAREWELL, connection.closed()).await;
            close(connection, Close::Refused, &failure.message);
            Ok(None)
        }
    }
}

async fn admit<P: Ports>(
    connection: &Connection,
    peer: &Peer,
    hello: AgentHello,
    context: &Context<P>,
) -> Result<Accepted, Failure> {
    let host = &peer.host;
    let second = |code, what: &str| {
        let failure = Failure::refused(
            code,
            format!("{what} shows the identity of host {host} ({})", connection.remote_address()),
            "stop one of the two, or enrol this machine under a name of its own with drumsctl host add",
        );
        context.ports.report(connection.remote_address().ip(), Some(host), &failure);
        failure
    };
    if hello.installation != peer.installation {
        return Err(second("wrong-installation", "an agent with another state folder"));
    }
    if let Some(before) = context.ports.machine_of(host).await?
        && !may_be_rebooted(&before, &hello.facts.identity)
    {
        return Err(second("second-machine", "a second machine"));
    }
    if context.registry.claim(host, connection, hello.instance).await == Claim::Disputed {
        return Err(second("second-agent", "a second agent"));
    }
    let accepted = context.ports.on_connect(peer, hello).await;
    if accepted.is_err() {
        context.registry.release(host, connection);
    }
    accepted
}

/// A welcomed agent, until one side ends it.
async fn attend<P: Ports>(
    connection: Connection,
    peer: Peer,
    (send, recv): Streams,
    accepted: Accepted,
    context: &Arc<Context<P>>,
) {
    tracing::info!(host = %peer.host, remote = %connection.remote_address(), generation = %accepted.welcome.generation, "agent connected");
    let peer = Arc::new(peer);
    let heard = Heard::new(context.clock.boottime().0.into());
    let mut tasks = JoinSet::new();
    let offered = context.ports.has_bucket().then(|| {
        let (offer, offered) = watch::channel(Uploads::default());
        tasks.spawn(places::offer(peer.clone(), accepted.orders.clone(), offer, context.clone()));
        offered
    });
    // What seldom happens shares one task, and beats have this one: a thousand idle agents are two thousand tasks, and a
    // beat looks at nothing else.
    let seldom = {
        let (renewal, renewed) = watch::channel(None);
        let orders = push_orders(send, accepted.orders, offered, renewed, context.shutdown.clone());
        let control = read_control(recv, peer.clone(), context.clone(), heard.clone(), renewal);
        let streams = accept_streams(connection.clone(), peer.clone(), context.clone(), heard.clone());
        let silence = watch_silence(heard.clone(), context.clone());
        async move {
            // The first to end ends the connection, and with it the others. What the agent said last says more than that it
            // is gone.
            tokio::select! {
                biased;
                end = control => end,
                end = orders => end,
                end = streams => end,
                end = silence => end,
            }
        }
    };
    tasks.spawn(seldom);
    let beats = async {
        let end = read_beats(&connection, &peer, context, &heard).await;
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
    let end = match end {
        End::Broken(quinn::ConnectionError::LocallyClosed) => End::Replaced,
        other => other,
    };
    if matches!(end, End::Shutdown | End::Retired(_)) {
        // The agent was told in a message and closes; whoever receives last closes first.
        let _ = timeout(FAREWELL, connection.closed()).await;
    }
    close_for(&connection, &end);
    tasks.shutdown().await;
    let reason = chain(&end);
    tracing::info!(host = %peer.host, %reason, "agent disconnected");
    if context.registry.release(&peer.host, &connection) {
        context.ports.disconnected(&peer, &reason);
    }
}

/// Sends the present order, then every change of it; and places for evidence and certificates as they are made.
async fn push_orders(
    mut send: SendStream,
    mut orders: watch::Receiver<Order>,
    mut offered: Option<watch::Receiver<Uploads>>,
    mut renewed: watch::Receiver<Option<EnrolReply>>,
    mut shutdown: watch::Receiver<bool>,
) -> End {
    let failed = |source| End::Stream { what: "sending an order", source };
    enum Next {
        Order,
        Places(Uploads),
        Renewal(EnrolReply),
        Goodbye,
    }
    let mut next = Next::Order;
    loop {
        let (message, end) = match next {
            Next::Order => match orders.borrow_and_update().clone() {
                Order::Desired(desired) => (ToAgent::Desired(desired), None),
                Order::Upgrade(upgrade) => (ToAgent::Upgrade(upgrade), None),
                Order::Retire { reason } => (ToAgent::Retire { reason: reason.clone() }, Some(End::Retired(reason))),
            },
            Next::Places(places) => (ToAgent::Uploads(places), None),
            Next::Renewal(reply) => (ToAgent::Renewal(reply), None),
            Next::Goodbye => (ToAgent::Goodbye, Some(End::Shutdown)),
        };
        if let Err(e) = io::write(&mut send, Lane::Control, &message).await {
            return failed(e);
        }
        if let Some(end) = end {
            return end;
        }
        // All branches are cancel-safe: they only wait for a value to change.
        next = tokio::select! {
            changed = orders.changed() => if changed.is_ok() { Next::Order } else { Next::Goodbye },
            places = next_places(&mut offered) => Next::Places(places),
            reply = next_renewal(&mut renewed) => Next::Renewal(reply),
            _ = shutdown.wait_for(|down| *down) => Next::Goodbye,
        };
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

async fn next_renewal(renewed: &mut watch::Receiver<Option<EnrolReply>>) -> EnrolReply {
    while renewed.changed().await.is_ok() {
        if let Some(reply) = renewed.borrow_and_update().clone() {
            return reply;
        }
    }
    std::future::pending().await
}

/// Until when the agent is accounted for, CLOCK_BOOTTIME in microseconds.
type Heard = Arc<AtomicU64>;

fn account(heard: &AtomicU64, at: MonoMicros) {
    heard.fetch_max(at.0, Relaxed);
}

async fn read_control<P: Ports>(
    mut recv: RecvStream,
    peer: Arc<Peer>,
    context: Arc<Context<P>>,
    heard: Heard,
    renewal: watch::Sender<Option<EnrolReply>>,
) -> End {
    let mut last_renewal: Option<MonoMicros> = None;
    loop {
        let message = match io::read(&mut recv, Lane::Control).await {
            Ok(Some(message)) => message,
            Ok(None) => return End::Nonsense("the end of its control stream"),
            Err(StreamError::Read(quinn::ReadError::ConnectionLost(e))) => return e.into(),
            Err(source) => return End::Stream { what: "reading the control stream", source },
        };
        account(&heard, context.clock.boottime());
        match message {
            ToCoordinator::Facts(facts) => context.ports.facts(&peer, *facts).await,
            ToCoordinator::Refused { run, failure } => context.ports.demand_refused(&peer, run, failure).await,
            ToCoordinator::UpgradeFailed { upgrade, failure } => {
                context.ports.upgrade_failed(&peer, upgrade, failure).await;
            }
            ToCoordinator::Goodbye { reason } => return End::Goodbye(reason),
            ToCoordinator::Renew { csr_der } => {
                let now = context.clock.boottime();
                if last_renewal.replace(now).is_some_and(|last| now.ms_since(last) < renew::APART_MS) {
                    return End::Nonsense("requests for certificates one after the other");
                }
                // Of two that wait to be sent, one is enough.
                renewal.send_replace(Some(renew::answer(&peer, &csr_der, &context).await));
            }
            ToCoordinator::Hello(_) => return End::Nonsense("a second hello"),
        }
    }
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

/// Evidence and artifact streams. quinn lets the peer open a fixed few, so the tasks are as few.
async fn accept_streams<P: Ports>(
    connection: Connection,
    peer: Arc<Peer>,
    context: Arc<Context<P>>,
    heard: Heard,
) -> End {
    let mut streams = JoinSet::new();
    loop {
        // Cancel-safe: neither accept_bi nor join_next loses anything.
        let (send, recv) = tokio::select! {
            stream = connection.accept_bi() => match stream {
                Ok(stream) => stream,
                Err(e) => return e.into(),
            },
            Some(ended) = streams.join_next() => match ended {
                Ok(Err(end)) => return end,
                // A stream that ended in order, or panicked, which is reported already.
                Ok(Ok(())) | Err(_) => continue,
            },
        };
        let (peer, context, heard) = (peer.clone(), context.clone(), heard.clone());
        streams.spawn(async move { stream(send, recv, &peer, &context, &heard).await });
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
        Lane::Artifact => judge("sending an artifact", artifact::send(&mut send, &mut recv, &*context.ports).await),
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
        match context.ports.commit_evidence(peer, batch).await {
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
async fn watch_silence<P: Ports>(heard: Heard, context: Arc<Context<P>>) -> End {
    loop {
        let silent = context.clock.boottime().ms_since(MonoMicros(heard.load(Relaxed)));
        let left = context.leases.life_ms.saturating_sub(silent);
        if left == 0 {
            return End::Silent(silent / 1_000);
        }
        tokio::time::sleep(Duration::from_millis(left)).await;
    }
}

fn close(connection: &Connection, code: Close, words: &str) {
    // A close must fit one packet.
    let cut = words.len().min(200);
    let cut = (0..=cut).rev().find(|&i| words.is_char_boundary(i)).unwrap_or(0);
    connection.close(code.code().into(), &words.as_bytes()[..cut]);
}

fn close_for(connection: &Connection, end: &End) {
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

fn certificate_help(e: &quinn::ConnectionError) -> &'static str {
    let text = e.to_string();
    if text.contains("Expired") {
        "enrol the host again with a new token from drumsctl host add"
    } else if text.contains("UnknownIssuer") || text.contains("unknown issuer") {
        "the host is enrolled with another coordinator; enrol it here with a token from drumsctl host add"
    } else {
        "enrol the host with a token from drumsctl host add, if it is yours"
    }
}

/// What a failure of this side's own is on the wire.
pub(super) fn internal(message: String) -> Failure {
    Failure::new(FailureClass::Transient, "coordinator", message, "it will be tried again")
}
