//! What every backend must do.

use std::path::Path;

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockEnded, BlockKind, BlockResult, Body, Environment, Log, Record},
    experiment::Registration,
    ids::{Generation, HostId, InstallationId, RunId},
    machine::HostFacts,
    spec,
    verdict::Verdict,
};

use super::*;
use crate::core::run::Phase;

fn audit(action: &str) -> AuditRow {
    AuditRow { at: Micros(1), actor: "ada".into(), action: action.into(), detail: String::new() }
}

fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

fn facts() -> HostFacts {
    crate::samples::facts(Default::default())
}

fn registration() -> Registration {
    let text = include_str!("../../../docs/experiments/EXP-028.toml");
    Registration::freeze(spec::parse("s", text.as_bytes()).unwrap().experiment, Micros(5)).unwrap()
}

fn record(registration: &Registration, seq: u64, generation: u32) -> Record {
    let body = Body::Log(Log { level: "info".into(), target: "test".into(), text: format!("line {seq}") });
    Record {
        registration: registration.sha256,
        run: RunId([1; 6]),
        host: host("h1"),
        seq,
        at: Micros(seq as i64),
        generation: Generation(generation),
        body,
    }
}

fn with_run(s: &mut dyn Store) -> (Registration, RunState) {
    let registration = registration();
    s.add_host(&host("h1"), "sandbox", Ownership::Adopted, Micros(1)).unwrap();
    assert_eq!(s.add_registration(&registration, "the spec", false, &audit("register")).unwrap(), Registered::New);
    let hosts = vec![(host("h1"), Default::default(), Generation(1))];
    let t = RunState::place(RunId([1; 6]), registration.sha256, 1, None, hosts, Micros(10));
    s.create_run(&t.next, &t.notes, Micros(10)).unwrap();
    (registration, t.next)
}

fn redemption(key: &[u8], now: i64) -> Redemption {
    Redemption {
        secret_sha256: Sha256::of(b"secret"),
        host: host("h1"),
        installation: InstallationId([1; 4]),
        key_sha256: Sha256::of(key),
        now: Micros(now),
    }
}

/// The suite. `open` gives the same store each time it is called: what was committed must be there again.
fn contract(mut open: impl FnMut() -> Box<dyn Store>) {
    let mut s = open();
    assert_eq!(s.meta_or("installation", "a").unwrap(), "a");
    assert_eq!(s.meta_or("installation", "b").unwrap(), "a");

    // Hosts and tokens.
    let (registration, mut state) = with_run(s.as_mut());
    assert!(matches!(
        s.add_host(&host("h1"), "sandbox", Ownership::Adopted, Micros(2)),
        Err(StoreError::HostExists(_))
    ));
    s.add_token(Sha256::of(b"secret"), &host("h1"), Micros(0), Micros(100), &audit("host-add")).unwrap();
    let unknown = Redemption { secret_sha256: Sha256::of(b"other"), ..redemption(b"k", 1) };
    assert_eq!(s.redeem(&unknown).unwrap(), Err(TokenRefusal::Unknown));
    let foreign = Redemption { host: host("h2"), ..redemption(b"k", 1) };
    assert_eq!(s.redeem(&foreign).unwrap(), Err(TokenRefusal::WrongHost(host("h1"))));
    assert_eq!(s.redeem(&redemption(b"k", 100)).unwrap(), Err(TokenRefusal::Expired));
    assert_eq!(s.redeem(&redemption(b"k", 50)).unwrap(), Ok(()));
    assert_eq!(s.redeem(&redemption(b"k", 60)).unwrap(), Ok(()), "a lost reply");
    assert_eq!(s.redeem(&redemption(b"another", 60)).unwrap(), Err(TokenRefusal::Reused));
    let certificate = CertificateRow {
        sha256: Sha256::of(b"cert"),
        host: host("h1"),
        installation: InstallationId([1; 4]),
        expires: Micros(1_000),
        revoked: None,
    };
    assert!(!s.add_certificate(&certificate, Micros(60)).unwrap());
    assert_eq!(s.certificate(certificate.sha256).unwrap(), Some(certificate.clone()));
    let hello = HelloRow {
        installation: InstallationId([1; 4]),
        facts: facts(),
        agent_version: "1".into(),
        agent_sha256: Sha256::of(b"a"),
    };
    assert_eq!(s.welcomed(&host("h1"), &hello, Micros(70)).unwrap(), Generation(1));
    assert_eq!(s.next_generation(&host("h1")).unwrap(), Generation(2));
    assert_eq!(s.welcomed(&host("h1"), &hello, Micros(71)).unwrap(), Generation(2));

    // Registrations are append-only.
    assert_eq!(s.add_registration(&registration, "other text", false, &audit("again")).unwrap(), Registered::Before);
    assert_eq!(s.spec_of(registration.sha256).unwrap().unwrap(), "the spec");
    assert_eq!(s.registrations(Some(registration.experiment.id)).unwrap(), vec![registration.clone()]);
    assert!(s.registrations(Some("EXP-999".parse().unwrap())).unwrap().is_empty());
    // A second one of the same experiment only as an amendment, and each with its entry in the audit trail.
    let mut other = registration.experiment.clone();
    other.design.seed += 1;
    let later = Registration::freeze(other, Micros(6)).unwrap();
    let taken = Registered::Taken { latest: registration.sha256 };
    assert_eq!(s.add_registration(&later, "later", false, &audit("refused")).unwrap(), taken);
    assert_eq!(s.add_registration(&later, "later", true, &audit("amend")).unwrap(), Registered::New);
    assert_eq!(s.add_registration(&registration, "-", true, &audit("again")).unwrap(), Registered::Before);
    let mut fresh = registration.experiment.clone();
    fresh.id = "EXP-998".parse().unwrap();
    let fresh = Registration::freeze(fresh, Micros(7)).unwrap();
    assert_eq!(s.add_registration(&fresh, "-", true, &audit("refused")).unwrap(), Registered::NothingToAmend);
    assert_eq!(s.registrations(None).unwrap(), vec![registration.clone(), later]);
    let actions: Vec<String> = s.audits(10).unwrap().into_iter().map(|a| a.action).collect();
    assert_eq!(actions, ["register", "host-add", "amend"]);

    // Evidence: each record once, in order, late ones marked.
    let (run, h1) = (RunId([1; 6]), host("h1"));
    let r = |seq, generation| record(&registration, seq, generation);
    assert_eq!(s.commit_evidence(run, &h1, Generation(2), &[r(1, 2), r(2, 2)], Micros(80)).unwrap(), 2);
    assert_eq!(s.commit_evidence(run, &h1, Generation(2), &[r(1, 2), r(2, 2), r(3, 1)], Micros(81)).unwrap(), 3);
    assert_eq!(s.commit_evidence(run, &h1, Generation(2), &[r(5, 2)], Micros(82)).unwrap(), 3, "a gap");
    // A number means one record for ever.
    let mut other = r(2, 2);
    other.body = Body::Log(Log { level: "info".into(), target: "test".into(), text: "another".into() });
    let differs = s.commit_evidence(run, &h1, Generation(2), &[r(1, 2), other, r(3, 1), r(4, 2)], Micros(83));
    assert!(matches!(differs, Err(StoreError::Differs { seq: 2, .. })), "{differs:?}");
    // What could not be read back is not taken; what comes before it is.
    let mut endless = r(5, 2);
    let environment = Environment { duration_ms: f64::INFINITY, ..Default::default() };
    let ended = BlockEnded { block: 0, kind: BlockKind::Measured, result: BlockResult::Completed, environment };
    endless.body = Body::BlockEnded(ended);
    let batch = [r(4, 2), endless.clone()];
    assert_eq!(s.acked(run, &h1).unwrap(), 3, "nothing of the differing batch was stored");
    assert_eq!(s.commit_evidence(run, &h1, Generation(2), &batch, Micros(84)).unwrap(), 4);
    let unstorable = s.commit_evidence(run, &h1, Generation(2), &[endless], Micros(85)).unwrap_err();
    assert!(matches!(unstorable, StoreError::Unstorable { seq: 5, .. }), "{unstorable}");
    let rows = s.evidence(run, &h1, 0, 3).unwrap();
    assert_eq!(rows.iter().map(|e| (e.record.seq, e.late)).collect::<Vec<_>>(), [(1, false), (2, false), (3, true)]);
    assert_eq!(rows[1].record, r(2, 2));
    assert_eq!(s.evidence(run, &h1, 1, 1).unwrap().len(), 1);
    assert_eq!(s.acked(run, &h1).unwrap(), 4);
    assert_eq!(s.acked(run, &host("h2")).unwrap(), 0);

    // State and events in one transaction, under the generation that was read.
    let note = |text: &str| Note { kind: "k".into(), host: Some(h1.clone()), text: text.into() };
    assert_eq!(s.run(run).unwrap().unwrap().generation, 1);
    state.phase = Phase::Preflight;
    s.save_run(&state, 1, &[note("one"), note("two")], Micros(90)).unwrap();
    let lost = s.save_run(&state, 1, &[note("never")], Micros(91)).unwrap_err();
    assert!(matches!(lost, StoreError::Conflict { held: 2, expected: 1, .. }), "{lost}");
    let events = s.events(run, 1, 10).unwrap();
    assert_eq!(events.iter().map(|e| (e.number, e.note.text.as_str())).collect::<Vec<_>>(), [(2, "one"), (3, "two")]);

    // Another life of the coordinator.
    drop(s);
    let mut s = open();
    assert_eq!(s.run(run).unwrap().unwrap().state, state);
    assert_eq!(s.acked(run, &h1).unwrap(), 4);
    state.phase = Phase::Closed { verdict: Verdict::Pass };
    s.save_run(&state, 2, &[], Micros(95)).unwrap();
    assert_eq!(s.runs(Some(registration.experiment.id)).unwrap()[0].state.verdict(), Some(Verdict::Pass));

    let workload = WorkloadRow {
        sha256: Sha256::of(b"w"),
        name: "minimal".parse().unwrap(),
        bytes: 1,
        files: 2,
        added: Micros(1),
    };
    assert!(s.add_workload(&workload, &audit("workload-add")).unwrap());
    assert!(!s.add_workload(&workload, &audit("again")).unwrap());
    assert_eq!(s.audits(1).unwrap()[0].action, "workload-add");
    assert_eq!(s.workloads().unwrap(), [workload]);
    for i in 0..3 {
        let row = AuditRow { at: Micros(i), actor: "operator".into(), action: "a".into(), detail: i.to_string() };
        s.add_audit(&row).unwrap();
    }
    assert_eq!(s.audits(2).unwrap().iter().map(|a| a.detail.as_str()).collect::<Vec<_>>(), ["1", "2"]);

    // A release revokes, and a host taken back is another generation.
    s.release_host(&h1, Micros(200)).unwrap();
    assert!(s.certificate(certificate.sha256).unwrap().unwrap().revoked.is_some());
    assert_eq!(s.redeem(&redemption(b"k", 60)).unwrap(), Err(TokenRefusal::Released));
    assert!(matches!(s.release_host(&h1, Micros(201)), Err(StoreError::Missing { .. })));
    s.add_host(&h1, "metal", Ownership::Adopted, Micros(300)).unwrap();
    let row = s.host(&h1).unwrap().unwrap();
    assert_eq!((row.generation, row.facts.is_none(), row.installation), (Generation(3), true, None));

    // Enrolled again on another machine: the name moves, and the installation that held it is out.
    let of = |n: u8| CertificateRow {
        sha256: Sha256::of(&[n]),
        host: h1.clone(),
        installation: InstallationId([n; 4]),
        expires: Micros(1_000),
        revoked: None,
    };
    assert!(!s.add_certificate(&of(2), Micros(301)).unwrap());
    assert_eq!(s.welcomed(&h1, &HelloRow { installation: of(2).installation, ..hello }, Micros(302)).unwrap().0, 3);
    assert!(!s.add_certificate(&of(2), Micros(303)).unwrap(), "the same installation enrols again");
    assert!(s.host(&h1).unwrap().unwrap().facts.is_some());
    assert!(s.add_certificate(&of(3), Micros(304)).unwrap());
    s.set_facts(&h1, of(2).installation, &facts()).unwrap();
    let row = s.host(&h1).unwrap().unwrap();
    assert_eq!((row.generation.0, row.facts.is_none(), row.installation), (4, true, Some(of(3).installation)));
    assert!(s.certificate(of(2).sha256).unwrap().unwrap().revoked.is_some());
    assert!(s.certificate(of(3).sha256).unwrap().unwrap().revoked.is_none());
    people(open().as_mut());
}

/// Certificates of people: what was revoked stays there, and stays revoked.
fn people(s: &mut dyn Store) {
    let row = |n: u8, name: &str, role| PersonRow {
        certificate: Sha256([n; 32]),
        name: name.to_owned(),
        role,
        issued: Micros(i64::from(n)),
        expires: Micros(1_000),
        revoked: None,
    };
    let ada = row(1, "ada", Role::Operator);
    assert_eq!(s.add_person(&ada, false, &audit("access-add")).unwrap(), 0);
    assert!(s.add_person(&ada, false, &audit("twice")).is_err());
    assert_eq!(s.person(ada.certificate).unwrap(), Some(ada.clone()));
    assert_eq!(s.person(Sha256([9; 32])).unwrap(), None);
    s.add_person(&row(2, "bob", Role::Viewer), false, &audit("access-add")).unwrap();
    s.add_person(&row(3, "ada", Role::Viewer), false, &audit("access-add")).unwrap();
    // The name's earlier ones, nobody else's.
    assert_eq!(s.add_person(&row(4, "ada", Role::Viewer), true, &audit("access-add")).unwrap(), 2);
    let revoked: Vec<_> = s.people().unwrap().into_iter().map(|p| (p.name, p.revoked.map(|r| r.0))).collect();
    let of = |name: &str, at| (name.to_owned(), at);
    assert_eq!(revoked, [of("ada", Some(4)), of("bob", None), of("ada", Some(4)), of("ada", None)]);
    let audits = s.audits(100).unwrap().len();
    assert_eq!(s.revoke_people("nobody", Micros(7), &audit("access-revoke")).unwrap(), 0);
    assert_eq!(s.revoke_people(&Sha256([2; 32]).to_string(), Micros(7), &audit("access-revoke")).unwrap(), 1);
    assert_eq!(s.revoke_people("ada", Micros(8), &audit("access-revoke")).unwrap(), 1);
    assert_eq!(s.audits(100).unwrap().len(), audits + 2, "only what was done");
    assert_eq!(s.person(ada.certificate).unwrap().unwrap().revoked, Some(Micros(4)));
}

#[test]
fn sqlite_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite3");
    contract(|| Box::new(SqliteStore::open(&path).unwrap()));
}

#[test]
fn a_backup_is_a_store_and_never_overwrites() {
    let folder = tempfile::tempdir().unwrap();
    let mut s = SqliteStore::open(&folder.path().join("a")).unwrap();
    with_run(&mut s);
    let to = folder.path().join("b");
    s.backup(&to).unwrap();
    assert_eq!(SqliteStore::open(&to).unwrap().runs(None).unwrap().len(), 1);
    assert!(s.backup(&to).is_err());
}

#[test]
fn nothing_is_deleted_and_evidence_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut s = SqliteStore::open(&path).unwrap();
    let (registration, _) = with_run(&mut s);
    s.commit_evidence(RunId([1; 6]), &host("h1"), Generation(1), &[record(&registration, 1, 1)], Micros(1)).unwrap();
    let c = rusqlite::Connection::open(&path).unwrap();
    for table in ["host", "registration", "run", "run_event", "evidence"] {
        assert!(c.execute(&format!("DELETE FROM {table}"), []).is_err(), "{table}");
    }
    assert!(c.execute("UPDATE evidence SET record = '{}'", []).is_err());
    assert!(c.execute("UPDATE registration SET canonical = '{}'", []).is_err());
}

#[test]
fn a_store_of_a_newer_program_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    drop(SqliteStore::open(&path).unwrap());
    rusqlite::Connection::open(&path).unwrap().execute("INSERT INTO migration VALUES ('9999_later')", []).unwrap();
    assert!(matches!(SqliteStore::open(&path), Err(StoreError::TooNew { .. })));
    let garbage = folder.path().join("b");
    std::fs::write(&garbage, b"this is not a database, it is a text file of some length").unwrap();
    assert!(matches!(SqliteStore::open(Path::new(&garbage)), Err(StoreError::Open { .. })));
}
