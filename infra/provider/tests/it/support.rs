//! A cloud in memory, as far as these tests need one: it gives an instance per token, shows it late, and fails as told.

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    ask::{Ask, AskedHost, RawAsk, RawHost},
    books::Books,
    cloud::{
        Account, AttachedVolume, Attributes, Canary, ImageFacts, Instance, InstanceState, KillSchedule, LaunchOrder,
        Placement, Quota, ScheduleSetup, TypeFacts, UserData,
    },
    failure::{CloudError, FailureKind},
    gates::{self, Facts, HostFacts},
    host::OwnedHost,
    launch::Launch,
    limits::Limits,
    money::{Quoted, Source, UsdMicros},
    spend::Rates,
    tags,
    words::{InstanceProfile, Region, instant_text},
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
        drain_minutes: 15,
        instance_profile: profile().to_string(),
        hosts: vec![host],
    }
}

pub fn profile() -> InstanceProfile {
    "drums-host-01010101".parse().unwrap()
}

pub fn limits() -> Limits {
    Limits {
        account: "123456789012".to_owned(),
        day_usd: UsdMicros(100_000_000),
        max_hosts: 4,
        longest_life_ms: 24 * 60 * MINUTE_MS,
        least_life_ms: 10 * MINUTE_MS,
        sweep_age_ms: 10 * MINUTE_MS,
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
        profile: None,
        volumes: Vec::new(),
        attributes: None,
    }
}

/// Facts with which everything is allowed.
pub fn facts(ask: &Ask) -> Facts {
    let kind = TypeFacts {
        kind: "c8i.2xlarge".parse().unwrap(),
        vcpus: 8,
        memory_mib: 16_384,
        architectures: vec!["x86_64".to_owned()],
        nested_virtualisation: true,
        bare_metal: false,
        burstable: false,
        zones: placements().into_iter().map(|p| p.zone).collect(),
    };
    let image = ImageFacts {
        id: "ami-0123456789abcdef0".parse().unwrap(),
        name: "debian-12".to_owned(),
        architecture: "x86_64".to_owned(),
        state: "available".to_owned(),
        root_device: "/dev/xvda".to_owned(),
        root_gib: 8,
    };
    let groups = || vec!["sg-00000001".parse().unwrap()];
    let host = |asked: &AskedHost| HostFacts {
        recipe: Ok(asked.recipe(&kind, &image, groups(), placements())),
        kind: Ok(kind.clone()),
        image: Ok(image.clone()),
        hour: Ok(quoted(UsdMicros(400_000))),
        gib_month: Ok(quoted(UsdMicros(95_200))),
        quota: Ok(quoted(Quota { limit: 64, used: 8 })),
        launches: placements().into_iter().map(|p| (p, Ok(()))).collect(),
    };
    Facts {
        installation: OURS,
        account: Ok(Account {
            account: "123456789012".to_owned(),
            arn: "arn:aws:iam::123456789012:user/bench".to_owned(),
            clock: START,
        }),
        local: START,
        canaries: vec![(canary(), Ok(canary_instance(Some(Micros(START.0 - 60_000_000)))))],
        terminate: BTreeMap::from([(region(), Ok(()))]),
        schedules: BTreeMap::from([(region(), (setup(), Ok("made, read back, deleted".to_owned())))]),
        hosts: ask.hosts.iter().map(|h| (h.host.clone(), host(h))).collect(),
        alive: Ok(0),
        books: Books::default(),
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
    let ask = raw_ask(life_ms).read().unwrap();
    let limits = Limits { longest_life_ms: u64::MAX, least_life_ms: 1, ..limits() };
    let (table, cleared) = gates::judge(&ask, &limits, &facts(&ask));
    let cleared = cleared.unwrap_or_else(|| panic!("{table}"));
    cleared.confirm(&Books::default(), START).unwrap().remove(0)
}

/// User data that differ by attempt and by when they were made, as real ones do.
pub fn user_data(host: &OwnedHost, at: Micros) -> UserData {
    UserData(format!("#!/bin/sh\n# {} {}", host.token(), at.0))
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
        profile: Some(order.recipe.profile.clone()),
        volumes: vec![AttachedVolume { id: "vol-00000001".parse().unwrap(), delete_on_termination: true }],
        attributes: Some(Ok(Attributes::MORTAL)),
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
    pub mend_fails: Option<FailureKind>,
    pub terminate_fails: VecDeque<FailureKind>,
    late: Vec<(Micros, LaunchOrder)>,
    /// Every token that was ever called with, and what with. Another order under the same token is refused.
    pub tokens: BTreeMap<String, (LaunchOrder, UserData)>,
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

    pub fn run(&mut self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError> {
        let token = order.token().to_string();
        let whole = (order.clone(), user_data.clone());
        if *self.tokens.entry(token.clone()).or_insert_with(|| whole.clone()) != whole {
            return Err(error(FailureKind::TokenReused, "RunInstances"));
        }
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
        if it.attributes.as_ref().is_some_and(|a| a.as_ref().is_ok_and(|a| a.protected || a.stop_protected)) {
            return Err(error(FailureKind::Protected, "TerminateInstances"));
        }
        if it.state != InstanceState::Terminated {
            it.state = InstanceState::ShuttingDown;
        }
        Ok(())
    }

    pub fn attributes(&mut self, id: &str, change: impl Fn(&mut Attributes)) {
        let all = self.instances.iter_mut().filter(|i| i.id.as_str() == id);
        all.filter_map(|i| i.attributes.as_mut()?.as_mut().ok()).for_each(change);
    }

    pub fn unprotect(&mut self, id: &str) {
        self.attributes(id, |a| (a.protected, a.stop_protected) = (false, false));
    }

    pub fn mend(&mut self, id: &str) -> Result<(), CloudError> {
        if let Some(kind) = self.mend_fails {
            return Err(error(kind, "ModifyInstanceAttribute"));
        }
        self.attributes(id, |a| *a = Attributes::MORTAL);
        Ok(())
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
