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
//! Invariant: the user data of a call are made for its attempt, stored before it, and the same in each repeat.
//! Invariant: the deadline that counts is the earliest that was ever seen, and no schedule is moved later.
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
    cloud::{Attributes, Instance, KillSchedule, LaunchOrder, Placement, Recipe, ScheduleSetup, UserData},
    failure::CloudError,
    host::{KillId, OwnedHost, OwnedInstance},
    reap::Account,
    spend::{Meter, Rates, Until},
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
    /// How long user data may be called with. Ten minutes; their URL and token must hold this much longer than a boot, and a
    /// host whose clock is wrong may live this much longer.
    pub fresh_ms: u64,
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
            fresh_ms: 10 * 60_000,
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

/// User data, and when they were made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Prepared {
    user_data: UserData,
    at: Micros,
}

/// A launch as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    host: OwnedHost,
    recipe: Recipe,
    setup: ScheduleSetup,
    rates: Rates,
    /// When the current attempt was intended.
    from: Micros,
    /// The earliest deadline that was ever seen.
    due: Micros,
    /// Index of the current attempt's placement.
    place: usize,
    /// Of the current attempt, while something may be called with them.
    prepared: Option<Prepared>,
    /// Schedule and attributes both want something done: then they take turns, since either may fail for ever.
    mend_next: bool,
    state: State,
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
    /// Make the user data of this attempt, which is to be dead by `due`: with an enrolment token and a URL of its own, and the
    /// lifetime from now on. Nothing is called with them before they are stored, so they can be made again.
    Prepare { host: OwnedHost, due: Micros },
    /// [`Cloud::run`](crate::cloud::Cloud::run).
    Run(Box<LaunchOrder>, UserData),
    /// [`Cloud::put_schedule`](crate::cloud::Cloud::put_schedule).
    PutSchedule(Box<KillSchedule>),
    /// [`Cloud::mend`](crate::cloud::Cloud::mend): what is shown is not [`Attributes::MORTAL`].
    Mend(KillId, Attributes),
}

/// What came of an act.
#[derive(Clone, Debug)]
pub enum Reply {
    /// The user data; or why there are none, in words.
    Prepared(Result<UserData, String>),
    Ran(Result<Box<Instance>, CloudError>),
    Scheduled(Result<(), CloudError>),
    Mended(Result<(), CloudError>),
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
    /// The intent: to be stored before anything is called. Only a clearance that was judged again makes one.
    pub(crate) fn begin(host: OwnedHost, recipe: Recipe, setup: ScheduleSetup, rates: Rates, now: Micros) -> Self {
        let due = host.deadline();
        let state = State::Intended { doubt: Doubt::None, not_before: Micros(0), tries: 0 };
        Self { host, recipe, setup, rates, from: now, due, place: 0, prepared: None, mend_next: false, state }
    }

    /// What it costs from now on: `None` once that is the reaper's meter, or nothing.
    pub fn meter(&self) -> Option<Meter> {
        let runs = !matches!(self.state, State::Leaving { .. } | State::Closed { .. });
        runs.then(|| self.account().meter(Until::Deadline(self.due)))
    }

    /// For the reaps that its decisions hand over.
    pub fn account(&self) -> Account {
        let campaign = self.host.campaign();
        Account {
            host: self.host.host().clone(),
            campaign: campaign.id().clone(),
            experiment: campaign.experiment(),
            rates: self.rates.clone(),
            from: self.from,
        }
    }

    /// The current attempt.
    pub fn host(&self) -> &OwnedHost {
        &self.host
    }
    pub fn state(&self) -> &State {
        &self.state
    }
    /// The deadline that counts: the registered one, or the earliest that a tag or a schedule said since.
    pub fn due(&self) -> Micros {
        self.due
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
        LaunchOrder {
            host: self.host.clone(),
            recipe: self.recipe.clone(),
            placement: placement.clone(),
            due: self.due,
        }
    }

    /// The schedule that is to end `instance`.
    pub fn schedule(&self, instance: &OwnedInstance) -> KillSchedule {
        KillSchedule {
            name: crate::cloud::ScheduleName::of(&self.host.token()),
            region: instance.region().clone(),
            setup: self.setup.clone(),
            instance: instance.id().clone(),
            at: Micros(self.due.0.div_euclid(1_000_000) * 1_000_000),
            enabled: true,
        }
    }
}
