//! What is really so in a simulated world, written down by whoever does it, and the invariants that it must never break.
//!
//! Knows what agents have on disk, who measures, what was heard when, and who was killed or cut off; is told of every event
//! and answers with the first broken invariant. Nothing of the code under test reads it.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    evidence::{BlockKind, BlockResult, Body, Record},
    ids::{HostId, RunId},
    lease::{DRIFT_PPM, LeaseTimes, longest_quiet_ms},
    verdict::Verdict,
};
use drums_coordinator::core::run::{Ending, Phase, RunState, UNWIND_MS};

use crate::time::{MS, S};

/// Beyond deadline and unwinding, a run may take this until it is closed: a look of the driver's (at most two seconds here),
/// another for what it finds out, and what clocks are apart after an hour.
pub const CLOSING_US: u64 = 10 * S;

pub type Broken = String;

/// An agent's disk and its doings.
#[derive(Debug, Default)]
pub struct HostTruth {
    /// The machine it is on, and how fast its clock is, parts per million.
    pub machine: String,
    pub ppm: i64,
    /// Records that its disk has for good, by run.
    pub written: BTreeMap<RunId, Vec<Record>>,
    /// The highest acknowledgement that it was given.
    pub acked: BTreeMap<RunId, u64>,
    /// When the newest beat or hello that a coordinator answered was sent, as far as the agent has the answer.
    pub renewed_us: Option<u64>,
    /// When anything of it last reached a coordinator, and until when it declared silence then.
    pub heard_us: u64,
    pub quiet_until_us: u64,
    pub measuring: Option<(RunId, BlockKind, u32)>,
    /// How often it was fenced.
    pub fences: u32,
    /// Runs in which its agent was killed, told to break or given up by its own leases: they may end badly.
    pub troubled: BTreeSet<RunId>,
}

#[derive(Debug, Default)]
pub struct Truth {
    pub hosts: BTreeMap<HostId, HostTruth>,
    pub times: LeaseTimes,
    /// Since when the coordinator is up and reads what arrives; `None` while it is down or stalled.
    pub up_us: Option<u64>,
    pub attentive_us: Option<u64>,
    /// Time in which no coordinator looked, since the simulation began.
    absences: Vec<(u64, u64)>,
    absent_since: Option<u64>,
    pub cancelled: BTreeSet<RunId>,
    runs: BTreeMap<RunId, RunState>,
    pub counted: Counted,
}

/// What happened, for the summary: a simulation in which nothing goes wrong shows nothing.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    pub by_verdict: BTreeMap<&'static str, u32>,
    pub blocks: u32,
    pub records: u64,
    pub late: u64,
    pub lost_hosts: u32,
    pub faults: BTreeMap<&'static str, u32>,
}

impl Counted {
    pub fn add(&mut self, other: &Self) {
        for (k, n) in &other.by_verdict {
            *self.by_verdict.entry(k).or_default() += n;
        }
        for (k, n) in &other.faults {
            *self.faults.entry(k).or_default() += n;
        }
        self.blocks += other.blocks;
        self.records += other.records;
        self.late += other.late;
        self.lost_hosts += other.lost_hosts;
    }
}

impl Truth {
    pub fn new(times: LeaseTimes, hosts: &[(&str, &str)]) -> Self {
        let hosts = hosts
            .iter()
            .map(|(name, machine)| {
                (crate::fleet::host(name), HostTruth { machine: (*machine).to_owned(), ..HostTruth::default() })
            })
            .collect();
        Self { hosts, times, absent_since: Some(0), ..Self::default() }
    }

    pub fn host(&mut self, host: &HostId) -> &mut HostTruth {
        self.hosts.entry(host.clone()).or_default()
    }

    pub fn fault(&mut self, kind: &'static str) {
        *self.counted.faults.entry(kind).or_default() += 1;
    }

    /// The coordinator begins or ceases to look.
    pub fn coordinator(&mut self, looks: bool, now_us: u64) {
        match (looks, self.absent_since) {
            (true, Some(since)) => {
                self.absences.push((since, now_us));
                self.absent_since = None;
            }
            (false, None) => self.absent_since = Some(now_us),
            _ => {}
        }
        self.attentive_us = looks.then_some(now_us);
    }

    /// A block begins on a host: nobody else measures on its machine, and its dispatch lease holds.
    pub fn begins(&mut self, host: &HostId, block: (RunId, BlockKind, u32), now_us: u64) -> Result<(), Broken> {
        let machine = self.host(host).machine.clone();
        if let Some((other, t)) =
            self.hosts.iter().find(|(h, t)| *h != host && t.machine == machine && t.measuring.is_some())
        {
            return Err(format!("{host} measures while {other} on the same machine measures {:?}", t.measuring));
        }
        let dispatch_us = self.times.dispatch_ms * MS;
        let allowed = dispatch_us + dispatch_us * DRIFT_PPM / 1_000_000 + MS;
        let h = self.host(host);
        let since = h.renewed_us.map(|r| now_us - r);
        if since.is_none_or(|s| s > allowed) {
            return Err(format!("{host} began {block:?}, and its dispatch lease was renewed {since:?} us before"));
        }
        h.measuring = Some(block);
        self.counted.blocks += 1;
        Ok(())
    }

    pub fn stops(&mut self, host: &HostId) {
        self.host(host).measuring = None;
    }

    /// What is on an agent's disk now. It may have grown and nothing else.
    pub fn on_disk(&mut self, host: &HostId, run: RunId, records: &[Record]) -> Result<(), Broken> {
        let written = self.host(host).written.entry(run).or_default();
        if records.len() < written.len() {
            return Err(format!("{host} had {} records of {run} on disk and has {}", written.len(), records.len()));
        }
        if let Some((a, b)) = written.iter().zip(records).find(|(a, b)| a != b) {
            return Err(format!("record {} of {run} on {host} changed on disk: {a:?} became {b:?}", a.seq));
        }
        let new = &records[written.len()..];
        written.extend_from_slice(new);
        self.counted.records += new.len() as u64;
        Ok(())
    }

    /// An agent's disk took more records, which follow what was there.
    pub fn appended(&mut self, host: &HostId, run: RunId, new: Vec<Record>) -> Result<(), Broken> {
        self.counted.records += new.len() as u64;
        let written = self.host(host).written.entry(run).or_default();
        for record in new {
            if record.seq != written.len() as u64 + 1 {
                return Err(format!("{host} wrote record {} of {run} after {}", record.seq, written.len()));
            }
            written.push(record);
        }
        Ok(())
    }

    /// An acknowledgement reached an agent.
    pub fn acknowledged(&mut self, host: &HostId, run: RunId, through: u64) -> Result<(), Broken> {
        let h = self.host(host);
        let written = h.written.get(&run).map_or(0, |w| w.len() as u64);
        if through > written {
            return Err(format!("{through} records of {run} were acknowledged to {host}, which wrote {written}"));
        }
        let acked = h.acked.entry(run).or_default();
        *acked = through.max(*acked);
        Ok(())
    }

    /// The stored evidence of one host of one run, with what is marked late: each record once, as it was written, without
    /// gaps, and nothing acknowledged is missing.
    pub fn stored(&mut self, host: &HostId, run: RunId, stored: &[(Record, bool)]) -> Result<(), Broken> {
        let h = self.host(host);
        let none = Vec::new();
        let written = h.written.get(&run).unwrap_or(&none);
        for (i, (record, _)) in stored.iter().enumerate() {
            if record.seq != i as u64 + 1 {
                return Err(format!("the store has record {} of {run} on {host} in place {}", record.seq, i + 1));
            }
            if written.get(i) != Some(record) {
                return Err(format!("the store has another record {} of {run} than {host} wrote", record.seq));
            }
        }
        let acked = h.acked.get(&run).copied().unwrap_or(0);
        if acked > stored.len() as u64 {
            return Err(format!(
                "{acked} records of {run} were acknowledged to {host} and {} are stored",
                stored.len()
            ));
        }
        self.counted.late += stored.iter().filter(|(_, late)| *late).count() as u64;
        Ok(())
    }

    /// A run's state was stored.
    pub fn run(&mut self, state: &RunState, now_us: u64) -> Result<(), Broken> {
        let id = state.id;
        let before = self.runs.get(&id).cloned();
        for h in &state.hosts {
            let was = before.as_ref().and_then(|b| b.host(&h.host));
            if h.lost && !was.is_some_and(|w| w.lost) {
                self.counted.lost_hosts += 1;
                if state.started.is_none() {
                    // It was given nothing of this run that a fence could part from what comes later.
                    self.lost(&h.host, now_us)?;
                } else if self.host(&h.host).fences < h.generation.0 {
                    // Generations begin at 1, so this many fences are behind the one that it got the run under.
                    return Err(format!("{id}: {} was lost without being fenced", h.host));
                }
            }
            // A block that ended was granted, and its end is on the host's disk.
            for e in h.ended.iter().skip(was.map_or(0, |w| w.ended.len())) {
                let end = |r: &Record| matches!(&r.body, Body::BlockEnded(b) if b.block == e.block && b.kind == e.kind && b.result == e.result);
                let host = self.host(&h.host);
                let record = host.written.get(&id).and_then(|w| w.iter().find(|r| end(r)));
                let Some(record) = record else {
                    return Err(format!("{id} counts an end of block {} that {} never wrote", e.block, h.host));
                };
                if record.generation < h.generation {
                    return Err(format!(
                        "{id} counts a record of fenced generation {} of {}",
                        record.generation, h.host
                    ));
                }
            }
        }
        self.one_open_block_per_machine(state)?;
        if let Phase::Closed { verdict } = state.phase
            && before.as_ref().is_none_or(RunState::live)
        {
            *self.counted.by_verdict.entry(verdict.as_str()).or_default() += 1;
            self.closed(state, verdict, now_us).map_err(|e| format!("{id} closed as {verdict}: {e}"))?;
        }
        self.runs.insert(id, state.clone());
        Ok(())
    }

    fn one_open_block_per_machine(&self, state: &RunState) -> Result<(), Broken> {
        let mut open: BTreeMap<&str, &HostId> = BTreeMap::new();
        for h in state.hosts.iter().filter(|h| state.phase == Phase::Running && h.open_block().is_some()) {
            if let Some(other) = open.insert(&h.machine.boot_id, &h.host) {
                return Err(format!("{} grants {} and {other} blocks of one machine at once", state.id, h.host));
            }
        }
        Ok(())
    }

    /// The generation that the store has for a host. A new one is a judgement.
    pub fn fenced(&mut self, host: &HostId, generation: u32, now_us: u64) -> Result<(), Broken> {
        let fences = generation.saturating_sub(1);
        if fences > self.host(host).fences {
            self.lost(host, now_us)?;
            self.host(host).fences = fences;
        }
        Ok(())
    }

    /// A host was judged: it must have been silent for a whole life lease, beyond what it declared, and the coordinator up
    /// and attentive.
    fn lost(&self, host: &HostId, now_us: u64) -> Result<(), Broken> {
        let h = &self.hosts[host];
        let slow = |us: u64| us - us * DRIFT_PPM / 1_000_000;
        let silent_us = now_us - h.heard_us;
        if silent_us < slow(self.times.life_ms * MS) {
            return Err(format!("{host} was judged lost {silent_us} us after it was heard"));
        }
        if now_us < h.quiet_until_us {
            return Err(format!("{host} was judged lost in a silence that it had declared"));
        }
        let up_us = self.up_us.map_or(0, |up| now_us - up);
        if up_us < slow(self.times.life_ms * MS) {
            return Err(format!("{host} was judged lost by a coordinator that was up for {up_us} us"));
        }
        let attentive_us = self.attentive_us.map_or(0, |since| now_us - since);
        if attentive_us < slow(self.times.grace_ms * MS) {
            return Err(format!("{host} was judged lost by a coordinator that had looked for {attentive_us} us"));
        }
        let since_us = h.renewed_us.map_or(now_us, |r| now_us - r);
        let by_its_clock = since_us.saturating_add_signed(since_us as i64 / 1_000_000 * h.ppm + h.ppm.signum());
        if by_its_clock < self.times.life_ms * MS {
            return Err(format!("{host} was judged lost {by_its_clock} us of its clock after its lease was renewed"));
        }
        Ok(())
    }

    /// The verdict is true, and came in time.
    fn closed(&mut self, state: &RunState, verdict: Verdict, now_us: u64) -> Result<(), Broken> {
        let completed = |h: &drums_coordinator::core::run::HostRun| {
            h.granted.len() as u32 >= 5
                && h.granted.iter().all(|g| {
                    h.ended.iter().any(|e| (e.block, e.kind) == (g.block, g.kind) && e.result == BlockResult::Completed)
                })
        };
        let all_completed = state.hosts.iter().all(completed);
        match (&state.ending, verdict) {
            (Some(Ending::Done), Verdict::Pass) if all_completed => {}
            (Some(Ending::Done), Verdict::Invalid) if all_completed => {}
            (Some(Ending::Cancelled { .. }), Verdict::Cancelled) if self.cancelled.contains(&state.id) => {}
            (Some(Ending::Lost { host, .. }), Verdict::Lost) if state.host(host).is_some_and(|h| h.lost) => {}
            (Some(Ending::Deadline), Verdict::Incomplete) => {
                if state.deadline.is_some_and(|d| state.closed.is_some_and(|c| c < d)) {
                    return Err("before its deadline".to_owned());
                }
            }
            (Some(Ending::Interrupted { host, why, .. }), Verdict::Incomplete) => {
                if !self.host(host).troubled.contains(&state.id) {
                    return Err(format!("{host} was never troubled in it: {why}"));
                }
            }
            (ending, _) => return Err(format!("its ending is {ending:?}, all blocks completed: {all_completed}")),
        }
        if !matches!(state.ending, Some(Ending::Done)) && all_completed && state.hosts.iter().all(|h| !h.lost) {
            let ended = state.hosts.iter().flat_map(|h| &h.ended).map(|e| e.at).max();
            // Every block may have completed after the end was decided.
            let decided = state.unwind_by.map(|by| by.0 - (UNWIND_MS * MS) as i64);
            if ended.is_some_and(|e| decided.is_some_and(|d| e.0 < d)) && !matches!(verdict, Verdict::Cancelled) {
                return Err("although every block had completed before".to_owned());
            }
        }
        self.in_time(state, now_us)
    }

    /// By deadline, unwinding and a bound, in time that a coordinator looked.
    fn in_time(&self, state: &RunState, now_us: u64) -> Result<(), Broken> {
        let (Some(deadline), Some(closed)) = (state.deadline, state.closed) else { return Ok(()) };
        let late_us = (closed.0 - deadline.0).max(0) as u64;
        let since = now_us.saturating_sub(late_us);
        let absent: u64 =
            self.absences.iter().map(|(from, to)| to.min(&now_us).saturating_sub(*from.max(&since))).sum();
        // Being away may take the end of unwinding as well as the deadline itself.
        let allowed = UNWIND_MS * MS + CLOSING_US + absent;
        if late_us > allowed {
            return Err(format!("{} s after its deadline; {} s are allowed", late_us / S, allowed / S));
        }
        Ok(())
    }

    /// At the end, when everything is back and has had its time: nothing is open, nothing is owed.
    pub fn rest(&self) -> Result<(), Broken> {
        for (id, state) in &self.runs {
            if state.live() {
                return Err(format!("{id} is still {}", state.phase.as_str()));
            }
            if state.started.is_some()
                && let Some(h) = state.hosts.iter().find(|h| h.teardown.is_none())
            {
                return Err(format!("{} has not told how {id} was undone", h.host));
            }
        }
        for (host, h) in &self.hosts {
            if let Some((run, w)) = h.written.iter().find(|(run, w)| h.acked.get(run) != Some(&(w.len() as u64))) {
                return Err(format!("{host} has {} records of {run}, {:?} acknowledged", w.len(), h.acked.get(run)));
            }
        }
        Ok(())
    }

    /// True if this state has not been seen.
    pub fn differs(&self, state: &RunState) -> bool {
        self.runs.get(&state.id) != Some(state)
    }

    /// True if more of its hosts are lost than were seen to be.
    pub fn loses(&self, state: &RunState) -> bool {
        let lost = |s: &RunState| s.hosts.iter().filter(|h| h.lost).count();
        lost(state) > self.runs.get(&state.id).map_or(0, lost)
    }

    /// Runs that the coordinator has something to do for.
    pub fn unsettled(&self) -> impl Iterator<Item = RunId> + '_ {
        let open = |s: &&RunState| s.live() || (s.started.is_some() && s.hosts.iter().any(|h| h.teardown.is_none()));
        self.runs.values().filter(open).map(|s| s.id)
    }

    pub fn runs(&self) -> impl Iterator<Item = &RunState> {
        self.runs.values()
    }

    /// A beat or anything else arrived at a coordinator that looks.
    pub fn heard(&mut self, host: &HostId, quiet_ms: u64, now_us: u64) {
        let longest_ms = longest_quiet_ms(self.times.life_ms);
        let h = self.host(host);
        h.heard_us = now_us;
        if quiet_ms > 0 {
            h.quiet_until_us = now_us + quiet_ms.min(longest_ms) * MS;
        }
    }

    /// An answer reached an agent: what it answers was sent at `sent_us`.
    pub fn answered(&mut self, host: &HostId, sent_us: u64) {
        let h = self.host(host);
        h.renewed_us = h.renewed_us.max(Some(sent_us));
    }
}
