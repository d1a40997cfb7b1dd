//! The world round the coordinator: the cloud, the host and what may fail of them, minute by minute.

use std::{collections::BTreeSet, sync::Arc};

use drums_common::clock::Micros;
use drums_provider::{
    cloud::{Attributes, Instance, InstanceState},
    host::OwnedInstance,
    launch::Patience,
    sweep::{self, Mode, Regions, Scope, View},
    tags,
};

use super::{Fault, Host, Paid, Turn, Without, World};
use crate::support::{self, MINUTE_MS, OURS, START};

/// Who ended a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Killer {
    Timer,
    Lease,
    Schedule,
    Sweeper,
    Coordinator,
    HeartbeatAlarm,
}

impl Paid {
    pub(super) fn new(without: Without, faults: usize, deadline: u8, boot: u8, life: u8) -> Self {
        let minutes = |m: u64| m * MINUTE_MS;
        let patience = Patience {
            arm_ms: minutes(2),
            appear_ms: minutes(3),
            boot_ms: minutes(if without == Without::BootBound { 4 } else { 15 }),
            probe_ms: minutes(3),
            settle_ms: if without == Without::Settling { 0 } else { minutes(3) },
            retry_ms: 0,
            attempts: 3,
            fresh_ms: minutes(4),
            least_life_ms: minutes(3),
        };
        let launch = support::launch(minutes(u64::from(deadline)));
        let mut host = launch.host().clone();
        let mut made = Vec::new();
        for attempt in 1..=u64::from(patience.attempts) {
            let at = |place: usize| {
                let mut order = launch.order();
                order.host = host.clone();
                order.due = host.deadline();
                order.placement = order.recipe.placements[place].clone();
                support::instance_of(&order, attempt, START)
            };
            made.push([at(0), at(1)]);
            host = host.relaunch().unwrap();
        }
        let scope = Scope::new(OURS, Regions::All, BTreeSet::from([support::canary()]), Mode::Armed, minutes(1_440));
        Self {
            without,
            faults,
            deadline,
            boot,
            life,
            quiet: None,
            outage: None,
            sweep_every: 4,
            phases: 4,
            grid: 1,
            patience,
            scope: scope.unwrap(),
            launch: Arc::new(launch),
            made,
        }
    }

    /// A host as the cloud shows it.
    pub(super) fn seen(&self, host: &Host) -> Instance {
        let mut seen = self.made[usize::from(host.attempt) - 1][host.place].clone();
        seen.state = host.state;
        seen.launched = self.at(host.made);
        seen.attributes = Some(Ok(Attributes {
            terminate_on_shutdown: !host.stops_only,
            protected: host.protected,
            stop_protected: false,
        }));
        if host.tag_later {
            seen.tags.insert(tags::DEADLINE.to_owned(), "2999-01-01T00:00:00Z".to_owned());
        }
        seen
    }

    /// `RunInstances`, idempotent under its token.
    pub(super) fn make(&self, w: &mut World, attempt: u16, place: usize) -> usize {
        if let Some(there) = w.hosts.iter().position(|h| h.attempt == attempt) {
            return there;
        }
        w.hosts.push(Host {
            attempt,
            place,
            made: w.now,
            state: InstanceState::Running,
            tag_later: false,
            protected: false,
            stops_only: false,
            kernel_hung: false,
            agent_dead: false,
            cut: false,
            clock_behind: false,
            timer: false,
            enrolled: false,
            heard: 0,
            quiet_until: 0,
        });
        w.hosts.len() - 1
    }

    /// Faults that can change anything now.
    pub(super) fn can_fail(&self, w: &World, fault: Fault) -> bool {
        let host = w.hosts.last().filter(|h| !h.state.is_going());
        match fault {
            // It happens with a call.
            Fault::Call => false,
            Fault::CoordinatorDead => w.up_since.is_some(),
            // At rest it has nothing to lose.
            Fault::CoordinatorKilled => w.turn != Turn::Rest,
            Fault::Credentials => w.up_since.is_some(),
            Fault::KernelHung | Fault::TagLater | Fault::Protected | Fault::StopsOnly | Fault::HostGone => {
                host.is_some()
            }
            Fault::AgentDead | Fault::NetworkCut | Fault::GuestClock => host.is_some_and(|h| !h.kernel_hung),
            Fault::ScheduleMissing => w.schedules.values().any(|(_, fired)| !fired),
            Fault::ScheduleRole | Fault::Sweeper => true,
        }
    }

    pub(super) fn fail(&self, w: &mut World, fault: Fault) {
        w.faults.insert(fault);
        match fault {
            Fault::CoordinatorDead => {
                w.up_since = None;
                w.turn = Turn::Rest;
                w.unstored = None;
            }
            Fault::CoordinatorKilled => {
                w.turn = Turn::Rest;
                w.unstored = None;
                w.up_since = Some(w.now);
            }
            Fault::ScheduleMissing => w.schedules.retain(|_, (_, fired)| *fired),
            Fault::Call | Fault::Credentials | Fault::ScheduleRole | Fault::Sweeper => {}
            _ => {
                let Some(host) = w.hosts.last_mut() else { return };
                match fault {
                    Fault::KernelHung => host.kernel_hung = true,
                    Fault::AgentDead => host.agent_dead = true,
                    Fault::NetworkCut => host.cut = true,
                    Fault::GuestClock => host.clock_behind = true,
                    Fault::TagLater => host.tag_later = true,
                    Fault::Protected => host.protected = true,
                    Fault::HostGone => host.state = InstanceState::Terminated,
                    _ => host.stops_only = true,
                }
            }
        }
    }

    /// One minute ends and the next begins.
    pub(super) fn minute(&self, w: &mut World, schedule_late: bool) {
        self.check(w);
        w.now += 1;
        if w.outage_ends == Some(w.now) {
            w.outage_ends = None;
            if !w.faults.contains(&Fault::CoordinatorDead) {
                w.up_since = Some(w.now);
            }
        }
        if let Some((_, attempt, place)) = w.late.filter(|(at, ..)| *at <= w.now) {
            w.late = None;
            self.make(w, attempt, place);
        }
        for h in 0..w.hosts.len() {
            self.host(w, h);
        }
        self.schedule(w, schedule_late);
        let due = w.now % self.sweep_every == w.phase;
        if due && !w.faults.contains(&Fault::Sweeper) && self.without != Without::Sweeper {
            self.sweep(w);
        }
        if w.up_since.is_some() {
            w.passes = 3;
            w.moved = false;
            w.turn = Turn::Launch;
            self.skip_idle(w);
        }
    }

    /// An agent finds a coordinator that was started again in the minute after.
    fn connected(w: &World, host: &Host) -> bool {
        w.up_since.is_some_and(|up| up < w.now) && !host.cut && !host.agent_dead && !host.kernel_hung
    }

    /// Timer, agent and watchdog of one host.
    fn host(&self, w: &mut World, h: usize) {
        let now = w.now;
        let host = &mut w.hosts[h];
        host.state = match host.state {
            InstanceState::ShuttingDown => InstanceState::Terminated,
            InstanceState::Stopping => InstanceState::Stopped,
            other => other,
        };
        if host.state != InstanceState::Running || host.kernel_hung {
            return;
        }
        // The first line of user data.
        host.timer = true;
        let connected = Self::connected(w, &w.hosts[h]);
        let admitted = w.launch.may_enrol() && w.launch.host().attempt() == w.hosts[h].attempt;
        let host = &mut w.hosts[h];
        if connected && admitted && now >= host.made + self.boot && !host.enrolled && now < self.deadline {
            host.enrolled = true;
            host.heard = now;
        }
        if connected && host.enrolled && now >= host.quiet_until {
            host.heard = now;
        }
        let host = &w.hosts[h];
        // By its own clock, or by the lifetime that was registered, counted from its first line.
        let by_clock = !host.clock_behind && now >= self.deadline;
        let by_lifetime = now > self.deadline && self.without != Without::Lifetime;
        if host.timer && (by_clock || by_lifetime) && self.without != Without::GuestTimer {
            return self.power_off(w, h, Killer::Timer);
        }
        let watched = self.without != Without::Watchdog || !host.agent_dead;
        let agreed = if self.without == Without::Quiet { host.heard } else { host.heard.max(host.quiet_until) };
        if host.enrolled && watched && now >= agreed + self.life {
            return self.power_off(w, h, Killer::Lease);
        }
        if self.without == Without::NoHeartbeatAlarm && now >= host.heard.max(host.made) + 5 {
            self.end(w, h, Killer::HeartbeatAlarm);
        }
    }

    fn power_off(&self, w: &mut World, h: usize, killer: Killer) {
        self.judge(w, h, killer);
        let host = &mut w.hosts[h];
        host.state = if host.stops_only { InstanceState::Stopping } else { InstanceState::ShuttingDown };
    }

    /// Terminates it, if it is not protected.
    pub(super) fn end(&self, w: &mut World, h: usize, killer: Killer) -> bool {
        if w.hosts[h].state.is_going() {
            return true;
        }
        if w.hosts[h].protected {
            return false;
        }
        self.judge(w, h, killer);
        w.hosts[h].state = InstanceState::ShuttingDown;
        true
    }

    fn schedule(&self, w: &mut World, late: bool) {
        if self.without == Without::Schedule {
            return;
        }
        let now = self.at(w.now);
        let due: Vec<u16> =
            w.schedules.iter().filter(|(_, (at, fired))| !fired && *at <= now).map(|(a, _)| *a).collect();
        for attempt in due {
            let Some((at, fired)) = w.schedules.get_mut(&attempt) else { continue };
            // Scheduler fires within a minute.
            if late && *at == now {
                continue;
            }
            *fired = true;
            if !w.faults.contains(&Fault::ScheduleRole)
                && let Some(h) = w.hosts.iter().position(|h| h.attempt == attempt)
            {
                self.end(w, h, Killer::Schedule);
            }
        }
    }

    fn sweep(&self, w: &mut World) {
        let now = self.at(w.now);
        let mut instances: Vec<Instance> = w.hosts.iter().map(|h| self.seen(h)).collect();
        instances.push(support::canary_instance(None));
        let region = support::region();
        let view = View {
            enabled: Ok(vec![region.clone()]),
            regions: [(region, Ok(instances))].into_iter().collect(),
            aws: Ok(now),
            local: now,
        };
        let sweep = sweep::decide(&self.scope, &view);
        if !sweep.is_complete() {
            w.broken = Some("a sweep that saw everything has failed");
        }
        for kill in sweep.orders() {
            let Some(h) = w.hosts.iter().position(|h| self.seen(h).id == *kill.instance()) else { continue };
            if self.without != Without::Unprotect {
                w.hosts[h].protected = false;
            }
            self.end(w, h, Killer::Sweeper);
        }
    }

    /// Whether this end is one that may be.
    fn judge(&self, w: &mut World, h: usize, killer: Killer) {
        let host = &w.hosts[h];
        if w.now >= self.deadline || host.state == InstanceState::Stopped {
            return;
        }
        let silent = w.now >= host.heard.max(host.quiet_until) + self.life;
        let allowed = match killer {
            Killer::Timer | Killer::Schedule | Killer::Sweeper => false,
            Killer::Lease | Killer::HeartbeatAlarm => host.enrolled && silent,
            Killer::Coordinator => !host.enrolled || silent,
        };
        if !allowed {
            w.broken = Some("a healthy host was killed");
        }
        // One that boots, with nothing the matter, is not given up before fifteen minutes.
        let listened = host.made.max(w.up_since.unwrap_or(w.now));
        let boots = w.faults.is_empty() && !host.enrolled && w.now < listened + 15;
        let alone = w.hosts.iter().filter(|h| !h.state.is_going()).count() == 1;
        if boots && alone && w.outage_ends.is_none() && killer == Killer::Coordinator {
            w.broken = Some("a booting host was killed within its bound");
        }
    }

    /// What must hold at the end of a minute.
    fn check(&self, w: &mut World) {
        if w.hosts.iter().filter(|h| !h.state.is_going()).count() > 1 {
            w.broken = Some("a host is two instances");
        }
        for h in 0..w.hosts.len() {
            let host = &w.hosts[h];
            if host.state.is_going() {
                continue;
            }
            if w.now >= self.deadline + self.bound(w, host) {
                w.broken = Some("it outlived its deadline");
            }
            let silent = w.now > host.heard.max(host.quiet_until) + self.life;
            if host.enrolled && silent && host.state == InstanceState::Running && !host.kernel_hung {
                w.broken = Some("it outlived its lease");
            }
            if !self.known(w, host) {
                w.broken = Some("an instance is unknown");
            }
        }
    }

    /// Two minutes; five where two faults left only the sweeper that can act.
    fn bound(&self, w: &World, host: &Host) -> u8 {
        let timer = !host.kernel_hung && !host.stops_only;
        let reaper = w.up_since.is_some() && !w.faults.contains(&Fault::Credentials);
        let role = !w.faults.contains(&Fault::ScheduleRole) && !host.protected;
        let schedule = role && w.schedules.contains_key(&host.attempt);
        if w.faults.len() < 2 || timer || reaper || schedule { 2 } else { 5 }
    }

    /// The launch knows it by its token, or the reaper by its id.
    fn known(&self, w: &World, host: &Host) -> bool {
        let owned = self.owned(host);
        let current = !w.launch.is_closed() && Some(w.launch.host().token()) == owned.token();
        current || w.reaps.iter().any(|r| *r.instance() == owned)
    }

    pub(super) fn owned(&self, host: &Host) -> OwnedInstance {
        match OwnedInstance::read(OURS, &self.seen(host), 0) {
            drums_provider::host::Belongs::Ours(owned) => owned,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn time(&self, w: &World) -> Micros {
        self.at(w.now)
    }
}
