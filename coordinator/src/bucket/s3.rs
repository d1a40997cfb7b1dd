//! A bucket in S3, or in what speaks its protocol.

use std::{collections::BTreeMap, os::unix::fs::PermissionsExt as _, path::Path as File, sync::Arc, time::Duration};

use drums_common::wire::latest::UploadUrl;
use futures_util::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
    aws::{AmazonS3, AmazonS3Builder},
    path::Path,
    signer::{HeaderName, HeaderValue, Method, SignedUrlOptions, Signer as _},
};
use serde::Deserialize;

use super::{BucketConfig, BucketError, Place};

/// Objects read at once by who verifies.
const AT_ONCE: usize = 8;

#[derive(Clone, Debug)]
pub struct S3 {
    store: Arc<AmazonS3>,
    prefix: Path,
}

/// The file that a configuration names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Credentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
}

impl S3 {
    pub fn open(name: &str, prefix: &str, config: &BucketConfig) -> Result<Self, BucketError> {
        let mut builder = AmazonS3Builder::from_env();
        if let Some(region) = &config.region {
            builder = builder.with_region(region);
        }
        if let Some(endpoint) = &config.endpoint {
            builder = builder.with_endpoint(endpoint).with_allow_http(endpoint.starts_with("http://"));
        }
        if let Some(path) = &config.credentials {
            let c = credentials(path)?;
            builder = builder.with_access_key_id(c.access_key_id).with_secret_access_key(c.secret_access_key);
            if let Some(token) = c.session_token {
                builder = builder.with_token(token);
            }
        }
        Self::build(builder, name, prefix)
    }

    fn build(builder: AmazonS3Builder, name: &str, prefix: &str) -> Result<Self, BucketError> {
        // The one crypto provider of this project; it may be there already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = builder.with_bucket_name(name).build().map_err(BucketError::Settings)?;
        Ok(Self { store: Arc::new(store), prefix: Path::from(prefix) })
    }

    fn at(&self, key: &str) -> Path {
        key.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn failed(doing: &'static str, key: &str) -> impl FnOnce(object_store::Error) -> BucketError {
        let key = key.to_owned();
        move |source| BucketError::Object { doing, key, source }
    }

    /// Writes an object unless one is there, which then stays.
    pub async fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), BucketError> {
        match self.store.put_opts(&self.at(key), bytes.into(), PutMode::Create.into()).await {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Err(e) => Err(Self::failed("write", key)(e)),
        }
    }

    /// A URL for one PUT of an object that is not there: both are signed.
    pub async fn place(&self, key: &str, valid: Duration) -> Result<UploadUrl, BucketError> {
        let once = SignedUrlOptions::default()
            .with_signed_header(HeaderName::from_static("if-none-match"), HeaderValue::from_static("*"));
        let url = self.store.signed_url_opts(Method::PUT, &self.at(key), valid, &once).await;
        Ok(UploadUrl(url.map_err(Self::failed("sign a place for", key))?.into()))
    }

    pub async fn has(&self, key: &str) -> Result<bool, BucketError> {
        match self.store.head(&self.at(key)).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(Self::failed("look for", key)(e)),
        }
    }

    /// An upload in parts, which shows only once it is completed.
    pub async fn begin(&self, key: &str) -> Result<Box<dyn MultipartUpload>, BucketError> {
        self.store.put_multipart(&self.at(key)).await.map_err(Self::failed("write", key))
    }

    /// The object's length, and its bytes from `offset` on; `None` if it is not there.
    pub async fn read(
        &self,
        key: &str,
        offset: u64,
    ) -> Result<Option<(u64, BoxStream<'static, object_store::Result<bytes::Bytes>>)>, BucketError> {
        let path = self.at(key);
        let total = match self.store.head(&path).await {
            Ok(meta) => meta.size,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(Self::failed("look for", key)(e)),
        };
        // Nothing is behind its end, and a range that asks for it is refused.
        if offset >= total {
            return Ok(Some((total, futures_util::stream::empty().boxed())));
        }
        let options = GetOptions { range: Some(GetRange::Offset(offset)), ..GetOptions::default() };
        let got = self.store.get_opts(&path, options).await.map_err(Self::failed("read", key))?;
        Ok(Some((total, got.into_stream())))
    }
}

fn credentials(path: &File) -> Result<Credentials, BucketError> {
    let io = |source| BucketError::Io { doing: "read", path: path.to_owned(), source };
    let mode = std::fs::metadata(path).map_err(io)?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(BucketError::Open { path: path.to_owned() });
    }
    let text = std::fs::read_to_string(path).map_err(io)?;
    // Its message alone: the TOML error's picture would show the line with the secret.
    let wrong = |e: toml::de::Error| BucketError::Credentials { path: path.to_owned(), text: e.message().to_owned() };
    toml::from_str(&text).map_err(wrong)
}

/// Everything below a prefix, by the key behind it; who asks is said by the environment.
pub async fn read_all(url: &str, objects: usize, bytes: u64) -> Result<BTreeMap<String, Vec<u8>>, BucketError> {
    let Place::S3 { name, prefix } = Place::parse(url)? else { return Err(BucketError::Url(url.to_owned())) };
    let builder = AmazonS3Builder::from_env();
    let http = ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|e| e.starts_with("http://")));
    let s3 = S3::build(builder.with_allow_http(http), &name, &prefix)?;
    let mut listed = s3.store.list(Some(&s3.prefix));
    let (mut paths, mut left) = (Vec::new(), bytes);
    while let Some(meta) = listed.try_next().await.map_err(S3::failed("list", url))? {
        left = left.checked_sub(meta.size).ok_or(BucketError::TooLarge(bytes))?;
        paths.push(meta.location);
        if paths.len() > objects {
            return Err(BucketError::TooLarge(objects as u64));
        }
    }
    let read = |path: Path| {
        let s3 = &s3;
        async move {
            let key = path.to_string();
            let got = s3.store.get(&path).await.map_err(S3::failed("read", &key))?;
            let body = got.bytes().await.map_err(S3::failed("read", &key))?;
            let below = key.strip_prefix(s3.prefix.as_ref()).unwrap_or(&key).trim_start_matches('/').to_owned();
            Ok((below, body.to_vec()))
        }
    };
    futures_util::stream::iter(paths).map(read).buffer_unordered(AT_ONCE).try_collect().await
}

/// What was gathered for the next part.
pub fn payload(bytes: Vec<u8>) -> PutPayload {
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(credentials: &File) -> BucketConfig {
        BucketConfig {
            url: "s3://bucket/lab".into(),
            region: Some("eu-central-1".into()),
            endpoint: Some("http://127.0.0.1:9".into()),
            credentials: Some(credentials.to_owned()),
            artifacts: false,
        }
    }

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials.toml");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[tokio::test]
    async fn a_place_is_signed_for_one_object_that_is_not_there() {
        let (_dir, path) = file("access_key_id = \"AKID\"\nsecret_access_key = \"s3cr3t\"\n", 0o600);
        let s3 = S3::open("bucket", "lab", &config(&path)).unwrap();
        let place = s3.place("01020304/runs/x/00000.segment", Duration::from_secs(60)).await.unwrap();
        assert_eq!(place.shown(), "http://127.0.0.1:9/bucket/lab/01020304/runs/x/00000.segment");
        assert!(place.0.contains("X-Amz-SignedHeaders=host%3Bif-none-match"), "{}", place.0);
        assert!(!place.0.contains("s3cr3t"));
        assert!(!format!("{s3:?}").contains("s3cr3t"), "{s3:?}");
    }

    #[test]
    fn credentials_that_others_can_read_are_refused_and_a_bad_file_is_not_quoted() {
        let (_dir, path) = file("access_key_id = \"AKID\"\nsecret_access_key = \"s3cr3t\"\n", 0o644);
        assert!(matches!(S3::open("bucket", "", &config(&path)), Err(BucketError::Open { .. })));
        let (_dir, path) = file("access_key_id = \"AKID\"\nsecret = \"s3cr3t\"\n", 0o600);
        let e = S3::open("bucket", "", &config(&path)).unwrap_err().to_string();
        assert!(e.contains("unknown field") && !e.contains("s3cr3t"), "{e}");
    }
}
