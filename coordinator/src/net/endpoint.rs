//! QUIC endpoints of the coordinator: sockets, TLS and transport settings, and the reasons for each.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use drums_common::wire::{ALPN_AGENTS, ALPN_ENROL};
use quinn::{Endpoint, EndpointConfig, IdleTimeout, ServerConfig, TokioRuntime, TransportConfig, VarInt};
use quinn_proto::{HashedConnectionIdGenerator, crypto::rustls::QuicServerConfig};
use rustls::{
    RootCertStore,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::pki::{Pki, PkiError};

/// One socket serves every agent, and a burst of evidence from all of them must not overflow it.
const SOCKET_BUFFER: usize = 8 << 20;
/// Streams that an agent may have open: control, evidence, and a few artifacts. Memory follows the permitted number, not
/// the used one.
const AGENT_STREAMS: u32 = 8;
/// Between two resets. Each answers a packet that was larger, so nobody is flooded with them; four thousand a second are a
/// tenth of a core.
const RESET_INTERVAL: Duration = Duration::from_micros(250);
/// An enrolment is one stream and over in seconds.
const ENROL_IDLE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error("cannot listen on UDP {address}; is another coordinator running, or is the port taken?")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("cannot use the home's certificates")]
    Pki(#[from] PkiError),
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    #[error("cannot set up TLS")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    #[error("TLS without a QUIC cipher suite")]
    NoQuicSuite(#[from] quinn_proto::crypto::rustls::NoInitialCipherSuite),
}

/// The endpoint that enrolled agents dial.
pub fn agents(address: SocketAddr, pki: &Pki) -> Result<Endpoint, EndpointError> {
    let (config, server) = for_agents(pki)?;
    bind(address, config, server)
}

/// What it is made of, but for the socket: mutual TLS, and no idle time-out, because declared silence is allowed.
pub fn for_agents(pki: &Pki) -> Result<(EndpointConfig, ServerConfig), EndpointError> {
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca_der().clone())?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(pki.shown());
    tls.alpn_protocols = vec![ALPN_AGENTS.to_vec()];
    // No resumption: a resumed session would skip the check that the agent's certificate has not expired.
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;

    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(None)
        .max_concurrent_bidi_streams(VarInt::from_u32(AGENT_STREAMS))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        // Two evidence frames; more would only queue in memory here instead of in the agent's spool.
        .stream_receive_window(VarInt::from_u32(2 << 20))
        .receive_window(VarInt::from_u32(4 << 20))
        .datagram_receive_buffer_size(Some(64 << 10))
        .datagram_send_buffer_size(64 << 10)
        .congestion_controller_factory(Arc::new(quinn::congestion::CubicConfig::default()));
    configured(tls, transport, pki)
}

/// The endpoint for hosts that have only a token yet: no client certificate, one stream, short patience.
pub fn enrolment(address: SocketAddr, pki: &Pki) -> Result<Endpoint, EndpointError> {
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(pki.shown());
    tls.alpn_protocols = vec![ALPN_ENROL.to_vec()];
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;

    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(IdleTimeout::try_from(ENROL_IDLE).expect("ten seconds fit")))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(64 << 10))
        .receive_window(VarInt::from_u32(64 << 10))
        .datagram_receive_buffer_size(None);
    let (config, server) = configured(tls, transport, pki)?;
    bind(address, config, server)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn configured(
    tls: rustls::ServerConfig,
    transport: TransportConfig,
    pki: &Pki,
) -> Result<(EndpointConfig, ServerConfig), EndpointError> {
    let mut server = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    server.transport_config(Arc::new(transport));
    // Both keys outlive a restart. An old connection's packet is then answered with a reset that the agent can verify, so
    // it reconnects at once instead of waiting for its leases.
    let keys = pki.quic_keys()?;
    let mut config = EndpointConfig::new(Arc::new(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &keys.reset)));
    // By default 50 resets a second: a thousand agents would learn of a restart over half a minute.
    config.min_reset_interval(RESET_INTERVAL);
    config.cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(keys.connection_ids)));
    Ok((config, server))
}

fn bind(address: SocketAddr, config: EndpointConfig, server: ServerConfig) -> Result<Endpoint, EndpointError> {
    let socket = socket(address).map_err(|source| EndpointError::Bind { address, source })?;
    Endpoint::new(config, Some(server), socket, Arc::new(TokioRuntime))
        .map_err(|source| EndpointError::Bind { address, source })
}

fn socket(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        // `::` serves IPv4 too.
        socket.set_only_v6(false)?;
    }
    enlarge(&socket);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// As large as the kernel lets us: root may go beyond net.core.rmem_max, others get what that allows.
fn enlarge(socket: &Socket) {
    use nix::sys::socket::{setsockopt, sockopt};
    if setsockopt(socket, sockopt::RcvBufForce, &SOCKET_BUFFER).is_err()
        && let Err(e) = socket.set_recv_buffer_size(SOCKET_BUFFER)
    {
        tracing::warn!(error = %e, "cannot enlarge the receive buffer");
    }
    if setsockopt(socket, sockopt::SndBufForce, &SOCKET_BUFFER).is_err()
        && let Err(e) = socket.set_send_buffer_size(SOCKET_BUFFER)
    {
        tracing::warn!(error = %e, "cannot enlarge the send buffer");
    }
    match socket.recv_buffer_size() {
        // The kernel reports twice what was asked for.
        Ok(got) if got < SOCKET_BUFFER => {
            tracing::warn!(
                got_bytes = got,
                wanted_bytes = SOCKET_BUFFER,
                "small receive buffer; raise net.core.rmem_max"
            );
        }
        _ => {}
    }
}
