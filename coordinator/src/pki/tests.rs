use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
};

use super::*;

const NOW: Micros = Micros(1_790_000_000_000_000);

fn request() -> SigningRequest {
    let key = KeyPair::generate().unwrap();
    // Asks for more than it may have.
    let mut params = CertificateParams::new(vec!["drums-coordinator".to_owned()]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    SigningRequest::parse(params.serialize_request(&key).unwrap().der()).unwrap()
}

#[test]
fn a_ca_is_made_once_and_opened_after() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("pki");
    let (first, made) = Pki::open_or_create(&dir, NOW).unwrap();
    assert!(made);
    let (again, made) = Pki::open_or_create(&dir, NOW).unwrap();
    assert!(!made);
    assert_eq!(first.fingerprint(), again.fingerprint());
    assert_eq!(first.quic_keys().unwrap().reset, again.quic_keys().unwrap().reset);
    for file in FILES.iter().filter(|f| f.ends_with(".key")) {
        let mode = fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{file}");
    }
    assert_eq!(first.server().unwrap().chain.len(), 2);
}

#[test]
fn an_attempt_that_broke_off_anywhere_is_made_again() {
    let home = tempfile::tempdir().unwrap();
    let whole = home.path().join("whole");
    Pki::open_or_create(&whole, NOW).unwrap();
    for written in 0..=FILES.len() {
        let dir = home.path().join(format!("pki{written}"));
        let begun = dir.with_extension("begun");
        fs::create_dir(&begun).unwrap();
        for file in &FILES[..written] {
            fs::copy(whole.join(file), begun.join(file)).unwrap();
        }
        // Killed while it wrote the next one.
        fs::write(begun.join("half.new"), "-----BEGIN").unwrap();
        let (pki, made) = Pki::open_or_create(&dir, NOW).unwrap();
        assert!(made && !begun.exists(), "{written} files");
        assert_eq!(pki.fingerprint(), Pki::open(&dir).unwrap().fingerprint());
        assert_eq!(fs::read_dir(&dir).unwrap().count(), FILES.len());
    }
}

#[test]
fn an_incomplete_or_loose_folder_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (_, _) = Pki::open_or_create(dir.path(), NOW).unwrap();
    fs::set_permissions(dir.path().join("ca.key"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Pki::open(dir.path()), Err(PkiError::LooseKey { mode: 0o644, .. })));
    fs::remove_file(dir.path().join("ca.key")).unwrap();
    let before = fs::read(dir.path().join("ca.pem")).unwrap();
    assert!(matches!(Pki::open_or_create(dir.path(), NOW), Err(PkiError::Incomplete { missing: "ca.key", .. })));
    assert_eq!(fs::read(dir.path().join("ca.pem")).unwrap(), before);
}

#[test]
fn a_key_of_another_certificate_is_named() {
    let home = tempfile::tempdir().unwrap();
    let (ours, theirs) = (home.path().join("ours"), home.path().join("theirs"));
    Pki::open_or_create(&theirs, NOW).unwrap();
    for mixed in [["ca.key"].as_slice(), &["server.key"], &["operator.key"], &["operator.pem", "operator.key"]] {
        Pki::open_or_create(&ours, NOW).unwrap();
        for file in mixed {
            fs::copy(theirs.join(file), ours.join(file)).unwrap();
        }
        match Pki::open(&ours) {
            Err(PkiError::Damaged { path, .. }) => assert_eq!(path, ours.join(mixed[0])),
            other => panic!("{mixed:?}: {other:?}"),
        }
        fs::remove_dir_all(&ours).unwrap();
    }
}

fn leaf(pki: &Pki) -> Sha256 {
    Sha256::of(&pki.shown().current().cert[0])
}

#[test]
fn a_rotated_server_certificate_is_shown_at_once_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("pki");
    let (pki, _) = Pki::open_or_create(&dir, NOW).unwrap();
    let mut changes = pki.shown().changes();
    let first = pki.shown().certificate();
    assert_eq!(leaf(&pki), first.sha256);
    let later = Micros(NOW.0 + 365 * DAY_US);
    let rotated = rotate_server(&dir, later).unwrap();
    assert_eq!(rotated.before.unwrap(), first);
    assert_ne!(rotated.made.sha256, first.sha256);
    assert_eq!(rotated.made.expires, ends(pki.ca_der()).unwrap(), "as long as its CA");
    assert_eq!(fs::metadata(&rotated.path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!changes.has_changed().unwrap(), "nobody has asked");
    assert_eq!(leaf(&pki), rotated.made.sha256);
    assert_eq!(*changes.borrow_and_update(), rotated.made);
    let again = Pki::open(&dir).unwrap();
    assert_eq!((again.fingerprint(), leaf(&again)), (pki.fingerprint(), rotated.made.sha256));
    assert_eq!(Sha256::of(&again.server().unwrap().chain[0]), rotated.made.sha256);
    // Taken away: what was made with the home is there again.
    fs::remove_file(&rotated.path).unwrap();
    assert_eq!((leaf(&pki), *changes.borrow()), (first.sha256, first));
}

#[test]
fn a_rotation_by_root_belongs_to_the_homes_owner() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIP a_rotation_by_root_belongs_to_the_homes_owner: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("pki");
    Pki::open_or_create(&dir, NOW).unwrap();
    std::os::unix::fs::chown(&dir, Some(65_534), Some(65_533)).unwrap();
    let of = fs::metadata(rotate_server(&dir, NOW).unwrap().path).unwrap();
    assert_eq!((of.uid(), of.gid()), (65_534, 65_533));
}

/// Every instant leaves one of these folders: the new file is written aside and renamed.
#[test]
fn a_rotation_that_broke_off_changes_nothing_and_hinders_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("pki");
    let (pki, _) = Pki::open_or_create(&dir, NOW).unwrap();
    let whole = fs::read(rotate_server(&dir, NOW).unwrap().path).unwrap();
    let aside = dir.join(server::RENEWED).with_extension("new");
    for written in [0, 1, whole.len() / 3, whole.len() / 2, whole.len()] {
        let before = leaf(&pki);
        fs::write(&aside, &whole[..written]).unwrap();
        assert_eq!((leaf(&pki), leaf(&Pki::open(&dir).unwrap())), (before, before), "{written} bytes");
        let made = rotate_server(&dir, NOW).unwrap().made.sha256;
        assert_ne!(made, before);
        assert_eq!(leaf(&pki), made);
        assert!(!aside.exists());
    }
}

#[test]
fn a_server_certificate_that_cannot_be_used_is_named_and_never_shown() {
    let home = tempfile::tempdir().unwrap();
    let (dir, other) = (home.path().join("ours"), home.path().join("theirs"));
    let (pki, _) = Pki::open_or_create(&dir, NOW).unwrap();
    Pki::open_or_create(&other, NOW).unwrap();
    let theirs = fs::read_to_string(rotate_server(&other, NOW).unwrap().path).unwrap();
    let path = rotate_server(&dir, NOW).unwrap().path;
    let ours = fs::read_to_string(&path).unwrap();
    let certificate = |text: &str| text[text.find("-----BEGIN CERTIFICATE").unwrap()..].to_owned();
    let key = |text: &str| text[..text.find("-----BEGIN CERTIFICATE").unwrap()].to_owned();
    let (mixed, cut) = (key(&theirs) + &certificate(&ours), ours[..ours.len() / 2].to_owned());
    let cases = [
        ("empty", String::new(), 0o600),
        ("no certificate", key(&ours), 0o600),
        ("no key", certificate(&ours), 0o600),
        ("cut", cut, 0o600),
        ("another's key", mixed, 0o600),
        ("another home's", theirs.clone(), 0o600),
        ("readable by others", ours.clone(), 0o644),
    ];
    for (what, text, mode) in cases {
        let shown = leaf(&pki);
        let aside = home.path().join("aside");
        fs::write(&aside, text).unwrap();
        fs::set_permissions(&aside, fs::Permissions::from_mode(mode)).unwrap();
        fs::rename(&aside, &path).unwrap();
        assert_eq!((leaf(&pki), pki.shown().certificate().sha256), (shown, shown), "{what}");
        match Pki::open(&dir) {
            Err(PkiError::Damaged { path: named, what: said }) => {
                assert_eq!(named, path, "{what}");
                assert!(said.contains("drumsctl access rotate-server"), "{what}: {said}");
            }
            Err(PkiError::LooseKey { path: named, mode: 0o644 }) => assert_eq!(named, path, "{what}"),
            found => panic!("{what}: {found:?}"),
        }
        let mended = rotate_server(&dir, NOW).unwrap();
        assert!(mended.before.is_err(), "{what}");
        assert_eq!((leaf(&pki), leaf(&Pki::open(&dir).unwrap())), (mended.made.sha256, mended.made.sha256), "{what}");
    }
}

#[test]
fn agents_get_their_own_name_and_nothing_they_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (pki, _) = Pki::open_or_create(dir.path(), NOW).unwrap();
    let host: HostId = "h1".parse().unwrap();
    let installation = InstallationId([1, 2, 3, 4]);
    let issued = pki.issue_agent(&request(), &host, installation, NOW).unwrap();
    let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
    assert_eq!(subject_of(&der), Ok(Subject::Agent { host, installation, certificate: issued.sha256 }));
    let (_, cert) = x509_parser::parse_x509_certificate(&der).unwrap();
    assert!(!cert.is_ca());
    assert!(cert.extended_key_usage().unwrap().unwrap().value.client_auth);
    let text = format!("{:?}", cert.subject_alternative_name().unwrap().unwrap().value);
    assert!(!text.contains("drums-coordinator"), "{text}");
}

#[test]
fn names_that_are_not_agents_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let (pki, _) = Pki::open_or_create(dir.path(), NOW).unwrap();
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key).unwrap();
    let request = SigningRequest::parse(request.der()).unwrap();
    for role in Role::ALL {
        let issued = pki.issue_person(&request, "ada", role, NOW).unwrap();
        let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
        let ada = Subject::Person { role, name: "ada".to_owned(), certificate: issued.sha256 };
        assert_eq!(subject_of(&der), Ok(ada));
    }
    let operator = fs::read_to_string(pki.operator_paths().0).unwrap();
    let der = CertificateDer::from_pem_slice(operator.as_bytes()).unwrap();
    let (certificate, expires) = pki.first_operator().unwrap();
    assert_eq!(expires, Micros(NOW.0 + LEAF_DAYS * DAY_US));
    let first = Subject::Person { role: Role::Operator, name: "operator".to_owned(), certificate };
    assert_eq!(subject_of(&der), Ok(first));
    assert_eq!(subject_of(&pki.server().unwrap().chain[0]), Err(NotAnAgent::NoName));
    assert_eq!(subject_of(b"garbage"), Err(NotAnAgent::Malformed));
    for bad in [
        "drums:agent:h1",
        "drums:agent:H1:01020304",
        "drums:agent:h1:xyz",
        "drums:operator:",
        "drums:viewer",
        "drums:x:y",
    ] {
        assert!(matches!(subject::parse(bad, Sha256::of(b"")), Err(NotAnAgent::BadName(_))), "{bad}");
    }
}

#[test]
fn malformed_signing_requests_are_refused() {
    for bytes in [&b""[..], b"garbage", &[0x30, 0x82, 0xff, 0xff]] {
        assert!(matches!(SigningRequest::parse(bytes), Err(PkiError::BadRequest { .. })));
    }
    let key = KeyPair::generate().unwrap();
    let mut der = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    *der.last_mut().unwrap() ^= 1;
    assert!(matches!(SigningRequest::parse(&der), Err(PkiError::BadRequest { .. })), "signature does not match");
}

/// Certificates come from whoever connects, signing requests from whoever has a token.
#[test]
fn fuzz_certificates_and_signing_requests() {
    let dir = tempfile::tempdir().unwrap();
    let (pki, _) = Pki::open_or_create(dir.path(), NOW).unwrap();
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    let parsed = SigningRequest::parse(&request).unwrap();
    let (host, installation) = ("h1".parse().unwrap(), InstallationId([1, 2, 3, 4]));
    let issued = pki.issue_agent(&parsed, &host, installation, NOW).unwrap();
    let leaf = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap().to_vec();
    drums_fuzz::decoder!(vec![request, leaf], |bytes: &[u8]| {
        let _ = subject_of(bytes);
        // Only what its own key has signed.
        if let Ok(request) = SigningRequest::parse(bytes) {
            assert_eq!(request.key_sha256, parsed.key_sha256);
        }
        let _ = subject::parse(&String::from_utf8_lossy(bytes), Sha256::of(b""));
    });
}
