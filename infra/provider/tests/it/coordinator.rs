//! A coordinator in front of the cloud in memory, that can be killed between any two lines.

use std::collections::BTreeMap;

use drums_common::clock::Micros;
use drums_provider::{
    cloud::{Instance, InstanceState},
    host::OwnedInstance,
    launch::{Act, Guest, Launch, Look, Patience, Reply, State, View, Why},
    reap::{self, Reap},
};

use super::support::{self, MINUTE_MS, START, World};

pub const LIFE_MS: u64 = 120 * MINUTE_MS;

/// The process died here.
#[derive(Debug)]
pub struct Killed;

/// A coordinator in front of the cloud: what it has on disk, and when it is killed.
pub struct Coordinator {
    // On disk.
    pub launch: Launch,
    pub reaps: BTreeMap<OwnedInstance, Reap>,
    /// Lines until it is killed.
    pub fuse: Option<u32>,
    pub lines: u32,
    pub world: World,
    pub patience: Patience,
    pub unwanted: bool,
    /// The caps allow nothing more.
    pub unaffordable: bool,
    pub attentive_since: Micros,
    pub guest: Guest,
    /// How long an instance takes from made to enrolled.
    pub boot_ms: u64,
}

impl Coordinator {
    pub fn new(world: World) -> Self {
        Self {
            launch: support::launch(LIFE_MS),
            reaps: BTreeMap::new(),
            fuse: None,
            lines: 0,
            world,
            patience: Patience::default(),
            unwanted: false,
            unaffordable: false,
            attentive_since: START,
            guest: Guest::Booted,
            boot_ms: 60_000,
        }
    }

    /// Between any two of these it can be killed.
    pub fn line(&mut self) -> Result<(), Killed> {
        self.lines += 1;
        match &mut self.fuse {
            Some(0) => Err(Killed),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub fn view(&self) -> View {
        let instances: Vec<Instance> = match self.launch.look() {
            Look::Token(_, token) => {
                let token = Some(token.to_string());
                self.world.shown().into_iter().filter(|i| i.token == token).collect()
            }
            Look::Instance(_, id) => self.world.shown().into_iter().filter(|i| i.id == id).collect(),
            Look::Nothing => Vec::new(),
        };
        let up = instances
            .iter()
            .any(|i| i.state == InstanceState::Running && i.launched.plus_ms(self.boot_ms) <= self.world.now);
        View {
            instances: Ok(instances),
            schedule: Ok(self.world.schedules.get(&self.launch.host().token().to_string()).cloned()),
            enrolled: up,
            guest: if up { self.guest.clone() } else { Guest::NotYet },
            attentive_since: self.attentive_since,
            unwanted: self.unwanted.then(|| "cancelled".to_owned()),
            unaffordable: self.unaffordable.then(|| "the cap of the day is spent".to_owned()),
        }
    }

    pub fn store(&mut self, launch: Launch, reap: Vec<(OwnedInstance, Why)>) {
        self.launch = launch;
        let account = self.launch.account();
        for (instance, why) in reap {
            let account = account.clone();
            let now = self.world.now;
            self.reaps.entry(instance.clone()).or_insert_with(|| Reap::begin(instance, account, why, now));
        }
    }

    pub fn turn(&mut self) -> Result<(), Killed> {
        let view = self.view();
        self.line()?;
        let decision = self.launch.decide(&view, self.world.now, &self.patience);
        self.line()?;
        self.store(decision.launch, decision.reap);
        self.line()?;
        if let Some(act) = decision.act {
            let reply = match act {
                Act::Prepare { host, .. } => Reply::Prepared(Ok(support::user_data(&host, self.world.now))),
                Act::Run(order, user_data) => Reply::Ran(self.world.run(&order, &user_data).map(Box::new)),
                Act::PutSchedule(schedule) => Reply::Scheduled(self.world.put_schedule(&schedule)),
                Act::Mend(kill, _) => Reply::Mended(self.world.mend(kill.instance().as_str())),
            };
            // Done in the cloud, and not known here.
            self.line()?;
            let decision = self.launch.heard(&reply, self.world.now, &self.patience);
            self.line()?;
            self.store(decision.launch, decision.reap);
            self.line()?;
        }
        for instance in self.reaps.keys().cloned().collect::<Vec<_>>() {
            self.reap(&instance)?;
        }
        Ok(())
    }

    pub fn reap(&mut self, instance: &OwnedInstance) -> Result<(), Killed> {
        let shown = self.world.shown().into_iter().find(|i| i.id == *instance.id());
        self.line()?;
        let view = reap::View { instance: Ok(shown), volumes: Ok(Vec::new()) };
        let decision = self.reaps[instance].decide(&view, self.world.now);
        self.reaps.insert(instance.clone(), decision.reap);
        self.line()?;
        if let Some(act) = decision.act {
            let reply = match &act {
                reap::Act::Terminate(kill) => self.world.terminate(kill.instance().as_str()),
                reap::Act::Unprotect(kill) => {
                    self.world.unprotect(kill.instance().as_str());
                    Ok(())
                }
                reap::Act::DeleteSchedule(name) => {
                    self.world.schedules.remove(name.as_str());
                    Ok(())
                }
            };
            self.line()?;
            let (reap, _) = self.reaps[instance].heard(&act, &reply, self.world.now);
            self.reaps.insert(instance.clone(), reap);
            self.line()?;
        }
        Ok(())
    }

    pub fn settled(&self) -> bool {
        let launch = matches!(self.launch.state(), State::Ready { .. } | State::Closed { .. });
        launch && self.reaps.values().all(Reap::is_closed) && !self.world.pending()
    }

    /// Turns until it is killed or nothing is left to do.
    pub fn work(&mut self) -> Result<(), Killed> {
        for _ in 0..10_000 {
            let before = (self.launch.clone(), self.reaps.clone());
            self.turn()?;
            // Where nothing happens, longer.
            self.world.pass(if before == (self.launch.clone(), self.reaps.clone()) { 10_000 } else { 1_000 });
            if self.settled() {
                return Ok(());
            }
        }
        panic!("not settled: {:?}, {:?}", self.launch.state(), self.reaps);
    }

    /// Nothing is unknown: one instance, which is ready, or none.
    #[track_caller]
    pub fn check(&self, what: &str) {
        let alive = self.world.alive();
        match self.launch.state() {
            State::Ready { instance } => {
                assert_eq!(alive.len(), 1, "{what}: {alive:?}");
                assert_eq!(alive[0].id, *instance.id(), "{what}");
                let schedule = self.world.schedules.get(&instance.token().unwrap().to_string());
                assert_eq!(schedule.map(|s| &s.instance), Some(instance.id()), "{what}: ready and not armed");
            }
            State::Closed { why } => assert!(alive.is_empty(), "{what}: closed for {why:?}, and alive is {alive:?}"),
            other => panic!("{what}: {other:?}"),
        }
        for (token, (_, user_data)) in &self.world.tokens {
            assert!(user_data.0.contains(token), "{what}: {token} was called with another attempt's user data");
        }
        for instance in self.world.instances.iter().filter(|i| i.state.is_going()) {
            let known = self.reaps.keys().any(|o| *o.id() == instance.id);
            assert!(known, "{what}: nobody knows of {}", instance.id);
        }
    }
}

pub fn ready() -> Coordinator {
    let mut c = Coordinator::new(World::new());
    c.work().unwrap();
    assert!(matches!(c.launch.state(), State::Ready { .. }));
    c
}

/// Turns for so long.
pub fn turns(c: &mut Coordinator, ms: u64) {
    let end = c.world.now.plus_ms(ms);
    while c.world.now < end {
        c.turn().unwrap();
        c.world.pass(5_000);
    }
}
