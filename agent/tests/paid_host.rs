//! The real agent on a paid host: with a watchdog beside it and a coordinator that answers its beats, and on an image of an
//! enrolled host. Root only, as the agent is.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use drums_agent::{
    measure::clock::{SystemClock, pause_before_looking_again},
    watchdog::lease::{Lease, step_ms},
};
use drums_common::{
    clock::{Clock as _, MonoMicros},
    digest::Sha256,
    ids::Generation,
    wire::{
        ALPN_AGENTS, SERVER_NAME, codec,
        frame::{self, Lane},
        hello::{HELLO_LEN, Hello, HelloReply, OURS},
        latest::{Beat, BeatAck, ToAgent, ToCoordinator, Welcome},
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use quinn::{Connection, Endpoint, ServerConfig};
use quinn_proto::crypto::rustls::QuicServerConfig;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;

const PATIENCE: Duration = Duration::from_secs(60);
const LIFE_MS: u64 = 4_000;
const FINISH_MS: u64 = 1_000;

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIP root: not root");
    }
    root
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not seen within {} s: {what}", PATIENCE.as_secs());
        pause_before_looking_again(Duration::from_millis(20));
    }
}

/// Answers as IMDSv2 of this instance does, for as long as the test lives.
fn instance_metadata(instance: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).is_ok_and(|n| n == 1) {
                    request.push(byte[0]);
                } else {
                    break;
                }
            }
            let document =
                format!("{{\"accountId\":\"123456789012\",\"region\":\"eu-central-1\",\"instanceId\":\"{instance}\"}}");
            let body = match request.split(|b| *b == b' ').nth(1) {
                Some(b"/latest/api/token") => "token",
                Some(b"/latest/dynamic/instance-identity/document") => &document,
                _ => "MIAG",
            };
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + body).as_bytes());
        }
    });
    at
}

#[test]
fn live_an_agent_on_an_image_of_an_enrolled_host_does_not_start() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("agent.toml");
    // What the image has of the host that it was made of.
    let identity = dir.path().join("state/identity");
    fs::create_dir_all(&identity).unwrap();
    let was = "{\"accountId\":\"123456789012\",\"region\":\"eu-central-1\",\"instanceId\":\"i-0aaaaaaaaaaaaaaaa\"}";
    fs::write(identity.join("instance.json"), was).unwrap();
    let ends = |instance| {
        let at = |name: &str| dir.path().join(name).display().to_string();
        let text = format!(
            "state = \"{}\"\ntools = \"{}\"\nmeasure_lock = \"{}\"\n[paid]\ndeadline = \"{}\"\nimds = \"{}\"\n",
            at("state"),
            at("tools"),
            at("lock"),
            at("no-deadline"),
            instance_metadata(instance),
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_drums-agent"));
        let output = command.arg("run").arg("--config").arg(&config).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = ends("i-0bbbbbbbbbbbbbbbb");
    assert_eq!(code, Some(20), "{said}");
    for word in ["i-0aaaaaaaaaaaaaaaa", "i-0bbbbbbbbbbbbbbbb", "an image of an enrolled host"] {
        assert!(said.contains(word), "it does not say {word:?}: {said}");
    }
    // On its own instance it gets further: to what else is missing here.
    let (code, said) = ends("i-0aaaaaaaaaaaaaaaa");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("not a host of any coordinator"), "{said}");
}

/// Welcomes whoever dials and answers each beat: all of a coordinator that a lease needs.
async fn coordinator(connection: Connection) -> Option<()> {
    let (mut send, mut recv) = connection.accept_bi().await.ok()?;
    let mut hello = [0; HELLO_LEN];
    recv.read_exact(&mut hello).await.ok()?;
    let reply = HelloReply::answer(OURS, Sha256::of(b"test"), &Hello::parse(&hello).unwrap());
    send.write_all(&reply.encode()).await.ok()?;
    let mut prefix = [0; frame::PREFIX];
    recv.read_exact(&mut prefix).await.ok()?;
    let mut payload = vec![0; frame::payload_len(Lane::Control, prefix).unwrap()];
    recv.read_exact(&mut payload).await.ok()?;
    assert!(matches!(codec::decode(Lane::Control, &payload), Ok(ToCoordinator::Hello(_))));
    let welcome = ToAgent::Welcome(Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(1),
        beat_ms: 100,
        dispatch_lease_ms: 1_000,
        life_lease_ms: LIFE_MS,
    });
    let bytes = frame::wrap(Lane::Control, &codec::encode(Lane::Control, &welcome).unwrap()).unwrap();
    send.write_all(&bytes).await.ok()?;
    while let Ok(datagram) = connection.read_datagram().await {
        let beat: Beat = codec::decode(Lane::Datagram, &datagram).unwrap();
        let ack = BeatAck { generation: beat.generation, number: beat.number, sent: beat.sent };
        connection.send_datagram(codec::encode(Lane::Datagram, &ack).unwrap().into()).ok()?;
    }
    Some(())
}

/// A coordinator, and in `identity` what a host has that enrolled with it.
fn enrolled(runtime: &tokio::runtime::Runtime, identity: &Path) -> Endpoint {
    let (ca_key, server_key, agent_key) =
        (KeyPair::generate().unwrap(), KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca_params = CertificateParams::default();
    ca_params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = ca_params.self_signed(&ca_key).unwrap();
    let issuer = Issuer::from_params(&ca_params, &ca_key);
    let server = CertificateParams::new([SERVER_NAME.to_owned()]).unwrap().signed_by(&server_key, &issuer).unwrap();
    let agent = CertificateParams::new(["h1".to_owned()]).unwrap().signed_by(&agent_key, &issuer).unwrap();

    let mut tls = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![server.der().clone()], PrivatePkcs8KeyDer::from(server_key.serialize_der()).into())
        .unwrap();
    tls.alpn_protocols = vec![ALPN_AGENTS.to_vec()];
    let config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()));
    let _inside = runtime.enter();
    let endpoint = Endpoint::server(config, SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let listening = endpoint.clone();
    runtime.spawn(async move {
        while let Some(incoming) = listening.accept().await {
            tokio::spawn(async move { coordinator(incoming.await.ok()?).await });
        }
    });

    fs::create_dir_all(identity).unwrap();
    let port = endpoint.local_addr().unwrap().port();
    let addresses = format!("[{{\"host\":\"127.0.0.1\",\"agents\":{port},\"enrol\":{port}}}]");
    for (name, text) in [
        ("key.pem", agent_key.serialize_pem()),
        ("cert.pem", agent.pem()),
        ("ca.pem", ca.pem()),
        ("coordinator.json", format!("{{\"host\":\"h1\",\"addresses\":{addresses}}}")),
    ] {
        fs::write(identity.join(name), text).unwrap();
        fs::set_permissions(identity.join(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    endpoint
}

/// Ended with the test, whatever becomes of it.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a killed agent held is undone, as its next start would, also after a failure.
struct Undo<'a>(&'a Path);

impl Undo<'_> {
    fn now(&self) -> Output {
        let mut audit = Command::new(env!("CARGO_BIN_EXE_drums-agent"));
        audit.arg("audit").arg("--config").arg(self.0).output().unwrap()
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let _ = self.now();
    }
}

#[test]
fn live_a_paid_host_is_off_when_its_agent_is_killed_or_stopped() {
    if !is_root() {
        return;
    }
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let _endpoint = enrolled(&runtime, &dir.path().join("state/identity"));
        let at = |name: &str| dir.path().join(name).display().to_string();
        let (config, off) = (dir.path().join("agent.toml"), dir.path().join("off"));
        let program = dir.path().join("power-off");
        fs::write(&program, format!("#!/bin/sh\necho \"$1\" > {0}.new && mv {0}.new {0}\n", off.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(dir.path().join("deadline"), "DEADLINE_S=17000000000\nLIFETIME_S=10000000000\n").unwrap();
        let text = format!(
            "state = \"{}\"\ntools = \"{}\"\nmeasure_lock = \"{}\"\n[paid]\ndeadline = \"{}\"\nfolder = \"{}\"\n\
             lived = \"{}\"\nfinish_s = {}\nimds = \"{}\"\npower_off_in_tests = \"{}\"\n",
            at("state"),
            at("tools"),
            at("lock"),
            at("deadline"),
            at("run"),
            at("lived"),
            FINISH_MS / 1_000,
            instance_metadata("i-0aaaaaaaaaaaaaaaa"),
            program.display(),
        );
        fs::write(&config, text).unwrap();
        let start = |what: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_drums-agent"));
            command.arg(what).arg("--config").arg(&config).stdin(Stdio::null()).stdout(Stdio::null());
            command.stderr(fs::File::create(dir.path().join(format!("{what}.log"))).unwrap());
            Process(command.spawn().unwrap())
        };
        let _watchdog = start("watchdog");
        // Declared before the agent, so that it comes after its end.
        let undo = Undo(&config);
        let agent = start("run");
        let logs = || ["run", "watchdog"].map(|n| fs::read_to_string(dir.path().join(format!("{n}.log"))).unwrap());
        let over = || {
            let lease = Lease::read(&dir.path().join("run/life-lease")).ok()?;
            Some(lease.life_ends.plus_ms(step_ms(lease.life_ms) + FINISH_MS))
        };
        let mut first: Option<MonoMicros> = None;
        until("the agent keeps its lease", || {
            first = over();
            first.is_some()
        });
        until("the first lease is over", || first.is_some_and(|f| SystemClock.boottime() > f.plus_ms(500)));
        assert!(!off.exists(), "powered off although its agent is heard: {:?}", logs());

        kill(Pid::from_raw(agent.0.id().cast_signed()), signal).unwrap();
        until("the host is powered off", || off.exists());
        let (why, seen) = (fs::read_to_string(&off).unwrap(), SystemClock.boottime());
        assert!(why.contains("life lease"), "{signal}: {why}");
        assert!(seen >= over().unwrap(), "{signal}: before its lease was over: {:?}", logs());
        drop(agent);
        let audit = undo.now();
        assert!(audit.status.success(), "{}", String::from_utf8_lossy(&audit.stderr));
    }
}
