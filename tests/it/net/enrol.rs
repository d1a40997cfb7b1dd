//! Tokens and certificates: what is refused, and that both sides get to know why.

use std::{fs, os::unix::fs::PermissionsExt as _};

use drums_agent::net::{EnrolError, Identity, Stop, enrol};
use drums_common::{
    clock::{Clock as _, Micros},
    digest::Sha256,
    failure::{Failure, FailureClass},
    telemetry::chain,
    token::{Address, Secret, Token},
};
use drums_coordinator::{clock::SystemClock, pki::SigningRequest};

use super::fake::*;

const BUILD: Sha256 = Sha256([7; 32]);

async fn refused(state: &std::path::Path, token: &Token) -> Failure {
    match enrol(state, token, BUILD, None).await {
        Err(EnrolError::Refused { failure, .. }) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_makes_an_identity_that_is_welcomed() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    coordinator.store.connected("h1", 1).await;
    agent.until("connected with an order", |v| v.connected && v.desired.is_some()).await;
    let mode = fs::metadata(dir.path().join("identity/key.pem")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let (enrolled, beats) = coordinator.store.with(|s| (s.enrolled.clone(), s.beats.len()));
    assert_eq!(enrolled.len(), 1);
    assert_eq!(enrolled[0].installation, Identity::load(dir.path()).unwrap().unwrap().installation);
    coordinator.store.until("beats go on", |s| (s.beats.len() > beats + 2).then_some(())).await;
    assert!(agent.link.may_take_new_block());
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_tokens_are_refused_with_a_reason_on_both_sides() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let state = |name: &str| dir.path().join(name);

    let expired = coordinator.token_until("h1", SystemClock.now());
    let failure = refused(&state("expired"), &expired).await;
    assert_eq!((failure.code.as_str(), failure.class), ("token-expired", FailureClass::Refused));
    assert!(failure.to_string().contains("drumsctl host add h1"), "{failure}");

    let unknown = Token { secret: Secret::new([1; 32]), ..coordinator.token("h1") };
    assert_eq!(refused(&state("unknown"), &unknown).await.code, "token-unknown");

    let used = coordinator.token("h1");
    enrol(&state("first"), &used, BUILD, None).await.unwrap();
    assert_eq!(refused(&state("second"), &used).await.code, "token-used");

    let other = Token { host: host("h2"), ..coordinator.token("h1") };
    let failure = refused(&state("other"), &other).await;
    assert_eq!(failure.code, "token-wrong-host");
    assert!(failure.message.contains("host h1"), "{failure}");

    let seen: Vec<_> = coordinator.store.with(|s| s.refusals.iter().map(|f| f.code.clone()).collect());
    assert_eq!(seen, ["token-expired", "token-unknown", "token-used", "token-wrong-host"]);
    for name in ["expired", "unknown", "second", "other"] {
        assert!(Identity::load(&state(name)).unwrap().is_none(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_does_not_cost_the_token() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let token = coordinator.token("h1");
    enrol(dir.path(), &token, BUILD, None).await.unwrap();
    // As if the agent had died before it wrote its certificate: the same key asks again.
    fs::remove_file(dir.path().join("identity/cert.pem")).unwrap();
    let identity = enrol(dir.path(), &token, BUILD, None).await.unwrap();
    assert_eq!(identity.host, host("h1"));
    // And a token is not needed for who we are already, but cannot make us someone else.
    enrol(dir.path(), &token, BUILD, None).await.unwrap();
    let e = enrol(dir.path(), &coordinator.token("h2"), BUILD, None).await.unwrap_err();
    assert!(matches!(e, EnrolError::OtherIdentity { .. }), "{e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_token_for_the_same_host_takes_the_place_of_what_is_held_unless_it_cannot_be_used() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let shown = |identity: &Identity| Sha256::of(&identity.chain[0]);
    let first = enrol(dir.path(), &coordinator.token("h1"), BUILD, None).await.unwrap();
    let mut moved = coordinator.token("h1");
    moved.addresses.insert(0, Address { host: "localhost".into(), ..moved.addresses[0].clone() });
    let second = enrol(dir.path(), &moved, BUILD, None).await.unwrap();
    assert_ne!(shown(&second), shown(&first), "the host may have been released meanwhile");
    assert_eq!((second.installation, &second.addresses), (first.installation, &moved.addresses));
    assert_eq!(coordinator.store.with(|s| s.enrolled.last().unwrap().certificate), shown(&second));
    // The token that made it is not used again, and one that is no good changes nothing.
    // Nor is that one asked with again: a unit gives the same file at each start.
    let late = coordinator.token_until("h1", SystemClock.now());
    for token in [&moved, &late, &late] {
        assert_eq!(shown(&enrol(dir.path(), token, BUILD, None).await.unwrap()), shown(&second));
    }
    assert_eq!(coordinator.store.with(|s| s.refusals.len()), 1);
    let agent = Agent::run("h1", dir.path(), "m1").await;
    coordinator.store.connected("h1", 1).await;
    assert_eq!(coordinator.store.with(|s| s.shown.clone()), [shown(&second)]);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_with_another_ca_is_not_told_the_secret() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let token = Token { ca: Sha256::of(b"another CA"), ..coordinator.token("h1") };
    let e = chain(&enrol(dir.path(), &token, BUILD, None).await.unwrap_err());
    assert!(e.contains("does not show the CA") && e.contains("another coordinator"), "{e}");
    assert!(coordinator.store.with(|s| s.tokens.values().all(|t| t.used_by.is_none())));
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there_is_said_with_the_address() {
    let mut coordinator = Coordinator::start();
    let token = coordinator.token("h1");
    coordinator.kill().await;
    let dir = tempfile::tempdir().unwrap();
    let e = enrol(dir.path(), &token, BUILD, None).await.unwrap_err().to_string();
    assert!(e.contains("127.0.0.1") && e.contains("no answer"), "{e}");
}

/// Puts a certificate of the given coordinator's, issued at `at`, into an enrolled state folder.
fn replace_certificate(state: &std::path::Path, issuer: &Coordinator, at: Micros) {
    let key = rcgen::KeyPair::from_pem(&fs::read_to_string(state.join("identity/key.pem")).unwrap()).unwrap();
    let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    let installation = Identity::load(state).unwrap().unwrap().installation;
    let request = SigningRequest::parse(csr.der()).unwrap();
    let issued = issuer.pki.issue_agent(&request, &host("h1"), installation, at).unwrap();
    fs::write(state.join("identity/cert.pem"), issued.pem).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_and_foreign_certificates_are_refused_and_reported() {
    let coordinator = Coordinator::start();
    let foreign = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let three_years_ago = Micros(SystemClock.now().0 - 3 * 365 * 86_400_000_000);
    for (name, issuer, at, want) in [
        ("expired", &coordinator, three_years_ago, "xpired"),
        ("foreign", &foreign, SystemClock.now(), "UnknownIssuer"),
    ] {
        let state = dir.path().join(name);
        enrol(&state, &coordinator.token("h1"), BUILD, None).await.unwrap();
        replace_certificate(&state, issuer, at);
        let agent = Agent::run("h1", &state, "m1").await;
        let report = coordinator
            .store
            .until(&format!("{name} reported"), |s| s.reports.iter().find(|f| f.message.contains(want)).cloned())
            .await;
        assert!(report.help.contains("drumsctl host add"), "{report}");
        assert!(!agent.link.view().connected);
        assert!(coordinator.store.with(|s| s.connects.is_empty()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_coordinators_refusal_ends_the_agent_with_its_words() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let failure = Failure::refused("host-released", "host h1 was released", "enrol it again");
    coordinator.store.with(|s| s.refuse = Some(failure.clone()));
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("refused", move |v| v.stop == Some(Stop::Refused(failure.clone()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_machine_and_a_second_agent_are_refused_and_reported() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let first = dir.path().join("first");
    let agent = Agent::start(&coordinator, "h1", &first).await;
    agent.until("connected", |v| v.connected).await;
    // The state folder copied while its owner lives, here and to another machine.
    for (name, machine, code) in [("copy", "m1", "second-agent"), ("moved", "m2", "second-machine")] {
        let state = dir.path().join(name);
        fs::create_dir_all(state.join("identity")).unwrap();
        fs::copy(first.join("installation"), state.join("installation")).unwrap();
        for file in ["key.pem", "cert.pem", "ca.pem", "coordinator.json"] {
            fs::copy(first.join("identity").join(file), state.join("identity").join(file)).unwrap();
        }
        let second = Agent::run("h1", &state, machine).await;
        second.until(name, move |v| matches!(&v.stop, Some(Stop::Refused(f)) if f.code == code)).await;
        coordinator.store.until(code, |s| s.reports.iter().any(|f| f.code == code).then_some(())).await;
    }
    assert!(agent.link.view().connected, "the first was not disturbed");
    assert!(coordinator.store.with(|s| s.connects.len() == 1 && s.disconnects.is_empty()));
    // A state folder whose certificate is another installation's.
    let state = dir.path().join("copy");
    fs::write(state.join("installation"), OTHER_INSTALLATION.to_string()).unwrap();
    let third = Agent::run("h1", &state, "m1").await;
    third.until("refused", |v| matches!(&v.stop, Some(Stop::Refused(f)) if f.code == "wrong-installation")).await;
}
