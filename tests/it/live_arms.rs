//! Every arm on the real kernel, by the engine alone: create, dirt, reset, destroy, and nothing left. Restored arms
//! also prove what a sibling is: the template's state, an identity of its own, and a template that stays as it was.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::{
    engine::{
        Engine, EngineConfig,
        api::{ArmEngine as _, EngineError, GuestReady, SessionFailure, SessionHandle, SessionOrder, Workload},
    },
    setup::{self, SetupOptions, ToolsDir},
    shim::ShimClient,
};
use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    experiment::{Arm, Limits},
    ids::{Generation, RunId},
    telemetry::chain,
};
use drums_infra::leakgate::{self, Scope, Snapshot};
use drums_tests::fleet::TOOLS;

/// An engine of the test's own, with one arm.
struct Rig {
    engine: Engine,
    arm: Arm,
    workload: Workload,
    limits: Limits,
    run: RunId,
    seed: u64,
    before: Snapshot,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new(kind: ArmKind, command: Vec<String>) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "live tests need root: they make namespaces and cgroups for real");
        let programs = drums_tests::programs()?;
        let image = drums_tests::image()?;
        let tools = ToolsDir::new(TOOLS);
        setup::run(&tools, &SetupOptions::default(), &mut |_| ()).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        let tree = image.join(drums_common::workload::TREE);
        let guest = fs::read(tree.join("sbin/drums-guest")).context("the workload has no guest server")?;
        let manifest =
            fs::read(image.join(drums_common::workload::MANIFEST)).context("the workload has no manifest")?;
        let dir = tempfile::Builder::new().prefix("drums-arms-").tempdir()?;
        let before = Snapshot::take()?;
        let config =
            EngineConfig { state: dir.path().join("state"), tools: setup::tools::find(&tools), scratch_bytes: 2 << 30 };
        let shim = Arc::new(ShimClient::launch(&programs.join("drums-agent"))?);
        let (engine, _) = Engine::open(&config, shim)?;
        if let Some(why) = engine.unfit(kind) {
            bail!("{kind} cannot run here: {why}");
        }
        Ok(Self {
            engine,
            arm: Arm { name: kind.as_str().parse()?, kind, control: None, command },
            workload: Workload { tree, sha256: Sha256::of(&manifest), guest_sha256: Sha256::of(&guest) },
            limits: Limits {
                cpu_milli: 1_000,
                cpuset_size: 1,
                memory_bytes: 512 << 20,
                vmm_memory_overhead_bytes: 192 << 20,
            },
            run: RunId(*b"vmtest"),
            seed: 0,
            before,
            dir,
        })
    }

    fn order<R>(&mut self, act: impl FnOnce(&mut Engine, &SessionOrder<'_>) -> Result<R, EngineError>) -> Result<R> {
        self.seed += 1;
        let session = self.engine.next_session(Generation(1)).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        let order = SessionOrder {
            run: self.run,
            arm: &self.arm,
            session,
            limits: &self.limits,
            cpus: &[0],
            environment_bytes: 100,
            template_build: 0,
            delay: None,
            identity_seed: self.seed,
            workload: &self.workload,
            ready_timeout: Duration::from_secs(90),
        };
        act(&mut self.engine, &order).map_err(anyhow::Error::from)
    }

    /// A session whose readings contradict nothing.
    fn create(&mut self) -> Result<(SessionHandle, GuestReady)> {
        let created = self.order(|e, o| e.create(o)).map_err(|e| anyhow::anyhow!("{e:#}"))?;
        ensure!(created.fidelity.faults.is_empty(), "faults: {:#?}", created.fidelity.faults);
        ensure!(created.fidelity.limits.cpus == [0], "limits read: {:?}", created.fidelity.limits);
        ensure!(created.cpu_s > 0.0, "no CPU time was accounted");
        Ok((created.handle, created.ready))
    }

    fn destroy(&mut self, handle: SessionHandle) -> Result<()> {
        let destroyed = self.engine.destroy(handle).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        ensure!(destroyed.leaked.is_empty(), "leaked: {:?}", destroyed.leaked);
        Ok(())
    }

    /// Create, dirt, reset, no dirt, destroy.
    fn cycle(&mut self) -> Result<()> {
        let (handle, first) = self.create()?;
        self.engine.dirty(&handle).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        let planted = self.engine.dirt(&handle).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        ensure!(!planted.is_empty(), "nothing was planted, so nothing can be shown to go");
        let reset = self.order(|e, o| e.reset(handle, o)).map_err(|e| anyhow::anyhow!("{e:#}"))?;
        ensure!(reset.leaked.is_empty(), "leaked by the reset: {:?}", reset.leaked);
        let left = self.engine.dirt(&reset.handle).map_err(|e| anyhow::anyhow!(chain(&e)))?;
        ensure!(left.is_empty(), "survived the reset: {left:?}");
        differ(&first, &reset.ready)?;
        self.destroy(reset.handle)
    }

    /// Closes the engine and holds the machine against what it was before.
    fn finish(self) -> Result<()> {
        let leaked = self.engine.close();
        ensure!(leaked.is_empty(), "leaked at the end: {leaked:?}");
        let scope = Scope::from_env(vec![self.dir.path().display().to_string()]);
        let left = leakgate::settle(&self.before, &scope, Duration::from_secs(15))?;
        ensure!(left.is_empty(), "left on the machine: {left:#?}");
        Ok(())
    }

    /// The folder of the only template.
    fn template(&self) -> Result<PathBuf> {
        let scratch = self.dir.path().join("state/scratch");
        for entry in fs::read_dir(&scratch)? {
            let path = entry?.path();
            if path.to_string_lossy().ends_with("-template") {
                return Ok(path);
            }
        }
        bail!("no template in {}", scratch.display())
    }
}

fn differ(a: &GuestReady, b: &GuestReady) -> Result<()> {
    ensure!(a.hostname != b.hostname, "both are called {}", a.hostname);
    ensure!(a.machine_id != b.machine_id, "both have machine id {}", a.machine_id);
    ensure!(a.random != b.random, "both drew {}", a.random);
    Ok(())
}

fn cold(kind: ArmKind) -> Result<()> {
    let mut rig = Rig::new(kind, Vec::new())?;
    rig.cycle()?;
    rig.finish()
}

/// Two siblings alive at once, then one life of a sibling.
fn siblings(rig: &mut Rig) -> Result<()> {
    let template = rig.order(|e, o| e.build_template(o)).map_err(|e| anyhow::anyhow!("{e:#}"))?;
    ensure!(template.leaked.is_empty(), "leaked by the template: {:?}", template.leaked);
    ensure!(!template.state.is_empty() && template.bytes > 0, "an empty template: {template:?}");
    let (a, first) = rig.create()?;
    let (b, second) = rig.create()?;
    for sibling in [&first, &second] {
        ensure!(sibling.state == template.state, "a sibling carries {:?}, not {:?}", sibling.state, template.state);
        ensure!(sibling.boot == "restored", "a sibling says that its boot was {:?}", sibling.boot);
        ensure!(sibling.hostname != template.identity.hostname, "a sibling has its template's hostname");
        ensure!(sibling.machine_id != template.identity.machine_id, "a sibling has its template's machine id");
        ensure!(sibling.random != template.identity.random, "a sibling continues its template's random stream");
        ensure!(sibling.address != template.identity.address, "a sibling has its template's address");
    }
    differ(&first, &second)?;
    ensure!(first.address != second.address, "both siblings have the address {}", first.address);
    // What happens in one is not seen in the other.
    rig.engine.dirty(&a).map_err(|e| anyhow::anyhow!(chain(&e)))?;
    let seen = rig.engine.dirt(&b).map_err(|e| anyhow::anyhow!(chain(&e)))?;
    ensure!(seen.is_empty(), "one sibling sees the other's marks: {seen:?}");
    rig.destroy(a)?;
    rig.destroy(b)?;
    rig.cycle()
}

fn restored(kind: ArmKind) -> Result<()> {
    let mut rig = Rig::new(kind, Vec::new())?;
    siblings(&mut rig)?;
    rig.finish()
}

#[test]
fn live_drums_cold() -> Result<()> {
    cold(ArmKind::DrumsCold)
}

#[test]
fn live_drums_restored() -> Result<()> {
    restored(ArmKind::DrumsRestored)
}

#[test]
fn live_runc_cold() -> Result<()> {
    cold(ArmKind::RuncCold)
}

#[test]
fn live_runc_restored() -> Result<()> {
    restored(ArmKind::RuncRestored)
}

#[test]
fn live_qemu_cold() -> Result<()> {
    cold(ArmKind::QemuCold)
}

/// With its negative controls: another machine is refused in words, and a changed template is found out.
#[test]
fn live_qemu_warm() -> Result<()> {
    let mut rig = Rig::new(ArmKind::QemuWarm, Vec::new())?;
    siblings(&mut rig)?;

    let folder = rig.template()?;
    let manifest = folder.join("manifest.json");
    let text = fs::read_to_string(&manifest)?;
    fs::write(&manifest, text.replace("\"cpu\": \"max\"", "\"cpu\": \"qemu64\""))?;
    let refused = match rig.order(|e, o| e.create(o)) {
        Ok(_) => bail!("a template of another CPU model was continued"),
        Err(e) => format!("{e:#}"),
    };
    ensure!(refused.contains("the CPU model was qemu64 and is max"), "refused for another reason: {refused}");
    fs::write(&manifest, text)?;

    // As if a sibling had mapped the RAM file shared: one byte in a page that no guest uses yet.
    let ram = OpenOptions::new().write(true).open(folder.join("ram"))?;
    ram.write_all_at(b"!", 400 << 20)?;
    // Open, it would keep the scratch file system busy.
    drop(ram);
    let created = rig.order(|e, o| e.create(o)).map_err(|e| anyhow::anyhow!("{e:#}"))?;
    ensure!(
        created.fidelity.faults.iter().any(|f| f.contains("changed after it was saved")),
        "a changed template went unnoticed: {:?}",
        created.fidelity
    );
    rig.destroy(created.handle)?;
    rig.finish()
}

#[test]
fn live_external_program() -> Result<()> {
    let program = drums_tests::root().join("tests/external/plain-process.sh");
    let mut rig = Rig::new(ArmKind::External, vec![program.display().to_string()])?;
    rig.cycle()?;
    rig.finish()
}

#[test]
fn live_external_program_that_is_not_there() -> Result<()> {
    let mut rig = Rig::new(ArmKind::External, vec!["/nonexistent/drums-arm".to_owned()])?;
    match rig.order(|e, o| e.create(o)) {
        Ok(_) => bail!("a program that does not exist made a session"),
        Err(e) => {
            let e = e.downcast::<EngineError>()?;
            let said = chain(&e);
            ensure!(said.contains("/nonexistent/drums-arm"), "the error does not name the program: {said}");
            let EngineError::Session { source, leaked, .. } = e else { bail!("not counted against the arm: {said}") };
            ensure!(matches!(*source, SessionFailure::Step(_)) && leaked.is_empty(), "{said}, leaked {leaked:?}");
        }
    }
    rig.finish()
}
