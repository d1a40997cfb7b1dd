//! The private CA of a home: who is the coordinator, who is an operator, which agent is which host.
//!
//! Owns the key files (mode 0600) and what a certificate says. Knows no network. Server certificates carry one fixed
//! name (`SERVER_NAME`), so that addresses may change; agents carry `drums:agent:<host>:<installation>`, people
//! `drums:<role>:<name>`, as URI in the subject's alternative names.
//!
//! ```text
//! pki/ca.{pem,key}  server.{pem,key}  operator.{pem,key}  quic.key (stateless resets and connection ids)
//!    server.renewed.pem (key and certificate of the last rotation; in use instead of server.{pem,key} once it is there)
//! ```

mod files;
mod server;
mod subject;

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    ids::{HostId, InstallationId},
};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

pub use self::{
    server::{Rotated, ServerCertificate, Shown, rotate_server},
    subject::{NotAnAgent, Role, Subject, subject_of},
};

/// The CA and the server: ten years, longer than any use of a home; replacing a CA means enrolling every agent again. Nobody
/// is asked whether a server's certificate still counts, so its end is what a stolen key is good for, unless the CA goes.
const CA_DAYS: i64 = 3_650;
/// Agents and operators: two years. An agent whose certificate ends is enrolled again with a new token.
const LEAF_DAYS: i64 = 730;
/// Certificates begin a day early: agents' clocks may be behind.
const EARLY_DAYS: i64 = 1;
const DAY_US: i64 = 86_400_000_000;

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is readable by others (mode {mode:o}); a key must have mode 600", path.display())]
    LooseKey { path: PathBuf, mode: u32 },
    #[error("{} is not what was written there: {what}", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{} has some key files but not {missing}; restore it from a backup of the home", dir.display())]
    Incomplete { dir: PathBuf, missing: &'static str },
    #[error("cannot make {what}")]
    Make { what: &'static str, source: rcgen::Error },
    #[error("the signing request is malformed")]
    BadRequest { source: rcgen::Error },
    #[error("the time {0} is outside the calendar")]
    BadTime(Micros),
}

/// A certificate with its key, for rustls.
#[derive(Debug)]
pub struct Credentials {
    /// The leaf, then the CA: an enrolling agent knows the CA by its digest only.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

/// A certificate that was issued to an agent or a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub pem: String,
    pub sha256: Sha256,
    pub expires: Micros,
}

/// A signing request that holds together: its signature was made with the key it names.
#[derive(Debug)]
pub struct SigningRequest {
    parsed: CertificateSigningRequestParams,
    /// SHA-256 of the public key.
    pub key_sha256: Sha256,
}

impl SigningRequest {
    pub fn parse(der: &[u8]) -> Result<Self, PkiError> {
        let parsed = CertificateSigningRequestParams::from_der(&der.to_vec().into())
            .map_err(|source| PkiError::BadRequest { source })?;
        let key_sha256 = Sha256::of(parsed.public_key.der_bytes());
        Ok(Self { parsed, key_sha256 })
    }
}

/// An opened CA, and what this coordinator's servers show.
pub struct Pki {
    dir: PathBuf,
    ca: Ca,
    shown: Arc<Shown>,
}

struct Ca {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    fn open(dir: &Path) -> Result<Self, PkiError> {
        let (cert, key) = (dir.join("ca.pem"), dir.join("ca.key"));
        let damaged = |path: &Path, what: String| PkiError::Damaged { path: path.to_owned(), what };
        let pem = files::read_text(&cert)?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| damaged(&cert, e.to_string()))?;
        let pair = KeyPair::from_pem(&files::read_key(&key)?).map_err(|e| damaged(&key, e.to_string()))?;
        fits(&cert, &key, &der, &pair, &der)?;
        let issuer = Issuer::from_ca_cert_der(&der, pair).map_err(|e| damaged(&cert, e.to_string()))?;
        Ok(Self { pem, der, issuer })
    }
}

// The issuer holds the CA's key.
impl std::fmt::Debug for Pki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pki").field("dir", &self.dir).field("ca", &self.fingerprint()).finish_non_exhaustive()
    }
}

const FILES: [&str; 7] = ["ca.pem", "ca.key", "server.pem", "server.key", "operator.pem", "operator.key", "quic.key"];

impl Pki {
    /// True if `dir` has, or had, a CA's keys.
    pub fn is_there(dir: &Path) -> bool {
        FILES.iter().any(|f| dir.join(f).exists())
    }

    /// Opens the CA in `dir`, or makes everything if there is nothing. The second value is true if it was made. It is made
    /// beside `dir` and renamed, so that an attempt that broke off leaves nothing that counts. A folder that has only some
    /// of the files has lost the others: it is left alone and refused.
    pub fn open_or_create(dir: &Path, now: Micros) -> Result<(Self, bool), PkiError> {
        if Self::is_there(dir) {
            return Ok((Self::open(dir)?, false));
        }
        let begun = dir.with_extension("begun");
        files::remove_dir(&begun)?;
        Self::create(&begun, now)?;
        files::rename_dir(&begun, dir)?;
        Ok((Self::open(dir)?, true))
    }

    /// Keeps rotations away until it is dropped, for whoever copies the folder.
    pub fn hold(dir: &Path) -> Result<File, PkiError> {
        files::hold(dir)
    }

    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        complete(dir)?;
        let damaged = |path: &Path, what: String| PkiError::Damaged { path: path.to_owned(), what };
        let ca = Ca::open(dir)?;
        let shown = Arc::new(Shown::open(dir, &ca.der)?);
        let (cert, key) = (dir.join("operator.pem"), dir.join("operator.key"));
        let der = CertificateDer::from_pem_slice(files::read_text(&cert)?.as_bytes())
            .map_err(|e| damaged(&cert, e.to_string()))?;
        let pair = KeyPair::from_pem(&files::read_text(&key)?).map_err(|e| damaged(&key, e.to_string()))?;
        fits(&cert, &key, &der, &pair, &ca.der)?;
        Ok(Self { dir: dir.to_owned(), ca, shown })
    }

    fn create(dir: &Path, now: Micros) -> Result<(), PkiError> {
        files::make_private_dir(dir)?;
        let what = "the CA";
        let key = KeyPair::generate().map_err(|source| PkiError::Make { what, source })?;
        // A name of its own for each CA: a certificate of another home is then one of an unknown issuer, not one with a
        // bad signature.
        let name = format!("DrumsBench CA {}", hex::encode(rand::random::<[u8; 4]>()));
        let mut params = params(&name, now, CA_DAYS)?;
        // It signs leaves only, never another CA.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let cert = params.self_signed(&key).map_err(|source| PkiError::Make { what, source })?;
        let ca_pem = cert.pem();
        let key_pem = key.serialize_pem();
        let issuer = Issuer::new(params, key);

        let (server_cert, server_key) = server::make(&issuer, cert.der(), now)?;

        let what = "the operator's certificate";
        let operator_key = KeyPair::generate().map_err(|source| PkiError::Make { what, source })?;
        let operator = issue(&issuer, &operator_key, person("operator", Role::Operator, now)?, what)?;

        files::write(&dir.join("server.pem"), server_cert.pem().as_bytes(), 0o644)?;
        files::write(&dir.join("server.key"), server_key.serialize_pem().as_bytes(), 0o600)?;
        files::write(&dir.join("operator.pem"), operator.pem().as_bytes(), 0o644)?;
        files::write(&dir.join("operator.key"), operator_key.serialize_pem().as_bytes(), 0o600)?;
        let quic: [u8; 40] = rand::random();
        files::write(&dir.join("quic.key"), hex::encode(quic).as_bytes(), 0o600)?;
        files::write(&dir.join("ca.pem"), ca_pem.as_bytes(), 0o644)?;
        files::write(&dir.join("ca.key"), key_pem.as_bytes(), 0o600)?;
        files::sync_dir(dir)
    }

    /// SHA-256 of the CA certificate's DER: what tokens pin.
    pub fn fingerprint(&self) -> Sha256 {
        Sha256::of(&self.ca.der)
    }
    pub fn ca_pem(&self) -> &str {
        &self.ca.pem
    }
    pub fn ca_der(&self) -> &CertificateDer<'static> {
        &self.ca.der
    }
    pub fn ca_path(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }
    /// Certificate and key of the operator who made the home.
    pub fn operator_paths(&self) -> (PathBuf, PathBuf) {
        (self.dir.join("operator.pem"), self.dir.join("operator.key"))
    }

    /// What every server of this coordinator shows.
    pub fn shown(&self) -> Arc<Shown> {
        self.shown.clone()
    }

    /// The same as it is in the files.
    pub fn server(&self) -> Result<Credentials, PkiError> {
        server::read(&self.dir, &self.ca.der)
    }

    /// Keys that outlive a restart: with them an agent learns at its next packet that the coordinator was restarted.
    pub fn quic_keys(&self) -> Result<QuicKeys, PkiError> {
        let path = self.dir.join("quic.key");
        let mut bytes = [0; 40];
        hex::decode_to_slice(files::read_key(&path)?.trim(), &mut bytes)
            .map_err(|e| PkiError::Damaged { path, what: e.to_string() })?;
        let (mut reset, mut cid) = ([0; 32], [0; 8]);
        reset.copy_from_slice(&bytes[..32]);
        cid.copy_from_slice(&bytes[32..]);
        Ok(QuicKeys { reset, connection_ids: u64::from_be_bytes(cid) })
    }

    /// Certifies an agent's key. What the request asks for beyond the key is ignored.
    pub fn issue_agent(
        &self,
        request: &SigningRequest,
        host: &HostId,
        installation: InstallationId,
        now: Micros,
    ) -> Result<Issued, PkiError> {
        let what = "an agent's certificate";
        let mut params = params(host.as_str(), now, LEAF_DAYS)?;
        let uri =
            subject::agent_uri(host, installation).try_into().map_err(|source| PkiError::Make { what, source })?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let cert = issue(&self.ca.issuer, &request.parsed.public_key, params, what)?;
        Ok(issued(&cert, now))
    }

    /// Certifies a person's key. What the request asks for beyond the key is ignored.
    pub fn issue_person(
        &self,
        request: &SigningRequest,
        name: &str,
        role: Role,
        now: Micros,
    ) -> Result<Issued, PkiError> {
        let params = person(name, role, now)?;
        let cert = issue(&self.ca.issuer, &request.parsed.public_key, params, "a person's certificate")?;
        Ok(issued(&cert, now))
    }

    /// SHA-256 and end of the certificate of the operator who made the home.
    pub fn first_operator(&self) -> Result<(Sha256, Micros), PkiError> {
        let (path, _) = self.operator_paths();
        let damaged = |what: String| PkiError::Damaged { path: path.clone(), what };
        let der =
            CertificateDer::from_pem_slice(files::read_text(&path)?.as_bytes()).map_err(|e| damaged(e.to_string()))?;
        Ok((Sha256::of(&der), ends(&der).map_err(damaged)?))
    }
}

fn complete(dir: &Path) -> Result<(), PkiError> {
    match FILES.iter().find(|f| !dir.join(f).exists()) {
        Some(missing) => Err(PkiError::Incomplete { dir: dir.to_owned(), missing }),
        None => Ok(()),
    }
}

/// When a certificate ends.
fn ends(der: &[u8]) -> Result<Micros, String> {
    let (_, cert) = X509Certificate::from_der(der).map_err(|e| e.to_string())?;
    Ok(Micros(cert.validity().not_after.timestamp().saturating_mul(1_000_000)))
}

/// A certificate is its key's, and its issuer is the CA, which has a name of its own in each home.
fn fits(cert: &Path, key: &Path, der: &[u8], pair: &KeyPair, ca_der: &[u8]) -> Result<(), PkiError> {
    let damaged = |path: &Path, what: String| PkiError::Damaged { path: path.to_owned(), what };
    let read = |der| X509Certificate::from_der(der).map(|(_, c)| c).map_err(|e| damaged(cert, e.to_string()));
    let (leaf, ca) = (read(der)?, read(ca_der)?);
    if *leaf.public_key().subject_public_key.data != *pair.der_bytes() {
        return Err(damaged(key, format!("it is not the key of {}", cert.display())));
    }
    if leaf.issuer() != ca.subject() {
        return Err(damaged(cert, "it was issued by another home's CA".to_owned()));
    }
    Ok(())
}

/// Keys of the QUIC endpoints.
#[derive(Clone)]
pub struct QuicKeys {
    pub reset: [u8; 32],
    pub connection_ids: u64,
}

/// What a person's certificate says.
fn person(name: &str, role: Role, now: Micros) -> Result<CertificateParams, PkiError> {
    let what = "a person's certificate";
    let mut params = params(name, now, LEAF_DAYS)?;
    let uri = subject::person_uri(role, name).try_into().map_err(|source| PkiError::Make { what, source })?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

fn issue(
    issuer: &Issuer<'_, KeyPair>,
    key: &impl PublicKeyData,
    params: CertificateParams,
    what: &'static str,
) -> Result<rcgen::Certificate, PkiError> {
    params.signed_by(key, issuer).map_err(|source| PkiError::Make { what, source })
}

fn issued(cert: &rcgen::Certificate, now: Micros) -> Issued {
    let expires = Micros(now.0.saturating_add(LEAF_DAYS * DAY_US));
    Issued { pem: cert.pem(), sha256: Sha256::of(cert.der()), expires }
}

fn params(common_name: &str, now: Micros, days: i64) -> Result<CertificateParams, PkiError> {
    let mut out = CertificateParams::default();
    out.not_before = calendar(Micros(now.0.saturating_sub(EARLY_DAYS * DAY_US)))?;
    out.not_after = calendar(Micros(now.0.saturating_add(days * DAY_US)))?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    out.distinguished_name = name;
    out.use_authority_key_identifier_extension = true;
    Ok(out)
}

fn calendar(at: Micros) -> Result<time::OffsetDateTime, PkiError> {
    time::OffsetDateTime::from_unix_timestamp(at.0.div_euclid(1_000_000)).map_err(|_| PkiError::BadTime(at))
}

#[cfg(test)]
mod tests;
