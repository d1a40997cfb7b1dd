//! Rows of the field's faults (docs/field-faults.md) that are about the driver and its store.

use super::*;

/// What a bundle of the run says when anybody checks it.
async fn verified(
    life: &Life,
    registration: &Registration,
    run: RunId,
) -> (Vec<Record>, drums_analysis::bundle::Verification) {
    let registration = registration.clone();
    life.store
        .call(move |s| {
            let state = s.run(run)?.unwrap().state;
            let (meta, records) = analysis_inputs(s, &state)?;
            let files = drums_analysis::bundle::files(&registration, &[meta], 1, &records).unwrap();
            let bundle: std::collections::BTreeMap<String, Vec<u8>> =
                files.into_iter().map(|f| (f.path, f.bytes)).collect();
            Ok((records, drums_analysis::bundle::verify(&bundle, Some(registration.sha256))))
        })
        .await
        .unwrap()
}

/// The box is gone with its disk, at every moment of a run: what it was told is stored is stored, whole and checkable.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_14_what_was_acknowledged_outlives_the_host_complete_and_verifiable() {
    for blocks in 1..=4 {
        let home = tempfile::tempdir().unwrap();
        let clock = Arc::new(TestClock::default());
        let life = Life::start(home.path(), clock.clone()).await;
        let mut agents = vec![Agent::new("h1"), Agent::new("h2")];
        let registration = prepare(&life, &agents).await;
        agents.iter_mut().for_each(|a| a.leave_after = blocks);
        let names: Vec<HostId> = agents.iter().map(|a| a.peer.host.clone()).collect();
        let tasks: Vec<_> = agents.into_iter().map(|a| tokio::spawn(a.live(life.control.clone()))).collect();
        connected(&life, &names.iter().collect::<Vec<_>>()).await;
        let run = life.run().await;
        let mut acknowledged = Vec::new();
        for task in tasks {
            let gone = timeout(PATIENCE, task).await.expect("the host goes").unwrap();
            acknowledged.extend(gone.records.into_iter().take(gone.acked as usize));
        }
        assert!(!acknowledged.is_empty());
        // Neither comes back: a whole life lease, and the grace after what looks like a stall.
        clock.pass(31 * 60_000);
        for _ in 0..=10 {
            looked(&life).await;
            clock.pass(1_000);
        }
        looked(&life).await;
        assert_eq!(life.closed(run).await, Verdict::Lost);
        let (stored, verification) = verified(&life, &registration, run).await;
        for record in &acknowledged {
            assert!(stored.contains(record), "{} of {} was acknowledged", record.seq, record.host);
        }
        let ended = |records: &[Record]| records.iter().filter(|r| matches!(r.body, Body::BlockEnded(_))).count();
        assert_eq!(ended(&stored), 2 * blocks, "every block that was acknowledged has its end");
        assert_eq!(verification.problems, []);
        life.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_a_cancel_outlives_a_killed_coordinator_and_is_confirmed_once() {
    let home = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock::default());
    let life = Life::start(home.path(), clock.clone()).await;
    let mut agents = vec![Agent::new("h1"), Agent::new("h2")];
    prepare(&life, &agents).await;
    agents.iter_mut().for_each(|a| a.leave_after = 1);
    let names: Vec<HostId> = agents.iter().map(|a| a.peer.host.clone()).collect();
    let mut tasks: Vec<_> = agents.into_iter().map(|a| tokio::spawn(a.live(life.control.clone()))).collect();
    connected(&life, &names.iter().collect::<Vec<_>>()).await;
    let run = life.run().await;
    let mut agents = Vec::new();
    for task in tasks.drain(..) {
        agents.push(timeout(PATIENCE, task).await.expect("the agent leaves").unwrap());
    }
    // Answered, and nobody was there to hear of it before the coordinator died: it is not asked to end, its task is.
    let state = life.control.cancel_run(run, Who::new("the operator", "")).await.unwrap();
    assert!(matches!(state.ending, Some(Ending::Cancelled { .. })));
    life.driver.abort();
    drop(life);

    let life = Life::start(home.path(), clock.clone()).await;
    assert!(matches!(life.state(run).await.ending, Some(Ending::Cancelled { .. })), "not forgotten");
    // Asked again by somebody who did not see the answer.
    let again = life.control.cancel_run(run, Who::new("somebody else", "")).await;
    assert!(again.is_err() || again.unwrap().ending == state.ending, "it has its ending");
    agents.iter_mut().for_each(|a| a.leave_after = usize::MAX);
    let tasks: Vec<_> = agents.into_iter().map(|a| tokio::spawn(a.live(life.control.clone()))).collect();
    for task in tasks {
        timeout(PATIENCE, task).await.expect("each host is told to cancel, and closes").unwrap();
    }
    assert_eq!(life.closed(run).await, Verdict::Cancelled, "not stuck in cancelling");
    let state = life.state(run).await;
    assert_eq!(state.ending, Some(Ending::Cancelled { by: "the operator".into() }));
    assert_eq!(state.teardown(), (vec![], vec![]), "every host confirmed");
    let events = life.store.call(move |s| s.events(run, 0, 10_000)).await.unwrap();
    let told = |kind: &str| events.iter().filter(|e| e.note.kind == kind).count();
    assert_eq!((told("ending"), told("closed")), (1, 1), "{:?}", events.iter().map(|e| &e.note).collect::<Vec<_>>());
    life.end().await;
}
