//! Golden bytes of what version 2 changed, and what either version makes of the other's.

use super::*;
use crate::wire::{
    codec::{CodecError, decode, encode},
    frame::Lane,
    golden::check,
};

const VERSION: &str = "v2";

fn request(instance: Option<InstanceProof>) -> EnrolRequest {
    EnrolRequest {
        secret: vec![7; 32],
        host: "h1".parse().unwrap(),
        csr_der: vec![0x30, 0],
        installation: InstallationId([1, 2, 3, 4]),
        instance,
    }
}

fn proof(document: usize, signature: usize) -> Result<InstanceProof, BadProof> {
    InstanceProof::new(vec![b'{'; document], "M".repeat(signature))
}

#[test]
fn messages_keep_their_bytes() {
    check(VERSION, "enrol-request", Lane::Enrol, &request(None));
    let proof = InstanceProof::new(b"{\"instanceId\" : \"i-0123456789abcdef0\"}".to_vec(), "MIAG\nCSqG\n".to_owned());
    check(VERSION, "enrol-request-instance", Lane::Enrol, &request(Some(proof.unwrap())));
}

#[test]
fn an_agent_of_version_1_is_read_and_proves_nothing() {
    let old = v1::EnrolRequest::from(request(proof(1, 1).ok()));
    let bytes = encode(Lane::Enrol, &old).unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/wire/v1/enrol-request.bin");
    assert_eq!(bytes, std::fs::read(golden).unwrap(), "the bytes of version 1 are what they were");
    assert_eq!(EnrolRequest::from(decode::<v1::EnrolRequest>(Lane::Enrol, &bytes).unwrap()), request(None));
    // Neither version's bytes are the other's: which one it is, is agreed on and never guessed.
    assert!(decode::<EnrolRequest>(Lane::Enrol, &bytes).is_err());
    let new = encode(Lane::Enrol, &request(None)).unwrap();
    assert!(matches!(decode::<v1::EnrolRequest>(Lane::Enrol, &new), Err(CodecError::TrailingBytes { left: 1, .. })));
}

/// What is longer is refused where it is made and where it is read; the longest fits into a frame with all else.
#[test]
fn what_an_instance_shows_is_bounded() {
    let longest = proof(MAX_DOCUMENT_BYTES, MAX_SIGNATURE_BYTES).unwrap();
    let whole = EnrolRequest { csr_der: vec![0x30; 4 << 10], ..request(Some(longest)) };
    let bytes = encode(Lane::Enrol, &whole).unwrap();
    assert_eq!(decode::<EnrolRequest>(Lane::Enrol, &bytes).unwrap(), whole);
    for (document, signature, what) in [
        (MAX_DOCUMENT_BYTES + 1, 1, "identity document"),
        (1, MAX_SIGNATURE_BYTES + 1, "signature"),
        (0, 1, "identity document"),
        (1, 0, "signature"),
    ] {
        assert_eq!(proof(document, signature).unwrap_err().what, what);
        let bytes = encode(Lane::Enrol, &(vec![b'{'; document], "M".repeat(signature))).unwrap();
        let said = decode::<InstanceProof>(Lane::Enrol, &bytes).unwrap_err();
        assert!(crate::telemetry::chain(&said).contains(what), "{said:?}");
    }
}

#[test]
fn a_secret_is_never_printed() {
    let shown = format!("{:?}", request(None));
    assert!(shown.contains("h1") && !shown.contains("7, 7"), "{shown}");
}
