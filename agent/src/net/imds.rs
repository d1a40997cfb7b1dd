//! EC2's instance metadata (IMDSv2): what this instance shows of itself.
//!
//! Straight to the address, without names, proxies or redirects: what answers there is the hypervisor, and nobody else is
//! to be asked. Each request is a connection of its own and bounded; so is the whole.

use std::{io, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout_at},
};

/// Of the token, which is used at once.
const TOKEN_TTL_S: &str = "60";
const TOKEN: &str = "/latest/api/token";
const DOCUMENT: &str = "/latest/dynamic/instance-identity/document";
const SIGNATURE: &str = "/latest/dynamic/instance-identity/rsa2048";
/// One request: it is answered within milliseconds, or its packet was lost.
const ATTEMPT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(500);
/// Far more than any of the answers has.
const MAX_BYTES: usize = 16 << 10;

/// What an instance shows of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The identity document, to the byte: it is signed.
    pub document: Vec<u8>,
    /// AWS's signature of it, PKCS #7 in base64.
    pub signature: String,
}

#[derive(Debug, thiserror::Error)]
pub enum ImdsError {
    #[error("cannot connect to the instance metadata at {at}")]
    Connect { at: SocketAddr, source: io::Error },
    #[error("the instance metadata at {at} did not answer {path} in time")]
    Slow { at: SocketAddr, path: &'static str },
    #[error("the exchange with the instance metadata at {at} broke at {path}")]
    Broke { at: SocketAddr, path: &'static str, source: hyper::Error },
    #[error(
        "the instance metadata at {at} answers {path} with {status}; HttpEndpoint has to be enabled and HttpTokens may be required"
    )]
    Status { at: SocketAddr, path: &'static str, status: StatusCode },
    #[error("the instance metadata at {at} answers {path} with what is none: {why}")]
    Nonsense { at: SocketAddr, path: &'static str, why: String },
}

impl ImdsError {
    /// It may be otherwise in a moment; a service that answers is believed.
    fn passing(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Slow { .. } | Self::Broke { .. } => true,
            Self::Status { status, .. } => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            Self::Nonsense { .. } => false,
        }
    }
}

/// Asks until there is an answer, at most for `patience`: a network that is just coming up loses packets.
pub async fn shown(at: SocketAddr, patience: Duration) -> Result<Shown, ImdsError> {
    let end = Instant::now() + patience;
    loop {
        match once(at, end).await {
            Err(e) if e.passing() && Instant::now() + PAUSE < end => sleep(PAUSE).await,
            settled => return settled,
        }
    }
}

async fn once(at: SocketAddr, end: Instant) -> Result<Shown, ImdsError> {
    let text = |path, bytes: Bytes| {
        let read = String::from_utf8(bytes.to_vec());
        read.map_err(|e| ImdsError::Nonsense { at, path, why: e.to_string() })
    };
    let put = Request::put(TOKEN).header("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_TTL_S);
    let token = text(TOKEN, ask(at, end, TOKEN, put).await?)?;
    let get = |path| Request::builder().method(Method::GET).uri(path).header("X-aws-ec2-metadata-token", token.trim());
    let document = ask(at, end, DOCUMENT, get(DOCUMENT)).await?.to_vec();
    let signature = text(SIGNATURE, ask(at, end, SIGNATURE, get(SIGNATURE)).await?)?;
    Ok(Shown { document, signature })
}

async fn ask(
    at: SocketAddr,
    end: Instant,
    path: &'static str,
    request: hyper::http::request::Builder,
) -> Result<Bytes, ImdsError> {
    let broke = |source| ImdsError::Broke { at, path, source };
    let nonsense = |why: String| ImdsError::Nonsense { at, path, why };
    let request = request
        .header(header::HOST, at.ip().to_string())
        .body(Empty::<Bytes>::new())
        .map_err(|e| nonsense(format!("a token that cannot be sent: {e}")))?;
    let exchange = async {
        let stream = TcpStream::connect(at).await.map_err(|source| ImdsError::Connect { at, source })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broke)?;
        // It ends with the sender.
        let driving = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(broke)?;
        let status = answer.status();
        if status != StatusCode::OK {
            return Err(ImdsError::Status { at, path, status });
        }
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await;
        driving.abort();
        body.map(|b| b.to_bytes()).map_err(|e| nonsense(e.to_string()))
    };
    let by = end.min(Instant::now() + ATTEMPT);
    timeout_at(by, exchange).await.unwrap_or(Err(ImdsError::Slow { at, path }))
}
