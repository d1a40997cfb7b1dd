//! Sending an artifact: the head, then raw bytes from the offset that the agent asked for.

use std::io::SeekFrom;

use drums_common::{
    failure::{Failure, FailureClass},
    wire::{
        frame::Lane,
        latest::{ArtifactHead, ArtifactRequest},
    },
};
use quinn::{RecvStream, SendStream};
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
};

use super::{
    io::{self, StreamError},
    ports::Ports,
};

const CHUNK: usize = 64 << 10;

pub(super) async fn send<P: Ports>(send: &mut SendStream, recv: &mut RecvStream, ports: &P) -> Result<(), StreamError> {
    let Some(request) = io::read::<ArtifactRequest>(recv, Lane::Artifact).await? else { return Ok(()) };
    let mut file = match open(&request, ports).await {
        Ok((file, total_bytes)) => {
            io::write(send, Lane::Artifact, &ArtifactHead::Found { total_bytes }).await?;
            file
        }
        Err(failure) => {
            io::write(send, Lane::Artifact, &ArtifactHead::Missing(failure)).await?;
            let _ = send.finish();
            return Ok(());
        }
    };
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer).await {
            Ok(0) => break,
            Ok(n) => io::write_bytes(send, &buffer[..n]).await?,
            Err(e) => {
                // The agent sees a stream that broke and asks again from where it got to.
                tracing::error!(sha256 = %request.sha256, error = %e, "cannot read an artifact");
                let _ = send.reset(drums_common::wire::close::Close::Internal.code().into());
                return Ok(());
            }
        }
    }
    let _ = send.finish();
    Ok(())
}

async fn open<P: Ports>(request: &ArtifactRequest, ports: &P) -> Result<(File, u64), Failure> {
    let path = ports.artifact(request.sha256).await?;
    let failed = |e: std::io::Error| {
        Failure::new(
            FailureClass::Transient,
            "artifact-unreadable",
            format!("the coordinator cannot read {}: {e}", path.display()),
            "check the home's disk",
        )
    };
    let mut file = File::open(&path).await.map_err(failed)?;
    let total = file.metadata().await.map_err(failed)?.len();
    if request.offset > total {
        return Err(Failure::refused(
            "bad-offset",
            format!("artifact {} has {total} bytes, and {} were skipped", request.sha256, request.offset),
            "start over from 0",
        ));
    }
    file.seek(SeekFrom::Start(request.offset)).await.map_err(failed)?;
    Ok((file, total))
}
