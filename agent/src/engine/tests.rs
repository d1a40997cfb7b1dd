//! The runner over the kernel in memory: every step of every plan fails once, in both ways, and nothing may be left.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    experiment::{Arm, Limits},
    ids::{Generation, InstallationId, RunId},
};
use serde_json::{Value, json};

use super::{
    Engine,
    api::{ArmEngine as _, EngineError, GuestReady, ProbeError, Prober, ReadyAnswer, SessionOrder, Target, Workload},
};
use crate::{
    arms::{Site, ToolPaths, drums::Drums},
    ledger::Ledger,
    probe::CallError,
    steps::{Cx, Process, Receipt, Resource, WriteFile, undo},
    sys::{
        Sys,
        fake::{Fake, Fault},
    },
};

/// Guests that answer at once; each remembers its state by address.
#[derive(Clone, Default)]
struct Guests {
    state: Arc<Mutex<BTreeMap<Ipv4Addr, String>>>,
    /// The template's mark, which every restored guest carries.
    mark: Arc<Mutex<String>>,
    silent: bool,
    /// They are ready so long after their start, whatever the engine does meanwhile.
    boot_us: u64,
    /// The shim dies while they boot.
    dies_booting: bool,
    kernel: Fake,
}

impl Prober for Guests {
    fn ready(
        &self,
        target: &Target,
        nonce: &str,
        deadline_us: u64,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<ReadyAnswer, ProbeError> {
        if self.dies_booting {
            self.kernel.lose_shim();
        }
        if self.silent || !alive() {
            return Err(ProbeError::NotReady {
                target: target.address,
                waited_ms: 1,
                attempts: 1,
                last: "silence".to_owned(),
            });
        }
        let state = self.state.lock().unwrap().get(target.address.ip()).cloned().unwrap_or_default();
        let guest = GuestReady { nonce: nonce.to_owned(), ready: true, state, ..GuestReady::default() };
        let ready_us = self.kernel.now_us().max(self.kernel.spawned_us() + self.boot_us);
        Ok(ReadyAnswer { ready_us: deadline_us.min(ready_us), attempts: 1, guest })
    }
    fn post(
        &self,
        target: &Target,
        path: &str,
        body: &Value,
        _: Duration,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<Value, ProbeError> {
        if !alive() {
            let (path, source) = (path.to_owned(), CallError::Ended);
            return Err(ProbeError::Call { target: target.address, method: "POST", path, source });
        }
        let mut states = self.state.lock().unwrap();
        match path {
            "/drums/state" => {
                let state = body["state"].as_str().unwrap_or("").to_owned();
                *self.mark.lock().unwrap() = state.clone();
                states.insert(*target.address.ip(), state);
            }
            "/drums/personalise" => {
                states.insert(*target.address.ip(), self.mark.lock().unwrap().clone());
            }
            _ => {}
        }
        Ok(json!({ "ok": true, "file": true }))
    }
    fn get(&self, _: &Target, _: &str, _: Duration, _: &mut dyn FnMut() -> bool) -> Result<Value, ProbeError> {
        Ok(json!({ "guest_sha256": Sha256::of(b"guest").to_string() }))
    }
}

struct Bench {
    fake: Fake,
    engine: Engine,
    arm: Arm,
    limits: Limits,
    workload: Workload,
    _dir: tempfile::TempDir,
}

const RUN: RunId = RunId([1; 6]);
const INSTALLATION: InstallationId = InstallationId([0xab, 0xcd, 0xef, 0x01]);

impl Bench {
    fn new(kind: ArmKind, guests: Guests) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new();
        let site = Site {
            installation: INSTALLATION,
            scratch: "/scratch".into(),
            tools: ToolPaths { criu: Some("/criu".into()), ..ToolPaths::default() },
        };
        let ledger = Ledger::open(dir.path()).unwrap();
        let engine = Engine::with(
            Box::new(fake.clone()),
            Box::new(Guests { kernel: fake.clone(), ..guests }),
            site,
            ledger,
            vec![Box::new(Drums::cold()), Box::new(Drums::restored())],
        );
        Self {
            fake,
            engine,
            arm: Arm { name: kind.as_str().parse().unwrap(), kind, control: None, command: Vec::new() },
            limits: Limits { cpu_milli: 1_000, cpuset_size: 1, memory_bytes: 512 << 20, vmm_memory_overhead_bytes: 0 },
            workload: Workload {
                tree: "/tree".into(),
                sha256: Sha256::of(b"tree"),
                guest_sha256: Sha256::of(b"guest"),
            },
            _dir: dir,
        }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Engine, &SessionOrder<'_>) -> T) -> T {
        let session = self.engine.next_session(Generation(3)).unwrap();
        let order = SessionOrder {
            run: RUN,
            arm: &self.arm,
            session,
            limits: &self.limits,
            cpus: &[0],
            environment_bytes: 16,
            template_build: 0,
            delay: None,
            identity_seed: u64::from(session.number),
            workload: &self.workload,
            ready_timeout: Duration::from_secs(1),
        };
        f(&mut self.engine, &order)
    }

    fn assert_nothing_new(&self, before: &[String], what: &str) {
        assert_eq!(self.fake.left(), before, "left after {what}");
        assert_eq!(self.engine.live.len(), before.iter().filter(|l| l.ends_with("-template")).count(), "{what}");
    }
}

/// Fails call 0, 1, 2 ... of `operation`, before and after its effect, until a call number is beyond the operation.
fn fail_everywhere(b: &mut Bench, operation: &mut dyn FnMut(&mut Bench) -> Result<(), EngineError>) -> usize {
    let before = b.fake.left();
    for call in 0.. {
        for after_effect in [false, true] {
            b.fake.fail(Some(Fault { call, after_effect }));
            let result = operation(b);
            let fired = b.fake.fired();
            b.fake.fail(None);
            match (result, fired) {
                (Err(e), Some(what)) => {
                    assert!(e.is_outcome(), "{what}: {e}");
                    assert!(e.leaked().is_empty(), "{what}: {:?}", e.leaked());
                    b.assert_nothing_new(&before, &format!("a fault at call {call} ({what}), after: {after_effect}"));
                }
                (Ok(()), None) => {
                    b.assert_nothing_new(&before, "an operation without a fault");
                    return call;
                }
                (Ok(()), Some(what)) => panic!("the fault at call {call} ({what}) was swallowed"),
                (Err(e), None) => panic!("failed before the injected call {call}: {e:?}"),
            }
        }
    }
    unreachable!("the loop ends when a call number is beyond the operation")
}

fn create_and_destroy(b: &mut Bench) -> Result<(), EngineError> {
    let created = b.with(|e, o| e.create(o))?;
    assert_eq!(created.fidelity.limits.cpu_milli, 1_000);
    assert_eq!(created.fidelity.mechanism["connections begun until ready"], "1");
    let destroyed = b.engine.destroy(created.handle)?;
    assert_eq!(destroyed.leaked, [""; 0]);
    Ok(())
}

#[test]
fn a_cold_create_unwinds_from_every_step() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let calls = fail_everywhere(&mut b, &mut create_and_destroy);
    assert!(calls >= 7, "group, folders, namespace, links, process: {calls}");
}

#[test]
fn a_restored_create_unwinds_from_every_step_and_leaves_its_template() {
    let mut b = Bench::new(ArmKind::DrumsRestored, Guests::default());
    let report = b.with(|e, o| e.build_template(o)).unwrap();
    assert!(report.state.starts_with("run-"), "{}", report.state);
    let calls = fail_everywhere(&mut b, &mut create_and_destroy);
    assert!(calls >= 8, "{calls}");
    assert_eq!(b.engine.discard_templates(RUN), [""; 0]);
    assert_eq!(b.fake.left(), [""; 0]);
    assert_eq!(b.engine.held(), []);
}

#[test]
fn a_template_unwinds_from_every_step() {
    let mut b = Bench::new(ArmKind::DrumsRestored, Guests::default());
    let calls = fail_everywhere(&mut b, &mut |b| {
        b.with(|e, o| e.build_template(o))?;
        assert_eq!(b.engine.discard_templates(RUN), [""; 0]);
        Ok(())
    });
    assert!(calls >= 11, "{calls}");
}

#[test]
fn a_reset_whose_successor_fails_leaves_neither() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    for call in 0..7 {
        let created = b.with(|e, o| e.create(o)).unwrap();
        b.fake.fail(Some(Fault { call, after_effect: true }));
        b.with(|e, o| e.reset(created.handle, o)).unwrap_err();
        assert!(b.fake.fired().is_some());
        b.fake.fail(None);
        b.assert_nothing_new(&[], &format!("a reset that failed at {call}"));
    }
}

#[test]
fn what_the_host_lacks_is_never_charged_to_an_arm() {
    let mut b = Bench::new(ArmKind::DrumsRestored, Guests::default());
    b.with(|e, o| e.build_template(o)).unwrap();
    let before = b.fake.left();
    for errno in [libc::EMFILE, libc::ENFILE, libc::ENOSPC, libc::EIO] {
        b.fake.fail_with(errno);
        for call in 0..8 {
            b.fake.fail(Some(Fault { call, after_effect: true }));
            let error = b.with(|e, o| e.create(o)).unwrap_err();
            assert!(!error.is_outcome(), "{errno} at {call}: {error}");
            b.fake.fail(None);
            b.assert_nothing_new(&before, &format!("{errno} at {call}"));
        }
    }
}

#[test]
fn without_a_shim_the_engine_is_broken_and_no_session_is_to_blame() {
    let fails = |b: &mut Bench, what: &str, error: EngineError| {
        assert!(!error.is_outcome(), "{what}: {error}");
        let why = b.engine.broken().expect("an engine without a shim is broken");
        assert!(why.contains("shim"), "{why}");
    };
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    assert_eq!(b.engine.broken(), None);
    let created = b.with(|e, o| e.create(o)).unwrap();
    b.fake.lose_shim();
    let error = b.with(|e, o| e.reset(created.handle, o)).unwrap_err();
    fails(&mut b, "reset", error);
    let error = b.with(|e, o| e.create(o)).unwrap_err();
    fails(&mut b, "create", error);
    b.assert_nothing_new(&[], "a shim's death");
    // It dies while the guest boots: all that is seen is silence.
    let dies = Guests { dies_booting: true, ..Guests::default() };
    let mut b = Bench::new(ArmKind::DrumsCold, dies);
    let error = b.with(|e, o| e.create(o)).unwrap_err();
    fails(&mut b, "silence", error);
}

/// Drums, with something to do before the clock starts.
struct Preparing(Drums);

impl crate::arms::Arm for Preparing {
    fn kind(&self) -> ArmKind {
        self.0.kind()
    }
    fn unfit(&self, tools: &ToolPaths) -> Option<String> {
        self.0.unfit(tools)
    }
    fn plan(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        template: Option<&crate::arms::Template>,
    ) -> Result<crate::arms::Plan, crate::steps::PlanError> {
        let mut plan = self.0.plan(site, order, template)?;
        plan.before.push(Box::new(WriteFile { path: "/scratch/image".into(), bytes: vec![1], mode: 0o600 }));
        Ok(plan)
    }
    fn mechanism(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        sys: &dyn Sys,
        cx: &Cx,
        faults: &mut Vec<String>,
    ) -> BTreeMap<String, String> {
        self.0.mechanism(site, order, sys, cx, faults)
    }
}

#[test]
fn what_is_done_before_the_clock_starts_takes_no_session_s_time() {
    let took = |b: &mut Bench| {
        let created = b.with(|e, o| e.create(o)).unwrap();
        let reset = b.with(|e, o| e.reset(created.handle, o)).unwrap();
        b.engine.destroy(reset.handle).unwrap();
        [created.timed, reset.timed].map(|t| (t.done_us - t.intended_start_us, t.phases))
    };
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let plain = took(&mut b);
    b.engine.arms = vec![Box::new(Preparing(Drums::cold()))];
    assert_eq!(took(&mut b), plain);
    assert!(b.fake.path_exists(Path::new("/scratch/image")).unwrap(), "it was done all the same");
    fail_everywhere(&mut b, &mut create_and_destroy);
}

#[test]
fn a_session_and_its_successor_are_read() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let created = b.with(|e, o| e.create(o)).unwrap();
    let reset = b.with(|e, o| e.reset(created.handle, o)).unwrap();
    for reading in [&created.fidelity, &reset.fidelity] {
        assert_eq!(reading.faults, [""; 0]);
        assert_eq!((reading.mechanism["root"].as_str(), reading.mechanism["seccomp"].as_str()), ("overlay", "filter"));
    }
    let namespace = |r: &super::api::FidelityReading| r.mechanism["net_namespace"].clone();
    assert_ne!(namespace(&created.fidelity), namespace(&reset.fidelity), "the reading is of the successor");
    b.engine.destroy(reset.handle).unwrap();
}

#[test]
fn a_process_outside_one_controller_is_outside_the_limits() {
    for controller in ["cpu", "cpuacct", "cpuset", "memory"] {
        let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
        b.fake.lead_astray(controller);
        let created = b.with(|e, o| e.create(o)).unwrap();
        let faults = &created.fidelity.faults;
        assert!(matches!(&faults[..], [f] if f.contains(&format!("for {controller},"))), "{controller}: {faults:?}");
        b.engine.destroy(created.handle).unwrap();
    }
}

#[test]
fn a_session_that_never_answers_is_an_outcome_and_is_gone() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests { silent: true, ..Guests::default() });
    let error = b.with(|e, o| e.create(o)).unwrap_err();
    assert!(error.is_outcome());
    b.assert_nothing_new(&[], "a session that never answered");
}

#[test]
fn a_restored_session_without_its_template_is_no_outcome() {
    let mut b = Bench::new(ArmKind::DrumsRestored, Guests::default());
    let error = b.with(|e, o| e.create(o)).unwrap_err();
    assert!(!error.is_outcome(), "{error}");
    b.assert_nothing_new(&[], "a plan that was refused");
}

#[test]
fn what_cannot_be_undone_is_named_kept_and_undone_by_a_later_audit() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let created = b.with(|e, o| e.create(o)).unwrap();
    let group = b.engine.site.name(created.handle.session());
    b.fake.stubborn(&group, true);
    let destroyed = b.engine.destroy(created.handle).unwrap();
    assert_eq!(destroyed.leaked.len(), 1, "{:?}", destroyed.leaked);
    assert!(destroyed.leaked[0].contains("cgroup"), "{:?}", destroyed.leaked);
    let report = b.engine.audit();
    assert_eq!(report.leaked.len(), 1, "{report:?}");
    assert_eq!(b.engine.held().len(), 5);
    b.fake.stubborn(&group, false);
    let report = b.engine.audit();
    assert_eq!((report.undone.len(), report.leaked.len()), (1, 0), "{report:?}");
    assert_eq!(b.engine.held(), []);
    assert_eq!(b.fake.left(), [""; 0]);
}

#[test]
fn undoing_twice_is_undoing_once() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let mut created = b.with(|e, o| e.create(o)).unwrap();
    let made = std::mem::take(&mut created.handle.made);
    for _ in 0..2 {
        for (resource, receipt) in made.entries.iter().rev() {
            undo::undo(resource, receipt.as_ref(), INSTALLATION, &b.fake).unwrap();
        }
    }
    assert_eq!(b.fake.left(), [""; 0]);
}

#[test]
fn the_audit_undoes_ours_and_never_touches_a_stranger() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let created = b.with(|e, o| e.create(o)).unwrap();
    let session = created.handle.session();
    let pid = created.handle.made.cx.session().unwrap().process;
    // The agent dies here: nobody destroys, and what it held in memory is gone.
    std::mem::forget(created);
    b.engine.live.clear();
    // Ours by name, not recorded.
    b.fake.plant_group("drums-abcdef01-s9999g1");
    b.fake.plant_dir(Path::new("/scratch/drums-abcdef01-s9999g1"));
    b.fake.plant_link("dabcd9999", [2, 0xef, 0x01, 0, 0, 1]);
    // Decoys: another installation, a link of ours in name only, and names that only look alike.
    b.fake.plant_group("drums-00000000-s1g1");
    b.fake.plant_group("drums-abcdef011-s1g1");
    b.fake.plant_link("dabcd77", [2, 0x99, 0x01, 0, 0, 1]);
    b.fake.plant_link("dabcdx", [2, 0xef, 0x01, 0, 0, 1]);
    b.fake.plant_dir(Path::new("/scratch/drums-00000000-s1g1"));
    // The session's process has ended and its pid is somebody else's now.
    b.fake.plant_process(Process { pid: pid.pid, start: pid.start + 1 });

    let report = b.engine.audit();
    assert_eq!(report.leaked, [""; 0]);
    assert_eq!(report.orphans.len(), 3, "{report:?}");
    assert_eq!(report.foreign.len(), 1, "{report:?}");
    assert!(report.undone.iter().any(|u| u.contains(&session.to_string())), "{report:?}");
    assert_eq!(
        b.fake.left(),
        [
            "group drums-00000000-s1g1".to_owned(),
            "group drums-abcdef011-s1g1".to_owned(),
            "folder /scratch/drums-00000000-s1g1".to_owned(),
            "link dabcd77".to_owned(),
            "link dabcdx".to_owned(),
            format!("process {}", pid.pid),
        ]
    );
    assert_eq!(b.engine.held(), []);
    let again = b.engine.audit();
    assert_eq!(again, super::api::AuditReport::default());
}

type Decoy = Box<dyn Fn(&Fake)>;

/// Take each name of the next session.
fn decoys(b: &mut Bench) -> Vec<Decoy> {
    let number = b.engine.next_session(Generation(3)).unwrap().number + 1;
    let name = format!("drums-abcdef01-s{number}g3");
    let (group, folder, link) = (name.clone(), Path::new("/scratch").join(&name), format!("dabcd{number}"));
    vec![
        Box::new(move |f| f.plant_group(&group)),
        Box::new(move |f| f.plant_dir(&folder)),
        Box::new(move |f| f.plant_link(&link, [2, 0x99, 0x01, 0, 0, 1])),
    ]
}

#[test]
fn what_a_create_finds_under_its_names_is_a_strangers_and_stays() {
    for which in 0..3 {
        let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
        decoys(&mut b)[which](&b.fake);
        let decoy = b.fake.left();
        assert_eq!(decoy.len(), 1);
        let error = b.with(|e, o| e.create(o)).unwrap_err();
        assert_eq!(error.leaked(), [""; 0]);
        assert_eq!(b.fake.left(), decoy, "{error}");
        assert_eq!(b.engine.held(), []);
        for _ in 0..2 {
            let report = b.engine.audit();
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(b.fake.left(), decoy, "{report:?}");
        }
    }
}

#[test]
fn what_came_under_a_name_after_ours_is_a_strangers_and_stays() {
    for which in 0..3 {
        let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
        let plant = decoys(&mut b).remove(which);
        let created = b.with(|e, o| e.create(o)).unwrap();
        std::mem::forget(created);
        b.engine.live.clear();
        // Ours goes by itself, and another takes its name.
        b.fake.lose_everything();
        plant(&b.fake);
        let decoy = b.fake.left();
        for _ in 0..2 {
            let report = b.engine.audit();
            assert_eq!(report.undone, [""; 0]);
            assert_eq!(report.orphans, [""; 0]);
            assert_eq!(b.fake.left(), decoy, "{report:?}");
        }
    }
}

#[test]
fn what_was_made_and_not_noted_is_undone_by_its_name() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let (group, folder) = ("drums-abcdef01-s7g3", Path::new("/scratch/drums-abcdef01-s7g3"));
    let resources = [Resource::Cgroup { name: group.into() }, Resource::Dir { path: folder.to_owned() }];
    b.engine.ledger.intend(group, &resources).unwrap();
    b.fake.plant_group(group);
    b.fake.plant_dir(folder);
    // Started by the agent that died, without a row, and writing.
    b.fake.plant_writer(group, folder);
    let report = b.engine.audit();
    assert_eq!((report.undone.len(), report.leaked.len()), (2, 0), "{report:?}");
    assert_eq!(b.fake.left(), [""; 0]);
}

#[test]
fn an_earlier_agents_shim_is_ended_before_anything_else_and_ours_is_not() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    let shim = Process { pid: 4_242, start: 7 };
    b.fake.plant_process(shim);
    let plan = super::audit::shim_plan(INSTALLATION);
    b.engine.ledger.intend("drums-abcdef01-s7g3", &[Resource::Dir { path: "/scratch/x".into() }]).unwrap();
    b.engine.ledger.intend(&plan, &[Resource::Process { role: "shim".into() }]).unwrap();
    b.engine.ledger.held(&plan, 0, &Receipt::Process(shim)).unwrap();
    b.engine.shim_plan = Some(plan.clone());
    b.engine.live.insert(plan.clone());
    b.engine.reclaim();
    assert_eq!(b.fake.left(), ["process 4242"]);
    // To the next agent it is one that was left.
    b.fake.plant_dir(Path::new("/scratch/x"));
    b.engine.ledger.intend("drums-abcdef01-s8g3", &[Resource::Dir { path: "/scratch/x".into() }]).unwrap();
    b.engine.live.clear();
    let report = b.engine.audit();
    assert_eq!(report.undone[0], format!("process shim of {plan}"));
    assert_eq!(report.undone.len(), 2, "{report:?}");
    assert_eq!(b.fake.left(), [""; 0]);
}

#[test]
fn a_scratch_mount_without_a_row_is_an_orphan_and_a_strangers_is_not() {
    let mut b = Bench::new(ArmKind::DrumsCold, Guests::default());
    b.fake.plant_mount(Path::new("/scratch"), "drums-abcdef01");
    assert_eq!(b.engine.audit().orphans, ["mount /scratch"]);
    assert_eq!(b.fake.left(), [""; 0]);
    b.fake.plant_mount(Path::new("/scratch"), "tmpfs");
    assert_eq!(b.engine.audit(), super::api::AuditReport::default());
    assert_eq!(b.fake.left(), ["mount /scratch"]);
}

#[test]
fn a_delay_is_in_the_window_to_its_last_microsecond() {
    let delayed = |e: &mut Engine, o: &SessionOrder<'_>| {
        e.create(&SessionOrder { delay: Some(Duration::from_micros(200)), ..o.clone() })
    };
    // A guest that boots for longer than the delay, by itself: nothing of the delay may hide behind it.
    let mut b = Bench::new(ArmKind::DrumsCold, Guests { boot_us: 1_000, ..Guests::default() });
    let plain = b.with(|e, o| e.create(o)).unwrap();
    let late = b.with(delayed).unwrap();
    let took = |c: &super::api::Created| c.timed.done_us - c.timed.intended_start_us;
    assert!(took(&late) >= took(&plain) + 200, "{} after {}", took(&late), took(&plain));
    let phase = &late.timed.phases[0];
    assert_eq!(phase.name, "injected delay", "before the first step");
    assert!(phase.end_us - phase.start_us >= 200, "{phase:?}");
    b.engine.destroy(plain.handle).unwrap();
    let reset = b
        .with(|e, o| e.reset(late.handle, &SessionOrder { delay: Some(Duration::from_micros(200)), ..o.clone() }))
        .unwrap();
    assert!(reset.timed.phases.iter().all(|p| p.name != "injected delay"), "{:?}", reset.timed.phases);
    b.engine.destroy(reset.handle).unwrap();
}
