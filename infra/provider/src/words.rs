//! Names that the cloud gives, each with its type; and instants as people and tags write them.

use std::{fmt, str::FromStr};

use drums_common::{clock::Micros, ids::BadId};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

macro_rules! cloud_id {
    ($(#[$m:meta])* $t:ident, $what:literal, $ok:expr, $expected:literal) => {
        $(#[$m])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $t(String);
        impl $t {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $t {
            type Err = BadId;
            fn from_str(s: &str) -> Result<Self, BadId> {
                let ok: fn(&str) -> bool = $ok;
                if ok(s) {
                    Ok(Self(s.to_owned()))
                } else {
                    Err(BadId { what: $what, got: s.chars().take(80).collect(), expected: $expected })
                }
            }
        }
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&self.0)
            }
        }
        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

/// `prefix` and 8 or more lower-case hexadecimal digits, as EC2 numbers things.
fn numbered(s: &str, prefix: &str) -> bool {
    s.strip_prefix(prefix).is_some_and(|n| {
        (8..=32).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    })
}

fn plain(s: &str, max: usize, more: &[u8]) -> bool {
    !s.is_empty()
        && s.len() <= max
        && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || more.contains(&b))
        && s.starts_with(|c: char| c.is_ascii_alphanumeric())
        && s.ends_with(|c: char| c.is_ascii_alphanumeric())
}

cloud_id!(
    /// An EC2 instance.
    InstanceId, "an instance id", |s| numbered(s, "i-"), "i- and hexadecimal digits, as in i-0123456789abcdef0");
cloud_id!(
    /// An EBS volume.
    VolumeId, "a volume id", |s| numbered(s, "vol-"), "vol- and hexadecimal digits");
cloud_id!(
    /// A machine image.
    ImageId, "an image id", |s| numbered(s, "ami-"), "ami- and hexadecimal digits");
cloud_id!(
    /// A subnet of a VPC; it fixes the availability zone.
    SubnetId, "a subnet id", |s| numbered(s, "subnet-"), "subnet- and hexadecimal digits");
cloud_id!(
    /// A security group.
    SecurityGroupId, "a security group id", |s| numbered(s, "sg-"), "sg- and hexadecimal digits");
cloud_id!(
    /// An instance profile of IAM, by its name.
    InstanceProfile, "an instance profile",
    |s| (1..=128).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"+=,.@-_".contains(&b)),
    "a name of 1 to 128 letters, digits and +=,.@-_, as in drums-host-0a1b2c3d");
cloud_id!(
    /// A region, as `eu-central-1`.
    Region, "a region",
    |s| plain(s, 32, b"-") && s.contains('-') && s.ends_with(|c: char| c.is_ascii_digit()),
    "a region's name, as in eu-central-1");
cloud_id!(
    /// An availability zone, as `eu-central-1a`.
    Zone, "an availability zone", |s| plain(s, 40, b"-") && s.contains('-'), "a zone's name, as in eu-central-1a");
cloud_id!(
    /// An EC2 instance type, as `c8i.2xlarge`.
    InstanceType, "an instance type",
    |s| plain(s, 32, b"-.") && s.split('.').count() == 2, "a family, a dot and a size, as in c8i.2xlarge");
cloud_id!(
    /// What an operator asked for at once: hosts, a deadline and a cap. A run's campaign is named as the run.
    CampaignId, "a campaign", |s| plain(s, 32, b"-"), "1 to 32 of a-z, 0-9 and -, not beginning or ending with -");

impl InstanceType {
    /// Flex types share their processors with others: no timing of theirs means anything.
    pub fn is_flex(&self) -> bool {
        self.0.split_once('.').is_some_and(|(family, _)| family.ends_with("-flex"))
    }
}

/// The instant as tags and people write it, to the second and rounded down: `2026-11-30T19:10:00Z`.
pub fn instant_text(at: Micros) -> String {
    match jiff::Timestamp::from_second(at.0.div_euclid(1_000_000)) {
        Ok(t) => t.to_string(),
        // Years that no calendar has: shown, never read back.
        Err(_) => at.to_string(),
    }
}

/// An instant with its offset as RFC 3339 writes it; `None` for anything else.
pub fn read_instant(text: &str) -> Option<Micros> {
    text.trim().parse::<jiff::Timestamp>().ok().map(|t| Micros(t.as_microsecond()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_things_are_refused() {
        assert!("i-0123456789abcdef0".parse::<InstanceId>().is_ok());
        for bad in ["", "i-", "i-xyz", "i-0123456G", "vol-0123456789abcdef0", "i-0123456789abcdef0 ", "I-01234567"] {
            assert!(bad.parse::<InstanceId>().is_err(), "{bad}");
        }
        for bad in ["", "eu", "eu-central", "EU-CENTRAL-1", "eu central 1", "-1"] {
            assert!(bad.parse::<Region>().is_err(), "{bad}");
        }
        for bad in ["", "c8i", "c8i.", ".large", "c8i.2x.large", "C8I.large"] {
            assert!(bad.parse::<InstanceType>().is_err(), "{bad}");
        }
        let text = "nonsense".parse::<Region>().unwrap_err().to_string();
        assert!(text.contains("nonsense") && text.contains("eu-central-1"), "{text}");
    }

    #[test]
    fn flex_types_are_told_apart() {
        assert!("m7i-flex.large".parse::<InstanceType>().unwrap().is_flex());
        for kind in ["m7i.large", "c8i.metal-48xl", "c8i.2xlarge"] {
            assert!(!kind.parse::<InstanceType>().unwrap().is_flex(), "{kind}");
        }
    }

    #[test]
    fn instants_are_read_as_they_are_written() {
        let at = Micros(1_796_000_000_000_000);
        assert_eq!(read_instant(&instant_text(at)), Some(at));
        assert_eq!(instant_text(Micros(at.0 + 999_999)), instant_text(at));
        for bad in ["", "never", "0", "2026-11-30", "2026-11-30T19:10:00"] {
            assert_eq!(read_instant(bad), None, "{bad}");
        }
    }
}
