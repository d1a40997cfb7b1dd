//! The API's client: one request per connection, over the home's unix socket or HTTPS.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use drums_common::{
    failure::{Failure, FailureClass},
    wire::SERVER_NAME,
};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::TlsConnector;

use super::{CtlError, Global};
use crate::{api::ErrorBody, config::Home, pki::Pki};

/// Connecting to a live coordinator takes milliseconds; this is for one across the world.
const CONNECT: Duration = Duration::from_secs(10);
/// An answer comes at once, to a long poll after seconds; a store under load takes some.
const ANSWER: Duration = Duration::from_secs(60);
/// Bytes per second of the slowest way to a coordinator that an upload may take.
const SLOWEST: u64 = 100_000;
/// The longest answer is a page of evidence; more than this is not from our coordinator.
const MAX_ANSWER: usize = 256 << 20;

/// `https://HOST[:PORT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiAddress {
    host: String,
    port: u16,
}

impl FromStr for ApiAddress {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let expected = "expected https://HOST:PORT, as in https://drums.example.org:7443";
        let rest = s.strip_prefix("https://").ok_or(format!("{s:?} does not begin with https://; {expected}"))?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.rsplit_once(':') {
            // A colon inside brackets belongs to an IPv6 address.
            Some((host, port)) if !port.contains(']') => {
                (host, port.parse().map_err(|_| format!("{port:?} is not a port; {expected}"))?)
            }
            _ => (rest, 7443),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if !drums_common::token::is_host(host) || port == 0 {
            return Err(format!("{s:?} names no host; {expected}"));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

#[derive(Clone, Debug)]
pub enum Target {
    Unix(PathBuf),
    Https { address: ApiAddress, cert: PathBuf, key: PathBuf, ca: PathBuf },
}

impl Target {
    pub fn of(global: &Global) -> Self {
        let home = Home::new(&global.home);
        match &global.api {
            None => Self::Unix(home.socket()),
            Some(address) => {
                let pki = home.pki();
                let or = |given: &Option<PathBuf>, name: &str| given.clone().unwrap_or_else(|| pki.join(name));
                Self::Https {
                    address: address.clone(),
                    cert: or(&global.cert, "operator.pem"),
                    key: or(&global.key, "operator.key"),
                    ca: or(&global.ca, "ca.pem"),
                }
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Unix(path) => path.display().to_string(),
            Self::Https { address, .. } => format!("https://{}:{}", address.host, address.port),
        }
    }
}

pub struct Client {
    target: Target,
    patience: Duration,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Client {
    pub fn new(global: &Global) -> Self {
        Self { target: Target::of(global), patience: ANSWER }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CtlError> {
        let (_, body) = self.send(Method::GET, path, Bytes::new()).await?;
        read(path, &body)
    }

    pub async fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, CtlError> {
        let body =
            serde_json::to_vec(body).map_err(|e| CtlError::failed("writing JSON", e, "this is a fault of drumsctl"))?;
        let (_, body) = self.send(Method::POST, path, body.into()).await?;
        read(path, &body)
    }

    pub async fn put(&self, path: &str, body: Vec<u8>) -> Result<(), CtlError> {
        self.send(Method::PUT, path, body.into()).await.map(|_| ())
    }

    /// True if the coordinator has what the path names.
    pub async fn has(&self, path: &str) -> Result<bool, CtlError> {
        let (status, _) = self.request(Method::HEAD, path, Bytes::new()).await?;
        Ok(status.is_success())
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), CtlError> {
        let (status, answer) = self.request(method, path, body).await?;
        if status.is_success() {
            return Ok((status, answer));
        }
        match serde_json::from_slice::<ErrorBody>(&answer) {
            Ok(ErrorBody { spec: Some(spec), .. }) => Err(CtlError::BadSpec(Box::new(spec))),
            Ok(ErrorBody { error, .. }) => Err(CtlError::Refused(error)),
            Err(_) => {
                let text: String = String::from_utf8_lossy(&answer).chars().take(200).collect();
                let message = format!("the coordinator answered {path} with {status}: {text}");
                let help = "drumsctl and the coordinator may be of different versions";
                Err(CtlError::Refused(Failure::new(FailureClass::Bug, "unexpected-answer", message, help)))
            }
        }
    }

    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), CtlError> {
        match &self.target {
            Target::Unix(socket) => {
                let stream = connect(UnixStream::connect(socket)).await.map_err(|e| self.unreachable(e))?;
                self.over(stream, method, path, body).await
            }
            Target::Https { address, cert, key, ca } => {
                let tls = tls(cert, key, ca)?;
                let tcp = connect(TcpStream::connect((address.host.as_str(), address.port)));
                let tcp = tcp.await.map_err(|e| self.unreachable(e))?;
                let name = ServerName::try_from(SERVER_NAME).map_err(|e| self.unreachable(e.into()))?;
                let stream = connect(tls.connect(name, tcp)).await.map_err(|e| self.unreachable(e))?;
                self.over(stream, method, path, body).await
            }
        }
    }

    async fn over<S>(&self, stream: S, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), CtlError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| self.unreachable(e.into()))?;
        // Ends with the answer; an error of it is seen by `send_request` too.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        let patience = self.patience + Duration::from_secs(body.len() as u64 / SLOWEST);
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1{path}"))
            .header("host", SERVER_NAME)
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|e| CtlError::bad(format!("{path:?} is not a path of the API: {e}"), "check the names given"))?;
        let answer = bounded(patience, sender.send_request(request)).await.map_err(|e| self.unreachable(e))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect();
        let body = bounded(patience, body).await.map_err(|source| {
            if source.is::<LengthLimitError>() {
                CtlError::Answer { what: path.to_owned(), source }
            } else {
                self.unreachable(source)
            }
        })?;
        let body = body.to_bytes();
        driver.abort();
        Ok((status, body))
    }

    fn unreachable(&self, source: BoxError) -> CtlError {
        let help = match &self.target {
            Target::Unix(path) => {
                let dir = path.parent().unwrap_or(Path::new("/"));
                let shown = dir.display();
                let start = format!("start it with: drums-coordinator --home {shown}");
                if Pki::is_there(&Home::new(dir).pki()) {
                    start
                } else if !dir.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
                    // What is there is somebody else's, or not for us to see.
                    format!("is {shown} a coordinator's home, and may you open it? If so, {start}; if not, give --home DIR")
                } else {
                    format!("there is no {shown}; is --home right? A new home is made by: drumsctl --home {shown} init; {start}")
                }
            }
            Target::Https { .. } => {
                "is the coordinator running, is api in its coordinator.toml reachable from here, and is the certificate an operator's of its CA?".to_owned()
            }
        };
        CtlError::Unreachable { target: self.target.name(), source, help }
    }
}

async fn connect<T, E: Into<BoxError>>(connecting: impl Future<Output = Result<T, E>>) -> Result<T, BoxError> {
    bounded(CONNECT, connecting).await
}

async fn bounded<T, E: Into<BoxError>>(
    patience: Duration,
    answering: impl Future<Output = Result<T, E>>,
) -> Result<T, BoxError> {
    match tokio::time::timeout(patience, answering).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(format!("no answer within {} s", patience.as_secs()).into()),
    }
}

fn read<T: DeserializeOwned>(path: &str, body: &[u8]) -> Result<T, CtlError> {
    serde_json::from_slice(body).map_err(|e| CtlError::Answer { what: path.to_owned(), source: e.into() })
}

fn tls(cert: &Path, key: &Path, ca: &Path) -> Result<TlsConnector, CtlError> {
    let bytes = |path: &Path| {
        std::fs::read(path).map_err(|e| {
            CtlError::bad(
                format!("cannot read {}: {e}", path.display()),
                "over HTTPS a certificate says who asks: give --cert, --key and --ca, as drumsctl access add made them, or the --home that has them in pki/",
            )
        })
    };
    let bad = |path: &Path, what: &str| {
        CtlError::bad(
            format!("{} is not {what}", path.display()),
            "give the PEM files that drumsctl init made in HOME/pki",
        )
    };
    let certificate = CertificateDer::from_pem_slice(&bytes(cert)?).map_err(|_| bad(cert, "a certificate"))?;
    let key_der = PrivateKeyDer::from_pem_slice(&bytes(key)?).map_err(|_| bad(key, "a private key"))?;
    let ca_der = CertificateDer::from_pem_slice(&bytes(ca)?).map_err(|_| bad(ca, "a CA's certificate"))?;
    let mut roots = RootCertStore::empty();
    roots.add(ca_der).map_err(|_| bad(ca, "a CA's certificate"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| CtlError::failed("setting up TLS", e, "this is a fault of drumsctl"))?
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key_der)
        .map_err(|_| bad(key, "the key of the certificate"))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// For a path or a query: what is not plainly safe is refused by the types that are put there.
pub(super) fn segment(value: impl std::fmt::Display) -> String {
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_coordinator_that_hangs_or_hangs_up_is_unreachable() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_owned();
        let listener = tokio::net::UnixListener::bind(Home::new(&home).socket()).unwrap();
        let global = Global { home, api: None, cert: None, key: None, ca: None, json: false };
        let mut client = Client::new(&global);
        let hang_up = async { drop(listener.accept().await.unwrap()) };
        let (answer, ()) = tokio::join!(client.get::<serde_json::Value>("/status"), hang_up);
        assert_eq!(answer.unwrap_err().exit_code(), 3);
        client.patience = Duration::from_millis(10);
        let e = client.get::<serde_json::Value>("/status").await.unwrap_err();
        assert_eq!(e.exit_code(), 3);
        assert!(drums_common::telemetry::chain(&e).contains("no answer"), "{e}");
    }

    #[test]
    fn addresses_have_a_port_or_the_usual_one() {
        let parse = |s: &str| s.parse::<ApiAddress>();
        assert_eq!(parse("https://drums.example.org").unwrap().port, 7443);
        assert_eq!(parse("https://10.0.0.1:8000/").unwrap().port, 8000);
        assert_eq!(parse("https://[::1]:7443").unwrap().host, "::1");
        assert_eq!(parse("https://[::1]").unwrap().host, "::1");
        for bad in ["http://x", "x", "https://", "https://a b:1", "https://x:0", "https://x:port"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
