//! tonic: a unary call for each beat, over HTTP/2 on a connection of its own for each client. Without TLS and without a
//! schema, both of which would cost it more.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::{Buf as _, BufMut as _, Bytes};
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tonic::{
    Request, Response, Status,
    body::Body,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::{BoxFuture, Service, http},
    server::UnaryService,
    transport::{Channel, Endpoint, Server},
};

use super::client::BEAT_BYTES;
use crate::process::serve_lines;

const PATH: &str = "/drums.Beats/Beat";

/// Messages are their bytes.
#[derive(Clone, Copy, Default)]
struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let bytes = from.remaining();
        Ok(Some(from.copy_to_bytes(bytes)))
    }
}

#[derive(Clone, Default)]
struct Beats(Arc<AtomicU64>);

impl UnaryService<Bytes> for Beats {
    type Response = Bytes;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        self.0.fetch_add(1, SeqCst);
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl Service<http::Request<Body>> for Beats {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let beats = self.clone();
        Box::pin(async move { Ok(tonic::server::Grpc::new(Plain).unary(beats, request).await) })
    }
}

pub fn serve(address: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let beats = Beats::default();
    let count = beats.0.clone();
    runtime.spawn(async move { Server::builder().serve(address, beats).await });
    serve_lines(|_| Ok(json!({ "calls": count.load(SeqCst) })))
}

/// Connections, one for each client.
pub struct Channels(Vec<Channel>);

impl Channels {
    pub async fn connect(server: SocketAddr, clients: usize) -> Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{server}"))?.tcp_nodelay(true);
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut all = Vec::with_capacity(clients);
        while all.len() < clients {
            match endpoint.connect().await {
                Ok(channel) => all.push(channel),
                // It may not listen yet.
                Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(e) => return Err(e).context("the gRPC floor cannot be reached"),
            }
        }
        Ok(Self(all))
    }

    /// Each calls so often, for so long; answers how many calls were answered.
    pub async fn call(&self, every: Duration, period: Duration) -> Result<u64> {
        let calls = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let end = Instant::now() + period;
        for channel in &self.0 {
            let mut client = tonic::client::Grpc::new(channel.clone());
            let calls = calls.clone();
            tasks.spawn(async move {
                let mut next = Instant::now() + every.mul_f64(rand::random_range(0.0..1.0));
                while next < end {
                    sleep_until(next).await;
                    client.ready().await?;
                    let request = Request::new(Bytes::from_static(&[7; BEAT_BYTES]));
                    let path = http::uri::PathAndQuery::from_static(PATH);
                    let _: Response<Bytes> = client.unary(request, path, Plain).await?;
                    calls.fetch_add(1, SeqCst);
                    next = (next + every).max(Instant::now());
                }
                Ok::<_, anyhow::Error>(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended?.context("a gRPC call failed")?;
        }
        Ok(calls.load(SeqCst))
    }
}
