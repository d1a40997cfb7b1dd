//! Leases: what an agent may do without hearing from its coordinator, and what the coordinator may say of a silent agent.
//!
//! Two pure cores of data and `now`; each daemon's skin brings the clock. The agent counts from when it *sent* the beat
//! that was acknowledged, the coordinator from when it *received* one, so neither trusts the other's clock or the path.
//!
//! ```text
//! agent        dispatch lease (seconds)  lapsed: takes no new block, finishes the one it holds
//!              life lease (minutes)      lapsed: stops, unwinds, seals its evidence
//! coordinator  alive → silent (2.5 s, shown only) → lost (life lease, judged) ; quiet: declared silence, expected ;
//!              stuck: alive, and its work does not move within its bound (shown only)
//! ```
//! Declared silence that the coordinator acknowledged counts as heard of until its end, on both sides.
//! Invariant: nobody is judged lost before the coordinator itself has been up for one full life lease, nor before it has
//! paid attention without a gap for a grace period.
//! Invariant: a host is judged lost only after its agent's life lease has lapsed on the agent's own clock, as long as no
//! two clocks differ by more than [`DRIFT_PPM`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    clock::MonoMicros,
    ids::{Generation, HostId},
    wire::latest::{Activity, Beat, BeatAck, Welcome},
};

/// The coordinator looks at its leases twice a second; five looks in a row that did not come are a stall.
const STALL_MS: u64 = 2_500;
/// Seven answers may be lost before the dispatch lease is.
const ANSWERS_PER_LEASE: u64 = 8;

/// How much faster one machine's clock may run than another's, parts per million: the kernel slews each by up to 500.
pub const DRIFT_PPM: u64 = 1_000;

/// The longest silence that may be declared under a life lease: two of them, an hour by default, are more than any timed
/// window, and bound what a broken agent gets.
pub const fn longest_quiet_ms(life_ms: u64) -> u64 {
    life_ms.saturating_mul(2)
}

/// How much longer `ms` of a slow clock may take by a fast one.
fn drift_ms(ms: u64) -> u64 {
    ms.saturating_mul(DRIFT_PPM).div_ceil(1_000_000 - DRIFT_PPM)
}

/// Durations of leases, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseTimes {
    /// Between beats. Half a second: twenty beats may be lost before the dispatch lease is.
    pub beat_ms: u64,
    /// Ten seconds: longer than a coordinator's restart, shorter than most blocks.
    pub dispatch_ms: u64,
    /// Thirty minutes: closing the operator's laptop must not destroy a paid run.
    pub life_ms: u64,
    /// Two and a half seconds, five beats: silence is shown after this, and does nothing.
    pub silent_ms: u64,
    /// An agent that overran its declared silence by this much has failed to keep it. Covers scheduling on a busy host.
    pub quiet_slack_ms: u64,
    /// Ten seconds: how long the coordinator must have paid attention without a gap before it judges anybody. One that was
    /// stopped, or whose machine slept, first reads what arrived meanwhile.
    #[serde(default = "default_grace_ms")]
    pub grace_ms: u64,
}

/// Configurations that were written before there was one have none.
fn default_grace_ms() -> u64 {
    10_000
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self {
            beat_ms: 500,
            dispatch_ms: 10_000,
            life_ms: 30 * 60_000,
            silent_ms: 2_500,
            quiet_slack_ms: 2_500,
            grace_ms: default_grace_ms(),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadLeaseTimes {
    #[error("{0} is 0, which would mean \"never\" or \"always\"; give a number of milliseconds")]
    Zero(&'static str),
    #[error("{longer} must be at least twice {shorter}: one lost beat must not end a lease")]
    Order { longer: &'static str, shorter: &'static str },
}

impl LeaseTimes {
    pub fn validate(&self) -> Result<(), BadLeaseTimes> {
        for (name, v) in [
            ("beat_ms", self.beat_ms),
            ("dispatch_ms", self.dispatch_ms),
            ("life_ms", self.life_ms),
            ("silent_ms", self.silent_ms),
            ("quiet_slack_ms", self.quiet_slack_ms),
            ("grace_ms", self.grace_ms),
        ] {
            if v == 0 {
                return Err(BadLeaseTimes::Zero(name));
            }
        }
        if self.silent_ms < 2 * self.beat_ms {
            return Err(BadLeaseTimes::Order { longer: "silent_ms", shorter: "beat_ms" });
        }
        if self.dispatch_ms < 2 * self.beat_ms {
            return Err(BadLeaseTimes::Order { longer: "dispatch_ms", shorter: "beat_ms" });
        }
        if self.life_ms < 2 * self.dispatch_ms {
            return Err(BadLeaseTimes::Order { longer: "life_ms", shorter: "dispatch_ms" });
        }
        Ok(())
    }
}

/// A generation older than one already seen: answered, never obeyed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("generation {got} is older than {held}, which this agent already holds")]
pub struct Stale {
    pub got: Generation,
    pub held: Generation,
}

/// The agent's side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentLease {
    generation: Generation,
    dispatch_ms: u64,
    life_ms: u64,
    /// When the newest acknowledged beat (or hello) was sent, CLOCK_BOOTTIME. `None`: never welcomed.
    renewed: Option<MonoMicros>,
    /// When this agent started with what an earlier life of it held.
    resumed: Option<MonoMicros>,
    /// The end of the declared silence that the coordinator acknowledged last: it expects nothing before.
    agreed_until: Option<MonoMicros>,
}

impl AgentLease {
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// This agent was started again, and what it holds was given to it under a life lease of `life_ms`: that counts from
    /// now, until a coordinator is heard.
    pub fn resumed(&mut self, life_ms: u64, now: MonoMicros) {
        self.life_ms = life_ms;
        self.resumed = Some(now);
    }

    /// A coordinator welcomed this agent; `sent` is when the hello was sent.
    pub fn welcomed(&mut self, welcome: &Welcome, sent: MonoMicros) -> Result<(), Stale> {
        if welcome.generation < self.generation {
            return Err(Stale { got: welcome.generation, held: self.generation });
        }
        self.generation = welcome.generation;
        self.dispatch_ms = welcome.dispatch_lease_ms;
        self.life_ms = welcome.life_lease_ms;
        self.renewed = self.renewed.max(Some(sent));
        self.agreed_until = None;
        Ok(())
    }

    /// A beat was acknowledged. True if it renewed anything: acknowledgements of another generation, or of a beat that
    /// was not yet sent, renew nothing; a late one never takes time away.
    pub fn acked(&mut self, ack: &BeatAck, now: MonoMicros) -> bool {
        if self.renewed.is_none() || ack.generation != self.generation || ack.sent > now {
            return false;
        }
        let before = self.renewed;
        self.renewed = before.max(Some(ack.sent));
        self.renewed != before
    }

    /// The coordinator acknowledged a silence that was declared for `bound_ms` at `declared`: it does not judge before its
    /// end, so the life lease does not end before it either.
    pub fn silence_agreed(&mut self, declared: MonoMicros, bound_ms: u64) {
        self.agreed_until = self.agreed_until.max(Some(declared.plus_ms(bound_ms.min(longest_quiet_ms(self.life_ms)))));
    }

    /// The dispatch lease holds: a new block may begin.
    pub fn may_take_new_block(&self, now: MonoMicros) -> bool {
        self.renewed.is_some_and(|r| now < r.plus_ms(self.dispatch_ms))
    }

    /// Milliseconds of life left: until the life lease or `deadline` (of the run, on the same clock), whichever is first.
    /// An agent that was never welcomed, in no life of it, holds no work under this lease, so only the deadline counts.
    pub fn life_left_ms(&self, now: MonoMicros, deadline: Option<MonoMicros>) -> u64 {
        let lease = self.renewed.or(self.resumed).map(|r| r.plus_ms(self.life_ms)).max(self.agreed_until);
        let end = match (lease, deadline) {
            (Some(a), Some(b)) => a.min(b),
            (Some(a), None) | (None, Some(a)) => a,
            (None, None) => return u64::MAX,
        };
        end.ms_since(now)
    }

    /// When the life lease ends if nothing renews it, and how long it is: as a coordinator gave it to this life of the
    /// agent. What was only resumed is not among it: an agent that is started again and again gives itself no time.
    pub fn given(&self) -> Option<(MonoMicros, u64)> {
        let ends = self.renewed?.plus_ms(self.life_ms);
        Some((self.agreed_until.map_or(ends, |agreed| agreed.max(ends)), self.life_ms))
    }

    /// The life lease lapsed: stop, unwind and seal.
    pub fn life_expired(&self, now: MonoMicros) -> bool {
        self.life_left_ms(now, None) == 0
    }
}

/// What the coordinator may say of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    Alive,
    /// Silence that the agent declared; expected for `left_ms` more.
    Quiet {
        left_ms: u64,
    },
    /// Shown, not judged.
    Silent {
        for_ms: u64,
    },
    /// The declared silence ended and nothing came: a failure of the agent's to keep its bound.
    QuietOverrun {
        by_ms: u64,
    },
    /// The agent lives and what it was given does not move within its bound. Shown, not judged.
    Stuck {
        for_ms: u64,
    },
    /// Unheard of for a whole life lease, of which the coordinator watched all, and beyond any declared silence: judged.
    Lost {
        for_ms: u64,
    },
}

/// What is known of one host, on the coordinator's CLOCK_BOOTTIME.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLease {
    pub generation: Generation,
    pub heard: MonoMicros,
    /// Only an earlier life of the coordinator heard it, and may have agreed to a silence of which this one does not know.
    unheard: bool,
    pub quiet_until: Option<MonoMicros>,
    pub activity: Activity,
    pub progress: u64,
    /// When `progress` last grew: alive without progress is a different fault from silence.
    pub progressed: MonoMicros,
    /// Since when it has work that must move, and within what time.
    expected: Option<(MonoMicros, u64)>,
    newest_beat: u64,
    /// When a beat of it was answered last.
    answered: Option<MonoMicros>,
}

/// The coordinator's side, for all hosts.
#[derive(Clone, Debug)]
pub struct HostLeases {
    times: LeaseTimes,
    up_since: MonoMicros,
    attentive_since: MonoMicros,
    looked: MonoMicros,
    hosts: BTreeMap<HostId, HostLease>,
    /// Progress is expected of some host.
    working: bool,
}

impl HostLeases {
    pub fn new(times: LeaseTimes, up_since: MonoMicros) -> Self {
        Self { times, up_since, attentive_since: up_since, looked: up_since, hosts: BTreeMap::new(), working: false }
    }

    /// The coordinator pays attention; said again and again. A gap means that it was stalled, and its hosts were not.
    pub fn looked(&mut self, now: MonoMicros) {
        if now.ms_since(self.looked) >= STALL_MS {
            self.attentive_since = now;
        }
        self.looked = self.looked.max(now);
    }

    pub fn times(&self) -> LeaseTimes {
        self.times
    }

    /// A host expected from an earlier life of the coordinator: its silence counts from now, not from its last beat.
    pub fn expect(&mut self, host: HostId, generation: Generation) {
        let now = self.up_since;
        self.hosts.entry(host).or_insert_with(|| HostLease { unheard: true, ..HostLease::new(generation, now) });
    }

    /// A host connected under a generation.
    pub fn welcomed(&mut self, host: HostId, generation: Generation, received: MonoMicros) -> Result<(), Stale> {
        let lease = self.hosts.entry(host).or_insert_with(|| HostLease::new(generation, received));
        if generation < lease.generation {
            return Err(Stale { got: generation, held: lease.generation });
        }
        lease.generation = generation;
        lease.hear(received);
        lease.quiet_until = None;
        lease.newest_beat = 0;
        lease.answered = None;
        // A restarted agent counts from nothing.
        lease.progress = 0;
        Ok(())
    }

    /// What the host was given so far is fenced: nothing under an older generation renews anything from now on.
    pub fn fence(&mut self, host: &HostId, generation: Generation) {
        if let Some(lease) = self.hosts.get_mut(host) {
            lease.generation = lease.generation.max(generation);
        }
    }

    /// A beat arrived. `None` for one of an old generation or an unknown host: it renews nothing. Nor is an answer owed
    /// to every beat: one in an eighth of the dispatch lease keeps it renewed, and each announcement of silence gets its
    /// own. An answer costs both sides as much as a beat.
    pub fn beat(&mut self, host: &HostId, beat: &Beat, received: MonoMicros) -> Option<BeatAck> {
        let (slack, answer_ms) = (self.times.quiet_slack_ms, self.times.dispatch_ms / ANSWERS_PER_LEASE);
        let longest_ms = longest_quiet_ms(self.times.life_ms);
        let lease = self.hosts.get_mut(host)?;
        if beat.generation != lease.generation {
            return None;
        }
        lease.hear(received);
        // Datagrams overtake one another: an older beat is heard, and says nothing about the present.
        if beat.number > lease.newest_beat {
            lease.newest_beat = beat.number;
            lease.activity = beat.activity.clone();
            lease.quiet_until =
                (beat.quiet_ms > 0).then(|| received.plus_ms(beat.quiet_ms.min(longest_ms)).plus_ms(slack));
            if beat.progress > lease.progress {
                lease.progress = beat.progress;
                lease.progressed = received;
            }
        }
        let due = beat.quiet_ms > 0 || lease.answered.is_none_or(|at| received.ms_since(at) >= answer_ms);
        due.then(|| {
            lease.answered = Some(received);
            BeatAck { generation: beat.generation, number: beat.number, sent: beat.sent }
        })
    }

    /// Anything else that proves the agent alive (evidence, a request).
    pub fn heard(&mut self, host: &HostId, received: MonoMicros) {
        if let Some(lease) = self.hosts.get_mut(host) {
            lease.hear(received);
        }
    }

    /// Which hosts have work that must move, each within so many milliseconds; no others have.
    pub fn expect_progress(&mut self, bounds_ms: &BTreeMap<HostId, u64>, now: MonoMicros) {
        // Most looks find nobody at work, before and now.
        if bounds_ms.is_empty() && !self.working {
            return;
        }
        self.working = !bounds_ms.is_empty();
        for (host, lease) in &mut self.hosts {
            let since = lease.expected.map_or(now, |(since, _)| since);
            lease.expected = bounds_ms.get(host).map(|bound| (since, *bound));
        }
    }

    pub fn forget(&mut self, host: &HostId) {
        self.hosts.remove(host);
    }

    pub fn get(&self, host: &HostId) -> Option<&HostLease> {
        self.hosts.get(host)
    }

    /// `None` for an unknown host.
    pub fn health(&self, host: &HostId, now: MonoMicros) -> Option<Health> {
        let lease = self.hosts.get(host)?;
        let since = lease.heard.max(self.up_since.min(now));
        let for_ms = now.ms_since(since);
        let attentive = now.ms_since(self.attentive_since) >= self.times.grace_ms;
        let (life_ms, longest_ms) = (self.times.life_ms, longest_quiet_ms(self.times.life_ms));
        // The agent's clock may be the slower one, and it must have stopped by then.
        let stopped_ms = if lease.unheard { longest_ms + drift_ms(longest_ms) } else { life_ms + drift_ms(life_ms) };
        let expected = lease.quiet_until.is_some_and(|until| now < until.plus_ms(drift_ms(longest_ms)));
        if for_ms >= stopped_ms && now.ms_since(self.up_since) >= life_ms && attentive && !expected {
            return Some(Health::Lost { for_ms });
        }
        if let Some(until) = lease.quiet_until {
            // The slack is in `quiet_until` already; what is shown leaves it out.
            return Some(if now < until {
                Health::Quiet { left_ms: until.ms_since(now).saturating_sub(self.times.quiet_slack_ms) }
            } else {
                Health::QuietOverrun { by_ms: now.ms_since(until) }
            });
        }
        if for_ms >= self.times.silent_ms {
            return Some(Health::Silent { for_ms });
        }
        if let Some((since, bound_ms)) = lease.expected {
            let for_ms = now.ms_since(lease.progressed.max(since));
            if for_ms >= bound_ms {
                return Some(Health::Stuck { for_ms });
            }
        }
        Some(Health::Alive)
    }
}

impl HostLease {
    fn new(generation: Generation, now: MonoMicros) -> Self {
        Self {
            generation,
            heard: now,
            unheard: false,
            quiet_until: None,
            activity: Activity::Idle,
            progress: 0,
            progressed: now,
            expected: None,
            newest_beat: 0,
            answered: None,
        }
    }

    fn hear(&mut self, received: MonoMicros) {
        self.heard = self.heard.max(received);
        self.unheard = false;
    }
}

#[cfg(test)]
mod tests;
