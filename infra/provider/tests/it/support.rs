//! A cloud in memory, as far as these tests need one: it gives an instance per token, shows it late, and fails as told.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

use drums_common::{
    clock::Micros,
    ids::{HostId, InstallationId},
};
use drums_provider::{
    ask::{Ask, RawAsk, RawHost},
    cloud::{
        Account, AttachedVolume, Attributes, Canary, ImageFacts, Instance, InstanceState, KillSchedule, LaunchOrder,
        Placement, Quota, Recipe, ScheduleSetup, TypeFacts, UserData, VolumeKind,
    },
    failure::{CloudError, FailureKind},
    gates::{self, Facts, HostFacts},
    host::OwnedHost,
    launch::Launch,
    money::{Quoted, Source, UsdMicros},
    spend::Rates,
    tags,
    words::{Region, instant_text},
};

/// 2026-11-30, a little before noon.
pub const START: Micros = Micros(1_796_000_000_000_000);
pub const OURS: InstallationId = InstallationId([1; 4]);
pub const THEIRS: InstallationId = InstallationId([2; 4]);
pub const MINUTE_MS: u64 = 60_000;

pub fn region() -> Region {
    "eu-central-1".parse().unwrap()
}

pub fn error(kind: FailureKind, call: &str) -> CloudError {
    CloudError::new(kind, call, "told to fail")
}

pub fn placements() -> Vec<Placement> {
    ["subnet-0000000a", "subnet-0000000b"]
        .map(|s| Placement { subnet: s.parse().unwrap(), zone: format!("eu-central-1{}", &s[14..]).parse().unwrap() })
        .to_vec()
}

pub fn raw_ask(life_ms: u64) -> RawAsk {
    let host = RawHost {
        name: "h1".to_owned(),
        kind: "c8i.2xlarge".to_owned(),
        region: region().to_string(),
        subnets: placements().iter().map(|p| p.subnet.to_string()).collect(),
        volume_gib: 30,
        spot: false,
        nested: true,
    };
    RawAsk {
        campaign: "c1".to_owned(),
        experiment: Some("EXP-028".to_owned()),
        deadline: instant_text(START.plus_ms(life_ms)),
        max_usd: "50".to_owned(),
        max_usd_per_day: "100".to_owned(),
        drain_minutes: 15,
        max_hosts: 4,
        longest_life_minutes: 24 * 60,
        hosts: vec![host],
    }
}

pub fn quoted<T>(value: T) -> Quoted<T> {
    Quoted { value, source: Source::Api("Pricing GetProducts".to_owned()), as_of: START }
}

pub fn rates() -> Rates {
    Rates { hour: quoted(UsdMicros(400_000)), gib_month: quoted(UsdMicros(95_200)), volume_gib: 30 }
}

pub fn canary() -> Canary {
    Canary { region: region(), instance: "i-0000000000000000c".parse().unwrap() }
}

pub fn canary_instance(swept: Option<Micros>) -> Instance {
    let mut tags = BTreeMap::from([
        (tags::INSTALLATION.to_owned(), OURS.to_string()),
        (tags::ROLE.to_owned(), tags::CANARY.to_owned()),
    ]);
    tags.extend(swept.map(|at| (tags::SWEPT.to_owned(), instant_text(at))));
    let canary = canary();
    Instance { id: canary.instance, state: InstanceState::Stopped, launched: Micros(1), tags, token: None, ..bare() }
}

fn bare() -> Instance {
    Instance {
        id: "i-00000001".parse().unwrap(),
        region: region(),
        zone: None,
        subnet: None,
        kind: None,
        image: None,
        state: InstanceState::Pending,
        launched: START,
        token: None,
        tags: BTreeMap::new(),
        nested: None,
        imds_v2: None,
        public_address: false,
        security_groups: Vec::new(),
        volumes: Vec::new(),
        attributes: None,
    }
}

/// Facts with which everything is allowed.
pub fn facts(ask: &Ask) -> Facts {
    let host = |_: &HostId| HostFacts {
        kind: Ok(TypeFacts {
            kind: "c8i.2xlarge".parse().unwrap(),
            vcpus: 8,
            memory_mib: 16_384,
            architectures: vec!["x86_64".to_owned()],
            nested_virtualisation: true,
            bare_metal: false,
            burstable: false,
            zones: placements().into_iter().map(|p| p.zone).collect(),
        }),
        image: Ok(ImageFacts {
            id: "ami-0123456789abcdef0".parse().unwrap(),
            name: "debian-12".to_owned(),
            architecture: "x86_64".to_owned(),
            state: "available".to_owned(),
            root_device: "/dev/xvda".to_owned(),
            root_gib: 8,
        }),
        hour: Ok(quoted(UsdMicros(400_000))),
        gib_month: Ok(quoted(UsdMicros(95_200))),
        quota: Ok(quoted(Quota { limit: 64, used: 8 })),
        launches: placements().into_iter().map(|p| (p, Ok(()))).collect(),
    };
    Facts {
        account: Ok(Account {
            account: "123456789012".to_owned(),
            arn: "arn:aws:iam::123456789012:user/bench".to_owned(),
            clock: START,
        }),
        expected_account: "123456789012".to_owned(),
        local: START,
        canaries: vec![(canary(), Ok(canary_instance(Some(Micros(START.0 - 60_000_000)))))],
        sweep_age_ms: 10 * MINUTE_MS,
        terminate: BTreeMap::from([(region(), Ok(()))]),
        schedules: BTreeMap::from([(region(), Ok("made, read back, deleted".to_owned()))]),
        hosts: ask.hosts.iter().map(|h| (h.host.clone(), host(&h.host))).collect(),
        alive: Ok(0),
        meters: Vec::new(),
        least_life_ms: 10 * MINUTE_MS,
    }
}

pub fn recipe() -> Recipe {
    Recipe {
        region: region(),
        kind: "c8i.2xlarge".parse().unwrap(),
        image: "ami-0123456789abcdef0".parse().unwrap(),
        root_device: "/dev/xvda".to_owned(),
        volume: VolumeKind::Gp3,
        volume_gib: 30,
        market: drums_provider::cloud::Market::OnDemand,
        nested: true,
        prove_guest: true,
        security_groups: vec!["sg-00000001".parse().unwrap()],
        instance_profile: None,
        user_data: UserData("#!/bin/sh".to_owned()),
        placements: placements(),
    }
}

pub fn setup() -> ScheduleSetup {
    ScheduleSetup {
        group: "drums".to_owned(),
        role_arn: "arn:aws:iam::123456789012:role/drums-scheduler".to_owned(),
        dead_letter_arn: "arn:aws:sqs:eu-central-1:123456789012:drums-dead-letters".to_owned(),
    }
}

/// A launch that passed its gates, with this long to its deadline from [`START`].
pub fn launch(life_ms: u64) -> Launch {
    let mut ask = raw_ask(life_ms).read().unwrap();
    ask.longest_life_ms = u64::MAX;
    let mut facts = facts(&ask);
    facts.least_life_ms = 1;
    let (table, cleared) = gates::judge(&ask, &facts);
    let cleared = cleared.unwrap_or_else(|| panic!("{table}"));
    let host = OwnedHost::first(OURS, ask.hosts[0].host.clone(), ask.campaign);
    Launch::begin(host, recipe(), setup(), &cleared).unwrap()
}

/// What the cloud made of an order, faithfully.
pub fn instance_of(order: &LaunchOrder, number: u64, at: Micros) -> Instance {
    Instance {
        id: format!("i-{number:017x}").parse().unwrap(),
        region: order.recipe.region.clone(),
        zone: Some(order.placement.zone.clone()),
        subnet: Some(order.placement.subnet.clone()),
        kind: Some(order.recipe.kind.clone()),
        image: Some(order.recipe.image.clone()),
        state: InstanceState::Running,
        launched: at,
        token: Some(order.token().to_string()),
        tags: order.tags(),
        nested: Some(order.recipe.nested),
        imds_v2: Some(true),
        public_address: false,
        security_groups: order.recipe.security_groups.clone(),
        volumes: vec![AttachedVolume { id: "vol-00000001".parse().unwrap(), delete_on_termination: true }],
        attributes: Some(Attributes { terminate_on_shutdown: true, protected: false }),
    }
}

/// How one `RunInstances` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    Done,
    /// Done, and the reply is lost.
    ReplyLost,
    /// The reply is lost, and it is done half a minute later.
    Late,
    /// Never arrived, and nobody knows.
    Lost,
    Fails(FailureKind),
}

#[derive(Debug, Default)]
pub struct World {
    pub now: Micros,
    pub instances: Vec<Instance>,
    pub schedules: BTreeMap<String, KillSchedule>,
    /// How the next launches end; afterwards they are done.
    pub runs: VecDeque<Run>,
    /// How long after it was made an instance is not shown.
    pub shown_after_ms: u64,
    /// Options that are dropped without a word.
    pub drops_nested: bool,
    pub schedule_fails: Option<FailureKind>,
    pub terminate_fails: VecDeque<FailureKind>,
    late: Vec<(Micros, LaunchOrder)>,
    /// Every token that was ever called with.
    pub tokens: BTreeSet<String>,
}

impl World {
    pub fn new() -> Self {
        Self { now: START, ..Self::default() }
    }

    pub fn pass(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        let now = self.now;
        let (due, late) = std::mem::take(&mut self.late).into_iter().partition(|(at, _)| *at <= now);
        self.late = late;
        for (_, order) in due {
            self.make(&order);
        }
        for instance in &mut self.instances {
            if instance.state == InstanceState::ShuttingDown {
                instance.state = InstanceState::Terminated;
            }
        }
    }

    pub fn pending(&self) -> bool {
        !self.late.is_empty()
    }

    fn make(&mut self, order: &LaunchOrder) -> Instance {
        let token = order.token().to_string();
        if let Some(there) = self.instances.iter().find(|i| i.token.as_deref() == Some(&token)) {
            return there.clone();
        }
        let number = u64::try_from(self.instances.len()).unwrap() + 1;
        let mut made = instance_of(order, number, self.now);
        if self.drops_nested {
            made.nested = None;
        }
        self.instances.push(made.clone());
        made
    }

    pub fn run(&mut self, order: &LaunchOrder) -> Result<Instance, CloudError> {
        let token = order.token().to_string();
        self.tokens.insert(token.clone());
        // Whoever has it already gets it, whatever the fault of the day.
        let there = self.instances.iter().any(|i| i.token.as_deref() == Some(&token));
        let unknown = || error(FailureKind::Unknown, "RunInstances");
        match if there { Run::Done } else { self.runs.pop_front().unwrap_or(Run::Done) } {
            Run::Done => Ok(self.make(order)),
            Run::ReplyLost => {
                self.make(order);
                Err(unknown())
            }
            Run::Late => {
                self.late.push((self.now.plus_ms(30_000), order.clone()));
                Err(unknown())
            }
            Run::Lost => Err(unknown()),
            Run::Fails(kind) => Err(error(kind, "RunInstances")),
        }
    }

    pub fn shown(&self) -> Vec<Instance> {
        let late = self.shown_after_ms;
        self.instances.iter().filter(|i| i.launched.plus_ms(late) <= self.now).cloned().collect()
    }

    pub fn alive(&self) -> Vec<&Instance> {
        self.instances.iter().filter(|i| !i.state.is_going()).collect()
    }

    pub fn terminate(&mut self, id: &str) -> Result<(), CloudError> {
        if let Some(kind) = self.terminate_fails.pop_front() {
            return Err(error(kind, "TerminateInstances"));
        }
        let it = self.instances.iter_mut().find(|i| i.id.as_str() == id);
        let it = it.ok_or_else(|| error(FailureKind::NotFound, "TerminateInstances"))?;
        if it.attributes.is_some_and(|a| a.protected) {
            return Err(error(FailureKind::Protected, "TerminateInstances"));
        }
        if it.state != InstanceState::Terminated {
            it.state = InstanceState::ShuttingDown;
        }
        Ok(())
    }

    pub fn unprotect(&mut self, id: &str) {
        for it in self.instances.iter_mut().filter(|i| i.id.as_str() == id) {
            it.attributes = Some(Attributes { terminate_on_shutdown: true, protected: false });
        }
    }

    pub fn put_schedule(&mut self, schedule: &KillSchedule) -> Result<(), CloudError> {
        match self.schedule_fails {
            Some(kind) => Err(error(kind, "CreateSchedule")),
            None => {
                self.schedules.insert(schedule.name.as_str().to_owned(), schedule.clone());
                Ok(())
            }
        }
    }
}

/// Futures of a cloud in memory are ready at once.
pub fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("nothing here waits"),
    }
}
