//! From a state folder to an engine: installation id, ledger, audit, scratch file system.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use drums_common::telemetry::chain;

use super::{Engine, HttpProber, api::AuditReport, run::Made, timeline::Timeline};
use crate::{
    arms::{Site, ToolPaths, registry},
    ledger::{Ledger, LedgerError, audit},
    net::{IdentityError, installation},
    shim::ShimClient,
    steps::{MakeMount, Process, Receipt, Resource, Step},
    sys::{Linux, Sys, SysError, Windowed},
};

/// What an engine on this host needs to know.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The agent's state folder; made if missing.
    pub state: PathBuf,
    pub tools: ToolPaths,
    /// Size limit of the scratch tmpfs: uppers, images and guests' memory files live there. tmpfs takes memory only as
    /// it fills, so the limit may exceed what one run needs.
    pub scratch_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot {what} {}", path.display())]
    State {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Installation(#[from] IdentityError),
    #[error("the engine cannot open its ledger")]
    Ledger(#[from] LedgerError),
    #[error("the engine cannot open the kernel's interfaces")]
    Sys(#[from] SysError),
    #[error("cannot mount the scratch file system")]
    Scratch(#[source] crate::steps::StepError),
    #[error("{0} is left over from an earlier agent and could not be undone; see drums-agent audit")]
    Leftover(String),
}

impl Engine {
    /// Opens the real engine: everything that an earlier agent of this state folder left behind is undone first.
    pub fn open(config: &EngineConfig, shim: Arc<ShimClient>) -> Result<(Self, AuditReport), OpenError> {
        let shim_pid = shim.pid();
        let (sys, site, mut ledger) = open_parts(config, shim)?;
        let report = audit::audit(&mut ledger, &sys, site.installation, &site.scratch, &|_| false)?;
        if sys.is_mounted(&site.scratch)? {
            return Err(OpenError::Leftover(format!("the mount on {}", site.scratch.display())));
        }
        let installation = site.installation;
        let shim_plan = audit::shim_plan(installation);
        if ledger.plan(&shim_plan).is_some() {
            return Err(OpenError::Leftover("the shim".to_owned()));
        }
        let mount: Box<dyn Step> =
            Box::new(MakeMount::tmpfs(&site.scratch, audit::scratch_source(installation), config.scratch_bytes));
        let steps = [mount];
        let mut engine = Self::with(Box::new(sys), Box::new(HttpProber), site, ledger, registry::all());
        engine.note_shim(shim_plan, shim_pid)?;
        let plan = format!("drums-{installation}-scratch");
        engine.intend(&plan, &steps)?;
        let mut made = Made { plan: plan.clone(), ..Made::default() };
        let mut timeline = Timeline::start(engine.sys.now_us());
        match engine.apply(&steps, &mut made, &mut timeline) {
            Ok(()) => {}
            Err(super::run::Stopped::Ledger(e)) => return Err(e.into()),
            Err(super::run::Stopped::Step(e)) => {
                engine.unwind(made, &mut timeline);
                return Err(OpenError::Scratch(e));
            }
        }
        engine.scratch_plan = Some(plan);
        let run = engine.site.criu_run();
        engine.sys.make_dir(&run, 0o755)?;
        Ok((engine, report))
    }

    /// The shim outlives a killed agent for as long as it takes it to kill what it started: the next agent waits for it.
    fn note_shim(&mut self, plan: String, pid: i32) -> Result<(), OpenError> {
        self.ledger.intend(&plan, &[Resource::Process { role: "shim".to_owned() }])?;
        if let Some(start) = self.sys.process_start(pid)? {
            self.ledger.held(&plan, 0, &Receipt::Process(Process { pid, start }))?;
        }
        self.live.insert(plan.clone());
        self.shim_plan = Some(plan);
        Ok(())
    }

    /// Audit only: what `drums-agent audit` does. Nothing is left mounted.
    pub fn audit_only(config: &EngineConfig, shim: Arc<ShimClient>) -> Result<AuditReport, OpenError> {
        let (sys, site, mut ledger) = open_parts(config, shim)?;
        Ok(audit::audit(&mut ledger, &sys, site.installation, &site.scratch, &|_| false)?)
    }

    /// Undoes templates and the scratch file system; answers with leaks. Sessions must have been destroyed.
    pub fn close(mut self) -> Vec<String> {
        let mut leaked = self.discard(|_| true);
        if let Some(plan) = self.scratch_plan.take() {
            let entries = self
                .ledger
                .plan(&plan)
                .map(|p| p.entries.iter().map(|e| (e.resource.clone(), e.receipt.clone())).collect())
                .unwrap_or_default();
            let made = Made { plan, entries, ..Made::default() };
            let mut timeline = Timeline::start(self.sys.now_us());
            leaked.extend(self.unwind(made, &mut timeline).1);
        }
        // Our owner ends the shim, which has nothing left to kill.
        if let Some(plan) = self.shim_plan.take()
            && let Err(e) = self.ledger.released(&plan)
        {
            tracing::warn!(%plan, error = %chain(&e), "the release could not be noted");
        }
        leaked
    }
}

fn open_parts(config: &EngineConfig, shim: Arc<ShimClient>) -> Result<(Windowed<Linux>, Site, Ledger), OpenError> {
    let state = |what| move |path: &Path, source| OpenError::State { what, path: path.to_owned(), source };
    let scratch = config.state.join("scratch");
    fs::create_dir_all(&scratch).map_err(|e| state("make the folder")(&scratch, e))?;
    // Mounts are looked for by the path that the kernel knows.
    let scratch = fs::canonicalize(&scratch).map_err(|e| state("find")(&scratch, e))?;
    let installation = installation(&config.state)?;
    let ledger = Ledger::open(&config.state.join("ledger"))?;
    let sys = Windowed(Linux::new(shim)?);
    Ok((sys, Site { installation, scratch, tools: config.tools.clone() }, ledger))
}
