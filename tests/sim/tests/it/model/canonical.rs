//! What makes the search of the model small: one state stands for all that differ in nothing that can still show.
//!
//! What is forgotten is what no step to come can look at, so that the same can go right and wrong from each of them, but for
//! steps that show nothing, as a crash of a coordinator that is deposed.

use super::{Agent, COORDINATORS, HOSTS, Leases, Network, Sent, Without, World};

impl Leases {
    pub(super) fn canonical(&self, mut w: World) -> World {
        // Without the fence what a deposed coordinator remembers matters, and most of the reasons below do not hold.
        if self.without != Without::TermFence {
            self.forget_coordinators(&mut w);
            (0..HOSTS).for_each(|h| self.forget_host(&mut w, h));
        }
        // Hosts are alike, and so are coordinators: of all orders, the least.
        let least = |w: World| w.min(w.other_hosts());
        least(w).min(least(w.other_coordinators()))
    }

    fn forget_coordinators(&self, w: &mut World) {
        let (now, silence) = (w.now, self.life + self.margin());
        for c in 0..COORDINATORS {
            if w.store.leader != Some(c) && !self.answers(w, c) {
                // Deposed: whatever it tries to write comes to a crash, and it can do nothing else.
                w.coordinators[c] = None;
            }
            let Some(active) = &mut w.coordinators[c] else { continue };
            // A lease that is over is over, whenever that was.
            active.until = active.until.max(now);
            for h in 0..HOSTS {
                // Long enough is long enough; and whoever is lost, or would be only beyond the bounds, is not judged.
                let never = active.run[h].lost || active.heard[h] + silence > self.ticks;
                active.heard[h] = if never { now } else { active.heard[h].max(now.saturating_sub(silence)) };
            }
        }
        w.store.leader_until = w.store.leader_until.max(now);
        for h in 0..HOSTS {
            // Only a judgement looks at it, if it comes soon enough; a coordinator to come begins to count when it comes.
            let active = w.store.leader.and_then(|c| w.coordinators[c]);
            let judged = active.filter(|a| !a.run[h].lost).map_or(u8::MAX, |a| a.heard[h] + silence);
            let judged = if self.without == Without::OwnUptime && !w.store.run[h].lost { now } else { judged.max(now) };
            if w.heard[h] + self.life <= judged {
                w.heard[h] = 0;
            }
        }
    }

    fn forget_host(&self, w: &mut World, h: usize) {
        let (clock, generation, run) = (w.clock(h), w.store.generation[h], &w.store.run);
        let (agent, network) = (&mut w.agents[h], &mut w.network[h]);
        // The life lease matters to a block that has begun, the dispatch lease to one that may begin.
        let lease = if agent.measuring { self.life } else { self.dispatch };
        agent.renewed = agent.renewed.map(|r| r.max(clock.saturating_sub(lease)));
        // Messages that can have no effect any more are as good as lost.
        network.answer = network.answer.filter(|a| a.generation == agent.generation && Some(a.at) > agent.renewed);
        network.order = network.order.filter(|o| *o >= agent.generation && !agent.done);
        let counts = |record: u8| record == generation || self.without == Without::GenerationFence;
        network.record = network.record.filter(|r| counts(*r) && !run[h].ended);
        // So is the answer to a beat from before the last renewal.
        let beat = network.beat.filter(|b| b.generation == generation);
        network.beat = beat.map(|b| Sent { at: b.at.max(agent.renewed.unwrap_or(0)), ..b });
        let leased = network.answer.is_some() || agent.renewed.is_some_and(|r| clock < r + self.dispatch);
        let begins = network.order.is_some() && (leased || self.without == Without::DispatchLease);
        if run[h].lost && !agent.measuring && !begins {
            // It has no block and will get none, and is not judged again.
            *agent = Agent { done: true, ..Agent::default() };
            *network = Network { record: network.record, ..Network::default() };
        } else if agent.done && (network.beat.is_some() || agent.renewed < Some(clock)) {
            // Its block is behind it. It can be heard: by the beat that is under way, or that it may send now.
            *agent = Agent { renewed: Some(0), slow: 0, ..*agent };
            *network = Network { beat: Some(Sent { generation, at: 0 }), answer: None, ..*network };
        }
    }
}

impl World {
    fn other_hosts(mut self) -> Self {
        for active in self.coordinators.iter_mut().flatten() {
            active.heard.reverse();
            active.run.reverse();
        }
        self.store.run.reverse();
        self.store.generation.reverse();
        self.agents.reverse();
        self.network.reverse();
        self.heard.reverse();
        self
    }

    fn other_coordinators(mut self) -> Self {
        self.coordinators.reverse();
        self.store.leader = self.store.leader.map(|c| COORDINATORS - 1 - c);
        self
    }
}
