//! What every backend does alike: our own types as text and back, and what is answered to a token and a registration.

use std::str::FromStr;

use drums_common::{clock::Micros, digest::Sha256, experiment::Registration, ids::Generation};

use super::{HostRow, Ownership, Registered, StoreError};
use crate::net::ports::{Redemption, TokenRefusal};

pub(super) fn read<T: FromStr>(what: &'static str, text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| corrupt(what, text))
}

pub(super) fn read_json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|_| corrupt(what, text))
}

fn corrupt(what: &'static str, text: &str) -> StoreError {
    StoreError::Corrupt { what, got: text.chars().take(120).collect() }
}

/// Our own types serialise; a failure would be a map with keys that are no texts.
pub(super) fn json<T: serde::Serialize>(what: &'static str, value: &T) -> Result<String, StoreError> {
    json_of(what, value, 128)
}

/// A text that grows to its size by doubling is copied as often: for what may be long, about how many `bytes` it takes.
pub(super) fn json_of<T: serde::Serialize>(what: &'static str, value: &T, bytes: usize) -> Result<String, StoreError> {
    let corrupt = |got: String| StoreError::Corrupt { what, got };
    let mut text = Vec::with_capacity(bytes);
    serde_json::to_writer(&mut text, value).map_err(|e| corrupt(e.to_string()))?;
    String::from_utf8(text).map_err(|e| corrupt(e.to_string()))
}

/// A host as it is stored.
pub(super) struct RawHost {
    pub name: String,
    pub ownership: String,
    pub kind: String,
    pub added: i64,
    pub released: Option<i64>,
    pub installation: Option<String>,
    pub facts: Option<String>,
    pub version: Option<String>,
    pub sha256: Option<String>,
    pub welcomed: Option<i64>,
    pub generation: i64,
    pub upgrade: Option<String>,
}

pub(super) fn host_row(raw: RawHost) -> Result<HostRow, StoreError> {
    Ok(HostRow {
        host: read("host name", &raw.name)?,
        ownership: if raw.ownership == "owned" { Ownership::Owned } else { Ownership::Adopted },
        kind: raw.kind,
        added: Micros(raw.added),
        released: raw.released.map(Micros),
        installation: raw.installation.map(|i| read("installation id", &i)).transpose()?,
        facts: raw.facts.map(|f| read_json("host's facts", &f)).transpose()?,
        agent_version: raw.version,
        agent_sha256: raw.sha256.map(|s| read("digest", &s)).transpose()?,
        welcomed: raw.welcomed.map(Micros),
        generation: generation(raw.generation)?,
        upgrade: raw.upgrade.map(|u| read_json("host's upgrade", &u)).transpose()?,
    })
}

pub(super) fn generation(stored: i64) -> Result<Generation, StoreError> {
    u32::try_from(stored).map(Generation).map_err(|_| corrupt("host's generation", &stored.to_string()))
}

/// A token as it is stored, with its host's release.
pub(super) struct TokenRow {
    pub host: String,
    pub expires: i64,
    pub key: Option<String>,
    pub released: Option<i64>,
}

/// The answer to an attempt to use a token; none if it is to be used up now.
pub(super) fn token_answer(
    found: Option<TokenRow>,
    r: &Redemption,
) -> Result<Option<Result<(), TokenRefusal>>, StoreError> {
    let Some(TokenRow { host, expires, key, released }) = found else { return Ok(Some(Err(TokenRefusal::Unknown))) };
    if host != r.host.as_str() {
        return Ok(Some(Err(TokenRefusal::WrongHost(read("host name", &host)?))));
    }
    if released.is_some() {
        return Ok(Some(Err(TokenRefusal::Released)));
    }
    Ok(match key {
        Some(key) if key != r.key_sha256.to_string() => Some(Err(TokenRefusal::Reused)),
        _ if r.now.0 >= expires => Some(Err(TokenRefusal::Expired)),
        // The same key again: the reply to the first attempt was lost.
        Some(_) => Some(Ok(())),
        None => None,
    })
}

/// The answer to a registration, given those of its experiment, latest last; none if it is to be stored now.
pub(super) fn registration_answer(there: &[String], sha: &str, amends: bool) -> Result<Option<Registered>, StoreError> {
    Ok(match there.last() {
        _ if there.iter().any(|t| t == sha) => Some(Registered::Before),
        Some(latest) if !amends => Some(Registered::Taken { latest: read("digest", latest)? }),
        None if amends => Some(Registered::NothingToAmend),
        _ => None,
    })
}

/// A registration from its digest, its canonical form and its time.
pub(super) fn thaw((sha, canonical, at): (String, String, i64)) -> Result<Registration, StoreError> {
    let sha256: Sha256 = read("digest", &sha)?;
    Registration::thaw(&canonical, sha256, Micros(at)).map_err(|_| corrupt("registration", &canonical))
}
