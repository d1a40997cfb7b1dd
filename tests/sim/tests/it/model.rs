//! A model of leases, fencing and hand-over, searched exhaustively within its bounds; see `docs/model.md`.
//!
//! Two coordinators, one active by a fenced lease in the store; two hosts of one machine; a network that loses, delays,
//! reorders and repeats; clocks of which each may be slow; crashes of coordinators at any step. Each broken variant leaves
//! out one rule of the design, and the search must find what that rule is for.

mod canonical;

use std::collections::BTreeSet;

use stateright::{Checker, HasDiscoveries, Model, Property};

const HOSTS: usize = 2;
const COORDINATORS: usize = 2;

/// One rule of the design left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// Writes of a deposed coordinator are taken.
    TermFence,
    /// A coordinator answers agents although its own lease has lapsed.
    OwnLease,
    /// Records of a fenced generation are counted.
    GenerationFence,
    /// The coordinator judges as soon as a life lease is over on its own clock.
    DriftMargin,
    /// A coordinator that has just become active counts silence from before.
    OwnUptime,
    /// An agent goes on when its life lease has lapsed.
    LifeLease,
    /// An agent begins blocks whenever it has an order.
    DispatchLease,
}

/// Times in ticks, and how far the search goes.
struct Leases {
    without: Without,
    dispatch: u8,
    life: u8,
    /// What an agent's clock may lose over the whole time.
    drift: u8,
    leader: u8,
    ticks: u8,
    terms: u8,
}

impl Leases {
    fn new(without: Without) -> Self {
        Self { without, dispatch: 2, life: 4, drift: 1, leader: 2, ticks: 8, terms: 3 }
    }

    fn margin(&self) -> u8 {
        if self.without == Without::DriftMargin { 0 } else { self.drift }
    }
}

/// Of a run, as a row of the store and in a coordinator's memory: the first block of each host is all there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Block {
    granted: bool,
    ended: bool,
    lost: bool,
}

type Run = [Block; HOSTS];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Store {
    term: u8,
    leader: Option<usize>,
    leader_until: u8,
    generation: [u8; HOSTS],
    run: Run,
}

/// What an active coordinator has in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Active {
    term: u8,
    /// Its lease, as far as it knows.
    until: u8,
    /// When it last heard each host, or became active: so it has been up for at least as long as any host is silent.
    heard: [u8; HOSTS],
    run: Run,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Agent {
    generation: u8,
    /// When the newest answered beat or hello was sent, by its own clock.
    renewed: Option<u8>,
    /// Ticks that its clock has lost.
    slow: u8,
    measuring: bool,
    done: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Sent {
    generation: u8,
    /// By the agent's clock; of an answer, when its beat was.
    at: u8,
}

/// Whatever was sent to or by a host and may still arrive, once, often or never. One message of a kind is under way at a
/// time: a newer one overtakes, and stands for all. Orders and records are their generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Network {
    beat: Option<Sent>,
    answer: Option<Sent>,
    order: Option<u8>,
    record: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Beat,
    Answer,
    Order,
    Record,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct World {
    now: u8,
    store: Store,
    coordinators: [Option<Active>; COORDINATORS],
    agents: [Agent; HOSTS],
    network: [Network; HOSTS],
    /// When each host was last heard by any coordinator.
    heard: [u8; HOSTS],
    /// What went wrong that no state shows.
    broken: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Time passes; the clock of one agent may stand still.
    Tick(Option<usize>),
    Acquire(usize),
    Renew(usize),
    Crash(usize),
    Grant(usize, usize),
    Judge(usize, usize),
    Hello(usize, usize),
    Beat(usize),
    Finish(usize),
    /// A message of a host's arrives, at the host or a coordinator, and may arrive again. One that is lost is one that never
    /// arrives: taking it from the network would only make more states of the same.
    Deliver(Message, usize, usize),
}

impl World {
    fn clock(&self, host: usize) -> u8 {
        self.now - self.agents[host].slow
    }

    /// A transaction of a coordinator's: its whole row, under its term.
    fn write(&mut self, c: usize, run: Run, without: Without) -> bool {
        let Some(active) = &mut self.coordinators[c] else { return false };
        if active.term != self.store.term && without != Without::TermFence {
            // It is told, and stands by.
            self.coordinators[c] = None;
            return false;
        }
        active.run = run;
        self.store.run = run;
        true
    }
}

impl Model for Leases {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![self.canonical(World {
            now: 0,
            store: Store { term: 0, leader: None, leader_until: 0, generation: [1; HOSTS], run: Run::default() },
            coordinators: [None, None],
            agents: [Agent::default(); HOSTS],
            network: [Network::default(); HOSTS],
            heard: [0; HOSTS],
            broken: None,
        })]
    }

    fn actions(&self, w: &World, out: &mut Vec<Step>) {
        if w.broken.is_some() {
            return;
        }
        if w.now < self.ticks {
            out.push(Step::Tick(None));
            out.extend((0..HOSTS).filter(|h| w.agents[*h].slow < self.drift).map(|h| Step::Tick(Some(h))));
        }
        for c in 0..COORDINATORS {
            match &w.coordinators[c] {
                None => {
                    let free = w.store.leader.is_none() || w.now >= w.store.leader_until;
                    if free && w.store.term < self.terms {
                        out.push(Step::Acquire(c));
                    }
                }
                Some(active) => {
                    if w.store.leader == Some(c) && w.store.leader_until < w.now + self.leader {
                        out.push(Step::Renew(c));
                    }
                    out.push(Step::Crash(c));
                    for h in 0..HOSTS {
                        if self.may_grant(active, h) {
                            out.push(Step::Grant(c, h));
                        }
                        if self.may_judge(w, active, h) {
                            out.push(Step::Judge(c, h));
                        }
                        let answers = self.answers(w, c);
                        if answers && (w.agents[h].generation < w.store.generation[h] || w.agents[h].renewed.is_none())
                        {
                            out.push(Step::Hello(h, c));
                        }
                    }
                }
            }
        }
        for h in 0..HOSTS {
            let agent = &w.agents[h];
            if agent.renewed.is_some_and(|r| r < w.clock(h)) {
                out.push(Step::Beat(h));
            }
            if agent.measuring {
                out.push(Step::Finish(h));
            }
        }
        for h in 0..HOSTS {
            let Network { beat, answer, order, record } = w.network[h];
            for c in 0..COORDINATORS {
                if beat.is_some() && self.answers(w, c) {
                    out.push(Step::Deliver(Message::Beat, h, c));
                }
                if record.is_some() && w.coordinators[c].is_some() {
                    out.push(Step::Deliver(Message::Record, h, c));
                }
            }
            out.extend(answer.map(|_| Step::Deliver(Message::Answer, h, 0)));
            out.extend(order.map(|_| Step::Deliver(Message::Order, h, 0)));
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut w = *last;
        match step {
            Step::Tick(slow) => {
                w.now += 1;
                if let Some(h) = slow {
                    w.agents[h].slow += 1;
                }
                for h in 0..HOSTS {
                    let lapsed = w.agents[h].renewed.is_some_and(|r| w.clock(h) >= r + self.life);
                    if lapsed && self.without != Without::LifeLease {
                        w.agents[h].measuring = false;
                    }
                }
            }
            Step::Acquire(c) => {
                w.store.term += 1;
                w.store.leader = Some(c);
                w.store.leader_until = w.now + self.leader;
                let heard = if self.without == Without::OwnUptime { [0; HOSTS] } else { [w.now; HOSTS] };
                let until = w.store.leader_until;
                w.coordinators[c] = Some(Active { term: w.store.term, until, heard, run: w.store.run });
            }
            Step::Renew(c) => {
                w.store.leader_until = w.now + self.leader;
                w.coordinators[c].as_mut()?.until = w.store.leader_until;
            }
            Step::Crash(c) => w.coordinators[c] = None,
            Step::Grant(c, h) => {
                let mut run = w.coordinators[c]?.run;
                let generation = w.store.generation[h];
                run[h].granted = true;
                if w.write(c, run, self.without) {
                    w.network[h].order = Some(generation);
                }
            }
            Step::Judge(c, h) => {
                let mut run = w.coordinators[c]?.run;
                run[h].lost = true;
                let heard = w.heard[h];
                if w.write(c, run, self.without) {
                    w.store.generation[h] += 1;
                    if w.now < heard + self.life {
                        w.broken = Some("judged although it was heard within a life lease");
                    } else if w.agents[h].measuring {
                        w.broken = Some("judged while it measures");
                    }
                }
            }
            Step::Hello(h, c) => {
                let active = w.coordinators[c].as_mut()?;
                active.heard[h] = w.now;
                w.heard[h] = w.now;
                let generation = w.store.generation[h];
                let clock = w.clock(h);
                let agent = &mut w.agents[h];
                if generation > agent.generation {
                    // What it was given before is called off.
                    agent.measuring = false;
                }
                agent.generation = generation;
                agent.renewed = Some(clock);
            }
            Step::Beat(h) => {
                w.network[h].beat = Some(Sent { generation: w.agents[h].generation, at: w.clock(h) });
            }
            Step::Finish(h) => {
                w.agents[h].measuring = false;
                w.agents[h].done = true;
                w.network[h].record = Some(w.agents[h].generation);
            }
            Step::Deliver(message, h, c) => self.deliver(&mut w, message, h, c)?,
        }
        Some(self.canonical(w)).filter(|w| w != last)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one host of a machine measures at a time", |_, w: &World| {
                w.agents.iter().filter(|a| a.measuring).count() <= 1
            }),
            Property::always("nothing goes wrong on the way", |_, w: &World| w.broken.is_none()),
            Property::sometimes("both blocks end", |_, w: &World| w.store.run.iter().all(|b| b.ended)),
            Property::sometimes("a host is lost, and the other one's block ends", |_, w: &World| {
                (0..HOSTS).any(|h| w.store.run[h].lost && w.store.run[1 - h].ended)
            }),
            Property::sometimes("the second coordinator ends what the first began", |_, w: &World| {
                w.store.term == 2 && w.store.run.iter().all(|b| b.ended && !b.lost)
            }),
        ]
    }
}

impl Leases {
    /// Whether a coordinator speaks with agents: while its own lease holds, by its own clock.
    fn answers(&self, w: &World, c: usize) -> bool {
        w.coordinators[c].as_ref().is_some_and(|a| w.now < a.until || self.without == Without::OwnLease)
    }

    /// A turn: no other host of the machine has an open block, but for lost ones.
    fn may_grant(&self, active: &Active, h: usize) -> bool {
        let run = &active.run;
        let open = |o: usize| run[o].granted && !run[o].ended && !run[o].lost;
        !run[h].granted && !run[h].lost && !(0..HOSTS).any(open)
    }

    fn may_judge(&self, w: &World, active: &Active, h: usize) -> bool {
        let silent = w.now - active.heard[h];
        !active.run[h].lost && silent >= self.life + self.margin()
    }

    fn deliver(&self, w: &mut World, message: Message, h: usize, c: usize) -> Option<()> {
        match message {
            Message::Beat => {
                let beat = w.network[h].beat?;
                if beat.generation == w.store.generation[h] {
                    w.coordinators[c].as_mut()?.heard[h] = w.now;
                    w.heard[h] = w.now;
                    w.network[h].answer = Some(beat);
                }
            }
            Message::Answer => {
                let answer = w.network[h].answer?;
                let agent = &mut w.agents[h];
                if answer.generation == agent.generation {
                    agent.renewed = agent.renewed.max(Some(answer.at));
                }
            }
            Message::Order => {
                let clock = w.clock(h);
                let agent = &mut w.agents[h];
                let dispatch = agent.renewed.is_some_and(|r| clock < r + self.dispatch);
                let begins = w.network[h].order? == agent.generation && !agent.done && !agent.measuring;
                if begins && (dispatch || self.without == Without::DispatchLease) {
                    agent.measuring = true;
                    if !dispatch {
                        w.broken = Some("a block began after the dispatch lease was lost");
                    }
                }
            }
            Message::Record => {
                let late = w.network[h].record? < w.store.generation[h];
                let mut run = w.coordinators[c]?.run;
                let counts = !run[h].ended && (!late || self.without == Without::GenerationFence);
                if counts {
                    run[h].ended = true;
                    if w.write(c, run, self.without) && late {
                        w.broken = Some("a record of a fenced generation was counted");
                    }
                }
            }
        }
        Some(())
    }
}

fn search(without: Without, until: HasDiscoveries) -> impl Checker<Leases> {
    Leases::new(without).checker().threads(2).finish_when(until).spawn_bfs().join()
}

#[test]
fn leases_fencing_and_hand_over_keep_their_promises_within_the_bounds() {
    let checker = search(Without::Nothing, HasDiscoveries::All);
    println!("{} states, {} of them distinct", checker.state_count(), checker.unique_state_count());
    checker.assert_properties();
    assert!(checker.unique_state_count() > 300_000, "a model that is too small shows nothing");
}

/// Each rule is there for something: without it the search finds what it is for.
#[test]
fn every_rule_that_is_left_out_is_missed() {
    for (without, property) in [
        (Without::TermFence, "one host of a machine measures at a time"),
        (Without::OwnLease, "nothing goes wrong on the way"),
        (Without::GenerationFence, "nothing goes wrong on the way"),
        (Without::DriftMargin, "nothing goes wrong on the way"),
        (Without::OwnUptime, "nothing goes wrong on the way"),
        (Without::LifeLease, "nothing goes wrong on the way"),
        (Without::DispatchLease, "nothing goes wrong on the way"),
    ] {
        let checker = search(without, HasDiscoveries::AllOf(BTreeSet::from([property])));
        let path = checker.discovery(property);
        let path = path.unwrap_or_else(|| panic!("without {without:?} nothing breaks \"{property}\""));
        println!("without {without:?}: {} steps to {:?}", path.into_vec().len(), property);
    }
}
