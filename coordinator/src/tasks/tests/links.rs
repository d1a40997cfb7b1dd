//! Connections of hosts that may not have them any more, whatever was lost on the way.

use std::sync::atomic::AtomicU8;

use super::*;
use crate::store::StoreHandle;

const FINE: u8 = 0;
/// The next piece of work is done, and its answer is lost.
const LOSE: u8 = 1;
/// The next piece of work is done, and who asked stands still before hearing of it.
const STAND: u8 = 2;
const LOSING: u8 = 3;
const STANDING: u8 = 4;

/// A store whose answers are lost or late when told so, and two ends: somebody stands, and may go on.
fn odd_store(
    home: &Path,
) -> (StoreHandle, Arc<AtomicU8>, std::sync::mpsc::Receiver<()>, std::sync::mpsc::SyncSender<()>) {
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let (go, on) = std::sync::mpsc::sync_channel(1);
    let on = Mutex::new(on);
    let mode = Arc::new(AtomicU8::new(FINE));
    let asked = mode.clone();
    // Asked before and after each piece of work.
    let reachable = move || {
        let next = |m| match m {
            LOSE => Some(LOSING),
            STAND => Some(STANDING),
            LOSING | STANDING => Some(FINE),
            _ => None,
        };
        match asked.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(LOSING) => false,
            Ok(STANDING) => {
                tell.send(()).unwrap();
                on.lock().unwrap().recv().unwrap();
                true
            }
            _ => true,
        }
    };
    let store: Box<dyn crate::store::Store> = Box::new(SqliteStore::open(&home.join("store")).unwrap());
    (StoreHandle::of_caller(Arc::new(Mutex::new(store)), Arc::new(reachable)), mode, told, go)
}

fn retired(accepted: &crate::net::ports::Accepted) -> bool {
    matches!(&*accepted.orders.borrow(), Order::Retire { .. })
}

/// What was stored stands, although the store went away before it said so: the operator was told that it may be so.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_host_whose_release_or_move_was_stored_unheard_is_sent_away_all_the_same() {
    let home = tempfile::tempdir().unwrap();
    let (store, mode, ..) = odd_store(home.path());
    let life = Life::start_on(store, home.path(), Arc::default()).await;
    let (life, agents, accepted) = idle_hosts_of(life).await;
    mode.store(LOSE, Ordering::SeqCst);
    life.control.release(agents[0].peer.host.clone(), test()).await.unwrap_err();
    looked(&life).await;
    assert!(retired(&accepted[0]), "{:?}", accepted[0].orders.borrow());
    assert!(!retired(&accepted[1]), "the other stays");

    let moved =
        Peer { installation: InstallationId([2; 4]), certificate: Sha256::of(b"new"), ..agents[1].peer.clone() };
    mode.store(LOSE, Ordering::SeqCst);
    life.control.enrolled(moved, Micros(i64::MAX)).await.unwrap_err();
    looked(&life).await;
    assert!(retired(&accepted[1]), "{:?}", accepted[1].orders.borrow());
    life.end().await;
}

/// Its certificate was looked at before the release, and its connection is made after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_host_that_connects_while_it_is_released_is_sent_away() {
    let home = tempfile::tempdir().unwrap();
    let (store, mode, stands, go) = odd_store(home.path());
    let life = Life::start_on(store, home.path(), Arc::default()).await;
    let (life, agents, accepted) = idle_hosts_of(life).await;
    drop(accepted);
    let (control, peer, hello) = (life.control.clone(), agents[0].peer.clone(), agents[0].hello());
    mode.store(STAND, Ordering::SeqCst);
    let connecting = tokio::spawn(async move { control.on_connect(&peer, hello).await });
    tokio::task::spawn_blocking(move || stands.recv().unwrap()).await.unwrap();
    life.control.release(agents[0].peer.host.clone(), test()).await.unwrap();
    go.send(()).unwrap();
    let accepted = connecting.await.unwrap().expect("it was let in before");
    looked(&life).await;
    assert!(retired(&accepted), "{:?}", accepted.orders.borrow());
    life.end().await;
}

/// The next machine of that name is another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_host_takes_its_ordered_build_along() {
    let home = tempfile::tempdir().unwrap();
    let (life, agents, _accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let host = agents[0].peer.host.clone();
    let build = drums_common::wire::latest::Upgrade { sha256: Sha256::of(b"build"), bytes: 1, ordered: Micros(1) };
    life.control.order_upgrade(&host, Some(build), &test()).await.unwrap();
    life.control.release(host.clone(), test()).await.unwrap();
    let (again, audit) = (host.clone(), AuditRow::new(Micros(1), test(), "host-add"));
    life.store.call(move |s| s.add_host(&again, "sandbox", Ownership::Adopted, &audit)).await.unwrap();
    let stored = life.store.call({
        let host = host.clone();
        move |s| s.host(&host)
    });
    assert_eq!(stored.await.unwrap().unwrap().upgrade, None);
    assert_eq!(life.control.upgrades().get(&host), None, "what is at hand is what is stored");
    life.end().await;
}

/// Runs that a host makes up are remembered, so that each is reported once; they must not keep another host's run open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_makes_runs_up_keeps_nobodys_refused_evidence_from_ending_its_run() {
    let home = tempfile::tempdir().unwrap();
    let (life, mut agents, accepted) = idle_hosts(home.path(), &Arc::default()).await;
    let run = life.run().await;
    looked(&life).await;
    let sha = registration().sha256;
    let log = |text: &str| {
        Body::Log(drums_common::evidence::Log { level: "info".into(), target: "t".into(), text: text.into() })
    };
    for n in 0..REFUSED_EVIDENCE as u32 {
        let [.., a, b] = n.to_be_bytes();
        let made_up = RunId([9, 9, 9, 9, a, b]);
        agents[1].records.clear();
        agents[1].write(sha, made_up, accepted[1].welcome.generation, log("x"));
        let batch = EvidenceBatch { run: made_up, records: agents[1].records.clone() };
        let refused = life.control.commit_evidence(&agents[1].peer, batch).await.unwrap_err();
        assert_eq!(refused.code, "no-such-run");
    }
    let agent = &mut agents[0];
    agent.write(sha, run, accepted[0].welcome.generation, log("one"));
    let batch = |a: &Agent| EvidenceBatch { run, records: a.records.clone() };
    life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap();
    agent.records[0].body = log("another");
    life.control.commit_evidence(&agent.peer, batch(agent)).await.unwrap_err();
    looked(&life).await;
    let ending = life.state(run).await.ending;
    assert!(matches!(&ending, Some(Ending::Interrupted { .. })), "{ending:?}");
    life.end().await;
}
