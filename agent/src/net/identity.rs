//! Who this agent is: files in its state folder.
//!
//! ```text
//! installation                       8 hexadecimal digits, drawn once
//! identity/key.pem (600) cert.pem ca.pem coordinator.json
//!          token.sha256 (600)        of the secret that made it
//!          renewed.pem (600)         key and certificate that took their place; next.key (600) one that is asked for
//! ```
//! Keys are made here and never leave. `cert.pem` is written last: with it the identity is complete. A renewed key and its
//! certificate are one file, so that no crash parts them.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    ids::{HostId, InstallationId},
    token::{Address, Token},
};
use rcgen::{KeyPair, PublicKeyData as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is readable by others (mode {mode:o}); a key must have mode 600", path.display())]
    LooseKey { path: PathBuf, mode: u32 },
    #[error("{} is damaged: {what}; remove the identity folder and enrol again with a new token", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("cannot make a key")]
    Key(#[source] rcgen::Error),
}

/// The key that the next certificate is asked for with.
pub(super) const NEXT_KEY: &str = "next.key";
const RENEWED: &str = "renewed.pem";
/// SHA-256 of the secret of the token that made the identity.
const TOKEN: &str = "token.sha256";

fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |source| IdentityError::Io { doing, path, source }
}

/// Where the coordinator is and as which host it knows us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoordinatorFile {
    pub host: HostId,
    pub addresses: Vec<Address>,
}

/// A complete identity.
#[derive(Debug)]
pub struct Identity {
    pub host: HostId,
    pub installation: InstallationId,
    pub addresses: Vec<Address>,
    pub ca: CertificateDer<'static>,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    /// When a third of the certificate's time is left.
    pub renew_at: Micros,
    /// Where all this is kept.
    pub folder: PathBuf,
}

/// An identity that is not on disk yet.
pub(super) struct Next {
    pub identity: Identity,
    pem: String,
}

impl Next {
    /// Whole or not at all; from then on it is what `load` finds.
    pub fn keep(self) -> Result<(), IdentityError> {
        let folder = &self.identity.folder;
        write(&folder.join(RENEWED), self.pem.as_bytes(), 0o600)?;
        let asked = folder.join(NEXT_KEY);
        fs::remove_file(&asked).map_err(io("remove", &asked))
    }
}

impl Identity {
    /// `None` if this agent was never enrolled.
    pub fn load(state: &Path) -> Result<Option<Self>, IdentityError> {
        let dir = dir(state);
        let cert_path = dir.join("cert.pem");
        if !cert_path.exists() {
            return Ok(None);
        }
        let damaged = |path: &Path, what: String| IdentityError::Damaged { path: path.to_owned(), what };
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read(&path).map_err(io("read", &path)).map(|bytes| (path, bytes))
        };
        let renewed = dir.join(RENEWED).exists();
        let (cert, key) = if renewed { (RENEWED, RENEWED) } else { ("cert.pem", "key.pem") };
        let (path, pem) = read(cert)?;
        let leaf = CertificateDer::from_pem_slice(&pem).map_err(|e| damaged(&path, e.to_string()))?;
        let renew_at = renew_at(&leaf).map_err(|e| damaged(&path, e))?;
        let (path, pem) = read("ca.pem")?;
        let ca = CertificateDer::from_pem_slice(&pem).map_err(|e| damaged(&path, e.to_string()))?;
        let (path, json) = read("coordinator.json")?;
        let file: CoordinatorFile = serde_json::from_slice(&json).map_err(|e| damaged(&path, e.to_string()))?;
        let (path, pem) = read(key)?;
        let mode = fs::metadata(&path).map_err(io("look at", &path))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(IdentityError::LooseKey { path, mode });
        }
        let key = PrivatePkcs8KeyDer::from_pem_slice(&pem).map_err(|e| damaged(&path, e.to_string()))?;
        Ok(Some(Self {
            host: file.host,
            installation: installation(state)?,
            addresses: file.addresses,
            ca,
            chain: vec![leaf],
            key: key.into(),
            renew_at,
            folder: dir,
        }))
    }

    /// This identity with the certificate that was asked for with the key in `NEXT_KEY`; why not, if it is for another
    /// key or under another CA.
    pub(super) fn next(&self, cert_pem: &str, ca_pem: &str) -> Result<Result<Next, String>, IdentityError> {
        let path = self.folder.join(NEXT_KEY);
        let key_pem = fs::read_to_string(&path).map_err(io("read", &path))?;
        let damaged = |what: String| IdentityError::Damaged { path: path.clone(), what };
        let pair = KeyPair::from_pem(&key_pem).map_err(|e| damaged(e.to_string()))?;
        let key = PrivatePkcs8KeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|e| damaged(e.to_string()))?;
        let checked = leaf_for(cert_pem, &pair).and_then(|leaf| {
            let ca = CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(|e| format!("its CA: {e}"))?;
            if ca != self.ca {
                return Err("its CA is another one".to_owned());
            }
            let renew_at = renew_at(&leaf)?;
            Ok((leaf, renew_at))
        });
        Ok(checked.map(|(leaf, renew_at)| Next {
            identity: Self {
                host: self.host.clone(),
                installation: self.installation,
                addresses: self.addresses.clone(),
                ca: self.ca.clone(),
                chain: vec![leaf],
                key: key.into(),
                renew_at,
                folder: self.folder.clone(),
            },
            pem: format!("{key_pem}{cert_pem}"),
        }))
    }

    pub fn ca_sha256(&self) -> Sha256 {
        Sha256::of(&self.ca)
    }
}

/// A certificate in PEM that is for this key.
pub(super) fn leaf_for(pem: &str, key: &KeyPair) -> Result<CertificateDer<'static>, String> {
    let leaf = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| format!("its certificate: {e}"))?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&leaf).map_err(|e| format!("its certificate: {e}"))?;
    if parsed.public_key().subject_public_key.data.as_ref() != key.der_bytes() {
        return Err("its certificate is for another key".to_owned());
    }
    Ok(leaf)
}

fn renew_at(leaf: &CertificateDer<'_>) -> Result<Micros, String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(leaf).map_err(|e| e.to_string())?;
    let (from, to) = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
    Ok(Micros(to.saturating_sub(to.saturating_sub(from) / 3).saturating_mul(1_000_000)))
}

/// The key of a request that was begun before, or a new one: the answer to an earlier request is for the same key.
pub(super) fn pending_key(path: &Path) -> Result<KeyPair, IdentityError> {
    if let Ok(pem) = fs::read_to_string(path)
        && let Ok(key) = KeyPair::from_pem(&pem)
    {
        return Ok(key);
    }
    let key = KeyPair::generate().map_err(IdentityError::Key)?;
    write(path, key.serialize_pem().as_bytes(), 0o600)?;
    Ok(key)
}

/// Writes down where the coordinator is, as the token says.
pub(super) fn note_coordinator(folder: &Path, token: &Token) -> Result<(), IdentityError> {
    let file = CoordinatorFile { host: token.host.clone(), addresses: token.addresses.clone() };
    let json = serde_json::to_vec_pretty(&file).expect("strings and numbers always serialise");
    write(&folder.join("coordinator.json"), &json, 0o644)
}

/// Writes down which token made this identity; never its secret.
pub(super) fn note_token(folder: &Path, token: &Token) -> Result<(), IdentityError> {
    write(&folder.join(TOKEN), token.secret.sha256().to_string().as_bytes(), 0o600)
}

/// This token made the identity in `folder`.
pub(super) fn made_by(folder: &Path, token: &Token) -> bool {
    fs::read_to_string(folder.join(TOKEN)).is_ok_and(|noted| noted.trim() == token.secret.sha256().to_string())
}

pub(super) fn dir(state: &Path) -> PathBuf {
    state.join("identity")
}

/// This state folder's installation, drawn the first time.
pub fn installation(state: &Path) -> Result<InstallationId, IdentityError> {
    let path = state.join("installation");
    match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(|e| IdentityError::Damaged { path, what: format!("{e}") }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            make_private_dir(state)?;
            let id = InstallationId(rand::random());
            write(&path, id.to_string().as_bytes(), 0o644)?;
            Ok(id)
        }
        Err(e) => Err(io("read", &path)(e)),
    }
}

pub(super) fn make_private_dir(dir: &Path) -> Result<(), IdentityError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("make the folder", dir))
}

/// Whole or not at all.
pub(super) fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), IdentityError> {
    let new = path.with_extension("new");
    let put = || {
        // What a crash left behind may have another mode.
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        fs::File::open(path.parent().unwrap_or(path))?.sync_all()
    };
    put().map_err(io("write", path))
}
