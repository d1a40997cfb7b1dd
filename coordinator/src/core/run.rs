//! One run's life.
//!
//! ```text
//! Planned → Placed → Preflight → Running ⇄ Collecting → Unwinding → Closed{verdict, teardown}
//!              │         │          │           │            ▲
//!              └─────────┴──────────┴───────────┴────────────┘   an ending: cancelled, deadline, interrupted, lost, refused
//! ```
//! `Placed` waits for its machines to be free; `Collecting` looks for voided blocks and may go back for replacements.
//! Verdict and teardown are apart: a good run may leak, and a failed teardown never loses a verdict.
//!
//! **Invariant:** every live state ends by the deadline, and `Unwinding` by [`UNWIND_MS`] after it began.
//! **Invariant:** what is to be done next follows from the state alone ([`RunState::pending`]), so a coordinator that was
//! killed anywhere goes on where it was.
//!
//! The state is serialisable because the store keeps it whole, as one row; `version` guards the form.

use std::collections::HashMap;

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockEnded, BlockKind, BlockResult, Body, Teardown},
    experiment::Experiment,
    ids::{Generation, HostId, RunId},
    machine::{HostFacts, MachineIdentity},
    plan,
    verdict::Verdict,
    wire::latest::Grant,
};
use serde::{Deserialize, Serialize};

use super::{placement, turns};

/// How long hosts get to undo a run before it closes without their word. Two minutes: stopping a dozen sessions and
/// discarding templates takes seconds; the rest is patience for a busy machine.
pub const UNWIND_MS: u64 = 120_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Planned,
    Placed,
    Preflight,
    Running,
    Collecting,
    Unwinding,
    Closed { verdict: Verdict },
}

impl Phase {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Placed => "placed",
            Self::Preflight => "preflight",
            Self::Running => "running",
            Self::Collecting => "collecting",
            Self::Unwinding => "unwinding",
            Self::Closed { .. } => "closed",
        }
    }
}

/// Why no more blocks are granted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Every block ended; the analysis gives the verdict.
    Done,
    Cancelled {
        by: String,
    },
    Deadline,
    Interrupted {
        host: HostId,
        block: String,
        why: String,
    },
    Lost {
        host: HostId,
        block: Option<String>,
    },
    Refused {
        host: HostId,
        why: String,
    },
    /// Evidence that was stored cannot be read back.
    Unreadable {
        why: String,
    },
}

impl Ending {
    /// The verdict that this ending forces; none leaves it to the analysis.
    pub fn verdict(&self) -> Option<Verdict> {
        match self {
            Self::Done => None,
            Self::Cancelled { .. } => Some(Verdict::Cancelled),
            Self::Deadline | Self::Interrupted { .. } | Self::Refused { .. } => Some(Verdict::Incomplete),
            Self::Lost { .. } => Some(Verdict::Lost),
            Self::Unreadable { .. } => Some(Verdict::Invalid),
        }
    }

    pub fn in_words(&self) -> String {
        match self {
            Self::Done => "every block ended".to_owned(),
            Self::Cancelled { by } => format!("cancelled by {by}"),
            Self::Deadline => "the deadline passed".to_owned(),
            Self::Interrupted { host, block, why } => format!("{block} on {host} was interrupted: {why}"),
            Self::Lost { host, block: Some(block) } => format!("host {host} was lost in {block}"),
            Self::Lost { host, block: None } => format!("host {host} was lost"),
            Self::Refused { host, why } => format!("host {host} cannot run this: {why}"),
            Self::Unreadable { why } => format!("its stored evidence cannot be read: {why}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedBlock {
    pub block: u32,
    pub kind: BlockKind,
    pub result: BlockResult,
    pub at: Micros,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostRun {
    pub host: HostId,
    pub machine: MachineIdentity,
    /// The lease generation under which the host got this run; records of an older one are late.
    pub generation: Generation,
    pub prepared: bool,
    pub granted: Vec<Grant>,
    pub ended: Vec<EndedBlock>,
    /// Measured blocks beyond the registered number, for voided ones.
    pub replacements: u32,
    pub teardown: Option<Teardown>,
    pub lost: bool,
    /// Evidence up to here is folded into this state.
    pub applied_seq: u64,
}

impl HostRun {
    /// The granted block that has not ended.
    pub fn open_block(&self) -> Option<&Grant> {
        self.granted.iter().find(|g| !self.ended.iter().any(|e| e.block == g.block && e.kind == g.kind))
    }

    /// The next block of the plan; none when all are granted.
    pub fn next_block(&self, experiment: &Experiment) -> Option<Grant> {
        let count = |kind| self.granted.iter().filter(|g| g.kind == kind).count() as u32;
        let (warm, measured) = (count(BlockKind::WarmUp), count(BlockKind::Measured));
        if warm < experiment.design.warmup_blocks {
            Some(plan::grant(experiment, &self.host, BlockKind::WarmUp, warm))
        } else if measured < experiment.design.blocks_per_host + self.replacements {
            Some(plan::grant(experiment, &self.host, BlockKind::Measured, measured))
        } else {
            None
        }
    }

    pub fn total_blocks(&self, experiment: &Experiment) -> u32 {
        experiment.design.warmup_blocks + experiment.design.blocks_per_host + self.replacements
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Of this form.
    pub version: u32,
    pub id: RunId,
    pub registration: Sha256,
    /// 1 for the first run of the registration.
    pub number: u32,
    pub created: Micros,
    /// When the machines were free and the deadline began to count.
    pub started: Option<Micros>,
    pub deadline: Option<Micros>,
    /// The operator's own, earlier end of this run.
    pub until: Option<Micros>,
    pub phase: Phase,
    pub ending: Option<Ending>,
    pub unwind_by: Option<Micros>,
    pub closed: Option<Micros>,
    pub hosts: Vec<HostRun>,
}

/// What happened to a run.
#[derive(Clone, Debug)]
pub enum Event {
    /// Its machines are free and its hosts connected. They may have been fenced, or have moved, while the run waited: it
    /// starts with them as they are now.
    Started {
        hosts: Vec<(HostId, MachineIdentity, Generation)>,
    },
    /// A committed record; `late` when it was made under an old generation.
    Evidence {
        host: HostId,
        seq: u64,
        body: Observed,
        late: bool,
    },
    /// Committed records of several hosts, each host's in order: as so many `Evidence`, in one step.
    Told(Vec<(HostId, u64, Observed, bool)>),
    /// The life lease of a host ended, as the coordinator counts.
    HostLost {
        host: HostId,
    },
    /// The agent said that it cannot meet the demand.
    Refused {
        host: HostId,
        why: String,
    },
    /// The agent said that something failed and that it tries again: for people.
    Complaint {
        host: HostId,
        what: String,
    },
    /// A record of the host's can never be stored, so no later one will be either.
    EvidenceRefused {
        host: HostId,
        why: String,
    },
    /// Stored evidence could not be read for longer than a passing fault lasts.
    Unreadable {
        why: String,
    },
    Cancel {
        by: String,
    },
    /// Answer to [`Pending::FindVoids`]: measured blocks voided so far.
    Voids(Vec<(HostId, u32)>),
    /// Answer to [`Pending::Analyse`].
    Analysed {
        verdict: Verdict,
    },
    /// Time passed.
    Tick,
}

/// What a run's state takes from a record; everything else is for the analysis.
#[derive(Clone, Debug)]
pub enum Observed {
    Preflight(Box<HostFacts>),
    BlockEnded { block: u32, kind: BlockKind, result: BlockResult },
    Closed { teardown: Teardown, reason: String },
    Other,
}

impl From<&Body> for Observed {
    fn from(body: &Body) -> Self {
        match body {
            Body::Preflight(p) => Self::Preflight(Box::new(p.facts.clone())),
            Body::BlockEnded(BlockEnded { block, kind, result, .. }) => {
                Self::BlockEnded { block: *block, kind: *kind, result: result.clone() }
            }
            Body::Closed(c) => Self::Closed { teardown: c.teardown.clone(), reason: c.reason.clone() },
            _ => Self::Other,
        }
    }
}

/// What the driver has to find out for the run to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    FindVoids,
    Analyse,
}

/// One line of the run's history, stored in the same transaction as the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// Stable kebab-case word.
    pub kind: String,
    pub host: Option<HostId>,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Transition {
    pub next: RunState,
    pub notes: Vec<Note>,
}

/// Why an event does nothing to a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("the run is closed already")]
    Closed,
    #[error("the run is ending already")]
    Ending,
    #[error("host {0} is not part of the run")]
    NotItsHost(HostId),
    #[error("the run is {0}, and this is for another phase")]
    WrongPhase(&'static str),
}

/// How a block is called in words.
pub fn block_name(kind: BlockKind, block: u32) -> String {
    match kind {
        BlockKind::WarmUp => format!("warm-up block {block}"),
        BlockKind::Measured => format!("block {block}"),
    }
}

impl RunState {
    pub const VERSION: u32 = 1;

    /// A run with its hosts: `Planned` became `Placed`.
    pub fn place(
        id: RunId,
        registration: Sha256,
        number: u32,
        until: Option<Micros>,
        hosts: Vec<(HostId, MachineIdentity, Generation)>,
        now: Micros,
    ) -> Transition {
        let names: Vec<_> = hosts.iter().map(|h| h.0.to_string()).collect();
        let hosts = hosts
            .into_iter()
            .map(|(host, machine, generation)| HostRun {
                host,
                machine,
                generation,
                prepared: false,
                granted: Vec::new(),
                ended: Vec::new(),
                replacements: 0,
                teardown: None,
                lost: false,
                applied_seq: 0,
            })
            .collect();
        let next = Self {
            version: Self::VERSION,
            id,
            registration,
            number,
            created: now,
            started: None,
            deadline: None,
            until,
            phase: Phase::Placed,
            ending: None,
            unwind_by: None,
            closed: None,
            hosts,
        };
        let notes = vec![note("placed", None, format!("placed on {}", names.join(", ")))];
        Transition { next, notes }
    }

    pub fn live(&self) -> bool {
        !matches!(self.phase, Phase::Closed { .. })
    }

    pub fn verdict(&self) -> Option<Verdict> {
        match self.phase {
            Phase::Closed { verdict } => Some(verdict),
            _ => None,
        }
    }

    pub fn host(&self, host: &HostId) -> Option<&HostRun> {
        self.hosts.iter().find(|h| &h.host == host)
    }

    /// Hosts with something to do for this run now.
    pub fn busy(&self) -> impl Iterator<Item = &HostRun> {
        let (preparing, measuring) = (self.phase == Phase::Preflight, self.phase == Phase::Running);
        self.hosts.iter().filter(move |h| (preparing && !h.prepared) || (measuring && h.open_block().is_some()))
    }

    fn host_mut(&mut self, host: &HostId) -> Result<&mut HostRun, Denied> {
        self.hosts.iter_mut().find(|h| &h.host == host).ok_or_else(|| Denied::NotItsHost(host.clone()))
    }

    /// Where a host stands in `hosts`. For many questions an index is made first: a thousand hosts that each look through
    /// a thousand are a million comparisons.
    fn places(&self, questions: usize) -> impl Fn(&HostId) -> Result<usize, Denied> {
        const FEW: usize = 8;
        let places = || self.hosts.iter().enumerate().map(|(i, h)| (&h.host, i));
        let index: HashMap<&HostId, usize> = if questions > FEW { places().collect() } else { HashMap::new() };
        move |host| {
            let found = if questions > FEW {
                index.get(host).copied()
            } else {
                self.hosts.iter().position(|h| h.host == *host)
            };
            found.ok_or_else(|| Denied::NotItsHost(host.clone()))
        }
    }

    /// What has to be found out next; asked again after a restart.
    pub fn pending(&self, now: Micros) -> Option<Pending> {
        match self.phase {
            Phase::Collecting if self.ending.is_none() => Some(Pending::FindVoids),
            Phase::Unwinding if self.unwound(now) && self.forced().is_none() => Some(Pending::Analyse),
            _ => None,
        }
    }

    /// The verdict that the ending forces, whatever the evidence says.
    fn forced(&self) -> Option<Verdict> {
        self.ending.as_ref().and_then(Ending::verdict)
    }

    /// Time alone would change it: a bound has passed.
    pub fn due(&self, now: Micros) -> bool {
        match self.phase {
            Phase::Closed { .. } => false,
            Phase::Unwinding => self.forced().is_some() && self.unwound(now),
            _ => self.ending.is_none() && self.bound().is_some_and(|at| now >= at),
        }
    }

    /// A run that waits for its machines has no deadline of its own yet, but may have the operator's.
    fn bound(&self) -> Option<Micros> {
        if self.started.is_some() { self.deadline } else { self.until }
    }

    fn unwound(&self, now: Micros) -> bool {
        self.hosts.iter().all(|h| h.teardown.is_some() || h.lost) || self.unwind_by.is_some_and(|by| now >= by)
    }

    /// Leaks that hosts reported, and hosts that reported nothing.
    pub fn teardown(&self) -> (Vec<String>, Vec<HostId>) {
        let mut leaked = Vec::new();
        let mut silent = Vec::new();
        for h in &self.hosts {
            match &h.teardown {
                Some(Teardown::Leaked(what)) => leaked.extend(what.iter().map(|w| format!("{}: {w}", h.host))),
                Some(Teardown::Clean) => {}
                // A run that never started left nothing to undo.
                None if self.started.is_none() => {}
                None => silent.push(h.host.clone()),
            }
        }
        (leaked, silent)
    }

    /// The one function that changes a run.
    pub fn step(&self, experiment: &Experiment, event: &Event, now: Micros) -> Result<Transition, Denied> {
        let mut next = self.clone();
        let mut notes = Vec::new();
        match event {
            Event::Started { hosts } => {
                if self.phase != Phase::Placed {
                    return Err(Denied::WrongPhase(self.phase.as_str()));
                }
                let place = self.places(hosts.len());
                for (host, machine, generation) in hosts {
                    let h = &mut next.hosts[place(host)?];
                    h.machine = machine.clone();
                    h.generation = *generation;
                }
                let deadline = now.plus_ms(experiment.deadline_ms);
                next.started = Some(now);
                next.deadline = Some(self.until.map_or(deadline, |u| u.min(deadline)));
                next.phase = Phase::Preflight;
                notes.push(note("started", None, "hosts prepare and try their arms out".to_owned()));
            }
            Event::Evidence { host, seq, body, late } => {
                next.observe(experiment, (self.places(1)(host)?, *seq), body, *late, now, &mut notes);
            }
            Event::Told(told) => {
                let place = self.places(told.len());
                for (host, seq, body, late) in told {
                    next.observe(experiment, (place(host)?, *seq), body, *late, now, &mut notes);
                }
            }
            Event::HostLost { host } => {
                if !self.live() {
                    return Err(Denied::Closed);
                }
                let h = next.host_mut(host)?;
                if h.teardown.is_some() || h.lost {
                    return Err(Denied::Ending);
                }
                h.lost = true;
                let block = h.open_block().map(|g| block_name(g.kind, g.block));
                notes.push(note("host-lost", Some(host), "its life lease ended without a word from it".to_owned()));
                let ending = Ending::Lost { host: host.clone(), block };
                if next.phase == Phase::Unwinding {
                    // Not heard of since before the end: the stronger word stands. Two things no later loss can change: that all
                    // blocks were in, and that somebody cancelled. The loss itself is in the notes and in the teardown.
                    if !matches!(next.ending, Some(Ending::Done | Ending::Cancelled { .. })) {
                        next.ending = Some(ending);
                    }
                } else {
                    next.end(ending, now, &mut notes);
                }
            }
            Event::Refused { host, why } => {
                if !self.live() {
                    return Err(Denied::Closed);
                }
                next.host_mut(host)?;
                notes.push(note("refused", Some(host), why.clone()));
                next.end(Ending::Refused { host: host.clone(), why: why.clone() }, now, &mut notes);
            }
            Event::Complaint { host, what } => {
                next.host_mut(host)?;
                notes.push(note("complaint", Some(host), what.clone()));
            }
            Event::EvidenceRefused { host, why } => {
                if !self.live() {
                    return Err(Denied::Closed);
                }
                if self.ending.is_some() {
                    return Err(Denied::Ending);
                }
                let block = next.host_mut(host)?.open_block().map(|g| block_name(g.kind, g.block));
                let block = block.unwrap_or_else(|| "the run".to_owned());
                let why = format!("its evidence cannot be taken: {why}");
                next.end(Ending::Interrupted { host: host.clone(), block, why }, now, &mut notes);
            }
            Event::Unreadable { why } => {
                if !self.live() {
                    return Err(Denied::Closed);
                }
                if self.forced().is_some() {
                    return Err(Denied::Ending);
                }
                let ending = Ending::Unreadable { why: why.clone() };
                if next.ending.is_some() {
                    // Every block ended, and that is all that can be said of them.
                    notes.push(note("ending", None, ending.in_words()));
                    next.ending = Some(ending);
                } else {
                    next.end(ending, now, &mut notes);
                }
            }
            Event::Cancel { by } => {
                if !self.live() {
                    return Err(Denied::Closed);
                }
                if self.ending.is_some() {
                    return Err(Denied::Ending);
                }
                next.end(Ending::Cancelled { by: by.clone() }, now, &mut notes);
            }
            Event::Voids(voids) => {
                if self.phase != Phase::Collecting || self.ending.is_some() {
                    return Err(Denied::WrongPhase(self.phase.as_str()));
                }
                next.replace(experiment, voids, now, &mut notes);
            }
            Event::Analysed { verdict } => {
                if self.phase != Phase::Unwinding {
                    return Err(Denied::WrongPhase(self.phase.as_str()));
                }
                next.close(next.forced().unwrap_or(*verdict), now, &mut notes);
            }
            Event::Tick => {}
        }
        next.advance(experiment, now, &mut notes);
        Ok(Transition { next, notes })
    }

    fn observe(
        &mut self,
        experiment: &Experiment,
        (place, seq): (usize, u64),
        body: &Observed,
        late: bool,
        now: Micros,
        notes: &mut Vec<Note>,
    ) {
        let live = self.live();
        let ending = self.ending.clone();
        let h = &mut self.hosts[place];
        if seq <= h.applied_seq {
            return;
        }
        let host = &h.host.clone();
        h.applied_seq = seq;
        if let Observed::Closed { teardown, reason } = body {
            // Also from a host that was lost, and after the run closed: what is left on a machine is worth knowing.
            h.teardown = Some(teardown.clone());
            let text = match teardown {
                Teardown::Clean => "clean".to_owned(),
                Teardown::Leaked(what) => format!("leaked {}", what.join(", ")),
            };
            notes.push(note("unwound", Some(host), text));
            if live && !late && ending.is_none() && !h.lost {
                let block = h.open_block().map_or_else(|| "the run".to_owned(), |g| block_name(g.kind, g.block));
                let why =
                    if reason.is_empty() { "the host ended the run by itself".to_owned() } else { reason.clone() };
                self.end(Ending::Interrupted { host: host.clone(), block, why }, now, notes);
            }
            return;
        }
        if late || !live {
            return;
        }
        match body {
            Observed::Preflight(facts) if !h.prepared => {
                // The agent's word that it cannot is a message, and may be lost; its facts are evidence.
                let unmet = placement::unmet(experiment, facts);
                if unmet.is_empty() {
                    h.prepared = true;
                    notes.push(note("prepared", Some(host), "the host is prepared".to_owned()));
                } else if ending.is_none() {
                    self.end(Ending::Refused { host: host.clone(), why: unmet.join("; ") }, now, notes);
                }
            }
            Observed::BlockEnded { block, kind, result } => {
                if h.ended.iter().any(|e| e.block == *block && e.kind == *kind) {
                    return;
                }
                if !h.granted.iter().any(|g| g.block == *block && g.kind == *kind) {
                    let text = format!("it says that {} ended, which was never granted", block_name(*kind, *block));
                    notes.push(note("never-granted", Some(host), text));
                    return;
                }
                h.ended.push(EndedBlock { block: *block, kind: *kind, result: result.clone(), at: now });
                let name = block_name(*kind, *block);
                let why = match result {
                    BlockResult::Completed => None,
                    BlockResult::Interrupted(why) | BlockResult::Expired(why) => Some(why.clone()),
                    BlockResult::Cancelled => Some("the agent stopped it".to_owned()),
                };
                let text =
                    why.as_ref().map_or_else(|| format!("{name} ended"), |why| format!("{name} broke off: {why}"));
                notes.push(note("block-ended", Some(host), text));
                if let Some(why) = why
                    && ending.is_none()
                {
                    self.end(Ending::Interrupted { host: host.clone(), block: name, why }, now, notes);
                }
            }
            _ => {}
        }
    }

    /// Grants a replacement per voided block while that can still help, else goes on to unwind.
    fn replace(&mut self, experiment: &Experiment, voids: &[(HostId, u32)], now: Micros, notes: &mut Vec<Note>) {
        let allowed = plan::replacements_allowed(experiment) as usize;
        let mut grown = false;
        if voids.len() <= allowed {
            for h in &mut self.hosts {
                let wanted = voids.iter().filter(|(host, _)| *host == h.host).count() as u32;
                if wanted > h.replacements {
                    h.replacements = wanted;
                    grown = true;
                    let text = format!("{wanted} voided: the next registered block replaces it");
                    notes.push(note("replacement", Some(&h.host), text));
                }
            }
        } else {
            let text = format!("{} blocks voided, {allowed} may be: no replacements", voids.len());
            notes.push(note("too-many-voids", None, text));
        }
        if grown {
            self.phase = Phase::Running;
        } else {
            self.end(Ending::Done, now, notes);
        }
    }

    /// No more blocks: hosts unwind, within a bound.
    fn end(&mut self, ending: Ending, now: Micros, notes: &mut Vec<Note>) {
        if self.ending.is_some() {
            return;
        }
        notes.push(note("ending", None, ending.in_words()));
        self.ending = Some(ending);
        self.unwind_by = Some(now.plus_ms(UNWIND_MS));
        self.phase = Phase::Unwinding;
        if self.started.is_none() {
            // Nothing was asked of any host yet.
            self.unwind_by = Some(now);
        }
    }

    fn close(&mut self, verdict: Verdict, now: Micros, notes: &mut Vec<Note>) {
        self.phase = Phase::Closed { verdict };
        self.closed = Some(now);
        let why = self.ending.as_ref().map(Ending::in_words).unwrap_or_default();
        notes.push(note("closed", None, format!("{verdict}: {why}")));
    }

    fn advance(&mut self, experiment: &Experiment, now: Micros, notes: &mut Vec<Note>) {
        let due = self.bound().is_some_and(|at| now >= at);
        if self.phase == Phase::Preflight && !due && self.hosts.iter().all(|h| h.prepared) {
            self.phase = Phase::Running;
            notes.push(note("running", None, "every host is prepared: blocks are granted by turns".to_owned()));
        }
        if self.phase == Phase::Running {
            let grants = if due { Vec::new() } else { turns::next(&self.hosts, experiment) };
            for (i, grant) in grants {
                let text = format!("{}: {}", block_name(grant.kind, grant.block), order_in_words(&grant));
                notes.push(note("granted", Some(&self.hosts[i].host), text));
                self.hosts[i].granted.push(grant);
            }
            if self.hosts.iter().all(|h| h.open_block().is_none() && h.next_block(experiment).is_none()) {
                self.phase = Phase::Collecting;
                notes.push(note("collecting", None, "every block ended; looking for voided ones".to_owned()));
            }
        }
        if due && self.ending.is_none() && self.live() {
            // Every block ended by its host's own count of the deadline: nobody's absence makes that incomplete.
            let ending = if self.phase == Phase::Collecting { Ending::Done } else { Ending::Deadline };
            self.end(ending, now, notes);
        }
        if self.phase == Phase::Unwinding
            && self.unwound(now)
            && let Some(verdict) = self.forced()
        {
            self.close(verdict, now, notes);
        }
    }
}

fn order_in_words(grant: &Grant) -> String {
    grant.order.iter().map(|a| a.as_str()).collect::<Vec<_>>().join(", ")
}

fn note(kind: &str, host: Option<&HostId>, text: String) -> Note {
    Note { kind: kind.to_owned(), host: host.cloned(), text }
}
