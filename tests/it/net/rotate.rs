//! The coordinator's own key and certificate are replaced while it serves: the real daemon and drumsctl as processes, and
//! an agent's real network side.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
};

use drums_common::{
    digest::Sha256,
    ids::RunId,
    token::Token,
    wire::{ALPN_AGENTS, ALPN_ENROL, SERVER_NAME},
};
use drums_infra::{fleet::wait_until, loopback::Loopback};
use nix::sys::signal::Signal;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::Value;

use super::{
    fake::Agent,
    node::{Node, PATIENCE, lines, wanted, write},
};

/// Where a coordinator listens.
struct Ports {
    agents: SocketAddr,
    enrol: SocketAddr,
    api: SocketAddr,
}

/// A client that trusts the home's CA and shows the operator's certificate.
fn client(pki: &Path, alpn: &[u8]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pki.join("ca.pem")).unwrap()).unwrap();
    let certificate = CertificateDer::from_pem_file(pki.join("operator.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(pki.join("operator.key")).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)
        .unwrap();
    config.alpn_protocols = vec![alpn.to_vec()];
    config
}

async fn shown_over_quic(at: SocketAddr, tls: ClientConfig) -> Sha256 {
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let connection = endpoint.connect_with(config, at, SERVER_NAME).unwrap().await.unwrap();
    let chain = connection.peer_identity().unwrap().downcast::<Vec<CertificateDer<'static>>>().unwrap();
    connection.close(0u32.into(), b"");
    Sha256::of(&chain[0])
}

type Https = StreamOwned<ClientConnection, TcpStream>;

fn over_https(at: SocketAddr, tls: ClientConfig) -> (Https, Sha256) {
    let mut connection = ClientConnection::new(Arc::new(tls), SERVER_NAME.try_into().unwrap()).unwrap();
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).unwrap();
    }
    let leaf = Sha256::of(&connection.peer_certificates().unwrap()[0]);
    (StreamOwned::new(connection, stream), leaf)
}

/// What each listener shows to a new connection.
async fn shown(home: &Path, ports: &Ports) -> [Sha256; 3] {
    let pki = home.join("pki");
    [
        shown_over_quic(ports.agents, client(&pki, ALPN_AGENTS)).await,
        shown_over_quic(ports.enrol, client(&pki, ALPN_ENROL)).await,
        over_https(ports.api, client(&pki, b"http/1.1")).1,
    ]
}

fn connects(node: &Node, host: &str) -> usize {
    let events = node.json(&["events", "--json", "--host", host, "--limit", "1000"]);
    events.as_array().unwrap().iter().filter(|e| e["action"] == "connected").count()
}

fn rotate(node: &Node) -> (Sha256, Value) {
    let said = node.json(&["access", "rotate-server", "--json"]);
    (said["certificate"].as_str().unwrap().parse().unwrap(), said["before"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_key_is_rotated_while_an_agent_is_connected_and_a_run_is_wanted() {
    let programs = drums_tests::programs().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let here = Loopback::claim().unwrap();
    let ports = Ports { agents: here.socket().unwrap(), enrol: here.socket().unwrap(), api: here.socket().unwrap() };
    let mut node = Node { home: dir.path().join("home"), programs, child: None };
    node.said(&["init"]);
    let text = format!(
        "listen = \"{0}\"\nadvertise = [\"{0}\"]\nagents_port = {1}\nenrol_port = {2}\napi = \"{3}\"\n{4}",
        here.address(),
        ports.agents.port(),
        ports.enrol.port(),
        ports.api,
        drums_tests::fleet::SHORT_LEASES
    );
    fs::write(node.home.join("coordinator.toml"), text).unwrap();
    node.start();
    node.until(true);

    let workload = dir.path().join("workload");
    fs::create_dir_all(workload.join("tree/bin")).unwrap();
    fs::write(workload.join("tree/bin/tool"), "x").unwrap();
    drums_infra::workload::freeze(&workload).unwrap();
    node.said(&["workload", "add", workload.to_str().unwrap(), "--name", "minimal"]);
    let spec = dir.path().join("spec.toml");
    fs::write(&spec, crate::live_fleet::spec("EXP-907", &["drums-cold", "runc-cold"], 2, 1)).unwrap();
    node.said(&["register", spec.to_str().unwrap()]);
    let enrol = async |name: &str| {
        let token = Token::parse(&node.said(&["host", "add", name])).unwrap();
        let state = dir.path().join(name);
        fs::create_dir(&state).unwrap();
        drums_agent::net::enrol(&state, &token, Sha256::of(b"agent"), None).await.unwrap();
        Agent::run(name, &state, name).await
    };
    let agent = enrol("h1").await;
    agent.until("connected", |v| v.connected).await;
    let run: RunId = node.json(&["run", "EXP-907", "--json"])["run"].as_str().unwrap().parse().unwrap();
    agent
        .until("the run is wanted", move |v| v.desired.as_ref().is_some_and(|d| d.runs.iter().any(|r| r.run == run)))
        .await;
    write(&agent, run, 0..10);

    let [first, ..] = shown(&node.home, &ports).await;
    assert_eq!(shown(&node.home, &ports).await, [first; 3]);
    let (mut open, _) = over_https(ports.api, client(&node.home.join("pki"), b"http/1.1"));
    let (second, before) = rotate(&node);
    assert_ne!(second, first);
    assert_eq!(before["certificate"], first.to_string());

    // Whoever comes now sees the new one; whoever was there notices nothing.
    assert_eq!(shown(&node.home, &ports).await, [second; 3]);
    open.write_all(b"GET /api/v1/status HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = [0; 12];
    open.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    write(&agent, run, 10..20);
    assert!(wait_until(PATIENCE, || lines(&node, run) == wanted(20)), "{:?}", lines(&node, run));
    assert_eq!(connects(&node, "h1"), 1);
    let audited = |certificate: Sha256| {
        let events = node.json(&["events", "--json", "--limit", "1000"]);
        events.as_array().unwrap().iter().any(|e| {
            e["action"] == "access-rotate-server" && e["detail"].as_str().unwrap().contains(&certificate.short())
        })
    };
    assert!(wait_until(PATIENCE, || audited(second)), "no rotation in the audit trail");

    // A host that has only a token knows the CA.
    let other = enrol("h2").await;
    other.until("connected", |v| v.connected).await;

    // What cannot be used is shown to nobody and said; another rotation mends it.
    let renewed = node.home.join("pki/server.renewed.pem");
    let aside = renewed.with_extension("damaged");
    fs::write(&aside, &fs::read(&renewed).unwrap()[..300]).unwrap();
    fs::set_permissions(&aside, fs::metadata(&renewed).unwrap().permissions()).unwrap();
    fs::rename(&aside, &renewed).unwrap();
    assert_eq!(shown(&node.home, &ports).await, [second; 3]);
    let logged = || fs::read_to_string(node.home.join("log")).unwrap().contains("server.renewed.pem is not what");
    assert!(wait_until(PATIENCE, logged), "the log does not tell");
    let (third, before) = rotate(&node);
    assert!(before.is_null(), "{before}");
    assert_eq!(shown(&node.home, &ports).await, [third; 3]);

    // It is kept, and agents know a restarted coordinator that has another key than the one they met.
    node.signal(Signal::SIGKILL);
    node.child.take().unwrap().wait().unwrap();
    write(&agent, run, 20..30);
    node.start();
    node.until(true);
    assert_eq!(shown(&node.home, &ports).await, [third; 3]);
    assert!(wait_until(PATIENCE, || lines(&node, run) == wanted(30)), "{:?}", lines(&node, run));
    assert_eq!(connects(&node, "h1"), 2);
    assert!(node.json(&["runs", "--json"])["runs"][0]["closed"].is_null(), "the run goes on");
}
