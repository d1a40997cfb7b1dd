//! One agent's measuring side without a coordinator: the registered first experiment's eight arms through a warm-up and a
//! measured block on the real engine, orders given by hand, records read back from the spool.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::{
    engine::{Engine, EngineConfig, api::ArmEngine},
    facts::{Findings, Readings},
    measure::{
        clock::SystemClock,
        decide::Idle,
        runner::{Parts, Runner, Step, Workloads},
        surroundings::ThisMachine,
    },
    net::{FetchError, Link, Stop},
    setup::{self, ToolsDir},
    shim::ShimClient,
    spool::Spool,
    succession::Succession,
};
use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockKind, BlockResult, Body, Record, Teardown},
    experiment::{Metric, Registration},
    ids::{Generation, HostId, RunId},
    machine::Accelerator,
    spec, williams,
    wire::latest::{Desired, Grant, RunDesired, RunPhase, Welcome},
};
use drums_infra::{
    fleet::Binaries,
    leakgate::{self, Scope, Snapshot},
};
use drums_tests::fleet::TOOLS;

const RUN: RunId = RunId([9; 6]);

/// A workload that is on this machine already.
struct Folder(PathBuf);

impl Workloads for Folder {
    fn fetch(&self, _workload: Sha256) -> Result<PathBuf, FetchError> {
        Ok(self.0.clone())
    }
}

#[test]
fn live_every_arm_goes_through_the_block_loop() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "live tests need root: they make namespaces and cgroups for real");
    let tools_dir = ToolsDir::new(TOOLS);
    let tools = setup::tools::find(&tools_dir);
    if tools.criu.is_none() || tools.runc.is_none() || tools.qemu.is_none() {
        drums_tests::skip("live_every_arm_goes_through_the_block_loop", "not all tools are installed");
        return Ok(());
    }
    let agent = Binaries::beside(&drums_tests::programs()?).agent;
    let image = drums_tests::image()?;
    let state = tempfile::tempdir()?;
    let before = Snapshot::take()?;
    let records = measure(&agent, image, state.path(), tools)?;
    for r in &records {
        println!("{}", serde_json::to_string(r)?);
    }
    check(&records)?;
    let installation = fs::read_to_string(state.path().join("installation"))?;
    let names =
        vec![state.path().display().to_string(), installation.trim().to_owned(), format!("d{}", &installation[..4])];
    let left = leakgate::settle(&before, &Scope::from_env(names), Duration::from_secs(20))?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

/// The registered experiment, as its file in the documentation says.
fn registration() -> Result<Registration> {
    let path = drums_tests::root().join("docs/experiments/EXP-028.toml");
    let parsed = spec::parse("EXP-028.toml", &fs::read(path)?).map_err(|e| anyhow::anyhow!("{e}"))?;
    Ok(Registration::freeze(parsed.experiment, Micros(0))?)
}

fn measure(agent: &Path, image: PathBuf, state: &Path, tools: drums_agent::arms::ToolPaths) -> Result<Vec<Record>> {
    let shim = Arc::new(ShimClient::launch(agent)?);
    let config = EngineConfig { state: state.to_owned(), tools, scratch_bytes: 4 << 30 };
    let (engine, audit) = Engine::open(&config, shim.clone())?;
    let root = state.to_owned();
    let facts = move |engine: &dyn ArmEngine| {
        let unfit = drums_common::arm::ArmKind::ALL.into_iter().filter_map(|k| Some((k, engine.unfit(k)?))).collect();
        Readings::take(&root).describe(Findings {
            tools: BTreeMap::new(),
            accelerator: Accelerator::Tcg,
            accelerator_detail: "this test does not ask for KVM".to_owned(),
            unfit,
        })
    };
    let host: HostId = "h1".parse()?;
    let welcome = Welcome {
        host: host.clone(),
        generation: Generation(1),
        beat_ms: 1_000,
        dispatch_lease_ms: 3_600_000,
        life_lease_ms: 7_200_000,
    };
    let clock = Arc::new(SystemClock);
    let link = Link::detached(clock.clone(), facts(&engine), &welcome);
    let (spool, _, _) = Spool::open(&state.join("spool"), 0)?;
    let spool = Arc::new(spool);
    let registration = registration()?;
    let grant = |kind| Grant {
        block: 0,
        kind,
        order: williams::block_order(&registration.experiment, &host, kind, 0),
        template_build: 0,
        seed: 28,
    };
    let granted = [grant(BlockKind::WarmUp), grant(BlockKind::Measured)];
    let parts = Parts {
        host: host.clone(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        agent_sha256: Sha256::of(&fs::read(agent)?),
        lock: state.join("measure.lock"),
        engine,
        surroundings: Box::new(ThisMachine::new(u32::try_from(shim.pid()).ok())),
        facts: Box::new(facts),
        workloads: Box::new(Folder(image)),
        succession: Succession::of(state),
        spool: spool.clone(),
        link: link.clone(),
        clock,
    };
    let mut runner = Runner::new(parts, &audit).map_err(|failed| failed.0)?;
    let steps = [(RunPhase::Prepare, 0), (RunPhase::Measure, 1), (RunPhase::Measure, 2), (RunPhase::Unwind, 2)];
    let mut worked = Ok(());
    for (phase, blocks) in steps {
        link.offer(Desired {
            generation: Generation(1),
            runs: vec![RunDesired {
                run: RUN,
                registration: registration.sha256,
                canonical: registration.canonical.clone(),
                workload_sha256: Sha256::of(b"given by hand"),
                phase,
                granted: granted[..blocks].to_vec(),
                acked_seq: 0,
                deadline_left_ms: 3_600_000,
            }],
        });
        worked = until_idle(&mut runner, &link);
        if worked.is_err() {
            break;
        }
    }
    // Whatever happened: nothing stays.
    link.stop(Stop::Signal("the end of the test"));
    let (_, engine) = runner.run();
    let leaked = engine.close();
    shim.shutdown();
    worked?;
    ensure!(leaked.is_empty(), "leaked: {leaked:?}");
    Ok(spool.run(RUN).context("the run left no spool")?.records()?)
}

fn until_idle(runner: &mut Runner<Engine>, link: &Link) -> Result<()> {
    loop {
        match runner.step(&link.view()) {
            Step::Did => {}
            Step::Idle(Idle::Nothing) => return Ok(()),
            other => bail!("{other:?} in the middle of a run"),
        }
    }
}

fn check(records: &[Record]) -> Result<()> {
    let arms = registration()?.experiment.arms.len();
    ensure!(matches!(records.first().map(|r| &r.body), Some(Body::Preflight(_))), "the first record is no preflight");
    match records.last().map(|r| &r.body) {
        Some(Body::Closed(c)) => ensure!(c.teardown == Teardown::Clean, "{:?}", c.teardown),
        other => bail!("the last record does not close the run: {other:?}"),
    }
    let (mut samples, mut outcomes, mut ends, mut timelines) = (0, 0, 0, 0);
    for r in records {
        match &r.body {
            Body::Outcome(o) => {
                ensure!(o.valid, "{}: {:?}", o.arm, o.failures);
                outcomes += 1;
            }
            Body::Fidelity(f) => ensure!(f.faults.is_empty(), "{}: {:?}", f.arm, f.faults),
            Body::Sample(s) => {
                ensure!(s.value > 0.0, "{s:?}");
                samples += 1;
            }
            Body::Timeline(t) => {
                let ordered = t.phases.windows(2).all(|w| w[0].end_us <= w[1].start_us);
                ensure!(ordered && !t.phases.is_empty(), "{t:?}");
                timelines += 1;
            }
            Body::BlockEnded(b) => {
                ensure!(b.result == BlockResult::Completed, "{:?}", b.result);
                ensure!(b.environment.settled, "{:?}", b.environment.unsettled);
                ends += 1;
            }
            Body::Log(l) => ensure!(l.level != "error", "{}: {}", l.target, l.text),
            _ => {}
        }
    }
    // Two blocks of every arm, and the further warm-up turns of the arm that the control is delayed against.
    let turns = 2 * arms + 4;
    let want = (2, turns, turns * Metric::ALL.len(), turns * 3);
    ensure!((ends, outcomes, samples, timelines) == want, "{:?}, not {want:?}", (ends, outcomes, samples, timelines));
    Ok(())
}
