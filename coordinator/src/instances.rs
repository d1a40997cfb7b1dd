//! What launched hosts are believed by: AWS's certificates, in the table `[identity]` of the configuration.
//!
//! ```text
//! [identity.certificates]
//! eu-central-1 = "/etc/drums/aws/eu-central-1.pem"    # RSA-2048, as AWS's page of regional certificates has it
//! ```

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use drums_identity::{BadCertificate, Certificates};
use drums_provider::words::Region;
use serde::{Deserialize, Serialize};

/// As written in `coordinator.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdentityConfig {
    /// By region, the file with the certificate that AWS signs that region's identity documents with. A region without one
    /// has no host enrolled that was launched there.
    pub certificates: BTreeMap<Region, PathBuf>,
}

/// What is wrong with that table, with its place in it.
#[derive(Debug, thiserror::Error)]
pub enum IdentityConfigError {
    #[error(
        "identity.certificates is empty; name a file for each region that hosts are launched in, or remove [identity]"
    )]
    Empty,
    #[error("identity.certificates.{region} is {}; give an absolute path", path.display())]
    Relative { region: Region, path: PathBuf },
    #[error("cannot read identity.certificates.{region}, {}", path.display())]
    Read { region: Region, path: PathBuf, source: io::Error },
    #[error("identity.certificates.{region}, {}, is not acceptable", path.display())]
    Bad { region: Region, path: PathBuf, source: Box<BadCertificate> },
}

impl IdentityConfig {
    /// Each file read and looked at: what is found only once a paid host enrols is found too late.
    pub fn certificates(&self) -> Result<Certificates, IdentityConfigError> {
        if self.certificates.is_empty() {
            return Err(IdentityConfigError::Empty);
        }
        let mut pems = Vec::new();
        for (region, path) in &self.certificates {
            let pem = read(region, path)?;
            let alone = Certificates::new([(region.clone(), pem.as_str())]);
            let bad = |e| IdentityConfigError::Bad { region: region.clone(), path: path.clone(), source: Box::new(e) };
            alone.map_err(bad)?;
            pems.push((region, pem));
        }
        let all = Certificates::new(pems.iter().map(|(region, pem)| ((*region).clone(), pem.as_str())));
        // Each was taken alone, and a table names each region once.
        Ok(all.expect("certificates that are taken one by one are taken together"))
    }
}

fn read(region: &Region, path: &Path) -> Result<String, IdentityConfigError> {
    if !path.is_absolute() {
        return Err(IdentityConfigError::Relative { region: region.clone(), path: path.to_owned() });
    }
    std::fs::read_to_string(path).map_err(|source| IdentityConfigError::Read {
        region: region.clone(),
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use drums_common::telemetry::chain;

    use super::*;
    use crate::config::RawConfig;

    const SIGNER: &str = include_str!("../../infra/identity/tests/fixtures/signer.pem");
    const ELLIPTIC: &str = include_str!("../../infra/identity/tests/fixtures/elliptic.pem");

    #[test]
    fn certificates_are_read_with_the_configuration_or_refused_with_their_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let (good, elliptic, empty) = (file("a.pem", SIGNER), file("b.pem", ELLIPTIC), file("c.pem", ""));
        let missing = dir.path().join("none.pem").display().to_string();
        let of = |table: &str| {
            let path = file("coordinator.toml", &format!("[identity.certificates]\n{table}\n"));
            RawConfig::read(path.as_ref()).and_then(|raw| raw.unwrap().validate())
        };
        let read = of(&format!("eu-central-1 = \"{good}\"\nus-east-1 = \"{good}\"")).unwrap();
        let expected = ["eu-central-1", "us-east-1"].map(|region| (region.parse().unwrap(), SIGNER));
        assert_eq!(read.certificates, Certificates::new(expected).unwrap());
        assert_eq!(RawConfig::default().validate().unwrap().certificates, Certificates::default());

        for (table, words) in [
            (format!("eu-central-1 = \"{missing}\""), vec!["identity.certificates.eu-central-1", "none.pem"]),
            (format!("us-east-1 = \"{elliptic}\""), vec!["identity.certificates.us-east-1", "b.pem", "RSA-2048"]),
            (
                format!("eu-central-1 = \"{good}\"\nus-east-1 = \"{empty}\""),
                vec!["identity.certificates.us-east-1", "c.pem", "PEM"],
            ),
            ("eu-central-1 = \"a.pem\"".to_owned(), vec!["identity.certificates.eu-central-1", "absolute path"]),
            (String::new(), vec!["identity.certificates is empty"]),
            // TOML's own errors have line and column.
            (format!("nowhere = \"{good}\""), vec!["line 2", "nowhere", "a region's name"]),
            (format!("eu-central-1 = \"{good}\"\neu-central-1 = \"{good}\""), vec!["line 3", "duplicate key"]),
        ] {
            let said = chain(&of(&table).unwrap_err());
            assert!(words.iter().all(|w| said.contains(w)), "{table}: {said}");
        }
        let path = file("coordinator.toml", &format!("[identity]\nregion = \"{good}\"\n"));
        let said = chain(&RawConfig::read(path.as_ref()).unwrap_err());
        assert!(said.contains("line 2") && said.contains("unknown field"), "{said}");
    }
}
