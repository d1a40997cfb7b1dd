//! What making a process costs here, for the benchmark of creation: exec of a program in the same namespaces until it
//! is reaped, bare (no group, no overlay) and full (ledger, group, overlay, and everything undone again).
//!
//! Peers (`unshare`, `bwrap`, `runc run`) are the benchmark's business; this module measures only ourselves, through the
//! same shim, steps, ledger and undo that sessions use.

use std::{path::PathBuf, sync::Arc};

use drums_common::ids::Generation;

use super::{
    Engine, EngineConfig, OpenError,
    api::Timed,
    run::{Made, Stopped},
    timeline::Timeline,
};
use crate::{
    ledger::LedgerError,
    shim::ShimClient,
    steps::{Cx, MakeCgroup, MakeDir, SpawnSession, Step, StepError},
    sys::{CgroupLimits, Child, Exit, Leaf, LeafOf, OverlayRoot, SessionSpec, SysError},
};

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("cannot start the shim")]
    Shim(#[from] crate::shim::ShimError),
    #[error("cannot open the engine")]
    Open(#[from] OpenError),
    #[error("cannot note the plan")]
    Ledger(#[from] LedgerError),
    #[error("a step failed")]
    Step(#[from] StepError),
    #[error("the process could not be made or waited for")]
    Sys(#[from] SysError),
    #[error("the program ended with {0}")]
    Exit(Exit),
    #[error("could not be undone: {}", .0.join("; "))]
    Leaked(Vec<String>),
}

/// An engine that makes one process at a time.
pub struct CreateBench {
    engine: Engine,
    tree: PathBuf,
    limits: CgroupLimits,
}

/// The program exits at once; one that does not within this hangs.
const TIMEOUT_MS: u64 = 10_000;

impl CreateBench {
    /// `program` is the agent's own binary (for the shim); `tree` has `/bin/true`.
    pub fn open(
        config: &EngineConfig,
        program: &std::path::Path,
        tree: PathBuf,
        limits: CgroupLimits,
    ) -> Result<Self, BenchError> {
        let shim = Arc::new(ShimClient::launch(program)?);
        let (engine, report) = Engine::open(config, shim)?;
        if !report.leaked.is_empty() {
            return Err(BenchError::Leaked(report.leaked));
        }
        Ok(Self { engine, tree, limits })
    }

    /// `/bin/true` of the host in new mount, pid, ipc, uts and network namespaces, until it is reaped. Phases: `spawn`
    /// (until the program runs), `exit` (until it is reaped).
    pub fn bare(&mut self) -> Result<Timed, BenchError> {
        let spec = SessionSpec { argv: vec!["/bin/true".to_owned()], ..namespaces_only() };
        let mut timeline = Timeline::start(self.engine.sys.now_us());
        let from = self.engine.sys.now_us();
        let child = self.engine.sys.spawn_session(&spec, None)?;
        timeline.mark("spawn", from, self.engine.sys.now_us());
        self.reap(&child, &mut timeline)?;
        Ok(timeline.done(self.engine.sys.now_us()))
    }

    /// The tree's `/bin/true` as a session's pid 1: ledger, group with limits, overlay, new namespaces, until it is
    /// reaped and everything is undone and observed gone. Phases: `ledger`, `limits`, `scratch`, `spawn`, `exit`, and
    /// those of the undo; [`reaped_ms`] is the part before the undo.
    pub fn full(&mut self) -> Result<Timed, BenchError> {
        let session = self.engine.ledger.next_session(Generation(0))?;
        let (name, dir) = (self.engine.site.name(session), self.engine.site.dir(session));
        let spec = SessionSpec {
            leaf: Some(LeafOf { group: name.clone(), leaf: Leaf::Session }),
            root: Some(OverlayRoot {
                lower: vec![self.tree.clone()],
                upper: dir.join("upper"),
                work: dir.join("work"),
                target: dir.join("root"),
            }),
            hostname: "bench".to_owned(),
            argv: vec!["/bin/true".to_owned()],
            deny_pkeys: true,
            ..namespaces_only()
        };
        let steps: Vec<Box<dyn Step>> = vec![
            Box::new(MakeCgroup::new(&name, self.limits.clone())),
            Box::new(MakeDir::new(&dir, &["upper", "work", "root"])),
            Box::new(SpawnSession::new(spec)),
        ];
        let mut timeline = Timeline::start(self.engine.sys.now_us());
        let from = self.engine.sys.now_us();
        self.engine.intend(&name, &steps)?;
        timeline.mark("ledger", from, self.engine.sys.now_us());
        let mut made = Made { plan: name, ..Made::default() };
        let applied = self.engine.apply(&steps, &mut made, &mut timeline);
        let ended = match applied {
            Ok(()) => match made.cx.children.remove(Cx::SESSION) {
                Some(child) => self.reap(&child, &mut timeline),
                None => Err(BenchError::Exit(Exit::Unknown)),
            },
            Err(Stopped::Step(e)) => Err(e.into()),
            Err(Stopped::Ledger(e)) => Err(e.into()),
        };
        let (done, leaked) = self.engine.unwind(made, &mut timeline);
        ended?;
        if !leaked.is_empty() {
            return Err(BenchError::Leaked(leaked));
        }
        Ok(timeline.done(done))
    }

    fn reap(&self, child: &Child, timeline: &mut Timeline) -> Result<(), BenchError> {
        let from = self.engine.sys.now_us();
        let exit = self.engine.sys.wait(child, TIMEOUT_MS)?;
        timeline.mark("exit", from, self.engine.sys.now_us());
        if exit.ok() { Ok(()) } else { Err(BenchError::Exit(exit)) }
    }

    /// Undoes the scratch file system; answers with leaks.
    pub fn close(self) -> Vec<String> {
        self.engine.close()
    }
}

fn namespaces_only() -> SessionSpec {
    SessionSpec {
        leaf: None,
        root: None,
        hostname: String::new(),
        argv: Vec::new(),
        env: Vec::new(),
        new_netns: true,
        deny_pkeys: false,
        output: None,
    }
}

/// The part of a full measurement until the process was reaped, milliseconds.
pub fn reaped_ms(timed: &Timed) -> Option<f64> {
    let end = timed.phases.iter().find(|p| p.name == "exit")?.end_us;
    Some(super::operate::seconds(end) * 1e3)
}
