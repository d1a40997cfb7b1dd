//! Sending an artifact: the head, then raw bytes from the offset that the agent asked for.

use drums_common::{
    failure::Failure,
    telemetry::chain,
    wire::{
        frame::Lane,
        latest::{ArtifactHead, ArtifactRequest},
    },
};
use quinn::{RecvStream, SendStream};

use super::{
    io::{self, StreamError},
    ports::Ports,
};
use crate::artifacts::Content;

pub(super) async fn send<P: Ports>(send: &mut SendStream, recv: &mut RecvStream, ports: &P) -> Result<(), StreamError> {
    let Some(request) = io::read::<ArtifactRequest>(recv, Lane::Artifact).await? else { return Ok(()) };
    let mut content = match open(&request, ports).await {
        Ok(content) => {
            let total_bytes = content.total_bytes;
            io::write(send, Lane::Artifact, &ArtifactHead::Found { total_bytes }).await?;
            content
        }
        Err(failure) => {
            io::write(send, Lane::Artifact, &ArtifactHead::Missing(failure)).await?;
            let _ = send.finish();
            return Ok(());
        }
    };
    loop {
        match content.chunk().await {
            Ok(None) => break,
            Ok(Some(chunk)) => io::write_bytes(send, &chunk).await?,
            Err(e) => {
                // The agent sees a stream that broke and asks again from where it got to.
                tracing::error!(sha256 = %request.sha256, error = %chain(&e), "cannot read an artifact");
                let _ = send.reset(drums_common::wire::close::Close::Internal.code().into());
                return Ok(());
            }
        }
    }
    let _ = send.finish();
    Ok(())
}

async fn open<P: Ports>(request: &ArtifactRequest, ports: &P) -> Result<Content, Failure> {
    let content = ports.artifact(request.sha256, request.offset).await?;
    let total = content.total_bytes;
    if request.offset > total {
        return Err(Failure::refused(
            "bad-offset",
            format!("artifact {} has {total} bytes, and {} were skipped", request.sha256, request.offset),
            "start over from 0",
        ));
    }
    Ok(content)
}
