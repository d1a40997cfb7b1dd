//! The coordinator's turns: the real launch and the real reaper, a line at a time.

use std::{collections::BTreeSet, sync::Arc};

use drums_provider::{
    cloud::{Instance, InstanceState, KillSchedule},
    failure::FailureKind,
    launch::{self, Guest, Launch, Look, Reply, State, Why},
    reap::{self, Reap, strays},
};

use super::{Fault, Host, Outcome, Paid, ReapAct, Turn, Without, World, physics::Killer};
use crate::support::{self, START, error};

impl Paid {
    fn denied(w: &World) -> bool {
        w.faults.contains(&Fault::Credentials)
    }

    /// The coordinator's own judgement of a silent host.
    fn lost(&self, w: &World, host: &Host) -> bool {
        let Some(up) = w.up_since else { return false };
        // Declared before it was started, a silence is not known to it; then it waits out any that may be.
        let started = host.heard < up && self.without != Without::OwnUptime;
        let heard = if started {
            up + self.life
        } else if self.without == Without::OwnUptime && host.quiet_until > 0 && up > host.heard {
            host.heard
        } else {
            host.heard.max(host.quiet_until)
        };
        host.enrolled && w.now > heard + self.life
    }

    /// EC2 shows it from the minute after it was made.
    fn is_shown(w: &World, host: &Host) -> bool {
        host.made < w.now
    }

    fn view(&self, w: &World, launch: &Launch) -> launch::View {
        let current = |h: &&Host| h.attempt == launch.host().attempt();
        let host = w.hosts.iter().find(current);
        let shown = host.filter(|h| Self::is_shown(w, h)).map(|h| self.seen(h));
        let leaving = matches!(launch.state(), State::Leaving { .. }) && self.without == Without::Leaving;
        let shown = shown.map(|i| if leaving { Instance { state: InstanceState::ShuttingDown, ..i } } else { i });
        let shown: Vec<_> = match launch.look() {
            Look::Nothing => Vec::new(),
            Look::Token(..) => shown.into_iter().collect(),
            Look::Instance(_, id) => shown.into_iter().filter(|i| i.id == id).collect(),
        };
        let schedule = w.schedules.get(&launch.host().attempt()).filter(|(_, fired)| !fired);
        let at = |at, h| KillSchedule { at, ..launch.schedule(&self.owned(h)) };
        let schedule = schedule.zip(host).map(|((due, _), h)| at(*due, h));
        let denied = |call| error(FailureKind::Denied, call);
        let enrolled = host.is_some_and(|h| h.enrolled);
        launch::View {
            instances: if Self::denied(w) { Err(denied("DescribeInstances")) } else { Ok(shown) },
            schedule: if Self::denied(w) { Err(denied("GetSchedule")) } else { Ok(schedule) },
            enrolled,
            guest: if enrolled { Guest::Booted } else { Guest::NotYet },
            attentive_since: if self.without == Without::Attention { START } else { self.at(w.up_since.unwrap_or(0)) },
            unwanted: host.filter(|h| self.lost(w, h)).map(|_| "lost".to_owned()),
            unaffordable: None,
        }
    }

    fn reap_view(&self, w: &World, reap: &Reap) -> reap::View {
        if Self::denied(w) {
            let denied = |call| error(FailureKind::Denied, call);
            return reap::View { instance: Err(denied("DescribeInstances")), volumes: Err(denied("DescribeVolumes")) };
        }
        let host = w.hosts.iter().find(|h| self.owned(h) == *reap.instance());
        let shown = host.filter(|h| Self::is_shown(w, h)).map(|h| self.seen(h));
        reap::View { instance: Ok(shown), volumes: Ok(Vec::new()) }
    }

    fn store(&self, w: &mut World, launch: Launch, given_up: Vec<(drums_provider::host::OwnedInstance, Why)>) {
        w.launch = Arc::new(launch);
        for (instance, why) in given_up {
            self.take(w, instance, why);
        }
    }

    fn take(&self, w: &mut World, instance: drums_provider::host::OwnedInstance, why: Why) {
        if w.reaps.iter().any(|r| *r.instance() == instance) {
            return;
        }
        let account = reap::Account {
            host: "h1".parse().unwrap(),
            campaign: "c1".parse().unwrap(),
            experiment: None,
            rates: support::rates(),
            from: START,
        };
        w.reaps.push(Arc::new(Reap::begin(instance, account, why, self.time(w))));
    }

    /// Rests at once if a pass would change nothing.
    pub(super) fn skip_idle(&self, w: &mut World) {
        let mut tried = w.clone();
        let before = (tried.launch.clone(), tried.reaps.clone());
        loop {
            if matches!(tried.turn, Turn::Run | Turn::Put(_) | Turn::Mend | Turn::ReapAct(..)) || tried.moved {
                return;
            }
            if tried.turn == Turn::Rest {
                break;
            }
            self.turn(&mut tried, Outcome::Plain);
        }
        if before == (tried.launch, tried.reaps) {
            w.turn = Turn::Rest;
        }
    }

    pub(super) fn turn(&self, w: &mut World, outcome: Outcome) {
        let now = self.time(w);
        match w.turn.clone() {
            Turn::Rest => {}
            Turn::Launch => {
                let decision = w.launch.decide(&self.view(w, &w.launch), now, &self.patience);
                w.moved |= decision.launch != *w.launch || !decision.reap.is_empty();
                let mut prepared = None;
                let act = decision.act.map(|act| match act {
                    launch::Act::Prepare { host, .. } => {
                        // Of no cloud: made, and then stored, or lost with the process.
                        prepared = Some(launch::Reply::Prepared(Ok(support::user_data(&host, now))));
                        Turn::Launch
                    }
                    launch::Act::Run(..) => Turn::Run,
                    launch::Act::PutSchedule(schedule) => Turn::Put(schedule.at),
                    launch::Act::Mend(..) => Turn::Mend,
                });
                if self.without == Without::Intent && act == Some(Turn::Run) {
                    w.unstored = Some(Arc::new(decision.launch));
                } else {
                    self.store(w, decision.launch, decision.reap);
                }
                if let Some(reply) = prepared {
                    let decision = w.launch.heard(&reply, now, &self.patience);
                    w.moved = true;
                    self.store(w, decision.launch, decision.reap);
                }
                w.turn = match act {
                    Some(Turn::Put(_)) if self.without == Without::Schedule => self.pretend_armed(w),
                    Some(act) => act,
                    None => Turn::Reap(0),
                };
            }
            Turn::Run => {
                let launch = w.unstored.clone().unwrap_or_else(|| w.launch.clone());
                w.turn = Turn::Ran(self.run(w, &launch, outcome));
            }
            Turn::Ran(reply) => {
                let launch = w.unstored.take().unwrap_or_else(|| w.launch.clone());
                let reply = match reply {
                    Ok(h) => Ok(Box::new(self.seen(&w.hosts[h]))),
                    Err(kind) => Err(error(kind, "RunInstances")),
                };
                self.heard(w, &launch, &Reply::Ran(reply));
            }
            Turn::Put(at) => {
                let attempt = w.launch.host().attempt();
                let done = !Self::denied(w) && outcome != Outcome::Never;
                if done {
                    w.schedules.insert(attempt, (at, false));
                }
                w.turn = Turn::Scheduled(Self::reply(w, outcome));
            }
            Turn::Scheduled(reply) => {
                let launch = w.launch.clone();
                let reply = reply.map_err(|kind| error(kind, "CreateSchedule"));
                self.heard(w, &launch, &Reply::Scheduled(reply));
            }
            Turn::Mend => {
                let attempt = w.launch.host().attempt();
                let done = !Self::denied(w) && outcome != Outcome::Never && self.without != Without::Unprotect;
                if let Some(host) = w.hosts.iter_mut().find(|h| h.attempt == attempt && done) {
                    (host.protected, host.stops_only) = (false, false);
                }
                w.turn = Turn::Mended(Self::reply(w, outcome));
            }
            Turn::Mended(reply) => {
                let launch = w.launch.clone();
                let reply = reply.map_err(|kind| error(kind, "ModifyInstanceAttribute"));
                self.heard(w, &launch, &Reply::Mended(reply));
            }
            Turn::Reap(i) if i < w.reaps.len() && self.without != Without::Reaper => {
                let decision = w.reaps[i].decide(&self.reap_view(w, &w.reaps[i]), now);
                w.reaps[i] = Arc::new(decision.reap);
                w.turn = match decision.act {
                    None => Turn::Reap(i + 1),
                    Some(reap::Act::Terminate(_)) => Turn::ReapAct(i, ReapAct::Terminate),
                    Some(reap::Act::Unprotect(_)) => Turn::ReapAct(i, ReapAct::Unprotect),
                    Some(reap::Act::DeleteSchedule(_)) => Turn::ReapAct(i, ReapAct::DeleteSchedule),
                };
            }
            Turn::Reap(_) => w.turn = Turn::Strays,
            Turn::ReapAct(i, act) => {
                let reply = self.reap_act(w, i, act, outcome);
                w.turn = Turn::ReapHeard(i, act, reply);
            }
            Turn::ReapHeard(i, act, reply) => {
                let reap = w.reaps[i].clone();
                let kill = reap.instance().kill_id();
                let act = match act {
                    ReapAct::Terminate => reap::Act::Terminate(kill),
                    ReapAct::Unprotect => reap::Act::Unprotect(kill),
                    ReapAct::DeleteSchedule => {
                        let token = reap.instance().token().unwrap();
                        reap::Act::DeleteSchedule(drums_provider::cloud::ScheduleName::of(&token))
                    }
                };
                let reply = reply.map_err(|kind| error(kind, "TerminateInstances"));
                // Protected: the next pass switches it off.
                w.moved |= reply.as_ref().is_err_and(|e| e.kind == FailureKind::Protected)
                    || act != reap::Act::Terminate(reap.instance().kill_id());
                w.reaps[i] = Arc::new(reap.heard(&act, &reply, now).0);
                w.turn = Turn::Reap(i + 1);
            }
            Turn::Strays => {
                if !Self::denied(w) {
                    self.strays(w);
                }
                let again = w.moved && w.passes > 1;
                w.passes = if again { w.passes - 1 } else { 0 };
                w.moved = false;
                w.turn = if again { Turn::Launch } else { Turn::Rest };
            }
        }
    }

    fn reply(w: &World, outcome: Outcome) -> Result<(), FailureKind> {
        match outcome {
            _ if Self::denied(w) => Err(FailureKind::Denied),
            Outcome::Plain => Ok(()),
            _ => Err(FailureKind::Unknown),
        }
    }

    fn run(&self, w: &mut World, launch: &Launch, outcome: Outcome) -> Result<usize, FailureKind> {
        let attempt = launch.host().attempt();
        let subnet = launch.order().placement.subnet;
        let place = usize::from(subnet != support::placements()[0].subnet);
        if Self::denied(w) {
            return Err(FailureKind::Denied);
        }
        match outcome {
            Outcome::Plain => Ok(self.make(w, attempt, place)),
            Outcome::ReplyLost => {
                self.make(w, attempt, place);
                Err(FailureKind::Unknown)
            }
            Outcome::Late => {
                w.late = Some((w.now + 2, attempt, place));
                Err(FailureKind::Unknown)
            }
            Outcome::Never => Err(FailureKind::Unknown),
            Outcome::Full => {
                w.no_room = true;
                match w.hosts.iter().position(|h| h.attempt == attempt) {
                    Some(there) => Ok(there),
                    None => Err(FailureKind::Capacity),
                }
            }
        }
    }

    fn heard(&self, w: &mut World, launch: &Launch, reply: &Reply) {
        let decision = launch.heard(reply, self.time(w), &self.patience);
        w.moved = true;
        self.store(w, decision.launch, decision.reap);
        w.turn = Turn::Reap(0);
    }

    fn reap_act(&self, w: &mut World, i: usize, act: ReapAct, outcome: Outcome) -> Result<(), FailureKind> {
        let done = !Self::denied(w) && outcome != Outcome::Never;
        let instance = w.reaps[i].instance().clone();
        let host = w.hosts.iter().position(|h| self.owned(h) == instance);
        let Some(h) = host.filter(|_| done) else { return Self::reply(w, outcome) };
        match act {
            ReapAct::Terminate => {
                if !self.end(w, h, Killer::Coordinator) {
                    return Err(FailureKind::Protected);
                }
            }
            ReapAct::Unprotect if self.without == Without::Unprotect => return Err(FailureKind::Denied),
            ReapAct::Unprotect => w.hosts[h].protected = false,
            ReapAct::DeleteSchedule => {
                w.schedules.remove(&w.hosts[h].attempt);
            }
        }
        Self::reply(w, outcome)
    }

    fn strays(&self, w: &mut World) {
        let alive = w.hosts.iter().filter(|h| !h.state.is_going() && Self::is_shown(w, h));
        let owned: Vec<_> = alive.map(|h| self.seen(h)).collect();
        let tokens = if w.launch.is_closed() { BTreeSet::new() } else { BTreeSet::from([w.launch.host().token()]) };
        let reaps = w.reaps.iter().map(|r| r.instance().clone()).collect();
        for (instance, alarm) in strays(&self.scope, &owned, &tokens, &reaps) {
            w.moved = true;
            self.take(w, instance, Why::Unwanted(alarm.message));
        }
    }

    /// Without schedules a launch takes their absence for granted: one is shown to it that will never fire.
    fn pretend_armed(&self, w: &mut World) -> Turn {
        let attempt = w.launch.host().attempt();
        if let State::Launched { .. } = w.launch.state() {
            w.moved = true;
        }
        w.schedules.insert(attempt, (self.at(self.deadline), false));
        Turn::Reap(0)
    }
}
