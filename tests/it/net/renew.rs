//! Certificates of agents are renewed while they run.

use std::{fs, os::unix::fs::PermissionsExt as _, sync::Arc};

use drums_agent::{measure::clock::SystemClock as AgentClock, net::Identity};
use drums_common::{
    clock::{Clock, Micros, MonoMicros},
    digest::Sha256,
};

use super::fake::*;

/// A clock that is two thirds of a certificate's time ahead.
struct Ahead;
impl Clock for Ahead {
    fn now(&self) -> Micros {
        AgentClock.now().plus_ms(490 * 86_400_000)
    }
    fn boottime(&self) -> MonoMicros {
        AgentClock.boottime()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_renews_its_certificate_in_time_and_shows_it_from_the_next_connection_on() {
    let mut coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    // One that is young asks for nothing: the first thing it says is a beat, the second an order's acknowledgement.
    let mut agent = Agent::start(&coordinator, "h1", dir.path()).await;
    coordinator.store.until("beats", |s| (s.beats.len() > 5).then_some(())).await;
    assert!(coordinator.store.with(|s| s.renewed.is_empty()));
    assert!(agent.net.take().unwrap().finish(PATIENCE).await);

    let agent = Agent::run_at("h1", dir.path(), "m1", Arc::new(Ahead)).await;
    let first = coordinator.store.with(|s| s.enrolled[0].clone());
    let next = coordinator.store.until("renewed", |s| s.renewed.first().cloned()).await;
    assert_eq!((next.host, next.installation), (first.host, first.installation));
    assert_ne!(next.certificate, first.certificate);
    let folder = dir.path().join("identity");
    let kept = || Identity::load(dir.path()).unwrap().unwrap();
    let shown = || Sha256::of(&kept().chain[0]);
    agent.until("the new certificate is kept", move |_| folder.join("renewed.pem").exists()).await;
    assert_eq!(shown(), next.certificate);
    let mode = fs::metadata(dir.path().join("identity/renewed.pem")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    assert!(agent.link.view().connected, "nothing is dialled anew for it");

    // The coordinator is restarted: what is shown then is the new one, and it is welcome.
    let before = coordinator.store.with(|s| s.shown.len());
    coordinator.kill().await;
    coordinator.run();
    let certificate =
        coordinator.store.until("connected again", |s| (s.shown.len() > before).then(|| s.shown[before])).await;
    assert_eq!(certificate, next.certificate);
}
