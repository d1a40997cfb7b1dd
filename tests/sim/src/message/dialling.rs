//! The agents' side of a world: processes, connections, beats, evidence.

use drums_agent::net::NextBeat;
use drums_common::wire::latest::ToAgent;

use super::{
    agent::{Agent, Goes, Host, tear},
    network::{Conn, Datagram, Lane, Message, Way},
    world::{Event, World},
};
use crate::{
    time::{MS, S},
    truth::Broken,
};

/// A dial that is not answered is given up after this.
const DIAL_US: u64 = 5 * S;

impl World {
    pub(super) fn start_agent(&mut self, host: usize) -> Result<(), Broken> {
        if self.hosts[host].agent.is_some() {
            return Ok(());
        }
        let agent = Agent::start(&mut self.hosts[host], &mut self.draw, &self.truth, &self.locks)?;
        let life = agent.life;
        self.trace.note(self.now_us, "agent starts", host as u64, life);
        self.hosts[host].agent = Some(agent);
        self.at(self.now_us, Event::Dial { host, life });
        self.measure(host)
    }

    /// kill -9.
    pub fn kill_agent(&mut self, host: usize, down_us: u64, torn: bool) {
        let Some(agent) = self.hosts[host].agent.take() else { return };
        self.trace.note(self.now_us, "agent killed", host as u64, down_us);
        let Agent { measurer, .. } = agent;
        measurer.die();
        if torn {
            tear(&self.hosts[host].dir, &mut self.draw);
        }
        self.after(down_us, Event::StartAgent { host });
    }

    pub(super) fn dial(&mut self, host: usize) {
        let Host { agent: Some(agent), clock, .. } = &mut self.hosts[host] else { return };
        let life = agent.life;
        if agent.conn.is_some() {
            return;
        }
        if agent.quiet() {
            // A connection would be noise in a timed window.
            self.after(200 * MS, Event::Dial { host, life });
            return;
        }
        let conn = self.next_conn;
        self.next_conn += 1;
        let hello = agent.dial(conn, clock, self.now_us);
        self.trace.note(self.now_us, "dials", host as u64, conn);
        self.send_message(host, conn, Way::Up, Lane::Control, Message::Hello(Box::new(hello)));
        self.after(DIAL_US, Event::NoAnswer { host, life, conn });
    }

    /// The agent gives its connection up and dials again.
    pub(super) fn hang_up(&mut self, host: usize) {
        let Some(agent) = &mut self.hosts[host].agent else { return };
        let Some(conn) = agent.conn.as_ref().map(|c| c.id) else { return };
        agent.hang_up();
        let life = agent.life;
        let pause = agent.pause(&mut self.draw);
        self.trace.note(self.now_us, "hangs up", host as u64, conn);
        self.forget_streams(conn);
        self.send_datagram(host, conn, Way::Up, Datagram::Close);
        self.after(pause, Event::Dial { host, life });
    }

    pub(super) fn beat(&mut self, host: usize, life: u64, conn: Conn) -> Result<(), Broken> {
        if !self.lives_on(host, life) || !self.agent_has(host, conn) {
            return Ok(());
        }
        self.after(self.times.beat_ms * MS, Event::Beat { host, life, conn });
        self.beat_now(host)
    }

    pub(super) fn beat_now(&mut self, host: usize) -> Result<(), Broken> {
        let Some(agent) = &mut self.hosts[host].agent else { return Ok(()) };
        let Some(conn) = agent.conn.as_ref().map(|c| c.id) else { return Ok(()) };
        match agent.beat(self.now_us) {
            (_, Goes::Ends) => self.hang_up(host),
            (NextBeat::Hush, Goes::On) => {}
            (NextBeat::Send(beat), Goes::On) => {
                self.trace.note(self.now_us, "beat", host as u64, beat.number);
                self.send_datagram(host, conn, Way::Up, Datagram::Beat(beat));
            }
        }
        Ok(())
    }

    /// The measuring side looks, and says when it wants to look again.
    pub(super) fn measure(&mut self, host: usize) -> Result<(), Broken> {
        let Some(agent) = &mut self.hosts[host].agent else { return Ok(()) };
        let quiet = agent.quiet();
        let wait = agent.measurer.look(self.now_us)?;
        agent.ticket += 1;
        let (life, ticket, quiet_now) = (agent.life, agent.ticket, agent.quiet());
        let said = std::iter::from_fn(|| agent.link.network_side().next_to_say()).collect::<Vec<_>>();
        let conn = agent.conn.as_ref().filter(|c| c.welcome.is_some()).map(|c| c.id);
        if let Some(wait) = wait {
            self.after(wait, Event::Measure { host, life, ticket });
        }
        if let Some(conn) = conn {
            for message in said {
                self.send_message(host, conn, Way::Up, Lane::Control, Message::Said(message));
            }
        }
        if quiet != quiet_now {
            self.beat_now(host)?;
        }
        self.send(host)
    }

    pub(super) fn send(&mut self, host: usize) -> Result<(), Broken> {
        let Host { agent: Some(agent), clock, .. } = &mut self.hosts[host] else { return Ok(()) };
        let life = agent.life;
        match agent.next_batch(clock)? {
            Ok(batch) => {
                if let Some(conn) = agent.conn.as_ref().map(|c| c.id) {
                    self.trace.note(self.now_us, "sends records", host as u64, batch.records.len() as u64);
                    self.send_message(host, conn, Way::Up, Lane::Evidence, Message::Batch(batch));
                }
            }
            Err(Some(wait)) => self.after(wait, Event::Send { host, life }),
            Err(None) => {}
        }
        Ok(())
    }

    pub(super) fn datagram_down(&mut self, host: usize, conn: Conn, datagram: Datagram) -> Result<(), Broken> {
        if !self.agent_has(host, conn) {
            return Ok(());
        }
        match datagram {
            Datagram::Ack(ack) => {
                if let Some(agent) = &mut self.hosts[host].agent {
                    let awaited = agent.measurer.awaits_answer();
                    agent.acked(&ack);
                    if awaited {
                        return self.measure(host);
                    }
                }
            }
            Datagram::Close | Datagram::Reset => self.hang_up(host),
            Datagram::Beat(_) => {}
        }
        Ok(())
    }

    pub(super) fn message_down(&mut self, host: usize, conn: Conn, message: Message) -> Result<(), Broken> {
        if !self.agent_has(host, conn) {
            return Ok(());
        }
        let Host { agent: Some(agent), clock, .. } = &mut self.hosts[host] else { return Ok(()) };
        match message {
            Message::Order(order) => {
                let welcome = matches!(order, ToAgent::Welcome(_));
                if agent.told(order)? == Goes::Ends {
                    self.hang_up(host);
                    return Ok(());
                }
                if welcome {
                    let life = agent.life;
                    self.at(self.now_us, Event::Beat { host, life, conn });
                }
            }
            Message::Answer(ack) => agent.answered(&ack, clock)?,
            Message::NotTaken => agent.not_taken(clock),
            Message::Hello(_) | Message::Said(_) | Message::Batch(_) => {}
        }
        self.measure(host)
    }
}
