//! The tag sweep: what of everything that the cloud shows is ours and overdue.
//!
//! It needs no database: the client token or, without one, the tags say whose an instance is and until when it may live.
//! A sweep that found nothing could be a blind one, so each must find and spare its canaries; one that did not, or that
//! missed a region, has failed, and still ends what it did find.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{clock::Micros, ids::InstallationId};
use serde::{Deserialize, Serialize};

use crate::{
    alarm::{Alarm, AlarmKind},
    cloud::{Canary, Cloud, Instance, InstanceState},
    deadline::{TagSays, effective_deadline},
    failure::{CloudError, Remedy},
    host::{Belongs, KillId, OwnedInstance},
    reap::HANG_MS,
    tags,
    words::{InstanceId, Region, instant_text},
};

/// AWS's clock and ours may differ by this much before someone is told. What counts is AWS's, if it is to be had.
const SKEW_MS: u64 = 2 * 60_000;

/// Which regions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regions {
    /// Every region that is enabled for the account.
    All,
    Only(BTreeSet<Region>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Says what it would end.
    Shadow,
    Armed,
}

/// What a sweep is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    installation: InstallationId,
    regions: Regions,
    canaries: BTreeSet<Canary>,
    mode: Mode,
    longest_life_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadScope {
    #[error("no canary is named: a sweep that found nothing could not be told from one that sees nothing; name one")]
    NoCanary,
    #[error("no region is named; name at least one, or all")]
    NoRegion,
    #[error("canary {} is in {}, which is not swept; add the region, or take another canary", .0.instance, .0.region)]
    CanaryOutside(Canary),
    #[error("the longest life of a host is 0, which no host can have; give the deadline's maximum")]
    NoLife,
}

impl Scope {
    /// `longest_life_ms`: the maximum of a deadline, which bounds instances that bear our tags and no token of ours.
    pub fn new(
        installation: InstallationId,
        regions: Regions,
        canaries: BTreeSet<Canary>,
        mode: Mode,
        longest_life_ms: u64,
    ) -> Result<Self, BadScope> {
        if canaries.is_empty() {
            return Err(BadScope::NoCanary);
        }
        if let Regions::Only(only) = &regions {
            if only.is_empty() {
                return Err(BadScope::NoRegion);
            }
            if let Some(outside) = canaries.iter().find(|c| !only.contains(&c.region)) {
                return Err(BadScope::CanaryOutside(outside.clone()));
            }
        }
        if longest_life_ms == 0 {
            return Err(BadScope::NoLife);
        }
        Ok(Self { installation, regions, canaries, mode, longest_life_ms })
    }

    /// The instance as ours, if it is.
    pub fn ours(&self, seen: &Instance) -> Option<OwnedInstance> {
        match OwnedInstance::read(self.installation, seen, self.longest_life_ms) {
            Belongs::Ours(ours) => Some(ours),
            Belongs::Theirs | Belongs::Foreign => None,
        }
    }

    /// Whether it is spared as a canary: one that was named, or one that nobody named while it is stopped and costs nothing
    /// but its volume. A host cannot be made one by a tag: it has a token.
    pub fn is_canary(&self, seen: &Instance, ours: &OwnedInstance) -> bool {
        let bears_it = ours.token().is_none() && seen.tags.get(tags::ROLE).is_some_and(|r| r == tags::CANARY);
        bears_it && (self.names(seen) || seen.state == InstanceState::Stopped)
    }

    fn names(&self, seen: &Instance) -> bool {
        self.canaries.contains(&Canary { region: seen.region.clone(), instance: seen.id.clone() })
    }
}

/// What was looked at.
#[derive(Clone, Debug)]
pub struct View {
    /// Regions that are enabled for the account.
    pub enabled: Result<Vec<Region>, CloudError>,
    /// What each region that was asked showed.
    pub regions: BTreeMap<Region, Result<Vec<Instance>, CloudError>>,
    /// AWS's clock.
    pub aws: Result<Micros, CloudError>,
    /// This machine's clock, of use only without AWS's.
    pub local: Micros,
}

/// An instance that is to be ended now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doomed {
    pub instance: OwnedInstance,
    pub state: InstanceState,
    /// The deadline that counts.
    pub due: Micros,
    pub tag: TagSays,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spare {
    Canary,
    /// Ours, within its deadline.
    NotDue,
    /// Ours, and shutting down.
    Going,
    Gone,
    /// Another installation's.
    Theirs,
    /// Looks like a canary and is not one that was named.
    UnknownCanary,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spared {
    pub region: Region,
    pub instance: InstanceId,
    pub why: Spare,
    /// The deadline that counts, of a host of ours.
    pub due: Option<Micros>,
}

/// What a sweep decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    mode: Mode,
    /// By what time it was judged.
    pub now: Micros,
    pub doomed: Vec<Doomed>,
    pub spared: Vec<Spared>,
    pub alarms: Vec<Alarm>,
    /// Canaries that were found.
    pub canaries: BTreeSet<Canary>,
}

impl Sweep {
    pub fn mode(&self) -> Mode {
        self.mode
    }
    /// Those to end, each by a call of its own: none in shadow mode.
    pub fn orders(&self) -> Vec<KillId> {
        match self.mode {
            Mode::Shadow => Vec::new(),
            Mode::Armed => self.doomed.iter().map(|d| d.instance.kill_id()).collect(),
        }
    }
    /// Whether it saw everything that it was to see. One that did not is no evidence that nothing is left.
    pub fn is_complete(&self) -> bool {
        !self.alarms.iter().any(|a| a.kind.fails_a_sweep())
    }
}

/// The regions to ask.
pub fn regions(scope: &Scope, enabled: &Result<Vec<Region>, CloudError>) -> BTreeSet<Region> {
    match (&scope.regions, enabled) {
        (Regions::Only(only), _) => only.clone(),
        (Regions::All, Ok(enabled)) => enabled.iter().cloned().collect(),
        // At least those that are known.
        (Regions::All, Err(_)) => scope.canaries.iter().map(|c| c.region.clone()).collect(),
    }
}

pub fn decide(scope: &Scope, view: &View) -> Sweep {
    let now = *view.aws.as_ref().unwrap_or(&view.local);
    let mut sweep = Sweep {
        mode: scope.mode,
        now,
        doomed: Vec::new(),
        spared: Vec::new(),
        alarms: Vec::new(),
        canaries: BTreeSet::new(),
    };
    sweep.clocks(view);
    if let (Regions::All, Err(e)) = (&scope.regions, &view.enabled) {
        sweep.alarm(AlarmKind::RegionUnseen, format!("which regions there are is not known: {e}"));
    }
    for region in regions(scope, &view.enabled) {
        match view.regions.get(&region) {
            Some(Ok(_)) => {}
            Some(Err(e)) => sweep.alarm(AlarmKind::RegionUnseen, format!("{region} was not seen: {e}")),
            None => sweep.alarm(AlarmKind::RegionUnseen, format!("{region} is in scope and was not looked at")),
        }
    }
    // What was seen is judged, whether or not it was asked for.
    for instance in view.regions.values().flatten().flatten() {
        sweep.judge(scope, instance);
    }
    for canary in scope.canaries.difference(&sweep.canaries.clone()) {
        sweep.alarm(
            AlarmKind::CanaryMissing,
            format!(
                "canary {} in {} was not found: the sweep may be blind to others as well; \
                 look at filters, permissions and regions, or make a new canary",
                canary.instance, canary.region
            ),
        );
    }
    sweep
}

impl Sweep {
    fn alarm(&mut self, kind: AlarmKind, message: String) {
        self.alarms.push(Alarm::new(kind, message));
    }

    fn clocks(&mut self, view: &View) {
        match &view.aws {
            Ok(aws) => {
                let apart_ms = aws.ms_since(view.local).max(view.local.ms_since(*aws));
                if apart_ms > SKEW_MS {
                    let text =
                        format!("this machine's clock is {} s off AWS's, which counts; set it", apart_ms / 1_000);
                    self.alarm(AlarmKind::Clock, text);
                }
            }
            Err(e) => self.alarm(AlarmKind::Clock, format!("AWS's clock is not known, this machine's counts: {e}")),
        }
    }

    fn spare(&mut self, seen: &Instance, why: Spare, due: Option<Micros>) {
        self.spared.push(Spared { region: seen.region.clone(), instance: seen.id.clone(), why, due });
    }

    fn judge(&mut self, scope: &Scope, seen: &Instance) {
        let ours = match OwnedInstance::read(scope.installation, seen, scope.longest_life_ms) {
            Belongs::Foreign => return,
            Belongs::Theirs => {
                if seen.tags.get(tags::INSTALLATION) == Some(&scope.installation.to_string()) {
                    let text = format!("{} bears our tag and another installation's token; it is spared", seen.id);
                    self.alarm(AlarmKind::Conflict, text);
                }
                return self.spare(seen, Spare::Theirs, None);
            }
            Belongs::Ours(ours) => ours,
        };
        if seen.state != InstanceState::Terminated && scope.is_canary(seen, &ours) {
            if scope.names(seen) {
                self.canaries.insert(Canary { region: seen.region.clone(), instance: seen.id.clone() });
                return self.spare(seen, Spare::Canary, None);
            }
            let text = format!("{} in {} looks like a canary; name it to the sweep, or end it", seen.id, seen.region);
            self.alarm(AlarmKind::CanaryUnknown, text);
            return self.spare(seen, Spare::UnknownCanary, None);
        }
        self.judge_ours(scope, seen, ours);
    }

    fn judge_ours(&mut self, scope: &Scope, seen: &Instance, ours: OwnedInstance) {
        let tag = seen.tags.get(tags::DEADLINE).map(String::as_str);
        let (due, says) = effective_deadline(ours.deadline(), tag);
        let gone = seen.state == InstanceState::Terminated;
        let edited = seen.tags.get(tags::INSTALLATION) != Some(&scope.installation.to_string())
            || !matches!(says, TagSays::Same | TagSays::Earlier);
        if edited && !gone && ours.token().is_some() {
            let text = format!("tags of {ours} were edited; what counts is its token: due {}", instant_text(due));
            self.alarm(AlarmKind::TagEdited, text);
        }
        match seen.state {
            InstanceState::Terminated => self.spare(seen, Spare::Gone, Some(due)),
            InstanceState::ShuttingDown => {
                if due.plus_ms(HANG_MS) <= self.now {
                    let text = format!("{ours} still shuts down, long after its deadline; tell AWS if it stays so");
                    self.alarm(AlarmKind::Hangs, text);
                }
                self.spare(seen, Spare::Going, Some(due));
            }
            state => {
                if matches!(state, InstanceState::Stopped | InstanceState::Stopping) {
                    let text = format!("{ours} is stopped or stopping, which is not gone: its volumes cost");
                    self.alarm(AlarmKind::Stopped, text);
                }
                if due <= self.now {
                    self.doomed.push(Doomed { instance: ours, state, due, tag: says });
                } else {
                    self.spare(seen, Spare::NotDue, Some(due));
                }
            }
        }
    }
}

/// Everything that a sweep needs to see.
pub async fn look(cloud: &dyn Cloud, scope: &Scope, local: Micros) -> View {
    let enabled = cloud.regions().await;
    let mut seen = BTreeMap::new();
    for region in regions(scope, &enabled) {
        let instances = cloud.owned(&region, scope.installation).await;
        seen.insert(region, instances);
    }
    let aws = cloud.account().await.map(|a| a.clock);
    View { enabled, regions: seen, aws, local }
}

/// Ends what is to be ended, one call for each, whatever became of the others. What failed stays overdue, and is the next
/// sweep's. Launches wait for a note on their canary: only a sweep writes it that may end hosts, saw everything and ended
/// all that it should.
pub async fn carry_out(cloud: &dyn Cloud, sweep: &Sweep) -> Vec<(KillId, Result<InstanceState, CloudError>)> {
    let mut done = Vec::new();
    for kill in sweep.orders() {
        let mut reply = cloud.terminate(&kill).await;
        if let Err(e) = &reply
            && e.kind.remedy() == Remedy::Unprotect
        {
            // Whether it is off now, the terminate tells.
            let _ = cloud.unprotect(&kill).await;
            reply = cloud.terminate(&kill).await;
        }
        done.push((kill, reply));
    }
    let works = sweep.mode == Mode::Armed && sweep.is_complete() && done.iter().all(|(_, reply)| reply.is_ok());
    for canary in sweep.canaries.iter().filter(|_| works) {
        // The launch gate looks at it, so a note that fails refuses launches and needs no second alarm.
        let _ = cloud.note_sweep(canary, sweep.now).await;
    }
    done
}
