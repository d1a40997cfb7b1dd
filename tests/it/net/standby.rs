//! Two coordinators on one PostgreSQL store, as processes: the hand-over when the active one is killed, and when it is
//! stopped and continues later. The agent's network side is the real one; it has no measuring side.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use drums_common::{ids::RunId, token::Token};
use drums_infra::{fleet::wait_until, loopback::Loopback, postgres::Server};
use nix::sys::signal::Signal;

use super::{
    fake::Agent,
    node::{Node, PATIENCE, lines, wanted, write},
};

const LEASE_MS: u64 = 3_000;

fn configure(home: &Path, advertise: &[Loopback; 2], address: &Loopback, ports: [u16; 3], store: &str) {
    let [agents, enrol, api] = ports;
    let [first, second] = advertise.each_ref().map(Loopback::address);
    let address = address.address();
    let text = format!(
        "listen = \"{address}\"\nagents_port = {agents}\nenrol_port = {enrol}\napi = \"{address}:{api}\"\n\
         advertise = [\"{first}\", \"{second}\"]\n{}[postgres]\nurl = \"{store}\"\nlease_ms = {LEASE_MS}\n",
        drums_tests::fleet::SHORT_LEASES
    );
    std::fs::write(home.join("coordinator.toml"), text).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_coordinator_takes_over_from_one_that_is_killed_and_from_one_that_is_stopped() {
    let programs = drums_tests::programs().unwrap();
    let server = Server::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let here = [Loopback::claim().unwrap(), Loopback::claim().unwrap()];
    let ports = [(); 3].map(|()| here[0].port().unwrap());
    let node = |name: &str| Node { home: dir.path().join(name), programs: programs.clone(), child: None };
    let (mut a, mut b) = (node("a"), node("b"));
    a.said(&["init", "--store", &server.url()]);
    configure(&a.home, &here, &here[0], ports, &server.url());
    a.start();
    a.until(true);

    // A workload and an experiment: what a home's second coordinator must have too.
    let workload = dir.path().join("workload");
    std::fs::create_dir_all(workload.join("tree/bin")).unwrap();
    std::fs::write(workload.join("tree/bin/tool"), "x").unwrap();
    drums_infra::workload::freeze(&workload).unwrap();
    a.said(&["workload", "add", workload.to_str().unwrap(), "--name", "minimal"]);
    let spec = dir.path().join("spec.toml");
    std::fs::write(&spec, crate::live_fleet::spec("EXP-906", &["drums-cold", "runc-cold"], 2, 1)).unwrap();
    a.said(&["register", spec.to_str().unwrap()]);

    // The standby's home is a backup of the first one's.
    let backup = dir.path().join("backup.tar.zst");
    a.said(&["backup", backup.to_str().unwrap()]);
    std::fs::create_dir(&b.home).unwrap();
    let tar = Command::new("tar").arg("--zstd").arg("-xpf").arg(&backup).arg("-C").arg(&b.home).status().unwrap();
    assert!(tar.success());
    configure(&b.home, &here, &here[1], ports, &server.url());
    b.start();
    b.until(false);

    // A host, enrolled and with a run, at the active one. Its token names both.
    let token = Token::parse(&a.said(&["host", "add", "h1"])).unwrap();
    let both = here.each_ref().map(|h| h.address().to_string());
    assert_eq!(token.addresses.iter().map(|a| a.host.as_str()).collect::<Vec<_>>(), both);
    let state = dir.path().join("agent");
    std::fs::create_dir(&state).unwrap();
    drums_agent::net::enrol(&state, &token, drums_common::digest::Sha256::of(b"agent"), None).await.unwrap();
    let agent = Agent::run("h1", &state, "m1").await;
    agent.until("connected", |v| v.connected).await;
    let view = a.json(&["run", "EXP-906", "--json"]);
    let run: RunId = view["run"].as_str().unwrap().parse().unwrap();
    agent
        .until("the run is wanted", move |v| v.desired.as_ref().is_some_and(|d| d.runs.iter().any(|r| r.run == run)))
        .await;
    write(&agent, run, 0..10);
    assert!(wait_until(PATIENCE, || lines(&a, run) == wanted(10)), "{:?}", lines(&a, run));

    // Killed: the other takes over, with the run and every record once.
    a.signal(Signal::SIGKILL);
    let killed = Instant::now();
    a.child.take().unwrap().wait().unwrap();
    write(&agent, run, 10..20);
    b.until(true);
    let took = killed.elapsed();
    assert!(wait_until(PATIENCE, || lines(&b, run) == wanted(20)), "{:?}", lines(&b, run));
    eprintln!("active after {} ms, evidence there after {} ms", took.as_millis(), killed.elapsed().as_millis());
    assert!(b.json(&["runs", "--json"])["runs"][0]["closed"].is_null(), "the run goes on");

    // Stopped: it holds connections and a request, believes that it leads, and knows nothing of what happens.
    a.start();
    a.until(false);
    b.signal(Signal::SIGSTOP);
    write(&agent, run, 20..30);
    a.until(true);
    assert!(wait_until(PATIENCE, || lines(&a, run) == wanted(30)), "{:?}", lines(&a, run));
    let late = b.command(&["host", "add", "late"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let before = server.psql("drums", "SELECT count(*) FROM audit WHERE actor LIKE 'uid%'").unwrap();
    b.signal(Signal::SIGCONT);
    let status = b.ended();
    assert!(!status.success(), "{status}");
    assert!(!late.unwrap().wait().unwrap().success(), "what it was asked for it did not do");
    let after = server.psql("drums", "SELECT count(*) FROM audit WHERE actor LIKE 'uid%'").unwrap();
    assert_eq!(before, after, "it wrote nothing");
    let fleet = a.said(&["fleet"]);
    assert!(fleet.contains("h1") && !fleet.contains("late"), "{fleet}");
    let epochs = server.psql("drums", "SELECT detail FROM audit WHERE action = 'lead' ORDER BY number").unwrap();
    assert_eq!(epochs.lines().collect::<Vec<_>>(), ["epoch 1", "epoch 2", "epoch 3"]);

    // An orderly end hands over at once, and an outage of the store ends nothing.
    b.start();
    b.until(false);
    a.signal(Signal::SIGTERM);
    assert!(a.ended().success());
    b.until(true);
    let mut server = server;
    server.stop();
    write(&agent, run, 30..40);
    assert!(!b.ctl(&["fleet"]).status.success());
    server.resume().unwrap();
    assert!(wait_until(PATIENCE, || lines(&b, run) == wanted(40)), "{:?}", lines(&b, run));
    let runs = b.json(&["runs", "--json"]);
    assert!(runs["runs"][0]["closed"].is_null() && runs["runs"][0]["ending"].is_null(), "{runs}");
    agent.until("connected", |v| v.connected).await;

    // Who did what is there, from every life.
    let events = b.json(&["events", "--json", "--limit", "1000"]);
    let actions: Vec<&str> = events.as_array().unwrap().iter().filter_map(|e| e["action"].as_str()).collect();
    for action in ["init", "lead", "workload-add", "register", "host-add", "token-add", "token-used", "enrolled", "run"]
    {
        assert!(actions.contains(&action), "{action}: {actions:?}");
    }
    let of_run = b.json(&["events", "--json", "--run", &run.to_string(), "--since", "1h"]);
    assert_eq!(of_run[0]["action"], "run");
    assert_eq!(of_run[0]["peer"], "unix socket");
}
