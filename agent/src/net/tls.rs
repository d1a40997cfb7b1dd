//! Client sides of TLS and QUIC: how an agent makes sure that it speaks to its coordinator.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drums_common::{
    digest::Sha256,
    telemetry::chain,
    wire::{ALPN_AGENTS, ALPN_ENROL, SERVER_NAME, close::Close},
};
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, Runtime, TransportConfig, VarInt};
use quinn_proto::crypto::rustls::QuicClientConfig;
use rustls::{
    CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::time::timeout;

use super::{identity::Identity, timer::ExactRuntime};

/// For one address. A coordinator on a usable path answers in a fraction of it.
const DIAL: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("cannot look up {host}")]
    Lookup { host: String, source: io::Error },
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("cannot open a UDP socket")]
    Socket(#[source] io::Error),
    #[error("cannot dial {address}")]
    Dial { address: SocketAddr, source: quinn::ConnectError },
    #[error("no answer from UDP {address} within {} s; check the address, the port and firewalls", DIAL.as_secs())]
    NoAnswer { address: SocketAddr },
    #[error("the connection to {address} failed: {words}")]
    Failed { address: SocketAddr, words: String },
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// For an enrolled agent: the coordinator under the CA that the agent was enrolled with, and the agent's own certificate.
pub(super) fn enrolled(identity: &Identity) -> Result<ClientConfig, DialError> {
    let tls = |e: rustls::Error| DialError::Tls(e.to_string());
    let mut roots = RootCertStore::empty();
    roots.add(identity.ca.clone()).map_err(tls)?;
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls)?
        .with_root_certificates(roots)
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(tls)?;
    config.alpn_protocols = vec![ALPN_AGENTS.to_vec()];
    // The idle time-out is off: an agent may be silent for a declared while. Dead connections are noticed by beats.
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(None)
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(Some(16 << 10))
        .datagram_send_buffer_size(16 << 10)
        .congestion_controller_factory(Arc::new(quinn::congestion::CubicConfig::default()));
    quic(config, transport)
}

/// For a host that has only a token: whatever it dials must show the CA whose digest the token carries. The flag is set
/// when a server did not.
pub(super) fn pinned(ca: Sha256) -> Result<(ClientConfig, Arc<AtomicBool>), DialError> {
    let tls = |e: rustls::Error| DialError::Tls(e.to_string());
    let foreign = Arc::new(AtomicBool::new(false));
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedCa { ca, foreign: foreign.clone(), provider: provider() }))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_ENROL.to_vec()];
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    Ok((quic(config, transport)?, foreign))
}

fn quic(mut config: rustls::ClientConfig, transport: TransportConfig) -> Result<ClientConfig, DialError> {
    config.resumption = Resumption::disabled();
    let crypto = QuicClientConfig::try_from(config).map_err(|e| DialError::Tls(e.to_string()))?;
    let mut client = ClientConfig::new(Arc::new(crypto));
    client.transport_config(Arc::new(transport));
    Ok(client)
}

/// Where a connection's packets go, and what its timers are.
pub trait Sockets: Send + Sync {
    /// An endpoint that can dial `address`.
    fn open(&self, address: SocketAddr) -> io::Result<Endpoint>;
    /// Of its connections' timers and of the beats'.
    fn runtime(&self) -> Arc<dyn Runtime>;
}

/// UDP of this machine.
pub struct Udp;

impl Sockets for Udp {
    fn open(&self, address: SocketAddr) -> io::Result<Endpoint> {
        let any: SocketAddr = if address.is_ipv6() { ([0u16; 8], 0).into() } else { ([0u8; 4], 0).into() };
        Endpoint::new(EndpointConfig::default(), None, UdpSocket::bind(any)?, self.runtime())
    }

    fn runtime(&self) -> Arc<dyn Runtime> {
        Arc::new(ExactRuntime)
    }
}

/// Dials a host's addresses in turn. The endpoint lives as long as the connection.
pub(super) async fn dial(
    sockets: &dyn Sockets,
    host: &str,
    port: u16,
    config: &ClientConfig,
) -> Result<(Endpoint, Connection), DialError> {
    let lookup = |source| DialError::Lookup { host: host.to_owned(), source };
    let addresses = tokio::net::lookup_host((host, port)).await.map_err(lookup)?;
    let mut last = DialError::NoAddress { host: host.to_owned() };
    for address in addresses {
        match dial_one(sockets, address, config).await {
            Ok(connected) => return Ok(connected),
            Err(e) => last = e,
        }
    }
    Err(last)
}

async fn dial_one(
    sockets: &dyn Sockets,
    address: SocketAddr,
    config: &ClientConfig,
) -> Result<(Endpoint, Connection), DialError> {
    let endpoint = sockets.open(address).map_err(DialError::Socket)?;
    let connecting = endpoint
        .connect_with(config.clone(), address, SERVER_NAME)
        .map_err(|source| DialError::Dial { address, source })?;
    match timeout(DIAL, connecting).await {
        Ok(Ok(connection)) => Ok((endpoint, connection)),
        Ok(Err(e)) => Err(DialError::Failed { address, words: words(&e) }),
        Err(_) => Err(DialError::NoAnswer { address }),
    }
}

/// Why a connection ended, as this side's operator wants to read it.
pub(super) fn words(e: &ConnectionError) -> String {
    match e {
        ConnectionError::ApplicationClosed(close) => {
            let said = String::from_utf8_lossy(&close.reason);
            let known = Close::of_code(close.error_code.into_inner()).map_or("the coordinator closed it", Close::words);
            if said.is_empty() { known.to_owned() } else { format!("{known}: {said}") }
        }
        ConnectionError::Reset => "the coordinator was restarted".to_owned(),
        other => chain(other),
    }
}

/// Accepts a server whose chain brings the pinned CA along and verifies under it.
#[derive(Debug)]
struct PinnedCa {
    ca: Sha256,
    foreign: Arc<AtomicBool>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedCa {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(ca) = intermediates.iter().find(|c| Sha256::of(c) == self.ca) else {
            self.foreign.store(true, Ordering::Release);
            return Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer));
        };
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // QUIC is TLS 1.3 only.
        Err(rustls::Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
