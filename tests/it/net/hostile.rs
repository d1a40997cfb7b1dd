//! Peers that send garbage, too much, too little or nothing: they lose their own connection, and nothing else happens.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use drums_agent::net::{Identity, enrol};
use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::Record,
    ids::Generation,
    wire::{
        ALPN_AGENTS, ALPN_ENROL, SERVER_NAME,
        close::Close,
        codec,
        frame::{self, Lane},
        hello::{Hello, HelloReply, OURS, REPLY_LEN, Versions},
        latest::{AgentHello, EvidenceBatch, ToAgent, ToCoordinator},
    },
};
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, RecvStream, SendStream};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::time::timeout;

use super::fake::*;

const BUILD: Sha256 = Sha256([7; 32]);

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A raw client with the given certificate, or none.
pub(super) fn client(
    ca: &CertificateDer<'static>,
    auth: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
    alpn: &[u8],
) -> Endpoint {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca.clone()).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut tls = match auth {
        Some((cert, key)) => builder.with_client_auth_cert(vec![cert], key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    tls.alpn_protocols = vec![alpn.to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let mut endpoint = Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    endpoint.set_default_client_config(ClientConfig::new(Arc::new(crypto)));
    endpoint
}

/// The identity of an enrolled host, in the hands of somebody who speaks badly.
struct Rogue {
    identity: Identity,
    endpoint: Endpoint,
    agents: SocketAddr,
}

impl Rogue {
    async fn enrol(coordinator: &Coordinator, name: &str, state: &Path) -> Self {
        let identity = enrol(state, &coordinator.token(name), BUILD, None).await.unwrap();
        let auth = (identity.chain[0].clone(), identity.key.clone_key());
        let endpoint = client(coordinator.pki.ca_der(), Some(auth), ALPN_AGENTS);
        Self { identity, endpoint, agents: coordinator.agents }
    }

    async fn connect(&self) -> Connection {
        self.endpoint.connect(self.agents, SERVER_NAME).unwrap().await.unwrap()
    }

    /// As far as the version handshake.
    async fn shake(&self) -> (Connection, SendStream, RecvStream) {
        let connection = self.connect().await;
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        send.write_all(&Hello { versions: OURS, build: BUILD }.encode()).await.unwrap();
        let mut reply = [0; REPLY_LEN];
        recv.read_exact(&mut reply).await.unwrap();
        assert_eq!(HelloReply::parse(&reply).unwrap().accept(OURS), Ok(OURS.max));
        (connection, send, recv)
    }

    /// As far as the welcome.
    async fn welcome(&self) -> (Connection, SendStream, RecvStream) {
        let (connection, mut send, mut recv) = self.shake().await;
        let hello = ToCoordinator::Hello(Box::new(AgentHello {
            agent_version: "0".into(),
            agent_sha256: BUILD,
            installation: self.identity.installation,
            instance: 5,
            facts: facts("m9"),
            spools: Vec::new(),
        }));
        let payload = codec::encode(Lane::Control, &hello).unwrap();
        send.write_all(&frame::wrap(Lane::Control, &payload).unwrap()).await.unwrap();
        let mut prefix = [0; frame::PREFIX];
        recv.read_exact(&mut prefix).await.unwrap();
        let mut payload = vec![0; frame::payload_len(Lane::Control, prefix).unwrap()];
        recv.read_exact(&mut payload).await.unwrap();
        assert!(matches!(codec::decode(Lane::Control, &payload).unwrap(), ToAgent::Welcome(_)));
        (connection, send, recv)
    }
}

/// How the coordinator ended a connection.
async fn ended(connection: &Connection) -> (Option<Close>, String) {
    match timeout(PATIENCE, connection.closed()).await.expect("the connection was not ended") {
        ConnectionError::ApplicationClosed(close) => {
            (Close::of_code(close.error_code.into_inner()), String::from_utf8_lossy(&close.reason).into_owned())
        }
        other => (None, other.to_string()),
    }
}

async fn expect_bad_peer(what: &str, connection: &Connection, want: &str) {
    let (code, words) = ended(connection).await;
    assert_eq!(code, Some(Close::BadPeer), "{what}: {words}");
    assert!(words.contains(want), "{what}: {words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_bad_agent_sends_ends_its_own_connection_only() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let good = Agent::start(&coordinator, "good", &dir.path().join("good")).await;
    good.until("connected", |v| v.connected).await;
    let rogue = Rogue::enrol(&coordinator, "rogue", &dir.path().join("rogue")).await;

    // Before the hello.
    let connection = rogue.connect().await;
    let (mut send, _recv) = connection.open_bi().await.unwrap();
    send.write_all(&[b'x'; 64]).await.unwrap();
    expect_bad_peer("garbage for a hello", &connection, "not a DrumsBench hello").await;

    let connection = rogue.connect().await;
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let future = Hello { versions: Versions { min: 7, max: 9 }, build: BUILD };
    send.write_all(&future.encode()).await.unwrap();
    let mut reply = [0; REPLY_LEN];
    recv.read_exact(&mut reply).await.unwrap();
    let e = HelloReply::parse(&reply).unwrap().accept(future.versions).unwrap_err();
    let said = format!("this side speaks 7 to 9, the peer {} to {}", OURS.min, OURS.max);
    assert!(e.to_string().contains(&said), "{e}");
    expect_bad_peer("no version in common", &connection, "no wire version in common").await;

    // Instead of the hello message.
    let too_long = u32::try_from(Lane::Control.cap() + 1).unwrap().to_be_bytes();
    for (what, bytes, want) in [
        ("a frame over the cap", too_long.to_vec(), "4194305 bytes"),
        ("4 GiB", u32::MAX.to_be_bytes().to_vec(), "4294967295 bytes"),
        ("an empty frame", vec![0; 4], "empty frame"),
        ("garbage in a frame", [&8u32.to_be_bytes()[..], &[0xff; 8]].concat(), "bad message"),
        ("a message with a tail", frame::wrap(Lane::Control, &[3, 0, 0, 0]).unwrap(), "bad message"),
        ("another message", frame::wrap(Lane::Control, &goodbye()).unwrap(), "something else before its hello"),
    ] {
        let (connection, mut send, _recv) = rogue.shake().await;
        send.write_all(&bytes).await.unwrap();
        expect_bad_peer(what, &connection, want).await;
    }
    let (connection, mut send, _recv) = rogue.shake().await;
    send.write_all(&100u32.to_be_bytes()).await.unwrap();
    send.write_all(b"short").await.unwrap();
    send.finish().unwrap();
    expect_bad_peer("a frame cut short", &connection, "ended within a message").await;

    // After the welcome.
    let (connection, mut send, _recv) = rogue.welcome().await;
    send.write_all(&too_long).await.unwrap();
    expect_bad_peer("a frame over the cap on the control stream", &connection, "4194305 bytes").await;

    let (connection, _send, _recv) = rogue.welcome().await;
    connection.send_datagram(vec![0xff; 40].into()).unwrap();
    expect_bad_peer("a garbage datagram", &connection, "reading a beat").await;

    let record = Record {
        registration: BUILD,
        run: RUN,
        host: host("good"),
        seq: 1,
        at: Micros(0),
        generation: Generation(1),
        body: log("not mine"),
    };
    let mine = Record { host: host("rogue"), ..record.clone() };
    let gap = Record { seq: 3, ..mine.clone() };
    let batch = |records| {
        frame::wrap(Lane::Evidence, &codec::encode(Lane::Evidence, &EvidenceBatch { run: RUN, records }).unwrap())
            .unwrap()
    };
    for (what, bytes, want) in [
        ("an unknown lane", vec![9], "names no lane"),
        ("the control lane twice", vec![Lane::Control.tag()], "names no lane"),
        ("evidence of another host", [vec![2], batch(vec![record])].concat(), "speaks for another"),
        ("evidence with a gap", [vec![2], batch(vec![mine, gap])].concat(), "has gaps"),
        ("no evidence", [vec![2], batch(Vec::new())].concat(), "empty"),
        ("evidence over the cap", [vec![2], u32::MAX.to_be_bytes().to_vec()].concat(), "4294967295 bytes"),
        ("garbage for an artifact", [vec![3], 4u32.to_be_bytes().to_vec(), vec![0xff; 4]].concat(), "bad message"),
    ] {
        let (connection, _send, _recv) = rogue.welcome().await;
        let (mut send, _answer) = connection.open_bi().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        expect_bad_peer(what, &connection, want).await;
    }

    // None of it reached anybody else.
    let beats = coordinator.store.with(|s| {
        assert!(s.committed.is_empty() && s.connects.iter().filter(|(h, _)| *h == host("good")).count() == 1);
        assert!(s.disconnects.iter().all(|(h, _)| *h == host("rogue")));
        s.beats.len()
    });
    assert!(good.link.view().connected);
    coordinator.store.until("the good agent's beats go on", |s| (s.beats.len() > beats + 3).then_some(())).await;
}

fn goodbye() -> Vec<u8> {
    codec::encode(Lane::Control, &ToCoordinator::Goodbye { reason: "x".into() }).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_agents_may_speak_on_the_agents_endpoint() {
    let coordinator = Coordinator::start();
    let ca = coordinator.pki.ca_der();
    // Without a certificate: the client believes itself connected until the server has looked.
    let endpoint = client(ca, None, ALPN_AGENTS);
    let outcome = match endpoint.connect(coordinator.agents, SERVER_NAME).unwrap().await {
        Ok(connection) => ended(&connection).await.1,
        Err(e) => e.to_string(),
    };
    assert!(outcome.to_lowercase().contains("certificate"), "{outcome}");
    coordinator.store.until("reported", |s| s.reports.iter().any(|f| f.code == "handshake").then_some(())).await;

    let (cert, key) = coordinator.pki.operator_paths();
    let auth = (
        CertificateDer::from_pem_slice(&fs::read(cert).unwrap()).unwrap(),
        PrivateKeyDer::from_pem_slice(&fs::read(key).unwrap()).unwrap(),
    );
    let endpoint = client(ca, Some(auth), ALPN_AGENTS);
    let connection = endpoint.connect(coordinator.agents, SERVER_NAME).unwrap().await.unwrap();
    let (code, words) = ended(&connection).await;
    assert_eq!(code, Some(Close::Refused));
    assert!(words.contains("operator's"), "{words}");

    // The wrong protocol for the port.
    let endpoint = client(ca, None, ALPN_ENROL);
    assert!(endpoint.connect(coordinator.agents, SERVER_NAME).unwrap().await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_at_the_enrolment_endpoint_ends_its_own_connection_only() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let hello = Hello { versions: OURS, build: BUILD }.encode().to_vec();
    for bytes in [
        vec![0; 64],
        [hello.clone(), u32::MAX.to_be_bytes().to_vec()].concat(),
        [hello.clone(), 8u32.to_be_bytes().to_vec(), vec![0xff; 8]].concat(),
        [hello.clone(), 80u32.to_be_bytes().to_vec(), vec![1; 8]].concat(),
        hello[..20].to_vec(),
    ] {
        let endpoint = client(coordinator.pki.ca_der(), None, ALPN_ENROL);
        let connection = endpoint.connect(coordinator.enrol, SERVER_NAME).unwrap().await.unwrap();
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        send.finish().unwrap();
        let (code, words) = ended(&connection).await;
        assert_eq!(code, Some(Close::BadPeer), "{words}");
    }
    enrol(dir.path(), &coordinator.token("h1"), BUILD, None).await.unwrap();
}
