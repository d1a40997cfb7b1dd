//! What happened, in order: a digest of everything, the last lines for whoever looks into a failure, all of it on request.

use std::collections::VecDeque;

const KEPT: usize = 60;

#[derive(Debug)]
pub struct Trace {
    digest: u64,
    events: u64,
    recent: VecDeque<(u64, &'static str, u64, u64)>,
    /// Printed as it comes about.
    aloud: bool,
}

impl Trace {
    pub fn new(aloud: bool) -> Self {
        Self { digest: 0xcbf2_9ce4_8422_2325, events: 0, recent: VecDeque::with_capacity(KEPT), aloud }
    }

    pub fn note(&mut self, at_us: u64, what: &'static str, a: u64, b: u64) {
        self.events += 1;
        for word in [at_us, what.len() as u64 ^ u64::from(what.as_bytes()[0]) << 8, a, b] {
            self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
        }
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back((at_us, what, a, b));
        if self.aloud {
            println!("{}", line(&(at_us, what, a, b)));
        }
    }

    /// For people only: a sentence between the events.
    pub fn say(&self, at_us: u64, sentence: impl FnOnce() -> String) {
        if self.aloud {
            println!("{} {}", stamp(at_us), sentence());
        }
    }

    pub fn digest(&self) -> u64 {
        self.digest
    }
    pub fn events(&self) -> u64 {
        self.events
    }

    pub fn recent(&self) -> String {
        self.recent.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

fn stamp(us: u64) -> String {
    let s = us / 1_000_000;
    format!("{:3}:{:02}:{:02}.{:06}", s / 3_600, s / 60 % 60, s % 60, us % 1_000_000)
}

fn line((at, what, a, b): &(u64, &'static str, u64, u64)) -> String {
    format!("{}  {what} {a} {b}", stamp(*at))
}
