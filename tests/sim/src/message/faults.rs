//! Somebody who breaks things, by a seed.

use drums_common::draw::Draw;

use super::world::World;
use crate::{
    time::{MINUTE, MS, S},
    truth::Broken,
};

/// How often things break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temper {
    Never,
    Calm,
    Rough,
    Wild,
}

pub struct Faults {
    temper: Temper,
    draw: Draw,
}

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    KillAgent {
        host: u64,
        down_us: u64,
        torn: bool,
    },
    StallAgent {
        host: u64,
        us: u64,
    },
    KillCoordinator {
        down_us: u64,
    },
    /// In the middle of what it does next.
    BurnCoordinator {
        uses: u32,
    },
    StallCoordinator {
        us: u64,
    },
    Partition {
        host: u64,
        us: u64,
    },
    OneWay {
        host: u64,
        up: bool,
        us: u64,
    },
    Loss {
        host: u64,
        percent: u64,
        us: u64,
    },
}

impl Faults {
    pub fn new(temper: Temper, draw: Draw) -> Self {
        Self { temper, draw }
    }

    /// How long until the next one; none if nothing ever breaks.
    pub fn next_in(&mut self) -> Option<u64> {
        let mean = match self.temper {
            Temper::Never => return None,
            Temper::Calm => 20 * MINUTE,
            Temper::Rough => 4 * MINUTE,
            Temper::Wild => 50 * S,
        };
        // Exponential: faults do not know of each other.
        Some((-(self.draw.unit().ln()) * mean as f64) as u64 + MS)
    }

    pub fn draw(&mut self) -> Fault {
        let d = &mut self.draw;
        let host = d.next_u64();
        // Mostly seconds, sometimes minutes, now and then longer than every lease.
        let mut long = |short: u64| match d.below(20) {
            0 => 25 * MINUTE + d.below(20 * MINUTE),
            1..=4 => d.below(6 * MINUTE),
            _ => d.below(short),
        };
        let us = long(30 * S) + MS;
        match d.below(16) {
            0..=2 => Fault::KillAgent { host, down_us: us, torn: d.below(3) == 0 },
            3 | 4 => Fault::StallAgent { host, us },
            5 => Fault::KillCoordinator { down_us: us },
            6 | 7 => Fault::BurnCoordinator { uses: d.below(30) as u32 + 1 },
            8 | 9 => Fault::StallCoordinator { us },
            10 | 11 => Fault::Partition { host, us },
            12 | 13 => Fault::OneWay { host, up: d.below(2) == 0, us },
            _ => Fault::Loss { host, percent: 5 + d.below(56), us },
        }
    }
}

impl Fault {
    /// Breaks it; says what kind it was.
    pub fn apply(self, world: &mut World) -> Result<&'static str, Broken> {
        let n = world.hosts.len() as u64;
        let until = |us| world.now_us + us;
        Ok(match self {
            Self::KillAgent { host, down_us, torn } => {
                world.kill_agent((host % n) as usize, down_us, torn);
                if torn { "agent killed in a write" } else { "agent killed" }
            }
            Self::StallAgent { host, us } => {
                let until = until(us);
                let host = (host % n) as usize;
                world.hosts[host].stalled_until = world.hosts[host].stalled_until.max(until);
                world.trace.note(world.now_us, "agent stalls", host as u64, us);
                "agent stalled"
            }
            Self::KillCoordinator { down_us } => {
                world.kill_coordinator(down_us)?;
                "coordinator killed"
            }
            Self::BurnCoordinator { uses } => {
                if world.coordinator.is_some() {
                    world.home.light_fuse(uses);
                }
                "coordinator killed at a use of its store"
            }
            Self::StallCoordinator { us } => {
                world.stall_coordinator(us);
                "coordinator stalled"
            }
            Self::Partition { host, us } => {
                let until = until(us);
                let path = &mut world.paths[(host % n) as usize];
                (path.up_cut_until, path.down_cut_until) = (until, until);
                world.trace.note(world.now_us, "partition", host % n, us);
                "partition"
            }
            Self::OneWay { host, up, us } => {
                let until = until(us);
                let path = &mut world.paths[(host % n) as usize];
                if up {
                    path.up_cut_until = until
                } else {
                    path.down_cut_until = until
                }
                world.trace.note(world.now_us, if up { "cut up" } else { "cut down" }, host % n, us);
                "one-way partition"
            }
            Self::Loss { host, percent, us } => {
                let until = until(us);
                let path = &mut world.paths[(host % n) as usize];
                (path.lossy_until, path.loss_percent) = (until, percent);
                world.trace.note(world.now_us, "loss", host % n, percent);
                "loss"
            }
        })
    }
}
