//! Artifacts: content under its digest, whole and verified or not there. In the home's folder, or in the bucket.

#[cfg(feature = "s3")]
mod in_s3;

use std::{
    io::{self, SeekFrom},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use drums_common::digest::Sha256;
use sha2::{Digest as _, Sha256 as Hasher};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};

/// Of a file, at a time.
const CHUNK: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[cfg(feature = "s3")]
    #[error(transparent)]
    Bucket(#[from] crate::bucket::BucketError),
    #[cfg(feature = "s3")]
    #[error("the bucket did not take the upload")]
    Upload(#[source] object_store::Error),
    #[error("the content has SHA-256 {got}, not {wanted}")]
    Digest { wanted: Sha256, got: Sha256 },
    #[error("the content has more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("{0}")]
    Broken(String),
}

#[derive(Clone, Debug)]
pub enum Artifacts {
    Folder(PathBuf),
    #[cfg(feature = "s3")]
    S3(crate::bucket::s3::S3),
}

/// An artifact from some byte on. Who gets it whole holds it against its digest.
pub struct Content {
    pub total_bytes: u64,
    body: Body,
}

enum Body {
    File(PathBuf, tokio::fs::File),
    #[cfg(feature = "s3")]
    S3(futures_util::stream::BoxStream<'static, object_store::Result<Bytes>>),
}

impl Content {
    /// A file's, as a folder has it; `None` if it is not there.
    pub async fn of_file(path: PathBuf, offset: u64) -> Result<Option<Self>, ArtifactError> {
        let mut file = match tokio::fs::File::open(&path).await {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("read", &path)(e)),
        };
        let total_bytes = file.metadata().await.map_err(io_error("read", &path))?.len();
        file.seek(SeekFrom::Start(offset)).await.map_err(io_error("read", &path))?;
        Ok(Some(Self { total_bytes, body: Body::File(path, file) }))
    }

    /// The next bytes; `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ArtifactError> {
        match &mut self.body {
            Body::File(path, file) => {
                let mut buffer = vec![0; CHUNK];
                let n = file.read(&mut buffer).await.map_err(io_error("read", path))?;
                buffer.truncate(n);
                Ok((n > 0).then(|| buffer.into()))
            }
            #[cfg(feature = "s3")]
            Body::S3(stream) => in_s3::next(stream).await,
        }
    }
}

impl Artifacts {
    pub fn new(dir: PathBuf) -> Self {
        Self::Folder(dir)
    }

    /// What cannot be asked about counts as not there: it is uploaded again, or told to be missing.
    pub async fn has(&self, sha256: Sha256) -> bool {
        match self {
            Self::Folder(dir) => tokio::fs::metadata(dir.join(sha256.to_string())).await.is_ok_and(|m| m.is_file()),
            #[cfg(feature = "s3")]
            Self::S3(s3) => in_s3::has(s3, sha256).await,
        }
    }

    /// `None` if it is not there.
    pub async fn read(&self, sha256: Sha256, offset: u64) -> Result<Option<Content>, ArtifactError> {
        match self {
            Self::Folder(dir) => Content::of_file(dir.join(sha256.to_string()), offset).await,
            #[cfg(feature = "s3")]
            Self::S3(s3) => in_s3::read(s3, sha256, offset).await,
        }
    }

    /// Begins an upload; nothing is there under its name before `finish` has seen the digest.
    pub async fn begin(&self, sha256: Sha256, limit: u64) -> Result<Upload, ArtifactError> {
        let to = match self {
            Self::Folder(dir) => Sink::Folder(FolderUpload::begin(dir, sha256).await?),
            #[cfg(feature = "s3")]
            Self::S3(s3) => Sink::S3(in_s3::S3Upload::begin(s3, sha256)),
        };
        Ok(Upload { to, wanted: sha256, hasher: Hasher::new(), bytes: 0, limit })
    }

    /// Removes what uploads that a crash ended have left.
    pub async fn sweep(&self) {
        #[allow(irrefutable_let_patterns)] // without S3 there is one kind
        let Self::Folder(dir) = self else { return };
        let Ok(mut entries) = tokio::fs::read_dir(dir).await else { return };
        while let Ok(Some(entry)) = entries.next_entry().await {
            if entry.file_name().to_string_lossy().starts_with(".part-") {
                let _ = tokio::fs::remove_file(entry.path()).await;
            }
        }
    }
}

pub struct Upload {
    to: Sink,
    wanted: Sha256,
    hasher: Hasher,
    bytes: u64,
    limit: u64,
}

enum Sink {
    Folder(FolderUpload),
    #[cfg(feature = "s3")]
    S3(in_s3::S3Upload),
}

impl Upload {
    pub async fn write(&mut self, chunk: &[u8]) -> Result<(), ArtifactError> {
        self.bytes += chunk.len() as u64;
        if self.bytes > self.limit {
            return Err(ArtifactError::TooLarge { limit: self.limit });
        }
        self.hasher.update(chunk);
        match &mut self.to {
            Sink::Folder(to) => to.write(chunk).await,
            #[cfg(feature = "s3")]
            Sink::S3(to) => to.write(chunk).await,
        }
    }

    pub async fn finish(self) -> Result<(), ArtifactError> {
        let got = Sha256(self.hasher.finalize().into());
        let whole = got == self.wanted;
        match self.to {
            // Dropped, it is undone.
            Sink::Folder(to) if whole => to.finish().await?,
            Sink::Folder(_) => {}
            #[cfg(feature = "s3")]
            Sink::S3(to) => to.finish(whole).await?,
        }
        if whole { Ok(()) } else { Err(ArtifactError::Digest { wanted: self.wanted, got }) }
    }
}

struct FolderUpload {
    file: tokio::fs::File,
    part: PathBuf,
    to: PathBuf,
    done: bool,
}

impl FolderUpload {
    async fn begin(dir: &Path, sha256: Sha256) -> Result<Self, ArtifactError> {
        let unique: [u8; 8] = rand::random();
        let part = dir.join(format!(".part-{}-{}", sha256.short(), hex::encode(unique)));
        let mut options = tokio::fs::File::options();
        let file = options.create_new(true).write(true).open(&part).await.map_err(io_error("create", &part))?;
        Ok(Self { file, part, to: dir.join(sha256.to_string()), done: false })
    }

    async fn write(&mut self, chunk: &[u8]) -> Result<(), ArtifactError> {
        self.file.write_all(chunk).await.map_err(io_error("write", &self.part))
    }

    async fn finish(mut self) -> Result<(), ArtifactError> {
        self.file.flush().await.map_err(io_error("write", &self.part))?;
        self.file.sync_all().await.map_err(io_error("sync", &self.part))?;
        tokio::fs::rename(&self.part, &self.to).await.map_err(io_error("rename", &self.part))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for FolderUpload {
    fn drop(&mut self) {
        if !self.done {
            // Best effort; `sweep` takes what stays.
            let _ = std::fs::remove_file(&self.part);
        }
    }
}

fn io_error<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> ArtifactError + 'a {
    move |source| ArtifactError::Io { doing, path: path.to_owned(), source }
}
