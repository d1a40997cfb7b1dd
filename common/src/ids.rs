//! Typed identifiers. A bare String or integer never names a thing in a signature.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Why a text is not an identifier of the wanted kind.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{got:?} is not {what}: expected {expected}")]
pub struct BadId {
    pub what: &'static str,
    pub got: String,
    pub expected: &'static str,
}

fn bad(what: &'static str, got: &str, expected: &'static str) -> BadId {
    BadId { what, got: got.chars().take(80).collect(), expected }
}

macro_rules! text_serde {
    ($t:ty) => {
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(de::Error::custom)
            }
        }
        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

/// `EXP-NNN`: never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExperimentId(pub u16);
impl fmt::Display for ExperimentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EXP-{:03}", self.0)
    }
}
impl FromStr for ExperimentId {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        let e = || bad("an experiment id", s, "EXP- and three digits, as in EXP-028");
        let n = s.strip_prefix("EXP-").ok_or_else(e)?;
        if n.len() != 3 || !n.bytes().all(|b| b.is_ascii_digit()) || n == "000" {
            return Err(e());
        }
        Ok(Self(n.parse().map_err(|_| e())?))
    }
}
text_serde!(ExperimentId);

/// One execution of a registration, `run-` and 12 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub [u8; 6]);
impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run-{}", hex::encode(self.0))
    }
}
impl FromStr for RunId {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        let e = || bad("a run id", s, "run- and 12 hexadecimal digits, as drumsctl runs prints");
        let mut out = [0; 6];
        hex::decode_to_slice(s.strip_prefix("run-").ok_or_else(e)?, &mut out).map_err(|_| e())?;
        Ok(Self(out))
    }
}
text_serde!(RunId);

/// A coordinator home or an agent's state folder: 8 hexadecimal digits drawn once. Part of every name that an agent
/// makes on its machine, so that two installations never touch each other's things.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstallationId(pub [u8; 4]);
impl fmt::Display for InstallationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
impl FromStr for InstallationId {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        let mut out = [0; 4];
        hex::decode_to_slice(s, &mut out).map_err(|_| bad("an installation id", s, "8 hexadecimal digits"))?;
        Ok(Self(out))
    }
}
text_serde!(InstallationId);

macro_rules! name_id {
    ($(#[$m:meta])* $t:ident, $what:literal, $max:literal, $expected:literal) => {
        $(#[$m])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $t(String);
        impl $t {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl FromStr for $t {
            type Err = BadId;
            fn from_str(s: &str) -> Result<Self, BadId> {
                let ok = !s.is_empty()
                    && s.len() <= $max
                    && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                    && !s.starts_with('-')
                    && !s.ends_with('-');
                if ok { Ok(Self(s.to_owned())) } else { Err(bad($what, s, $expected)) }
            }
        }
        text_serde!($t);
    };
}

name_id!(
    /// A host as its operator named it.
    HostId, "a host name", 32, "1 to 32 of a-z, 0-9 and -, not beginning or ending with -");
name_id!(
    /// An arm as the spec names it; unique in the spec.
    ArmName, "an arm name", 40, "1 to 40 of a-z, 0-9 and -, not beginning or ending with -");
name_id!(
    /// A workload as its operator named it; what counts is its digest.
    WorkloadName, "a workload name", 40, "1 to 40 of a-z, 0-9 and -, not beginning or ending with -");

/// Fencing generation: a later holder has a larger one, and older holders are answered, never obeyed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u32);
impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A session of one agent: a counter that the agent's ledger never hands out twice, and the generation under which it
/// was made. Every resource name derives from it, so a retry never collides with a corpse.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionRef {
    pub number: u32,
    pub generation: Generation,
}
impl fmt::Display for SessionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}g{}", self.number, self.generation)
    }
}
impl fmt::Debug for SessionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text() {
        assert_eq!("EXP-028".parse::<ExperimentId>().unwrap().to_string(), "EXP-028");
        assert_eq!("run-0123456789ab".parse::<RunId>().unwrap().to_string(), "run-0123456789ab");
        assert_eq!("h1".parse::<HostId>().unwrap().as_str(), "h1");
    }

    #[test]
    fn malformed_ids_are_refused() {
        for s in ["EXP-28", "EXP-0281", "EXP-000", "exp-028", "028"] {
            assert!(s.parse::<ExperimentId>().is_err(), "{s}");
        }
        for s in ["", "-a", "a-", "A", "a_b", "é", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"] {
            assert!(s.parse::<HostId>().is_err(), "{s}");
        }
    }
}
