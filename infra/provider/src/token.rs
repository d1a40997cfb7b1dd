//! The client token of one attempt to launch one host, which is also the evidence of who launched it.
//!
//! ```text
//! drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0002
//!        │        │          │                └ attempt, so that a relaunch is a new instance
//!        │        │          └ host and campaign (SHA-256, first 8 bytes)
//!        │        └ the registered deadline, seconds since 1970
//!        └ installation
//! ```
//! Tags can be edited by hand; a client token cannot. EC2 shows it with the instance, so that a sweeper without any
//! database still knows the installation and the deadline that an instance was launched with.

use std::{fmt, str::FromStr};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    ids::{BadId, HostId, InstallationId},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    deadline::{Campaign, LAST_S},
    words::CampaignId,
};

/// Before everything that is ours. A client token has at most 64 characters; this one has 48.
const PREFIX: &str = "drums1-";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientToken {
    installation: InstallationId,
    deadline_s: i64,
    host: [u8; 8],
    attempt: u16,
}

impl ClientToken {
    pub(crate) fn new(installation: InstallationId, host: &HostId, campaign: &Campaign, attempt: u16) -> Self {
        let deadline_s = campaign.deadline().0 / 1_000_000;
        Self { installation, deadline_s, host: digest(host, campaign.id()), attempt }
    }

    pub fn installation(&self) -> InstallationId {
        self.installation
    }
    /// As registered when the instance was launched.
    pub fn deadline(&self) -> Micros {
        Micros(self.deadline_s * 1_000_000)
    }
    pub fn attempt(&self) -> u16 {
        self.attempt
    }
    /// Whether it is of this host in this campaign, whichever attempt.
    pub fn is_of(&self, host: &HostId, campaign: &CampaignId) -> bool {
        self.host == digest(host, campaign)
    }
    /// What every token of an installation begins with: for EC2's filter, which takes `*`.
    pub fn filter(installation: InstallationId) -> String {
        format!("{PREFIX}{installation}-*")
    }
}

fn digest(host: &HostId, campaign: &CampaignId) -> [u8; 8] {
    // Neither name can hold a line's end.
    let whole = Sha256::of(format!("{campaign}\n{host}").as_bytes());
    let mut out = [0; 8];
    out.copy_from_slice(&whole.0[..8]);
    out
}

impl fmt::Display for ClientToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = u64::from_be_bytes(self.host);
        write!(f, "{PREFIX}{}-{:010x}-{host:016x}-{:04x}", self.installation, self.deadline_s, self.attempt)
    }
}
impl fmt::Debug for ClientToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClientToken {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        let read = || {
            let mut parts = s.strip_prefix(PREFIX)?.split('-');
            let installation = parts.next()?.parse().ok()?;
            let deadline_s = i64::from_str_radix(parts.next()?, 16).ok()?;
            let host = u64::from_str_radix(parts.next()?, 16).ok()?.to_be_bytes();
            let attempt = u16::from_str_radix(parts.next()?, 16).ok()?;
            Some(Self { installation, deadline_s, host, attempt })
        };
        // Only what would be written again letter by letter: signs, capitals and more parts are not ours.
        read().filter(|t| (1..LAST_S).contains(&t.deadline_s) && t.to_string() == s).ok_or_else(|| BadId {
            what: "a client token of ours",
            got: s.chars().take(80).collect(),
            expected: "drums1-, and installation, deadline, host and attempt in hexadecimal digits",
        })
    }
}

impl Serialize for ClientToken {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for ClientToken {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tokens_are_read_as_they_are_written_and_differ_by_what_they_name(
            installation in any::<[u8; 4]>(), s in 1i64..(1 << 34), attempt in any::<u16>(), other in any::<u16>(),
        ) {
            let campaign = Campaign::new("c1".parse().unwrap(), Micros(s * 1_000_000), None).unwrap();
            let host: HostId = "h1".parse().unwrap();
            let token = ClientToken::new(InstallationId(installation), &host, &campaign, attempt);
            prop_assert_eq!(token.to_string().parse::<ClientToken>().unwrap(), token);
            prop_assert!(token.to_string().len() <= 64 && token.to_string().is_ascii());
            prop_assert_eq!((token.deadline(), token.attempt()), (campaign.deadline(), attempt));
            let second = ClientToken::new(InstallationId(installation), &host, &campaign, other);
            prop_assert_eq!(second == token, other == attempt);
            prop_assert!(token.is_of(&host, campaign.id()) && !token.is_of(&"h2".parse().unwrap(), campaign.id()));
        }

        #[test]
        fn whatever_a_token_of_ours_says_its_deadline_is_an_instant(digits in "[0-9a-f]{10,16}") {
            let text = format!("drums1-01020304-{digits}-0000000000000000-0001");
            if let Ok(token) = text.parse::<ClientToken>() {
                prop_assert!(token.deadline() > Micros(0));
            } else {
                prop_assert!(i64::from_str_radix(&digits, 16).map_or(true, |s| !(1..LAST_S).contains(&s) || digits.len() > 10));
            }
        }

        #[test]
        fn no_text_is_read_as_a_token_but_a_token(text in "(drums1-)?[0-9a-fA-F+-]{0,50}") {
            if let Ok(token) = text.parse::<ClientToken>() {
                prop_assert_eq!(token.to_string(), text);
            }
        }
    }
}
