//! Which fault happens when: a function of seed, length and number of hosts, and of nothing else.
//!
//! Faults of one lane never overlap: a process is not killed while its disk is frozen. Lanes overlap as they like: the
//! coordinator may be killed while a host is partitioned and another one stands still.

use std::collections::BTreeMap;

use rand::{Rng as _, SeedableRng as _, seq::SliceRandom as _};
use rand_chacha::ChaCha20Rng;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// SIGKILL, and a start afterwards.
    Kill,
    /// An orderly end, and a start afterwards.
    Restart,
    /// SIGSTOP, and SIGCONT afterwards.
    Stall,
    /// SIGKILL, and a start with other boot-time and monotonic clocks.
    ClockStep,
    /// The file system under its state stands still.
    FrozenDisk,
    /// Nothing passes.
    Partition,
    /// Nothing passes to the coordinator, everything from it.
    DeafCoordinator,
    /// Nothing passes from the coordinator, everything to it.
    DeafAgent,
    Loss,
    Reordering,
    Duplication,
    /// The operator cancels a run.
    Cancel,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Kill,
        Self::Restart,
        Self::Stall,
        Self::ClockStep,
        Self::FrozenDisk,
        Self::Partition,
        Self::DeafCoordinator,
        Self::DeafAgent,
        Self::Loss,
        Self::Reordering,
        Self::Duplication,
        Self::Cancel,
    ];
    /// Of a process and its disk.
    const PROCESS: [Self; 5] = [Self::Kill, Self::Restart, Self::Stall, Self::ClockStep, Self::FrozenDisk];
    const NETWORK: [Self; 6] =
        [Self::Partition, Self::DeafCoordinator, Self::DeafAgent, Self::Loss, Self::Reordering, Self::Duplication];

    /// While it lasts, the host and the coordinator cannot hear of each other.
    pub fn cuts_off(self) -> bool {
        !matches!(self, Self::Loss | Self::Reordering | Self::Duplication | Self::Cancel)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    Coordinator,
    /// By index.
    Host(usize),
    /// Some open run: the number is drawn, the runs are whatever they are.
    Run(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    pub at_ms: u64,
    pub for_ms: u64,
    pub kind: Kind,
    pub target: Target,
    /// How much of it: a share of packets in thousandths, hours of a clock's step; 0 where there is no more or less.
    pub amount: u32,
}

impl Fault {
    pub fn end_ms(&self) -> u64 {
        self.at_ms + self.for_ms
    }
}

/// A shuffled deck, dealt to the end before it is shuffled again: no kind is left out by chance.
struct Deck {
    kinds: &'static [Kind],
    left: Vec<Kind>,
    dealt: usize,
}

impl Deck {
    fn new(kinds: &'static [Kind]) -> Self {
        Self { kinds, left: Vec::new(), dealt: 0 }
    }

    fn deal(&mut self, draw: &mut ChaCha20Rng) -> Kind {
        if self.left.is_empty() {
            self.left = self.kinds.to_vec();
            self.left.shuffle(draw);
        }
        self.dealt += 1;
        self.left.pop().unwrap_or(Kind::Kill)
    }

    /// Every kind was dealt once: there is time for long ones.
    fn dealt_once(&self) -> bool {
        self.dealt > self.kinds.len()
    }
}

/// Where faults follow each other.
struct Lane {
    target: Target,
    deck: usize,
    gap_ms: (u64, u64),
    next_ms: u64,
}

/// All faults of a run of `total_ms`, by their begin; all end within it. `life_ms` is the life lease: some faults of
/// hosts outlast it.
pub fn schedule(seed: u64, total_ms: u64, hosts: usize, life_ms: u64) -> Vec<Fault> {
    let mut draw = ChaCha20Rng::seed_from_u64(seed);
    let mut decks =
        [Deck::new(&Kind::PROCESS), Deck::new(&Kind::PROCESS), Deck::new(&Kind::NETWORK), Deck::new(&[Kind::Cancel])];
    let mut lanes = vec![
        Lane { target: Target::Coordinator, deck: 0, gap_ms: (1_500, 5_000), next_ms: 3_000 },
        Lane { target: Target::Run(0), deck: 3, gap_ms: (16_000, 28_000), next_ms: 12_000 },
    ];
    for host in 0..hosts {
        lanes.push(Lane { target: Target::Host(host), deck: 1, gap_ms: (5_000, 9_000), next_ms: 2_000 });
        lanes.push(Lane { target: Target::Host(host), deck: 2, gap_ms: (1_500, 4_000), next_ms: 1_000 });
    }
    for lane in &mut lanes {
        lane.next_ms += draw.random_range(0..2_000);
    }
    let mut out = Vec::new();
    // The lane whose turn comes first: decks are shared, and are dealt in the order of time.
    while let Some(lane) = lanes.iter_mut().filter(|l| l.next_ms < total_ms).min_by_key(|l| l.next_ms) {
        let deck = &mut decks[lane.deck];
        let kind = deck.deal(&mut draw);
        let of_host = matches!(lane.target, Target::Host(_));
        let long = of_host && kind.cuts_off() && deck.dealt_once() && draw.random_bool(0.12);
        let for_ms = match kind {
            Kind::Cancel => 0,
            Kind::Stall | Kind::Kill | Kind::Partition | Kind::DeafAgent | Kind::DeafCoordinator if long => {
                life_ms + draw.random_range(2_000..6_000)
            }
            Kind::FrozenDisk => draw.random_range(500..3_000),
            Kind::Restart => draw.random_range(0..1_000),
            Kind::Loss | Kind::Reordering | Kind::Duplication => draw.random_range(2_000..6_000),
            _ => draw.random_range(500..5_000),
        };
        let amount = match kind {
            Kind::Loss => draw.random_range(50..=200),
            Kind::Reordering | Kind::Duplication => draw.random_range(100..=400),
            Kind::ClockStep => draw.random_range(1..=240),
            _ => 0,
        };
        let target = match lane.target {
            Target::Run(_) => Target::Run(draw.random()),
            other => other,
        };
        let fault = Fault { at_ms: lane.next_ms, for_ms, kind, target, amount };
        lane.next_ms = fault.end_ms() + draw.random_range(lane.gap_ms.0..lane.gap_ms.1);
        if fault.end_ms() <= total_ms {
            out.push(fault);
        }
    }
    out.sort_by_key(|f| f.at_ms);
    out
}

/// How often each kind is in it.
pub fn count(faults: impl IntoIterator<Item = Kind>) -> BTreeMap<Kind, usize> {
    let mut counts: BTreeMap<Kind, usize> = Kind::ALL.into_iter().map(|k| (k, 0)).collect();
    for kind in faults {
        *counts.entry(kind).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000;

    fn drawn(seed: u64) -> Vec<Fault> {
        schedule(seed, MINUTE, 3, 12_000)
    }

    #[test]
    fn a_seed_is_a_schedule() {
        for seed in 0..50 {
            assert_eq!(drawn(seed), drawn(seed));
            assert_ne!(drawn(seed), drawn(seed + 1));
        }
        // It means the same tomorrow.
        let first = drawn(1)[0];
        let text = serde_json::to_string(&first).unwrap();
        assert_eq!(text, r#"{"at_ms":1595,"for_ms":851,"kind":"deaf-coordinator","target":{"host":2},"amount":0}"#);
    }

    #[test]
    fn a_minute_holds_every_kind_of_fault() {
        for seed in 0..500 {
            let counts = count(drawn(seed).iter().map(|f| f.kind));
            assert!(counts.values().all(|n| *n > 0), "seed {seed}: {counts:?}");
        }
    }

    #[test]
    fn faults_of_one_lane_do_not_overlap_and_all_end_in_time() {
        for seed in 0..10 {
            let all = schedule(seed, 10 * MINUTE, 3, 12_000);
            for (i, a) in all.iter().enumerate() {
                assert!(a.end_ms() <= 10 * MINUTE, "{a:?}");
                let process = |f: &Fault| Kind::PROCESS.contains(&f.kind);
                for b in all[i + 1..].iter().filter(|b| b.target == a.target && process(b) == process(a)) {
                    assert!(b.at_ms >= a.end_ms(), "seed {seed}: {a:?} and {b:?}");
                }
            }
        }
    }

    #[test]
    fn some_faults_of_hosts_outlast_the_life_lease_and_none_of_the_coordinators_does() {
        let all: Vec<Fault> = (0..20).flat_map(|seed| schedule(seed, 10 * MINUTE, 3, 12_000)).collect();
        let long = |f: &&Fault| f.for_ms > 12_000;
        assert!(all.iter().filter(long).count() > 20);
        assert!(all.iter().filter(long).all(|f| matches!(f.target, Target::Host(_))));
    }
}
