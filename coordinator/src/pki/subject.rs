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
const OPERATOR: &str = "drums:operator:";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Agent {
        host: HostId,
        installation: InstallationId,
        /// Of the certificate's DER.
        certificate: Sha256,
    },
    Operator {
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

pub(super) fn operator_uri(name: &str) -> String {
    format!("{OPERATOR}{name}")
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
    let name = uri.strip_prefix(OPERATOR).filter(|n| !n.is_empty()).ok_or_else(bad)?;
    Ok(Subject::Operator { name: name.to_owned(), certificate })
}
