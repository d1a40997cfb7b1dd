//! The certificate that every listener of this coordinator shows, and its replacement while they listen.
//!
//! ```text
//! server.{pem,key}    made with the home
//! server.renewed.pem  the last rotation's key and certificate; one file, put in place whole: no crash parts them
//! ```
//! Nothing watches the folder. A listener looks at the file's metadata with each handshake, which costs a hundredth of the
//! handshake, and connections that are open keep what they were made with.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use drums_common::{clock::Micros, digest::Sha256, telemetry::chain, wire::SERVER_NAME};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use rustls::{
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::sync::watch;

use super::{CA_DAYS, Ca, Credentials, PkiError, calendar, complete, ends, files, fits, params};

pub(super) const RENEWED: &str = "server.renewed.pem";
/// A file that could not be used is tried again by then, also if it did not change: descriptors may have run out.
const AGAIN: Duration = Duration::from_secs(60);

/// A server's certificate, as an operator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerCertificate {
    pub sha256: Sha256,
    pub expires: Micros,
}

impl ServerCertificate {
    fn of(der: &[u8], path: &Path) -> Result<Self, PkiError> {
        let expires = ends(der).map_err(|what| PkiError::Damaged { path: path.to_owned(), what })?;
        Ok(Self { sha256: Sha256::of(der), expires })
    }
}

/// What a rotation did.
#[derive(Debug)]
pub struct Rotated {
    pub made: ServerCertificate,
    /// An error if what was there could not be used.
    pub before: Result<ServerCertificate, PkiError>,
    pub path: PathBuf,
}

/// Gives the home whose CA is in `dir` another server key and certificate. It needs no coordinator, and one that runs shows
/// them from the next handshake on. Killed at any instant, it has changed everything or nothing.
pub fn rotate_server(dir: &Path, now: Micros) -> Result<Rotated, PkiError> {
    let _alone = files::hold(dir)?;
    complete(dir)?;
    let ca = Ca::open(dir)?;
    let before = read(dir, &ca.der).and_then(|c| ServerCertificate::of(&c.chain[0], dir));
    let path = dir.join(RENEWED);
    let (certificate, key) = make(&ca.issuer, &ca.der, now)?;
    files::write(&path, (key.serialize_pem() + &certificate.pem()).as_bytes(), 0o600)?;
    files::sync_dir(dir)?;
    Ok(Rotated { made: ServerCertificate::of(certificate.der(), &path)?, before, path })
}

/// A key, and its certificate: as long as its CA's, which agents and operators know it by.
pub(super) fn make(
    issuer: &Issuer<'_, KeyPair>,
    ca: &[u8],
    now: Micros,
) -> Result<(rcgen::Certificate, KeyPair), PkiError> {
    let fail = |source| PkiError::Make { what: "the server's certificate", source };
    let names = [SERVER_NAME, "localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    let key = KeyPair::generate().map_err(fail)?;
    let mut server = params(SERVER_NAME, now, CA_DAYS)?;
    if let Ok(end) = ends(ca) {
        server.not_after = server.not_after.min(calendar(end)?);
    }
    server.subject_alt_names = CertificateParams::new(names).map_err(fail)?.subject_alt_names;
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = server.signed_by(&key, issuer).map_err(fail)?;
    Ok((certificate, key))
}

/// What is to be shown. The key is the certificate's, and the CA this home's.
pub(super) fn read(dir: &Path, ca: &CertificateDer<'static>) -> Result<Credentials, PkiError> {
    let renewed = dir.join(RENEWED);
    let (cert, key, help) = match files::is_there(&renewed)? {
        true => (renewed.clone(), renewed, "; drumsctl access rotate-server makes another"),
        false => (dir.join("server.pem"), dir.join("server.key"), ""),
    };
    let damaged = |path: &Path, what: String| PkiError::Damaged { path: path.to_owned(), what: what + help };
    let key_text = files::read_key(&key)?;
    // One file is read once: another rotation may replace it meanwhile.
    let cert_text = if cert == key { key_text.clone() } else { files::read_text(&cert)? };
    let leaf = CertificateDer::from_pem_slice(cert_text.as_bytes()).map_err(|e| damaged(&cert, e.to_string()))?;
    let der = PrivatePkcs8KeyDer::from_pem_slice(key_text.as_bytes()).map_err(|e| damaged(&key, e.to_string()))?;
    let pair = KeyPair::try_from(&der).map_err(|e| damaged(&key, e.to_string()))?;
    fits(&cert, &key, &leaf, &pair, ca).map_err(|e| match e {
        PkiError::Damaged { path, what } => damaged(&path, what),
        e => e,
    })?;
    Ok(Credentials { chain: vec![leaf, ca.clone()], key: der.into() })
}

/// What listeners show.
pub struct Shown {
    dir: PathBuf,
    ca: CertificateDer<'static>,
    held: Mutex<Held>,
    certificate: watch::Sender<ServerCertificate>,
}

struct Held {
    key: Arc<CertifiedKey>,
    /// What was there when it was read.
    file: Look,
    /// When what is there, and cannot be used, is tried again.
    again: Option<Instant>,
}

/// Inode, time of its last change, and length; or that there is none.
type Look = Result<Option<(u64, i64, i64, u64)>, io::ErrorKind>;

fn look(dir: &Path) -> Look {
    match fs::metadata(dir.join(RENEWED)) {
        Ok(m) => Ok(Some((m.ino(), m.ctime(), m.ctime_nsec(), m.len()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.kind()),
    }
}

impl Shown {
    pub(super) fn open(dir: &Path, ca: &CertificateDer<'static>) -> Result<Self, PkiError> {
        // Before it is read: what is replaced meanwhile is read again.
        let file = look(dir);
        let (key, certificate) = usable(dir, ca)?;
        let held = Mutex::new(Held { key, file, again: None });
        Ok(Self { dir: dir.to_owned(), ca: ca.clone(), held, certificate: watch::channel(certificate).0 })
    }

    pub fn certificate(&self) -> ServerCertificate {
        *self.certificate.borrow()
    }

    /// Sees each certificate that comes into use from now on.
    pub fn changes(&self) -> watch::Receiver<ServerCertificate> {
        self.certificate.subscribe()
    }

    /// What a handshake gets now. A file that cannot be used changes nothing.
    pub(super) fn current(&self) -> Arc<CertifiedKey> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let file = look(&self.dir);
        if file == held.file && held.again.is_none_or(|at| Instant::now() < at) {
            return held.key.clone();
        }
        held.file = file;
        match usable(&self.dir, &self.ca) {
            Ok((key, certificate)) => {
                held.key = key;
                held.again = None;
                if self.certificate.send_replace(certificate) != certificate {
                    tracing::info!(certificate = %certificate.sha256.short(), "a new server certificate is shown");
                }
            }
            Err(e) => {
                held.again = Some(Instant::now() + AGAIN);
                let help = "the one before is shown on; drumsctl access rotate-server makes another";
                tracing::error!(error = chain(&e), help, "the new server certificate cannot be used");
            }
        }
        held.key.clone()
    }
}

fn usable(dir: &Path, ca: &CertificateDer<'static>) -> Result<(Arc<CertifiedKey>, ServerCertificate), PkiError> {
    let Credentials { chain, key } = read(dir, ca)?;
    let certificate = ServerCertificate::of(&chain[0], dir)?;
    let provider = rustls::crypto::ring::default_provider();
    let key = CertifiedKey::from_der(chain, key, &provider)
        .map_err(|e| PkiError::Damaged { path: dir.to_owned(), what: format!("the server's key: {e}") })?;
    Ok((Arc::new(key), certificate))
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

// It holds a key.
impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shown")
            .field("dir", &self.dir)
            .field("certificate", &self.certificate())
            .finish_non_exhaustive()
    }
}
