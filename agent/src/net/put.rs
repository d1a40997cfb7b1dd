//! One object to one place that the coordinator named ahead: a file, or a PUT over HTTP whose URL is its own permission.
//!
//! An object is written once: the place refuses a second one, and that is no failure, since what is there is the same.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use drums_common::wire::latest::UploadUrl;
use drums_infra::once;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    net::TcpStream,
    time::{error::Elapsed, timeout},
};
use tokio_rustls::TlsConnector;

const CONNECT: Duration = Duration::from_secs(10);
/// For the answer, beside the time that the bytes take.
const ANSWER: Duration = Duration::from_secs(30);
/// A path slower than this takes longer than a life lease for a segment.
const SLOWEST_BYTES_PER_S: u64 = 16 << 10;
/// Of an error's text.
const MAX_SAID: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub enum PutError {
    #[error("cannot write {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{url} is neither a file:// nor an http(s):// URL")]
    Url { url: String },
    #[error("cannot read the certificates in {}, against which a bucket is checked", path.display())]
    Roots { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{} holds no certificate; install ca-certificates, or set ca_file in the agent's configuration", path.display())]
    NoRoots { path: PathBuf },
    #[error("cannot connect to {place}")]
    Connect { place: String, source: io::Error },
    #[error("{place} was not there in time")]
    TooSlow { place: String, source: Elapsed },
    #[error("the transfer to {place} broke")]
    Transfer { place: String, source: hyper::Error },
    #[error("the bucket refused {url} with {status}{said}")]
    Refused { url: String, status: StatusCode, said: String },
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    Written,
    WasThere,
}

pub(super) async fn put(url: &UploadUrl, object: Vec<u8>, ca_file: &Path) -> Result<Put, PutError> {
    if let Some(path) = url.0.strip_prefix("file://") {
        let path = PathBuf::from(path);
        let to = path.clone();
        let written = tokio::task::spawn_blocking(move || once::put(&to, &object)).await;
        let written = written.map_err(io::Error::other).and_then(|w| w);
        return match written {
            Ok(true) => Ok(Put::Written),
            Ok(false) => Ok(Put::WasThere),
            Err(source) => Err(PutError::File { path, source }),
        };
    }
    over_http(url, object, ca_file).await
}

async fn over_http(url: &UploadUrl, object: Vec<u8>, ca_file: &Path) -> Result<Put, PutError> {
    let wrong = || PutError::Url { url: url.shown().to_owned() };
    let uri: Uri = url.0.parse().map_err(|_| wrong())?;
    let host = uri.host().ok_or_else(wrong)?.to_owned();
    let secure = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(wrong()),
    };
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let place = format!("{host}:{port}");
    let late = |source| PutError::TooSlow { place: place.clone(), source };
    let failed = |source| PutError::Connect { place: place.clone(), source };
    let bare = host.trim_matches(['[', ']']);
    let tcp = timeout(CONNECT, TcpStream::connect((bare, port))).await.map_err(late)?.map_err(failed)?;
    if secure {
        let name = ServerName::try_from(bare.to_owned()).map_err(|_| wrong())?;
        let tls = timeout(CONNECT, connector(ca_file)?.connect(name, tcp)).await.map_err(late)?.map_err(failed)?;
        send(TokioIo::new(tls), &uri, &place, url, object).await
    } else {
        send(TokioIo::new(tcp), &uri, &place, url, object).await
    }
}

fn connector(ca_file: &Path) -> Result<TlsConnector, PutError> {
    let unreadable = |source| PutError::Roots { path: ca_file.to_owned(), source };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca_file).map_err(unreadable)? {
        // A certificate that rustls does not take is no use to anybody, and the others are.
        let _ = roots.add(certificate.map_err(unreadable)?);
    }
    if roots.is_empty() {
        return Err(PutError::NoRoots { path: ca_file.to_owned() });
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring speaks the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

async fn send<S>(stream: TokioIo<S>, uri: &Uri, place: &str, url: &UploadUrl, object: Vec<u8>) -> Result<Put, PutError>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let broke = |source| PutError::Transfer { place: place.to_owned(), source };
    let patience = ANSWER + Duration::from_secs(object.len() as u64 / SLOWEST_BYTES_PER_S);
    let exchange = async {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.map_err(broke)?;
        // It ends with the sender, or with the exchange's patience.
        let driving = tokio::spawn(connection);
        let target = uri.path_and_query().map_or("/", |p| p.as_str());
        let authority = uri.authority().map_or(place, |a| a.as_str());
        let request = Request::put(target)
            .header(header::HOST, authority)
            // Signed with the URL: only an object that is not there may be written.
            .header(header::IF_NONE_MATCH, "*")
            .body(Full::new(Bytes::from(object)))
            .map_err(|_| PutError::Url { url: url.shown().to_owned() })?;
        let answer = sender.send_request(request).await.map_err(broke)?;
        let status = answer.status();
        let text = Limited::new(answer.into_body(), MAX_SAID).collect().await;
        driving.abort();
        match status {
            s if s.is_success() => Ok(Put::Written),
            StatusCode::PRECONDITION_FAILED => Ok(Put::WasThere),
            status => {
                let text = text.map(|t| t.to_bytes()).unwrap_or_default();
                Err(PutError::Refused { url: url.shown().to_owned(), status, said: code(&text) })
            }
        }
    };
    timeout(patience, exchange).await.map_err(|source| PutError::TooSlow { place: place.to_owned(), source })?
}

/// The error's code in S3's answer, and nothing else: the rest repeats what was signed.
fn code(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    code.filter(|c| c.chars().all(|c| c.is_ascii_alphanumeric())).map(|c| format!(" ({c})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// A server that reads one request whole and gives one answer; what it read.
    async fn answering(answer: &'static str) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/bucket/a.segment?X-Amz-Signature=s3cr3t", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut seen = Vec::new();
            while !seen.ends_with(b"evidence") {
                assert!(stream.read_buf(&mut seen).await.unwrap() > 0, "cut short");
            }
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8(seen).unwrap()
        });
        (url, task)
    }

    async fn put_to(url: String) -> Result<Put, PutError> {
        put(&UploadUrl(url), b"evidence".to_vec(), Path::new("/nonexistent")).await
    }

    #[tokio::test]
    async fn an_object_is_put_once_and_one_that_is_there_is_no_failure() {
        for (answer, want) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Put::Written),
            ("HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n", Put::WasThere),
        ] {
            let (url, server) = answering(answer).await;
            assert_eq!(put_to(url).await.unwrap(), want);
            let seen = server.await.unwrap().to_lowercase();
            assert!(seen.starts_with("put /bucket/a.segment?x-amz-signature=s3cr3t http/1.1\r\n"), "{seen}");
            assert!(seen.contains("if-none-match: *\r\n") && seen.contains("content-length: 8\r\n"), "{seen}");
        }
    }

    #[tokio::test]
    async fn a_refusal_is_told_without_what_was_signed() {
        let answer = "HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n<Error><Code>AccessDenied</Code><Message>s3cr3t</Message></Error>";
        let (url, server) = answering(answer).await;
        let e = drums_common::telemetry::chain(&put_to(url).await.unwrap_err());
        server.await.unwrap();
        assert!(e.contains("403 Forbidden (AccessDenied)") && !e.contains("s3cr3t"), "{e}");
    }

    #[tokio::test]
    async fn what_cannot_be_put_says_why() {
        for (url, want) in [
            ("ftp://x/y?sig=s3cr3t", "neither a file:// nor"),
            ("nonsense", "neither a file:// nor"),
            ("https://127.0.0.1:9/x", "cannot"),
            ("file:///proc/nowhere/x", "cannot write /proc/nowhere/x"),
        ] {
            let e = drums_common::telemetry::chain(&put_to(url.to_owned()).await.unwrap_err());
            assert!(e.contains(want) && !e.contains("s3cr3t"), "{url}: {e}");
        }
        let e = connector(Path::new("/dev/null")).err().unwrap().to_string();
        assert!(e.contains("ca-certificates"), "{e}");
    }

    #[tokio::test]
    async fn a_file_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file://{}/a/b.segment", dir.path().display());
        assert_eq!(put_to(url.clone()).await.unwrap(), Put::Written);
        assert_eq!(put_to(url).await.unwrap(), Put::WasThere);
        assert_eq!(std::fs::read(dir.path().join("a/b.segment")).unwrap(), b"evidence");
    }
}
