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
}

impl HostLeases {
    pub fn new(times: LeaseTimes, up_since: MonoMicros) -> Self {
        Self { times, up_since, attentive_since: up_since, looked: up_since, hosts: BTreeMap::new() }
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000;

    fn at(seconds: f64) -> MonoMicros {
        MonoMicros((seconds * S as f64) as u64)
    }
    fn host() -> HostId {
        "h1".parse().unwrap()
    }
    fn welcome(g: u32) -> Welcome {
        Welcome {
            host: host(),
            generation: Generation(g),
            beat_ms: 1_000,
            dispatch_lease_ms: 10_000,
            life_lease_ms: 1_800_000,
        }
    }
    fn ack(g: u32, sent: MonoMicros) -> BeatAck {
        BeatAck { generation: Generation(g), number: 1, sent }
    }
    fn beat(g: u32, number: u64, quiet_ms: u64) -> Beat {
        Beat { generation: Generation(g), number, sent: at(0.0), activity: Activity::Idle, quiet_ms, progress: number }
    }

    #[test]
    fn an_agent_that_comes_back_and_hears_nobody_ends_what_it_held() {
        let mut lease = AgentLease::default();
        assert_eq!(lease.life_left_ms(MonoMicros(0), None), u64::MAX);
        lease.resumed(1_000, MonoMicros(5_000));
        assert!(!lease.may_take_new_block(MonoMicros(5_000)));
        assert!(!lease.life_expired(MonoMicros(1_003_000)) && lease.life_expired(MonoMicros(1_005_000)));
        let times = LeaseTimes::default();
        let welcome = Welcome {
            host: "h1".parse().unwrap(),
            generation: Generation(1),
            beat_ms: times.beat_ms,
            dispatch_lease_ms: times.dispatch_ms,
            life_lease_ms: times.life_ms,
        };
        lease.welcomed(&welcome, MonoMicros(900_000)).unwrap();
        assert_eq!(lease.life_left_ms(MonoMicros(900_000), None), times.life_ms);
    }

    #[test]
    fn an_agent_that_was_never_welcomed_takes_nothing() {
        let mut lease = AgentLease::default();
        assert!(!lease.may_take_new_block(at(0.0)));
        assert!(!lease.life_expired(at(1e6)));
        assert!(!lease.acked(&ack(0, at(0.0)), at(0.0)));
        assert_eq!(lease.life_left_ms(at(1.0), Some(at(3.0))), 2_000);
    }

    #[test]
    fn leases_count_from_when_the_beat_was_sent() {
        let mut lease = AgentLease::default();
        lease.welcomed(&welcome(3), at(0.0)).unwrap();
        // Sent at 5 s, acknowledged at 9 s: dispatch ends at 15 s, not at 19 s.
        assert!(lease.acked(&ack(3, at(5.0)), at(9.0)));
        assert!(lease.may_take_new_block(at(14.9)));
        assert!(!lease.may_take_new_block(at(15.0)));
        assert!(!lease.life_expired(at(1804.9)));
        assert!(lease.life_expired(at(1805.0)));
        assert_eq!(lease.life_left_ms(at(805.0), Some(at(1000.0))), 195_000);
    }

    #[test]
    fn stale_future_and_late_acknowledgements_renew_nothing() {
        let mut lease = AgentLease::default();
        lease.welcomed(&welcome(3), at(10.0)).unwrap();
        assert!(!lease.acked(&ack(2, at(11.0)), at(12.0)), "older generation");
        assert!(!lease.acked(&ack(3, at(13.0)), at(12.0)), "not sent yet");
        assert!(!lease.acked(&ack(3, at(9.0)), at(12.0)), "older than what is held");
        assert_eq!(lease.welcomed(&welcome(2), at(12.0)), Err(Stale { got: Generation(2), held: Generation(3) }));
        assert!(lease.may_take_new_block(at(19.9)));
    }

    #[test]
    fn silence_is_shown_then_judged_and_never_before_a_full_grace_of_uptime() {
        let times = LeaseTimes::default();
        let mut leases = HostLeases::new(times, at(100.0));
        leases.welcomed(host(), Generation(1), at(100.0)).unwrap();
        let health = |l: &HostLeases, t| l.health(&host(), at(t)).unwrap();
        assert_eq!(health(&leases, 100.0), Health::Alive);
        assert_eq!(health(&leases, 102.5), Health::Silent { for_ms: 2_500 });
        assert_eq!(health(&leases, 1899.0), Health::Silent { for_ms: 1_799_000 });
        assert!(matches!(health(&leases, 1901.7), Health::Silent { .. }), "its clock may be the slower one");
        assert!(matches!(health(&leases, 1901.81), Health::Lost { .. }));
        // It comes back.
        leases.welcomed(host(), Generation(1), at(1902.0)).unwrap();
        assert_eq!(health(&leases, 1902.0), Health::Alive);
        assert_eq!(leases.health(&"h9".parse().unwrap(), at(0.0)), None);
    }

    #[test]
    fn a_coordinator_that_was_stalled_judges_nobody_before_it_has_read_what_arrived() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        (0..=10).for_each(|s| leases.looked(at(f64::from(s))));
        // Stopped for an hour, in which the host went on beating.
        leases.looked(at(3610.0));
        assert!(matches!(leases.health(&host(), at(3610.0)), Some(Health::Silent { .. })));
        let mut read = leases.clone();
        read.beat(&host(), &beat(1, 1, 0), at(3611.0)).unwrap();
        assert_eq!(read.health(&host(), at(3611.0)), Some(Health::Alive));
        // One that sent nothing is judged once the grace is over.
        (3611..=3620).for_each(|s| leases.looked(at(f64::from(s))));
        assert!(matches!(leases.health(&host(), at(3619.9)), Some(Health::Silent { .. })));
        assert!(matches!(leases.health(&host(), at(3620.0)), Some(Health::Lost { .. })));
    }

    #[test]
    fn an_agent_that_lives_and_whose_work_does_not_move_is_stuck() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        let mut n = 0;
        let mut health = |leases: &mut HostLeases, t: f64, progress: u64| {
            n += 1;
            let beat = Beat { progress, ..beat(1, n, 0) };
            leases.beat(&host(), &beat, at(t));
            leases.health(&host(), at(t)).unwrap()
        };
        assert_eq!(health(&mut leases, 500.0, 7), Health::Alive, "nothing is expected of it");
        let bound = BTreeMap::from([(host(), 60_000)]);
        leases.expect_progress(&bound, at(600.0));
        leases.expect_progress(&bound, at(630.0));
        assert_eq!(health(&mut leases, 659.0, 7), Health::Alive);
        assert_eq!(health(&mut leases, 660.0, 7), Health::Stuck { for_ms: 60_000 });
        assert_eq!(leases.health(&host(), at(663.0)), Some(Health::Silent { for_ms: 3_000 }), "silence says less");
        assert_eq!(health(&mut leases, 670.0, 8), Health::Alive);
        assert_eq!(health(&mut leases, 730.0, 8), Health::Stuck { for_ms: 60_000 });
        leases.expect_progress(&BTreeMap::new(), at(731.0));
        assert_eq!(health(&mut leases, 731.0, 8), Health::Alive);
        // Its agent is started anew and counts from nothing.
        leases.welcomed(host(), Generation(1), at(740.0)).unwrap();
        leases.expect_progress(&bound, at(740.0));
        leases.beat(&host(), &Beat { progress: 1, ..beat(1, 1, 0) }, at(799.0)).unwrap();
        leases.heard(&host(), at(800.0));
        assert_eq!(leases.health(&host(), at(800.0)), Some(Health::Alive));
    }

    #[test]
    fn declared_silence_is_expected_and_overrunning_it_is_a_failure() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        leases.beat(&host(), &beat(1, 1, 40 * 60_000), at(1.0)).unwrap();
        let health = |l: &HostLeases, t| l.health(&host(), at(t)).unwrap();
        assert_eq!(health(&leases, 21.0), Health::Quiet { left_ms: 2_380_000 });
        leases.beat(&host(), &beat(1, 2, 30_000), at(22.0)).unwrap();
        assert_eq!(health(&leases, 51.0), Health::Quiet { left_ms: 1_000 });
        assert_eq!(health(&leases, 55.5), Health::QuietOverrun { by_ms: 1_000 });
        leases.beat(&host(), &beat(1, 3, 0), at(56.0)).unwrap();
        assert_eq!(health(&leases, 56.0), Health::Alive);
    }

    #[test]
    fn silence_that_was_agreed_on_may_be_longer_than_the_life_lease_and_no_longer_than_declared() {
        let (mut leases, mut agent) = (HostLeases::new(LeaseTimes::default(), at(0.0)), AgentLease::default());
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        agent.welcomed(&welcome(1), at(0.0)).unwrap();
        leases.beat(&host(), &beat(1, 1, 40 * 60_000), at(1.0)).unwrap();
        agent.silence_agreed(at(1.0), 40 * 60_000);
        // 40 minutes from second 1, the slack, and what clocks may be apart after an hour.
        let (end, judged) = (2401.0, 2401.0 + 2.5 + 3.61);
        (0..5_000).for_each(|s| leases.looked(at(f64::from(s))));
        assert!(!agent.life_expired(at(end - 0.1)) && agent.life_expired(at(end)));
        assert!(!agent.may_take_new_block(at(11.0)), "silence renews no dispatch lease");
        assert!(matches!(leases.health(&host(), at(judged - 0.1)), Some(Health::QuietOverrun { .. })));
        assert!(matches!(leases.health(&host(), at(judged)), Some(Health::Lost { .. })));
        // What is declared for ever is cut.
        leases.beat(&host(), &beat(1, 2, u64::MAX), at(2401.0)).unwrap();
        agent.silence_agreed(at(2401.0), u64::MAX);
        assert!(agent.life_expired(at(2401.0 + 3600.0)));
        assert!(matches!(leases.health(&host(), at(2401.0 + 3606.2)), Some(Health::Lost { .. })));
    }

    #[test]
    fn a_coordinator_that_was_restarted_waits_out_any_silence_that_was_agreed_on_before() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.expect(host(), Generation(1));
        let mut agent = AgentLease::default();
        agent.welcomed(&welcome(1), at(0.0)).unwrap();
        // Declared to the one before, a moment before its end.
        agent.silence_agreed(at(0.0), u64::MAX);
        (0..4_000).for_each(|s| leases.looked(at(f64::from(s))));
        for (t, stopped, lost) in [(3599.9, false, false), (3603.5, true, false), (3603.7, true, true)] {
            assert_eq!(agent.life_expired(at(t)), stopped, "{t}");
            assert_eq!(matches!(leases.health(&host(), at(t)), Some(Health::Lost { .. })), lost, "{t}");
        }
        // Once it is heard, this one knows.
        leases.heard(&host(), at(1.0));
        assert!(matches!(leases.health(&host(), at(1803.0)), Some(Health::Lost { .. })));
    }

    #[test]
    fn a_fenced_host_renews_nothing_under_its_old_generation() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        leases.fence(&host(), Generation(2));
        assert_eq!(leases.beat(&host(), &beat(1, 1, 0), at(1.0)), None);
        assert!(leases.welcomed(host(), Generation(1), at(1.0)).is_err());
        assert!(leases.welcomed(host(), Generation(2), at(1.0)).is_ok());
    }

    #[test]
    fn beats_of_another_generation_or_out_of_order_say_nothing_about_the_present() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(2), at(0.0)).unwrap();
        assert_eq!(leases.beat(&host(), &beat(1, 9, 0), at(1.0)), None);
        assert!(leases.beat(&host(), &beat(2, 5, 10_000), at(2.0)).is_some());
        assert_eq!(leases.beat(&host(), &beat(2, 4, 0), at(2.1)), None, "heard, and answered a moment ago");
        assert!(matches!(leases.health(&host(), at(3.0)), Some(Health::Quiet { .. })), "beat 4 was overtaken");
        assert_eq!(leases.get(&host()).unwrap().progress, 5);
        assert!(leases.welcomed(host(), Generation(1), at(3.0)).is_err());
    }

    #[test]
    fn a_beat_in_an_eighth_of_the_dispatch_lease_is_answered_and_so_is_every_announcement() {
        let mut leases = HostLeases::new(LeaseTimes::default(), at(0.0));
        leases.welcomed(host(), Generation(1), at(0.0)).unwrap();
        let mut n = 0;
        let mut answered = |t: f64, quiet_ms| {
            n += 1;
            leases.beat(&host(), &beat(1, n, quiet_ms), at(t)).is_some()
        };
        let answers: Vec<bool> = (0..8).map(|i| answered(f64::from(i) * 0.5, 0)).collect();
        assert_eq!(answers, [true, false, false, true, false, false, true, false]);
        assert!(answered(4.0, 2_000) && answered(4.1, 2_000), "whoever wants to be silent waits for the answer");
    }

    #[test]
    fn lease_times_that_mean_never_or_always_are_refused() {
        assert_eq!(LeaseTimes::default().validate(), Ok(()));
        let zero = LeaseTimes { life_ms: 0, ..Default::default() };
        assert_eq!(zero.validate(), Err(BadLeaseTimes::Zero("life_ms")));
        let short = LeaseTimes { dispatch_ms: 900, ..Default::default() };
        assert!(short.validate().unwrap_err().to_string().contains("twice beat_ms"));
    }

    proptest! {
        /// Whatever the order and delay of acknowledgements, an agent never believes longer in its lease than
        /// `dispatch` after the newest beat that it really sent and that was acknowledged.
        #[test]
        fn the_agent_never_outlives_its_newest_acknowledged_beat(
            acks in proptest::collection::vec((0u64..100, 0u64..100, 0u32..3), 0..40),
        ) {
            let mut lease = AgentLease::default();
            lease.welcomed(&welcome(1), MonoMicros(0)).unwrap();
            let mut newest = 0;
            for (sent, delay, generation) in acks {
                lease.acked(&ack(generation, MonoMicros(sent * S)), MonoMicros((sent + delay) * S));
                if generation == 1 { newest = newest.max(sent); }
            }
            prop_assert!(!lease.may_take_new_block(MonoMicros((newest + 10) * S)));
            prop_assert!(lease.may_take_new_block(MonoMicros((newest + 10) * S - 1)));
            prop_assert!(lease.life_expired(MonoMicros((newest + 1800) * S)));
        }

        /// The agent stops before the coordinator judges it: with clocks that differ by what clocks may and any delays, a
        /// host judged lost by the coordinator has a lapsed life lease.
        #[test]
        fn a_lost_host_has_already_stopped(
            beats in proptest::collection::vec((0u64..3600, 0u64..5, any::<bool>()), 0..20),
            now in 0u64..8000,
            slow_ppm in 0..=DRIFT_PPM,
        ) {
            let by_agent = |us: u64| MonoMicros(us - us * slow_ppm / 1_000_000);
            let mut agent = AgentLease::default();
            let mut leases = HostLeases::new(LeaseTimes::default(), MonoMicros(0));
            agent.welcomed(&welcome(1), MonoMicros(0)).unwrap();
            leases.welcomed(host(), Generation(1), MonoMicros(0)).unwrap();
            for (n, (sent, delay, ack_arrives)) in beats.into_iter().enumerate() {
                if sent + delay > now { continue; }
                let b = Beat { sent: by_agent(sent * S), ..beat(1, n as u64 + 1, 0) };
                let received = MonoMicros((sent + delay) * S);
                if let Some(a) = leases.beat(&host(), &b, received) && ack_arrives {
                    agent.acked(&a, by_agent((sent + delay) * S));
                }
            }
            if matches!(leases.health(&host(), MonoMicros(now * S)), Some(Health::Lost { .. })) {
                prop_assert!(agent.life_expired(by_agent(now * S)));
            }
        }
    }
}
