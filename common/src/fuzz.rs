//! Fuzz targets of everything here that reads bytes from outside. See `drums_fuzz`.

use std::{fs, path::Path};

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    digest::Sha256,
    experiment::{ManifestFile, Registration, WorkloadManifest},
    spec,
    token::Token,
    wire::{
        codec,
        frame::{self, Lane},
        hello::{HELLO_LEN, Hello, HelloReply, REPLY_LEN},
        latest::*,
        v1,
    },
    workload,
};

/// The golden messages of all versions whose names begin so.
fn goldens(prefix: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/wire");
    let of_version = |version| fs::read_dir(folder.join(version)).unwrap().map(|e| e.unwrap().path());
    let mut paths: Vec<_> = ["v1", "v2"].into_iter().flat_map(of_version).collect();
    paths.sort();
    let named = |p: &&std::path::PathBuf| p.file_name().unwrap().to_string_lossy().starts_with(prefix);
    let out: Vec<_> = paths.iter().filter(named).map(|p| fs::read(p).unwrap()).collect();
    assert!(!out.is_empty(), "no golden {prefix}");
    out
}

/// What can be read can be written, and then has one form.
fn reads<T: Serialize + DeserializeOwned>(lane: Lane, bytes: &[u8]) {
    let Ok(message) = codec::decode::<T>(lane, bytes) else { return };
    let written = codec::encode(lane, &message).unwrap();
    let again = codec::encode(lane, &codec::decode::<T>(lane, &written).unwrap()).unwrap();
    assert_eq!(written, again);
}

#[test]
fn fuzz_control_messages() {
    drums_fuzz::decoder!(goldens("to-"), |bytes: &[u8]| {
        reads::<ToAgent>(Lane::Control, bytes);
        reads::<ToCoordinator>(Lane::Control, bytes);
    });
}

#[test]
fn fuzz_evidence() {
    drums_fuzz::decoder!(goldens("evidence-"), |bytes: &[u8]| {
        reads::<EvidenceBatch>(Lane::Evidence, bytes);
        reads::<EvidenceAck>(Lane::Evidence, bytes);
    });
}

#[test]
fn fuzz_artifact_requests() {
    drums_fuzz::decoder!(goldens("artifact-"), |bytes: &[u8]| {
        reads::<ArtifactRequest>(Lane::Artifact, bytes);
        reads::<ArtifactHead>(Lane::Artifact, bytes);
    });
}

#[test]
fn fuzz_beats() {
    drums_fuzz::decoder!(goldens("beat-"), |bytes: &[u8]| {
        reads::<Beat>(Lane::Datagram, bytes);
        reads::<BeatAck>(Lane::Datagram, bytes);
    });
}

#[test]
fn fuzz_enrolment() {
    drums_fuzz::decoder!(goldens("enrol-"), |bytes: &[u8]| {
        reads::<v1::EnrolRequest>(Lane::Enrol, bytes);
        reads::<EnrolRequest>(Lane::Enrol, bytes);
        reads::<InstanceProof>(Lane::Enrol, bytes);
        reads::<EnrolReply>(Lane::Enrol, bytes);
    });
}

#[test]
fn fuzz_first_bytes_of_connections_and_frames() {
    let build = Sha256::of(b"build");
    let hello = Hello { versions: crate::wire::hello::OURS, build };
    let reply = HelloReply::answer(crate::wire::hello::OURS, build, &hello);
    drums_fuzz::decoder!(vec![hello.encode().to_vec(), reply.encode().to_vec()], |bytes: &[u8]| {
        if let Some(first) = bytes.first_chunk::<HELLO_LEN>()
            && let Ok(hello) = Hello::parse(first)
        {
            assert_eq!(hello.encode(), *first);
        }
        if let Some(first) = bytes.first_chunk::<REPLY_LEN>()
            && let Ok(reply) = HelloReply::parse(first)
        {
            let _ = reply.accept(crate::wire::hello::OURS);
        }
        for lane in [Lane::Control, Lane::Evidence, Lane::Artifact, Lane::Enrol, Lane::Datagram] {
            if let Some(prefix) = bytes.first_chunk()
                && let Ok(len) = frame::payload_len(lane, *prefix)
            {
                assert!(len <= lane.cap());
            }
        }
        let _ = bytes.first().map(|tag| Lane::of_tag(*tag));
    });
}

#[test]
fn fuzz_tokens() {
    let json = br#"{"addresses":[{"host":"c.example","agents":7400,"enrol":7401}],"ca":"CA","host":"h1","secret":"S","expires_us":1}"#;
    let text = String::from_utf8(json.to_vec()).unwrap();
    let text = text.replace("CA", &Sha256::of(b"ca").to_string()).replace("\"S\"", &format!("\"{}\"", "A".repeat(43)));
    let wrapped = |bytes: &[u8]| {
        use base64::Engine as _;
        format!("drums1.{}", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes))
    };
    assert!(Token::parse(&wrapped(text.as_bytes())).is_ok());
    drums_fuzz::decoder!(vec![text.into_bytes()], |bytes: &[u8]| {
        // As text, and as the content of a text that is well formed.
        for text in [String::from_utf8_lossy(bytes).into_owned(), wrapped(bytes)] {
            if let Ok(token) = Token::parse(&text) {
                assert_eq!(Token::parse(&token.reveal()).unwrap(), token);
            }
        }
    });
}

const EXP_028: &str = include_str!("../../docs/experiments/EXP-028.toml");
const TWO_ARMS: &str = include_str!("spec/good/two-arms.toml");

/// A refused spec names places that are in the file.
#[test]
fn fuzz_specs() {
    drums_fuzz::decoder!(vec![EXP_028.into(), TWO_ARMS.into()], |bytes: &[u8]| {
        if let Err(bad) = spec::parse("spec.toml", bytes) {
            let lines = bytes.iter().filter(|b| **b == b'\n').count() + 1;
            assert!(!bad.faults.is_empty());
            assert!(bad.faults.iter().all(|f| f.line <= lines), "{bad}");
            let _ = bad.to_string();
        }
    });
}

#[test]
fn fuzz_registrations() {
    let experiment = spec::parse("EXP-028.toml", EXP_028.as_bytes()).unwrap().experiment;
    let canonical = serde_json::to_string(&serde_json::to_value(&experiment).unwrap()).unwrap();
    assert!(Registration::thaw(&canonical, Sha256::of(canonical.as_bytes()), crate::clock::Micros(0)).is_ok());
    drums_fuzz::decoder!(vec![canonical.into_bytes()], |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let _ = Registration::thaw(&text, Sha256::of(text.as_bytes()), crate::clock::Micros(0));
    });
}

#[test]
fn fuzz_workload_manifests() {
    let entry = |kind: &str, bytes, target: &str| {
        let (kind, target) = (kind.to_owned(), target.to_owned());
        ManifestFile { kind, mode: 0o755, bytes, sha256: Sha256::of(b"x"), target }
    };
    let files = [("tree", "dir", 0, ""), ("tree/a", "file", 1, ""), ("tree/b", "symlink", 0, "a")];
    let files = files.map(|(path, kind, bytes, target)| (path.to_owned(), entry(kind, bytes, target))).into();
    let manifest = WorkloadManifest { version: workload::LAYOUT_VERSION, files }.canonical();
    assert!(workload::parse(manifest.as_bytes(), None).is_ok());
    drums_fuzz::decoder!(vec![manifest.into_bytes()], |bytes: &[u8]| {
        if let Ok(manifest) = workload::parse(bytes, None) {
            assert_eq!(manifest.canonical().as_bytes(), bytes);
        }
    });
}
