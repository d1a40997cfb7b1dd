//! One connection to the coordinator, from the dial to its end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use drums_common::{
    digest::Sha256,
    failure::{Failure, FailureClass},
    ids::InstallationId,
    lease::Stale,
    telemetry::chain,
    wire::{
        close::Close,
        codec,
        frame::Lane,
        latest::{AgentHello, BeatAck, ToAgent, ToCoordinator, Welcome},
    },
};
use quinn::{Connection, Endpoint, RecvStream, Runtime, SendStream};
use tokio::{runtime::Handle, sync::watch, task::JoinSet, time::timeout};

use super::{
    evidence,
    identity::Identity,
    io::{self, StreamError},
    life,
    link::{NextBeat, Shared, Stop},
    renew::{self, Credentials},
    timer,
    tls::{self, DialError, Sockets},
    upload::Offers,
};
use crate::spool::Spool;

/// From the connection to the welcome.
const HELLO: Duration = Duration::from_secs(15);
const FAREWELL: Duration = Duration::from_secs(2);

/// What every connection needs.
pub(super) struct Context {
    pub credentials: Arc<Credentials>,
    pub sockets: Arc<dyn Sockets>,
    pub shared: Arc<Shared>,
    pub spool: Arc<Spool>,
    pub offers: Arc<Offers>,
    pub build: Sha256,
    pub instance: u64,
    /// True once the agent has done what it had to and leaves.
    pub leave: watch::Receiver<bool>,
    /// The connection of the moment, for fetching workloads.
    pub current: watch::Sender<Option<Connection>>,
    /// Which of the identity's addresses welcomed this agent last.
    pub preferred: AtomicUsize,
    /// For what may have to wait for a disk.
    pub disk: Handle,
}

/// Why a connection ended, or was never made.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("no coordinator could be reached: {}", .0.join("; "))]
    Unreachable(Vec<String>),
    #[error("the connection ended: {0}")]
    Broken(String),
    #[error("{what} failed")]
    Stream { what: &'static str, source: StreamError },
    #[error("the coordinator did not answer the hello in time")]
    NoWelcome,
    #[error("the coordinator sent {0}")]
    Nonsense(&'static str),
    #[error("the coordinator welcomed this agent under an old generation")]
    Stale(#[from] Stale),
    #[error("the coordinator has nothing to say to this agent now: {0}")]
    NotNow(Failure),
    #[error("the coordinator said goodbye")]
    Goodbye,
    #[error("no beat was answered for {0} ms")]
    Unanswered(u64),
    #[error("this agent leaves")]
    Left,
    /// Nothing more will come of it: `Stop` has been set.
    #[error("the coordinator let this agent go")]
    Final,
}

impl From<quinn::ConnectionError> for End {
    fn from(e: quinn::ConnectionError) -> Self {
        Self::Broken(tls::words(&e))
    }
}

/// Dials, says hello and stays until the connection ends: why it did, and how long after the welcome.
pub(super) async fn run(context: &Arc<Context>) -> (End, u64) {
    // A connection would be noise in a timed window.
    context.shared.not_quiet().await;
    let Connected { endpoint, connection, streams: (send, recv), welcome } = match connect(context).await {
        Ok(connected) => connected,
        Err(end) => return (end, 0),
    };
    let welcomed = context.shared.clock.boottime();
    let end = stay(&connection, send, recv, &welcome, context).await;
    let held_ms = context.shared.clock.boottime().ms_since(welcomed);
    (close(&endpoint, &connection, end).await, held_ms)
}

struct Connected {
    endpoint: Endpoint,
    connection: Connection,
    streams: (SendStream, RecvStream),
    welcome: Welcome,
}

/// The first coordinator that welcomes this agent, beginning with the one that did so last: of several, one is active,
/// and the others say so.
async fn connect(context: &Context) -> Result<Connected, End> {
    let addresses = &context.credentials.identity().addresses;
    let first = context.preferred.load(Ordering::Relaxed);
    let config = context.credentials.config();
    let mut tried = Vec::new();
    for i in (0..addresses.len()).map(|n| (first + n) % addresses.len()) {
        let address = &addresses[i];
        let (endpoint, connection) = match tls::dial(&*context.sockets, &address.host, address.agents, &config).await {
            Ok(connected) => connected,
            Err(e @ DialError::NoAnswer { .. }) => {
                tried.push(e.to_string());
                continue;
            }
            Err(e) => {
                tried.push(chain(&e));
                continue;
            }
        };
        let end = match timeout(HELLO, greet(&connection, context)).await {
            Ok(Ok((send, recv, welcome))) => {
                context.preferred.store(i, Ordering::Relaxed);
                return Ok(Connected { endpoint, connection, streams: (send, recv), welcome });
            }
            Ok(Err(end)) => end,
            Err(_) => End::NoWelcome,
        };
        let end = close(&endpoint, &connection, end).await;
        if addresses.len() == 1 || matches!(end, End::Final) {
            return Err(end);
        }
        tried.push(format!("{}: {}", address.host, chain(&end)));
    }
    Err(End::Unreachable(tried))
}

/// Ends a connection; what ended it, if that is known better than by `end`.
async fn close(endpoint: &Endpoint, connection: &Connection, end: End) -> End {
    // A stream's error says less than what ended the connection under it.
    let end = match (end, connection.close_reason()) {
        (End::Stream { .. }, Some(reason)) => reason.into(),
        (end, _) => end,
    };
    let code = if matches!(end, End::Nonsense(_)) { Close::BadPeer } else { Close::Goodbye };
    connection.close(code.code().into(), b"");
    let _ = timeout(Duration::from_millis(500), endpoint.wait_idle()).await;
    end
}

async fn greet(connection: &Connection, context: &Context) -> Result<(SendStream, RecvStream, Welcome), End> {
    let hello = |source| End::Stream { what: "the hello", source };
    // A refused certificate shows only now: to a TLS 1.3 client the handshake was over before the server saw it.
    let (mut send, mut recv) = connection.open_bi().await?;
    io::shake_hands(&mut send, &mut recv, context.build).await.map_err(hello)?;
    let sent = context.shared.clock.boottime();
    let message = ToCoordinator::Hello(Box::new(AgentHello {
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        agent_sha256: context.build,
        installation: context.credentials.identity().installation,
        instance: context.instance,
        facts: context.shared.facts(),
        spools: context.spool.states(),
    }));
    io::write(&mut send, Lane::Control, &message).await.map_err(hello)?;
    match io::read::<ToAgent>(&mut recv, Lane::Control).await.map_err(hello)? {
        Some(ToAgent::Welcome(welcome)) if welcome.host != context.credentials.identity().host => {
            Err(End::Nonsense("a welcome for another host"))
        }
        Some(ToAgent::Welcome(welcome)) => {
            context.shared.welcomed(&welcome, sent)?;
            life::note(context.spool.dir(), welcome.life_lease_ms);
            Ok((send, recv, welcome))
        }
        Some(ToAgent::Refused(failure)) => {
            connection.close(Close::Goodbye.code().into(), b"");
            match failure.class {
                FailureClass::Transient | FailureClass::Bug => Err(End::NotNow(failure)),
                FailureClass::Refused | FailureClass::Permanent => {
                    context.shared.stop(Stop::Refused(failure));
                    Err(End::Final)
                }
            }
        }
        Some(_) => Err(End::Nonsense("something else before its welcome")),
        None => Err(hello(StreamError::CutShort)),
    }
}

async fn stay(
    connection: &Connection,
    send: SendStream,
    recv: RecvStream,
    welcome: &Welcome,
    context: &Arc<Context>,
) -> End {
    tracing::info!(host = %welcome.host, generation = %welcome.generation, remote = %connection.remote_address(), "connected");
    context.current.send_replace(Some(connection.clone()));
    let beat = Duration::from_millis(welcome.beat_ms.max(1));
    // As long as the dispatch lease: by then nothing is lost by dialling again.
    let patience_ms = welcome.dispatch_lease_ms.max(2 * welcome.beat_ms);
    let (mut tasks, mut on_disk) = (JoinSet::new(), JoinSet::new());
    tasks.spawn(say(send, connection.clone(), context.clone()));
    tasks.spawn(send_beats(connection.clone(), context.shared.clone(), context.sockets.runtime(), beat, patience_ms));
    tasks.spawn(read_acks(connection.clone(), context.shared.clone()));
    let (connected, spool, shared) = (connection.clone(), context.spool.clone(), context.shared.clone());
    on_disk.spawn_on(async move { evidence::run(&connected, &spool, &shared).await.into() }, &context.disk);
    on_disk.spawn_on(listen(recv, context.clone()), &context.disk);
    let asking = renew::ask_in_time(context.credentials.clone(), context.shared.clone());
    on_disk.spawn_on(async move { match asking.await {} }, &context.disk);
    // Both branches are cancel-safe.
    let ended = tokio::select! {
        biased;
        ended = tasks.join_next() => ended,
        ended = on_disk.join_next() => ended,
    };
    let end = match ended {
        Some(Ok(end)) => end,
        Some(Err(e)) => {
            tracing::error!(error = %e, "connection task died");
            End::Broken("a task of this agent's died".to_owned())
        }
        None => unreachable!("tasks were spawned just now"),
    };
    context.current.send_replace(None);
    context.shared.disconnected();
    // Whoever waits for a disk ends when that answers: the next connection does not wait for it.
    on_disk.abort_all();
    tasks.shutdown().await;
    // After our goodbye the coordinator closes, and any task may be the first to see it.
    if *context.leave.borrow() { End::Left } else { end }
}

/// Sends what the measuring side has to say, and the goodbye.
async fn say(mut send: SendStream, connection: Connection, context: Arc<Context>) -> End {
    let failed = |source| End::Stream { what: "speaking to the coordinator", source };
    let mut leave = context.leave.clone();
    loop {
        while let Some(message) = context.shared.next_to_say() {
            context.shared.not_quiet().await;
            if let Err(e) = io::write(&mut send, Lane::Control, &message).await {
                return failed(e);
            }
        }
        // Both branches are cancel-safe: they only wait for something to change.
        let leaving = tokio::select! {
            () = context.shared.outbox_filled.notified() => false,
            _ = leave.wait_for(|leave| *leave) => true,
        };
        if leaving {
            let reason = match context.shared.stopping() {
                Some(Stop::Signal(name)) => format!("stopped by {name}"),
                Some(Stop::Broken(why)) => format!("broken: {why}"),
                Some(Stop::Retired { reason }) => format!("retired: {reason}"),
                Some(Stop::Upgrade(upgrade)) => format!("makes room for build {}", upgrade.sha256.short()),
                Some(Stop::Refused(_)) | None => "ended".to_owned(),
            };
            if let Err(e) = io::write(&mut send, Lane::Control, &ToCoordinator::Goodbye { reason }).await {
                return failed(e);
            }
            // Whoever receives the goodbye closes.
            let _ = timeout(FAREWELL, connection.closed()).await;
            return End::Left;
        }
    }
}

async fn listen(mut recv: RecvStream, context: Arc<Context>) -> End {
    loop {
        let message = match io::read::<ToAgent>(&mut recv, Lane::Control).await {
            Ok(Some(message)) => message,
            Ok(None) => return End::Nonsense("the end of its control stream"),
            Err(source) => return End::Stream { what: "listening to the coordinator", source },
        };
        match message {
            ToAgent::Desired(desired) => {
                for run in &desired.runs {
                    if let Some(spool) = context.spool.run(run.run)
                        && let Err(e) = spool.set_acked(run.acked_seq)
                    {
                        // The coordinator has evidence that this agent has no trace of: its state folder was put back.
                        tracing::error!(run = %run.run, error = %chain(&e), "acknowledgement not recorded");
                    }
                }
                context.shared.desired(desired);
            }
            ToAgent::Retire { reason } => {
                tracing::warn!(%reason, "the coordinator retires this host");
                context.shared.stop(Stop::Retired { reason });
                return End::Final;
            }
            ToAgent::Goodbye => return End::Goodbye,
            ToAgent::Upgrade(upgrade) => context.shared.upgrade(upgrade),
            ToAgent::Renewal(reply) => match context.credentials.take(reply) {
                Ok(()) => {
                    tracing::info!("this agent has its next certificate, and shows it from the next connection on")
                }
                Err(e) => tracing::error!(error = chain(&e), "this agent's certificate was not renewed"),
            },
            ToAgent::Uploads(uploads) => context.offers.take(uploads, context.shared.clock.now()),
            ToAgent::Welcome(_) | ToAgent::Refused(_) => return End::Nonsense("a second answer to the hello"),
        }
    }
}

/// Beats, and the end of a connection on which none is answered: the idle time-out is off, so a path that died silently
/// shows here. In a quiet interval nothing of this runs, not even a timer.
async fn send_beats(
    connection: Connection,
    shared: Arc<Shared>,
    runtime: Arc<dyn Runtime>,
    every: Duration,
    patience_ms: u64,
) -> End {
    let mut timer = None;
    loop {
        let hush = match shared.next_beat() {
            NextBeat::Send(beat) => {
                match codec::encode(Lane::Datagram, &beat) {
                    Ok(bytes) => match connection.send_datagram(bytes.into()) {
                        Ok(()) => {}
                        Err(quinn::SendDatagramError::ConnectionLost(e)) => return e.into(),
                        Err(e) => {
                            tracing::error!(error = %chain(&e), "beats cannot be sent on this connection");
                            return End::Nonsense("a connection without datagrams");
                        }
                    },
                    Err(e) => tracing::error!(error = %chain(&e), "beat not sent"),
                }
                beat.quiet_ms > 0
            }
            NextBeat::Hush => true,
        };
        if hush {
            timer = None;
            shared.beat_now.notified().await;
            continue;
        }
        let ms = shared.unanswered_ms();
        if ms > patience_ms {
            return End::Unanswered(ms);
        }
        let next = runtime.now() + every;
        let timer = timer.get_or_insert_with(|| runtime.new_timer(next));
        timer.as_mut().reset(next);
        // Cancel-safe: a kick is kept until somebody waits for it.
        tokio::select! {
            () = timer::elapsed(timer) => {}
            () = shared.beat_now.notified() => {}
        }
    }
}

async fn read_acks(connection: Connection, shared: Arc<Shared>) -> End {
    loop {
        let datagram = match connection.read_datagram().await {
            Ok(datagram) => datagram,
            Err(e) => return e.into(),
        };
        // One byte is the coordinator's probe: QUIC has answered it already.
        if datagram.len() <= 1 {
            continue;
        }
        match codec::decode::<BeatAck>(Lane::Datagram, &datagram) {
            Ok(ack) => shared.acked(&ack),
            Err(source) => return End::Stream { what: "reading an acknowledgement", source: source.into() },
        }
    }
}

/// For the log at start.
pub(super) fn describe(identity: &Identity) -> (String, InstallationId) {
    let addresses: Vec<_> = identity.addresses.iter().map(ToString::to_string).collect();
    (addresses.join(", "), identity.installation)
}
