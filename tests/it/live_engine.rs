//! The engine on the real kernel: shim, drums sessions cold and restored, what a killed agent leaves behind.

use std::{
    fs,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::{
    arms::ToolPaths,
    engine::{
        Engine, EngineConfig,
        api::{ArmEngine as _, SessionOrder, Workload},
        bench::{CreateBench, reaped_ms},
    },
    shim::ShimClient,
    sys::{CgroupLimits, Exit, Leaf, LeafOf, Linux, SessionSpec, Sys as _, SysError, ToolSpec},
};
use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    experiment::{Arm, Limits},
    ids::{Generation, RunId},
};
use drums_infra::{
    fleet::{Binaries, wait_until},
    leakgate::{self, Scope, Snapshot},
};
use drums_tests::fleet::TOOLS;

struct Ground {
    agent: PathBuf,
    tree: PathBuf,
    state: tempfile::TempDir,
    before: Snapshot,
}

impl Ground {
    fn new() -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "live tests need root: they make namespaces and cgroups for real");
        let agent = Binaries::beside(&drums_tests::programs()?).agent;
        let tree = drums_tests::image()?.join("tree");
        let state = tempfile::tempdir()?;
        Ok(Self { agent, tree, state, before: Snapshot::take()? })
    }

    fn config(&self) -> EngineConfig {
        let criu = Path::new(TOOLS).join("criu/bin/criu");
        EngineConfig {
            state: self.state.path().to_owned(),
            tools: ToolPaths { criu: criu.is_file().then_some(criu), ..ToolPaths::default() },
            scratch_bytes: 1 << 30,
        }
    }

    fn shim(&self) -> Result<Arc<ShimClient>> {
        Ok(Arc::new(ShimClient::launch(&self.agent)?))
    }

    fn workload(&self) -> Result<Workload> {
        let guest = fs::read(self.tree.join("sbin/drums-guest"))?;
        Ok(Workload { tree: self.tree.clone(), sha256: Sha256::of(b"it"), guest_sha256: Sha256::of(&guest) })
    }

    /// Nothing that names this test's state folder or installation is left.
    fn leave(self) -> Result<()> {
        let mut names = vec![self.state.path().display().to_string()];
        if let Ok(id) = fs::read_to_string(self.state.path().join("installation")) {
            names.push(id.trim().to_owned());
            names.push(format!("d{}", &id[..4]));
        }
        let left = leakgate::settle(&self.before, &Scope::from_env(names), Duration::from_secs(20))?;
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    }
}

const LIMITS: Limits =
    Limits { cpu_milli: 1_000, cpuset_size: 1, memory_bytes: 512 << 20, vmm_memory_overhead_bytes: 0 };

fn arm(kind: ArmKind) -> Result<Arm> {
    Ok(Arm { name: kind.as_str().parse()?, kind, control: None, command: Vec::new() })
}

fn order<'a>(engine: &mut Engine, arm: &'a Arm, workload: &'a Workload) -> Result<SessionOrder<'a>> {
    let session = engine.next_session(Generation(1))?;
    Ok(SessionOrder {
        run: RunId([7; 6]),
        arm,
        session,
        limits: &LIMITS,
        cpus: &[0],
        environment_bytes: 64,
        template_build: 0,
        delay: None,
        identity_seed: u64::from(session.number),
        workload,
        ready_timeout: Duration::from_secs(30),
    })
}

fn bare(argv: &[&str]) -> SessionSpec {
    SessionSpec {
        leaf: None,
        root: None,
        hostname: "it".to_owned(),
        argv: argv.iter().map(|&a| a.to_owned()).collect(),
        env: Vec::new(),
        new_netns: true,
        deny_pkeys: false,
        output: None,
    }
}

#[test]
fn live_shim_tells_what_a_new_process_could_not_do() -> Result<()> {
    let ground = Ground::new()?;
    let sys = Linux::new(ground.shim()?)?;
    match sys.spawn_session(&bare(&["/nonexistent/program"]), None) {
        Err(e @ SysError::Child { .. }) => {
            ensure!(e.errno() == Some(libc_enoent()), "{e:?}");
            ensure!(e.to_string().contains("run /nonexistent/program"), "{e}");
        }
        other => bail!("expected a child's error, got {other:?}"),
    }
    let spec = SessionSpec {
        leaf: Some(LeafOf { group: "drums-no-such-group".into(), leaf: Leaf::Session }),
        ..bare(&["/bin/true"])
    };
    let error = sys.spawn_session(&spec, None).err().context("a session in no group")?;
    ensure!(error.to_string().contains("drums-no-such-group"), "{error}");
    // And the next one is fine.
    let child = sys.spawn_session(&bare(&["/bin/sh", "-c", "exit 7"]), None)?;
    ensure!(sys.wait(&child, 10_000)? == Exit::Code(7));
    // Not a child of the shim: refused.
    ensure!(sys.adopt(std::process::id().cast_signed()).is_err());
    // The last owner of the shim ends it.
    drop(sys);
    ground.leave()
}

fn libc_enoent() -> i32 {
    nix::errno::Errno::ENOENT as i32
}

#[test]
fn live_shim_passes_descriptors_and_hides_its_own() -> Result<()> {
    let ground = Ground::new()?;
    let sys = Linux::new(ground.shim()?)?;
    let out = ground.state.path().join("out");
    let file = fs::File::open("/etc/hostname")?;
    let spec = ToolSpec {
        program: "/bin/sh".into(),
        args: ["-c", "ls /proc/self/fd | tr '\\n' ' '; readlink /proc/self/fd/40"].map(str::to_owned).to_vec(),
        fds: vec![40],
        stdout: drums_agent::sys::StdIo::File(out.clone()),
        ..ToolSpec::default()
    };
    let child = sys.spawn_tool(&spec, &[file.as_fd()])?;
    ensure!(sys.wait(&child, 10_000)?.ok());
    // 3 is ls reading the folder.
    ensure!(fs::read_to_string(&out)? == "0 1 2 3 40 /etc/hostname\n", "{:?}", fs::read_to_string(&out)?);
    drop(sys);
    ground.leave()
}

/// Our end of the shim's socket: this process has no other of its kind.
fn shim_socket() -> Result<i32> {
    const SEQPACKET: &str = "0005";
    let table = fs::read_to_string("/proc/self/net/unix")?;
    let inodes: Vec<&str> = table
        .lines()
        .map(|l| l.split_ascii_whitespace().collect::<Vec<_>>())
        .filter(|f| f.get(4) == Some(&SEQPACKET))
        .filter_map(|f| f.get(6).copied())
        .collect();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if inodes.iter().any(|i| link.as_os_str() == format!("socket:[{i}]").as_str()) {
            return Ok(entry.file_name().to_string_lossy().parse()?);
        }
    }
    bail!("this process has no socket to a shim")
}

#[test]
fn live_everything_dies_with_the_agent_or_the_shim() -> Result<()> {
    let ground = Ground::new()?;
    // The agent goes: end of file on the socket.
    let shim = ground.shim()?;
    let sys = Linux::new(Arc::clone(&shim))?;
    let session = sys.spawn_session(&bare(&["/bin/sleep", "1000"]), None)?;
    let tool = sys.spawn_tool(
        &ToolSpec {
            program: "/bin/sh".into(),
            args: ["-c".into(), "sleep 1000 & wait".into()].into(),
            ..ToolSpec::default()
        },
        &[],
    )?;
    ensure!(sys.alive(&session) && sys.alive(&tool));
    shim.shutdown();
    ensure!(!sys.alive(&session) && !sys.alive(&tool), "they outlived the shim's orderly end");
    // The shim goes by an error: what it cannot read is no reason to leave anything behind.
    let shim = ground.shim()?;
    let sys = Linux::new(Arc::clone(&shim))?;
    let child = ground.state.path().join("child");
    let line = format!("sleep 1000 & echo $! > {}; wait", child.display());
    let spec = ToolSpec { program: "/bin/sh".into(), args: vec!["-c".to_owned(), line], ..ToolSpec::default() };
    let tool = sys.spawn_tool(&spec, &[])?;
    let grandchild = || fs::read_to_string(&child).ok().and_then(|text| text.trim().parse::<i32>().ok());
    ensure!(wait_until(Duration::from_secs(10), || grandchild().is_some()), "the tool started nothing");
    nix::sys::socket::send(shim_socket()?, b"no request", nix::sys::socket::MsgFlags::empty())?;
    ensure!(wait_until(Duration::from_secs(10), || !sys.alive(&tool)), "the tool outlived its shim");
    let grandchild = grandchild().context("no pid")?;
    let gone = || matches!(sys.process_start(grandchild), Ok(None));
    ensure!(wait_until(Duration::from_secs(10), gone), "the tool's child outlived the shim");
    ensure!(matches!(sys.standing(), Err(SysError::Shim(_))));
    shim.shutdown();
    // The shim goes: PDEATHSIG.
    let shim = ground.shim()?;
    let sys = Linux::new(Arc::clone(&shim))?;
    let session = sys.spawn_session(&bare(&["/bin/sleep", "1000"]), None)?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim.pid()), nix::sys::signal::Signal::SIGKILL)?;
    ensure!(wait_until(Duration::from_secs(10), || !sys.alive(&session)), "the session outlived its killed shim");
    ensure!(matches!(sys.spawn_session(&bare(&["/bin/true"]), None), Err(SysError::Shim(_))));
    shim.shutdown();
    ground.leave()
}

#[test]
fn live_drums_cold_sessions_come_reset_and_go() -> Result<()> {
    let ground = Ground::new()?;
    let (workload, arm) = (ground.workload()?, arm(ArmKind::DrumsCold)?);
    let (mut engine, report) = Engine::open(&ground.config(), ground.shim()?)?;
    ensure!(report == drums_agent::engine::api::AuditReport::default(), "{report:?}");
    let o = order(&mut engine, &arm, &workload)?;
    let created = engine.create(&o)?;
    ensure!(created.fidelity.faults.is_empty(), "{:?}", created.fidelity.faults);
    ensure!(created.fidelity.limits.memory_bytes == LIMITS.memory_bytes);
    ensure!(created.fidelity.guest_sha256 == Some(workload.guest_sha256));
    ensure!(created.cpu_s > 0.0 && created.timed.done_us > created.timed.intended_start_us);
    let names: Vec<_> = created.timed.phases.iter().map(|p| p.name.as_str()).collect();
    ensure!(names == ["limits", "scratch", "network", "spawn", "ready"], "{names:?}");
    engine.dirty(&created.handle)?;
    ensure!(!engine.dirt(&created.handle)?.is_empty());
    let o = order(&mut engine, &arm, &workload)?;
    let reset = engine.reset(created.handle, &o)?;
    ensure!(reset.leaked.is_empty(), "{:?}", reset.leaked);
    ensure!(reset.ready.hostname != created.ready.hostname && reset.ready.random != created.ready.random);
    ensure!(engine.dirt(&reset.handle)?.is_empty(), "marks survived the reset");
    // Our audit leaves what lives alone.
    ensure!(engine.audit() == drums_agent::engine::api::AuditReport::default());
    ensure!(engine.dirt(&reset.handle).is_ok());
    let destroyed = engine.destroy(reset.handle)?;
    ensure!(destroyed.leaked.is_empty(), "{:?}", destroyed.leaked);
    ensure!(engine.close().is_empty());
    ground.leave()
}

#[test]
fn live_drums_restored_siblings_share_their_state_and_nothing_else() -> Result<()> {
    let ground = Ground::new()?;
    let config = ground.config();
    if config.tools.criu.is_none() {
        let set_up = Command::new(&ground.agent).args(["setup", "--tools", TOOLS]).status()?;
        ensure!(set_up.success(), "drums-agent setup failed");
    }
    let config = ground.config();
    let (workload, arm) = (ground.workload()?, arm(ArmKind::DrumsRestored)?);
    let (mut engine, _) = Engine::open(&config, ground.shim()?)?;
    let o = order(&mut engine, &arm, &workload)?;
    let template = engine.build_template(&o)?;
    ensure!(template.bytes > 10_000 && template.leaked.is_empty(), "{template:?}");
    let mut siblings = Vec::new();
    for _ in 0..2 {
        let o = order(&mut engine, &arm, &workload)?;
        let created = engine.create(&o)?;
        ensure!(created.fidelity.faults.is_empty(), "{:?}", created.fidelity.faults);
        ensure!(created.ready.state == template.state, "{:?}", created.ready);
        siblings.push(created);
    }
    let identities: Vec<_> = siblings.iter().map(|s| s.ready.identity()).chain([template.identity.clone()]).collect();
    for (i, a) in identities.iter().enumerate() {
        for b in &identities[i + 1..] {
            ensure!(a.hostname != b.hostname && a.machine_id != b.machine_id && a.random != b.random, "{a:?} {b:?}");
            ensure!(a.address != b.address, "{a:?} {b:?}");
        }
    }
    // One is dirty, the other must not see it; and a reset comes back clean.
    let mut siblings = siblings.into_iter();
    let (Some(first), Some(second)) = (siblings.next(), siblings.next()) else { bail!("two were made") };
    engine.dirty(&first.handle)?;
    ensure!(engine.dirt(&second.handle)?.is_empty(), "a sibling sees the other's marks");
    let o = order(&mut engine, &arm, &workload)?;
    let reset = engine.reset(first.handle, &o)?;
    ensure!(engine.dirt(&reset.handle)?.is_empty(), "marks survived the reset");
    for handle in [reset.handle, second.handle] {
        let destroyed = engine.destroy(handle)?;
        ensure!(destroyed.leaked.is_empty(), "{:?}", destroyed.leaked);
    }
    ensure!(engine.discard_templates(RunId([7; 6])).is_empty());
    ensure!(engine.close().is_empty());
    ground.leave()
}

#[test]
fn live_a_killed_agent_leaves_nothing_that_the_next_audit_does_not_undo() -> Result<()> {
    let ground = Ground::new()?;
    let state = ground.state.path().display().to_string();
    let tree = ground.tree.display().to_string();
    let mut agent = Command::new(&ground.agent)
        .args(["try", "drums-cold", "--workload", &tree, "--state", &state, "-n", "100000"])
        .stdout(Stdio::null())
        .spawn()?;
    let sys = Linux::new(ground.shim()?)?;
    let lives = wait_until(Duration::from_secs(30), || {
        let Ok(id) = fs::read_to_string(ground.state.path().join("installation")) else { return false };
        let groups = sys.cgroups_named(&format!("drums-{}-", id.trim())).unwrap_or_default();
        groups.iter().any(|g| sys.cgroup_procs(g).is_ok_and(|p| !p.is_empty()))
    });
    ensure!(lives, "the other agent made no session");
    agent.kill()?;
    agent.wait()?;
    // Its shim sees the end of file, kills the session and ends; the ledger's lock is free at once.
    let config = ground.config();
    let (engine, report) = Engine::open(&config, ground.shim()?)?;
    ensure!(!report.undone.is_empty(), "{report:?}");
    ensure!(report.leaked.is_empty() && report.orphans.is_empty(), "{report:?}");
    ensure!(engine.close().is_empty());
    drop(sys);
    ground.leave()
}

#[test]
fn live_making_a_process_costs_what_its_timeline_says() -> Result<()> {
    let ground = Ground::new()?;
    let limits = CgroupLimits { cpu_milli: 1_000, cpus: vec![0], memory_bytes: 512 << 20, pids: 100 };
    let mut bench = CreateBench::open(&ground.config(), &ground.agent, ground.tree.clone(), limits)?;
    let bare = bench.bare()?;
    ensure!(bare.phases.iter().map(|p| p.name.as_str()).eq(["spawn", "exit"]), "{bare:?}");
    let full = bench.full()?;
    let reaped = reaped_ms(&full).context("no exit in the timeline")?;
    ensure!(reaped > 0.0 && reaped < full.duration_ms(), "{full:?}");
    ensure!(bench.close().is_empty());
    ground.leave()
}

/// The seccomp filter and the namespaces as the session's own processes see them.
#[test]
fn live_a_session_s_pid_1_is_filtered_and_alone() -> Result<()> {
    let ground = Ground::new()?;
    let sys = Linux::new(ground.shim()?)?;
    let spec = SessionSpec { deny_pkeys: true, ..bare(&["/bin/sleep", "1000"]) };
    let child = sys.spawn_session(&spec, None)?;
    let status = fs::read_to_string(format!("/proc/{}/status", child.process.pid))?;
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim).unwrap_or("");
    ensure!(field("Seccomp:") == "2", "{status}");
    ensure!(field("NSpid:").ends_with("\t1"), "{status}");
    ensure!(field("SigBlk:") == "0000000000000000" && field("SigIgn:") == "0000000000000000", "{status}");
    let ns = |pid: &str| fs::metadata(format!("/proc/{pid}/ns/net")).map(|m| m.ino());
    ensure!(ns(&child.process.pid.to_string())? != ns("self")?);
    sys.kill_process(child.process, 10_000)?;
    ensure!(!sys.alive(&child));
    drop(sys);
    ground.leave()
}
