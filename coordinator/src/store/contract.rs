//! What every backend must do.

mod instances;

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
    at(1, action)
}

fn at(now: i64, action: &str) -> AuditRow {
    AuditRow::new(Micros(now), Who::new("ada", "192.0.2.7:50000"), action)
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
    s.add_host(&host("h1"), "sandbox", Ownership::Adopted, &audit("host-add")).unwrap();
    assert_eq!(s.add_registration(&registration, "the spec", false, &audit("register")).unwrap(), Registered::New);
    let hosts = vec![(host("h1"), Default::default(), Generation(1))];
    let t = RunState::place(RunId([1; 6]), registration.sha256, 1, None, hosts, Micros(10));
    s.create_run(&t.next, &t.notes, &at(10, "run").run(t.next.id)).unwrap();
    (registration, t.next)
}

fn redemption(key: &[u8], now: i64) -> Redemption {
    Redemption {
        secret_sha256: Sha256::of(b"secret"),
        host: host("h1"),
        installation: InstallationId([1; 4]),
        key_sha256: Sha256::of(key),
        shown: crate::net::ports::Shown::Nothing,
        from: "192.0.2.7:50000".parse().unwrap(),
        now: Micros(now),
    }
}

/// The suite. `open` gives the same store each time it is called: what was committed must be there again.
fn contract(mut open: impl FnMut() -> Box<dyn Store>) {
    let mut s = open();
    assert_eq!(s.meta_or("installation", "a", &audit("init")).unwrap(), "a");
    assert_eq!(s.meta_or("installation", "b", &audit("init again")).unwrap(), "a");

    // Hosts and tokens.
    let (registration, mut state) = with_run(s.as_mut());
    assert!(matches!(
        s.add_host(&host("h1"), "sandbox", Ownership::Adopted, &at(2, "twice")),
        Err(StoreError::HostExists(_))
    ));
    s.add_token(Sha256::of(b"secret"), &host("h1"), Micros(100), &at(0, "token-add")).unwrap();
    let unknown = Redemption { secret_sha256: Sha256::of(b"other"), ..redemption(b"k", 1) };
    assert_eq!(s.redeem(&unknown, &audit("refused")).unwrap(), Err(TokenRefusal::Unknown));
    let foreign = Redemption { host: host("h2"), ..redemption(b"k", 1) };
    assert_eq!(s.redeem(&foreign, &audit("refused")).unwrap(), Err(TokenRefusal::WrongHost(host("h1"))));
    assert_eq!(s.redeem(&redemption(b"k", 100), &audit("repeated")).unwrap(), Err(TokenRefusal::Expired));
    assert_eq!(s.redeem(&redemption(b"k", 50), &at(50, "token-used")).unwrap(), Ok(()));
    assert_eq!(s.redeem(&redemption(b"k", 60), &audit("repeated")).unwrap(), Ok(()), "a lost reply");
    assert_eq!(s.redeem(&redemption(b"another", 60), &audit("repeated")).unwrap(), Err(TokenRefusal::Reused));
    let certificate = CertificateRow {
        sha256: Sha256::of(b"cert"),
        host: host("h1"),
        installation: InstallationId([1; 4]),
        expires: Micros(1_000),
        revoked: None,
    };
    assert!(!s.add_certificate(&certificate, &at(60, "enrolled")).unwrap());
    assert_eq!(s.certificate(certificate.sha256).unwrap(), Some(certificate.clone()));
    let hello = HelloRow {
        installation: InstallationId([1; 4]),
        certificate: certificate.sha256,
        facts: facts(),
        agent_version: "1".into(),
        agent_sha256: Sha256::of(b"a"),
    };
    assert_eq!(s.welcomed(&host("h1"), &hello, &at(70, "connected")).unwrap(), Generation(1));
    assert_eq!(s.next_generation(&host("h1"), &audit("fenced")).unwrap(), Generation(2));
    assert_eq!(s.welcomed(&host("h1"), &hello, &at(71, "connected")).unwrap(), Generation(2));

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
    // Each change left its row, and what changed nothing left none.
    let wanted = "init host-add register run placed token-add token-used enrolled connected fenced connected amend";
    assert_eq!(actions(s.as_mut()).join(" "), wanted);

    // Evidence: each record once, in order, late ones marked.
    let (run, h1) = (RunId([1; 6]), host("h1"));
    let r = |seq, generation| record(&registration, seq, generation);
    let commit = |s: &mut dyn Store, records: &[Record], now| {
        let records = Written::all(records).unwrap();
        s.commit_evidence(run, &h1, Generation(2), &records, Micros(now)).map(|s| (s.before, s.through))
    };
    assert_eq!(commit(s.as_mut(), &[r(1, 2), r(2, 2)], 80).unwrap(), (0, 2));
    assert_eq!(commit(s.as_mut(), &[r(1, 2), r(2, 2), r(3, 1)], 81).unwrap(), (2, 3));
    assert_eq!(commit(s.as_mut(), &[r(5, 2)], 82).unwrap(), (3, 3), "a gap");
    // A number means one record for ever.
    let mut other = r(2, 2);
    other.body = Body::Log(Log { level: "info".into(), target: "test".into(), text: "another".into() });
    let differs = commit(s.as_mut(), &[r(1, 2), other, r(3, 1), r(4, 2)], 83);
    assert!(matches!(differs, Err(StoreError::Differs { seq: 2, .. })), "{differs:?}");
    // What could not be read back is not taken; what comes before it is.
    let mut endless = r(5, 2);
    let environment = Environment { duration_ms: f64::INFINITY, ..Default::default() };
    let ended = BlockEnded { block: 0, kind: BlockKind::Measured, result: BlockResult::Completed, environment };
    endless.body = Body::BlockEnded(ended);
    let batch = [r(4, 2), endless.clone()];
    assert_eq!(s.acked(run, &h1).unwrap(), 3, "nothing of the differing batch was stored");
    assert_eq!(commit(s.as_mut(), &batch, 84).unwrap(), (3, 4));
    let unstorable = commit(s.as_mut(), &[endless], 85).unwrap_err();
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
    s.save_run(&state, 1, &[note("one"), note("t\0wo")], Micros(90), Some(&at(90, "cancel").run(run))).unwrap();
    let lost = s.save_run(&state, 1, &[note("never")], Micros(91), Some(&at(91, "never"))).unwrap_err();
    assert!(matches!(lost, StoreError::Conflict { held: 2, expected: 1, .. }), "{lost}");
    let events = s.events(run, 1, 10).unwrap();
    assert_eq!(
        events.iter().map(|e| (e.number, e.note.text.as_str())).collect::<Vec<_>>(),
        [(2, "one"), (3, "t\u{fffd}wo")]
    );

    // Another life of the coordinator.
    drop(s);
    let mut s = open();
    assert_eq!(s.run(run).unwrap().unwrap().state, state);
    assert_eq!(s.acked(run, &h1).unwrap(), 4);
    state.phase = Phase::Closed { verdict: Verdict::Pass };
    s.save_run(&state, 2, &[], Micros(95), None).unwrap();
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
    assert_eq!(s.audits(&AuditQuery::latest(1)).unwrap()[0].row.action, "workload-add");
    assert_eq!(s.workloads().unwrap(), [workload]);
    trail(s.as_mut(), run, &h1);

    // An order of another build stays until it is met or taken back, and is nothing to a host that comes back.
    let upgrade = Upgrade { sha256: Sha256::of(b"build"), bytes: 7, ordered: Micros(190) };
    s.set_upgrade(&h1, Some(&upgrade), &at(190, "upgrade")).unwrap();
    assert_eq!(s.host(&h1).unwrap().unwrap().upgrade.as_ref(), Some(&upgrade));
    s.set_upgrade(&h1, None, &at(191, "upgraded")).unwrap();
    assert_eq!(s.host(&h1).unwrap().unwrap().upgrade, None);
    s.set_upgrade(&h1, Some(&upgrade), &at(192, "upgrade")).unwrap();
    let nobody = s.set_upgrade(&host("h7"), None, &audit("upgrade"));
    assert!(matches!(nobody, Err(StoreError::Missing { .. })), "{nobody:?}");

    // A release revokes, and a host taken back is another generation.
    s.release_host(&h1, &at(200, "release")).unwrap();
    assert!(matches!(s.set_upgrade(&h1, None, &audit("upgrade")), Err(StoreError::Missing { .. })));
    assert!(s.certificate(certificate.sha256).unwrap().unwrap().revoked.is_some());
    assert_eq!(s.redeem(&redemption(b"k", 60), &audit("repeated")).unwrap(), Err(TokenRefusal::Released));
    assert!(matches!(s.release_host(&h1, &at(201, "release")), Err(StoreError::Missing { .. })));
    s.add_host(&h1, "metal", Ownership::Adopted, &at(300, "host-add")).unwrap();
    let row = s.host(&h1).unwrap().unwrap();
    assert_eq!((row.generation, row.facts.is_none(), row.installation), (Generation(3), true, None));
    assert_eq!(row.upgrade, None);

    // Enrolled again on another machine: the name moves, and the installation that held it is out.
    let of = |n: u8| CertificateRow {
        sha256: Sha256::of(&[n]),
        host: h1.clone(),
        installation: InstallationId([n; 4]),
        expires: Micros(1_000),
        revoked: None,
    };
    assert!(!s.add_certificate(&of(2), &at(301, "enrolled")).unwrap());
    let hello = HelloRow { installation: of(2).installation, certificate: of(2).sha256, ..hello };
    assert_eq!(s.welcomed(&h1, &hello, &at(302, "connected")).unwrap().0, 3);
    assert!(!s.add_certificate(&of(2), &at(303, "enrolled")).unwrap(), "the same installation enrols again");
    assert!(s.host(&h1).unwrap().unwrap().facts.is_some());
    assert!(s.add_certificate(&of(3), &at(304, "enrolled")).unwrap());
    s.set_facts(&h1, of(2).installation, &facts(), &at(305, "facts of another")).unwrap();
    let row = s.host(&h1).unwrap().unwrap();
    assert_eq!((row.generation.0, row.facts.is_none(), row.installation), (4, true, Some(of(3).installation)));
    assert!(s.certificate(of(2).sha256).unwrap().unwrap().revoked.is_some());
    assert!(s.certificate(of(3).sha256).unwrap().unwrap().revoked.is_none());
    s.set_facts(&h1, of(3).installation, &facts(), &at(306, "facts")).unwrap();

    // A renewed certificate takes the place of the one before when it is used, not when it is issued: the answer that
    // carried it may have been lost.
    let next = CertificateRow { sha256: Sha256::of(b"next"), ..of(3) };
    assert!(!s.add_certificate(&next, &at(307, "renewed")).unwrap());
    let revoked = |s: &mut dyn Store, sha256| s.certificate(sha256).unwrap().unwrap().revoked;
    let shown = |certificate| HelloRow { installation: of(3).installation, certificate, ..hello.clone() };
    s.welcomed(&h1, &shown(of(3).sha256), &at(308, "connected")).unwrap();
    assert_eq!((revoked(s.as_mut(), of(3).sha256), revoked(s.as_mut(), next.sha256)), (None, None));
    s.welcomed(&h1, &shown(next.sha256), &at(309, "connected")).unwrap();
    assert_eq!((revoked(s.as_mut(), of(3).sha256), revoked(s.as_mut(), next.sha256)), (Some(Micros(309)), None));
    let tail = actions(s.as_mut()).split_off(16).join(" ");
    let wanted = "noted noted noted upgrade upgraded upgrade release host-add enrolled connected enrolled enrolled facts renewed connected connected";
    assert_eq!(tail, wanted);
    drop(s);
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
    let audits = actions(s).len();
    assert_eq!(s.revoke_people("nobody", &at(7, "access-revoke")).unwrap(), 0);
    assert_eq!(s.revoke_people(&Sha256([2; 32]).to_string(), &at(7, "access-revoke")).unwrap(), 1);
    assert_eq!(s.revoke_people("ada", &at(8, "access-revoke")).unwrap(), 1);
    assert_eq!(actions(s).len(), audits + 2, "only what was done");
    assert_eq!(s.person(ada.certificate).unwrap().unwrap().revoked, Some(Micros(4)));
}

/// Without those of a lease, which not every backend has.
fn actions(s: &mut dyn Store) -> Vec<String> {
    let all = s.audits(&AuditQuery::latest(100)).unwrap().into_iter().map(|a| a.row.action);
    all.filter(|a| a != "lead").collect()
}

/// What is asked of the audit trail.
fn trail(s: &mut dyn Store, run: RunId, h1: &HostId) {
    for i in 0..3 {
        let row = at(1_000 + i, "noted").detail(&format!("{i}"));
        s.add_audit(&row).unwrap();
    }
    let mut ask = |q: AuditQuery| s.audits(&q).unwrap();
    let details = |rows: &[AuditEntry]| rows.iter().map(|a| a.row.detail.clone()).collect::<Vec<_>>();
    let latest = ask(AuditQuery::latest(2));
    assert_eq!(details(&latest), ["1", "2"]);
    assert_eq!(latest[1].row, at(1_002, "noted").detail("2"), "who, from where, what, when");
    let after = AuditQuery { after: Some(latest[0].number), ..AuditQuery::latest(10) };
    assert_eq!(ask(after), latest[1..]);
    let since = |limit| AuditQuery { since: Some(Micros(1_001)), ..AuditQuery::latest(limit) };
    let noted = |a: &AuditEntry| a.row.action == "noted";
    let found: Vec<_> = ask(since(10)).into_iter().filter(noted).collect();
    assert_eq!(details(&found), ["1", "2"]);
    assert_eq!(ask(since(1)), ask(since(10))[..1], "the first since then");
    let of_run: Vec<_> = ask(AuditQuery { run: Some(run), ..AuditQuery::latest(10) });
    assert_eq!(of_run.iter().map(|a| a.row.action.as_str()).collect::<Vec<_>>(), ["run", "placed", "cancel", "k", "k"]);
    let notes = AuditQuery { run: Some(run), host: Some(h1.clone()), ..AuditQuery::latest(10) };
    assert_eq!(details(&ask(notes)), ["one", "t\u{fffd}wo"]);
}

#[test]
fn sqlite_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite3");
    contract(|| Box::new(SqliteStore::open(&path).unwrap()));
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::time::Duration;

    use drums_common::clock::Clock as _;
    use drums_infra::postgres::Server;

    use super::*;
    use crate::{clock::SystemClock, config::PostgresConfig, standby::Held, term::Term};

    const LONG: Duration = Duration::from_secs(600);

    fn open(url: &str) -> PostgresStore {
        PostgresStore::open(&PostgresConfig::new(url)).unwrap()
    }

    pub(super) fn leading(url: &str) -> PostgresStore {
        let mut s = open(url);
        assert!(matches!(s.take("node", "test", LONG).unwrap(), Taken::Ours { .. }));
        s
    }

    #[test]
    fn postgres_keeps_the_contract() {
        let server = Server::start().unwrap();
        contract(|| Box::new(leading(&server.url())));
        // Nothing is deleted and nothing that was observed is changed, whoever asks the server.
        for table in ["host", "registration", "run", "run_event", "evidence", "audit", "lease"] {
            for how in ["DELETE FROM", "TRUNCATE"] {
                assert!(server.psql("drums", &format!("{how} {table} CASCADE")).is_err(), "{how} {table}");
            }
        }
        for change in ["evidence SET record = '{}'", "registration SET canonical = '{}'", "audit SET actor = 'x'"] {
            assert!(server.psql("drums", &format!("UPDATE {change}")).is_err(), "{change}");
        }
        // A store of a newer program.
        server.psql("drums", "INSERT INTO migration VALUES ('9999_later')").unwrap();
        let newer = PostgresStore::open(&PostgresConfig::new(server.url()));
        assert!(matches!(newer, Err(StoreError::TooNew { found, .. }) if found == "9999_later"));
    }

    #[test]
    fn only_the_holder_of_the_lease_writes() {
        let server = Server::start().unwrap();
        let ttl = Duration::from_millis(1_500);
        let row = audit("x");
        let mut nobody = open(&server.url());
        assert!(matches!(nobody.add_audit(&row), Err(StoreError::NotLeading { .. })));

        let mut first = open(&server.url());
        assert_eq!(first.take("a", "first", ttl).unwrap(), Taken::Ours { epoch: 1 });
        first.add_audit(&row).unwrap();
        let mut second = open(&server.url());
        let held = second.take("b", "second", ttl).unwrap();
        assert!(matches!(&held, Taken::Theirs { name, epoch: 1, left_ms: 1..=1_500 } if name == "first"), "{held:?}");
        assert!(matches!(second.add_audit(&row), Err(StoreError::NotLeading { .. })));
        assert!(second.renew(1, ttl).unwrap(), "whoever knows the epoch is its holder");
        let (clock, term) = (SystemClock, Term::default());
        let mut held = Held { epoch: 1, ttl, renewed: clock.boottime(), term: term.clone() };
        held.renew(&mut first, &clock).unwrap();
        assert!(term.holds(clock.boottime()), "it may answer agents");

        // It runs out; until somebody takes it, its holder may still write and renew.
        let expired = || server.psql("drums", "SELECT expires_us < now_us() FROM lease").unwrap() == "t";
        assert!(drums_infra::fleet::wait_until(Duration::from_secs(30), expired));
        assert!(!term.holds(clock.boottime()), "but answers nobody by itself");
        first.add_audit(&row).unwrap();
        assert_eq!(second.take("b", "second", ttl).unwrap(), Taken::Ours { epoch: 2 });
        // From here on the first one writes nothing, by none of its methods.
        let superseded = |r: Result<(), StoreError>| assert!(matches!(r, Err(StoreError::Superseded { epoch: 1 })));
        assert!(held.renew(&mut first, &clock).unwrap_err().contains("taken over"));
        assert!(!term.holds(clock.boottime()));
        superseded(first.add_audit(&row));
        superseded(first.add_host(&host("h9"), "metal", Ownership::Adopted, &row));
        superseded(first.meta_or("k", "v", &row).map(|_| ()));
        superseded(first.commit_evidence(RunId([1; 6]), &host("h1"), Generation(1), &[], Micros(1)).map(|_| ()));
        assert!(first.hosts().unwrap().is_empty(), "it may read");
        // A restarted coordinator takes its own lease back at once; given up, it is anybody's.
        let mut again = open(&server.url());
        assert_eq!(again.take("b", "second, again", LONG).unwrap(), Taken::Ours { epoch: 3 });
        again.give_up(3).unwrap();
        assert_eq!(first.take("a", "first", LONG).unwrap(), Taken::Ours { epoch: 4 });
        let led = first.audits(&AuditQuery::latest(10)).unwrap();
        let led: Vec<_> = led.iter().filter(|a| a.row.action == "lead").map(|a| a.row.detail.as_str()).collect();
        assert_eq!(led, ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]);
    }

    #[test]
    fn a_writer_that_stands_still_holds_a_take_over_back_only_for_seconds() {
        let server = Server::start().unwrap();
        let mut first = open(&server.url());
        first.take("a", "first", Duration::from_millis(1)).unwrap();
        // As a coordinator does that is stopped between two statements.
        let mut stalled = first.write("stand still").unwrap();
        stalled.execute("INSERT INTO meta (key, value) VALUES ('half', 'done')", &[]).unwrap();
        let mut second = open(&server.url());
        let begun = std::time::Instant::now();
        let taken = second.take("b", "second", LONG).unwrap();
        assert_eq!(taken, Taken::Ours { epoch: 2 });
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
        assert!(stalled.commit().is_err());
        assert_eq!(second.meta("half").unwrap(), None);
    }

    #[test]
    fn a_server_that_is_away_is_said_to_be_and_nothing_is_lost() {
        let mut server = Server::start().unwrap();
        let mut s = leading(&server.url());
        let (registration, state) = with_run(&mut s);
        let (run, h1) = (state.id, host("h1"));
        let records = Written::all(&[record(&registration, 1, 1), record(&registration, 2, 1)]).unwrap();
        assert_eq!(s.commit_evidence(run, &h1, Generation(1), &records[..1], Micros(1)).unwrap().through, 1);
        server.stop();
        for _ in 0..2 {
            let e = s.commit_evidence(run, &h1, Generation(1), &records, Micros(2)).unwrap_err();
            assert!(e.is_away(), "{e:?}");
            assert!(s.runs(None).unwrap_err().is_away());
        }
        let Err(e) = PostgresStore::open(&PostgresConfig::new(server.url())) else { panic!("it is away") };
        let words = drums_common::telemetry::chain(&e);
        assert!(e.is_away() && words.contains("cannot be reached") && words.contains("drums-pg-"), "{words}");
        server.resume().unwrap();
        let back = || s.commit_evidence(run, &h1, Generation(1), &records, Micros(3)).is_ok_and(|s| s.through == 2);
        let mut back = back;
        assert!(drums_infra::fleet::wait_until(Duration::from_secs(10), &mut back), "it comes back by itself");
    }

    #[test]
    fn addresses_that_are_unsafe_or_useless_are_refused_with_what_to_do() {
        let cases = [
            ("postgres://drums:secret@127.0.0.1/drums", "password_file"),
            ("postgres://drums@127.0.0.1/drums", "ca"),
            ("postgres:///drums", "names no server"),
            ("mysql://x", "used wrongly"),
        ];
        for (url, want) in cases {
            let Err(e) = PostgresStore::open(&PostgresConfig::new(url)) else { panic!("{url}") };
            let words = drums_common::telemetry::chain(&e);
            assert!(words.contains(want) && !words.contains("secret"), "{url}: {words}");
        }
        let server = Server::start().unwrap();
        let Err(e) = PostgresStore::open(&PostgresConfig::new(server.url_of("nothing"))) else { panic!("no database") };
        assert!(matches!(e, StoreError::Open { .. }), "{e:?}");
        let words = drums_common::telemetry::chain(&e);
        assert!(words.contains("does not exist"), "{words}");
    }

    #[test]
    fn over_a_network_the_server_shows_a_certificate_of_the_named_ca() {
        let ca = |name: &str| {
            let mut p = rcgen::CertificateParams::new(Vec::new()).unwrap();
            p.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            p.distinguished_name.push(rcgen::DnType::CommonName, name);
            let key = rcgen::KeyPair::generate().unwrap();
            let pem = p.self_signed(&key).unwrap().pem();
            (rcgen::Issuer::new(p, key), pem)
        };
        let (ours, other) = (ca("ours"), ca("another"));
        let key = rcgen::KeyPair::generate().unwrap();
        let here = drums_infra::loopback::Loopback::claim().unwrap();
        let address = here.socket().unwrap();
        let leaf = rcgen::CertificateParams::new(vec![address.ip().to_string()]).unwrap();
        let leaf = leaf.signed_by(&key, &ours.0).unwrap().pem();
        let mut server = Server::start().unwrap();
        server.stop();
        for (name, setting, text) in [("crt", "ssl_cert_file", leaf), ("key", "ssl_key_file", key.serialize_pem())] {
            let path = server.keep(name, &text).unwrap();
            server.set(&format!("{setting}={}", path.display()));
        }
        server.set("ssl=on");
        server.listen(address);
        server.resume().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, pem: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, pem).unwrap();
            PostgresConfig { ca: Some(path), ..PostgresConfig::new(format!("postgres://drums@{address}/drums")) }
        };
        PostgresStore::open(&at("ours", &ours.1)).unwrap();
        let Err(e) = PostgresStore::open(&at("other", &other.1)) else { panic!("a foreign CA") };
        let words = drums_common::telemetry::chain(&e);
        assert!(words.to_lowercase().contains("certificate"), "{words}");
        let empty = PostgresStore::open(&at("empty", ""));
        assert!(matches!(empty, Err(StoreError::BadPlace { .. })));
    }
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
    let records = Written::all(&[record(&registration, 1, 1)]).unwrap();
    s.commit_evidence(RunId([1; 6]), &host("h1"), Generation(1), &records, Micros(1)).unwrap();
    let c = rusqlite::Connection::open(&path).unwrap();
    for table in ["host", "registration", "run", "run_event", "evidence", "audit"] {
        assert!(c.execute(&format!("DELETE FROM {table}"), []).is_err(), "{table}");
    }
    assert!(c.execute("UPDATE evidence SET record = '{}'", []).is_err());
    assert!(c.execute("UPDATE audit SET actor = 'x'", []).is_err());
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

#[tokio::test]
async fn what_waits_is_committed_together_and_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let handle = StoreHandle::start(Box::new(SqliteStore::open(&path).unwrap())).unwrap();
    let (go_on, held) = std::sync::mpsc::sync_channel::<()>(1);
    let add = |name: &'static str| {
        let store = handle.clone();
        async move { store.call(move |s| s.add_host(&host(name), "sandbox", Ownership::Adopted, &audit("host-add"))).await }
    };
    // The first holds the thread until all others wait.
    let first = handle.call(move |_| {
        held.recv().unwrap();
        Ok(())
    });
    let half = handle.call(|s| {
        s.add_host(&host("h2"), "sandbox", Ownership::Adopted, &audit("host-add"))?;
        s.save_run(
            &RunState::place(RunId([9; 6]), Sha256::of(b"none"), 1, None, vec![], Micros(1)).next,
            1,
            &[],
            Micros(1),
            None,
        )
    });
    let let_go = async { go_on.send(()).unwrap() };
    let (first, h1, twice, half, h3, ()) = tokio::join!(first, add("h1"), add("h1"), half, add("h3"), let_go);
    assert!(first.is_ok() && h1.is_ok() && h3.is_ok(), "{h1:?} {h3:?}");
    assert!(matches!(twice, Err(StoreError::HostExists(_))), "{twice:?}");
    assert!(matches!(half, Err(StoreError::Missing { .. })), "{half:?}");
    // What was answered is there for everybody; what a failed method did not do itself stays.
    let seen = rusqlite::Connection::open(&path).unwrap();
    let names: String = seen
        .query_row("SELECT group_concat(name) FROM (SELECT name FROM host ORDER BY name)", [], |r| r.get(0))
        .unwrap();
    assert_eq!(names, "h1,h2,h3");
    // A commit that fails is everybody's failure, and the next ones go on.
    let broken = handle.call(|s| {
        s.add_host(&host("h4"), "sandbox", Ownership::Adopted, &audit("host-add"))?;
        s.commit_together()
    });
    assert!(matches!(broken.await, Err(StoreError::NotCommitted(_) | StoreError::Sql { .. })));
    assert!(add("h5").await.is_ok());
    handle.close().await;
}

/// Some failures of a statement make SQLite take the whole transaction back, and with it what others did that share it.
#[tokio::test]
async fn what_the_database_takes_back_is_nobodys_success_and_nothing_after_it_is_done_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let store = SqliteStore::open(&path).unwrap();
    let pages: i64 = store.connection.query_row("PRAGMA page_count", [], |r| r.get(0)).unwrap();
    store.connection.pragma_update(None, "max_page_count", pages + 8).unwrap();
    let handle = StoreHandle::start(Box::new(store)).unwrap();
    let keep = |key: &'static str, bytes: usize| {
        let store = handle.clone();
        async move { store.call(move |s| s.meta_or(key, &"x".repeat(bytes), &audit("keeps"))).await }
    };
    let (go_on, held) = std::sync::mpsc::sync_channel::<()>(1);
    let first = handle.call(move |_| {
        held.recv().unwrap();
        Ok(())
    });
    let let_go = async { go_on.send(()).unwrap() };
    let (_, before, full, after, ()) =
        tokio::join!(first, keep("before", 1), keep("full", 1 << 20), keep("after", 1), let_go);
    assert!(before.is_err() && full.is_err() && after.is_err(), "{before:?} {full:?} {after:?}");
    let seen = rusqlite::Connection::open(&path).unwrap();
    let there = |key: &str| -> bool {
        seen.query_row("SELECT count(*) FROM meta WHERE key = ?1", [key], |r| r.get::<_, i64>(0)).unwrap() == 1
    };
    assert_eq!(["before", "full", "after"].map(there), [false; 3], "what was answered as not done was not done");
    assert!(keep("later", 1).await.is_ok() && there("later"), "and the next ones go on");
    handle.close().await;
}

/// What could not be taken back when a commit failed, say.
#[tokio::test]
async fn nothing_is_answered_as_done_in_a_transaction_that_was_left_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let store = SqliteStore::open(&path).unwrap();
    store.connection.execute_batch("BEGIN").unwrap();
    let handle = StoreHandle::start(Box::new(store)).unwrap();
    let kept = handle.call(|s| s.meta_or("key", "value", &audit("keeps"))).await;
    let seen = rusqlite::Connection::open(&path).unwrap();
    let n: i64 = seen.query_row("SELECT count(*) FROM meta WHERE key = 'key'", [], |r| r.get(0)).unwrap();
    assert_eq!(n, i64::from(kept.is_ok()), "{kept:?}");
    assert!(kept.is_ok(), "{kept:?}");
    handle.close().await;
}
