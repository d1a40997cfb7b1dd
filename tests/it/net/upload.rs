//! Evidence in a bucket, of an agent whose coordinator is gone.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Duration};

use drums_agent::spool::RunMeta;
use drums_analysis::synthetic::Scenario;
use drums_common::{
    bucket::{self, InstallationDoc, Key, LAYOUT, RegistrationDoc, RunDoc, SegmentHead, document},
    clock::Micros,
    digest::Sha256,
    evidence::{Body, Closed, Record, Teardown},
    ids::{Generation, RunId},
    segment,
    wire::latest::{Activity, Desired, RunDesired, RunPhase},
};
use drums_coordinator::{bucket::Bucket, net::ports::Order};
use drums_tests::moto::{Moto, SECRET_ACCESS_KEY};

use super::fake::*;

fn desired(run: RunId, registration: Sha256) -> Order {
    let run = RunDesired {
        run,
        registration,
        canonical: String::new(),
        workload_sha256: Sha256::of(b"tree"),
        phase: RunPhase::Measure,
        granted: Vec::new(),
        acked_seq: 0,
        deadline_left_ms: 60_000,
    };
    Order::Desired(Desired { generation: Generation(1), runs: vec![run] })
}

/// The n-th segment in the bucket, once it is there.
async fn segment_of(bucket: &Path, index: u32) -> (SegmentHead, Vec<Record>) {
    let path = bucket.join(Key::Segment(RUN, host("h1"), index).of(INSTALLATION));
    there(&path).await;
    let object = fs::read(&path).unwrap();
    let (head, bytes) = bucket::unpack(&object).unwrap();
    let scan = segment::scan(bytes);
    assert_eq!(scan.fault, None);
    let records = scan.batches.iter().flat_map(|b| segment::records(&bytes[b.offset as usize..]).unwrap()).collect();
    (head, records)
}

/// Waits until the agent has written down the places that it was given.
async fn handed_out(state: &Path) {
    there(&state.join("spool/uploads.json")).await;
}

/// A folder has no event to wait for.
async fn there(path: &Path) {
    let seen = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("{} never came", path.display()));
}

fn append(agent: &Agent, bodies: impl IntoIterator<Item = Body>) {
    let mut writer = agent.run_spool(RUN).writer().unwrap();
    for body in bodies {
        writer.append(Generation(1), Micros(1), body).unwrap();
        writer.commit().unwrap();
    }
}

fn logs(n: usize) -> impl Iterator<Item = Body> {
    (0..n).map(|i| log(&i.to_string()))
}

#[tokio::test(flavor = "multi_thread")]
async fn evidence_of_an_agent_whose_coordinator_is_gone_goes_to_the_bucket_whole_and_once() {
    let mut coordinator = Coordinator::start();
    let dir = tempfile::tempdir().unwrap();
    let bucket = dir.path().join("bucket");
    coordinator.store.with(|s| s.bucket = Some(Bucket::Folder(bucket.clone())));
    let state = dir.path().join("agent");
    let agent = Agent::start(&coordinator, "h1", &state).await;
    agent.until("connected", |v| v.connected).await;
    coordinator.store.order("h1", desired(RUN, Sha256::of(b"registration")));
    append(&agent, logs(5));
    coordinator.store.until("all of it is committed", |s| (s.committed.len() == 5).then_some(())).await;
    handed_out(&state).await;
    assert!(!bucket.exists(), "nothing is uploaded while the coordinator is there");

    // Gone, while a block is measured: nothing goes before that has ended.
    agent.link.set_activity(Activity::Measuring { run: RUN, block: 0, arm: "drums-cold".parse().unwrap() });
    coordinator.kill().await;
    agent.until("not connected", |v| !v.connected).await;
    append(&agent, logs(3));
    // Long enough for what must not happen.
    tokio::time::sleep(Duration::from_millis(3 * TIMES.dispatch_ms)).await;
    assert!(!bucket.exists(), "nothing is uploaded while a block is measured");
    agent.link.set_activity(Activity::Idle);
    let (head, records) = segment_of(&bucket, 0).await;
    assert_eq!((head.first_seq, head.last_seq, head.closed), (1, 8, false), "also what was acknowledged");
    assert_eq!(records.len(), 8);

    // A restart loses neither the places nor how far it had got.
    agent.net.unwrap().finish(Duration::from_secs(5)).await;
    drop((agent.spool, agent.link));
    let agent = Agent::run("h1", &state, "m1").await;
    assert!(agent.link.life_left_ms(None) <= TIMES.life_ms, "nor that what it holds must end");
    append(&agent, logs(2));
    append(&agent, [Body::Closed(Closed { teardown: Teardown::Clean, reason: "over".into() })]);
    let (head, records) = segment_of(&bucket, 1).await;
    assert_eq!((head.first_seq, head.last_seq, head.closed), (9, 11, true));
    assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), [9, 10, 11]);
    assert!(agent.net.unwrap().finish(Duration::from_secs(5)).await, "what is in the bucket is not left behind");
    assert_eq!(fs::read_dir(bucket.join("01020304/runs").join(RUN.to_string()).join("h1")).unwrap().count(), 2);
}

/// Everything of a run but its evidence.
async fn describe(bucket: &Bucket, scenario: &Scenario, run: RunId) {
    let registration = scenario.registration();
    let ca_sha256 = Sha256::of(b"ca");
    let whose = InstallationDoc { layout: LAYOUT, installation: INSTALLATION, ca_sha256 };
    let frozen = RegistrationDoc {
        registered_at: registration.registered_at,
        canonical: registration.canonical.clone(),
        spec: String::new(),
    };
    let hosts = vec![host("h1"), host("h2")];
    let of_run = RunDoc { run, registration: registration.sha256, number: 1, hosts };
    for (key, bytes) in [
        (Key::Installation, document(&whose)),
        (Key::Registration(registration.sha256), document(&frozen)),
        (Key::Run(run), document(&of_run)),
    ] {
        bucket.put(&key.of(INSTALLATION), bytes).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn evidence_that_agents_left_in_s3_verifies_from_its_url_alone() {
    let dir = tempfile::tempdir().unwrap();
    let moto = Moto::start("evidence").unwrap();
    let bucket = moto.bucket("s3://evidence/lab", dir.path());
    let scenario = Scenario::exp028(1);
    let (meta, records) = scenario.run(1);
    let registration = scenario.registration().sha256;
    describe(&bucket, &scenario, meta.run).await;

    let mut coordinator = Coordinator::start();
    coordinator.store.with(|s| s.bucket = Some(bucket));
    let mut agents = Vec::new();
    for name in ["h1", "h2"] {
        let state = dir.path().join(name);
        let agent = Agent::start(&coordinator, name, &state).await;
        agent.until("connected", |v| v.connected).await;
        coordinator.store.order(name, desired(meta.run, registration));
        handed_out(&state).await;
        agents.push((agent, state));
    }
    coordinator.kill().await;
    for (agent, state) in agents {
        let of_host = RunMeta { run: meta.run, registration, host: agent.host.clone() };
        let mut writer = agent.spool.create_run(of_host).unwrap().writer().unwrap();
        for r in records.iter().filter(|r| r.host == agent.host) {
            writer.append(r.generation, r.at, r.body.clone()).unwrap();
        }
        writer.commit().unwrap();
        drop(writer);
        assert!(agent.net.unwrap().finish(PATIENCE).await, "not everything was uploaded");
        let places = state.join("spool/uploads.json");
        assert_eq!(fs::metadata(&places).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!fs::read_to_string(&places).unwrap().contains(SECRET_ACCESS_KEY));
    }

    let programs = drums_tests::programs().unwrap();
    let verify = |url: &str| {
        let mut command = Command::new(programs.join("drumsctl"));
        command.args(["verify", url]).env("DRUMS_HOME", dir.path().join("none")).envs(moto.environment());
        command.output().unwrap()
    };
    let output = verify("s3://evidence/lab");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "the scenario passes: {said}");
    assert!(said.contains(&format!("{} records recomputed", records.len())), "{said}");
    assert!(!said.contains(SECRET_ACCESS_KEY));
    let output = verify("s3://evidence/elsewhere");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no bucket of evidence"), "{said}");
}
