//! Documents that a key of the test signs, with a message made here, and messages that OpenSSL made with the same key.

mod signer;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use drums_common::clock::Micros;
use drums_identity::{BadCertificate, Certificates, Document, Expected, Refused, Shown, SignatureError, verify};
use drums_provider::{
    cloud::{Instance, InstanceState},
    words::{Region, read_instant},
};

use signer::{Message, SIGNER};

const OTHER: &str = include_str!("fixtures/other.pem");
const ELLIPTIC: &str = include_str!("fixtures/elliptic.pem");
const DOCUMENT: &str = include_str!("fixtures/document.json");

fn region(name: &str) -> Region {
    name.parse().unwrap()
}

/// AWS of two regions, whose keys differ.
fn certificates() -> Certificates {
    Certificates::new([(region("eu-central-1"), SIGNER), (region("us-east-1"), OTHER)]).unwrap()
}

fn expected() -> Expected {
    Expected {
        account: "123456789012".to_owned(),
        region: region("eu-central-1"),
        instance: "i-0123456789abcdef0".parse().unwrap(),
        image: "ami-0123456789abcdef0".parse().unwrap(),
        kind: "c8i.2xlarge".parse().unwrap(),
        launched: read_instant("2026-11-30T19:10:01Z").unwrap(),
    }
}

fn shown(document: &str, signature: &str, expected: &Expected) -> Result<Document, Refused> {
    verify(&certificates(), Shown { document: document.as_bytes(), signature }, expected)
}

fn refused(message: &Message, word: &str) {
    let document = String::from_utf8(message.document.clone()).unwrap();
    match shown(&document, &message.sign(), &expected()) {
        Err(Refused::Signature { source, .. }) => {
            let said = source.to_string();
            assert!(said.contains(word), "expected {word:?}: {said}");
        }
        other => panic!("expected {word:?}: {other:?}"),
    }
}

#[test]
fn the_launched_instance_is_taken_however_its_signature_is_made() {
    let document = shown(DOCUMENT, &Message::of(DOCUMENT).sign(), &expected()).unwrap();
    assert_eq!(document.instance_id, expected().instance);
    let detached = Message { inside: None, ..Message::of(DOCUMENT) };
    let plain = Message { digest: None, ..Message::of(DOCUMENT) };
    for message in [detached, plain] {
        shown(DOCUMENT, &message.sign(), &expected()).unwrap();
    }
    // Another implementation's: streamed, in canonical form, and with the document beside it.
    for signature in [
        include_str!("fixtures/rsa2048"),
        include_str!("fixtures/rsa2048-der"),
        include_str!("fixtures/rsa2048-detached"),
    ] {
        shown(DOCUMENT, signature, &expected()).unwrap();
        shown(DOCUMENT, &signature.replace('\n', ""), &expected()).unwrap();
    }
}

#[test]
fn another_signer_is_refused() {
    // What eu-central-1 signed is nothing in us-east-1, whatever the document says.
    let there = DOCUMENT.replace("eu-central-1", "us-east-1");
    let expected = Expected { region: region("us-east-1"), ..expected() };
    let said = shown(&there, &Message::of(&there).sign(), &expected).unwrap_err();
    assert!(matches!(said, Refused::Signature { source: SignatureError::Key, .. }), "{said:?}");
    let nowhere = Expected { region: region("ap-south-2"), ..expected };
    let said = shown(DOCUMENT, &Message::of(DOCUMENT).sign(), &nowhere).unwrap_err();
    assert!(matches!(said, Refused::NoCertificate(_)), "{said}");
    assert!(said.to_string().contains("ap-south-2") && said.to_string().contains("configuration"), "{said}");
}

#[test]
fn every_changed_byte_of_a_document_is_seen() {
    let signature = Message::of(DOCUMENT).sign();
    let detached = Message { inside: None, ..Message::of(DOCUMENT) }.sign();
    for place in 0..DOCUMENT.len() {
        let mut changed = DOCUMENT.as_bytes().to_vec();
        changed[place] ^= 1;
        for signature in [&signature, &detached] {
            let said = verify(&certificates(), Shown { document: &changed, signature }, &expected()).unwrap_err();
            assert!(
                matches!(said, Refused::Signature { source: SignatureError::OtherContent, .. }),
                "{place}: {said:?}"
            );
        }
    }
}

/// Whatever of the message is changed: it is refused, or the change was of nothing that means anything.
#[test]
fn no_changed_byte_of_a_signature_makes_another_document_pass() {
    let signature = Message::of(DOCUMENT).sign();
    let bytes = STANDARD.decode(signature.replace('\n', "")).unwrap();
    let other = DOCUMENT.replace("\"i-0123456789abcdef0\"", "\"i-0fedcba9876543210\"");
    let expected = Expected { instance: "i-0fedcba9876543210".parse().unwrap(), ..expected() };
    shown(&other, &Message::of(&other).sign(), &expected).unwrap();
    for place in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[place] ^= 1;
        assert!(shown(&other, &STANDARD.encode(changed), &expected).is_err(), "byte {place}");
    }
}

#[test]
fn a_message_that_is_made_otherwise_is_refused_with_a_reason() {
    let good = Message::of(DOCUMENT);
    refused(&Message { signers: 0, ..good.clone() }, "0 signers");
    refused(&Message { signers: 2, ..good.clone() }, "2 signers");
    let sha1 = vec![0x06, 5, 0x2b, 0x0e, 3, 2, 0x1a];
    refused(&Message { digest_algorithm: sha1, ..good.clone() }, "SHA-256 is expected");
    // Signed by the right key, and what is signed is of another document.
    refused(&Message { digest: Some(vec![7; 32]), ..good.clone() }, "another document");
    refused(&Message { inside: Some(b"another".to_vec()), ..good.clone() }, "another document");
    for (bad, word) in
        [("", "no PKCS #7"), ("not base64!", "base64"), ("MAA=", "no PKCS #7"), ("MIAGAQ==", "no PKCS #7")]
    {
        let Err(Refused::Signature { source, .. }) = shown(DOCUMENT, bad, &expected()) else { panic!("{bad}") };
        assert!(source.to_string().contains(word), "{bad}: {source}");
    }
    let long = " ".repeat(1 << 20);
    assert!(matches!(shown(DOCUMENT, &long, &expected()), Err(Refused::TooLong(_))));
}

/// Each is signed by AWS, and is not what was launched.
#[test]
fn another_instance_account_region_image_type_and_an_older_document_are_refused() {
    for (from, to, what) in [
        ("\"i-0123456789abcdef0\"", "\"i-0fedcba9876543210\"", "instance"),
        ("123456789012", "210987654321", "account"),
        ("\"region\" : \"eu-central-1\"", "\"region\" : \"us-east-1\"", "region"),
        ("ami-0123456789abcdef0", "ami-0fedcba9876543210", "image"),
        ("c8i.2xlarge", "c8i.4xlarge", "type"),
        ("2026-11-30T19:10:00Z", "2026-11-30T19:08:00Z", "start"),
        ("2026-11-30T19:10:00Z", "2026-11-30T19:12:00Z", "start"),
    ] {
        let other = DOCUMENT.replace(from, to);
        assert_ne!(other, DOCUMENT, "{from}");
        let said = shown(&other, &Message::of(&other).sign(), &expected()).unwrap_err();
        let Refused::Other(differences) = &said else { panic!("{said:?}") };
        assert_eq!(differences.len(), 1, "{said}");
        assert!(said.to_string().contains(what), "{said}");
    }
}

#[test]
fn what_is_no_document_is_refused_although_it_is_signed() {
    for other in ["{}", "[]", "{\"instanceId\":\"i-0123456789abcdef0\"}"] {
        let said = shown(other, &Message::of(other).sign(), &expected()).unwrap_err();
        assert!(matches!(said, Refused::Document(_)), "{said:?}");
    }
    let twice = DOCUMENT.replace("\"version\"", "\"instanceId\" : \"i-0fedcba9876543210\", \"version\"");
    let said = shown(&twice, &Message::of(&twice).sign(), &expected()).unwrap_err();
    assert!(matches!(said, Refused::Document(_)), "{said:?}");
    let never = DOCUMENT.replace("2026-11-30T19:10:00Z", "never");
    assert!(matches!(shown(&never, &Message::of(&never).sign(), &expected()), Err(Refused::Document(_))));
}

#[test]
fn certificates_that_are_none_are_refused_with_what_to_take() {
    let of = |pem| Certificates::new([(region("eu-central-1"), pem)]).unwrap_err();
    for (pem, word) in
        [("", "PEM"), ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "PEM"), (ELLIPTIC, "RSA-2048")]
    {
        let said = of(pem).to_string();
        assert!(said.contains("eu-central-1") && said.contains(word), "{said}");
    }
    let twice = Certificates::new([(region("eu-central-1"), SIGNER), (region("eu-central-1"), OTHER)]);
    assert!(matches!(twice, Err(BadCertificate::Twice { .. })));
}

#[test]
fn what_the_cloud_does_not_show_is_not_expected() {
    let seen = Instance {
        id: expected().instance,
        region: expected().region,
        zone: None,
        subnet: None,
        kind: Some(expected().kind),
        image: Some(expected().image),
        state: InstanceState::Running,
        launched: expected().launched,
        token: None,
        tags: Default::default(),
        nested: None,
        imds_v2: None,
        public_address: false,
        security_groups: Vec::new(),
        profile: None,
        volumes: Vec::new(),
        attributes: None,
    };
    assert_eq!(Expected::of("123456789012", &seen), Some(expected()));
    assert_eq!(Expected::of("123456789012", &Instance { image: None, ..seen.clone() }), None);
    assert_eq!(Expected::of("123456789012", &Instance { kind: None, ..seen }), None);
}

#[test]
fn fuzz_what_a_host_shows() {
    let certificates = certificates();
    let signature = Message::of(DOCUMENT).sign();
    let bytes = STANDARD.decode(signature.replace('\n', "")).unwrap();
    drums_fuzz::decoder!(vec![bytes, DOCUMENT.as_bytes().to_vec()], |bytes: &[u8]| {
        let as_signature = STANDARD.encode(bytes);
        let _ = verify(&certificates, Shown { document: DOCUMENT.as_bytes(), signature: &as_signature }, &expected());
        let taken = verify(&certificates, Shown { document: bytes, signature: &signature }, &expected());
        assert!(taken.is_err() || bytes == DOCUMENT.as_bytes());
    });
    assert_eq!(expected().launched, Micros(1_796_065_801_000_000));
}
