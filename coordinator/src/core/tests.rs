//! The pure driver against fake agents, in virtual time.

use std::collections::BTreeMap;

use drums_common::{
    arm::ArmKind,
    clock::Micros,
    evidence::{BlockKind, BlockResult, Teardown},
    experiment::{Experiment, Registration},
    ids::{Generation, HostId, RunId},
    machine::{HostFacts, MachineIdentity},
    plan, spec,
    verdict::Verdict,
    wire::latest::RunPhase,
};
use proptest::prelude::*;

use super::{
    desired::{self, RunOfHost},
    placement,
    run::{Denied, Ending, Event, Observed, Pending, Phase, RunState, UNWIND_MS},
    turns,
};

fn registration() -> Registration {
    let text = include_str!("../../../docs/experiments/EXP-028.toml");
    let mut experiment = spec::parse("EXP-028.toml", text.as_bytes()).unwrap().experiment;
    experiment.workload.sha256 = Some(drums_common::digest::Sha256::of(b"tree"));
    Registration::freeze(experiment, Micros(0)).unwrap()
}

fn machine(boot: &str) -> MachineIdentity {
    MachineIdentity { boot_id: boot.to_owned(), hardware: "cpu".to_owned(), ..Default::default() }
}

fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

fn placed(registration: &Registration, machines: &[&str]) -> RunState {
    let hosts =
        machines.iter().enumerate().map(|(i, m)| (host(&format!("h{}", i + 1)), machine(m), Generation(1))).collect();
    RunState::place(RunId([1; 6]), registration.sha256, 1, None, hosts, Micros(0)).next
}

fn facts() -> HostFacts {
    crate::samples::facts(machine("m"))
}

fn prepared() -> Observed {
    Observed::Preflight(Box::new(facts()))
}

/// With the hosts as they were placed.
fn started() -> Event {
    Event::Started { hosts: vec![] }
}

/// What a fake agent does with a block that it was granted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Completes,
    /// Dies in it and is back later: the restarted agent closes the block as interrupted.
    DiesAndReturns,
    /// Dies in it for good.
    DiesForGood,
}

struct Agent {
    name: HostId,
    seq: u64,
    prepared: bool,
    ended: Vec<(BlockKind, u32)>,
    dead: bool,
    closed: bool,
}

struct World {
    registration: Registration,
    run: RunState,
    agents: Vec<Agent>,
    now: Micros,
    notes: Vec<super::run::Note>,
    /// Fate of the n-th block that starts anywhere.
    fates: BTreeMap<usize, Fate>,
    started_blocks: usize,
    voids: Vec<(HostId, u32)>,
    max_open_per_machine: usize,
    order: Vec<HostId>,
}

impl World {
    fn new(machines: &[&str], fates: BTreeMap<usize, Fate>) -> Self {
        let registration = registration();
        let run = placed(&registration, machines);
        let agents = run
            .hosts
            .iter()
            .map(|h| Agent { name: h.host.clone(), seq: 0, prepared: false, ended: vec![], dead: false, closed: false })
            .collect();
        Self {
            registration,
            run,
            agents,
            now: Micros(0),
            notes: vec![],
            fates,
            started_blocks: 0,
            voids: vec![],
            max_open_per_machine: 0,
            order: vec![],
        }
    }

    fn event(&mut self, event: Event) -> Result<(), Denied> {
        let t = self.run.step(&self.registration.experiment, &event, self.now)?;
        // A coordinator may die between any two events: the state must survive the store.
        if self.run != t.next {
            let text = serde_json::to_string(&t.next).unwrap();
            self.run = serde_json::from_str(&text).unwrap();
            assert_eq!(self.run, t.next);
        }
        self.notes.extend(t.notes);
        for group in turns::machines(self.run.hosts.iter().map(|h| &h.machine)) {
            let open = group.iter().filter(|&&i| self.run.hosts[i].open_block().is_some()).count();
            self.max_open_per_machine = self.max_open_per_machine.max(open);
        }
        Ok(())
    }

    fn record(&mut self, agent: usize, body: Observed) {
        self.agents[agent].seq += 1;
        let (host, seq) = (self.agents[agent].name.clone(), self.agents[agent].seq);
        self.event(Event::Evidence { host, seq, body, late: false }).unwrap();
    }

    /// One agent looks at its order and does one thing.
    fn agent_acts(&mut self, i: usize) {
        if self.agents[i].dead || self.agents[i].closed {
            return;
        }
        let (state, registration, agent) = (&self.run, &self.registration, &self.agents[i]);
        let part = state.host(&agent.name).unwrap();
        let order =
            desired::desired(Generation(1), &[RunOfHost { state, part, registration, acked_seq: agent.seq }], self.now);
        let Some(run) = order.runs.first().cloned() else { return };
        match run.phase {
            RunPhase::Prepare if !self.agents[i].prepared => {
                self.agents[i].prepared = true;
                self.record(i, prepared());
            }
            RunPhase::Prepare => {}
            RunPhase::Measure => {
                let next = run.granted.iter().find(|g| !self.agents[i].ended.contains(&(g.kind, g.block)));
                let Some(grant) = next.cloned() else { return };
                self.order.push(self.agents[i].name.clone());
                self.agents[i].ended.push((grant.kind, grant.block));
                let fate = self.fates.get(&self.started_blocks).copied().unwrap_or(Fate::Completes);
                self.started_blocks += 1;
                let result = match fate {
                    Fate::Completes => BlockResult::Completed,
                    Fate::DiesAndReturns => BlockResult::Interrupted("the agent was killed".to_owned()),
                    Fate::DiesForGood => {
                        self.agents[i].dead = true;
                        return;
                    }
                };
                self.record(i, Observed::BlockEnded { block: grant.block, kind: grant.kind, result });
            }
            RunPhase::Unwind | RunPhase::Cancel => {
                self.agents[i].closed = true;
                self.record(i, Observed::Closed { teardown: Teardown::Clean, reason: String::new() });
            }
        }
    }

    fn driver_acts(&mut self) {
        match self.run.pending(self.now) {
            Some(Pending::FindVoids) => self.event(Event::Voids(self.voids.clone())).unwrap(),
            Some(Pending::Analyse) => self.event(Event::Analysed { verdict: Verdict::Pass }).unwrap(),
            None => {
                let before = self.run.clone();
                self.event(Event::Tick).unwrap();
                // The driver ticks only what is due.
                assert_eq!(before.due(self.now), self.run != before, "{before:?}");
            }
        }
    }

    /// Until the run is closed; each round takes five virtual seconds. Schedules come from `pick`.
    fn play(&mut self, mut pick: impl FnMut(usize) -> usize, life_ms: u64) -> Verdict {
        self.event(started()).unwrap();
        for round in 0..100_000 {
            if let Some(verdict) = self.run.verdict() {
                return verdict;
            }
            let n = self.agents.len();
            self.agent_acts(pick(round) % n);
            if self.now.0 as u64 / 1000 >= life_ms {
                for i in 0..n {
                    if self.agents[i].dead {
                        let _ = self.event(Event::HostLost { host: self.agents[i].name.clone() });
                    }
                }
            }
            self.driver_acts();
            self.now = self.now.plus_ms(5_000);
        }
        panic!("the run never closed: {:?}", self.run.phase);
    }
}

#[test]
fn an_undisturbed_run_grants_by_turns_and_takes_the_analysis_verdict() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    assert_eq!(w.play(|r| r, 1_800_000), Verdict::Pass);
    assert_eq!(w.max_open_per_machine, 1);
    let alternating: Vec<HostId> = (0..18).map(|i| host(if i % 2 == 0 { "h1" } else { "h2" })).collect();
    assert_eq!(w.order, alternating);
    for h in &w.run.hosts {
        assert_eq!(h.granted, plan::blocks(&w.registration.experiment, &h.host));
        assert_eq!(h.ended.len(), 9);
    }
    assert_eq!(w.run.teardown(), (vec![], vec![]));
}

#[test]
fn machines_of_their_own_measure_at_the_same_time() {
    let mut w = World::new(&["a", "b"], BTreeMap::new());
    w.event(started()).unwrap();
    w.record(0, prepared());
    w.record(1, prepared());
    assert!(w.run.hosts.iter().all(|h| h.open_block().is_some()));
    assert_eq!(w.play_on(), Verdict::Pass);
}

impl World {
    /// What the first host is told when it comes with this generation.
    fn phase_of_h1(&self, generation: Generation) -> RunPhase {
        let (state, part, registration) = (&self.run, &self.run.hosts[0], &self.registration);
        let of = RunOfHost { state, part, registration, acked_seq: 0 };
        desired::desired(generation, &[of], self.now).runs[0].phase
    }

    fn play_on(&mut self) -> Verdict {
        self.agents.iter_mut().for_each(|a| a.prepared = true);
        for round in 0..10_000 {
            if let Some(v) = self.run.verdict() {
                return v;
            }
            self.agent_acts(round % self.agents.len());
            self.driver_acts();
            self.now = self.now.plus_ms(1_000);
        }
        panic!("never closed");
    }
}

#[test]
fn an_agent_killed_in_a_block_and_back_makes_it_incomplete_and_names_the_block() {
    let mut w = World::new(&["m", "m"], BTreeMap::from([(5, Fate::DiesAndReturns)]));
    assert_eq!(w.play(|r| r, 1_800_000), Verdict::Incomplete);
    let ending = w.run.ending.clone().unwrap();
    assert!(
        matches!(&ending, Ending::Interrupted { host, block, .. } if host.as_str() == "h2" && block == "block 1"),
        "{ending:?}"
    );
    assert!(w.notes.iter().any(|n| n.text.contains("block 1")));
    assert_eq!(w.run.teardown(), (vec![], vec![]));
}

#[test]
fn an_agent_that_never_returns_makes_it_lost_and_says_who_reported_nothing() {
    let mut w = World::new(&["m", "m"], BTreeMap::from([(4, Fate::DiesForGood)]));
    assert_eq!(w.play(|r| r, 60_000), Verdict::Lost);
    assert_eq!(w.run.teardown().1, [host("h1")]);
    // It comes back after all: it is told to cancel, and its word on the teardown is taken.
    assert_eq!(w.phase_of_h1(Generation(2)), RunPhase::Cancel);
    w.record(0, Observed::Closed { teardown: Teardown::Clean, reason: "late".to_owned() });
    assert_eq!(w.run.teardown(), (vec![], vec![]));
    assert_eq!(w.run.verdict(), Some(Verdict::Lost));
}

#[test]
fn a_silent_host_cannot_hold_a_run_beyond_its_deadline() {
    let mut w = World::new(&["m", "m"], BTreeMap::from([(0, Fate::DiesForGood)]));
    assert_eq!(w.play(|r| r, u64::MAX), Verdict::Incomplete);
    let bound = w.registration.experiment.deadline_ms + UNWIND_MS + 10_000;
    assert!(w.run.closed.unwrap() <= Micros(0).plus_ms(bound));
}

#[test]
fn a_cancelled_run_unwinds_and_closes_as_cancelled() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.record(0, prepared());
    w.record(1, prepared());
    w.event(Event::Cancel { by: "operator".to_owned() }).unwrap();
    assert_eq!(w.event(Event::Cancel { by: "operator".to_owned() }), Err(Denied::Ending));
    assert_eq!(w.play_on(), Verdict::Cancelled);
    assert_eq!(w.event(Event::Cancel { by: "operator".to_owned() }), Err(Denied::Closed));
}

#[test]
fn a_host_lost_after_the_cancel_changes_the_teardown_and_not_the_verdict() {
    let mut w = World::new(&["m", "m"], BTreeMap::from([(0, Fate::DiesForGood)]));
    w.event(started()).unwrap();
    w.record(0, prepared());
    w.record(1, prepared());
    w.event(Event::Cancel { by: "operator".to_owned() }).unwrap();
    w.event(Event::HostLost { host: host("h1") }).unwrap();
    assert_eq!(w.run.ending, Some(Ending::Cancelled { by: "operator".to_owned() }));
    w.record(1, Observed::Closed { teardown: Teardown::Clean, reason: String::new() });
    w.driver_acts();
    assert_eq!(w.run.verdict(), Some(Verdict::Cancelled));
    let (_, unknown) = w.run.teardown();
    assert_eq!(unknown, [host("h1")]);
}

#[test]
fn a_host_whose_facts_lack_a_registered_arm_ends_the_run_without_any_message() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    w.event(started()).unwrap();
    let mut facts = facts();
    facts.unfit.insert(ArmKind::QemuWarm, "QEMU is not installed".to_owned());
    w.record(0, Observed::Preflight(Box::new(facts)));
    let ending = w.run.ending.clone().unwrap();
    let why = "arm qemu-warm: QEMU is not installed".to_owned();
    assert_eq!(ending, Ending::Refused { host: host("h1"), why });
    assert!(!w.run.hosts[0].prepared);
    assert_eq!(w.play_on(), Verdict::Incomplete);
    assert!(w.run.hosts.iter().all(|h| h.granted.is_empty()));
}

#[test]
fn an_end_of_a_block_that_was_never_granted_is_noted_and_not_counted() {
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.record(0, prepared());
    let end = |block| Observed::BlockEnded { block, kind: BlockKind::Measured, result: BlockResult::Completed };
    w.record(0, end(7));
    assert!(w.run.hosts[0].ended.is_empty());
    assert!(w.notes.iter().any(|n| n.kind == "never-granted" && n.text.contains("block 7")), "{:?}", w.notes);
    assert_eq!(w.run.ending, None);
}

#[test]
fn a_run_starts_with_its_hosts_as_they_are_then() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    let hosts = vec![(host("h1"), machine("new"), Generation(4))];
    w.event(Event::Started { hosts }).unwrap();
    assert_eq!((w.run.hosts[0].generation, &w.run.hosts[0].machine), (Generation(4), &machine("new")));
    assert_eq!((w.run.hosts[1].generation, &w.run.hosts[1].machine), (Generation(1), &machine("m")));
    assert_eq!(w.phase_of_h1(Generation(4)), RunPhase::Prepare);
}

#[test]
fn evidence_that_cannot_be_read_makes_a_run_invalid_and_closes_it() {
    let unreadable = || Event::Unreadable { why: "record 7 of h1 is damaged".to_owned() };
    // In the middle: hosts unwind first.
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.event(unreadable()).unwrap();
    assert_eq!(w.run.phase, Phase::Unwinding);
    assert_eq!(w.play_on(), Verdict::Invalid);
    // At the end, where the analysis would have read it.
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    while w.run.pending(w.now) != Some(Pending::Analyse) {
        w.agent_acts(0);
        if w.run.pending(w.now) == Some(Pending::FindVoids) {
            w.driver_acts();
        }
    }
    w.event(unreadable()).unwrap();
    assert_eq!(w.run.verdict(), Some(Verdict::Invalid));
    assert!(w.notes.iter().any(|n| n.text.contains("record 7 of h1 is damaged")));
    // A verdict that does not come from evidence stays.
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.event(Event::Cancel { by: "operator".to_owned() }).unwrap();
    assert_eq!(w.event(unreadable()), Err(Denied::Ending));
}

#[test]
fn a_record_that_can_never_be_stored_ends_the_run_and_names_the_block() {
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.record(0, prepared());
    w.event(Event::EvidenceRefused { host: host("h1"), why: "record 3 differs".to_owned() }).unwrap();
    assert!(matches!(&w.run.ending, Some(Ending::Interrupted { block, why, .. })
        if block == "warm-up block 0" && why.contains("record 3 differs")));
    assert_eq!(w.play_on(), Verdict::Incomplete);
}

#[test]
fn a_run_cancelled_while_it_waits_closes_at_once() {
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(Event::Cancel { by: "operator".to_owned() }).unwrap();
    w.driver_acts();
    assert_eq!(w.run.verdict(), Some(Verdict::Cancelled));
    assert_eq!(w.run.teardown(), (vec![], vec![]));
}

#[test]
fn blocks_that_all_ended_are_analysed_although_nobody_looked_before_the_deadline() {
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    while w.run.pending(w.now) != Some(Pending::FindVoids) {
        w.agent_acts(0);
    }
    // The coordinator is away until the deadline has passed.
    w.now = w.run.deadline.unwrap().plus_ms(1);
    w.event(Event::Tick).unwrap();
    assert_eq!(w.run.ending, Some(Ending::Done));
    assert_eq!(w.play_on(), Verdict::Pass);
    // A block that is still open then is not waited for.
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    w.record(0, prepared());
    w.now = w.run.deadline.unwrap();
    w.event(Event::Tick).unwrap();
    assert_eq!(w.run.ending, Some(Ending::Deadline));
}

#[test]
fn a_voided_block_is_replaced_by_the_next_registered_one() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    w.voids = vec![(host("h2"), 3)];
    assert_eq!(w.play(|r| r, u64::MAX), Verdict::Pass);
    let h2 = w.run.host(&host("h2")).unwrap();
    assert_eq!(h2.granted.len(), 10);
    assert_eq!(h2.granted[9], plan::grant(&w.registration.experiment, &h2.host, BlockKind::Measured, 8));
    assert_eq!(w.run.hosts[0].granted.len(), 9);
}

#[test]
fn too_many_voids_are_not_replaced() {
    let mut w = World::new(&["m", "m"], BTreeMap::new());
    w.voids = vec![(host("h1"), 1), (host("h2"), 3)];
    w.play(|r| r, u64::MAX);
    assert!(w.run.hosts.iter().all(|h| h.granted.len() == 9));
}

#[test]
fn late_evidence_moves_the_cursor_and_nothing_else() {
    let mut w = World::new(&["m"], BTreeMap::new());
    w.event(started()).unwrap();
    let late = Event::Evidence { host: host("h1"), seq: 1, body: prepared(), late: true };
    w.event(late).unwrap();
    assert_eq!((w.run.hosts[0].applied_seq, w.run.hosts[0].prepared), (1, false));
    let stranger = Event::Evidence { host: host("h7"), seq: 1, body: prepared(), late: false };
    assert_eq!(w.event(stranger), Err(Denied::NotItsHost(host("h7"))));
}

#[test]
fn a_second_run_waits_while_a_machine_of_it_is_taken() {
    let registration = registration();
    let first = placed(&registration, &["a", "b"]);
    let mut second = placed(&registration, &["c", "b"]);
    second.id = RunId([2; 6]);
    assert!(!placement::machines_free(&second, &[&first]));
    let mut third = placed(&registration, &["c", "d"]);
    third.id = RunId([3; 6]);
    assert!(placement::machines_free(&third, &[&first]));
    let mut closed = first.clone();
    closed.phase = Phase::Closed { verdict: Verdict::Pass };
    assert!(placement::machines_free(&second, &[&closed]));
    assert!(placement::machines_free(&first, &[&first]));
}

#[test]
fn machines_that_a_third_identity_joins_are_one() {
    let a = MachineIdentity { boot_id: "1".into(), hardware: "x".into(), ..Default::default() };
    let b = MachineIdentity { dmi_uuid: "u".into(), hardware: "x".into(), ..Default::default() };
    let both =
        MachineIdentity { boot_id: "1".into(), dmi_uuid: "u".into(), hardware: "x".into(), ..Default::default() };
    assert_eq!(turns::machines([&a, &b].into_iter()).len(), 2);
    assert_eq!(turns::machines([&a, &b, &both].into_iter()), vec![vec![0, 1, 2]]);
}

#[test]
fn placement_says_what_every_refused_host_lacks() {
    let registration = registration();
    let nobody: Vec<placement::Candidate> =
        vec![placement::Candidate { host: host("h1"), connected: false, facts: None }];
    let failure = placement::place(&registration.experiment, &nobody).unwrap_err();
    assert_eq!(failure.code, "not-enough-hosts");
    assert!(failure.message.contains("h1: its agent never connected"), "{failure}");
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![Just(Fate::Completes), Just(Fate::DiesAndReturns), Just(Fate::DiesForGood)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever dies whenever, in whatever order agents act: one block at a time per machine, every block ends at most
    /// once and as planned, and the run closes within its bound with the verdict that its ending forces.
    #[test]
    fn every_run_closes_in_time(
        fates in proptest::collection::btree_map(0usize..18, fate(), 0..3),
        schedule in proptest::collection::vec(0usize..3, 1..64),
        layout in 0usize..3,
        life_s in 10u64..4_000,
    ) {
        let machines: &[&str] = match layout { 0 => &["m", "m"], 1 => &["a", "b"], _ => &["a", "b", "a"] };
        let mut w = World::new(machines, fates.clone());
        let verdict = w.play(|r| schedule[r % schedule.len()] + r / schedule.len(), life_s * 1000);
        prop_assert!(w.max_open_per_machine <= 1);
        for h in &w.run.hosts {
            let plan = plan::blocks(&w.registration.experiment, &h.host);
            prop_assert!(plan.starts_with(&h.granted));
            let mut ended: Vec<_> = h.ended.iter().map(|e| (e.kind == BlockKind::Measured, e.block)).collect();
            ended.dedup();
            prop_assert_eq!(ended.len(), h.ended.len());
        }
        let bound = w.registration.experiment.deadline_ms + UNWIND_MS + 10_000;
        prop_assert!(w.run.closed.unwrap() <= Micros(0).plus_ms(bound));
        prop_assert_eq!(verdict, w.run.ending.as_ref().unwrap().verdict().unwrap_or(Verdict::Pass));
        if w.agents.iter().any(|a| a.dead) {
            prop_assert!(matches!(verdict, Verdict::Lost | Verdict::Incomplete));
        }
    }
}

/// The whole state × event table stays what it is until someone means to change it.
#[test]
fn events_in_the_wrong_phase_are_denied() {
    let registration = registration();
    let e: &Experiment = &registration.experiment;
    let run = placed(&registration, &["m"]);
    let now = Micros(1);
    assert_eq!(run.step(e, &Event::Analysed { verdict: Verdict::Pass }, now), Err(Denied::WrongPhase("placed")));
    assert_eq!(run.step(e, &Event::Voids(vec![]), now), Err(Denied::WrongPhase("placed")));
    let begun = run.step(e, &started(), now).unwrap().next;
    assert_eq!(begun.step(e, &started(), now), Err(Denied::WrongPhase("preflight")));
}
