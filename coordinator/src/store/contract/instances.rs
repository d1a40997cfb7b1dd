//! Tokens of launched hosts: used by the instance of their launch, or not at all.

use super::*;
use crate::{
    net::ports::{Proven, Shown},
    store::script::{launched, started},
};

const DOCUMENT: Sha256 = Sha256([0xd0; 32]);

fn proven(launched: &Launched) -> Proven {
    let instance = launched.instance.clone().unwrap_or_else(started).id;
    Proven { launch: launched.launch, instance, document_sha256: DOCUMENT }
}

/// Uses the token `secret` of a host, which shows what it shows, with a key.
fn used(s: &mut dyn Store, name: &str, secret: &[u8], shown: Shown, key: &[u8]) -> Result<(), TokenRefusal> {
    let redemption = Redemption { secret_sha256: Sha256::of(secret), host: host(name), shown, ..redemption(key, 50) };
    s.redeem(&redemption, &at(50, "token-used").host(&host(name))).unwrap()
}

fn rows(s: &mut dyn Store) -> usize {
    s.audits(&AuditQuery::latest(1_000)).unwrap().len()
}

fn binds_tokens_to_launches(mut open: impl FnMut() -> Box<dyn Store>) {
    let mut s = open();
    for name in ["h1", "h2"] {
        s.add_host(&host(name), "ec2", Ownership::Owned, &audit("host-add")).unwrap();
    }
    let (first, second) = (launched(), Launched { launch: another(), ..launched() });
    let add = |s: &mut dyn Store, secret: &[u8], name: &str, of: &Launched| {
        s.add_launch_token(Sha256::of(secret), &host(name), Micros(100), of, &at(1, "token-add").host(&host(name)))
    };
    add(s.as_mut(), b"one", "h1", &first).unwrap();
    add(s.as_mut(), b"two", "h2", &second).unwrap();
    // A further token of a launch is of the same launch, or refused whole.
    add(s.as_mut(), b"one more", "h1", &first).unwrap();
    let elsewhere = Launched { region: "us-east-1".parse().unwrap(), ..first.clone() };
    let said = add(s.as_mut(), b"elsewhere", "h1", &elsewhere).unwrap_err();
    assert!(matches!(said, StoreError::OtherLaunch { .. }), "{said}");
    assert!(said.to_string().contains("us-east-1") && said.to_string().contains("eu-central-1"), "{said}");
    assert_eq!(s.bound(Sha256::of(b"elsewhere"), None).unwrap(), Bound::default());

    // What is expected is known before the instance is, and nobody uses the token meanwhile.
    assert_eq!(s.bound(Sha256::of(b"one"), None).unwrap().to, Some(first.clone()));
    let before = rows(s.as_mut());
    let refused = |launched: &Launched| Err(TokenRefusal::NotTheInstance(launched.launch));
    for shown in [Shown::Nothing, Shown::Claimed("x".into()), Shown::Proven(proven(&first))] {
        assert_eq!(used(s.as_mut(), "h1", b"one", shown, b"k"), refused(&first));
    }

    // Said once, and again, and never otherwise; one instance is one launch.
    let said_once = at(2, "launched");
    s.launched_as(first.launch, &started(), &said_once).unwrap();
    s.launched_as(first.launch, &started(), &said_once).unwrap();
    assert_eq!(rows(s.as_mut()), before + 1, "what is repeated, and what is refused, writes no row");
    let other = Started { id: "i-0fedcba9876543210".parse().unwrap(), ..started() };
    let later = Started { at: Micros(started().at.0 + 1), ..started() };
    for (launch, started, word) in [
        (first.launch, &other, "i-0fedcba9876543210"),
        (first.launch, &later, "since"),
        (second.launch, &started(), "is of the launch"),
    ] {
        let said = s.launched_as(launch, started, &audit("launched")).unwrap_err();
        assert!(matches!(said, StoreError::OtherLaunch { .. }) && said.to_string().contains(word), "{said}");
    }
    let nowhere = "drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0009".parse().unwrap();
    assert!(matches!(s.launched_as(nowhere, &other, &audit("launched")), Err(StoreError::Missing { .. })));
    s.launched_as(second.launch, &other, &at(2, "launched")).unwrap();
    let first = Launched { instance: Some(started()), ..first };
    let second = Launched { instance: Some(other), ..second };
    assert_eq!(s.bound(Sha256::of(b"one"), None).unwrap().to, Some(first.clone()));

    // By another instance, or of another launch: the token stays whole.
    let of_other = Proven { instance: proven(&second).instance, ..proven(&first) };
    for shown in [Shown::Nothing, Shown::Proven(of_other), Shown::Proven(proven(&second))] {
        assert_eq!(used(s.as_mut(), "h1", b"one", shown, b"thief"), refused(&first));
    }
    assert_eq!(used(s.as_mut(), "h1", b"one", Shown::Proven(proven(&first)), b"k"), Ok(()));
    assert_eq!(used(s.as_mut(), "h1", b"one", Shown::Proven(proven(&first)), b"k"), Ok(()), "a lost reply");
    assert_eq!(used(s.as_mut(), "h1", b"one", Shown::Nothing, b"k"), refused(&first), "also who repeats it proves it");
    assert_eq!(used(s.as_mut(), "h1", b"one", Shown::Proven(proven(&first)), b"thief"), Err(TokenRefusal::Reused));
    assert_eq!(s.bound(Sha256::of(b"two"), Some(DOCUMENT)).unwrap().shown_by, Some(host("h1")));
    assert_eq!(s.bound(Sha256::of(b"two"), Some(Sha256::of(b"another"))).unwrap().shown_by, None);

    // An instance is one host: the same one again by another token, and no other.
    add(s.as_mut(), b"for another", "h2", &first).unwrap();
    let taken = used(s.as_mut(), "h2", b"for another", Shown::Proven(proven(&first)), b"k2");
    assert_eq!(taken, Err(TokenRefusal::InstanceTaken(host("h1"))));
    assert_eq!(used(s.as_mut(), "h1", b"one more", Shown::Proven(proven(&first)), b"k3"), Ok(()));

    // A token that is bound to nothing is used as ever, and proves nothing, whatever is said with it.
    s.add_token(Sha256::of(b"by hand"), &host("h2"), Micros(100), &audit("token-add")).unwrap();
    assert_eq!(used(s.as_mut(), "h2", b"by hand", Shown::Claimed("says so".into()), b"k4"), Ok(()));
    drop(s);
    let mut s = open();
    assert_eq!(
        s.bound(Sha256::of(b"by hand"), Some(DOCUMENT)).unwrap(),
        Bound { to: None, shown_by: Some(host("h1")) }
    );
    assert_eq!(s.bound(Sha256::of(b"one"), None).unwrap().to, Some(first));
}

fn another() -> ClientToken {
    "drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0003".parse().unwrap()
}

/// Nothing takes a launch away from a token, or makes it another one, whoever writes to the store.
const NEVER: [&str; 6] = [
    "DELETE FROM launched_instance",
    "UPDATE token SET launch = NULL WHERE launch IS NOT NULL",
    "UPDATE token SET launch = 'drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0003' WHERE launch IS NULL",
    "UPDATE launched_instance SET account = '210987654321'",
    "UPDATE launched_instance SET instance = 'i-0aaaaaaaaaaaaaaaa' WHERE instance = 'i-0123456789abcdef0'",
    "UPDATE launched_instance SET host = 'h2' WHERE host = 'h1'",
];

#[test]
fn sqlite_binds_tokens_to_launches() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite3");
    binds_tokens_to_launches(|| Box::new(SqliteStore::open(&path).unwrap()));
    let c = rusqlite::Connection::open(&path).unwrap();
    for sql in NEVER {
        let said = c.execute(sql, []).unwrap_err().to_string();
        assert!(said.contains("never"), "{sql}: {said}");
    }
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_binds_tokens_to_launches() {
    let server = drums_infra::postgres::Server::start().unwrap();
    binds_tokens_to_launches(|| Box::new(super::postgres::leading(&server.url())));
    for sql in NEVER {
        let said = server.psql("drums", sql).unwrap_err().to_string();
        assert!(said.contains("never"), "{sql}: {said}");
    }
}
