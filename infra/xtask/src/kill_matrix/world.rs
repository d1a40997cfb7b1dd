//! One simulation: an account, a coordinator, a host and what strikes them, second by second, until the host is dead or
//! long past its bound. The same plan is the same life.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result};
use drums_common::clock::Micros;
use drums_provider::{
    launch::Patience,
    sweep::{self, Regions, Sweep},
    words::InstanceId,
};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha20Rng;

use super::{
    aws::{Aws, Slowness, Who},
    cell::{Fault, LAYERS, Layer, Moment, Strike},
    client::{Client, ready},
    coordinator::{Coordinator, PASS_S, scope},
    host::{Around, Host, Pace},
    timer::Scripts,
};

/// 2026-11-30.
const START: Micros = Micros(1_796_000_000_000_000);
/// A world that is not over this long after its deadline is looked at as it is.
const AFTER_S: u64 = 8 * 60;
/// As the stack deploys it: `rate(1 minute)`, and its function's `Timeout`.
pub const SWEEP_EVERY_S: u64 = 60;
pub const SWEEP_TAKES_S: u64 = 55;

/// What is deployed, and whether it is as it should be: whoever tries the matrix breaks some of it.
pub struct Site {
    pub scripts: Scripts,
    pub patience: Patience,
    pub swept: Regions,
    pub watchdog_enabled: bool,
    /// As of a schedule that is written in another time zone.
    pub scheduler_late_s: u64,
    /// What the coordinator gives up is ended.
    pub reaps: bool,
    /// Silence is declared before it is kept.
    pub silence: bool,
    /// EXP-011: an alarm that ends whoever did not beat for so long.
    pub heartbeat_alarm_s: Option<u64>,
}

impl Site {
    pub fn deployed() -> Result<Self> {
        Ok(Self {
            scripts: Scripts::deployed()?,
            patience: Patience::default(),
            swept: Regions::All,
            watchdog_enabled: true,
            scheduler_late_s: 0,
            reaps: true,
            silence: true,
            heartbeat_alarm_s: None,
        })
    }
}

/// How long everything takes that is not decided.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    pub pace: Pace,
    pub slowness: Slowness,
    /// A sweep begins in the seconds before the deadline that leave this remainder.
    pub sweep_s: u64,
    pub sweep_takes_s: u64,
    pub pass_s: u64,
}

impl Jitter {
    /// All of it at its worst: a sweep has just looked when the deadline comes, Scheduler takes its whole minute.
    pub const SLOWEST: Self = Self {
        pace: Pace { kernel_s: 20, boot_s: 90, shutdown_s: 30 },
        slowness: Slowness { shown_s: 8, fires_s: 59 },
        sweep_s: 1,
        sweep_takes_s: SWEEP_TAKES_S,
        pass_s: 1,
    };

    pub fn drawn(seed: u64) -> Self {
        let mut draw = ChaCha20Rng::seed_from_u64(seed);
        Self {
            pace: Pace {
                kernel_s: draw.random_range(16..40),
                boot_s: draw.random_range(60..200),
                shutdown_s: draw.random_range(2..31),
            },
            slowness: Slowness { shown_s: draw.random_range(0..12), fires_s: draw.random_range(0..60) },
            sweep_s: draw.random_range(0..SWEEP_EVERY_S),
            sweep_takes_s: draw.random_range(1..=SWEEP_TAKES_S),
            pass_s: draw.random_range(0..PASS_S),
        }
    }
}

/// What happens to a host that no fault is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// The whole boot, in seconds, where it is not the jitter's.
    pub boot_s: Option<u64>,
    /// A silence that is declared ten minutes after the host is ready, in seconds.
    pub quiet_s: Option<u64>,
    /// When the coordinator goes away, after the launch, and for how long, in seconds.
    pub outage_s: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub life_s: u64,
    pub strikes: Vec<Strike>,
    pub trial: Trial,
    /// Layers that are left; the others are switched off.
    pub left: BTreeSet<Layer>,
    pub jitter: Jitter,
}

impl Plan {
    pub fn disabled(&self) -> Vec<Layer> {
        LAYERS.into_iter().filter(|l| !self.left.contains(l)).collect()
    }
}

/// How it ended: of several instances, the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    pub by: Layer,
    pub after_deadline_s: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// `None`: something lives.
    pub death: Option<Death>,
    /// How long after its kernel the first beat of any instance came, in seconds; `None`: there was none.
    pub first_beat_s: Option<u64>,
    /// The longest time between two beats of one instance.
    pub longest_silence_s: u64,
    pub instances: usize,
    /// Schedules that could not call.
    pub dead_letters: usize,
    /// What struck, and how many seconds after the deadline.
    pub struck: Vec<(Strike, i64)>,
}

struct World<'a> {
    plan: &'a Plan,
    site: &'a Site,
    aws: Arc<Mutex<Aws>>,
    coordinator: Coordinator,
    hosts: BTreeMap<InstanceId, Host>,
    to_strike: Vec<Strike>,
    struck: Vec<(Strike, i64)>,
    network: bool,
    sweeper: Client,
    /// A sweep under way: what it found, and when it has ended that.
    sweeping: Option<(Sweep, Micros)>,
    deadline: Micros,
}

pub fn run(plan: &Plan, site: &Site) -> Result<Outcome> {
    let deadline = START.plus_ms(plan.life_s * 1_000);
    let aws = Arc::new(Mutex::new(Aws::new(START, plan.jitter.slowness)));
    let sweeper = Client { aws: aws.clone(), who: Who::Sweeper };
    // Launches wait for a sweep that ends hosts.
    let first = scope(Regions::All)?;
    let sweep = sweep::decide(&first, &ready(sweep::look(&sweeper, &first, START)));
    ready(sweep::carry_out(&sweeper, &sweep));
    let mut coordinator = Coordinator::begin(&aws, deadline, site.patience)?;
    coordinator.may_end = site.reaps && plan.left.contains(&Layer::Reaper);
    {
        let mut aws = lock(&aws);
        aws.scheduler = plan.left.contains(&Layer::Schedule);
        aws.scheduler_late_s = site.scheduler_late_s;
    }
    let mut world = World {
        plan,
        site,
        aws,
        coordinator,
        hosts: BTreeMap::new(),
        to_strike: plan.strikes.clone(),
        struck: Vec::new(),
        network: true,
        sweeper,
        sweeping: None,
        deadline,
    };
    for s in 0..=plan.life_s + AFTER_S {
        world.second(s)?;
        if world.is_over() {
            break;
        }
    }
    Ok(world.outcome())
}

fn lock(aws: &Mutex<Aws>) -> MutexGuard<'_, Aws> {
    aws.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World<'_> {
    fn after_deadline_s(&self, at: Micros) -> i64 {
        (at.0 - self.deadline.0).div_euclid(1_000_000)
    }

    fn second(&mut self, s: u64) -> Result<()> {
        let now = START.plus_ms(s * 1_000);
        lock(&self.aws).pass(now);
        self.strike(s, now)?;
        self.outage(s, now);
        self.hosts(now)?;
        self.sweep(now)?;
        self.coordinator.looked(now);
        if s % PASS_S == self.plan.jitter.pass_s {
            self.coordinator.pass(now)?;
        }
        Ok(())
    }

    /// Whether its moment has come; one that never comes by itself comes late.
    fn has_come(&self, moment: Moment, s: u64, now: Micros) -> bool {
        let life_s = self.plan.life_s;
        let late = s + 120 >= life_s;
        match moment {
            Moment::Launched => !self.hosts.is_empty() || late,
            Moment::Booting => self.coordinator.was_armed() || late,
            Moment::Working => self.coordinator.ready_since().is_some_and(|at| at.plus_ms(300_000) <= now) || late,
            Moment::Late => late,
            Moment::Edge => s + 1 >= life_s,
            Moment::ShuttingDown => s >= life_s + 6,
            Moment::At(at) => s >= at,
        }
    }

    fn strike(&mut self, s: u64, now: Micros) -> Result<()> {
        if self.to_strike.is_empty() {
            return Ok(());
        }
        let strikes = std::mem::take(&mut self.to_strike).into_iter();
        let (come, to_come): (Vec<_>, _) = strikes.partition(|(_, m)| self.has_come(*m, s, now));
        self.to_strike = to_come;
        for (fault, moment) in come {
            self.struck.push(((fault, moment), self.after_deadline_s(now)));
            match fault {
                Fault::CoordinatorDead => self.coordinator.kill(),
                Fault::NetworkCut => self.network = false,
                Fault::CredentialsRevoked => drop(lock(&self.aws).refused.insert(Who::Coordinator)),
                Fault::ScheduleMissing => lock(&self.aws).schedules_deleted = true,
                Fault::ScheduleRole => drop(lock(&self.aws).refused.insert(Who::ScheduleRole)),
                Fault::Sweeper => drop(lock(&self.aws).refused.insert(Who::Sweeper)),
                Fault::KernelHung | Fault::AgentDead | Fault::AgentFrozen => {
                    let newest = self.hosts.values_mut().next_back();
                    let host = newest.with_context(|| format!("{fault} at {s} s, where there is no host yet"))?;
                    match fault {
                        Fault::KernelHung => host.kernel_hung = true,
                        Fault::AgentDead => host.agent_ends = true,
                        _ => host.agent_frozen = true,
                    }
                }
            }
        }
        Ok(())
    }

    fn outage(&mut self, s: u64, now: Micros) {
        let Some((from, takes)) = self.plan.trial.outage_s else { return };
        if s == from {
            self.coordinator.kill();
        } else if s == from + takes {
            self.coordinator.start(now);
        }
    }

    fn hosts(&mut self, now: Micros) -> Result<()> {
        let made = lock(&self.aws).made(self.hosts.len());
        for (id, at, user_data) in made {
            let boot_s = self.plan.trial.boot_s.unwrap_or(self.plan.jitter.pace.boot_s);
            let pace = Pace { boot_s, ..self.plan.jitter.pace };
            self.hosts.insert(id, Host::new(self.coordinator.attempt(), at, &user_data, pace)?);
        }
        let quiet_ms = self.quiet_begins(now);
        let signed = !lock(&self.aws).refused.contains(&Who::Coordinator);
        let around = Around {
            now,
            network: self.network,
            signed,
            scripts: &self.site.scripts,
            timer: self.plan.left.contains(&Layer::GuestTimer),
            watchdog: self.site.watchdog_enabled && self.plan.left.contains(&Layer::Watchdog),
            quiet_ms,
            declared: self.site.silence,
        };
        for (id, host) in &mut self.hosts {
            if lock(&self.aws).ended(id).is_some() {
                continue;
            }
            // Its shutdown behaviour is `terminate`.
            let off = host.second(&around, &mut self.coordinator)?;
            // What EXP-011 died of, where a site has it.
            let alarm_s = self.site.heartbeat_alarm_s;
            let alarm = alarm_s.filter(|s| host.beaten().plus_ms(s * 1_000) <= now).map(|_| Layer::Reaper);
            if let Some(by) = off.or(alarm) {
                lock(&self.aws).end(id, by)?;
            }
        }
        Ok(())
    }

    fn quiet_begins(&self, now: Micros) -> Option<u64> {
        let at = self.coordinator.ready_since()?.plus_ms(600_000);
        self.plan.trial.quiet_s.filter(|_| at == now).map(|s| s * 1_000)
    }

    /// It judges what it sees when it begins, and ends that at the end of the time that it takes.
    fn sweep(&mut self, now: Micros) -> Result<()> {
        if let Some((sweep, at)) = &self.sweeping
            && *at <= now
        {
            ready(sweep::carry_out(&self.sweeper, sweep));
            self.sweeping = None;
        }
        let to_deadline_s = -self.after_deadline_s(now);
        let every = i64::try_from(SWEEP_EVERY_S)?;
        let begins = to_deadline_s.rem_euclid(every) == i64::try_from(self.plan.jitter.sweep_s)?;
        if begins && self.plan.left.contains(&Layer::Sweeper) {
            let scope = scope(self.site.swept.clone())?;
            let sweep = sweep::decide(&scope, &ready(sweep::look(&self.sweeper, &scope, now)));
            self.sweeping = Some((sweep, now.plus_ms(self.plan.jitter.sweep_takes_s * 1_000)));
        }
        Ok(())
    }

    fn alive(&self) -> bool {
        let aws = lock(&self.aws);
        self.hosts.keys().any(|id| aws.ended(id).is_none())
    }

    /// Everything is dead, and nobody is left who would launch another one.
    fn is_over(&self) -> bool {
        let nobody = self.coordinator.is_closed() || (!self.coordinator.is_up() && self.plan.trial.outage_s.is_none());
        !self.hosts.is_empty() && nobody && !self.alive()
    }

    fn outcome(&self) -> Outcome {
        let aws = lock(&self.aws);
        let deaths: Option<Vec<_>> = self.hosts.keys().map(|id| aws.ended(id)).collect();
        let last = deaths.and_then(|d| d.into_iter().max());
        let death = last.map(|(at, by)| Death { by, after_deadline_s: self.after_deadline_s(at) });
        Outcome {
            death,
            first_beat_s: self.hosts.values().filter_map(Host::first_beat_s).max(),
            longest_silence_s: self.hosts.values().map(Host::longest_silence_s).max().unwrap_or(0),
            instances: self.hosts.len(),
            dead_letters: aws.dead_letters.len(),
            struck: self.struck.clone(),
        }
    }
}
