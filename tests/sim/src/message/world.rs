//! One simulated world: an event queue in virtual time, hosts, a coordinator, paths, and somebody who breaks things.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BinaryHeap},
    sync::{Arc, Mutex},
};

use drums_agent::spool::Spool;
use drums_common::{draw::Draw, lease::LeaseTimes, wire::latest::AgentHello};
use drums_coordinator::net::ports::Peer;

use super::{
    agent::Host,
    faults::{Faults, Temper},
    network::{Conn, Datagram, Lane, Path, Stream, Way},
    serving::Life,
};
use crate::{
    fleet::{self, HOSTS},
    home::Home,
    measurer::{Locks, Manners, SharedTruth, lock},
    time::{HOUR, MINUTE, MS, MachineClock, S, TrueTime},
    trace::Trace,
    truth::{Broken, Counted, Truth},
};

#[derive(Debug)]
pub enum Event {
    Datagram {
        host: usize,
        conn: Conn,
        way: Way,
        datagram: Datagram,
    },
    /// The first message of a stream arrives, if the path is open.
    Pump {
        host: usize,
        conn: Conn,
        way: Way,
        lane: Lane,
    },
    Beat {
        host: usize,
        life: u64,
        conn: Conn,
    },
    Measure {
        host: usize,
        life: u64,
        ticket: u64,
    },
    Send {
        host: usize,
        life: u64,
    },
    Dial {
        host: usize,
        life: u64,
    },
    /// The dial was not answered.
    NoAnswer {
        host: usize,
        life: u64,
        conn: Conn,
    },
    StartAgent {
        host: usize,
    },
    /// The probe of an older connection went unanswered.
    Admit {
        life: u64,
        host: usize,
        conn: Conn,
        hello: Box<AgentHello>,
    },
    Look {
        life: u64,
    },
    StartCoordinator,
    Attentive {
        life: u64,
    },
    Operator,
    Fault,
}

struct Due {
    at: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    /// The earliest is the greatest; of equals the first that was scheduled.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub hours: u64,
    pub times: LeaseTimes,
    /// What the invariants take the leases to be.
    pub held_to: LeaseTimes,
    pub temper: Temper,
    /// Runs are made and cancelled by themselves.
    pub operator: bool,
    pub manners: Manners,
    pub aloud: bool,
}

impl Setup {
    pub fn of_seed(seed: u64, hours: u64) -> Self {
        let mut draw = Draw::new(seed, &["setup"]);
        let temper = [Temper::Calm, Temper::Rough, Temper::Rough, Temper::Wild][draw.index(4)];
        let manners = Manners { overruns: draw.below(3), unsettled: draw.below(6), breaks: draw.below(3), mute: false };
        // The defaults, or a life lease that lapses more often, and beats that leave time for more hours.
        let life_ms = [1_800_000, 1_800_000, 600_000, 180_000][draw.index(4)];
        let beat_ms = [500, 1_000, 2_000, 2_000][draw.index(4)];
        let times = LeaseTimes { life_ms, beat_ms, silent_ms: 5 * beat_ms, ..LeaseTimes::default() };
        Self { seed, hours, times, held_to: times, temper, operator: true, manners, aloud: false }
    }
}

pub struct World {
    pub now_us: u64,
    pub(super) time: Arc<TrueTime>,
    queue: BinaryHeap<Due>,
    pub(super) numbered: u64,
    pub draw: Draw,
    pub trace: Trace,
    pub hosts: Vec<Host>,
    pub paths: Vec<Path>,
    pub(super) streams: BTreeMap<(Conn, Way, Lane), Stream>,
    pub(super) next_conn: Conn,
    pub home: Home,
    pub(super) clock: MachineClock,
    pub coordinator: Option<Life>,
    pub(super) lives: u64,
    pub coordinator_stalled_until: u64,
    pub(super) times: LeaseTimes,
    pub(super) tick_us: u64,
    pub truth: SharedTruth,
    pub(super) locks: Locks,
    pub(super) faults: Faults,
    _dir: tempfile::TempDir,
}

/// What a world came to.
#[derive(Clone, Debug)]
pub struct Ended {
    pub digest: u64,
    pub events: u64,
    pub hours: f64,
    pub counted: Counted,
}

/// Runs a world to its end; a broken invariant is told with its seed.
pub fn run(setup: &Setup) -> Result<Ended, String> {
    let mut world = World::new(setup).map_err(|e| format!("seed {}: {e}", setup.seed))?;
    let end = setup.hours * HOUR;
    let went = world.until(end).and_then(|()| world.come_to_rest());
    match went {
        Ok(()) => Ok(Ended {
            digest: world.trace.digest(),
            events: world.trace.events(),
            hours: world.now_us as f64 / HOUR as f64,
            counted: lock(&world.truth).counted.clone(),
        }),
        Err(broken) => Err(format!(
            "seed {} ({} hours, {:?}) after {:.3} hours: {broken}\nthe last events:\n{}\nagain: cargo xtask sim --seed {} -- --worlds 1 --aloud",
            setup.seed,
            setup.hours,
            setup.temper,
            world.now_us as f64 / HOUR as f64,
            world.trace.recent(),
            setup.seed
        )),
    }
}

/// On memory, if there is a file system for it: what an agent's disk does is simulated, its speed is not.
fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

impl World {
    pub fn new(setup: &Setup) -> Result<Self, Broken> {
        let dir = scratch().map_err(|e| format!("cannot make a folder for a simulated world: {e}"))?;
        let mut draw = Draw::new(setup.seed, &["world"]);
        let time = Arc::new(TrueTime::default());
        let peers: Vec<Peer> = HOSTS.iter().map(|(name, _)| fleet::peer(name)).collect();
        let home = Home::furnish(dir.path(), &peers).map_err(|e| drums_common::telemetry::chain(&e))?;
        let clock = MachineClock::draw(&time, &mut draw);
        let mut machines: BTreeMap<&str, MachineClock> = BTreeMap::new();
        let hosts: Vec<Host> = HOSTS
            .iter()
            .map(|(name, machine)| Host {
                name: fleet::host(name),
                machine,
                clock: machines.entry(machine).or_insert_with(|| MachineClock::draw(&time, &mut draw)).clone(),
                dir: dir.path().join(name),
                manners: setup.manners,
                stalled_until: 0,
                agent: None,
                lives: 0,
            })
            .collect();
        let mut world = Self {
            now_us: 0,
            time,
            queue: BinaryHeap::new(),
            numbered: 0,
            trace: Trace::new(setup.aloud),
            paths: hosts.iter().map(|_| Path::draw(&mut draw)).collect(),
            hosts,
            streams: BTreeMap::new(),
            next_conn: 1,
            home,
            clock,
            coordinator: None,
            lives: 0,
            coordinator_stalled_until: 0,
            times: setup.times,
            // The real one looks twice a second, when it gets to it.
            tick_us: [500, 2_000, 2_000][draw.index(3)] * MS,
            truth: Arc::new(Mutex::new(Truth::new(setup.held_to, &HOSTS))),
            locks: Locks::default(),
            faults: Faults::new(setup.temper, Draw::new(setup.seed, &["faults"])),
            draw,
            _dir: dir,
        };
        for host in &world.hosts {
            lock(&world.truth).host(&host.name).ppm = host.clock.ppm();
        }
        world.at(0, Event::StartCoordinator);
        for host in 0..world.hosts.len() {
            let after = world.draw.below(3 * S);
            world.at(after, Event::StartAgent { host });
        }
        if setup.operator {
            world.at(5 * S, Event::Operator);
        }
        if let Some(first) = world.faults.next_in() {
            world.at(first, Event::Fault);
        }
        Ok(world)
    }

    pub fn at(&mut self, at: u64, event: Event) {
        self.numbered += 1;
        self.queue.push(Due { at: at.max(self.now_us), number: self.numbered, event });
    }

    pub fn after(&mut self, us: u64, event: Event) {
        self.at(self.now_us + us, event);
    }

    /// Goes on until `end`, checking after every event.
    pub fn until(&mut self, end: u64) -> Result<(), Broken> {
        while self.queue.peek().is_some_and(|d| d.at <= end) {
            self.step()?;
        }
        self.now_us = end;
        self.time.set(end);
        Ok(())
    }

    fn step(&mut self) -> Result<(), Broken> {
        let Some(due) = self.queue.pop() else { return Ok(()) };
        self.now_us = due.at;
        self.time.set(due.at);
        if let Some(until) = self.held_until(&due.event) {
            // A stopped process finds what came meanwhile in the order in which it came.
            self.at(until, due.event);
            return Ok(());
        }
        self.perform(due.event)?;
        if self.coordinator.is_some() && self.home.burnt() {
            let down = self.draw.below(20 * S);
            self.kill_coordinator(down)?;
        }
        Ok(())
    }

    /// Until when the process that this is for is stopped, if it is.
    fn held_until(&self, event: &Event) -> Option<u64> {
        let until = match event {
            Event::Datagram { way: Way::Up, .. }
            | Event::Pump { way: Way::Up, .. }
            | Event::Admit { .. }
            | Event::Look { .. }
            | Event::Operator => self.coordinator_stalled_until,
            Event::Datagram { host, way: Way::Down, .. }
            | Event::Pump { host, way: Way::Down, .. }
            | Event::Beat { host, .. }
            | Event::Measure { host, .. }
            | Event::Send { host, .. }
            | Event::Dial { host, .. }
            | Event::NoAnswer { host, .. } => self.hosts[*host].stalled_until,
            Event::StartAgent { .. } | Event::StartCoordinator | Event::Attentive { .. } | Event::Fault => 0,
        };
        (until > self.now_us).then_some(until)
    }

    fn perform(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::Datagram { host, conn, way: Way::Up, datagram } => self.datagram_up(host, conn, datagram),
            Event::Datagram { host, conn, way: Way::Down, datagram } => self.datagram_down(host, conn, datagram),
            Event::Pump { host, conn, way, lane } => self.pump(host, conn, way, lane),
            Event::Beat { host, life, conn } => self.beat(host, life, conn),
            Event::Measure { host, life, ticket } => match &self.hosts[host].agent {
                Some(a) if a.life == life && a.ticket == ticket => self.measure(host),
                _ => Ok(()),
            },
            Event::Send { host, life } if self.lives_on(host, life) => self.send(host),
            Event::Dial { host, life } if self.lives_on(host, life) => {
                self.dial(host);
                Ok(())
            }
            Event::NoAnswer { host, life, conn } if self.lives_on(host, life) => {
                let agent = self.hosts[host].agent.as_ref();
                if agent.and_then(|a| a.conn.as_ref()).is_some_and(|c| c.id == conn && c.welcome.is_none()) {
                    self.hang_up(host);
                }
                Ok(())
            }
            Event::Send { .. } | Event::Dial { .. } | Event::NoAnswer { .. } => Ok(()),
            Event::StartAgent { host } => self.start_agent(host),
            Event::Admit { life, host, conn, hello } if self.coordinator.as_ref().is_some_and(|l| l.number == life) => {
                self.admit(host, conn, *hello)
            }
            Event::Admit { .. } => Ok(()),
            Event::Look { life } if self.coordinator.as_ref().is_some_and(|l| l.number == life) => {
                self.after(self.tick_us, Event::Look { life });
                self.turn()
            }
            Event::Look { .. } => Ok(()),
            Event::StartCoordinator => self.start_coordinator(),
            Event::Attentive { life } => {
                if self.coordinator.as_ref().is_some_and(|l| l.number == life)
                    && self.now_us >= self.coordinator_stalled_until
                {
                    lock(&self.truth).coordinator(true, self.now_us);
                }
                Ok(())
            }
            Event::Operator => self.operate(),
            Event::Fault => self.fault(),
        }
    }

    pub(super) fn lives_on(&self, host: usize, life: u64) -> bool {
        self.hosts[host].agent.as_ref().is_some_and(|a| a.life == life)
    }

    fn fault(&mut self) -> Result<(), Broken> {
        let fault = self.faults.draw();
        let kind = fault.apply(self)?;
        lock(&self.truth).fault(kind);
        if let Some(next) = self.faults.next_in() {
            self.after(next, Event::Fault);
        }
        Ok(())
    }

    /// Everything comes back and heals, and nothing more is asked: then nothing may stay open or owed.
    fn come_to_rest(&mut self) -> Result<(), Broken> {
        self.trace.note(self.now_us, "heals", 0, 0);
        self.queue.retain(|d| !matches!(d.event, Event::Operator | Event::Fault));
        self.coordinator_stalled_until = self.coordinator_stalled_until.min(self.now_us);
        for path in &mut self.paths {
            path.heal();
        }
        for host in 0..self.hosts.len() {
            self.hosts[host].stalled_until = self.hosts[host].stalled_until.min(self.now_us);
            if self.hosts[host].agent.is_none() {
                self.start_agent(host)?;
            }
        }
        self.start_coordinator()?;
        // Whatever was held for a stopped process is due now.
        let life = self.coordinator.as_ref().map_or(0, |l| l.number);
        self.at(self.now_us, Event::Attentive { life });
        let end = self.now_us + 4 * HOUR;
        while self.now_us < end {
            self.until(self.now_us + MINUTE)?;
            if lock(&self.truth).rest().is_ok() {
                let truth = self.truth.clone();
                let mut truth = lock(&truth);
                let ids: Vec<_> = truth.runs().flat_map(|s| s.hosts.iter().map(|h| (s.id, h.host.clone()))).collect();
                for (run, host) in ids {
                    self.check_evidence(&mut truth, run, &host)?;
                }
                return Ok(());
            }
        }
        lock(&self.truth).rest().map_err(|e| format!("four quiet hours later {e}"))
    }

    /// Looks at an agent's disk.
    pub fn spool(&self, host: usize) -> Option<&Arc<Spool>> {
        self.hosts[host].agent.as_ref().map(|a| &a.spool)
    }
}
