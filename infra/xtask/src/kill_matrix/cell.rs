//! What the matrix is made of: faults, layers, the moments at which faults strike, and what each fault takes away. It is
//! the matrix's specification: the simulated world enacts the faults and does not read it.

use std::{collections::BTreeSet, fmt};

use serde::{Serialize, Serializer};

/// One fault: dead by then. Two: too, but where only the sweeper is left that can act.
pub const SOON_S: u64 = 2 * 60;
pub const SWEPT_S: u64 = 5 * 60;

/// Issued by name, as people say it.
macro_rules! named {
    ($t:ident: $($v:ident = $name:literal),+ $(,)?) => {
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$v => $name),+ })
            }
        }
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Its machine is gone for good.
    CoordinatorDead,
    /// Its process ends, and ends again whenever it is started.
    AgentDead,
    /// Its process lives and is never scheduled.
    AgentFrozen,
    /// No process of the host is scheduled any more; EC2 shows it running.
    KernelHung,
    /// Nothing reaches the host's network or leaves it.
    NetworkCut,
    /// The coordinator's: every call of theirs is refused, and so is what they signed beforehand.
    CredentialsRevoked,
    /// Somebody's clean-up deletes every schedule as soon as it is there.
    ScheduleMissing,
    /// What the schedule calls as may call nothing; it is seen only when it fires.
    ScheduleRole,
    /// Its every call is refused.
    Sweeper,
}

named!(Fault:
    CoordinatorDead = "coordinator dead",
    AgentDead = "agent dead",
    AgentFrozen = "agent frozen",
    KernelHung = "kernel hung",
    NetworkCut = "network cut",
    CredentialsRevoked = "credentials revoked",
    ScheduleMissing = "schedule missing",
    ScheduleRole = "schedule role broken",
    Sweeper = "sweeper broken",
);

pub const FAULTS: [Fault; 9] = [
    Fault::CoordinatorDead,
    Fault::AgentDead,
    Fault::AgentFrozen,
    Fault::KernelHung,
    Fault::NetworkCut,
    Fault::CredentialsRevoked,
    Fault::ScheduleMissing,
    Fault::ScheduleRole,
    Fault::Sweeper,
];

/// What ends a host, in the order of docs/architecture.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    GuestTimer,
    /// The life lease's, which knows deadline and lifetime as well.
    Watchdog,
    Schedule,
    Sweeper,
    Reaper,
}

named!(Layer:
    GuestTimer = "guest timer",
    Watchdog = "watchdog",
    Schedule = "schedule",
    Sweeper = "sweeper",
    Reaper = "reaper",
);

pub const LAYERS: [Layer; 5] = [Layer::GuestTimer, Layer::Watchdog, Layer::Schedule, Layer::Sweeper, Layer::Reaper];

impl Layer {
    /// By when it has ended a host, after its deadline, if nothing else does.
    pub fn bound_s(self) -> u64 {
        if self == Self::Sweeper { SWEPT_S } else { SOON_S }
    }
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// `RunInstances` was answered, and nothing else was done.
    Launched,
    /// The schedule is read back; the host boots and has no agent yet.
    Booting,
    /// Five minutes after the host became ready.
    Working,
    /// Two minutes before the deadline.
    Late,
    /// One second before it.
    Edge,
    /// Six seconds after it: the guest's timer has asked for power-off, and units are being stopped.
    ShuttingDown,
    /// Drawn; seconds after the launch was asked for, later than any boot takes.
    At(u64),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launched => f.write_str("launched"),
            Self::Booting => f.write_str("booting"),
            Self::Working => f.write_str("working"),
            Self::Late => f.write_str("2 min before the deadline"),
            Self::Edge => f.write_str("1 s before the deadline"),
            Self::ShuttingDown => f.write_str("while it shuts down"),
            Self::At(s) => write!(f, "{s} s after the launch"),
        }
    }
}

/// Fixed moments of every fault. [`Moment::ShuttingDown`] is a hung kernel's alone: all else is over by then.
const MOMENTS: [Moment; 5] = [Moment::Launched, Moment::Booting, Moment::Working, Moment::Late, Moment::Edge];

pub type Strike = (Fault, Moment);

/// Faults that strike together in one row; each row is run at several moments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    pub faults: Vec<Fault>,
}

/// Each fault, and each pair of the first eight.
pub fn cells() -> Vec<Cell> {
    let single = FAULTS.iter().map(|f| Cell { faults: vec![*f] });
    let pairs = (0..8).flat_map(|a| (a + 1..8).map(move |b| Cell { faults: vec![FAULTS[a], FAULTS[b]] }));
    single.chain(pairs).collect()
}

impl Cell {
    /// The faults at the same moment, at each; and each of two at the end of the other's time.
    pub fn strikes(&self) -> Vec<Vec<Strike>> {
        let together = |m| self.faults.iter().map(|f| (*f, m)).collect::<Vec<_>>();
        let mut all: Vec<_> = MOMENTS.into_iter().map(together).collect();
        if let [a, b] = self.faults[..] {
            all.push(vec![(a, Moment::Launched), (b, Moment::Edge)]);
            all.push(vec![(a, Moment::Edge), (b, Moment::Launched)]);
        }
        if self.faults.contains(&Fault::KernelHung) {
            let in_shutdown =
                |f: &Fault| (*f, if *f == Fault::KernelHung { Moment::ShuttingDown } else { Moment::Edge });
            all.push(self.faults.iter().map(in_shutdown).collect());
        }
        all
    }
}

/// Layers that a fault takes away from the host that it strikes.
pub fn disarms((fault, moment): Strike) -> &'static [Layer] {
    use Layer::{GuestTimer, Reaper, Schedule, Sweeper, Watchdog};
    match (fault, moment) {
        // Who would make the schedule is gone.
        (Fault::CoordinatorDead, Moment::Launched) => &[Reaper, Schedule],
        (Fault::CoordinatorDead, _) => &[Reaper],
        // The watchdog is another process.
        (Fault::AgentDead | Fault::AgentFrozen, _) => &[],
        (Fault::KernelHung, _) => &[GuestTimer, Watchdog],
        // The watchdog is the agent's program, which was not fetched yet: over the network, by a URL that was signed.
        (Fault::NetworkCut, Moment::Launched | Moment::Booting) => &[Watchdog],
        (Fault::NetworkCut, _) => &[],
        (Fault::CredentialsRevoked, Moment::Launched) => &[Reaper, Schedule, Watchdog],
        (Fault::CredentialsRevoked, Moment::Booting) => &[Reaper, Watchdog],
        (Fault::CredentialsRevoked, _) => &[Reaper],
        (Fault::ScheduleMissing | Fault::ScheduleRole, _) => &[Schedule],
        (Fault::Sweeper, _) => &[Sweeper],
    }
}

/// Layers that these faults leave able to end a host.
pub fn able(strikes: &[Strike]) -> BTreeSet<Layer> {
    let gone: BTreeSet<Layer> = strikes.iter().flat_map(|s| disarms(*s)).copied().collect();
    LAYERS.into_iter().filter(|l| !gone.contains(l)).collect()
}

/// By when a host must be dead that these faults struck, all layers armed. What only the sweeper can reach is two faults'.
pub fn bound_s(strikes: &[Strike]) -> u64 {
    let only_swept = able(strikes).iter().all(|l| *l == Layer::Sweeper);
    if strikes.len() > 1 && only_swept { SWEPT_S } else { SOON_S }
}
