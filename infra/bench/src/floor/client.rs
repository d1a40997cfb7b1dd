//! Clients of the bare quinn floor: as many as there are simulated agents, with their certificates and their settings.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use drums_agent::net::client_config;
use drums_common::wire::SERVER_NAME;
use quinn::Endpoint;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use super::quic::{ORDER, RECORD_BYTES, read_frame};
use crate::agents::Host;

/// What every client is to do; may be changed at any time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    pub connect: bool,
    /// A datagram so often.
    pub beat: Option<Duration>,
    /// Uploads of so many bytes each that were asked for so far.
    pub uploads: u64,
    pub upload_bytes: usize,
}

#[derive(Default)]
struct Counts {
    connected: AtomicUsize,
    sent: AtomicU64,
    uploaded: AtomicUsize,
}

pub struct Clients {
    all: usize,
    load: watch::Sender<Load>,
    counts: Arc<Counts>,
    _tasks: JoinSet<()>,
}

/// Frames of an upload: as evidence is cut.
const FRAME: usize = 256 << 10;
/// What a beat's bytes are, about.
pub const BEAT_BYTES: usize = 24;

impl Clients {
    pub fn start(hosts: Vec<Host>, server: SocketAddr, load: Load) -> Result<Self> {
        let (load, loads) = watch::channel(load);
        let counts = Arc::new(Counts::default());
        let mut tasks = JoinSet::new();
        let all = hosts.len();
        for host in hosts {
            let config = client_config(&host.identity)?;
            let (mut loads, counts) = (loads.clone(), counts.clone());
            tasks.spawn(async move {
                let mut endpoint = None;
                loop {
                    // The sender lives as long as the clients.
                    let _ = loads.wait_for(|l| l.connect).await;
                    let _ = one(&mut endpoint, &config, server, &mut loads, &counts).await;
                    sleep(Duration::from_millis(200).mul_f64(rand::random_range(0.5..1.0))).await;
                }
            });
        }
        Ok(Self { all, load, counts, _tasks: tasks })
    }

    pub fn set(&self, change: impl FnOnce(&mut Load)) {
        self.load.send_modify(change);
    }

    pub fn sent(&self) -> u64 {
        self.counts.sent.load(SeqCst)
    }

    pub async fn connected(&self, patience: Duration) -> Result<()> {
        self.until(patience, "are connected", || self.counts.connected.load(SeqCst)).await
    }

    pub async fn gone(&self, patience: Duration) -> Result<()> {
        self.until(patience, "have left", || self.all - self.counts.connected.load(SeqCst)).await
    }

    /// Everybody uploads once more; returns when all is acknowledged.
    pub async fn upload(&self, bytes: usize, patience: Duration) -> Result<()> {
        self.forget_uploads();
        self.set(|l| {
            l.uploads += 1;
            l.upload_bytes = bytes;
        });
        self.uploaded(patience).await
    }

    /// Waits until everybody has uploaded once more than when `forget_uploads` was called.
    pub async fn uploaded(&self, patience: Duration) -> Result<()> {
        self.until(patience, "have uploaded", || self.counts.uploaded.load(SeqCst)).await
    }

    pub fn forget_uploads(&self) {
        self.counts.uploaded.store(0, SeqCst);
    }

    async fn until(&self, patience: Duration, what: &str, count: impl Fn() -> usize) -> Result<()> {
        let deadline = Instant::now() + patience;
        while count() < self.all && Instant::now() < deadline {
            sleep(Duration::from_millis(5)).await;
        }
        let have = count();
        ensure!(have >= self.all, "{have} of {} clients {what} after {patience:?}", self.all);
        Ok(())
    }
}

/// `endpoint` is kept from one to the next, as a simulated agent keeps its own.
async fn one(
    endpoint: &mut Option<Endpoint>,
    config: &quinn::ClientConfig,
    server: SocketAddr,
    loads: &mut watch::Receiver<Load>,
    counts: &Counts,
) -> Result<()> {
    let endpoint = match endpoint {
        Some(endpoint) => endpoint,
        None => endpoint.insert(Endpoint::client(([127, 0, 0, 1], 0).into())?),
    };
    let connection = endpoint.connect_with(config.clone(), server, SERVER_NAME)?.await?;
    let (mut echo, mut control) = connection.open_bi().await?;
    echo.write_all(&[1]).await?;
    let mut accepted = [0];
    control.read_exact(&mut accepted).await.context("not accepted")?;
    let (mut to, mut from) = connection.open_bi().await?;
    // A stream that nothing was written to is not open to the other side.
    to.write_all(&0_u32.to_be_bytes()).await?;
    from.read_exact(&mut accepted).await?;
    counts.connected.fetch_add(1, SeqCst);
    let ordered = Notify::new();
    let echoing = async {
        loop {
            let frame = read_frame(&mut control).await?;
            if frame.first() == Some(&ORDER) {
                ordered.notify_one();
                continue;
            }
            echo.write_all(&(u32::try_from(frame.len())?).to_be_bytes()).await?;
            echo.write_chunk(Bytes::from(frame)).await?;
        }
    };
    let mut uploading_loads = loads.clone();
    let uploading = async {
        let mut done = uploading_loads.borrow_and_update().uploads;
        loop {
            // Both branches are cancel-safe: they only wait.
            let mut left = tokio::select! {
                load = uploading_loads.wait_for(|l| l.uploads > done) => {
                    let load = *load?;
                    done = load.uploads;
                    load.upload_bytes
                }
                () = ordered.notified() => RECORD_BYTES,
            };
            while left > 0 {
                let bytes = left.min(FRAME);
                to.write_all(&(u32::try_from(bytes)?).to_be_bytes()).await?;
                to.write_chunk(Bytes::from(vec![7; bytes])).await?;
                from.read_exact(&mut [0]).await?;
                left -= bytes;
            }
            counts.uploaded.fetch_add(1, SeqCst);
        }
    };
    let mut leave = loads.clone();
    // Whichever ends first ends the connection.
    let end: Result<()> = tokio::select! {
        end = echoing => end,
        end = uploading => end,
        end = beat(&connection, loads, counts) => end,
        _ = leave.wait_for(|l| !l.connect) => Ok(()),
        e = connection.closed() => Err(e.into()),
    };
    counts.connected.fetch_sub(1, SeqCst);
    end
}

async fn beat(connection: &quinn::Connection, loads: &mut watch::Receiver<Load>, counts: &Counts) -> Result<()> {
    let bytes = Bytes::from_static(&[7; BEAT_BYTES]);
    let mut next = Instant::now();
    loop {
        let Some(every) = loads.borrow_and_update().beat else {
            loads.changed().await?;
            if let Some(every) = loads.borrow().beat {
                next = Instant::now() + every.mul_f64(rand::random_range(0.0..1.0));
            }
            continue;
        };
        // Both branches are cancel-safe: they only wait.
        let due = tokio::select! {
            () = sleep_until(next) => true,
            changed = loads.changed() => { changed?; false }
        };
        if due {
            next = (next + every).max(Instant::now());
            connection.send_datagram(bytes.clone())?;
            counts.sent.fetch_add(1, SeqCst);
        }
    }
}
