//! Very many host-hours of the lease cores alone: one host against one coordinator, beat by beat, without runs or evidence.
//!
//! The hosts are held at full load (beats come seconds late) and a fifth of all packets is lost, always; on top of that come
//! partitions, stalls and restarts of either side. Wrong is a judgement of a host that was heard within a life lease, or
//! whose agent still believes in its own; and a dead host that is never judged.

use drums_common::{
    clock::Clock as _,
    draw::Draw,
    ids::{Generation, HostId},
    lease::{AgentLease, DRIFT_PPM, Health, HostLeases, LeaseTimes},
    wire::latest::{Activity, Beat, BeatAck, Welcome},
};

use crate::time::{HOUR, MINUTE, MS, MachineClock, S, TrueTime};

const LOSS_PERCENT: u64 = 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    pub beats: u64,
    /// Rightly: silent for a whole life lease.
    pub lost: u64,
    pub faults: u64,
}

/// What is broken until when.
#[derive(Default)]
struct Weather {
    cut_until: u64,
    agent_until: u64,
    coordinator_until: u64,
    /// The coordinator that comes back then is a new one.
    restarted: bool,
    next: u64,
}

impl Weather {
    fn change(&mut self, now: u64, draw: &mut Draw) {
        let us = match draw.below(8) {
            0 => 20 * MINUTE + draw.below(25 * MINUTE),
            1 | 2 => draw.below(10 * MINUTE),
            _ => draw.below(20 * S),
        };
        match draw.below(4) {
            0 => self.cut_until = now + us,
            1 => self.agent_until = now + us,
            2 => self.coordinator_until = now + us,
            _ => (self.coordinator_until, self.restarted) = (now + us, true),
        }
        self.next = now + us + (-(draw.unit().ln()) * (6 * MINUTE) as f64) as u64;
    }
}

/// One host for so many hours.
pub fn host_hours(seed: u64, hours: u64, times: LeaseTimes) -> Result<Judged, String> {
    let mut draw = Draw::new(seed, &["leases"]);
    let time = std::sync::Arc::new(TrueTime::default());
    let (ours, theirs) = (MachineClock::draw(&time, &mut draw), MachineClock::draw(&time, &mut draw));
    let host: HostId = "h1".parse().map_err(|e| format!("{e}"))?;
    let mut generation = Generation(1);
    let welcome = |generation| Welcome {
        host: host.clone(),
        generation,
        beat_ms: times.beat_ms,
        dispatch_lease_ms: times.dispatch_ms,
        life_lease_ms: times.life_ms,
    };
    let mut leases = HostLeases::new(times, ours.boottime());
    let mut agent = AgentLease::default();
    let (mut weather, mut judged) = (Weather::default(), Judged::default());
    weather.next = 10 * MINUTE;
    // On their way, in order of arrival: beats up and answers down.
    let mut beats: Vec<(u64, Beat)> = Vec::new();
    let mut answers: Vec<(u64, BeatAck)> = Vec::new();
    let (mut number, mut heard, mut looked, mut connected) = (0, 0, 0, false);
    let (step, end) = (times.beat_ms * MS, hours * HOUR);
    let mut now = 0;
    while now < end {
        now += step;
        time.set(now);
        if now >= weather.next {
            weather.change(now, &mut draw);
            judged.faults += 1;
        }
        let (cut, agent_runs) = (now < weather.cut_until, now >= weather.agent_until);
        let coordinator_runs = now >= weather.coordinator_until;
        if coordinator_runs && weather.restarted {
            weather.restarted = false;
            leases = HostLeases::new(times, ours.boottime());
            leases.expect(host.clone(), generation);
            connected = false;
        }
        let path = |draw: &mut Draw| {
            let late = if draw.below(50) == 0 { draw.below(5 * S) } else { draw.below(40 * MS) };
            (!cut && draw.below(100) >= LOSS_PERCENT).then_some(late)
        };
        if agent_runs {
            if !connected && coordinator_runs && !cut {
                // A connection gets through in the end: QUIC sends again.
                agent.welcomed(&welcome(generation), theirs.boottime()).map_err(|e| e.to_string())?;
                leases.welcomed(host.clone(), generation, ours.boottime()).map_err(|e| e.to_string())?;
                (heard, connected) = (now, true);
            }
            number += 1;
            judged.beats += 1;
            if connected && let Some(after) = path(&mut draw) {
                let beat = Beat {
                    generation: agent.generation(),
                    number,
                    sent: theirs.boottime(),
                    activity: Activity::Idle,
                    quiet_ms: 0,
                    progress: number,
                };
                beats.push((now + after, beat));
            }
            answers.retain(|(at, ack)| {
                if *at <= now {
                    agent.acked(ack, theirs.boottime());
                }
                *at > now
            });
        }
        if coordinator_runs {
            // One that was stopped may look at its leases before it reads what arrived, or after.
            let first = draw.below(2) == 0;
            for reads in [!first, first] {
                if reads {
                    beats.retain(|(at, beat)| {
                        if *at <= now {
                            // Not every beat is answered.
                            if leases.get(&host).is_some_and(|l| l.generation == beat.generation) {
                                heard = now;
                            }
                            if let Some(ack) = leases.beat(&host, beat, ours.boottime())
                                && let Some(after) = path(&mut draw)
                            {
                                answers.push((now + after, ack));
                            }
                        }
                        *at > now
                    });
                } else {
                    leases.looked(ours.boottime());
                    looked = now;
                    if let Some(Health::Lost { for_ms }) = leases.health(&host, ours.boottime()) {
                        judged.lost += 1;
                        let life_us = times.life_ms * MS;
                        if now - heard < life_us - life_us * DRIFT_PPM / 1_000_000 {
                            return Err(format!("seed {seed}: lost for {for_ms} ms, heard {} us before", now - heard));
                        }
                        if !agent.life_expired(theirs.boottime()) {
                            return Err(format!("seed {seed}: judged at {now} us before its agent gave up"));
                        }
                        generation = Generation(generation.0 + 1);
                        leases.fence(&host, generation);
                        leases.forget(&host);
                        beats.clear();
                        connected = false;
                        heard = now;
                    }
                }
            }
        }
        // Watched without a gap for two life leases and a grace, it would have been judged.
        let most = 2 * times.life_ms * MS + times.grace_ms * MS + 10 * S;
        if connected && coordinator_runs && looked == now && now - heard > most + 45 * MINUTE {
            return Err(format!("seed {seed}: silent for {} us and never judged", now - heard));
        }
    }
    Ok(judged)
}
