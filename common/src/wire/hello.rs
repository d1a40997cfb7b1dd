//! The version handshake: the first bytes of every connection, fixed by hand so that they outlive any codec.
//!
//! ```text
//! hello  magic[8]  min:u16  max:u16  build[32]                 44 bytes, dialling side
//! reply  magic[8]  chosen:u16  min:u16  max:u16  build[32]     46 bytes; chosen 0 is a refusal
//! ```
//! All numbers are big endian. The newest version that both speak wins.

use crate::{digest::Sha256, failure::Failure};

/// A text-mode transfer, a shell or an HTTP client breaks these bytes, so none of them is taken for a peer.
pub const MAGIC: [u8; 8] = *b"DRUMS\r\n\0";
pub const HELLO_LEN: usize = 44;
pub const REPLY_LEN: usize = 46;

/// Inclusive range of wire versions, 1 at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    pub min: u16,
    pub max: u16,
}

/// What this build speaks. Agents and coordinators of version 1 are in use.
pub const OURS: Versions = Versions { min: 1, max: 2 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub versions: Versions,
    /// SHA-256 of the sender's executable.
    pub build: Sha256,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// `None` refuses: no version in common.
    pub chosen: Option<u16>,
    pub versions: Versions,
    pub build: Sha256,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HelloError {
    #[error("the peer's first bytes are not a DrumsBench hello")]
    NotDrums,
    #[error("the peer claims wire versions {min} to {max}, which is no range")]
    BadRange { min: u16, max: u16 },
    #[error("no wire version in common: this side speaks {} to {}, the peer {} to {}", ours.min, ours.max, theirs.min, theirs.max)]
    NoCommonVersion { ours: Versions, theirs: Versions },
    #[error("the peer chose wire version {chosen}, which was not offered ({} to {})", ours.min, ours.max)]
    NotOffered { chosen: u16, ours: Versions },
}

impl From<HelloError> for Failure {
    fn from(e: HelloError) -> Self {
        let help = match e {
            HelloError::NoCommonVersion { ours, theirs } if theirs.max < ours.min => "upgrade the peer",
            HelloError::NoCommonVersion { .. } => "upgrade this side",
            _ => "check that the address and port are those of a DrumsBench daemon",
        };
        Failure::refused("wire-version", e.to_string(), help)
    }
}

fn versions(bytes: &[u8]) -> Result<Versions, HelloError> {
    let v = Versions { min: u16::from_be_bytes([bytes[0], bytes[1]]), max: u16::from_be_bytes([bytes[2], bytes[3]]) };
    if v.min == 0 || v.min > v.max {
        return Err(HelloError::BadRange { min: v.min, max: v.max });
    }
    Ok(v)
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.versions.min.to_be_bytes());
        out[10..12].copy_from_slice(&self.versions.max.to_be_bytes());
        out[12..].copy_from_slice(&self.build.0);
        out
    }

    pub fn parse(bytes: &[u8; HELLO_LEN]) -> Result<Self, HelloError> {
        if bytes[..8] != MAGIC {
            return Err(HelloError::NotDrums);
        }
        let mut build = [0; 32];
        build.copy_from_slice(&bytes[12..]);
        Ok(Self { versions: versions(&bytes[8..12])?, build: Sha256(build) })
    }
}

impl HelloReply {
    /// Answers a hello: the newest common version, or a refusal that tells the dialling side what this one speaks.
    pub fn answer(ours: Versions, build: Sha256, hello: &Hello) -> Self {
        Self { chosen: newest_common(ours, hello.versions), versions: ours, build }
    }

    pub fn encode(&self) -> [u8; REPLY_LEN] {
        let mut out = [0; REPLY_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.chosen.unwrap_or(0).to_be_bytes());
        out[10..12].copy_from_slice(&self.versions.min.to_be_bytes());
        out[12..14].copy_from_slice(&self.versions.max.to_be_bytes());
        out[14..].copy_from_slice(&self.build.0);
        out
    }

    pub fn parse(bytes: &[u8; REPLY_LEN]) -> Result<Self, HelloError> {
        if bytes[..8] != MAGIC {
            return Err(HelloError::NotDrums);
        }
        let chosen = u16::from_be_bytes([bytes[8], bytes[9]]);
        let mut build = [0; 32];
        build.copy_from_slice(&bytes[14..]);
        Ok(Self { chosen: (chosen != 0).then_some(chosen), versions: versions(&bytes[10..14])?, build: Sha256(build) })
    }

    /// The dialling side's check of an answer.
    pub fn accept(&self, ours: Versions) -> Result<u16, HelloError> {
        match self.chosen {
            None => Err(HelloError::NoCommonVersion { ours, theirs: self.versions }),
            Some(v) if v < ours.min || v > ours.max => Err(HelloError::NotOffered { chosen: v, ours }),
            Some(v) => Ok(v),
        }
    }
}

fn newest_common(a: Versions, b: Versions) -> Option<u16> {
    let newest = a.max.min(b.max);
    (newest >= a.min.max(b.min)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn v(min: u16, max: u16) -> Versions {
        Versions { min, max }
    }

    #[test]
    fn the_newest_common_version_wins() {
        for (ours, theirs, chosen) in [
            (v(1, 1), v(1, 1), Some(1)),
            (v(1, 3), v(2, 5), Some(3)),
            (v(2, 5), v(1, 3), Some(3)),
            (v(1, 1), v(2, 3), None),
            (v(4, 5), v(2, 3), None),
        ] {
            let build = Sha256::of(b"build");
            let reply = HelloReply::answer(ours, build, &Hello { versions: theirs, build });
            assert_eq!(reply.chosen, chosen, "{ours:?} {theirs:?}");
            let read = HelloReply::parse(&reply.encode()).unwrap();
            assert_eq!(read, reply);
            match chosen {
                Some(c) => assert_eq!(read.accept(theirs), Ok(c)),
                None => {
                    let failure = Failure::from(read.accept(theirs).unwrap_err());
                    assert!(failure.message.contains("no wire version in common"), "{failure}");
                }
            }
        }
    }

    #[test]
    fn a_version_that_was_not_offered_is_refused() {
        let reply = HelloReply { chosen: Some(9), versions: v(1, 9), build: Sha256::of(b"") };
        assert_eq!(reply.accept(v(1, 2)), Err(HelloError::NotOffered { chosen: 9, ours: v(1, 2) }));
    }

    #[test]
    fn the_bytes_of_a_hello_are_fixed() {
        let hello = Hello { versions: v(1, 2), build: Sha256([0xab; 32]) };
        let mut want = b"DRUMS\r\n\0\x00\x01\x00\x02".to_vec();
        want.extend([0xab; 32]);
        assert_eq!(hello.encode().to_vec(), want);
        assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), HELLO_LEN)) {
            let mut bytes: [u8; HELLO_LEN] = bytes.try_into().unwrap();
            if bytes[..8] != MAGIC {
                prop_assert_eq!(Hello::parse(&bytes), Err(HelloError::NotDrums));
            }
            bytes[..8].copy_from_slice(&MAGIC);
            let _ = Hello::parse(&bytes);
        }
    }
}
