//! Raw UDP: a socket that counts what arrives. No encryption, no connection, no answer.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use anyhow::Result;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::client::BEAT_BYTES;
use crate::process::serve_lines;

pub fn serve(address: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(address)?;
    let count = Arc::new(AtomicU64::new(0));
    let counting = count.clone();
    std::thread::Builder::new().name("sink".to_owned()).spawn(move || {
        let mut buffer = [0; 2048];
        while socket.recv(&mut buffer).is_ok() {
            counting.fetch_add(1, SeqCst);
        }
    })?;
    serve_lines(|_| Ok(json!({ "datagrams": count.load(SeqCst) })))
}

/// `senders` sockets send a beat's bytes so often, for so long; answers how many were sent.
pub async fn send(server: SocketAddr, senders: usize, every: Duration, period: Duration) -> Result<u64> {
    let sent = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    let end = Instant::now() + period;
    for _ in 0..senders {
        let socket = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        socket.connect(server).await?;
        let sent = sent.clone();
        tasks.spawn(async move {
            let mut next = Instant::now() + every.mul_f64(rand::random_range(0.0..1.0));
            while next < end {
                sleep_until(next).await;
                if socket.send(&[7; BEAT_BYTES]).await.is_ok() {
                    sent.fetch_add(1, SeqCst);
                }
                next = (next + every).max(Instant::now());
            }
        });
    }
    tasks.join_all().await;
    Ok(sent.load(SeqCst))
}
