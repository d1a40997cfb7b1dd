//! A store's life in steps of one transaction each, for the tests of crashes and of past forms.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{Body, Log, Record},
    experiment::Registration,
    ids::{Generation, HostId, InstallationId, RunId},
    spec,
};

use super::*;
use crate::{
    core::run::Phase,
    net::ports::{Proven, Shown},
    pki::Role,
};

type Step = fn(&mut dyn Store) -> Result<(), StoreError>;

/// Each is one transaction, and each can be told from the outside.
pub(super) const STEPS: [Step; 16] = [
    |s| s.meta_or("installation", "01020304", &row(1, "init")).map(drop),
    |s| s.add_host(&h1(), "metal", Ownership::Adopted, &row(2, "host-add").host(&h1())),
    |s| s.add_token(Sha256::of(b"secret"), &h1(), Micros(100), &row(3, "token-add").host(&h1())),
    |s| {
        let certificate = CertificateRow {
            sha256: Sha256::of(b"certificate"),
            host: h1(),
            installation: InstallationId([1; 4]),
            expires: Micros(1_000),
            revoked: None,
        };
        s.add_certificate(&certificate, &row(4, "enrolled").host(&h1())).map(drop)
    },
    |s| s.welcomed(&h1(), &hello(), &row(5, "connected").host(&h1())).map(drop),
    |s| {
        let (sha256, name) = (Sha256::of(b"tree"), "minimal".parse().unwrap());
        let workload = WorkloadRow { sha256, name, bytes: 10, files: 2, added: Micros(6) };
        s.add_workload(&workload, &row(6, "workload-add")).map(drop)
    },
    |s| s.add_registration(&registration(), "the spec", false, &row(7, "register")).map(drop),
    |s| s.create_run(&placed().0, &placed().1, &row(8, "run").run(RUN)),
    |s| s.commit_evidence(RUN, &h1(), Generation(1), &records(1..6), Micros(9)).map(drop),
    |s| {
        let state = RunState { phase: Phase::Preflight, ..placed().0 };
        let note = |text: &str| Note { kind: "noted".into(), host: Some(h1()), text: text.into() };
        s.save_run(&state, 1, &[note("one"), note("two")], Micros(10), Some(&row(10, "cancel").run(RUN)))
    },
    |s| s.commit_evidence(RUN, &h1(), Generation(2), &records(4..9), Micros(11)).map(drop),
    |s| s.add_launch_token(LAUNCH_SECRET, &h1(), Micros(200), &launched(), &row(14, "token-add").host(&h1())),
    |s| s.launched_as(launched().launch, &started(), &row(15, "launched")),
    |s| {
        let proven =
            Proven { launch: launched().launch, instance: started().id, document_sha256: Sha256::of(b"document") };
        let redemption = Redemption {
            secret_sha256: LAUNCH_SECRET,
            host: h1(),
            installation: InstallationId([1; 4]),
            key_sha256: Sha256::of(b"key"),
            shown: Shown::Proven(proven),
            from: "192.0.2.7:50000".parse().unwrap(),
            now: Micros(16),
        };
        s.redeem(&redemption, &row(16, "token-used").host(&h1())).map(|r| r.unwrap())
    },
    |s| s.release_host(&h1(), &row(12, "release").host(&h1())),
    |s| {
        let (certificate, name, role) = (Sha256::of(b"person"), "bob".to_owned(), Role::Viewer);
        let bob = PersonRow { certificate, name, role, issued: Micros(13), expires: Micros(1_000), revoked: None };
        s.add_person(&bob, false, &row(13, "access-add")).map(drop)
    },
];

const LAUNCH_SECRET: Sha256 = Sha256([0x4c; 32]);

pub(super) fn launched() -> Launched {
    Launched {
        launch: "drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0002".parse().unwrap(),
        account: "123456789012".to_owned(),
        region: "eu-central-1".parse().unwrap(),
        image: "ami-0123456789abcdef0".parse().unwrap(),
        kind: "c8i.2xlarge".parse().unwrap(),
        instance: None,
    }
}

pub(super) fn started() -> Started {
    Started { id: "i-0123456789abcdef0".parse().unwrap(), at: Micros(1_796_065_801_000_000) }
}

pub(super) const RUN: RunId = RunId([1; 6]);

pub(super) fn h1() -> HostId {
    "h1".parse().unwrap()
}

fn row(at: i64, action: &str) -> AuditRow {
    AuditRow::new(Micros(at), Who::new("ada", "192.0.2.7:50000"), action)
}

fn hello() -> HelloRow {
    HelloRow {
        installation: InstallationId([1; 4]),
        certificate: Sha256::of(b"certificate"),
        facts: crate::samples::facts(Default::default()),
        agent_version: "1".into(),
        agent_sha256: Sha256::of(b"agent"),
    }
}

fn registration() -> Registration {
    let text = include_str!("../tasks/data/two-arms.toml");
    let mut experiment = spec::parse("two-arms.toml", text.as_bytes()).unwrap().experiment;
    experiment.workload.sha256 = Some(Sha256::of(b"tree"));
    Registration::freeze(experiment, Micros(7)).unwrap()
}

fn placed() -> (RunState, Vec<Note>) {
    let hosts = vec![(h1(), Default::default(), Generation(1))];
    let t = RunState::place(RUN, registration().sha256, 1, None, hosts, Micros(8));
    (t.next, t.notes)
}

fn records(numbers: std::ops::Range<u64>) -> Vec<Written> {
    let body = |seq| Body::Log(Log { level: "info".into(), target: "test".into(), text: format!("line {seq}") });
    let records: Vec<_> = numbers
        .map(|seq| Record {
            registration: registration().sha256,
            run: RUN,
            host: h1(),
            seq,
            at: Micros(seq as i64),
            generation: Generation(1),
            body: body(seq),
        })
        .collect();
    Written::all(&records).unwrap()
}

/// Everything that a store holds, as text. Without the rows of a lease and the numbers of the trail, which depend on how
/// often a store was opened.
pub(super) fn content(s: &mut dyn Store) -> String {
    let audits = s.audits(&AuditQuery::latest(1_000)).unwrap();
    let audits: Vec<AuditRow> = audits.into_iter().map(|a| a.row).filter(|r| r.action != "lead").collect();
    format!(
        "{:#?}\n",
        (
            s.hosts().unwrap(),
            s.certificate(Sha256::of(b"certificate")).unwrap(),
            s.workloads().unwrap(),
            s.registrations(None).unwrap(),
            s.runs(None).unwrap(),
            s.events(RUN, 0, 100).unwrap(),
            s.evidence(RUN, &h1(), 0, 100).unwrap(),
            s.people().unwrap(),
            s.bound(LAUNCH_SECRET, Some(Sha256::of(b"document"))).unwrap(),
            audits,
        )
    )
}
