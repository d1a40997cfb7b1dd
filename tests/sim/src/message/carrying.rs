//! Messages on their way: streams that keep their order, datagrams that do not.

use super::{
    network::{Conn, Datagram, Lane, Message, Way},
    world::{Event, World},
};
use crate::truth::Broken;

impl World {
    pub(super) fn send_datagram(&mut self, host: usize, conn: Conn, way: Way, datagram: Datagram) {
        let arrivals = self.paths[host].datagram(&mut self.draw, way, self.now_us);
        for at in arrivals.into_iter().flatten() {
            self.at(at, Event::Datagram { host, conn, way, datagram: datagram.clone() });
        }
    }

    pub(super) fn send_message(&mut self, host: usize, conn: Conn, way: Way, lane: Lane, message: Message) {
        let stream = self.streams.entry((conn, way, lane)).or_default();
        stream.waiting.push_back(message);
        if !std::mem::replace(&mut stream.moving, true) {
            let at = self.paths[host].stream(&mut self.draw, self.now_us);
            self.at(at, Event::Pump { host, conn, way, lane });
        }
    }

    pub(super) fn forget_streams(&mut self, conn: Conn) {
        for way in [Way::Up, Way::Down] {
            for lane in [Lane::Control, Lane::Evidence] {
                self.streams.remove(&(conn, way, lane));
            }
        }
    }

    pub(super) fn agent_has(&self, host: usize, conn: Conn) -> bool {
        self.hosts[host].agent.as_ref().and_then(|a| a.conn.as_ref()).is_some_and(|c| c.id == conn)
    }

    pub(super) fn pump(&mut self, host: usize, conn: Conn, way: Way, lane: Lane) -> Result<(), Broken> {
        let key = (conn, way, lane);
        if !self.streams.contains_key(&key) {
            return Ok(());
        }
        if self.paths[host].cut(way, self.now_us) {
            let at = self.paths[host].again(&mut self.draw, self.now_us);
            // Whoever is gone sends nothing again.
            let sends = match way {
                Way::Up => self.agent_has(host, conn),
                Way::Down => self.coordinator.as_ref().is_some_and(|l| l.conns.contains_key(&conn)),
            };
            if sends {
                self.at(at, Event::Pump { host, conn, way, lane });
            } else {
                self.streams.remove(&key);
            }
            return Ok(());
        }
        if way == Way::Up && self.coordinator.is_none() {
            // Nobody listens; the sender goes on trying while it believes in the connection.
            if self.agent_has(host, conn) {
                let at = self.paths[host].again(&mut self.draw, self.now_us);
                self.at(at, Event::Pump { host, conn, way, lane });
            } else {
                self.streams.remove(&key);
            }
            return Ok(());
        }
        let Some(stream) = self.streams.get_mut(&key) else { return Ok(()) };
        let message = stream.waiting.pop_front();
        stream.moving = !stream.waiting.is_empty();
        if stream.moving {
            let at = self.paths[host].stream(&mut self.draw, self.now_us);
            self.at(at, Event::Pump { host, conn, way, lane });
        }
        match message {
            Some(message) if way == Way::Up => self.message_up(host, conn, message),
            Some(message) => self.message_down(host, conn, message),
            None => Ok(()),
        }
    }
}
