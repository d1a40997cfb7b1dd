//! When a paid host is powered off: a function of what was read and of two clocks.
//!
//! ```text
//! deadline ─── wall clock ──────────────────────────────┐
//! lifetime ─── CLOCK_BOOTTIME, over all boots ──────────┼─▶ whichever is first
//! life lease ─ CLOCK_BOOTTIME ─ end, step, finish ──────┘
//!    never given: this bound is not there (a boot is bounded by the coordinator, and by the two above)
//!    of another boot, or lost: one life lease from when this watchdog began
//! ```
//! What was seen once holds: a file that is torn or gone later takes nothing back, a deadline only ever comes closer.

use drums_common::{
    clock::{Micros, MonoMicros},
    lease::longest_quiet_ms,
};

use super::{
    bounds::Bounds,
    lease::{Lease, step_ms},
};

/// Six minutes of boot have been seen; as long as a launch waits for its host to enrol.
const BOOT_MS: u64 = 15 * 60_000;
/// While it is not known until when the host may live, it is looked again this often.
const LOOK_MS: u64 = 10_000;

/// Why the host is powered off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The wall clock says so.
    Deadline,
    /// It has been up for as long as was registered with its launch.
    Lifetime,
    /// Nobody has renewed its life lease, and the time to finish is over.
    LifeLease,
    /// Neither deadline nor lifetime could be read since this watchdog began.
    Unbounded,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Deadline => "its deadline is reached",
            Self::Lifetime => "the lifetime registered with its launch is over",
            Self::LifeLease => "its life lease is over: no coordinator was heard for that long",
            Self::Unbounded => "nobody can read until when it may live",
        })
    }
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again at whichever instant comes first, and when a file changes.
    Wait {
        boottime: MonoMicros,
        realtime: Option<Micros>,
    },
    PowerOff(Why),
}

/// Why a lease that could be read is not gone by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("it is of another boot")]
    OtherBoot,
    #[error("it is of no time at all")]
    Zero,
    #[error("it ends in {left_ms} ms, and a life lease of {life_ms} ms never does")]
    TooLong { left_ms: u64, life_ms: u64 },
}

/// All that is known of this host.
#[derive(Clone, Debug)]
pub struct Watch {
    boot: String,
    began: MonoMicros,
    finish_ms: u64,
    lived_before_ms: u64,
    deadline: Option<Micros>,
    lifetime_ms: Option<u64>,
    /// When the life lease, the step of its renewals and the time to finish are over. `None`: none was ever given here.
    lease_over: Option<MonoMicros>,
}

impl Watch {
    /// `given_ms` is the life lease that this host's agent was given in whatever boot, if any: its coordinator may be gone
    /// since, so one more lease of that length begins now.
    pub fn begin(boot: String, now: MonoMicros, finish_ms: u64, lived_before_ms: u64, given_ms: Option<u64>) -> Self {
        let mut this =
            Self { boot, began: now, finish_ms, lived_before_ms, deadline: None, lifetime_ms: None, lease_over: None };
        if let Some(life_ms) = given_ms {
            this.was_given(life_ms);
        }
        this
    }

    /// Bounds that were read; only what is closer counts.
    pub fn saw_bounds(&mut self, bounds: Bounds) {
        self.saw_deadline(bounds.deadline);
        self.lifetime_ms = Some(self.lifetime_ms.map_or(bounds.lifetime_ms, |seen| seen.min(bounds.lifetime_ms)));
    }

    /// A lease that was read. An unusable one takes nothing back of what is known.
    pub fn saw_lease(&mut self, lease: &Lease, now: MonoMicros) -> Result<(), Unusable> {
        if let Some(deadline) = lease.deadline {
            self.saw_deadline(deadline);
        }
        if lease.life_ms == 0 {
            return Err(Unusable::Zero);
        }
        if lease.boot != self.boot {
            if self.lease_over.is_none() {
                self.was_given(lease.life_ms);
            }
            return Err(Unusable::OtherBoot);
        }
        let left_ms = lease.life_ends.ms_since(now);
        if left_ms > longest_quiet_ms(lease.life_ms) {
            return Err(Unusable::TooLong { left_ms, life_ms: lease.life_ms });
        }
        self.lease_over = Some(lease.life_ends.plus_ms(step_ms(lease.life_ms)).plus_ms(self.finish_ms));
        Ok(())
    }

    fn saw_deadline(&mut self, deadline: Micros) {
        self.deadline = Some(self.deadline.map_or(deadline, |seen| seen.min(deadline)));
    }

    /// A booting agent must be given the time to be heard again.
    fn was_given(&mut self, life_ms: u64) {
        self.lease_over = Some(self.began.plus_ms(life_ms.max(BOOT_MS)).plus_ms(self.finish_ms));
    }

    pub fn next(&self, now: MonoMicros, wall: Micros) -> Next {
        if self.deadline.is_some_and(|at| wall >= at) {
            return Next::PowerOff(Why::Deadline);
        }
        let known = self.deadline.is_some() && self.lifetime_ms.is_some();
        let (life_over, why) = match self.lifetime_ms {
            Some(ms) => (MonoMicros(0).plus_ms(ms.saturating_sub(self.lived_before_ms)), Why::Lifetime),
            None => (self.began.plus_ms(BOOT_MS), Why::Unbounded),
        };
        let (boottime, why) = match self.lease_over {
            Some(over) if over < life_over => (over, Why::LifeLease),
            _ => (life_over, why),
        };
        if now >= boottime {
            return Next::PowerOff(why);
        }
        let boottime = if known { boottime } else { boottime.min(now.plus_ms(LOOK_MS)) };
        Next::Wait { boottime, realtime: self.deadline }
    }
}

#[cfg(test)]
mod tests;
