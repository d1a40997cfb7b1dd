//! The home's artifact folder: content-addressed files, whole and verified or not there.

use std::{
    io,
    path::{Path, PathBuf},
};

use drums_common::digest::Sha256;
use sha2::{Digest as _, Sha256 as Hasher};
use tokio::io::AsyncWriteExt as _;

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the content has SHA-256 {got}, not {wanted}")]
    Digest { wanted: Sha256, got: Sha256 },
    #[error("the content has more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("{0}")]
    Broken(String),
}

#[derive(Clone, Debug)]
pub struct Artifacts {
    dir: PathBuf,
}

impl Artifacts {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub fn path(&self, sha256: Sha256) -> PathBuf {
        self.dir.join(sha256.to_string())
    }

    pub async fn has(&self, sha256: Sha256) -> bool {
        tokio::fs::metadata(self.path(sha256)).await.is_ok_and(|m| m.is_file())
    }

    /// Begins an upload; nothing is there under its name before `finish` has seen the digest.
    pub async fn begin(&self, sha256: Sha256, limit: u64) -> Result<Upload, ArtifactError> {
        let unique: [u8; 8] = rand::random();
        let part = self.dir.join(format!(".part-{}-{}", sha256.short(), hex::encode(unique)));
        let file = tokio::fs::File::options()
            .create_new(true)
            .write(true)
            .open(&part)
            .await
            .map_err(|source| ArtifactError::Io { doing: "create", path: part.clone(), source })?;
        Ok(Upload {
            file,
            part,
            to: self.path(sha256),
            wanted: sha256,
            hasher: Hasher::new(),
            bytes: 0,
            limit,
            done: false,
        })
    }

    /// Removes what uploads that a crash ended have left.
    pub async fn sweep(&self) {
        let Ok(mut entries) = tokio::fs::read_dir(&self.dir).await else { return };
        while let Ok(Some(entry)) = entries.next_entry().await {
            if entry.file_name().to_string_lossy().starts_with(".part-") {
                let _ = tokio::fs::remove_file(entry.path()).await;
            }
        }
    }
}

pub struct Upload {
    file: tokio::fs::File,
    part: PathBuf,
    to: PathBuf,
    wanted: Sha256,
    hasher: Hasher,
    bytes: u64,
    limit: u64,
    done: bool,
}

impl Upload {
    pub async fn write(&mut self, chunk: &[u8]) -> Result<(), ArtifactError> {
        self.bytes += chunk.len() as u64;
        if self.bytes > self.limit {
            return Err(ArtifactError::TooLarge { limit: self.limit });
        }
        self.hasher.update(chunk);
        self.file.write_all(chunk).await.map_err(io_error("write", &self.part))
    }

    pub async fn finish(mut self) -> Result<(), ArtifactError> {
        let got = Sha256(std::mem::take(&mut self.hasher).finalize().into());
        if got != self.wanted {
            return Err(ArtifactError::Digest { wanted: self.wanted, got });
        }
        self.file.flush().await.map_err(io_error("write", &self.part))?;
        self.file.sync_all().await.map_err(io_error("sync", &self.part))?;
        tokio::fs::rename(&self.part, &self.to).await.map_err(io_error("rename", &self.part))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Upload {
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
