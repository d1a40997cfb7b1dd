//! The simulated AWS of one account: instances, one-time schedules, and whose calls are refused, on a clock that the
//! world moves. It does what `infra/emulator` does, as far as a host's life and death need it; `client` is the port to it.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{
        AttachedVolume, Attributes, Canary, Instance, InstanceState, KillSchedule, LaunchOrder, Placement,
        ScheduleSetup, UserData,
    },
    failure::{CloudError, FailureKind},
    host::KillId,
    tags,
    words::{InstanceId, Region},
};

use super::cell::Layer;

pub const OURS: InstallationId = InstallationId([0x0a, 0x1b, 0x2c, 0x3d]);
/// From `pending` to `running`.
const PENDING_S: u64 = 15;
/// From `shutting-down` to `terminated`.
const SHUTTING_DOWN_S: u64 = 30;

pub fn region() -> Region {
    "eu-central-1".parse().expect("it is a region's name")
}
/// Enabled as well, and nothing is launched there.
pub fn other_region() -> Region {
    "us-east-1".parse().expect("it is a region's name")
}

pub fn canary(region: Region) -> Canary {
    let id = if region == other_region() { "i-0000000000000000d" } else { "i-0000000000000000c" };
    Canary { region, instance: id.parse().expect("it is an instance's id") }
}

pub fn setup() -> ScheduleSetup {
    let arn = |service: &str, rest: &str| format!("arn:aws:{service}::123456789012:{rest}");
    ScheduleSetup {
        group: format!("drums-{OURS}"),
        role_arn: arn("iam", &format!("role/drums-schedule-{OURS}")),
        dead_letter_arn: arn("sqs", &format!("drums-dead-letters-{OURS}")),
    }
}

pub fn placements() -> Vec<Placement> {
    let place = |zone: char| Placement {
        subnet: format!("subnet-0000000{zone}").parse().expect("it is a subnet's id"),
        zone: format!("{}{zone}", region()).parse().expect("it is a zone's name"),
    };
    vec![place('a'), place('b')]
}

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Coordinator,
    Sweeper,
    /// What schedules call as.
    ScheduleRole,
}

/// How slow AWS is in one simulation, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Slowness {
    /// From made to shown.
    pub shown_s: u64,
    /// From a schedule's instant to its call: Scheduler is right to the minute.
    pub fires_s: u64,
}

struct Machine {
    seen: Instance,
    user_data: UserData,
    made: Micros,
    ended: Option<(Micros, Layer)>,
}

struct Scheduled {
    schedule: KillSchedule,
    fired: bool,
}

pub struct Aws {
    pub now: Micros,
    slowness: Slowness,
    machines: Vec<Machine>,
    canaries: Vec<Instance>,
    schedules: BTreeMap<String, Scheduled>,
    /// Whose calls are refused.
    pub refused: BTreeSet<Who>,
    /// Somebody's clean-up is at work.
    pub schedules_deleted: bool,
    /// Scheduler itself calls.
    pub scheduler: bool,
    /// Seconds that it takes a schedule's instant for later than it is; as deployed 0.
    pub scheduler_late_s: u64,
    /// Targets of schedules that could not be called.
    pub dead_letters: Vec<InstanceId>,
}

impl Aws {
    pub fn new(now: Micros, slowness: Slowness) -> Self {
        let canaries = [region(), other_region()].map(canary_instance).to_vec();
        Self {
            now,
            slowness,
            machines: Vec::new(),
            canaries,
            schedules: BTreeMap::new(),
            refused: BTreeSet::new(),
            schedules_deleted: false,
            scheduler: true,
            scheduler_late_s: 0,
            dead_letters: Vec::new(),
        }
    }

    /// A second passes: what happens by itself does.
    pub fn pass(&mut self, now: Micros) {
        self.now = now;
        for m in &mut self.machines {
            let gone = m.ended.is_some_and(|(at, _)| at.plus_ms(SHUTTING_DOWN_S * 1_000) <= now);
            match m.seen.state {
                InstanceState::Pending if m.made.plus_ms(PENDING_S * 1_000) <= now => {
                    m.seen.state = InstanceState::Running;
                }
                InstanceState::ShuttingDown if gone => m.seen.state = InstanceState::Terminated,
                _ => {}
            }
        }
        if self.schedules_deleted {
            self.schedules.clear();
        }
        if self.scheduler {
            self.fire();
        }
    }

    /// As its role, once: a call that is refused is not made again, and becomes a letter. What has fired stays to be seen.
    fn fire(&mut self) {
        let late_ms = (self.slowness.fires_s + self.scheduler_late_s) * 1_000;
        let now = self.now;
        let due = self.schedules.values_mut().filter(|s| !s.fired && s.schedule.at.plus_ms(late_ms) <= now);
        let ids: Vec<InstanceId> = due
            .map(|s| {
                s.fired = true;
                s.schedule.instance.clone()
            })
            .collect();
        for id in ids {
            if self.refused.contains(&Who::ScheduleRole) || self.end(&id, Layer::Schedule).is_err() {
                self.dead_letters.push(id);
            }
        }
    }

    pub fn run(&mut self, order: &LaunchOrder, user_data: &UserData) -> Instance {
        let token = order.token().to_string();
        if let Some(there) = self.machines.iter().find(|m| m.seen.token.as_deref() == Some(&token)) {
            return there.seen.clone();
        }
        let number = self.machines.len() + 1;
        let seen = Instance {
            id: format!("i-{number:017x}").parse().expect("it is an instance's id"),
            region: order.recipe.region.clone(),
            zone: Some(order.placement.zone.clone()),
            subnet: Some(order.placement.subnet.clone()),
            kind: Some(order.recipe.kind.clone()),
            image: Some(order.recipe.image.clone()),
            state: InstanceState::Pending,
            launched: self.now,
            token: Some(token),
            tags: order.tags(),
            nested: Some(order.recipe.nested),
            imds_v2: Some(true),
            public_address: false,
            security_groups: order.recipe.security_groups.clone(),
            profile: Some(order.recipe.profile.clone()),
            volumes: vec![AttachedVolume {
                id: format!("vol-{number:017x}").parse().expect("it is a volume's id"),
                delete_on_termination: true,
            }],
            attributes: Some(Ok(Attributes::MORTAL)),
        };
        let made = Machine { seen: seen.clone(), user_data: user_data.clone(), made: self.now, ended: None };
        self.machines.push(made);
        seen
    }

    /// What `DescribeInstances` shows in a region.
    pub fn shown(&self, region: &Region) -> Vec<Instance> {
        let ripe = |m: &&Machine| m.made.plus_ms(self.slowness.shown_s * 1_000) <= self.now;
        let hosts = self.machines.iter().filter(ripe).map(|m| &m.seen);
        hosts.chain(&self.canaries).filter(|i| i.region == *region).cloned().collect()
    }

    /// Machines beyond the first so many: when each was made, with its user data.
    pub fn made(&self, known: usize) -> Vec<(InstanceId, Micros, UserData)> {
        let new = self.machines.iter().skip(known);
        new.map(|m| (m.seen.id.clone(), m.made, m.user_data.clone())).collect()
    }

    /// Who ended it, and when that took effect; charging ends then.
    pub fn ended(&self, id: &InstanceId) -> Option<(Micros, Layer)> {
        self.machines.iter().find(|m| m.seen.id == *id)?.ended
    }

    pub fn terminate(&mut self, kill: &KillId, who: Who) -> Result<InstanceState, CloudError> {
        let by = if who == Who::Sweeper { Layer::Sweeper } else { Layer::Reaper };
        self.end(kill.instance(), by)
    }

    /// A terminate, or what a power-off comes to: the shutdown behaviour is `terminate`.
    pub fn end(&mut self, id: &InstanceId, by: Layer) -> Result<InstanceState, CloudError> {
        let now = self.now;
        let there = self.machines.iter_mut().find(|m| m.seen.id == *id);
        let there = there.ok_or_else(|| {
            CloudError::new(
                FailureKind::NotFound,
                "TerminateInstances",
                format!("the instance ID '{id}' does not exist"),
            )
        })?;
        if !there.seen.state.is_going() {
            there.seen.state = InstanceState::ShuttingDown;
            there.ended = Some((now, by));
        }
        Ok(there.seen.state)
    }

    pub fn put_schedule(&mut self, schedule: &KillSchedule) {
        let name = schedule.name.as_str().to_owned();
        self.schedules.insert(name, Scheduled { schedule: schedule.clone(), fired: false });
    }

    pub fn schedule(&self, name: &str) -> Option<&KillSchedule> {
        self.schedules.get(name).map(|s| &s.schedule)
    }

    pub fn delete_schedule(&mut self, name: &str) {
        self.schedules.remove(name);
    }

    pub fn note_sweep(&mut self, canary: &Canary, text: String) {
        if let Some(it) = self.canaries.iter_mut().find(|i| i.id == canary.instance) {
            it.tags.insert(tags::SWEPT.to_owned(), text);
        }
    }
}

fn canary_instance(region: Region) -> Instance {
    let tags = [(tags::INSTALLATION, OURS.to_string()), (tags::ROLE, tags::CANARY.to_owned())];
    Instance {
        id: canary(region.clone()).instance,
        region,
        zone: None,
        subnet: None,
        kind: None,
        image: None,
        state: InstanceState::Stopped,
        launched: Micros(1),
        token: None,
        tags: tags.map(|(k, v)| (k.to_owned(), v)).into_iter().collect(),
        nested: None,
        imds_v2: None,
        public_address: false,
        security_groups: Vec::new(),
        profile: None,
        volumes: Vec::new(),
        attributes: None,
    }
}
