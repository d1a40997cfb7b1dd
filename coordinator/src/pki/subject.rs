//! Who a certificate speaks for.

use drums_common::{
    digest::Sha256,
    ids::{HostId, InstallationId},
};
use x509_parser::{
    extensions::{GeneralName, ParsedExtension},
    prelude::{FromDer as _, X509Certificate},
};

const AGENT: &str = "drums:agent:";

/// What a person's certificate allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Everything.
    Operator,
    /// To look at everything, and to change nothing.
    Viewer,
}

impl Role {
    pub const ALL: [Self; 2] = [Self::Operator, Self::Viewer];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Viewer => "viewer",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Role {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|r| r.as_str() == text);
        found.ok_or_else(|| format!("{text:?} is not a role; expected operator or viewer"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Agent {
        host: HostId,
        installation: InstallationId,
        /// Of the certificate's DER.
        certificate: Sha256,
    },
    Person {
        role: Role,
        name: String,
        certificate: Sha256,
    },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotAnAgent {
    #[error("the certificate cannot be parsed")]
    Malformed,
    #[error("the certificate carries no DrumsBench name")]
    NoName,
    #[error("the certificate carries more than one DrumsBench name")]
    ManyNames,
    #[error("the certificate's name {0:?} is malformed")]
    BadName(String),
}

pub(super) fn agent_uri(host: &HostId, installation: InstallationId) -> String {
    format!("{AGENT}{host}:{installation}")
}

pub(super) fn person_uri(role: Role, name: &str) -> String {
    format!("drums:{role}:{name}")
}

/// Reads the name in a certificate that was verified before.
pub fn subject_of(der: &[u8]) -> Result<Subject, NotAnAgent> {
    let (_, cert) = X509Certificate::from_der(der).map_err(|_| NotAnAgent::Malformed)?;
    let mut found = None;
    for extension in cert.extensions() {
        let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else { continue };
        for name in &names.general_names {
            let GeneralName::URI(uri) = name else { continue };
            if !uri.starts_with("drums:") {
                continue;
            }
            if found.replace(parse(uri, Sha256::of(der))?).is_some() {
                return Err(NotAnAgent::ManyNames);
            }
        }
    }
    found.ok_or(NotAnAgent::NoName)
}

pub(super) fn parse(uri: &str, certificate: Sha256) -> Result<Subject, NotAnAgent> {
    let bad = || NotAnAgent::BadName(uri.chars().take(120).collect());
    if let Some(rest) = uri.strip_prefix(AGENT) {
        let (host, installation) = rest.split_once(':').ok_or_else(bad)?;
        let (host, installation) = (host.parse().map_err(|_| bad())?, installation.parse().map_err(|_| bad())?);
        return Ok(Subject::Agent { host, installation, certificate });
    }
    let (role, name) = uri.strip_prefix("drums:").and_then(|r| r.split_once(':')).ok_or_else(bad)?;
    let role = role.parse().map_err(|_| bad())?;
    if name.is_empty() {
        return Err(bad());
    }
    Ok(Subject::Person { role, name: name.to_owned(), certificate })
}
