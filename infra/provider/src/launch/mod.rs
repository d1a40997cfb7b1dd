//! The launch of one host, safe to be killed between any two lines.
//!
//! ```text
//! Intended ── RunInstances ──▶ Launched ── schedule and read-back ──▶ Armed ── enrolled ──▶ Enrolled ── guest ──▶ Ready
//!    │  ▲                          │                                    │                      │                   │
//!    │  └─ next ── Leaving ◀───────┴────────── given up: the reaper's ──┴──────────────────────┴───────────────────┤
//!    │    attempt  until it is seen going                                                                          │
//!    ▼                                                                                                             ▼
//! Resolving: is there something under this token? ──▶ Launched, the next attempt, or ───────────────────────▶ Closed
//! ```
//! Its caller does this, for ever and from wherever it was killed:
//! 1. look at what [`Launch::look`] names; 2. [`Launch::decide`]; 3. store the launch and its reaps in one transaction;
//! 4. do the act; 5. [`Launch::heard`]; 6. store that.
//!
//! Invariant: the token of a call is stored before the call, so that whatever the call made can be found by it.
//! Invariant: there is no next token before it is known that the one before made nothing, or what it made is the reaper's
//! and was *seen* going. So a host is one instance, also where no terminate is permitted.
//! Invariant: before the first call under each token, deadline and caps are judged as they are then.
//! An answer that was lost is found out by the same call again, which EC2 answers with the same instance.
//! Invariant: an empty answer to a look is no evidence of absence, until it was the answer for [`Patience::settle_ms`].

mod readback;
mod steps;

use drums_common::clock::Micros;
use serde::{Deserialize, Serialize};

pub use readback::{ReadBack, read_back};

use crate::{
    alarm::Alarm,
    cloud::{Instance, KillSchedule, LaunchOrder, Placement, Recipe, ScheduleSetup},
    failure::CloudError,
    gates::Clearance,
    host::{OwnedHost, OwnedInstance},
    token::ClientToken,
    words::{InstanceId, Region},
};

/// How long a launch waits for what. All of them end in the host's end, and the deadline ends everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Patience {
    /// Until the one-time schedule is made and read back. Two minutes: until then a host has only its own timer and the
    /// sweeper.
    pub arm_ms: u64,
    /// Until the instance is shown with all that is read back. Five minutes: EC2 shows new instances late.
    pub appear_ms: u64,
    /// From `running` to enrolled, as far as anybody listened. Fifteen minutes: a slow boot is not a bad host; six minutes have been seen.
    pub boot_ms: u64,
    /// From enrolled to a booted probe guest. Five minutes.
    pub probe_ms: u64,
    /// How long nothing must be shown under a token before there is nothing. Five minutes, as `appear_ms`.
    pub settle_ms: u64,
    /// Between tries of the same call: doubled from this to thirty-two times this. Two seconds.
    pub retry_ms: u64,
    /// Attempts in all; an attempt is one token. Twelve: four subnets, three times round.
    pub attempts: u16,
    /// With less than this to the deadline nothing is launched. Ten minutes: a boot and something to do.
    pub least_life_ms: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            arm_ms: 2 * 60_000,
            appear_ms: 5 * 60_000,
            boot_ms: 15 * 60_000,
            probe_ms: 5 * 60_000,
            settle_ms: 5 * 60_000,
            retry_ms: 2_000,
            attempts: 12,
            least_life_ms: 10 * 60_000,
        }
    }
}

/// Whether a call under the current token may have made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doubt {
    /// No call was made, or each was refused for certain.
    None,
    /// The first call that could is under way, or was when we were killed.
    ThisCall,
    /// One before the newest may have.
    Earlier,
}

/// Why a launch closed or an instance was given up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    Deadline,
    /// Someone, or the budget, wants it gone; in words.
    Unwanted(String),
    /// Nobody had room, wherever it was tried.
    NoCapacity(CloudError),
    /// AWS refused, and only a person can change that.
    Refused(CloudError),
    /// Too little time to the deadline for another attempt.
    TooLate,
    /// The caps allow no instance, or no other one; in words.
    Unaffordable(String),
    TooManyAttempts,
    /// What was launched is not what was ordered.
    ReadBack(String),
    NeverShown,
    /// The one-time schedule could not be made or read back.
    NotArmed(String),
    /// Not enrolled within the boot bound.
    NotEnrolled,
    /// The probe guest did not boot.
    NoGuest(String),
    /// It ended or stopped without us.
    Gone,
}

/// What follows once it is known what a token made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Then {
    NextAttempt(CloudError),
    Close(Why),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The token is stored; it may be called with.
    Intended {
        doubt: Doubt,
        not_before: Micros,
        tries: u32,
    },
    /// Nothing is called under this token any more; what it made is looked for.
    Resolving {
        since: Micros,
        then: Then,
    },
    /// It exists. Its schedule and what it is are still to be read back.
    Launched {
        instance: OwnedInstance,
        since: Micros,
    },
    /// Its schedule is read back, and it is what was ordered.
    Armed {
        instance: OwnedInstance,
        since: Micros,
        running: Option<Micros>,
    },
    Enrolled {
        instance: OwnedInstance,
        since: Micros,
    },
    Ready {
        instance: OwnedInstance,
    },
    /// It was given up and is the reaper's; there is to be another one, once this one is seen going.
    Leaving {
        instance: OwnedInstance,
        why: Why,
    },
    /// Nothing of it exists that the reaper does not have.
    Closed {
        why: Why,
    },
}

/// A launch as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    host: OwnedHost,
    recipe: Recipe,
    setup: ScheduleSetup,
    /// Index of the current attempt's placement.
    place: usize,
    state: State,
}

/// What a launch was not begun for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBegun {
    #[error("host {0} was not cleared by the launch gates of its campaign; nothing is launched without them")]
    NotCleared(drums_common::ids::HostId),
    #[error("host {0} has no subnet to be put in; name at least one")]
    Nowhere(drums_common::ids::HostId),
}

/// What to look at before the next decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// [`Cloud::by_token`](crate::cloud::Cloud::by_token).
    Token(Region, ClientToken),
    /// [`Cloud::inspect`](crate::cloud::Cloud::inspect), where not found is an empty answer, and the schedule.
    Instance(Region, InstanceId),
    Nothing,
}

/// What a guest inside the host has shown of nested virtualisation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Guest {
    #[default]
    NotYet,
    Booted,
    Failed(String),
}

/// What is there, as far as it was looked at.
#[derive(Clone, Debug)]
pub struct View {
    pub instances: Result<Vec<Instance>, CloudError>,
    pub schedule: Result<Option<KillSchedule>, CloudError>,
    pub enrolled: bool,
    pub guest: Guest,
    /// Since when whoever decides has listened without a gap: a host that could not be heard is not late.
    pub attentive_since: Micros,
    /// In words, if the host is not wanted any more: cancelled, or over budget.
    pub unwanted: Option<String>,
    /// In words, if the caps do not allow to launch it now. What was launched is not ended for it.
    pub unaffordable: Option<String>,
}

/// What to do after the launch is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    Run(Box<LaunchOrder>),
    PutSchedule(Box<KillSchedule>),
}

/// What came of an act.
#[derive(Clone, Debug)]
pub enum Reply {
    Ran(Result<Box<Instance>, CloudError>),
    Scheduled(Result<(), CloudError>),
}

#[derive(Clone, Debug)]
pub struct Decision {
    /// To be stored, together with `reap`, before the act.
    pub launch: Launch,
    /// Instances that are the reaper's from now on, and why.
    pub reap: Vec<(OwnedInstance, Why)>,
    pub act: Option<Act>,
    pub alarms: Vec<Alarm>,
}

impl Launch {
    /// The intent: to be stored before anything is called.
    pub fn begin(host: OwnedHost, recipe: Recipe, setup: ScheduleSetup, cleared: &Clearance) -> Result<Self, NotBegun> {
        if !cleared.clears(&host) {
            return Err(NotBegun::NotCleared(host.host().clone()));
        }
        if recipe.placements.is_empty() {
            return Err(NotBegun::Nowhere(host.host().clone()));
        }
        let state = State::Intended { doubt: Doubt::None, not_before: Micros(0), tries: 0 };
        Ok(Self { host, recipe, setup, place: 0, state })
    }

    /// The current attempt.
    pub fn host(&self) -> &OwnedHost {
        &self.host
    }
    pub fn state(&self) -> &State {
        &self.state
    }
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }
    /// Whether the host of the current attempt may enrol: only once it is armed and read back, so that whoever works on it
    /// is never ended because it is not.
    pub fn may_enrol(&self) -> bool {
        matches!(self.state, State::Armed { .. } | State::Enrolled { .. } | State::Ready { .. })
    }
    /// The instance of the current attempt, from when it is known until it is the reaper's.
    pub fn instance(&self) -> Option<&OwnedInstance> {
        match &self.state {
            State::Launched { instance, .. }
            | State::Armed { instance, .. }
            | State::Enrolled { instance, .. }
            | State::Ready { instance } => Some(instance),
            State::Intended { .. } | State::Resolving { .. } | State::Leaving { .. } | State::Closed { .. } => None,
        }
    }

    pub fn look(&self) -> Look {
        match (&self.state, self.instance()) {
            (State::Closed { .. }, _) => Look::Nothing,
            (_, Some(instance)) => Look::Instance(instance.region().clone(), instance.id().clone()),
            (_, None) => Look::Token(self.recipe.region.clone(), self.host.token()),
        }
    }

    pub fn order(&self) -> LaunchOrder {
        let placement: &Placement = &self.recipe.placements[self.place % self.recipe.placements.len()];
        LaunchOrder { host: self.host.clone(), recipe: self.recipe.clone(), placement: placement.clone() }
    }

    /// The schedule that is to end `instance` at `at`.
    pub fn schedule(&self, instance: &OwnedInstance, at: Micros) -> KillSchedule {
        KillSchedule {
            name: crate::cloud::ScheduleName::of(&self.host.token()),
            region: instance.region().clone(),
            setup: self.setup.clone(),
            instance: instance.id().clone(),
            at: Micros(at.0.div_euclid(1_000_000) * 1_000_000),
            enabled: true,
        }
    }
}
