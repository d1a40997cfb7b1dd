//! UDP in memory: lossy, slow, one-way, doubling paths between addresses, in tokio's time.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::Future as _,
    io::{self, IoSliceMut},
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use drums_common::draw::Draw;
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use tokio::time::{Instant, Sleep};

/// What one address has in its way, both ways.
#[derive(Clone, Debug)]
pub struct Road {
    pub latency: Duration,
    /// To and from the coordinator.
    pub up_cut: bool,
    pub down_cut: bool,
    pub loss_percent: u64,
}

#[derive(Default)]
struct Inbox {
    packets: BTreeMap<(Instant, u64), (SocketAddr, Vec<u8>)>,
    waker: Option<Waker>,
}

struct State {
    inboxes: HashMap<SocketAddr, Inbox>,
    roads: BTreeMap<IpAddr, Road>,
    draw: Draw,
    packets: u64,
    dropped: u64,
    next_port: u16,
}

/// All of the network.
pub struct Wire(Mutex<State>);

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wire")
    }
}

impl Wire {
    pub fn new(roads: BTreeMap<IpAddr, Road>, draw: Draw) -> Arc<Self> {
        let inboxes = HashMap::new();
        Arc::new(Self(Mutex::new(State { inboxes, roads, draw, packets: 0, dropped: 0, next_port: 10_000 })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn road(&self, ip: IpAddr, change: impl FnOnce(&mut Road)) {
        if let Some(road) = self.lock().roads.get_mut(&ip) {
            change(road);
        }
    }

    /// Sent and dropped.
    pub fn counted(&self) -> (u64, u64) {
        let state = self.lock();
        (state.packets, state.dropped)
    }

    /// A socket of a process, which lives as long as `plugged`.
    pub fn socket(self: &Arc<Self>, ip: IpAddr, port: Option<u16>, plugged: Arc<AtomicBool>) -> Arc<MemorySocket> {
        let mut state = self.lock();
        let port = port.unwrap_or_else(|| {
            state.next_port = state.next_port.checked_add(1).unwrap_or(10_000);
            state.next_port
        });
        let address = SocketAddr::new(ip, port);
        state.inboxes.insert(address, Inbox::default());
        drop(state);
        Arc::new(MemorySocket { address, wire: self.clone(), plugged, timer: Mutex::new(None) })
    }
}

impl State {
    fn send(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        self.packets += 1;
        // Who has a road is a host; the other end is the coordinator.
        let up = self.roads.contains_key(&from.ip());
        let host = if up { from.ip() } else { to.ip() };
        let Some(road) = self.roads.get(&host).cloned() else { return };
        let cut = if up { road.up_cut } else { road.down_cut };
        if cut || self.draw.below(1_000) < 10 * road.loss_percent + 1 {
            self.dropped += 1;
            return;
        }
        let times = if self.draw.below(100) == 0 { 2 } else { 1 };
        for _ in 0..times {
            let jitter = if self.draw.below(50) == 0 { 10 } else { 1 };
            let us = road.latency.as_micros() as u64;
            let at = Instant::now() + Duration::from_micros(us + self.draw.below(us * jitter));
            let Some(inbox) = self.inboxes.get_mut(&to) else { return };
            let first = inbox.packets.first_key_value().is_none_or(|((t, _), _)| at < *t);
            inbox.packets.insert((at, self.packets * 2 + u64::from(jitter > 1)), (from, bytes.to_vec()));
            if first && let Some(waker) = inbox.waker.take() {
                waker.wake();
            }
        }
    }
}

/// One socket.
pub struct MemorySocket {
    address: SocketAddr,
    wire: Arc<Wire>,
    /// False once the process is dead.
    plugged: Arc<AtomicBool>,
    timer: Mutex<Option<Pin<Box<Sleep>>>>,
}

impl fmt::Debug for MemorySocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemorySocket({})", self.address)
    }
}

impl Drop for MemorySocket {
    fn drop(&mut self) {
        // A later socket of the same address has taken the inbox over.
        if self.plugged.load(Ordering::Relaxed) {
            self.wire.lock().inboxes.remove(&self.address);
        }
    }
}

#[derive(Debug)]
struct Writable;

impl UdpPoller for Writable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncUdpSocket for MemorySocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if self.plugged.load(Ordering::Relaxed) {
            self.wire.lock().send(self.address, transmit.destination, transmit.contents);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        if !self.plugged.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        loop {
            let next = {
                let mut state = self.wire.lock();
                let inbox = state.inboxes.entry(self.address).or_default();
                match inbox.packets.first_key_value().map(|(key, _)| *key) {
                    Some((at, _)) if at <= Instant::now() => {
                        let Some((_, (from, bytes))) = inbox.packets.pop_first() else { continue };
                        buffers[0][..bytes.len()].copy_from_slice(&bytes);
                        let len = bytes.len();
                        meta[0] = RecvMeta { addr: from, len, stride: len, ecn: None, dst_ip: None };
                        return Poll::Ready(Ok(1));
                    }
                    next => {
                        inbox.waker = Some(cx.waker().clone());
                        next.map(|(at, _)| at)
                    }
                }
            };
            let Some(at) = next else { return Poll::Pending };
            let mut timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner);
            let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
            timer.as_mut().reset(at);
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
