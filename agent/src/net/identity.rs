//! Who this agent is: files in its state folder.
//!
//! ```text
//! installation                       8 hexadecimal digits, drawn once
//! identity/key.pem (600) cert.pem ca.pem coordinator.json
//! ```
//! The key is made here and never leaves. `cert.pem` is written last: with it the identity is complete.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use drums_common::{
    digest::Sha256,
    ids::{HostId, InstallationId},
    token::Address,
};
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
}

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
        let (path, pem) = read("cert.pem")?;
        let leaf = CertificateDer::from_pem_slice(&pem).map_err(|e| damaged(&path, e.to_string()))?;
        let (path, pem) = read("ca.pem")?;
        let ca = CertificateDer::from_pem_slice(&pem).map_err(|e| damaged(&path, e.to_string()))?;
        let (path, json) = read("coordinator.json")?;
        let file: CoordinatorFile = serde_json::from_slice(&json).map_err(|e| damaged(&path, e.to_string()))?;
        let (path, pem) = read("key.pem")?;
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
        }))
    }

    pub fn ca_sha256(&self) -> Sha256 {
        Sha256::of(&self.ca)
    }
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
