//! From the TLS handshake to the welcome: who a peer is, and whether it may speak.

use std::{sync::Arc, time::Duration};

use drums_common::{
    failure::Failure,
    telemetry::chain,
    wire::{
        close::Close,
        frame::Lane,
        latest::{AgentHello, ToAgent, ToCoordinator},
    },
};
use quinn::{Connection, Incoming, RecvStream, SendStream};
use tokio::time::timeout;

use super::{
    connection::{Context, End, FAREWELL, close, close_for},
    io,
    orders::message_of,
    ports::{Accepted, Peer, Ports},
    registry::{Claim, may_be_rebooted},
};
use crate::pki::{Subject, subject_of};

/// From the first packet to the hello. Generous on a slow path, short enough that half-made connections do not gather.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);

/// An agent that was welcomed.
pub(super) struct Welcomed {
    pub connection: Connection,
    pub peer: Arc<Peer>,
    pub greeted: Greeted,
}

/// Handshake, certificate and hello. None: the peer was told why, if that was possible.
///
/// A fleet that comes back stands here all at once, most of it waiting for its turn: each phase has its memory when it
/// begins. What a thousand of them take at the same time is not given back to the system.
pub(super) async fn welcome<P: Ports>(incoming: Incoming, context: &Context<P>) -> Option<Welcomed> {
    let remote = incoming.remote_address();
    let connection = match timeout(HANDSHAKE, async { incoming.accept()?.await }).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(e)) => {
            tracing::warn!(%remote, error = %chain(&e), "handshake refused");
            let message = format!("a peer at {remote} was refused in the handshake: {}", chain(&e));
            context.ports.report(remote.ip(), None, &Failure::refused("handshake", message, certificate_help(&e)));
            return None;
        }
        Err(_) => {
            tracing::debug!(%remote, "handshake not finished in time");
            return None;
        }
    };
    let peer = match peer_of(&connection) {
        Ok(peer) => Arc::new(peer),
        Err(failure) => {
            tracing::warn!(%remote, error = %failure, "peer is no agent");
            context.ports.report(remote.ip(), None, &failure);
            close(&connection, Close::Refused, &failure.message);
            return None;
        }
    };
    match timeout(HANDSHAKE, Box::pin(greet(&connection, &peer, context))).await {
        Ok(Ok(Some(greeted))) => Some(Welcomed { connection, peer, greeted }),
        Ok(Ok(None)) => None,
        Ok(Err(end)) => {
            tracing::warn!(%remote, host = %peer.host, error = %chain(&end), "hello failed");
            close_for(&connection, &end);
            None
        }
        Err(_) => {
            tracing::warn!(%remote, host = %peer.host, "no hello in time");
            close(&connection, Close::TooSlow, "no hello in time");
            None
        }
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

pub(super) type Streams = (SendStream, RecvStream);

pub(super) struct Greeted {
    pub streams: Streams,
    pub accepted: Accepted,
    /// The present order was sent with the welcome.
    pub ordered: bool,
}

/// The hello. `None` if the agent was refused and told so.
async fn greet<P: Ports>(connection: &Connection, peer: &Peer, context: &Context<P>) -> Result<Option<Greeted>, End> {
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
    match Box::pin(admit(connection, peer, *agent, context)).await {
        Ok(mut accepted) => {
            // With its first order, which is there already: a packet less for each of a fleet that comes back.
            let mut bytes = io::wrapped(Lane::Control, &ToAgent::Welcome(accepted.welcome.clone())).map_err(hello)?;
            let (order, end) = message_of(&accepted.orders.borrow_and_update());
            let ordered = end.is_none();
            if ordered {
                bytes.extend(io::wrapped(Lane::Control, &order).map_err(hello)?);
            }
            io::write_bytes(&mut send, &bytes).await.map_err(hello)?;
            Ok(Some(Greeted { streams: (send, recv), accepted, ordered }))
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
        let failure = shows_identity_of(peer, code, what);
        context.ports.report(connection.remote_address().ip(), Some(host), &failure);
        failure
    };
    if hello.installation != peer.installation {
        return Err(second("wrong-installation", "an agent with another state folder"));
    }
    // Before it could take a connection over; a machine that comes alone is judged by `on_connect`.
    if context.registry.is_held(host)
        && let Some(before) = context.ports.machine_of(host).await?
        && !may_be_rebooted(&before, &hello.facts.identity)
    {
        return Err(second(SECOND_MACHINE, "a second machine"));
    }
    if context.registry.claim(host, connection, hello.instance).await == Claim::Disputed {
        return Err(second("second-agent", "a second agent"));
    }
    let accepted = Box::pin(context.ports.on_connect(peer, hello)).await;
    if accepted.is_err() {
        context.registry.release(host, connection);
    }
    accepted
}

/// A machine that is not the host's.
pub const SECOND_MACHINE: &str = "second-machine";

/// For whoever shows an identity that is another's.
pub fn shows_identity_of(peer: &Peer, code: &'static str, what: &str) -> Failure {
    Failure::refused(
        code,
        format!("{what} shows the identity of host {} ({})", peer.host, peer.from),
        "stop one of the two, or enrol this machine under a name of its own with drumsctl host add",
    )
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
