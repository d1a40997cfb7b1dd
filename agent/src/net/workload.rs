//! Fetching a workload by digest: the manifest (whose SHA-256 is the workload's name), then each file by its own.
//!
//! Downloads go to `workloads/.part-<digest>/` and are resumed by offset; the finished tree is renamed into place, so a
//! folder under its digest is always whole. Every byte is verified on arrival and a present tree before each use.

use std::{
    fs, io as stdio,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use drums_common::{
    digest::Sha256,
    experiment::WorkloadManifest,
    failure::{Failure, FailureClass},
    telemetry::chain,
    wire::{
        frame::Lane,
        latest::{ArtifactHead, ArtifactRequest},
    },
    workload::{BadManifest, MAX_MANIFEST_BYTES, parse},
};
use drums_infra::workload::{WorkloadError as FolderError, assemble, verify};
use quinn::Connection;
use sha2::{Digest as _, Sha256 as Hasher};
use tokio::io::AsyncWriteExt as _;

use super::io::{self, StreamError};

const CHUNK: usize = 64 << 10;
/// Single artifacts on their way, beside the workloads.
const FILES: &str = ".part-files";

#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: stdio::Error },
    #[error("the coordinator does not have artifact {}: {failure}", sha256.short())]
    Missing { sha256: Sha256, failure: Failure },
    #[error("artifact {} arrived with SHA-256 {}", wanted.short(), got.short())]
    Digest { wanted: Sha256, got: Sha256 },
    #[error("artifact {} has {bytes} bytes where {wanted} were expected", sha256.short())]
    Size { sha256: Sha256, bytes: u64, wanted: u64 },
    #[error(transparent)]
    Manifest(#[from] BadManifest),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("{} has {free} bytes left on its disk and the workload needs {wanted}; free some space", path.display())]
    DiskFull { path: PathBuf, free: u64, wanted: u64 },
    #[error("the transfer broke")]
    Stream(#[from] StreamError),
}

impl WorkloadError {
    /// A broken transfer is resumed on the next connection; everything else is told to the measuring side.
    pub fn broken_transfer(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    pub fn failure(&self) -> Failure {
        let (class, code, help) = match self {
            Self::Missing { failure, .. } => return failure.clone(),
            Self::Stream(_) => (FailureClass::Transient, "transfer", "it will be tried again"),
            Self::Io { .. } | Self::Folder(FolderError::Io { .. }) => {
                (FailureClass::Transient, "workload-io", "check the agent's disk")
            }
            Self::DiskFull { .. } => (FailureClass::Transient, "disk-full", "free some space on the agent's disk"),
            Self::Digest { .. } | Self::Size { .. } | Self::Folder(_) => {
                (FailureClass::Transient, "workload-damaged", "check the disks of agent and coordinator")
            }
            Self::Manifest(_) => {
                (FailureClass::Permanent, "bad-manifest", "add the workload again with drumsctl workload add")
            }
        };
        Failure::new(class, code, chain(self), help)
    }
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(stdio::Error) -> WorkloadError {
    let path = path.to_owned();
    move |source| WorkloadError::Io { doing, path, source }
}

/// The folder of a workload that is here and whole.
pub(super) fn present(workloads: &Path, workload: Sha256) -> Result<Option<PathBuf>, WorkloadError> {
    let dir = workloads.join(workload.to_string());
    if !dir.exists() {
        return Ok(None);
    }
    let got = verify(&dir)?.sha256();
    if got == workload { Ok(Some(dir)) } else { Err(WorkloadError::Digest { wanted: workload, got }) }
}

/// Fetches what is missing and puts the tree in place.
pub(super) async fn fetch(
    connection: &Connection,
    workloads: &Path,
    workload: Sha256,
) -> Result<PathBuf, WorkloadError> {
    let part = workloads.join(format!(".part-{workload}"));
    let blobs = part.join("blobs");
    fs::create_dir_all(&blobs).map_err(io_error("make the folder", &blobs))?;
    let path = download(connection, &blobs, workload, None).await?;
    let text = fs::read(&path).map_err(io_error("read", &path))?;
    let manifest = parse(&text, Some(workload))?;
    check_space(workloads, manifest.files.values().map(|f| f.bytes).sum())?;
    for file in manifest.files.values().filter(|f| f.kind == "file") {
        download(connection, &blobs, file.sha256, Some(file.bytes)).await?;
    }
    let workloads = workloads.to_owned();
    let unpack = move || {
        let result = install(&workloads, workload, &part, &manifest, &text);
        if matches!(result, Err(WorkloadError::Folder(FolderError::Differs { .. }))) {
            // A download that went bad on our disk would fail the same way for ever.
            let _ = fs::remove_dir_all(&part);
        }
        result
    };
    match tokio::task::spawn_blocking(unpack).await {
        Ok(result) => result,
        Err(panicked) => Err(io_error("unpack", &blobs)(stdio::Error::other(panicked))),
    }
}

/// One artifact as a file, by itself.
pub(super) async fn fetch_file(
    connection: &Connection,
    workloads: &Path,
    sha256: Sha256,
    bytes: u64,
) -> Result<PathBuf, WorkloadError> {
    let folder = workloads.join(FILES);
    fs::create_dir_all(&folder).map_err(io_error("make the folder", &folder))?;
    check_space(workloads, bytes)?;
    download(connection, &folder, sha256, Some(bytes)).await
}

/// One artifact into `blobs/<digest>`; what is there already is kept, what is there in part is resumed.
async fn download(
    connection: &Connection,
    blobs: &Path,
    sha256: Sha256,
    wanted: Option<u64>,
) -> Result<PathBuf, WorkloadError> {
    let done = blobs.join(sha256.to_string());
    if done.exists() {
        return Ok(done);
    }
    let part = blobs.join(format!("{sha256}.part"));
    let mut offset = fs::metadata(&part).map_or(0, |m| m.len());
    if wanted.is_some_and(|w| offset > w) {
        offset = 0;
    }
    let (mut send, mut recv) = connection.open_bi().await.map_err(StreamError::Connection)?;
    io::write_bytes(&mut send, &[Lane::Artifact.tag()]).await?;
    io::write(&mut send, Lane::Artifact, &ArtifactRequest { sha256, offset }).await?;
    let _ = send.finish();
    let head: ArtifactHead = io::read(&mut recv, Lane::Artifact).await?.ok_or(StreamError::CutShort)?;
    let total = match head {
        ArtifactHead::Found { total_bytes } => total_bytes,
        ArtifactHead::Missing(failure) => {
            // A part that does not fit what the coordinator has is of no use.
            let _ = fs::remove_file(&part);
            return Err(WorkloadError::Missing { sha256, failure });
        }
    };
    let limit = wanted.unwrap_or(MAX_MANIFEST_BYTES);
    if wanted.is_some_and(|w| w != total) || total > limit {
        return Err(WorkloadError::Size { sha256, bytes: total, wanted: limit });
    }
    let failed = |e| io_error("write", &part)(e);
    let mut file =
        tokio::fs::OpenOptions::new().create(true).append(true).open(&part).await.map_err(io_error("open", &part))?;
    file.set_len(offset).await.map_err(failed)?;
    let mut at = offset;
    let mut buffer = vec![0; CHUNK];
    while at < total {
        let n = io::read_some(&mut recv, &mut buffer).await?.ok_or(StreamError::CutShort)?;
        at += n as u64;
        if at > total {
            return Err(WorkloadError::Size { sha256, bytes: at, wanted: total });
        }
        let result = file.write_all(&buffer[..n]).await;
        result.map_err(|e| io_error("write", &part)(e))?;
    }
    file.sync_all().await.map_err(|e| io_error("write", &part)(e))?;
    drop(file);
    let got = digest(&part)?;
    if got != sha256 {
        fs::remove_file(&part).map_err(io_error("remove", &part))?;
        return Err(WorkloadError::Digest { wanted: sha256, got });
    }
    fs::rename(&part, &done).map_err(io_error("rename", &part))?;
    Ok(done)
}

fn digest(path: &Path) -> Result<Sha256, WorkloadError> {
    let mut file = fs::File::open(path).map_err(io_error("read", path))?;
    let mut hasher = Hasher::new();
    stdio::copy(&mut file, &mut hasher).map_err(io_error("read", path))?;
    Ok(Sha256(hasher.finalize().into()))
}

/// Builds the tree beside its place and renames it there.
fn install(
    workloads: &Path,
    workload: Sha256,
    part: &Path,
    manifest: &WorkloadManifest,
    text: &[u8],
) -> Result<PathBuf, WorkloadError> {
    let new = part.join("new");
    if new.exists() {
        fs::remove_dir_all(&new).map_err(io_error("remove", &new))?;
    }
    fs::create_dir_all(&new).map_err(io_error("make the folder", &new))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).map_err(io_error("set the mode of", &new))?;
    assemble(&new, text, manifest, &|file| part.join("blobs").join(file.sha256.to_string()))?;
    nix::unistd::syncfs(fs::File::open(&new).map_err(io_error("open", &new))?)
        .map_err(|e| io_error("sync", &new)(e.into()))?;
    let dir = workloads.join(workload.to_string());
    if dir.exists() {
        // What is there was found damaged, or we would not be here.
        fs::remove_dir_all(&dir).map_err(io_error("remove the damaged", &dir))?;
    }
    fs::rename(&new, &dir).map_err(io_error("rename", &new))?;
    fs::remove_dir_all(part).map_err(io_error("remove", part))?;
    Ok(dir)
}

fn check_space(dir: &Path, bytes: u64) -> Result<(), WorkloadError> {
    let stat = nix::sys::statvfs::statvfs(dir).map_err(|e| io_error("ask for free space on", dir)(e.into()))?;
    let free = stat.blocks_available() * stat.fragment_size();
    // Downloads and tree exist side by side for a moment.
    let wanted = bytes.saturating_mul(2);
    if free < wanted {
        return Err(WorkloadError::DiskFull { path: dir.to_owned(), free, wanted });
    }
    Ok(())
}
