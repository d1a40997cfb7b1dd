//! A UDP relay between agents and their coordinator that loses, delays, doubles and holds back packets as it is told.
//!
//! It knows hosts by their address and nothing of what the packets say.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::AsFd as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use drums_infra::lab::Member;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha20Rng;
use serde::Serialize;

/// Agents and enrolment.
const PORTS: [u16; 2] = [7400, 7401];
/// The thread looks at the time and at its end this often.
const TICK: Duration = Duration::from_millis(20);
/// A packet that is held back comes after those of this time.
const HELD_BACK_MS: std::ops::Range<u64> = 20..120;
/// Flows beyond this many: the one that was silent for longest goes.
const FLOWS: usize = 64;
/// The largest UDP payload.
const LARGEST: usize = 65_535;

/// What happens to packets in one direction; shares in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    pub cut: bool,
    pub loss: u32,
    pub duplication: u32,
    pub reordering: u32,
}

/// Both directions of one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    pub to_coordinator: Way,
    pub from_coordinator: Way,
}

#[derive(Debug, Default)]
struct Counters {
    passed: AtomicU64,
    cut: AtomicU64,
    lost: AtomicU64,
    doubled: AtomicU64,
    held_back: AtomicU64,
}

/// Packets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Packets {
    pub passed: u64,
    pub cut: u64,
    pub lost: u64,
    pub doubled: u64,
    pub held_back: u64,
}

/// When copies of a packet go on, from now; none for a packet that does not.
fn fate(way: Way, draw: &mut impl Rng, counters: &Counters) -> [Option<Duration>; 2] {
    let mut hit = |share: u32| share > 0 && draw.random_range(0..1_000) < share;
    let one_more = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
    if way.cut {
        one_more(&counters.cut);
        return [None, None];
    }
    if hit(way.loss) {
        one_more(&counters.lost);
        return [None, None];
    }
    let (doubled, held_back) = (hit(way.duplication), hit(way.reordering));
    let late = Duration::from_millis(draw.random_range(HELD_BACK_MS));
    one_more(&counters.passed);
    let first = if held_back {
        one_more(&counters.held_back);
        late
    } else {
        Duration::ZERO
    };
    if doubled {
        one_more(&counters.doubled);
    }
    [Some(first), doubled.then(|| first + late / 4)]
}

struct Shared {
    rules: Mutex<Vec<(Ipv4Addr, Rules)>>,
    counters: Counters,
    end: AtomicBool,
}

/// Ends its thread when dropped.
pub struct Relay {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Stands at `here` in the member's namespace and passes on to `coordinator`.
    pub fn start(
        member: &Member,
        here: Ipv4Addr,
        coordinator: Ipv4Addr,
        hosts: &[Ipv4Addr],
        seed: u64,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            rules: Mutex::new(hosts.iter().map(|h| (*h, Rules::default())).collect()),
            counters: Counters::default(),
            end: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        let (told, ready) = std::sync::mpsc::sync_channel(1);
        let entered = member.entering();
        let thread = std::thread::spawn(move || {
            let opened = entered.and_then(|enter| enter()).and_then(|()| {
                PORTS
                    .iter()
                    .map(|port| {
                        let socket = UdpSocket::bind((here, *port))?;
                        socket.set_nonblocking(true)?;
                        Ok((*port, socket))
                    })
                    .collect::<io::Result<Vec<_>>>()
            });
            let (listeners, said) = match opened {
                Ok(listeners) => (Some(listeners), Ok(())),
                Err(e) => (None, Err(e)),
            };
            let _ = told.send(said);
            if let Some(listeners) = listeners {
                let draw = ChaCha20Rng::seed_from_u64(seed);
                Loop {
                    shared: &theirs,
                    coordinator,
                    listeners,
                    flows: Vec::new(),
                    draw,
                    due: BinaryHeap::new(),
                    number: 0,
                }
                .run();
            }
        });
        ready.recv().context("the relay's thread ended")?.context("cannot open the relay's sockets")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Changes what happens to a host's packets.
    pub fn rule(&self, host: Ipv4Addr, change: impl FnOnce(&mut Rules)) {
        let mut rules = self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rules)) = rules.iter_mut().find(|(address, _)| *address == host) {
            change(rules);
        }
    }

    pub fn packets(&self) -> Packets {
        let c = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Packets {
            passed: read(&c.passed),
            cut: read(&c.cut),
            lost: read(&c.lost),
            doubled: read(&c.doubled),
            held_back: read(&c.held_back),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An agent's socket, and ours towards the coordinator that stands for it.
struct Flow {
    agent: SocketAddr,
    port: u16,
    upstream: UdpSocket,
    used: Instant,
}

/// A packet on its way: when, a number that keeps the order of equal times, to whom.
type Due = Reverse<(Instant, u64, Parcel)>;

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Parcel {
    agent: SocketAddr,
    port: u16,
    to_coordinator: bool,
    bytes: Vec<u8>,
}

struct Loop<'a> {
    shared: &'a Shared,
    coordinator: Ipv4Addr,
    listeners: Vec<(u16, UdpSocket)>,
    flows: Vec<Flow>,
    draw: ChaCha20Rng,
    due: BinaryHeap<Due>,
    number: u64,
}

impl Loop<'_> {
    fn run(mut self) {
        let mut buffer = vec![0; LARGEST];
        while !self.shared.end.load(Ordering::Relaxed) {
            let next = self.due.peek().map(|Reverse((at, ..))| at.saturating_duration_since(Instant::now()));
            // Rounded up, or the last fraction of a millisecond would be a busy loop.
            let wait = next.unwrap_or(TICK).min(TICK).as_micros().div_ceil(1_000);
            let mut fds: Vec<PollFd<'_>> = self
                .listeners
                .iter()
                .map(|(_, s)| s)
                .chain(self.flows.iter().map(|f| &f.upstream))
                .map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN))
                .collect();
            let _ = poll(&mut fds, PollTimeout::from(u8::try_from(wait).unwrap_or(u8::MAX)));
            drop(fds);
            self.receive(&mut buffer);
            self.deliver();
        }
    }

    /// Everything that has arrived, in both directions.
    fn receive(&mut self, buffer: &mut [u8]) {
        let mut arrived = Vec::new();
        for (port, socket) in &self.listeners {
            while let Ok((n, agent)) = socket.recv_from(buffer) {
                arrived.push(Parcel { agent, port: *port, to_coordinator: true, bytes: buffer[..n].to_vec() });
            }
        }
        for flow in &mut self.flows {
            // While the coordinator is down its port answers with refusals; QUIC does not hear them either.
            while let Ok(n) = flow.upstream.recv(buffer) {
                flow.used = Instant::now();
                let bytes = buffer[..n].to_vec();
                arrived.push(Parcel { agent: flow.agent, port: flow.port, to_coordinator: false, bytes });
            }
        }
        let now = Instant::now();
        for parcel in arrived {
            let way = self.way(&parcel);
            let [first, second] = fate(way, &mut self.draw, &self.shared.counters);
            if let Some(late) = second {
                let copy = Parcel { bytes: parcel.bytes.clone(), ..parcel };
                self.later(now + late, copy);
            }
            if let Some(late) = first {
                self.later(now + late, parcel);
            }
        }
    }

    fn way(&self, parcel: &Parcel) -> Way {
        let rules = self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let of_host = rules.iter().find(|(address, _)| IpAddr::V4(*address) == parcel.agent.ip());
        let rules = of_host.map(|(_, rules)| *rules).unwrap_or_default();
        if parcel.to_coordinator { rules.to_coordinator } else { rules.from_coordinator }
    }

    fn later(&mut self, at: Instant, parcel: Parcel) {
        self.number += 1;
        self.due.push(Reverse((at, self.number, parcel)));
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.due.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Some(Reverse((_, _, parcel))) = self.due.pop() else { return };
            if parcel.to_coordinator {
                // A full buffer or a refusal is a lost packet.
                if let Ok(flow) = self.flow(parcel.agent, parcel.port) {
                    let _ = flow.upstream.send(&parcel.bytes);
                }
            } else if let Some((_, socket)) = self.listeners.iter().find(|(port, _)| *port == parcel.port) {
                let _ = socket.send_to(&parcel.bytes, parcel.agent);
            }
        }
    }

    fn flow(&mut self, agent: SocketAddr, port: u16) -> io::Result<&mut Flow> {
        let at = match self.flows.iter().position(|f| f.agent == agent && f.port == port) {
            Some(at) => at,
            None => {
                if self.flows.len() >= FLOWS {
                    self.flows.sort_by_key(|f| f.used);
                    self.flows.remove(0);
                }
                let upstream = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                upstream.connect((self.coordinator, port))?;
                upstream.set_nonblocking(true)?;
                self.flows.push(Flow { agent, port, upstream, used: Instant::now() });
                self.flows.len() - 1
            }
        };
        let flow = &mut self.flows[at];
        flow.used = Instant::now();
        Ok(flow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(way: Way) -> (Vec<[Option<Duration>; 2]>, Counters) {
        let (counters, mut draw) = (Counters::default(), ChaCha20Rng::seed_from_u64(7));
        ((0..10_000).map(|_| fate(way, &mut draw, &counters)).collect(), counters)
    }

    #[test]
    fn packets_meet_the_fate_that_the_rules_give_them() {
        let (all, counters) = fates(Way::default());
        assert!(all.iter().all(|f| *f == [Some(Duration::ZERO), None]));
        assert_eq!(counters.passed.into_inner(), 10_000);

        let (all, counters) = fates(Way { cut: true, ..Way::default() });
        assert!(all.iter().all(|f| *f == [None, None]));
        assert_eq!(counters.cut.into_inner(), 10_000);

        let (all, counters) = fates(Way { loss: 200, ..Way::default() });
        let lost = all.iter().filter(|f| f[0].is_none()).count();
        assert!((1_800..2_200).contains(&lost), "{lost}");
        assert_eq!(counters.lost.into_inner() as usize, lost);

        let (all, _) = fates(Way { duplication: 300, ..Way::default() });
        let doubled = all.iter().filter(|f| f[1].is_some()).count();
        assert!((2_700..3_300).contains(&doubled), "{doubled}");

        let (all, _) = fates(Way { reordering: 300, ..Way::default() });
        let late = all.iter().filter(|f| f[0].is_some_and(|d| d >= Duration::from_millis(20))).count();
        assert!((2_700..3_300).contains(&late), "{late}");
    }
}
