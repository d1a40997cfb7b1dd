//! A bucket: where sealed evidence goes when its coordinator is away, and all that judging it takes.
//!
//! Owns the layout. Refuses to know how objects are written or read: a key is text, an object is bytes. Every object is
//! written once and never changed, so that agents and coordinators may repeat themselves.
//!
//! ```text
//! <installation>/installation.json                    whose it is: the layout's version, the CA
//! <installation>/registrations/<sha256>.json          canonical form and spec, before the first block
//! <installation>/runs/<run>/run.json                  registration, number, hosts: what must be there for a verdict
//! <installation>/runs/<run>/<host>/host.json          installation, certificate, facts
//! <installation>/runs/<run>/<host>/<index>.segment    a line of JSON about it, then the sealed segment as it was on disk
//! ```

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    clock::Micros,
    digest::Sha256,
    ids::{HostId, InstallationId, RunId},
    machine::HostFacts,
};

pub const LAYOUT: u32 = 1;
/// Segments that a run may leave on a host in a bucket. A segment is 8 MiB, or what there was when its coordinator went
/// away; a run writes a few MiB.
pub const SEGMENTS: u32 = 32;
/// An object's first line; more is not one of ours.
const MAX_HEAD: usize = 4 << 10;

/// Name of the document that makes a folder an installation's.
pub const INSTALLATION: &str = "installation.json";

/// What a key names, below an installation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    Installation,
    Registration(Sha256),
    Run(RunId),
    Host(RunId, HostId),
    Segment(RunId, HostId, u32),
}

impl Key {
    /// In the bucket of this installation.
    pub fn of(&self, installation: InstallationId) -> String {
        format!("{installation}/{self}")
    }

    /// The key of a path below an installation; `None` for what is not ours.
    pub fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').collect();
        let key = match parts[..] {
            [INSTALLATION] => Self::Installation,
            ["registrations", file] => Self::Registration(file.strip_suffix(".json")?.parse().ok()?),
            ["runs", run, "run.json"] => Self::Run(run.parse().ok()?),
            ["runs", run, host, "host.json"] => Self::Host(run.parse().ok()?, host.parse().ok()?),
            ["runs", run, host, file] => {
                let index = file.strip_suffix(".segment")?.parse().ok()?;
                Self::Segment(run.parse().ok()?, host.parse().ok()?, index)
            }
            _ => return None,
        };
        // Only the one spelling: two objects must not be the same thing.
        (key.to_string() == path).then_some(key)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Installation => f.write_str(INSTALLATION),
            Self::Registration(sha256) => write!(f, "registrations/{sha256}.json"),
            Self::Run(run) => write!(f, "runs/{run}/run.json"),
            Self::Host(run, host) => write!(f, "runs/{run}/{host}/host.json"),
            Self::Segment(run, host, index) => write!(f, "runs/{run}/{host}/{index:05}.segment"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallationDoc {
    pub layout: u32,
    pub installation: InstallationId,
    pub ca_sha256: Sha256,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistrationDoc {
    pub registered_at: Micros,
    /// Its SHA-256 is the registration.
    pub canonical: String,
    /// As the operator wrote it.
    pub spec: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunDoc {
    pub run: RunId,
    pub registration: Sha256,
    /// 1, 2, 3 ... of the registration.
    pub number: u32,
    pub hosts: Vec<HostId>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostDoc {
    pub host: HostId,
    pub installation: InstallationId,
    /// Of the certificate that the host showed when its run was given to it.
    pub certificate_sha256: Sha256,
    pub facts: Option<HostFacts>,
}

/// The first line of a segment's object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentHead {
    pub run: RunId,
    pub registration: Sha256,
    pub host: HostId,
    /// 0, 1, 2 ... of the run on this host.
    pub index: u32,
    pub first_seq: u64,
    pub last_seq: u64,
    /// The run's last record on this host is in it.
    pub closed: bool,
    pub bytes: u64,
    pub sha256: Sha256,
}

#[derive(Debug, thiserror::Error)]
pub enum BadObject {
    #[error("it does not begin with a line about it")]
    NoHead,
    #[error("it is not what its key says")]
    Shape(#[source] serde_json::Error),
    #[error("it has {got} bytes behind its first line, which says {said}")]
    Length { got: u64, said: u64 },
    #[error("its SHA-256 is {got}, and its first line says {said}")]
    Digest { got: Sha256, said: Sha256 },
}

/// The object of a sealed segment. `bytes` and `sha256` of the head are filled in.
pub fn pack(head: SegmentHead, segment: &[u8]) -> Vec<u8> {
    let head = SegmentHead { bytes: segment.len() as u64, sha256: Sha256::of(segment), ..head };
    let mut out = document(&head);
    out.extend_from_slice(segment);
    out
}

/// A segment's object, taken apart and held against its own first line.
pub fn unpack(object: &[u8]) -> Result<(SegmentHead, &[u8]), BadObject> {
    let end = object.iter().take(MAX_HEAD).position(|b| *b == b'\n').ok_or(BadObject::NoHead)?;
    let head: SegmentHead = serde_json::from_slice(&object[..end]).map_err(BadObject::Shape)?;
    let segment = &object[end + 1..];
    if segment.len() as u64 != head.bytes {
        return Err(BadObject::Length { got: segment.len() as u64, said: head.bytes });
    }
    let got = Sha256::of(segment);
    if got != head.sha256 {
        return Err(BadObject::Digest { got, said: head.sha256 });
    }
    Ok((head, segment))
}

/// A document's bytes: one line of JSON.
pub fn document<T: Serialize>(value: &T) -> Vec<u8> {
    let mut out = serde_json::to_vec(value).expect("documents are strings, integers and lists of them");
    out.push(b'\n');
    out
}

pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BadObject> {
    serde_json::from_slice(bytes).map_err(BadObject::Shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: RunId = RunId([1; 6]);

    fn host() -> HostId {
        "h1".parse().unwrap()
    }

    fn head() -> SegmentHead {
        let sha256 = Sha256::of(b"");
        SegmentHead {
            run: RUN,
            registration: Sha256::of(b"r"),
            host: host(),
            index: 3,
            first_seq: 7,
            last_seq: 9,
            closed: false,
            bytes: 0,
            sha256,
        }
    }

    #[test]
    fn a_key_is_read_back_and_has_one_spelling() {
        for key in [
            Key::Installation,
            Key::Registration(Sha256::of(b"r")),
            Key::Run(RUN),
            Key::Host(RUN, host()),
            Key::Segment(RUN, host(), 31),
        ] {
            assert_eq!(Key::parse(&key.to_string()), Some(key));
        }
        for path in [
            "",
            "x.json",
            "runs/run-010101010101/h1/31.segment",
            "runs/run-010101010101/h1/+0031.segment",
            "runs/../h1/host.json",
            "runs/run-010101010101/H1/host.json",
            "registrations/x.json",
            "runs//run.json",
        ] {
            assert_eq!(Key::parse(path), None, "{path}");
        }
        let key = Key::Run(RUN).of(InstallationId([1, 2, 3, 4]));
        assert_eq!(key, "01020304/runs/run-010101010101/run.json");
    }

    #[test]
    fn every_changed_byte_of_a_segments_object_is_seen() {
        let object = pack(head(), b"a segment\nof two lines");
        let (read, segment) = unpack(&object).unwrap();
        assert_eq!((read.bytes, segment), (22, &b"a segment\nof two lines"[..]));
        for at in 0..object.len() {
            let mut bad = object.clone();
            bad[at] ^= 1;
            if let Ok((other, _)) = unpack(&bad) {
                // Still a head and still this segment: then it says something else, which who reads it compares.
                assert_ne!(other, read, "byte {at}");
            }
            assert!(unpack(&object[..at]).is_err(), "cut at {at}");
        }
    }
}
