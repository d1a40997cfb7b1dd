//! What a person must know of: a fault that the decisions work round, or that only a person can mend.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmKind {
    /// The sweeper did not find a canary: whatever it found, it may not have found everything.
    CanaryMissing,
    /// A region could not be listed, or is in scope and was not.
    RegionUnseen,
    /// A canary that nobody named to the sweeper.
    CanaryUnknown,
    /// AWS's clock and ours differ by minutes, or AWS's was not to be had.
    Clock,
    /// A deadline's or installation's tag was edited.
    TagEdited,
    /// A token says another installation than a tag.
    Conflict,
    /// An instance is stopped or stopping: not gone, and its volumes cost.
    Stopped,
    /// An instance does not leave `shutting-down` or `stopping`.
    Hangs,
    /// Someone switched termination or stop protection on, or made its shutdown a stop.
    Protected,
    /// What must happen is not permitted, or the credentials hold no longer.
    Powerless,
    /// A kill layer that was armed is gone.
    LayerGone,
    /// Volumes outlived their instance.
    VolumesLeft,
    /// An instance is shown no longer, and nobody saw it terminated.
    NotObserved,
    /// An instance of ours that no launch knows.
    Stray,
    /// More than one instance under one token.
    Twice,
}

impl AlarmKind {
    /// Whether a sweep that raised it has failed: it cannot say that it saw everything.
    pub fn fails_a_sweep(self) -> bool {
        matches!(self, Self::CanaryMissing | Self::RegionUnseen)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Alarm {
    pub kind: AlarmKind,
    /// What was found, about which thing, and what to do.
    pub message: String,
}

impl Alarm {
    pub fn new(kind: AlarmKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// `floor_ms` doubled with each try, and never more than `ceiling_ms`: waits grow, and never become giving up.
pub(crate) fn backoff_ms(tries: u32, floor_ms: u64, ceiling_ms: u64) -> u64 {
    floor_ms.saturating_mul(1 << tries.min(32)).min(ceiling_ms)
}
