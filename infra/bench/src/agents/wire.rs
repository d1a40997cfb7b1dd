//! Frames on an agent's streams, as the wire has them.

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use drums_common::{
    digest::Sha256,
    wire::{
        codec,
        frame::{self, Lane},
        hello::{Hello, HelloReply, OURS, REPLY_LEN},
    },
};
use quinn::{RecvStream, SendStream};
use serde::{Serialize, de::DeserializeOwned};

/// One message, or `None` at the end of the stream.
pub(super) async fn read<T: DeserializeOwned>(stream: &mut RecvStream, lane: Lane) -> Result<Option<T>> {
    let mut prefix = [0; frame::PREFIX];
    match stream.read_exact(&mut prefix).await {
        Ok(()) => {}
        Err(quinn::ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(e) => return Err(e).context("a frame's length was not read"),
    }
    let mut payload = vec![0; frame::payload_len(lane, prefix)?];
    stream.read_exact(&mut payload).await.context("a frame was not read")?;
    Ok(Some(codec::decode(lane, &payload)?))
}

pub(super) async fn write<T: Serialize>(stream: &mut SendStream, lane: Lane, message: &T) -> Result<()> {
    write_encoded(stream, lane, codec::encode(lane, message)?).await
}

pub(super) async fn write_encoded(stream: &mut SendStream, lane: Lane, payload: Vec<u8>) -> Result<()> {
    let prefix = frame::prefix(lane, &payload)?;
    let mut chunks = [Bytes::copy_from_slice(&prefix), payload.into()];
    stream.write_all_chunks(&mut chunks).await.context("a frame was not written")
}

/// The dialling side of the version handshake.
pub(super) async fn shake_hands(send: &mut SendStream, recv: &mut RecvStream, build: Sha256) -> Result<()> {
    send.write_all(&Hello { versions: OURS, build }.encode()).await?;
    let mut reply = [0; REPLY_LEN];
    recv.read_exact(&mut reply).await.context("the coordinator did not answer the hello")?;
    let version = HelloReply::parse(&reply)?.accept(OURS)?;
    ensure!(version == OURS.max, "the coordinator speaks an older version ({version})");
    Ok(())
}
