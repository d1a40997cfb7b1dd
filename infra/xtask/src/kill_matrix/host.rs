//! A paid host: its boot, its own timer, its agent and its watchdog, each scheduled once a second while the kernel runs.
//!
//! The timer is the deployed script, the watchdog and both ends of the leases are the real cores. What stands in: the
//! kernel, which boots and shuts down in drawn times; the link, on which a beat and its answer take no time; the lease's
//! file, which is whole or not there.

use anyhow::Result;
use drums_agent::watchdog::{
    bounds::Bounds,
    decide::{Next, Watch},
    lease::{Lease, is_due},
};
use drums_common::{
    clock::{Micros, MonoMicros},
    ids::Generation,
    lease::AgentLease,
    wire::latest::{Activity, Beat},
};
use drums_provider::cloud::UserData;

use super::{
    cell::Layer,
    coordinator::Coordinator,
    timer::{self, LOOK_S, Scripts},
};

/// From the machine's start to the first line of user data.
const USER_DATA_S: u64 = 10;
/// From one attempt to fetch the agent to the next.
const FETCH_AGAIN_S: u64 = 10;
const BEAT_S: u64 = 5;
/// As the agent's settings have it.
pub const FINISH_MS: u64 = 300_000;
const BOOT_ID: &str = "this";

/// How long the parts of a life take on one host, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// From made to the kernel.
    pub kernel_s: u64,
    /// From the kernel to the first attempt to fetch the agent, with which agent and watchdog begin.
    pub boot_s: u64,
    /// From asking for power-off to off.
    pub shutdown_s: u64,
}

/// What is round a host in this second.
pub struct Around<'a> {
    pub now: Micros,
    pub network: bool,
    /// What was signed beforehand is still honoured.
    pub signed: bool,
    pub scripts: &'a Scripts,
    pub timer: bool,
    pub watchdog: bool,
    /// Silence to begin now, for so long.
    pub quiet_ms: Option<u64>,
    /// It is declared first, and not just kept.
    pub declared: bool,
}

pub struct Host {
    attempt: u16,
    pace: Pace,
    kernel: Micros,
    bounds: Bounds,
    /// When the first line of user data powers off.
    first_line: Option<Micros>,
    fetched: Option<Micros>,
    // Faults.
    pub kernel_hung: bool,
    pub agent_ends: bool,
    pub agent_frozen: bool,
    agent: Agent,
    watchdog: Option<Watchdog>,
    lease_file: Option<Lease>,
    /// Power-off was asked for, by whom; done by then.
    off: Option<(Micros, Layer)>,
}

#[derive(Default)]
struct Agent {
    lease: AgentLease,
    /// Of the coordinator that welcomed it last.
    life: Option<u32>,
    beats: u64,
    first_beat: Option<Micros>,
    beaten: Option<Micros>,
    longest_silence_s: u64,
    quiet_until: Option<Micros>,
    written: Option<MonoMicros>,
}

struct Watchdog {
    watch: Watch,
    /// What of the file it has seen.
    seen: Option<MonoMicros>,
    boottime: MonoMicros,
    realtime: Option<Micros>,
}

impl Host {
    pub fn new(attempt: u16, made: Micros, user_data: &UserData, pace: Pace) -> Result<Self> {
        Ok(Self {
            attempt,
            pace,
            kernel: made.plus_ms(pace.kernel_s * 1_000),
            bounds: timer::bounds(user_data)?,
            first_line: None,
            fetched: None,
            kernel_hung: false,
            agent_ends: false,
            agent_frozen: false,
            agent: Agent::default(),
            watchdog: None,
            lease_file: None,
            off: None,
        })
    }

    fn up_s(&self, now: Micros) -> u64 {
        now.ms_since(self.kernel) / 1_000
    }

    /// CLOCK_BOOTTIME.
    fn boottime(&self, now: Micros) -> MonoMicros {
        MonoMicros(0).plus_ms(now.ms_since(self.kernel))
    }

    /// When it beat last; before that, when it began.
    pub fn beaten(&self) -> Micros {
        self.agent.beaten.unwrap_or(self.kernel)
    }

    pub fn first_beat_s(&self) -> Option<u64> {
        Some(self.agent.first_beat?.ms_since(self.kernel) / 1_000)
    }
    pub fn longest_silence_s(&self) -> u64 {
        self.agent.longest_silence_s
    }

    /// A second of its life; who powered it off, once it is off.
    pub fn second(&mut self, around: &Around<'_>, coordinator: &mut Coordinator) -> Result<Option<Layer>> {
        if self.kernel_hung || around.now < self.kernel {
            return Ok(None);
        }
        if let Some((at, layer)) = self.off {
            return Ok((at <= around.now).then_some(layer));
        }
        if around.timer && self.timer_is_due(around)? {
            self.power_off(Layer::GuestTimer, around.now);
        }
        self.fetch(around);
        self.agent(around, coordinator);
        if around.watchdog && self.fetched.is_some() && self.watchdog_is_due(around.now) {
            self.power_off(Layer::Watchdog, around.now);
        }
        Ok(None)
    }

    fn power_off(&mut self, by: Layer, now: Micros) {
        self.off.get_or_insert((now.plus_ms(self.pace.shutdown_s * 1_000), by));
    }

    /// Both arms of layer 1: what the first line of user data left behind, and the unit.
    fn timer_is_due(&mut self, around: &Around<'_>) -> Result<bool> {
        let (now, up_s) = (around.now, self.up_s(around.now));
        let away = |at: Micros| (at.0 - now.0).div_euclid(1_000_000);
        let lifetime_s = i64::try_from(self.bounds.lifetime_ms / 1_000)?;
        if up_s == USER_DATA_S {
            let armed = around.scripts.first_line_s(away(self.bounds.deadline), lifetime_s)?;
            self.first_line = armed.map(|s| now.plus_ms(s * 1_000));
        }
        if up_s < USER_DATA_S {
            return Ok(false);
        }
        let by_first_line = self.first_line.is_some_and(|at| at <= now);
        let looks = (up_s - USER_DATA_S).is_multiple_of(LOOK_S);
        let left_s = lifetime_s - i64::try_from(up_s)?;
        Ok(by_first_line || (looks && around.scripts.unit_is_due(away(self.bounds.deadline), left_s)?))
    }

    /// The agent's program, by a presigned URL. Until it is there, neither agent nor watchdog is.
    fn fetch(&mut self, around: &Around<'_>) {
        let Some(since_s) = self.up_s(around.now).checked_sub(self.pace.boot_s) else { return };
        let tries = self.fetched.is_none() && since_s.is_multiple_of(FETCH_AGAIN_S);
        if tries && around.network && around.signed {
            self.fetched = Some(around.now);
        }
    }

    /// One that was killed and ends whenever it is started, and one that is stopped, look the same: nothing of it runs.
    fn agent(&mut self, around: &Around<'_>, coordinator: &mut Coordinator) {
        let now = around.now;
        let Some(fetched) = self.fetched else { return };
        if self.agent_ends || self.agent_frozen || !around.network {
            return;
        }
        if self.agent.quiet_until.is_some_and(|until| now < until) {
            return;
        }
        self.agent.quiet_until = None;
        let boottime = self.boottime(now);
        let Some(life) = coordinator.life() else { return };
        if self.agent.life != Some(life) {
            if let Some(welcome) = coordinator.welcome(self.attempt)
                && self.agent.lease.welcomed(&welcome, boottime).is_ok()
            {
                self.agent.life = Some(life);
            }
        } else if around.quiet_ms.is_some() || (now.ms_since(fetched) / 1_000).is_multiple_of(BEAT_S) {
            self.agent.beats += 1;
            let silent_s = self.agent.beaten.map_or(0, |at| now.ms_since(at) / 1_000);
            self.agent.longest_silence_s = self.agent.longest_silence_s.max(silent_s);
            self.agent.first_beat.get_or_insert(now);
            self.agent.beaten = Some(now);
            let beat = Beat {
                generation: Generation(u32::from(self.attempt)),
                number: self.agent.beats,
                sent: boottime,
                activity: Activity::Idle,
                quiet_ms: around.quiet_ms.filter(|_| around.declared).unwrap_or(0),
                progress: self.agent.beats,
            };
            let Some(ack) = coordinator.beat(&beat) else { return };
            self.agent.lease.acked(&ack, boottime);
            if let Some(quiet_ms) = around.quiet_ms {
                if around.declared {
                    self.agent.lease.silence_agreed(boottime, quiet_ms);
                }
                self.agent.quiet_until = Some(now.plus_ms(quiet_ms));
            }
        }
        // Before a silence begins, and never within one.
        if let Some((life_ends, life_ms)) = self.agent.lease.given()
            && is_due(self.agent.written, life_ends, life_ms)
        {
            let deadline = Some(self.bounds.deadline);
            self.lease_file = Some(Lease { boot: BOOT_ID.to_owned(), life_ends, life_ms, deadline });
            self.agent.written = Some(life_ends);
        }
    }

    /// It is woken at the instants that it named, and by a renewal.
    fn watchdog_is_due(&mut self, now: Micros) -> bool {
        let boottime = self.boottime(now);
        let bounds = self.bounds;
        let dog = self.watchdog.get_or_insert_with(|| Watchdog {
            watch: Watch::begin(BOOT_ID.to_owned(), boottime, FINISH_MS, 0, None),
            seen: None,
            boottime,
            realtime: None,
        });
        let renewed = self.lease_file.as_ref().filter(|l| dog.seen != Some(l.life_ends));
        let woken = boottime >= dog.boottime || dog.realtime.is_some_and(|at| now >= at) || renewed.is_some();
        if !woken {
            return false;
        }
        dog.watch.saw_bounds(bounds);
        if let Some(lease) = &self.lease_file {
            dog.seen = Some(lease.life_ends);
            // One that cannot be gone by takes nothing back.
            let _ = dog.watch.saw_lease(lease, boottime);
        }
        match dog.watch.next(boottime, now) {
            Next::PowerOff(_) => true,
            Next::Wait { boottime, realtime } => {
                (dog.boottime, dog.realtime) = (boottime, realtime);
                false
            }
        }
    }
}
