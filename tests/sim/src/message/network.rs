//! The simulated paths between hosts and the coordinator: streams that keep their order and datagrams that do not.
//!
//! Carries what QUIC would carry, with QUIC's promises: a stream's message arrives in order or not at all, however long the
//! path is cut; a datagram may be lost, overtaken, or (which QUIC rules out, and costs nothing to bear) doubled.

use std::collections::VecDeque;

use drums_common::{
    draw::Draw,
    wire::latest::{AgentHello, Beat, BeatAck, EvidenceAck, EvidenceBatch, ToAgent, ToCoordinator},
};

use crate::time::{MS, S};

/// A connection, named by whoever dialled it; never used twice.
pub type Conn = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Control,
    Evidence,
}

/// What a stream carries.
#[derive(Clone, Debug)]
pub enum Message {
    Hello(Box<AgentHello>),
    Said(ToCoordinator),
    Batch(EvidenceBatch),
    Order(ToAgent),
    Answer(EvidenceAck),
    /// The coordinator gave the evidence stream up over this run's batch.
    NotTaken,
}

#[derive(Clone, Debug)]
pub enum Datagram {
    Beat(Beat),
    Ack(BeatAck),
    /// The other side closed the connection.
    Close,
    /// The other side knows no such connection.
    Reset,
}

/// The path of one host.
#[derive(Clone, Debug)]
pub struct Path {
    latency_us: u64,
    pub up_cut_until: u64,
    pub down_cut_until: u64,
    pub lossy_until: u64,
    pub loss_percent: u64,
}

impl Path {
    pub fn draw(draw: &mut Draw) -> Self {
        let latency_us = 100 + draw.below(40 * MS);
        Self { latency_us, up_cut_until: 0, down_cut_until: 0, lossy_until: 0, loss_percent: 0 }
    }

    pub fn cut(&self, way: Way, now_us: u64) -> bool {
        now_us
            < match way {
                Way::Up => self.up_cut_until,
                Way::Down => self.down_cut_until,
            }
    }

    pub fn heal(&mut self) {
        (self.up_cut_until, self.down_cut_until, self.lossy_until) = (0, 0, 0);
    }

    fn loses(&self, draw: &mut Draw, now_us: u64) -> bool {
        // A wire loses a packet now and then anyway.
        let percent = if now_us < self.lossy_until { self.loss_percent } else { 0 };
        draw.below(1_000) < 10 * percent + 2
    }

    fn transit(&self, draw: &mut Draw) -> u64 {
        let jitter = match draw.below(100) {
            // Overtaken by much that was sent later.
            0 => draw.below(2 * S),
            _ => draw.below(self.latency_us),
        };
        self.latency_us + jitter
    }

    /// When a datagram that is sent now arrives, each time that it does.
    pub fn datagram(&self, draw: &mut Draw, way: Way, now_us: u64) -> [Option<u64>; 2] {
        if self.cut(way, now_us) || self.loses(draw, now_us) {
            return [None, None];
        }
        let again = (draw.below(200) == 0).then(|| now_us + self.transit(draw));
        [Some(now_us + self.transit(draw)), again]
    }

    /// When a stream's message that is sent now arrives if the path stays open: lost packets are sent again.
    pub fn stream(&self, draw: &mut Draw, now_us: u64) -> u64 {
        let mut at = now_us + self.latency_us + draw.below(self.latency_us);
        let mut pause = 3 * self.latency_us + 25 * MS;
        while self.loses(draw, now_us) {
            at += pause;
            pause = (2 * pause).min(10 * S);
        }
        at
    }

    /// When it is tried again on a path that is cut.
    pub fn again(&self, draw: &mut Draw, now_us: u64) -> u64 {
        now_us + 200 * MS + draw.below(3 * S)
    }
}

/// One direction of a stream.
#[derive(Debug, Default)]
pub struct Stream {
    pub waiting: VecDeque<Message>,
    /// Its first message is on its way.
    pub moving: bool,
}
