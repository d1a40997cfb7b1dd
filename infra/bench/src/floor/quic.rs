//! Bare quinn: the coordinator's own endpoint (the same sockets, TLS and transport settings, the same streams open) and
//! nothing behind it.
//!
//! Datagrams are counted and dropped. A push writes so many bytes to each connection and waits until each has echoed them;
//! an order writes as many, and each client answers it with an upload of `RECORD_BYTES`.
//! Uploads are hashed, written and synced as the coordinator writes evidence: SQLite with the same settings, one
//! transaction for all that waits, acknowledged after it.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use drums_common::digest::Sha256;
use drums_coordinator::{net::endpoint, pki::Pki};
use quinn::{Connection, Incoming, RecvStream, SendStream};
use serde_json::json;
use tokio::sync::{Mutex, Notify, mpsc, oneshot};

use crate::process::serve_lines;

/// What a pushed frame begins with: it is to be echoed, or to be answered by an upload.
pub const ECHO: u8 = 7;
pub const ORDER: u8 = 8;
/// As many as a host's first record of a run has, about.
pub const RECORD_BYTES: usize = 1_024;
/// A frame on a stream of the floor: a length, then as many bytes.
pub const MAX_FRAME: usize = 1 << 20;

#[derive(Default)]
struct Shared {
    controls: Mutex<Vec<SendStream>>,
    connections: AtomicUsize,
    accepted: AtomicUsize,
    datagrams: AtomicU64,
    echoes: AtomicUsize,
    echoed: Notify,
}

/// The process: `home` has the CA, `database` is made.
pub fn serve(home: &Path, address: SocketAddr, database: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let shared = Arc::new(Shared::default());
    let (uploads, waiting) = mpsc::channel(1_024);
    let writer = Writer::open(database)?;
    std::thread::Builder::new().name("store".to_owned()).spawn(move || writer.run(waiting))?;
    let pki = Pki::open(&home.join("pki"))?;
    let endpoint = {
        let _entered = runtime.enter();
        endpoint::agents(address, &pki)?
    };
    let accepting = shared.clone();
    runtime.spawn(async move {
        while let Some(incoming) = endpoint.accept().await {
            let (shared, uploads) = (accepting.clone(), uploads.clone());
            tokio::spawn(async move {
                // A connection's end ends what served it.
                let _ = serve_one(incoming, &shared, uploads).await;
            });
        }
    });
    serve_lines(|line| match line.split_once(' ').unwrap_or((line, "")) {
        ("push", bytes) => {
            let took = runtime.block_on(push(&shared, bytes.parse()?))?;
            Ok(json!({ "us": took.as_micros() as u64 }))
        }
        ("order", bytes) => {
            runtime.block_on(write_to_all(&shared, bytes.parse()?, ORDER))?;
            Ok(serde_json::Value::Null)
        }
        _ => Ok(json!({
            "datagrams": shared.datagrams.load(SeqCst),
            "connections": shared.connections.load(SeqCst),
            "accepted": shared.accepted.load(SeqCst),
        })),
    })
}

async fn serve_one(incoming: Incoming, shared: &Arc<Shared>, uploads: mpsc::Sender<Upload>) -> Result<()> {
    let connection = incoming.await?;
    let (mut control, mut echo) = connection.accept_bi().await?;
    // A client knows that it was accepted once it is told so: TLS 1.3 does not.
    let mut hello = [0];
    echo.read_exact(&mut hello).await?;
    control.write_all(&hello).await?;
    let (to, from) = connection.accept_bi().await?;
    shared.controls.lock().await.push(control);
    shared.accepted.fetch_add(1, SeqCst);
    shared.connections.fetch_add(1, SeqCst);
    let (echoing, counting) = (shared.clone(), shared.clone());
    tokio::spawn(async move { count_echoes(echo, &echoing).await });
    tokio::spawn(async move { take_uploads(from, to, uploads).await });
    count_datagrams(connection, &counting).await;
    shared.connections.fetch_sub(1, SeqCst);
    Ok(())
}

async fn count_datagrams(connection: Connection, shared: &Shared) {
    while connection.read_datagram().await.is_ok() {
        shared.datagrams.fetch_add(1, SeqCst);
    }
}

async fn count_echoes(mut echo: RecvStream, shared: &Shared) -> Result<()> {
    loop {
        read_frame(&mut echo).await?;
        shared.echoes.fetch_add(1, SeqCst);
        shared.echoed.notify_one();
    }
}

/// Until every connection that lives has echoed.
async fn push(shared: &Shared, bytes: usize) -> Result<Duration> {
    shared.echoes.store(0, SeqCst);
    let began = Instant::now();
    let wanted = write_to_all(shared, bytes, ECHO).await?;
    while shared.echoes.load(SeqCst) < wanted {
        tokio::time::timeout(Duration::from_secs(30), shared.echoed.notified()).await.context("an echo is missing")?;
    }
    Ok(began.elapsed())
}

/// One frame to every connection that lives; how many there are.
async fn write_to_all(shared: &Shared, bytes: usize, first: u8) -> Result<usize> {
    ensure!((1..=MAX_FRAME).contains(&bytes), "a frame has 1 to {MAX_FRAME} bytes");
    let mut frame = (u32::try_from(bytes)?).to_be_bytes().to_vec();
    frame.resize(bytes + 4, first);
    let frame = Bytes::from(frame);
    let mut controls = shared.controls.lock().await;
    let mut alive = Vec::with_capacity(controls.len());
    for mut control in controls.drain(..) {
        if control.write_chunk(frame.clone()).await.is_ok() {
            alive.push(control);
        }
    }
    *controls = alive;
    Ok(controls.len())
}

pub async fn read_frame(stream: &mut RecvStream) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length) as usize;
    ensure!(length <= MAX_FRAME, "a frame of {length} bytes");
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

struct Upload {
    bytes: Vec<u8>,
    sha256: Sha256,
    done: oneshot::Sender<()>,
}

async fn take_uploads(mut from: RecvStream, mut to: SendStream, uploads: mpsc::Sender<Upload>) -> Result<()> {
    loop {
        let bytes = read_frame(&mut from).await?;
        // An empty one only opens the stream.
        if !bytes.is_empty() {
            let sha256 = Sha256::of(&bytes);
            let (done, committed) = oneshot::channel();
            uploads.send(Upload { bytes, sha256, done }).await?;
            committed.await?;
        }
        to.write_all(&[1]).await?;
    }
}

struct Writer(rusqlite::Connection);

impl Writer {
    fn open(path: &Path) -> Result<Self> {
        let c = rusqlite::Connection::open(path)?;
        c.pragma_update(None, "journal_mode", "WAL")?;
        c.pragma_update(None, "synchronous", "FULL")?;
        c.execute_batch("CREATE TABLE upload (number INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, bytes BLOB NOT NULL)")?;
        Ok(Self(c))
    }

    fn run(mut self, mut waiting: mpsc::Receiver<Upload>) -> Result<()> {
        while let Some(first) = waiting.blocking_recv() {
            let t = self.0.transaction()?;
            let mut done = Vec::new();
            {
                let mut insert = t.prepare_cached("INSERT INTO upload (sha256, bytes) VALUES (?1, ?2)")?;
                let mut next = Some(first);
                while let Some(upload) = next {
                    insert.execute(rusqlite::params![upload.sha256.to_string(), upload.bytes])?;
                    done.push(upload.done);
                    next = waiting.try_recv().ok();
                }
            }
            t.commit()?;
            for done in done {
                // A connection that ended needs no answer.
                let _ = done.send(());
            }
        }
        Ok(())
    }
}
