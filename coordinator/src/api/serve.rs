//! Accepts connections and hands them to the router: a unix socket for the local operator, HTTPS for others.

use std::{
    io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Extension, Router};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rustls::{
    RootCertStore,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::Caller;
use crate::pki::{Pki, Role, Subject, subject_of};

/// Connections at once on each listener; an operator's tool needs one.
const MAX_CONNECTIONS: usize = 128;
/// A peer that does not finish its handshake or its request head by then is dropped.
const PATIENCE: Duration = Duration::from_secs(10);
/// What open requests get at shutdown; long polls end at once.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot listen on {}", path.display())]
    Unix { path: PathBuf, source: io::Error },
    #[error("cannot listen on {address} (TCP); is another coordinator running?")]
    Tcp { address: SocketAddr, source: io::Error },
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
    #[error("cannot check operators' certificates")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
}

/// A listener that serves until shutdown.
pub type Served = tokio::task::JoinHandle<()>;

/// HTTP on `path`, mode 0600. The caller holds the home's lock, so a socket that is there is a corpse.
pub fn serve_unix(path: &Path, router: Router, shutdown: watch::Receiver<bool>) -> Result<Served, ServeError> {
    let fail = |source| ServeError::Unix { path: path.to_owned(), source };
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(fail(e)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(fail)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
    let path = path.to_owned();
    Ok(tokio::spawn(async move {
        let mut connections = Connections::new(shutdown);
        while let Some(accepted) = connections.next(listener.accept()).await {
            match accepted {
                Ok((stream, _)) => {
                    // Only root and the socket's owner can open it.
                    let who =
                        stream.peer_cred().map_or_else(|_| "local operator".to_owned(), |c| format!("uid {}", c.uid()));
                    let caller =
                        Caller { name: who, from: "unix socket".to_owned(), role: Role::Operator, certificate: None };
                    let router = router.clone().layer(Extension(caller));
                    connections.spawn(|down| serve_one(stream, router, down));
                }
                Err(e) => connections.failed("unix socket", &e).await,
            }
        }
        connections.drain().await;
        let _ = std::fs::remove_file(&path);
    }))
}

/// HTTPS for holders of a person's certificate of this home's CA; whether it still counts is asked with each request.
pub async fn serve_https(
    address: SocketAddr,
    pki: &Pki,
    router: Router,
    shutdown: watch::Receiver<bool>,
) -> Result<(Served, SocketAddr), ServeError> {
    let tls = tls(pki)?;
    let fail = |source| ServeError::Tcp { address, source };
    let listener = TcpListener::bind(address).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let task = tokio::spawn(async move {
        let mut connections = Connections::new(shutdown);
        while let Some(accepted) = connections.next(listener.accept()).await {
            match accepted {
                Ok((stream, remote)) => {
                    let (tls, router) = (tls.clone(), router.clone());
                    connections.spawn(|down| async move {
                        let Ok(accepted) = tokio::time::timeout(PATIENCE, tls.accept(stream)).await else { return };
                        let stream = match accepted {
                            Ok(stream) => stream,
                            Err(e) => {
                                tracing::info!(remote = %remote, error = %e, "api peer refused");
                                return;
                            }
                        };
                        let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                        let subject = leaf.and_then(|der| subject_of(der).ok());
                        // Agents' certificates are of the same CA, and must not open this door.
                        let Some(Subject::Person { role, name, certificate }) = subject else {
                            tracing::warn!(remote = %remote, "api peer refused: its certificate is no person's");
                            return;
                        };
                        let caller = Caller { name, from: remote.to_string(), role, certificate: Some(certificate) };
                        serve_one(stream, router.layer(Extension(caller)), down).await;
                    });
                }
                Err(e) => connections.failed("https", &e).await,
            }
        }
        connections.drain().await;
    });
    Ok((task, address))
}

fn tls(pki: &Pki) -> Result<TlsAcceptor, ServeError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca_der().clone()).map_err(ServeError::Tls)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(ServeError::Verifier)?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(ServeError::Tls)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(pki.shown());
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // As on the agents' endpoint: a resumed session would skip the check that the certificate has not expired.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn serve_one<S>(stream: S, router: Router, mut down: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(hyper_util::rt::TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    // Both branches are cancel-safe: the connection is polled again below.
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = down.wait_for(|d| *d) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(error = %e, "api connection ended");
    }
}

struct Connections {
    tasks: JoinSet<()>,
    slots: Arc<Semaphore>,
    shutdown: watch::Receiver<bool>,
}

impl Connections {
    fn new(shutdown: watch::Receiver<bool>) -> Self {
        Self { tasks: JoinSet::new(), slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)), shutdown }
    }

    /// The next accepted connection; none at shutdown.
    async fn next<T>(&mut self, accept: impl Future<Output = io::Result<T>>) -> Option<io::Result<T>> {
        let mut accept = std::pin::pin!(accept);
        loop {
            // All branches are cancel-safe; `accept` is polled on over the iterations.
            tokio::select! {
                accepted = accept.as_mut() => return Some(accepted),
                Some(_) = self.tasks.join_next() => {}
                _ = self.shutdown.wait_for(|d| *d) => return None,
            }
        }
    }

    fn spawn<F: Future<Output = ()> + Send + 'static>(&mut self, serve: impl FnOnce(watch::Receiver<bool>) -> F) {
        // No slot: the stream is dropped, and the peer sees the connection closed.
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            tracing::warn!(max = MAX_CONNECTIONS, "too many api connections; one turned away");
            return;
        };
        let work = serve(self.shutdown.clone());
        self.tasks.spawn(async move {
            work.await;
            drop(slot);
        });
    }

    /// Accepting fails when descriptors run out: others may free some.
    async fn failed(&self, what: &str, e: &io::Error) {
        tracing::error!(listener = what, error = %e, "a connection was not accepted");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    async fn drain(&mut self) {
        let rest = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(DRAIN, rest).await;
        self.tasks.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use drums_common::clock::Clock as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn every_connection_shows_its_certificate_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (pki, _) = Pki::open_or_create(dir.path(), crate::clock::SystemClock.now()).unwrap();
        let acceptor = tls(&pki).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(pki.ca_der().clone()).unwrap();
        let (cert, key) = pki.operator_paths();
        let cert = CertificateDer::from_pem_file(cert).unwrap();
        let key = PrivateKeyDer::from_pem_file(key).unwrap();
        let client = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![cert], key)
            .unwrap();
        // It keeps sessions, as browsers do.
        let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
        for _ in 0..2 {
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            let name = ServerName::try_from(drums_common::wire::SERVER_NAME).unwrap();
            let (accepted, connected) = tokio::join!(acceptor.accept(ours), connector.connect(name, theirs));
            let (mut accepted, mut connected) = (accepted.unwrap(), connected.unwrap());
            accepted.write_all(b"x").await.unwrap();
            accepted.flush().await.unwrap();
            // Whatever came before the byte has been read with it: a ticket, if there was one.
            connected.read_exact(&mut [0]).await.unwrap();
            assert_eq!(accepted.get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::Full));
        }
    }
}
