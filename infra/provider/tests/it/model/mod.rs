//! A model of one paid host's life and death, searched exhaustively within its bounds; see `docs/model-paid-hosts.md`.
//!
//! Launch, reaper and sweep are the real ones; round them are a cloud, a host with its timer, agent and watchdog, a
//! one-time schedule, and a coordinator that can be killed between any two lines. Minutes are the ticks. Up to two faults
//! may happen, each at any moment. Each broken variant leaves one layer or rule out, and the search must find what it is
//! for.

mod coordinator;
mod physics;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use drums_common::clock::Micros;
use drums_provider::{
    cloud::{Instance, InstanceState},
    failure::FailureKind,
    launch::{Launch, Patience, State},
    reap::Reap,
    sweep::Scope,
};
use stateright::{Checker, HasDiscoveries, Model, Property};

use super::support::MINUTE_MS;

/// What may fail. Those of the host are of whichever host is alive then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Fault {
    /// It never comes back.
    CoordinatorDead,
    /// It is started again in the next minute.
    CoordinatorKilled,
    /// A call is done and its answer lost, or done later than anybody waits, or never.
    Call,
    /// The coordinator's: every call is denied from now on.
    Credentials,
    /// No process of the host runs any more: timer, agent, watchdog.
    KernelHung,
    /// The agent alone; its watchdog is another process.
    AgentDead,
    NetworkCut,
    /// The guest's clock is years behind.
    GuestClock,
    ScheduleMissing,
    /// Seen only when it fires.
    ScheduleRole,
    Sweeper,
    /// The deadline's tag is moved to later.
    TagLater,
    Protected,
    /// The shutdown behaviour is edited to stop.
    StopsOnly,
    /// EC2 ends it: its hardware broke.
    HostGone,
}

const FAULTS: [Fault; 15] = [
    Fault::CoordinatorDead,
    Fault::CoordinatorKilled,
    Fault::Call,
    Fault::Credentials,
    Fault::KernelHung,
    Fault::AgentDead,
    Fault::NetworkCut,
    Fault::GuestClock,
    Fault::ScheduleMissing,
    Fault::ScheduleRole,
    Fault::Sweeper,
    Fault::TagLater,
    Fault::Protected,
    Fault::StopsOnly,
    Fault::HostGone,
];

/// One layer or rule left out; or, of the last, one added that should not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    GuestTimer,
    /// The timer knows the absolute deadline alone, and not the registered lifetime.
    Lifetime,
    /// The lease is the agent's alone.
    Watchdog,
    Schedule,
    Sweeper,
    Reaper,
    /// Launch, reaper and sweeper do not switch protection off.
    Unprotect,
    /// The launch is stored after its call and not before.
    Intent,
    /// Nothing shown is taken for nothing there.
    Settling,
    /// What was given up is taken for going.
    Leaving,
    /// The boot bound is four minutes.
    BootBound,
    /// The boot bound goes on while nobody listens.
    Attention,
    /// Declared silence does not count as heard of.
    Quiet,
    /// A coordinator that was started again judges silence from before.
    OwnUptime,
    /// And with an alarm that kills whoever did not beat for five minutes (EXP-011).
    NoHeartbeatAlarm,
}

/// Times in minutes.
struct Paid {
    without: Without,
    /// How many faults may happen.
    faults: usize,
    deadline: u8,
    boot: u8,
    life: u8,
    /// How long one declared silence is; none without.
    quiet: Option<u8>,
    /// How long one outage of the coordinator is, that is no fault; none without.
    outage: Option<u8>,
    /// A sweep's period, and how long it takes is within it.
    sweep_every: u8,
    /// Of a sweep's period, how many minutes to begin in are searched.
    phases: u8,
    /// Silences and outages begin in minutes that this divides.
    grid: u8,
    patience: Patience,
    scope: Scope,
    launch: Arc<Launch>,
    /// What the cloud makes, by attempt and place.
    made: Vec<[Instance; 2]>,
}

/// A host, as it really is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    attempt: u16,
    place: usize,
    made: u8,
    state: InstanceState,
    tag_later: bool,
    protected: bool,
    stops_only: bool,
    kernel_hung: bool,
    agent_dead: bool,
    cut: bool,
    clock_behind: bool,
    timer: bool,
    enrolled: bool,
    /// When a beat of it was answered last.
    heard: u8,
    /// End of the silence that was declared and acknowledged.
    quiet_until: u8,
}

/// What the coordinator does next; between any two of these it can be killed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Turn {
    Launch,
    Run,
    Ran(Result<usize, FailureKind>),
    Put(Micros),
    Scheduled(Result<(), FailureKind>),
    Mend,
    Mended(Result<(), FailureKind>),
    Reap(usize),
    ReapAct(usize, ReapAct),
    ReapHeard(usize, ReapAct, Result<(), FailureKind>),
    Strays,
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ReapAct {
    Terminate,
    Unprotect,
    DeleteSchedule,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: u8,
    /// A sweep is in the minutes that leave this remainder.
    phase: u8,
    faults: BTreeSet<Fault>,
    // On the coordinator's disk.
    launch: Arc<Launch>,
    reaps: Vec<Arc<Reap>>,
    // Its process.
    up_since: Option<u8>,
    turn: Turn,
    moved: bool,
    passes: u8,
    /// What a coordinator that does not store before it calls has in memory alone.
    unstored: Option<Arc<Launch>>,
    // The cloud.
    hosts: Vec<Host>,
    late: Option<(u8, u16, usize)>,
    /// By attempt: when it is due, and whether it fired.
    schedules: BTreeMap<u16, (Micros, bool)>,
    no_room: bool,
    quiet_used: bool,
    outage_ends: Option<u8>,
    outage_used: bool,
    broken: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Plain,
    ReplyLost,
    Late,
    Never,
    /// No room there; that is no fault.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The minute ends; a schedule that is due may fire in the next one.
    Minute {
        schedule_late: bool,
    },
    Coordinator(Outcome),
    Fault(Fault),
    Quiet,
    Outage,
}

impl Model for Paid {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        let world = |phase| World {
            now: 0,
            phase,
            faults: BTreeSet::new(),
            launch: self.launch.clone(),
            reaps: Vec::new(),
            up_since: Some(0),
            turn: Turn::Launch,
            moved: false,
            passes: 3,
            unstored: None,
            hosts: Vec::new(),
            late: None,
            schedules: BTreeMap::new(),
            no_room: false,
            quiet_used: self.quiet.is_none(),
            outage_ends: None,
            outage_used: self.outage.is_none(),
            broken: None,
        };
        (0..self.phases).map(world).collect()
    }

    fn actions(&self, w: &World, out: &mut Vec<Step>) {
        let powerless = w.up_since.is_none() || w.faults.contains(&Fault::Credentials);
        let settled = powerless || w.reaps.iter().all(|r| r.receipt().is_some());
        let gone = w.late.is_none() && w.hosts.iter().all(|h| h.state.is_going());
        let over = w.launch.is_closed() && gone && settled && w.outage_ends.is_none();
        if w.broken.is_some() || over || w.now >= self.deadline + 8 {
            return;
        }
        let room = w.faults.len() < self.faults;
        if w.turn == Turn::Rest {
            out.push(Step::Minute { schedule_late: false });
            if w.schedules.values().any(|(at, fired)| !fired && *at <= self.at(w.now + 1)) {
                out.push(Step::Minute { schedule_late: true });
            }
        } else {
            out.push(Step::Coordinator(Outcome::Plain));
            let calls = matches!(w.turn, Turn::Run | Turn::Put(_) | Turn::Mend | Turn::ReapAct(..));
            if room && calls && !w.faults.contains(&Fault::Credentials) {
                out.push(Step::Coordinator(Outcome::ReplyLost));
                out.push(Step::Coordinator(Outcome::Never));
                if w.turn == Turn::Run {
                    out.push(Step::Coordinator(Outcome::Late));
                }
            }
            if w.turn == Turn::Run && !w.no_room && !w.faults.contains(&Fault::Credentials) {
                out.push(Step::Coordinator(Outcome::Full));
            }
        }
        if room {
            let possible = FAULTS.iter().filter(|f| !w.faults.contains(f) && self.can_fail(w, **f));
            out.extend(possible.map(|f| Step::Fault(*f)));
        }
        let begins = w.now.is_multiple_of(self.grid) && w.turn == Turn::Rest && w.up_since.is_some();
        if begins && !w.quiet_used && w.hosts.last().is_some_and(|h| h.enrolled && !h.state.is_going()) {
            out.push(Step::Quiet);
        }
        if begins && !w.outage_used {
            out.push(Step::Outage);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut w = last.clone();
        match step {
            Step::Minute { schedule_late } => self.minute(&mut w, schedule_late),
            Step::Coordinator(outcome) => {
                if !matches!(outcome, Outcome::Plain | Outcome::Full) {
                    w.faults.insert(Fault::Call);
                }
                self.turn(&mut w, outcome);
            }
            Step::Fault(fault) => self.fail(&mut w, fault),
            Step::Quiet => {
                w.quiet_used = true;
                let until = w.now + self.quiet?;
                w.hosts.last_mut()?.quiet_until = until;
            }
            Step::Outage => {
                w.outage_used = true;
                w.outage_ends = Some(w.now + self.outage?);
                w.up_since = None;
                w.turn = Turn::Rest;
            }
        }
        Some(w)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![Property::always("nothing goes wrong", |_, w: &World| w.broken.is_none())];
        let mut sometimes = |name, holds: fn(&Self, &World) -> bool| all.push(Property::sometimes(name, holds));
        sometimes("a host is ready", |_, w| matches!(w.launch.state(), State::Ready { .. }));
        sometimes("a host is dead and has its receipt", |_, w| {
            w.launch.is_closed() && w.reaps.iter().any(|r| r.receipt().is_some())
        });
        if self.faults > 0 {
            sometimes("a second instance takes a first one's place", |_, w| {
                w.hosts.len() == 2 && w.hosts[0].state.is_going() && w.hosts[1].enrolled
            });
        }
        all
    }
}

impl Paid {
    fn at(&self, minute: u8) -> Micros {
        super::support::START.plus_ms(u64::from(minute) * MINUTE_MS)
    }
}

fn search(model: Paid, until: HasDiscoveries) -> impl Checker<Paid> {
    model.checker().threads(2).finish_when(until).spawn_bfs().join()
}

fn report(what: &str, checker: &impl Checker<Paid>) {
    println!("{what}: {} states, {} of them distinct", checker.state_count(), checker.unique_state_count());
    if let Some(path) = checker.discovery("nothing goes wrong") {
        let usual = |s: &Step| matches!(s, Step::Coordinator(Outcome::Plain) | Step::Minute { schedule_late: false });
        let steps: Vec<_> = path.clone().into_actions().into_iter().filter(|s| !usual(s)).collect();
        let end = path.into_states().pop();
        println!("minute {:?}: {:?} after {steps:?}", end.as_ref().map(|w| w.now), end.as_ref().and_then(|w| w.broken));
    }
}

/// Deadlines: a short life, so that two faults fit in everywhere.
fn deadlines(without: Without, faults: usize) -> Paid {
    Paid::new(without, faults, 9, 1, 30)
}

/// Leases: a life lease that is shorter than the host's life.
fn orphans(without: Without) -> Paid {
    Paid { phases: 1, ..Paid::new(without, 2, 9, 1, 3) }
}

/// A boot that takes longer than anybody waits, so that there is a relaunch whatever else fails.
fn slow_boot(without: Without, faults: usize) -> Paid {
    Paid { phases: 1, ..Paid::new(without, faults, 40, 17, 60) }
}

/// What must not kill: a boot of six minutes, forty quiet minutes, an outage of nearly a life lease.
fn healthy(without: Without, faults: usize) -> Paid {
    let grid = if faults == 0 { 5 } else { 30 };
    Paid { quiet: Some(40), outage: Some(28), phases: 1, grid, ..Paid::new(without, faults, 90, 6, 30) }
}

#[test]
fn no_two_faults_let_a_paid_host_outlive_its_bound() {
    let checker = search(deadlines(Without::Nothing, 2), HasDiscoveries::All);
    report("deadlines", &checker);
    checker.assert_properties();
    assert!(checker.unique_state_count() > 50_000, "a model that is too small shows nothing");
}

#[test]
fn no_two_faults_let_an_orphan_live_beyond_its_lease() {
    let checker = search(orphans(Without::Nothing), HasDiscoveries::All);
    report("orphans", &checker);
    assert!(checker.discovery("nothing goes wrong").is_none());
}

#[test]
fn a_slow_boot_forty_quiet_minutes_and_an_outage_kill_no_healthy_host() {
    for faults in [0, 1] {
        let checker = search(healthy(Without::Nothing, faults), HasDiscoveries::All);
        report(&format!("healthy, {faults} faults"), &checker);
        assert!(checker.discovery("nothing goes wrong").is_none());
        assert!(checker.discovery("a host is dead and has its receipt").is_some());
    }
}

#[test]
fn a_host_that_is_given_up_and_launched_again_is_never_two_instances() {
    let checker = search(slow_boot(Without::Nothing, 1), HasDiscoveries::All);
    report("slow boot", &checker);
    assert!(checker.discovery("nothing goes wrong").is_none());
    assert!(checker.discovery("a host is dead and has its receipt").is_some());
}

#[test]
fn every_layer_and_every_rule_that_is_left_out_is_missed() {
    let cases = [
        (deadlines(Without::GuestTimer, 2), "it outlived its deadline"),
        (deadlines(Without::Lifetime, 2), "it outlived its deadline"),
        (orphans(Without::Watchdog), "it outlived its lease"),
        (deadlines(Without::Schedule, 2), "it outlived its deadline"),
        (deadlines(Without::Sweeper, 2), "it outlived its deadline"),
        (deadlines(Without::Reaper, 2), "it outlived its deadline"),
        (deadlines(Without::Unprotect, 2), "it outlived its deadline"),
        (deadlines(Without::Intent, 2), "an instance is unknown"),
        (deadlines(Without::Settling, 2), "an instance is unknown"),
        (slow_boot(Without::Leaving, 1), "a host is two instances"),
        (healthy(Without::BootBound, 0), "a booting host was killed within its bound"),
        (healthy(Without::Attention, 0), "a booting host was killed within its bound"),
        (healthy(Without::Quiet, 0), "a healthy host was killed"),
        (healthy(Without::OwnUptime, 0), "a healthy host was killed"),
        (healthy(Without::NoHeartbeatAlarm, 0), "a healthy host was killed"),
    ];
    for (model, what) in cases {
        let without = model.without;
        let checker = search(model, HasDiscoveries::AllOf(BTreeSet::from(["nothing goes wrong"])));
        report(&format!("without {without:?}"), &checker);
        let path = checker.discovery("nothing goes wrong");
        let path = path.unwrap_or_else(|| panic!("without {without:?} nothing goes wrong"));
        assert_eq!(path.into_states().last().and_then(|w| w.broken), Some(what), "without {without:?}");
    }
}
