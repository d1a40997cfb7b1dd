//! Enrolment tokens: `drums1.` and base64url (no padding) of a small JSON object.
//!
//! A token says where the coordinator is, which CA it must show, which host may enrol with which secret, until when. The
//! secret is printed by one function only; `Debug` and `Display` never show it.

use std::{fmt, net::IpAddr};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

use crate::{clock::Micros, digest::Sha256, ids::HostId};

const PREFIX: &str = "drums1.";
/// A token of eight addresses stays below 1 KiB; more is not a token.
const MAX_TEXT: usize = 4 << 10;
const MAX_ADDRESSES: usize = 8;
pub const SECRET_BYTES: usize = 32;

/// One way to reach the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// An IP address or a DNS name.
    pub host: String,
    /// UDP port of the agents' endpoint.
    pub agents: u16,
    /// UDP port of the enrolment endpoint.
    pub enrol: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (agents {}, enrolment {})", self.host, self.agents, self.enrol)
    }
}

/// The secret of a token. Compared and stored only as its SHA-256.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    pub fn new(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(bytes)
    }
    pub fn bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }
    /// What the coordinator stores.
    pub fn sha256(&self) -> Sha256 {
        Sha256::of(&self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub addresses: Vec<Address>,
    /// SHA-256 of the CA certificate's DER.
    pub ca: Sha256,
    pub host: HostId,
    pub secret: Secret,
    pub expires: Micros,
}

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("the text is empty; expected a token as drumsctl host add prints it")]
    Empty,
    #[error("the text has {0} bytes, and a token has {MAX_TEXT} at most")]
    TooLong(usize),
    #[error("the text does not begin with {PREFIX}; expected a token as drumsctl host add prints it")]
    NotAToken,
    #[error("the part after {PREFIX} is not base64url without padding; copy the token again, as one line")]
    NotBase64(#[source] base64::DecodeError),
    #[error("the token's content is damaged; copy the token again, as one line")]
    BadContent(#[source] serde_json::Error),
    #[error("the token's secret has {0} bytes instead of {SECRET_BYTES}; copy the token again, as one line")]
    BadSecret(usize),
    #[error(
        "the token names {0} addresses, and 1 to {MAX_ADDRESSES} are allowed; make a new one with drumsctl host add"
    )]
    BadAddresses(usize),
    #[error("the token's address {0:?} is neither an IP address nor a DNS name; make a new one with drumsctl host add")]
    BadAddress(String),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    addresses: Vec<Address>,
    ca: Sha256,
    host: HostId,
    secret: String,
    expires_us: Micros,
}

impl Token {
    /// Reads a token; white space around it is ignored.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TokenError::Empty);
        }
        if text.len() > MAX_TEXT {
            return Err(TokenError::TooLong(text.len()));
        }
        let body = text.strip_prefix(PREFIX).ok_or(TokenError::NotAToken)?;
        let json = URL_SAFE_NO_PAD.decode(body).map_err(TokenError::NotBase64)?;
        let c: Content = serde_json::from_slice(&json).map_err(TokenError::BadContent)?;
        let secret = URL_SAFE_NO_PAD.decode(&c.secret).map_err(TokenError::NotBase64)?;
        let secret = <[u8; SECRET_BYTES]>::try_from(secret).map_err(|v| TokenError::BadSecret(v.len()))?;
        if c.addresses.is_empty() || c.addresses.len() > MAX_ADDRESSES {
            return Err(TokenError::BadAddresses(c.addresses.len()));
        }
        if let Some(bad) = c.addresses.iter().find(|a| !is_host(&a.host) || a.agents == 0 || a.enrol == 0) {
            return Err(TokenError::BadAddress(bad.host.chars().take(80).collect()));
        }
        Ok(Self { addresses: c.addresses, ca: c.ca, host: c.host, secret: Secret(secret), expires: c.expires_us })
    }

    /// The token's text, secret and all: for the one who asked for it, never for a log.
    pub fn reveal(&self) -> String {
        let c = Content {
            addresses: self.addresses.clone(),
            ca: self.ca,
            host: self.host.clone(),
            secret: URL_SAFE_NO_PAD.encode(self.secret.0),
            expires_us: self.expires,
        };
        let json = serde_json::to_vec(&c).expect("strings and numbers always serialise");
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(json))
    }

    pub fn expired(&self, now: Micros) -> bool {
        now >= self.expires
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}[secret] for host {} under CA {}", self.host, self.ca.short())
    }
}

/// True for an IP address or something a resolver may be asked for.
pub fn is_host(text: &str) -> bool {
    if text.parse::<IpAddr>().is_ok() {
        return true;
    }
    !text.is_empty()
        && text.len() <= 253
        && text.split('.').all(|label| {
            !label.is_empty()
                && label.len() <= 63
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> Token {
        Token {
            addresses: vec![Address { host: "198.18.0.1".into(), agents: 7400, enrol: 7401 }],
            ca: Sha256::of(b"ca"),
            host: "h1".parse().unwrap(),
            secret: Secret::new([7; SECRET_BYTES]),
            expires: Micros(1_000_000),
        }
    }

    #[test]
    fn tokens_round_trip() {
        let t = token();
        assert_eq!(Token::parse(&format!("  {}\n", t.reveal())).unwrap(), t);
        assert!(t.reveal().starts_with("drums1."));
        assert!(t.expired(Micros(1_000_000)) && !t.expired(Micros(999_999)));
    }

    #[test]
    fn the_secret_is_never_printed() {
        let t = token();
        let encoded = URL_SAFE_NO_PAD.encode([7u8; SECRET_BYTES]);
        for text in [format!("{t}"), format!("{t:?}"), format!("{t:#?}")] {
            assert!(!text.contains(&encoded) && !text.contains("7, 7") && text.contains("[secret]"), "{text}");
        }
    }

    #[test]
    fn malformed_tokens_are_refused_with_a_reason() {
        let good = token().reveal();
        let cut = &good[..good.len() - 5];
        let raw = |json: &str| format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(json));
        let with = |f: &dyn Fn(&mut Token)| {
            let mut t = token();
            f(&mut t);
            t.reveal()
        };
        for (text, want) in [
            (String::new(), "empty"),
            ("hello".into(), "does not begin with"),
            (good.replacen("drums1.", "drums2.", 1), "does not begin with"),
            (format!("{good}=="), "base64url"),
            (cut.to_owned(), "damaged"),
            (raw("{}"), "damaged"),
            (raw("[1,2"), "damaged"),
            ("x".repeat(5000), "5000 bytes"),
            (with(&|t| t.addresses.clear()), "0 addresses"),
            (with(&|t| t.addresses[0].host = "a b".into()), "neither an IP address"),
            (with(&|t| t.addresses[0].agents = 0), "neither an IP address"),
        ] {
            let e = Token::parse(&text).unwrap_err().to_string();
            assert!(e.contains(want) || want == "damaged" && e.contains("base64url"), "{text:.20}: {e}");
        }
    }

    #[test]
    fn hosts_are_addresses_or_names() {
        for ok in ["10.0.0.1", "::1", "bench", "a-b.example.org"] {
            assert!(is_host(ok), "{ok}");
        }
        for bad in ["", "-a", "a..b", "a_b", "a b", "a/b", "é"] {
            assert!(!is_host(bad), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}") {
            let _ = Token::parse(&text);
            let _ = Token::parse(&format!("drums1.{text}"));
            let _ = Token::parse(&format!("drums1.{}", URL_SAFE_NO_PAD.encode(text)));
        }
    }
}
