//! Artifacts in the bucket: one object each, uploaded in parts that show as one object only when the digest fits.

use bytes::Bytes;
use drums_common::{digest::Sha256, telemetry::chain};
use futures_util::{StreamExt as _, stream::BoxStream};
use object_store::MultipartUpload;

use super::{ArtifactError, Body, Content};
use crate::bucket::s3::{S3, payload};

/// S3 wants parts of at least 5 MiB, and takes 10,000 of them: 78 GiB, more than a workload may have.
const PART: usize = 8 << 20;

fn key(sha256: Sha256) -> String {
    format!("artifacts/{sha256}")
}

pub(super) async fn has(s3: &S3, sha256: Sha256) -> bool {
    s3.has(&key(sha256)).await.unwrap_or_else(|e| {
        tracing::warn!(error = %chain(&e), "taken for not there");
        false
    })
}

pub(super) async fn read(s3: &S3, sha256: Sha256, offset: u64) -> Result<Option<Content>, ArtifactError> {
    let found = s3.read(&key(sha256), offset).await?;
    Ok(found.map(|(total_bytes, stream)| Content { total_bytes, body: Body::S3(stream) }))
}

pub(super) async fn next(
    stream: &mut BoxStream<'static, object_store::Result<Bytes>>,
) -> Result<Option<Bytes>, ArtifactError> {
    stream.next().await.transpose().map_err(|e| ArtifactError::Broken(chain(&e)))
}

pub(super) struct S3Upload {
    s3: S3,
    key: String,
    gathered: Vec<u8>,
    /// From the first full part on.
    parts: Option<Box<dyn MultipartUpload>>,
}

impl S3Upload {
    pub fn begin(s3: &S3, sha256: Sha256) -> Self {
        Self { s3: s3.clone(), key: key(sha256), gathered: Vec::new(), parts: None }
    }

    pub async fn write(&mut self, chunk: &[u8]) -> Result<(), ArtifactError> {
        self.gathered.extend_from_slice(chunk);
        if self.gathered.len() >= PART { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), ArtifactError> {
        let parts = match &mut self.parts {
            Some(parts) => parts,
            none => none.insert(self.s3.begin(&self.key).await?),
        };
        parts.put_part(payload(std::mem::take(&mut self.gathered))).await.map_err(ArtifactError::Upload)
    }

    /// Shows it if it is `whole`; undoes it otherwise.
    pub async fn finish(mut self, whole: bool) -> Result<(), ArtifactError> {
        if whole && self.parts.is_none() {
            return Ok(self.s3.put(&self.key, std::mem::take(&mut self.gathered)).await?);
        }
        if whole && !self.gathered.is_empty() {
            self.flush().await?;
        }
        let Some(mut parts) = self.parts.take() else { return Ok(()) };
        if whole {
            parts.complete().await.map(drop).map_err(ArtifactError::Upload)
        } else {
            parts.abort().await.map_err(ArtifactError::Upload)
        }
    }
}

impl Drop for S3Upload {
    /// An upload that broke off leaves its parts to the bucket's lifecycle rule, after one attempt to undo them.
    fn drop(&mut self) {
        if let Some(mut parts) = self.parts.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                if let Err(e) = parts.abort().await {
                    tracing::warn!(error = %chain(&e), "parts of an upload that broke off stay in the bucket");
                }
            });
        }
    }
}
