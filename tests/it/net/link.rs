//! The link's life: reconnecting, leases, silence, evidence, workloads.

use std::{fs, os::unix::fs::OpenOptionsExt as _, sync::Arc, time::Duration};

use drums_agent::{
    measure::clock::SystemClock as AgentClock,
    net::{Stop, Threads, enrol},
};
use drums_common::{
    clock::{Clock as _, Micros},
    digest::Sha256,
    failure::FailureClass,
    ids::{Generation, RunId},
    lease::Health,
    wire::latest::Desired,
};
use drums_coordinator::{clock::SystemClock, net::ports::Order};

use super::fake::*;

fn write(agent: &Agent, run: RunId, texts: std::ops::Range<u32>) {
    let spool = agent.run_spool(run);
    let mut writer = spool.writer().unwrap();
    for i in texts {
        writer.append(Generation(1), Micros(1), log(&i.to_string())).unwrap();
        if i % 3 == 0 {
            writer.commit().unwrap();
        }
    }
    writer.commit().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_comes_back_to_a_coordinator_that_was_killed() {
    let mut coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("connected", |v| v.connected).await;
    write(&agent, RUN, 0..10);
    coordinator.kill().await;
    write(&agent, RUN, 10..20);
    coordinator.run();
    coordinator.store.connected("h1", 2).await;
    coordinator.store.until("all evidence", |s| (s.committed.len() == 20).then_some(())).await;
    agent.until("connected again", |v| v.connected).await;
    let instances = coordinator.store.with(|s| s.connects.iter().map(|c| c.1).collect::<Vec<_>>());
    assert_eq!(instances[0], instances[1], "a reconnect, not a second agent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_never_taken_holds_up_no_other() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    // It sorts before the others.
    let (unknown, other) = (RunId([0; 6]), RunId([8; 6]));
    coordinator.store.with(|s| s.unknown_runs = vec![unknown]);
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    write(&agent, unknown, 0..3);
    coordinator.store.until("the unknown run was offered", |s| (s.batches > 0).then_some(())).await;
    write(&agent, other, 0..5);
    coordinator.store.until("the other run's evidence", |s| (s.committed.len() == 5).then_some(())).await;
    // More of both, on the same connection: the one that rests does not stop the other.
    write(&agent, unknown, 3..6);
    write(&agent, other, 5..10);
    coordinator.store.until("more of it", |s| (s.committed.len() == 10).then_some(())).await;
    assert_eq!(coordinator.store.with(|s| s.connects.len()), 1);
    // It is only resting: once the run is known, its evidence comes.
    coordinator.store.with(|s| s.unknown_runs.clear());
    coordinator.store.until("what was refused before", |s| (s.committed.len() == 16).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evidence_is_committed_exactly_once_whatever_is_lost() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    // Two answers are lost after the commit: the agent sends both batches again.
    coordinator.store.with(|s| s.lose_answers = 2);
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    write(&agent, RUN, 0..30);
    let other = RunId([8; 6]);
    write(&agent, other, 0..5);
    coordinator.store.until("everything", |s| (s.committed.len() == 35).then_some(())).await;
    let spool = agent.run_spool(RUN);
    let acked = || (spool.acked() == 30).then_some(());
    coordinator.store.until("acknowledged", |_| acked()).await;
    let (batches, texts) = coordinator.store.with(|s| {
        let texts: Vec<_> = s.committed.iter().filter(|(k, _)| k.0 == RUN).map(|(_, r)| r.body.clone()).collect();
        (s.batches, texts)
    });
    assert!(batches >= 4, "{batches}");
    assert_eq!(texts, (0..30).map(|i| log(&i.to_string())).collect::<Vec<_>>());
    // The agent ends orderly: all acknowledged, and the coordinator knows why it went.
    let mut agent = agent;
    agent.link.stop(Stop::Signal("SIGTERM"));
    assert!(agent.net.take().unwrap().finish(PATIENCE).await);
    coordinator
        .store
        .until("goodbye", |s| s.disconnects.iter().any(|(_, why)| why.contains("stopped by SIGTERM")).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_was_killed_sends_what_it_had_when_it_is_back() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    {
        let agent = Agent::start(&coordinator, "h1", dir.path()).await;
        agent.until("connected", |v| v.connected).await;
        coordinator.store.with(|s| s.lose_answers = u32::MAX);
        write(&agent, RUN, 0..7);
        coordinator.store.until("committed", |s| (s.committed.len() == 7).then_some(())).await;
        drop(agent.net);
    }
    coordinator.store.with(|s| s.lose_answers = 0);
    let agent = Agent::run("h1", dir.path(), "m1").await;
    write(&agent, RUN, 7..9);
    coordinator.store.until("the rest", |s| (s.committed.len() == 9).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn declared_silence_is_kept_and_not_judged() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("connected with an order", |v| v.connected && v.desired.is_some()).await;
    coordinator.store.until("beats", |s| (s.beats.len() > 2).then_some(())).await;
    let link = agent.link.clone();
    let guard = tokio::task::spawn_blocking(move || link.quiet(Duration::from_secs(5))).await.unwrap();
    let (beats, batches) = coordinator.store.with(|s| (s.beats.len(), s.batches));
    let last = coordinator.store.with(|s| s.beats.last().unwrap().1.clone());
    assert_eq!(last.quiet_ms, 5_000, "announced by the last beat before it");
    write(&agent, RUN, 0..3);
    // Many beats and lease times long: silence is what is tested, so there is no condition to wait for.
    let until = SystemClock.boottime().plus_ms(4 * TIMES.dispatch_ms);
    while SystemClock.boottime() < until {
        assert!(matches!(coordinator.store.health("h1"), Health::Quiet { .. }));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(coordinator.store.with(|s| (s.beats.len(), s.batches)), (beats, batches));
    assert!(!guard.overrun());
    assert!(!agent.link.may_take_new_block(), "the dispatch lease lapsed meanwhile");
    drop(guard);
    coordinator.store.until("evidence after it", |s| (s.committed.len() == 3).then_some(())).await;
    let link = agent.link.clone();
    assert!(tokio::task::spawn_blocking(move || link.wait_for_dispatch(PATIENCE)).await.unwrap());
    coordinator.store.until("beats after it", |s| (s.beats.len() > beats + 1).then_some(())).await;
    assert_eq!(coordinator.store.health("h1"), Health::Alive);
    assert!(coordinator.store.with(|s| s.connects.len() == 1 && s.disconnects.is_empty()), "the connection was kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn beats_go_on_while_a_disk_hangs() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    enrol(dir.path(), &coordinator.token("h1"), Sha256::of(b"agent"), None).await.unwrap();
    let threads = Threads::start().unwrap();
    let agent = Agent::run_on("h1", dir.path(), "m1", Arc::new(AgentClock), threads.link().handle(), threads.disk());
    agent.until("connected", |v| v.connected).await;
    // Whoever opens a pipe that nobody reads for writing waits, as for a disk that is frozen.
    agent.run_spool(RUN);
    let stuck = dir.path().join("spool").join(RUN.to_string()).join("acked.new");
    nix::unistd::mkfifo(&stuck, nix::sys::stat::Mode::S_IRWXU).unwrap();
    write(&agent, RUN, 0..3);
    // Its acknowledgement is what waits then.
    coordinator.store.until("evidence", |s| (!s.committed.is_empty()).then_some(())).await;
    let beats = coordinator.store.with(|s| s.beats.len());
    // Far more than the connection would live without an answer.
    let enough = 2 * (TIMES.dispatch_ms / TIMES.beat_ms) as usize;
    coordinator.store.until("beats go on", |s| (s.beats.len() > beats + enough).then_some(())).await;
    assert!(!dir.path().join("spool").join(RUN.to_string()).join("acked").exists(), "it hangs still");
    assert_eq!(coordinator.store.with(|s| s.connects.len()), 1, "on one connection");
    let _thawed = fs::File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&stuck).unwrap();
    tokio::task::spawn_blocking(move || threads.end()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn overrunning_declared_silence_is_seen() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("connected", |v| v.connected).await;
    let link = agent.link.clone();
    let _guard = tokio::task::spawn_blocking(move || link.quiet(Duration::from_millis(50))).await.unwrap();
    let deadline = SystemClock.boottime().plus_ms(10_000);
    while !matches!(coordinator.store.health("h1"), Health::QuietOverrun { .. }) {
        assert!(SystemClock.boottime() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_arrive_and_old_generations_are_not_obeyed() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    coordinator.store.with(|s| s.generations.insert(host("h1"), 5));
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("generation 5", |v| v.desired.as_ref().is_some_and(|d| d.generation == Generation(5))).await;
    let desired = |g| Order::Desired(Desired { generation: Generation(g), runs: Vec::new() });
    coordinator.store.order("h1", desired(4));
    coordinator.store.order("h1", desired(6));
    agent.until("generation 6", |v| v.desired.as_ref().is_some_and(|d| d.generation == Generation(6))).await;
    coordinator.store.order("h1", Order::Retire { reason: "released by the operator".into() });
    agent
        .until("retired", |v| {
            v.stop == Some(Stop::Retired { reason: "released by the operator".into() }) && !v.connected
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orderly_end_of_the_coordinator_is_a_goodbye() {
    let mut coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    agent.until("connected", |v| v.connected).await;
    coordinator.shut_down();
    agent.until("disconnected", |v| !v.connected).await;
    coordinator
        .store
        .until("why", |s| s.disconnects.iter().any(|(_, why)| why.contains("shutting down")).then_some(()))
        .await;
    coordinator.kill().await;
    coordinator.run();
    coordinator.store.connected("h1", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workloads_are_fetched_resumed_and_verified_by_digest() {
    let mut coordinator = Coordinator::start();
    let big: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    let workload = coordinator.add_workload(&[("tree/bin/tool", &big), ("tree/bin/small", b"small")]);
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    // A download that was cut short, and one that went bad.
    let blobs = dir.path().join("workloads").join(format!(".part-{workload}")).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.part", Sha256::of(&big))), &big[..1_234_567]).unwrap();
    fs::write(blobs.join(format!("{}.part", Sha256::of(b"small"))), b"smXl").unwrap();
    let fetch = |agent: &Agent, workload| {
        let link = agent.link.clone();
        tokio::task::spawn_blocking(move || link.fetch_workload(workload))
    };
    let e = fetch(&agent, workload).await.unwrap().unwrap_err().to_string();
    assert!(e.contains("workload-damaged"), "{e}");
    let folder = fetch(&agent, workload).await.unwrap().unwrap();
    assert_eq!(fs::read(folder.join("tree/bin/tool")).unwrap(), big);
    assert_eq!(fs::read_link(folder.join("tree/bin/link")).unwrap().to_str(), Some("tool"));
    assert!(!blobs.exists());
    // Changed on disk: noticed, and put right.
    fs::write(folder.join("tree/bin/small"), b"SMALL").unwrap();
    assert_eq!(fetch(&agent, workload).await.unwrap().unwrap(), folder);
    assert_eq!(fs::read(folder.join("tree/bin/small")).unwrap(), b"small");
    // Present and whole: needs no coordinator.
    coordinator.kill().await;
    assert_eq!(fetch(&agent, workload).await.unwrap().unwrap(), folder);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workload_that_is_not_there_or_reaches_out_of_its_tree_is_refused() {
    let coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start(&coordinator, "h1", dir.path()).await;
    let fetch = |workload| {
        let link = agent.link.clone();
        tokio::task::spawn_blocking(move || link.fetch_workload(workload))
    };
    let e = fetch(Sha256::of(b"nothing")).await.unwrap().unwrap_err().to_string();
    assert!(e.contains("no-artifact"), "{e}");
    for path in ["../outside", "/etc/passwd", "tree/bin/../../../x", "tree/nowhere/x", "tree/bin/link/x", "outside"] {
        let workload = coordinator.add_workload(&[(path, b"x")]);
        let e = fetch(workload).await.unwrap().unwrap_err();
        let drums_agent::net::FetchError::Failed { failure, .. } = e else { panic!("{e}") };
        assert_eq!((failure.code.as_str(), failure.class), ("bad-manifest", FailureClass::Permanent), "{path}");
    }
    assert!(!dir.path().join("outside").exists());
}
