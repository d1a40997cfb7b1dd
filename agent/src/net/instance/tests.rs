//! Against a small server that answers as IMDSv2 does: a token first, and nothing without it.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use drums_common::telemetry::chain;
use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, runtime::Runtime};

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn document(instance: &str) -> String {
    format!(
        "{{\n  \"accountId\" : \"123456789012\",\n  \"imageId\" : \"ami-0123456789abcdef0\",\n  \"instanceId\" : \"{instance}\",\n  \
         \"region\" : \"eu-central-1\",\n  \"billingProducts\" : null\n}}"
    )
}

/// How the service behaves.
#[derive(Clone, Default)]
struct Behaviour {
    document: String,
    /// So many requests are refused before one is answered.
    busy: Arc<AtomicU32>,
    status: Option<StatusCode>,
}

fn answer(behaviour: &Behaviour, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let say = |status, text: &str| {
        let body = Full::new(Bytes::copy_from_slice(text.as_bytes()));
        Response::builder().status(status).body(body).unwrap()
    };
    let header = |name| request.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if behaviour.busy.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok() {
        return say(StatusCode::SERVICE_UNAVAILABLE, "");
    }
    if let Some(status) = behaviour.status {
        return say(status, "");
    }
    match (request.method(), request.uri().path()) {
        (&Method::PUT, "/latest/api/token") if header("x-aws-ec2-metadata-token-ttl-seconds") == "60" => {
            say(StatusCode::OK, "a-token")
        }
        (&Method::GET, path) if header("x-aws-ec2-metadata-token") == "a-token" => match path {
            "/latest/dynamic/instance-identity/document" => say(StatusCode::OK, &behaviour.document),
            "/latest/dynamic/instance-identity/rsa2048" => say(StatusCode::OK, "MIAG\nCSqG\n"),
            _ => say(StatusCode::NOT_FOUND, ""),
        },
        (&Method::GET, _) => say(StatusCode::UNAUTHORIZED, ""),
        _ => say(StatusCode::BAD_REQUEST, ""),
    }
}

fn serve(runtime: &Runtime, behaviour: Behaviour) -> SocketAddr {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let at = listener.local_addr().unwrap();
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let behaviour = behaviour.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let answer = answer(&behaviour, &request);
                    async move { Ok::<_, Infallible>(answer) }
                });
                let _ =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    at
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn an_instance_shows_its_document_and_signature_to_the_byte() {
    let runtime = runtime();
    let busy = Arc::new(AtomicU32::new(2));
    let at = serve(&runtime, Behaviour { document: document("i-1"), busy, ..Behaviour::default() });
    let shown = runtime.block_on(imds::shown(at, SOON)).unwrap();
    assert_eq!(shown.document, document("i-1").as_bytes());
    assert_eq!(shown.signature, "MIAG\nCSqG\n");
}

#[test]
fn a_service_that_refuses_is_believed_and_one_that_is_silent_is_waited_for_within_bounds() {
    let runtime = runtime();
    let begun = Instant::now();
    for status in [StatusCode::FORBIDDEN, StatusCode::NOT_FOUND, StatusCode::FOUND] {
        let at = serve(&runtime, Behaviour { status: Some(status), ..Behaviour::default() });
        let said = runtime.block_on(imds::shown(at, SOON)).unwrap_err().to_string();
        assert!(said.contains(status.as_str()) && said.contains("HttpEndpoint"), "{said}");
    }
    assert!(begun.elapsed() < SOON, "asked again although it refused");

    // Connects, and never says anything.
    let silent = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let patience = Duration::from_millis(300);
    let said = runtime.block_on(imds::shown(silent.local_addr().unwrap(), patience)).unwrap_err();
    assert!(matches!(said, ImdsError::Slow { .. }), "{said}");
    assert!(begun.elapsed() < 2 * SOON);

    let nobody = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap().local_addr().unwrap();
    let said = runtime.block_on(imds::shown(nobody, patience)).unwrap_err();
    assert!(matches!(said, ImdsError::Connect { .. }), "{said}");

    let endless = Behaviour { document: "x".repeat(1 << 20), ..Behaviour::default() };
    let at = serve(&runtime, endless);
    let said = runtime.block_on(imds::shown(at, SOON)).unwrap_err();
    assert!(matches!(said, ImdsError::Nonsense { .. }), "{said}");
}

#[test]
fn an_image_of_an_enrolled_host_that_is_started_elsewhere_is_refused() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let here = serve(&runtime, Behaviour { document: document("i-1"), ..Behaviour::default() });
    let there = serve(&runtime, Behaviour { document: document("i-2"), ..Behaviour::default() });
    let bind = |at, launched| runtime.block_on(bind(&state, at, launched, SOON));
    bind(here, true).unwrap();
    bind(here, true).unwrap();
    // Whether or not it looks like a launched host there.
    for launched in [true, false] {
        let said = bind(there, launched).unwrap_err();
        assert!(matches!(said, InstanceError::Another { .. }), "{said}");
        let words = said.to_string();
        assert!(words.contains("i-1 in eu-central-1") && words.contains("this is i-2"), "{words}");
        assert!(words.contains("remove it and enrol"), "{words}");
    }
    // Another account's machine that has been given the same id would be another machine.
    let other = document("i-1").replace("123456789012", "210987654321");
    let there = serve(&runtime, Behaviour { document: other, ..Behaviour::default() });
    assert!(matches!(bind(there, true), Err(InstanceError::Another { .. })));
    // Where there is no instance metadata at all, it is another machine as well.
    let nowhere = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap().local_addr().unwrap();
    let said = runtime.block_on(super::bind(&state, nowhere, false, Duration::ZERO)).unwrap_err();
    assert!(matches!(said, InstanceError::Unknown(_)), "{}", chain(&said));
    bind(here, true).unwrap();
}

#[test]
fn a_machine_that_was_not_launched_is_not_asked_and_damage_is_no_permission() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let nowhere: SocketAddr = "127.0.0.1:1".parse().unwrap();
    runtime.block_on(bind(dir.path(), nowhere, false, SOON)).unwrap();
    assert!(!identity::dir(dir.path()).exists(), "it was written to");
    fs::create_dir_all(identity::dir(dir.path())).unwrap();
    fs::write(identity::dir(dir.path()).join(FILE), "{").unwrap();
    let said = runtime.block_on(bind(dir.path(), nowhere, false, SOON)).unwrap_err();
    assert!(matches!(said, InstanceError::Damaged { .. }), "{said}");
    let at = serve(&runtime, Behaviour { document: "{}".to_owned(), ..Behaviour::default() });
    let fresh = tempfile::tempdir().unwrap();
    let said = runtime.block_on(bind(fresh.path(), at, true, SOON)).unwrap_err();
    assert!(matches!(said, InstanceError::Document(_)), "{said}");
}
