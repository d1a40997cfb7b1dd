//! The bucket: a folder, or S3. Objects are written once under their key, and read only by who verifies.
//!
//! Owns where a bucket is and how it is reached. Refuses to know what lies in it (`drums_common::bucket` does).

#[cfg(feature = "s3")]
pub mod s3;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::wire::latest::UploadUrl;
use drums_infra::once;
use serde::{Deserialize, Serialize};

/// As written in `coordinator.toml`, under `[bucket]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketConfig {
    /// `s3://NAME/PREFIX`, or the path of a folder that the coordinator's and all agents' machines have in common.
    pub url: String,
    /// S3 only. Without it, AWS_REGION of the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// S3 only: where the service is, if it is not AWS's own. Agents must reach it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// S3 only: a file that only its owner reads, with `access_key_id` and `secret_access_key` (and `session_token`).
    /// Without it, what the environment or the machine's role gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
    /// Workloads lie in the bucket instead of the home.
    #[serde(default)]
    pub artifacts: bool,
}

/// Where a bucket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Folder(PathBuf),
    /// Name and prefix.
    S3 {
        name: String,
        prefix: String,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum BucketError {
    #[error("{0:?} is no bucket; give s3://NAME/PREFIX or an absolute path of a folder")]
    Url(String),
    #[error("this build reaches no S3; build it with: cargo build --release -p drums-coordinator --features s3")]
    NoS3,
    #[error("{0} is only for s3:// buckets")]
    OnlyS3(&'static str),
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: std::io::Error },
    #[error("others can read {}, which holds a secret; chmod 600 it", path.display())]
    Open { path: PathBuf },
    #[error("{} is not a file of credentials: {text}", path.display())]
    Credentials { path: PathBuf, text: String },
    #[cfg(feature = "s3")]
    #[error("cannot {doing} {key} in the bucket")]
    Object { doing: &'static str, key: String, source: object_store::Error },
    #[cfg(feature = "s3")]
    #[error("the bucket's settings do not fit together")]
    Settings(#[source] object_store::Error),
    #[cfg(feature = "s3")]
    #[error("the bucket has more than {0} objects or bytes")]
    TooLarge(u64),
}

impl Place {
    pub fn parse(url: &str) -> Result<Self, BucketError> {
        let wrong = || BucketError::Url(url.to_owned());
        let Some(rest) = url.strip_prefix("s3://") else {
            let path = Path::new(url);
            return if path.is_absolute() { Ok(Self::Folder(path.to_owned())) } else { Err(wrong()) };
        };
        let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let prefix = prefix.trim_matches('/');
        let sound = !name.is_empty() && name.chars().all(plain);
        let below = prefix.is_empty()
            || prefix.split('/').all(|p| !p.is_empty() && p != "." && p != ".." && p.chars().all(plain));
        if sound && below { Ok(Self::S3 { name: name.to_owned(), prefix: prefix.to_owned() }) } else { Err(wrong()) }
    }
}

impl BucketConfig {
    /// What can be told without reaching it.
    pub fn validate(&self) -> Result<Place, BucketError> {
        let place = Place::parse(&self.url)?;
        match &place {
            Place::Folder(_) => {
                for (name, given) in [
                    ("region", self.region.is_some()),
                    ("endpoint", self.endpoint.is_some()),
                    ("credentials", self.credentials.is_some()),
                    ("artifacts", self.artifacts),
                ] {
                    if given {
                        return Err(BucketError::OnlyS3(name));
                    }
                }
            }
            Place::S3 { .. } if cfg!(not(feature = "s3")) => return Err(BucketError::NoS3),
            Place::S3 { .. } => {}
        }
        Ok(place)
    }
}

/// A bucket that can be written to.
#[derive(Clone, Debug)]
pub enum Bucket {
    Folder(PathBuf),
    #[cfg(feature = "s3")]
    S3(s3::S3),
}

impl Bucket {
    pub fn open(config: &BucketConfig) -> Result<Self, BucketError> {
        match config.validate()? {
            Place::Folder(dir) => Ok(Self::Folder(dir)),
            #[cfg(feature = "s3")]
            Place::S3 { name, prefix } => Ok(Self::S3(s3::S3::open(&name, &prefix, config)?)),
            #[cfg(not(feature = "s3"))]
            Place::S3 { .. } => Err(BucketError::NoS3),
        }
    }

    /// Writes an object unless one is there, which then stays.
    pub async fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), BucketError> {
        match self {
            Self::Folder(dir) => {
                let path = dir.join(key);
                let to = path.clone();
                let put = tokio::task::spawn_blocking(move || once::put(&to, &bytes)).await;
                let put = put.map_err(std::io::Error::other).and_then(|p| p);
                put.map(drop).map_err(|source| BucketError::Io { doing: "write", path, source })
            }
            #[cfg(feature = "s3")]
            Self::S3(s3) => s3.put(key, bytes).await,
        }
    }

    /// A place for one object that somebody else writes: a permission for this object only, and for a while.
    pub async fn place(&self, key: &str, valid: Duration) -> Result<UploadUrl, BucketError> {
        match self {
            Self::Folder(dir) => {
                // A path ends with its folder.
                let _ = valid;
                Ok(UploadUrl(format!("file://{}", dir.join(key).display())))
            }
            #[cfg(feature = "s3")]
            Self::S3(s3) => s3.place(key, valid).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> BucketConfig {
        BucketConfig { url: url.to_owned(), region: None, endpoint: None, credentials: None, artifacts: false }
    }

    #[test]
    fn a_bucket_is_a_folder_or_s3_and_nothing_else() {
        assert_eq!(Place::parse("/mnt/evidence").unwrap(), Place::Folder("/mnt/evidence".into()));
        let s3 = |name: &str, prefix: &str| Place::S3 { name: name.into(), prefix: prefix.into() };
        assert_eq!(Place::parse("s3://bucket").unwrap(), s3("bucket", ""));
        assert_eq!(Place::parse("s3://bucket/a/b/").unwrap(), s3("bucket", "a/b"));
        for bad in ["", "evidence", "s3://", "s3:///x", "s3://b/../c", "s3://b/a?x", "https://b", "s3://b/a//c"] {
            assert!(matches!(Place::parse(bad), Err(BucketError::Url(_))), "{bad}");
        }
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        let folder = BucketConfig { region: Some("x".into()), ..config("/mnt") };
        assert!(matches!(folder.validate(), Err(BucketError::OnlyS3("region"))));
        let s3 = config("s3://bucket").validate();
        assert_eq!(s3.is_ok(), cfg!(feature = "s3"), "{s3:?}");
    }

    #[tokio::test]
    async fn an_object_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = Bucket::open(&config(dir.path().to_str().unwrap())).unwrap();
        bucket.put("a/b.json", b"first".to_vec()).await.unwrap();
        bucket.put("a/b.json", b"second".to_vec()).await.unwrap();
        assert_eq!(std::fs::read(dir.path().join("a/b.json")).unwrap(), b"first");
        let place = bucket.place("a/c.segment", Duration::from_secs(1)).await.unwrap();
        assert_eq!(place.0, format!("file://{}/a/c.segment", dir.path().display()));
    }
}
