//! What every backend does alike: our own types as text and back, and what is answered to a token and a registration.

use std::str::FromStr;

use drums_common::{clock::Micros, digest::Sha256, experiment::Registration, ids::Generation};
use drums_provider::token::ClientToken;

use super::{HostRow, Ownership, Registered, StoreError};
use crate::net::ports::{Launched, Proven, Redemption, Shown, Started, TokenRefusal};

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

/// What a launch made, as it is stored.
pub(super) struct RawLaunched {
    pub launch: String,
    pub account: String,
    pub region: String,
    pub image: String,
    pub kind: String,
    pub instance: Option<String>,
    pub started: Option<i64>,
    /// Who proved to be it.
    pub host: Option<String>,
}

pub(super) fn launched(raw: &RawLaunched) -> Result<Launched, StoreError> {
    let instance = match (&raw.instance, raw.started) {
        (Some(id), Some(at)) => Some(Started { id: read("instance id", id)?, at: Micros(at) }),
        _ => None,
    };
    Ok(Launched {
        launch: read("launch", &raw.launch)?,
        account: raw.account.clone(),
        region: read("region", &raw.region)?,
        image: read("image id", &raw.image)?,
        kind: read("instance type", &raw.kind)?,
        instance,
    })
}

/// A launch in words, for who says that it is another one.
fn words(l: &Launched) -> String {
    format!("image {} and type {} in {} of account {}", l.image, l.kind, l.region, l.account)
}

/// Whether a further token of a launch is of what is stored under that launch.
pub(super) fn same_launch(held: &Launched, given: &Launched) -> Result<(), StoreError> {
    let of = |l: &Launched| Launched { instance: None, ..l.clone() };
    match of(held) == of(given) {
        true => Ok(()),
        false => Err(StoreError::OtherLaunch { launch: held.launch, held: words(held), given: words(given) }),
    }
}

/// What is to be done where a launch is said to be an instance, given what it is already and whose the instance is; true if
/// it is news.
pub(super) fn launched_as_answer(
    launch: ClientToken,
    held: Option<RawLaunched>,
    other: Option<&str>,
    started: &Started,
) -> Result<bool, StoreError> {
    let Some(held) = held else { return Err(StoreError::Missing { what: "launch", id: launch.to_string() }) };
    let refused = |held: String| {
        let given = format!("instance {}", started.id);
        Err(StoreError::OtherLaunch { launch, held, given })
    };
    match launched(&held)?.instance {
        Some(same) if same == *started => Ok(false),
        Some(was) => refused(format!("instance {} since {}", was.id, was.at)),
        None => match other {
            Some(other) => refused(format!("no instance yet, since {} is of the launch {other}", started.id)),
            None => Ok(true),
        },
    }
}

/// A token as it is stored, with its host's release and the launch that it is bound to.
pub(super) struct TokenRow {
    pub host: String,
    pub expires: i64,
    pub key: Option<String>,
    pub released: Option<i64>,
    pub launched: Option<RawLaunched>,
}

/// The answer to an attempt to use a token; none if it is to be used up now.
pub(super) fn token_answer(
    found: Option<TokenRow>,
    r: &Redemption,
) -> Result<Option<Result<(), TokenRefusal>>, StoreError> {
    let Some(row) = found else { return Ok(Some(Err(TokenRefusal::Unknown))) };
    if row.host != r.host.as_str() {
        return Ok(Some(Err(TokenRefusal::WrongHost(read("host name", &row.host)?))));
    }
    if row.released.is_some() {
        return Ok(Some(Err(TokenRefusal::Released)));
    }
    let answer = match row.key {
        Some(key) if key != r.key_sha256.to_string() => Some(Err(TokenRefusal::Reused)),
        _ if r.now.0 >= row.expires => Some(Err(TokenRefusal::Expired)),
        // The same key again: the reply to the first attempt was lost.
        Some(_) => Some(Ok(())),
        None => None,
    };
    // Also whoever repeats an attempt must be the instance.
    if !matches!(answer, Some(Err(_)))
        && let Some(bound) = row.launched
        && let Some(refusal) = instance_refusal(&bound, r)?
    {
        return Ok(Some(Err(refusal)));
    }
    Ok(answer)
}

/// Why a token of a launch is not used by who shows it.
fn instance_refusal(bound: &RawLaunched, r: &Redemption) -> Result<Option<TokenRefusal>, StoreError> {
    let launched = launched(bound)?;
    if !matches!(&r.shown, Shown::Proven(proven) if proven.is_of(&launched)) {
        return Ok(Some(TokenRefusal::NotTheInstance(launched.launch)));
    }
    match &bound.host {
        Some(host) if host != r.host.as_str() => Ok(Some(TokenRefusal::InstanceTaken(read("host name", host)?))),
        _ => Ok(None),
    }
}

/// What a token that is used up now proves, which is kept beside its launch.
pub(super) fn proven(r: &Redemption) -> Option<&Proven> {
    match &r.shown {
        Shown::Proven(proven) => Some(proven),
        Shown::Nothing | Shown::Claimed(_) => None,
    }
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
