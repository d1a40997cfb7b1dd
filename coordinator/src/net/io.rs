//! Frames on QUIC streams.

use std::time::Duration;

use drums_common::digest::Sha256;
use drums_common::wire::{
    codec::{self, CodecError},
    frame::{self, FrameError, Lane},
    hello::{HELLO_LEN, Hello, HelloError, HelloReply, OURS},
};
use quinn::{ReadError, ReadExactError, RecvStream, SendStream, WriteError};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::timeout;

/// A frame that was begun must be whole by then, and something written must have been taken. On any usable path a
/// megabyte takes a fraction of it.
pub(super) const STALL: Duration = Duration::from_secs(30);

/// Why a stream is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("the stream broke while reading")]
    Read(#[source] ReadError),
    #[error("the stream broke while writing")]
    Write(#[from] WriteError),
    #[error("the stream ended within a message")]
    CutShort,
    #[error("the peer took longer than {} s for one message", STALL.as_secs())]
    Stalled,
    #[error("the peer sent a bad frame")]
    Frame(#[from] FrameError),
    #[error("the peer sent a bad message")]
    Codec(#[from] CodecError),
    #[error("the peer's hello was not accepted")]
    Hello(#[from] HelloError),
}

impl StreamError {
    /// True if the peer is at fault, not the path.
    pub fn peers_fault(&self) -> bool {
        matches!(self, Self::CutShort | Self::Stalled | Self::Frame(_) | Self::Codec(_) | Self::Hello(_))
    }
}

/// One message, or `None` at an orderly end of the stream. Waits for its first byte as long as it takes.
pub(super) async fn read<T: DeserializeOwned>(stream: &mut RecvStream, lane: Lane) -> Result<Option<T>, StreamError> {
    let mut prefix = [0; frame::PREFIX];
    let first = match stream.read(&mut prefix[..1]).await.map_err(StreamError::Read)? {
        Some(n) => n,
        None => return Ok(None),
    };
    let rest = async {
        exact(stream, &mut prefix[first..]).await?;
        // The cap is checked here, before the buffer is made.
        let len = frame::payload_len(lane, prefix)?;
        let mut payload = Vec::with_capacity(len);
        while payload.len() < len {
            let chunk = stream.read_chunk(len - payload.len(), true).await.map_err(StreamError::Read)?;
            payload.extend_from_slice(&chunk.ok_or(StreamError::CutShort)?.bytes);
        }
        Ok(codec::decode(lane, &payload)?)
    };
    // Most streams wait for their first byte most of the time: what the rest takes, it takes then.
    Box::pin(timeout(STALL, rest)).await.map_err(|_| StreamError::Stalled)?.map(Some)
}

pub(super) async fn write<T: Serialize>(stream: &mut SendStream, lane: Lane, message: &T) -> Result<(), StreamError> {
    write_bytes(stream, &wrapped(lane, message)?).await
}

/// A message as it goes on a stream.
pub(super) fn wrapped<T: Serialize>(lane: Lane, message: &T) -> Result<Vec<u8>, StreamError> {
    Ok(frame::wrap(lane, &codec::encode(lane, message)?)?)
}

/// Writes, as long as the peer takes something at all.
pub(super) async fn write_bytes(stream: &mut SendStream, mut bytes: &[u8]) -> Result<(), StreamError> {
    while !bytes.is_empty() {
        let n = timeout(STALL, stream.write(bytes)).await.map_err(|_| StreamError::Stalled)??;
        bytes = &bytes[n..];
    }
    Ok(())
}

/// The accepting side of the version handshake. The reply to a peer without a common version tells it so; the error tells
/// this side.
pub(super) async fn shake_hands(
    send: &mut SendStream,
    recv: &mut RecvStream,
    build: Sha256,
) -> Result<u16, StreamError> {
    let mut bytes = [0; HELLO_LEN];
    timeout(STALL, exact(recv, &mut bytes)).await.map_err(|_| StreamError::Stalled)??;
    let hello = Hello::parse(&bytes)?;
    let reply = HelloReply::answer(OURS, build, &hello);
    write_bytes(send, &reply.encode()).await?;
    reply.chosen.ok_or(HelloError::NoCommonVersion { ours: OURS, theirs: hello.versions }.into())
}

pub(super) async fn exact(stream: &mut RecvStream, buffer: &mut [u8]) -> Result<(), StreamError> {
    stream.read_exact(buffer).await.map_err(|e| match e {
        ReadExactError::FinishedEarly(_) => StreamError::CutShort,
        ReadExactError::ReadError(e) => StreamError::Read(e),
    })
}
