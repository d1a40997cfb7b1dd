//! The coordinator's side of a world: its lives, connections, and what operators ask of it.

use std::{collections::BTreeMap, pin::Pin, sync::Arc};

use drums_common::{
    clock::Clock as _,
    failure::FailureClass,
    ids::{ExperimentId, HostId, RunId},
    wire::latest::{AgentHello, EvidenceBatch, ToAgent, ToCoordinator},
};
use drums_coordinator::{
    core::run::RunState,
    net::ports::{Accepted, Order, Peer, Ports as _},
    store::Who,
    tasks::{Control, Driver, NewRun},
};
use futures_util::FutureExt as _;
use tokio::sync::watch;

use super::{
    network::{Conn, Datagram, Lane, Message, Way},
    world::{Event, World},
};
use crate::{
    fleet,
    home::{now, renews},
    measurer::lock,
    time::{MINUTE, MS, S},
    truth::{Broken, Truth},
};

/// A new agent disputes the connection of a dead one for this long.
const PROBE_US: u64 = S;

/// One life of a coordinator.
pub struct Life {
    pub number: u64,
    pub control: Arc<Control>,
    pub driver: Driver,
    pub(super) conns: BTreeMap<Conn, Served>,
    /// The connection that each host's name belongs to.
    registry: BTreeMap<HostId, (Conn, u64)>,
}

/// A connection as the coordinator has it.
pub(super) struct Served {
    host: usize,
    peer: Peer,
    /// Once it is welcomed.
    orders: Option<watch::Receiver<Order>>,
}

impl World {
    pub(super) fn start_coordinator(&mut self) -> Result<(), Broken> {
        if self.coordinator.is_some() {
            return Ok(());
        }
        self.lives += 1;
        let number = self.lives;
        let opened = now(self.home.open(Arc::new(self.clock.clone()), self.times));
        let opened = opened.ok_or("the coordinator waits for something at its start")?;
        let (control, driver) = opened.map_err(|e| drums_common::telemetry::chain(&e))?;
        self.coordinator = Some(Life { number, control, driver, conns: BTreeMap::new(), registry: BTreeMap::new() });
        self.trace.note(self.now_us, "coordinator starts", number, 0);
        {
            let mut truth = lock(&self.truth);
            truth.up_us = Some(self.now_us);
            truth.coordinator(true, self.now_us);
        }
        self.at(self.now_us, Event::Look { life: number });
        Ok(())
    }

    /// kill -9.
    pub fn kill_coordinator(&mut self, down_us: u64) -> Result<(), Broken> {
        let Some(life) = self.coordinator.take() else { return Ok(()) };
        // It may have fenced somebody and got no further.
        self.home.tell_fences(&mut lock(&self.truth), self.now_us)?;
        self.trace.note(self.now_us, "coordinator killed", life.number, down_us);
        for conn in life.conns.keys() {
            self.streams.remove(&(*conn, Way::Down, Lane::Control));
            self.streams.remove(&(*conn, Way::Down, Lane::Evidence));
        }
        self.coordinator_stalled_until = 0;
        {
            let mut truth = lock(&self.truth);
            truth.up_us = None;
            truth.coordinator(false, self.now_us);
        }
        self.after(down_us, Event::StartCoordinator);
        Ok(())
    }

    pub fn stall_coordinator(&mut self, us: u64) {
        let Some(life) = &self.coordinator else { return };
        let life = life.number;
        self.trace.note(self.now_us, "coordinator stalls", us, 0);
        self.coordinator_stalled_until = self.coordinator_stalled_until.max(self.now_us + us);
        // A shorter one is no gap in its attention.
        if us >= 2_500 * MS {
            lock(&self.truth).coordinator(false, self.now_us);
            self.at(self.coordinator_stalled_until, Event::Attentive { life });
        }
    }

    pub(super) fn datagram_up(&mut self, host: usize, conn: Conn, datagram: Datagram) -> Result<(), Broken> {
        let Some(life) = &mut self.coordinator else { return Ok(()) };
        let Some(served) = life.conns.get(&conn) else {
            if !matches!(datagram, Datagram::Close | Datagram::Reset) {
                self.send_datagram(host, conn, Way::Down, Datagram::Reset);
            }
            return Ok(());
        };
        match datagram {
            Datagram::Beat(beat) if served.orders.is_some() => {
                let ack = life.control.beat(&served.peer, &beat, self.clock.boottime());
                if ack.is_some() || renews(&life.control, &served.peer, &beat) {
                    lock(&self.truth).heard(&self.hosts[host].name, beat.quiet_ms, self.now_us);
                }
                if let Some(ack) = ack {
                    self.send_datagram(host, conn, Way::Down, Datagram::Ack(ack));
                }
            }
            Datagram::Close | Datagram::Reset => {
                self.let_go(conn, "the agent closed it");
                return self.turn();
            }
            Datagram::Beat(_) | Datagram::Ack(_) => {}
        }
        Ok(())
    }

    /// A connection ends on the coordinator's side.
    pub(super) fn let_go(&mut self, conn: Conn, why: &str) {
        let Some(life) = &mut self.coordinator else { return };
        let Some(served) = life.conns.remove(&conn) else { return };
        if life.registry.get(&served.peer.host).is_some_and(|(c, _)| *c == conn) {
            life.registry.remove(&served.peer.host);
            life.control.disconnected(&served.peer, why);
        }
    }

    pub(super) fn message_up(&mut self, host: usize, conn: Conn, message: Message) -> Result<(), Broken> {
        let dialled = self.agent_has(host, conn);
        let Some(life) = &mut self.coordinator else { return Ok(()) };
        if let Message::Hello(hello) = message {
            // Whoever gave the connection up meanwhile comes on a new one.
            if !dialled || life.conns.contains_key(&conn) {
                return Ok(());
            }
            let peer = fleet::peer(self.hosts[host].name.as_str());
            let disputed = life.registry.get(&peer.host).is_some_and(|(_, instance)| *instance != hello.instance);
            life.conns.insert(conn, Served { host, peer, orders: None });
            if disputed {
                // The process that held it is dead: its kernel does not answer the probe.
                let life = life.number;
                self.after(PROBE_US, Event::Admit { life, host, conn, hello });
                return Ok(());
            }
            return self.admit(host, conn, *hello);
        }
        let Some(served) = life.conns.get(&conn) else {
            self.send_datagram(host, conn, Way::Down, Datagram::Reset);
            return Ok(());
        };
        let (peer, control) = (served.peer.clone(), life.control.clone());
        match message {
            Message::Batch(batch) => self.commit(host, conn, &peer, &control, batch),
            Message::Said(ToCoordinator::Facts(facts)) => {
                lock(&self.truth).heard(&peer.host, 0, self.now_us);
                let _ = now(control.facts(&peer, *facts));
                Ok(())
            }
            Message::Said(ToCoordinator::Refused { run, failure }) => {
                lock(&self.truth).heard(&peer.host, 0, self.now_us);
                let _ = now(control.demand_refused(&peer, run, failure));
                self.turn()
            }
            _ => Ok(()),
        }
    }

    pub(super) fn admit(&mut self, host: usize, conn: Conn, hello: AgentHello) -> Result<(), Broken> {
        let Some(life) = &mut self.coordinator else { return Ok(()) };
        let Some(served) = life.conns.get(&conn) else { return Ok(()) };
        let (peer, control, instance) = (served.peer.clone(), life.control.clone(), hello.instance);
        if let Some((old, _)) = life.registry.insert(peer.host.clone(), (conn, instance))
            && old != conn
        {
            life.conns.remove(&old);
        }
        let mut asked: Pin<Box<dyn Future<Output = _> + '_>> = Box::pin(control.on_connect(&peer, hello));
        let mut answer = asked.as_mut().now_or_never();
        if answer.is_none() {
            self.turn()?;
            answer = asked.now_or_never();
        }
        let Some(life) = &mut self.coordinator else { return Ok(()) };
        match answer {
            Some(Ok(Accepted { welcome, orders })) => {
                let first = orders.borrow().clone();
                if let Some(served) = life.conns.get_mut(&conn) {
                    served.orders = Some(orders);
                }
                lock(&self.truth).heard(&peer.host, 0, self.now_us);
                self.trace.note(self.now_us, "welcomed", host as u64, u64::from(welcome.generation.0));
                self.send_message(host, conn, Way::Down, Lane::Control, Message::Order(ToAgent::Welcome(welcome)));
                if let Order::Desired(desired) = first {
                    self.send_message(host, conn, Way::Down, Lane::Control, Message::Order(ToAgent::Desired(desired)));
                }
            }
            Some(Err(failure)) => {
                life.registry.remove(&peer.host);
                self.send_message(host, conn, Way::Down, Lane::Control, Message::Order(ToAgent::Refused(failure)));
            }
            // It is being killed.
            None => {}
        }
        Ok(())
    }

    pub(super) fn commit(
        &mut self,
        host: usize,
        conn: Conn,
        peer: &Peer,
        control: &Control,
        batch: EvidenceBatch,
    ) -> Result<(), Broken> {
        let run = batch.run;
        lock(&self.truth).heard(&peer.host, 0, self.now_us);
        let answer = now(control.commit_evidence(peer, batch));
        let message = match answer {
            Some(Ok(ack)) => {
                self.trace.note(self.now_us, "commits", host as u64, ack.through_seq);
                Message::Answer(ack)
            }
            Some(Err(failure)) => {
                let burnt = self.home.burnt();
                if !burnt && failure.class != FailureClass::Transient {
                    return Err(format!("evidence of {run} on {} was refused for good: {failure}", peer.host));
                }
                Message::NotTaken
            }
            None => Message::NotTaken,
        };
        self.send_message(host, conn, Way::Down, Lane::Evidence, message);
        self.turn()
    }

    /// The driver looks at everything; what it stored is checked, and what it orders is sent.
    pub(super) fn turn(&mut self) -> Result<(), Broken> {
        let Some(life) = &mut self.coordinator else { return Ok(()) };
        while now(life.driver.turn()).ok_or("the driver waits for something")? {}
        if self.home.burnt() {
            return Ok(());
        }
        self.check_runs()?;
        self.push_orders();
        Ok(())
    }

    pub(super) fn check_runs(&mut self) -> Result<(), Broken> {
        let Some(life) = &self.coordinator else { return Ok(()) };
        let mut truth = lock(&self.truth);
        let mut held: Vec<RunId> = Vec::new();
        for state in life.driver.runs() {
            held.push(state.id);
            if truth.differs(state) {
                if truth.loses(state) {
                    self.home.tell_fences(&mut truth, self.now_us)?;
                }
                truth.run(state, self.now_us)?;
                self.trace.note(self.now_us, "run changes", u64::from(state.id.0[0]), state.hosts.len() as u64);
            }
        }
        // What the driver let go of is settled.
        let gone: Vec<RunId> = truth.unsettled().filter(|id| !held.contains(id)).collect();
        for id in gone {
            let row = self.home.read(|s| s.run(id))?.ok_or_else(|| format!("{id} is not in the store any more"))?;
            if truth.loses(&row.state) {
                self.home.tell_fences(&mut truth, self.now_us)?;
            }
            truth.run(&row.state, self.now_us)?;
            for h in &row.state.hosts {
                self.check_evidence(&mut truth, id, &h.host)?;
            }
        }
        Ok(())
    }

    pub(super) fn check_evidence(&self, truth: &mut Truth, run: RunId, host: &HostId) -> Result<(), Broken> {
        let rows = self.home.read(|s| s.evidence(run, host, 0, 100_000))?;
        let rows: Vec<_> = rows.into_iter().map(|r| (r.record, r.late)).collect();
        truth.stored(host, run, &rows)
    }

    pub(super) fn push_orders(&mut self) {
        let Some(life) = &mut self.coordinator else { return };
        let mut out = Vec::new();
        for (conn, served) in &mut life.conns {
            let Some(orders) = &mut served.orders else { continue };
            match orders.has_changed() {
                Ok(false) => {}
                Ok(true) => {
                    if let Order::Desired(desired) = orders.borrow_and_update().clone() {
                        out.push((served.host, *conn, ToAgent::Desired(desired)));
                    }
                }
                Err(_) => out.push((served.host, *conn, ToAgent::Goodbye)),
            }
        }
        for (host, conn, order) in out {
            let goodbye = matches!(order, ToAgent::Goodbye);
            self.trace.note(self.now_us, if goodbye { "goodbye" } else { "orders" }, host as u64, conn);
            self.send_message(host, conn, Way::Down, Lane::Control, Message::Order(order));
            if goodbye
                && let Some(life) = &mut self.coordinator
                && let Some(served) = life.conns.get_mut(&conn)
            {
                // It stays until the agent closes it.
                served.orders = None;
            }
        }
    }

    pub(super) fn operate(&mut self) -> Result<(), Broken> {
        let next = 2 * MINUTE + self.draw.below(28 * MINUTE);
        self.after(next, Event::Operator);
        if self.draw.below(8) == 0 {
            let live: Vec<RunId> =
                self.coordinator.iter().flat_map(|l| l.driver.runs()).filter(|s| s.live()).map(|s| s.id).collect();
            if !live.is_empty() {
                let run = live[self.draw.index(live.len())];
                return self.cancel(run);
            }
        }
        let registrations = fleet::registrations();
        let which = self.draw.index(registrations.len());
        self.create(registrations[which].experiment.id).map(|_| ())
    }

    /// None if there are not enough hosts now, or nobody to ask.
    pub fn create(&mut self, experiment: ExperimentId) -> Result<Option<RunState>, Broken> {
        let mut id = [0; 6];
        id.copy_from_slice(&self.draw.next_u64().to_be_bytes()[..6]);
        let new = NewRun { id: RunId(id), experiment, registration: None, until: None, by: Who::new("operator", "") };
        let Some(control) = self.coordinator.as_ref().map(|l| l.control.clone()) else { return Ok(None) };
        let mut asked = Box::pin(control.create_run(new));
        let mut answer = asked.as_mut().now_or_never();
        if answer.is_none() {
            self.turn()?;
            answer = asked.now_or_never();
        }
        self.trace.note(self.now_us, "asks for a run", u64::from(experiment.0), u64::from(id[0]));
        Ok(answer
            .and_then(|r| r.inspect_err(|failure| self.trace.say(self.now_us, || format!("no run: {failure}"))).ok()))
    }

    pub fn cancel(&mut self, run: RunId) -> Result<(), Broken> {
        let Some(control) = self.coordinator.as_ref().map(|l| l.control.clone()) else { return Ok(()) };
        self.trace.note(self.now_us, "cancels", u64::from(run.0[0]), 0);
        lock(&self.truth).cancelled.insert(run);
        let mut asked = Box::pin(control.cancel_run(run, Who::new("operator", "")));
        if asked.as_mut().now_or_never().is_none() {
            self.turn()?;
        }
        Ok(())
    }
}
