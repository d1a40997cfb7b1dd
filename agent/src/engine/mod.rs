//! Applies plans: in order, timed, recorded, and undone in reverse when anything fails. `api` is what callers see.
//!
//! Owns the ledger, the scratch file system and the templates. Knows nothing of how an arm works (arms plan) and nothing
//! of experiments (the block loop orders).

pub mod api;
pub mod bench;
mod handle;
mod membership;
mod open;
mod operate;
mod prober;
mod readings;
mod run;
mod template;
mod timeline;
pub mod trial;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::AtomicBool},
};

use drums_common::{
    arm::ArmKind,
    ids::{ArmName, Generation, RunId, SessionRef},
};

use self::api::{
    ArmEngine, AuditReport, Created, Destroyed, EngineError, HostFailure, Prober, Reset, SessionHandle, SessionOrder,
    TemplateReport,
};
use crate::{
    arms::{self, Arm, Plan, Site},
    ledger::{Ledger, audit},
    steps::Resource,
    sys::{Sys, SysError},
};

pub use open::{EngineConfig, OpenError};
pub use prober::HttpProber;

/// Sessions of every arm on this host. One owner thread.
pub struct Engine {
    sys: Box<dyn Sys>,
    prober: Box<dyn Prober>,
    site: Site,
    ledger: Ledger,
    arms: Vec<Box<dyn Arm>>,
    templates: BTreeMap<TemplateKey, template::Held>,
    /// Plans that this process holds: not the audit's business.
    live: BTreeSet<String>,
    /// CPU time of groups that were removed, microseconds.
    spent_us: u64,
    /// Set by the owner when what is under way shall be given up.
    give_up: Arc<AtomicBool>,
    /// The scratch file system is mounted by us and must be unmounted by us.
    scratch_plan: Option<String>,
    /// The shim lives as long as we do.
    shim_plan: Option<String>,
}

type TemplateKey = (RunId, ArmName, u32);

impl Engine {
    /// Over any kernel and prober; what the tests use. `scratch` must exist.
    pub fn with(
        sys: Box<dyn Sys>,
        prober: Box<dyn Prober>,
        site: Site,
        ledger: Ledger,
        arms: Vec<Box<dyn Arm>>,
    ) -> Self {
        Self {
            sys,
            prober,
            site,
            ledger,
            arms,
            templates: BTreeMap::new(),
            live: BTreeSet::new(),
            spent_us: 0,
            give_up: Arc::default(),
            scratch_plan: None,
            shim_plan: None,
        }
    }

    pub fn site(&self) -> &Site {
        &self.site
    }

    fn arm(&self, kind: ArmKind) -> Result<&dyn Arm, EngineError> {
        arms::registry::find(&self.arms, kind)
            .ok_or_else(|| host(format!("cannot make sessions of {kind}"), HostFailure::Unfit("no such arm".into())))
    }

    fn plan(&self, order: &SessionOrder<'_>) -> Result<Plan, EngineError> {
        let kind = order.arm.kind;
        let key = (order.run, order.arm.name.clone(), order.template_build);
        let template = self.templates.get(&key).map(|h| &h.template);
        self.arm(kind)?
            .plan(&self.site, order, template)
            .map_err(|e| host(format!("cannot plan session {} of {kind}", order.session), e.into()))
    }
}

fn host(attempted: String, source: HostFailure) -> EngineError {
    EngineError::Host { attempted, leaked: Vec::new(), source: Box::new(source) }
}

impl ArmEngine for Engine {
    fn unfit(&self, kind: ArmKind) -> Option<String> {
        match arms::registry::find(&self.arms, kind) {
            Some(arm) => arm.unfit(&self.site.tools),
            None => Some(format!("this agent has no {kind} arm")),
        }
    }

    fn give_up_when(&mut self, flag: Arc<AtomicBool>) {
        self.give_up = flag;
    }

    fn next_session(&mut self, generation: Generation) -> Result<SessionRef, EngineError> {
        self.ledger.next_session(generation).map_err(|e| host("cannot draw a session number".to_owned(), e.into()))
    }

    fn build_template(&mut self, order: &SessionOrder<'_>) -> Result<TemplateReport, EngineError> {
        self.template(order)
    }

    fn create(&mut self, order: &SessionOrder<'_>) -> Result<Created, EngineError> {
        self.make(order)
    }

    fn reset(&mut self, handle: SessionHandle, order: &SessionOrder<'_>) -> Result<Reset, EngineError> {
        self.replace(handle, order)
    }

    fn destroy(&mut self, handle: SessionHandle) -> Result<Destroyed, EngineError> {
        self.end(handle)
    }

    fn dirty(&mut self, handle: &SessionHandle) -> Result<(), EngineError> {
        self.plant(handle)
    }

    fn dirt(&mut self, handle: &SessionHandle) -> Result<Vec<String>, EngineError> {
        self.look_for_dirt(handle)
    }

    fn discard_templates(&mut self, run: RunId) -> Vec<String> {
        self.discard(|key| key.0 == run)
    }

    fn audit(&mut self) -> AuditReport {
        let live = &self.live;
        match audit::audit(&mut self.ledger, &*self.sys, self.site.installation, &self.site.scratch, &|p| {
            live.contains(p)
        }) {
            Ok(report) => report,
            Err(e) => AuditReport {
                leaked: vec![format!("the audit stopped: {}", drums_common::telemetry::chain(&e))],
                ..AuditReport::default()
            },
        }
    }

    fn reclaim(&mut self) -> AuditReport {
        // Their descriptors close here; what they held is in the ledger.
        self.templates.clear();
        let own = [self.scratch_plan.clone(), self.shim_plan.clone()];
        self.live.retain(|plan| own.iter().flatten().any(|o| o == plan));
        self.audit()
    }

    fn broken(&self) -> Option<String> {
        self.sys.standing().err().filter(SysError::is_shim).map(|e| drums_common::telemetry::chain(&e))
    }

    fn own_cpu_us(&self) -> u64 {
        let live: u64 = self.live.iter().filter_map(|name| self.sys.cgroup_cpu_us(name).ok()).sum();
        self.sys.own_cpu_us().saturating_add(self.spent_us).saturating_add(live)
    }

    fn held(&self) -> Vec<(String, Resource)> {
        self.ledger
            .open_plans()
            .flat_map(|p| p.entries.iter().filter(|e| !e.disowned).map(|e| (p.name.clone(), e.resource.clone())))
            .collect()
    }
}

#[cfg(test)]
mod tests;
