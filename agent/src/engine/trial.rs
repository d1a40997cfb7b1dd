//! `drums-agent try`: makes, resets and destroys sessions of one arm by hand and prints where the time went. For
//! operators who want to know whether an arm works here, and for us.

use std::{path::PathBuf, sync::Arc, time::Duration};

use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    experiment::{Arm, Limits},
    ids::{Generation, RunId},
    telemetry::chain,
};

use super::{
    Engine, EngineConfig,
    api::{ArmEngine as _, EngineError, SessionOrder, Timed, Workload},
};
use crate::{
    arms::ToolPaths,
    shim::ShimClient,
    windows::{self, WindowArgs},
};

/// `drums-agent try`: make, reset and destroy sessions of one arm by hand, and see where the time goes.
///
/// Example: drums-agent try drums-cold --workload target/minimal -n 5
#[derive(Clone, Debug, clap::Args)]
pub struct TryArgs {
    /// drums-cold, drums-restored, runc-cold, runc-restored, qemu-cold or qemu-warm
    pub arm: ArmKind,
    /// Folder of a workload (with `tree/`), or a root tree itself
    #[arg(long, value_name = "DIR")]
    pub workload: PathBuf,
    /// Sessions to make
    #[arg(short = 'n', long, default_value_t = 5)]
    pub count: u32,
    /// State folder of the trial; another agent's is refused while that one runs
    #[arg(long, value_name = "DIR", default_value = "/var/lib/drums-agent-try")]
    pub state: PathBuf,
    /// Do not reset each session in between
    #[arg(long)]
    pub no_reset: bool,
    /// Measure what making a process costs instead: bare and full
    #[arg(long)]
    pub floor: bool,
    #[command(flatten)]
    pub windows: WindowArgs,
}

impl TryArgs {
    /// With the tools that this host has.
    pub fn trial(&self, tools: ToolPaths) -> Trial {
        let tree = self.workload.join("tree");
        let tree = if tree.is_dir() { tree } else { self.workload.clone() };
        let mut trial = Trial::new(self.arm, tree, self.state.clone(), tools);
        trial.count = self.count;
        trial.reset = !self.no_reset;
        trial
    }
}

/// What to try.
#[derive(Clone, Debug)]
pub struct Trial {
    pub kind: ArmKind,
    /// Root tree of the workload.
    pub tree: PathBuf,
    pub count: u32,
    pub reset: bool,
    pub config: EngineConfig,
    pub limits: Limits,
    pub cpus: Vec<u32>,
    /// The agent's own binary, for the shim.
    pub program: PathBuf,
}

impl Trial {
    /// One CPU, 512 MiB: what EXP-028 declares.
    pub fn new(kind: ArmKind, tree: PathBuf, state: PathBuf, tools: ToolPaths) -> Self {
        Self {
            kind,
            tree,
            count: 5,
            reset: true,
            config: EngineConfig { state, tools, scratch_bytes: 4 << 30 },
            limits: Limits {
                cpu_milli: 1_000,
                cpuset_size: 1,
                memory_bytes: 512 << 20,
                vmm_memory_overhead_bytes: 192 << 20,
            },
            cpus: vec![0],
            program: "/proc/self/exe".into(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    #[error("cannot start the shim")]
    Shim(#[from] crate::shim::ShimError),
    #[error("cannot open the engine")]
    Open(#[from] super::OpenError),
    #[error("cannot read {}", path.display())]
    Guest {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{kind} cannot run here: {why}")]
    Unfit { kind: ArmKind, why: String },
    #[error("the trial ended early")]
    Engine(#[from] EngineError),
    #[error("{} things could not be undone: {}", .0.len(), .0.join("; "))]
    Leaked(Vec<String>),
}

/// Runs it; prints a line per operation to `out`.
pub fn run(trial: &Trial, out: &mut dyn std::io::Write) -> Result<(), TrialError> {
    let shim = Arc::new(ShimClient::launch(&trial.program)?);
    let (mut engine, report) = Engine::open(&trial.config, shim)?;
    for line in report.undone.iter().chain(&report.orphans) {
        let _ = writeln!(out, "audit     undone: {line}");
    }
    let result = sessions(trial, &mut engine, out);
    let mut leaked = report.leaked;
    if let Ok(more) = &result {
        leaked.extend(more.iter().cloned());
    }
    windows::operation("close");
    leaked.extend(engine.close());
    result?;
    if leaked.is_empty() { Ok(()) } else { Err(TrialError::Leaked(leaked)) }
}

fn sessions(trial: &Trial, engine: &mut Engine, out: &mut dyn std::io::Write) -> Result<Vec<String>, TrialError> {
    if let Some(why) = engine.unfit(trial.kind) {
        return Err(TrialError::Unfit { kind: trial.kind, why });
    }
    let guest = trial.tree.join("sbin/drums-guest");
    let bytes = std::fs::read(&guest).map_err(|source| TrialError::Guest { path: guest, source })?;
    // The trial has no manifest; its tree is what it is.
    let workload =
        Workload { tree: trial.tree.clone(), sha256: Sha256::of(b"trial"), guest_sha256: Sha256::of(&bytes) };
    // An arm kind's own name is always a valid arm name.
    let Ok(name) = trial.kind.as_str().parse() else { return Ok(Vec::new()) };
    let arm = Arm { name, kind: trial.kind, control: None, command: Vec::new() };
    let run = RunId(rand::random());
    let mut seed = 0;
    let mut order = |engine: &mut Engine| -> Result<SessionOrder<'_>, EngineError> {
        seed += 1;
        Ok(SessionOrder {
            run,
            arm: &arm,
            session: engine.next_session(Generation(1))?,
            limits: &trial.limits,
            cpus: &trial.cpus,
            environment_bytes: 256,
            template_build: 0,
            delay: None,
            identity_seed: seed,
            workload: &workload,
            ready_timeout: Duration::from_secs(60),
        })
    };
    let mut leaked = Vec::new();
    if trial.kind.from_template() {
        let o = order(engine)?;
        windows::operation("template");
        let t = engine.build_template(&o)?;
        let _ = writeln!(out, "template  {:9.1} ms  {} bytes, {}", t.duration_ms, t.bytes, t.sha256.short());
        leaked.extend(t.leaked);
    }
    for _ in 0..trial.count {
        let o = order(engine)?;
        windows::operation("create");
        let created = engine.create(&o)?;
        line(out, "create", &created.timed, &format!("cpu {:.1} ms", created.cpu_s * 1e3));
        for fault in &created.fidelity.faults {
            let _ = writeln!(out, "          fault: {fault}");
        }
        let mut handle = created.handle;
        if trial.reset {
            engine.dirty(&handle)?;
            let o = order(engine)?;
            windows::operation("reset");
            let reset = engine.reset(handle, &o)?;
            line(out, "reset", &reset.timed, "");
            leaked.extend(reset.leaked);
            handle = reset.handle;
            let left = engine.dirt(&handle)?;
            if !left.is_empty() {
                let _ = writeln!(out, "          fault: marks survived the reset: {left:?}");
            }
        }
        windows::operation("destroy");
        let destroyed = engine.destroy(handle)?;
        line(out, "destroy", &destroyed.timed, "");
        leaked.extend(destroyed.leaked);
    }
    let _ = writeln!(out, "own CPU   {:9.1} ms", super::operate::seconds(engine.own_cpu_us()) * 1e3);
    Ok(leaked)
}

fn line(out: &mut dyn std::io::Write, what: &str, timed: &Timed, more: &str) {
    let phases: Vec<String> = timed
        .phases
        .iter()
        .map(|p| format!("{} {:.2}", p.name, super::operate::seconds(p.end_us - p.start_us) * 1e3))
        .collect();
    let _ = writeln!(out, "{what:9} {:9.2} ms  {}  {more}", timed.duration_ms(), phases.join(", "));
}

/// Bare and full creation of a process, interleaved: medians and one timeline each.
pub fn floor(trial: &Trial, out: &mut dyn std::io::Write) -> Result<(), super::bench::BenchError> {
    use super::bench::{CreateBench, reaped_ms};
    let limits = crate::sys::CgroupLimits {
        cpu_milli: trial.limits.cpu_milli,
        cpus: trial.cpus.clone(),
        memory_bytes: trial.limits.memory_bytes,
        pids: 2048,
    };
    let mut bench = CreateBench::open(&trial.config, &trial.program, trial.tree.clone(), limits)?;
    let measured: Result<(), super::bench::BenchError> = (|| {
        let (mut bare, mut full, mut reaped) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..trial.count.max(1) {
            let (b, f) = (bench.bare()?, bench.full()?);
            bare.push(b.duration_ms());
            full.push(f.duration_ms());
            reaped.push(reaped_ms(&f).unwrap_or(f64::NAN));
            if n + 1 == trial.count.max(1) {
                line(out, "bare", &b, "");
                line(out, "full", &f, "");
            }
        }
        for (name, mut values) in [("bare", bare), ("full, until reaped", reaped), ("full, until undone", full)] {
            values.sort_by(f64::total_cmp);
            let _ = writeln!(out, "{name:20} median {:.2} ms of {}", values[values.len() / 2], values.len());
        }
        Ok(())
    })();
    let leaked = bench.close();
    measured?;
    if leaked.is_empty() { Ok(()) } else { Err(super::bench::BenchError::Leaked(leaked)) }
}

/// For the command line: runs it and says what went wrong.
pub fn main(args: &TryArgs, tools: ToolPaths) -> std::process::ExitCode {
    windows::look_out(&args.windows);
    let (trial, out) = (args.trial(tools), &mut std::io::stdout());
    let result: Result<(), Box<dyn std::error::Error>> =
        if args.floor { floor(&trial, out).map_err(Into::into) } else { run(&trial, out).map_err(Into::into) };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            drums_common::note!("drums-agent try: {}", chain(&*e));
            std::process::ExitCode::FAILURE
        }
    }
}
