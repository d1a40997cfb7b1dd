//! The reaper of one instance: asks for its end until it is seen to have ended.
//!
//! Level-triggered: what it does follows from what is shown now. It never gives up and never waits longer than
//! [`CEILING_MS`] between asks. Only an observed `terminated` closes it: that a terminate was called, that the instance is
//! stopped, and that it is shown no longer are all not the end.

use std::collections::BTreeSet;

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, HostId},
};
use serde::{Deserialize, Serialize};

use crate::{
    alarm::{Alarm, AlarmKind, backoff_ms},
    cloud::{Instance, InstanceState, ScheduleName},
    failure::{CloudError, Remedy},
    host::{KillId, OwnedInstance},
    launch::Why,
    receipt::Receipt,
    spend::{Meter, Rates, Until},
    sweep::Scope,
    token::ClientToken,
    words::{CampaignId, VolumeId},
};

/// Between the first asks.
pub const FLOOR_MS: u64 = 5_000;
/// Between asks at the longest: a minute.
pub const CEILING_MS: u64 = 60_000;
/// An instance that is still going after ten minutes hangs.
pub const HANG_MS: u64 = 10 * 60_000;
/// Shown no longer for an hour: EC2 has forgotten it, unseen.
pub const FORGOTTEN_MS: u64 = 3_600_000;
/// Volumes go within minutes of their instance.
pub const VOLUMES_MS: u64 = 10 * 60_000;

/// What the receipt needs beside the instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    pub host: HostId,
    pub campaign: CampaignId,
    pub experiment: Option<ExperimentId>,
    pub rates: Rates,
    /// When its launch was intended.
    pub from: Micros,
}

impl Account {
    pub(crate) fn meter(&self, until: Until) -> Meter {
        Meter {
            host: self.host.clone(),
            campaign: self.campaign.clone(),
            experiment: self.experiment,
            rates: self.rates.clone(),
            from: self.from,
            until,
        }
    }
}

/// A reap as it is stored, keyed by its instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reap {
    instance: OwnedInstance,
    account: Account,
    why: Why,
    asked: u32,
    not_before: Micros,
    /// A terminate was refused because of termination protection.
    protected: bool,
    /// First seen in a state from which it goes: charging has ended.
    going: Option<Micros>,
    /// Seen on its way, to the end or to a stop, since.
    leaving: Option<Micros>,
    terminated: Option<Micros>,
    /// First of the looks since which it is not shown.
    absent: Option<Micros>,
    /// Alarms that were raised; each is raised once.
    raised: BTreeSet<AlarmKind>,
    receipt: Option<Box<Receipt>>,
    /// The schedule that would have ended it is removed, or has fired.
    tidy: bool,
}

/// What is shown of it.
#[derive(Clone, Debug)]
pub struct View {
    /// `None`: not found.
    pub instance: Result<Option<Instance>, CloudError>,
    /// Volumes that still exist under its token; looked at once it is terminated.
    pub volumes: Result<Vec<VolumeId>, CloudError>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    Terminate(KillId),
    Unprotect(KillId),
    /// It has nothing left to end, and would only fill the dead-letter queue.
    DeleteSchedule(ScheduleName),
}

#[derive(Clone, Debug)]
pub struct Decision {
    /// To be stored before the act.
    pub reap: Reap,
    pub act: Option<Act>,
    pub alarms: Vec<Alarm>,
    /// When to look again at the latest; `None` once it is closed.
    pub again: Option<Micros>,
}

impl Reap {
    pub fn begin(instance: OwnedInstance, account: Account, why: Why, now: Micros) -> Self {
        Self {
            instance,
            account,
            why,
            asked: 0,
            not_before: now,
            protected: false,
            going: None,
            leaving: None,
            terminated: None,
            absent: None,
            raised: BTreeSet::new(),
            receipt: None,
            tidy: false,
        }
    }

    pub fn instance(&self) -> &OwnedInstance {
        &self.instance
    }
    /// Once it has one, nothing of the instance costs anything any more, but for volumes that the receipt names.
    pub fn receipt(&self) -> Option<&Receipt> {
        self.receipt.as_deref()
    }
    pub fn is_closed(&self) -> bool {
        self.receipt.is_some() && self.tidy
    }
    pub fn is_terminated(&self) -> bool {
        self.terminated.is_some()
    }
    /// What it costs: until it was first seen going, or until a person closed it.
    pub fn meter(&self) -> Meter {
        let ended = self.receipt().map(|r| r.charged_until).or(self.going);
        self.account.meter(ended.map_or(Until::Deadline(self.instance.deadline()), Until::Ended))
    }

    /// What comes next. `now` is AWS's time wherever it is to be had, since the receipt says when.
    pub fn decide(&self, view: &View, now: Micros) -> Decision {
        let mut d = Decision { reap: self.clone(), act: None, alarms: Vec::new(), again: None };
        if self.terminated.is_none() {
            match &view.instance {
                Ok(Some(seen)) => self.shown(&mut d, seen.state, now),
                Ok(None) => self.not_shown(&mut d, now),
                // What cannot be seen can still be asked to end.
                Err(e) => self.blind(&mut d, e, now),
            }
        }
        if d.reap.terminated.is_some() {
            Self::settle(&mut d, view, now);
        }
        if !d.reap.is_closed() {
            d.again = Some(d.reap.not_before.min(now.plus_ms(CEILING_MS)).max(now.plus_ms(FLOOR_MS)));
        }
        d
    }

    fn shown(&self, d: &mut Decision, state: InstanceState, now: Micros) {
        d.reap.absent = None;
        match state {
            InstanceState::Terminated => {
                d.reap.going = self.going.or(Some(now));
                d.reap.terminated = Some(now);
                return;
            }
            InstanceState::ShuttingDown => d.reap.going = self.going.or(Some(now)),
            // It was going, and is not: then it is charged.
            InstanceState::Pending | InstanceState::Running => d.reap.going = None,
            InstanceState::Stopping | InstanceState::Stopped => {
                let text = "is stopped or stopping, which is not gone: its volumes cost; it is asked to terminate";
                d.raise(AlarmKind::Stopped, text);
            }
        }
        let hangs = matches!(state, InstanceState::ShuttingDown | InstanceState::Stopping);
        d.reap.leaving = hangs.then(|| self.leaving.unwrap_or(now));
        if d.reap.leaving.is_some_and(|since| since.plus_ms(HANG_MS) <= now) {
            d.raise(AlarmKind::Hangs, "has been shutting down or stopping for ten minutes; it is asked on, for ever");
        }
        // One that shuts down is asked too, now and then: the ask is idempotent, and a state may be shown late.
        self.ask(d, now);
    }

    fn not_shown(&self, d: &mut Decision, now: Micros) {
        let since = *d.reap.absent.get_or_insert(now);
        if now >= since.plus_ms(FORGOTTEN_MS) {
            let text = "has not been shown for an hour, and nobody saw it terminated; look at its volumes and at \
                        CloudTrail, then close it by hand";
            d.raise(AlarmKind::NotObserved, text);
        }
        self.ask(d, now);
    }

    fn blind(&self, d: &mut Decision, e: &CloudError, now: Micros) {
        if e.kind.remedy() == Remedy::Person {
            d.raise(AlarmKind::Powerless, &format!("cannot be looked at: {e}"));
        }
        self.ask(d, now);
    }

    fn ask(&self, d: &mut Decision, now: Micros) {
        if now < self.not_before {
            return;
        }
        let kill = self.instance.kill_id();
        d.reap.asked = self.asked.saturating_add(1);
        d.reap.not_before = now.plus_ms(backoff_ms(self.asked, FLOOR_MS, CEILING_MS));
        d.act = Some(if self.protected { Act::Unprotect(kill) } else { Act::Terminate(kill) });
    }

    /// It is terminated: volumes, receipt, schedule.
    fn settle(d: &mut Decision, view: &View, now: Micros) {
        let Some(terminated) = d.reap.terminated else { return };
        if d.reap.receipt.is_none() {
            let late = now >= terminated.plus_ms(VOLUMES_MS);
            let left = match &view.volumes {
                Ok(left) if left.is_empty() || late => left.clone(),
                // They are still going, or cannot be seen: the receipt waits.
                Ok(_) => return,
                Err(e) => {
                    if late {
                        d.raise(
                            AlarmKind::VolumesLeft,
                            &format!("is terminated; its volumes cannot be looked at: {e}"),
                        );
                    }
                    return;
                }
            };
            if !left.is_empty() {
                let text = format!("is terminated and left volumes that go on costing: {left:?}; delete them by hand");
                d.raise(AlarmKind::VolumesLeft, &text);
            }
            let (reap, account) = (&d.reap, &d.reap.account);
            let charged_until = reap.going.unwrap_or(terminated);
            d.reap.receipt = Some(Box::new(Receipt {
                host: account.host.clone(),
                campaign: account.campaign.clone(),
                experiment: account.experiment,
                instance: reap.instance.clone(),
                why: reap.why.clone(),
                from: account.from,
                charged_until,
                terminated: Some(terminated),
                volumes_left: left,
                cost: account.rates.cost(charged_until.ms_since(account.from)),
            }));
        }
        match d.reap.instance.token() {
            Some(token) if !d.reap.tidy && now < d.reap.instance.deadline() => {
                d.act = Some(Act::DeleteSchedule(ScheduleName::of(&token)));
            }
            // It has fired, or there was none: what is left of it is evidence.
            _ => d.reap.tidy = true,
        }
    }

    /// What came of the act of the last decision; to be stored.
    pub fn heard(&self, act: &Act, reply: &Result<(), CloudError>, now: Micros) -> (Self, Vec<Alarm>) {
        let mut d = Decision { reap: self.clone(), act: None, alarms: Vec::new(), again: None };
        match (act, reply) {
            (Act::DeleteSchedule(_), Ok(())) => d.reap.tidy = true,
            // Then terminate, at once.
            (Act::Unprotect(_), Ok(())) => {
                d.reap.protected = false;
                d.reap.not_before = now;
            }
            (Act::Terminate(_), Err(e)) if e.kind.remedy() == Remedy::Unprotect => {
                d.reap.protected = true;
                d.reap.not_before = now;
                d.raise(AlarmKind::Protected, "was protected against termination by someone; it is switched off");
            }
            (_, Err(e)) => {
                if let Act::Unprotect(_) = act {
                    // Perhaps it is off already; the terminate tells.
                    d.reap.protected = false;
                }
                if e.kind.remedy() == Remedy::Person {
                    d.raise(AlarmKind::Powerless, &format!("cannot be ended from here: {e}"));
                }
            }
            _ => {}
        }
        (d.reap, d.alarms)
    }

    /// Closed by a person who made sure of it: the one way without an observation, and it says so. The cost counts to
    /// when it was first not shown.
    pub fn close_by_hand(&self, by: &str, now: Micros) -> Self {
        let mut reap = self.clone();
        let until = self.going.or(self.absent).unwrap_or(now);
        if reap.receipt.is_none() {
            reap.receipt = Some(Box::new(Receipt {
                host: self.account.host.clone(),
                campaign: self.account.campaign.clone(),
                experiment: self.account.experiment,
                instance: self.instance.clone(),
                why: Why::Unwanted(format!("not seen to end; closed by {by}")),
                from: self.account.from,
                charged_until: until,
                terminated: None,
                volumes_left: Vec::new(),
                cost: self.account.rates.cost(until.ms_since(self.account.from)),
            }));
        }
        reap.tidy = true;
        reap
    }
}

impl Decision {
    fn raise(&mut self, kind: AlarmKind, text: &str) {
        if self.reap.raised.insert(kind) {
            self.alarms.push(Alarm::new(kind, format!("{} {text}", self.reap.instance)));
        }
    }
}

/// Instances of this installation, alive, that no launch and no reap knows: a call that was answered after nobody waited
/// for it any more, or a store that was lost. They are the reaper's. Canaries, which nobody launched, are none.
///
/// `shown` is [`Cloud::owned`](crate::cloud::Cloud::owned). `tokens` are the current tokens of all launches that are not
/// closed, known instance or not; both sets are read from the store *after* the listing, so that whatever was intended before
/// it is in there.
pub fn strays(
    scope: &Scope,
    shown: &[Instance],
    tokens: &BTreeSet<ClientToken>,
    reaps: &BTreeSet<OwnedInstance>,
) -> Vec<(OwnedInstance, Alarm)> {
    let known = |o: &OwnedInstance| o.token().is_some_and(|t| tokens.contains(&t)) || reaps.contains(o);
    let alive = shown.iter().filter(|i| !i.state.is_going());
    let strays = alive.filter_map(|i| scope.ours(i).filter(|o| !scope.is_canary(i, o) && !known(o)));
    strays
        .map(|o| {
            let text = format!("{o} is ours and no launch knows of it; it is ended");
            (o, Alarm::new(AlarmKind::Stray, text))
        })
        .collect()
}
