//! The ledger against the kernel. Recorded and there: undone. Recorded and gone: released. Named as ours but not
//! recorded: reported, then undone. Everything else is foreign and not looked at twice. What cannot be undone stays in
//! the ledger as leaked.

use std::{collections::BTreeMap, path::Path};

use drums_common::{ids::InstallationId, telemetry::chain};

use super::{Ledger, LedgerError, OpenPlan};
use crate::{
    steps::{Receipt, Resource, Seen, undo},
    sys::{SessionNet, Sys},
};

/// What an audit found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditReport {
    /// Recorded, still there, undone.
    pub undone: Vec<String>,
    /// Named as ours but not recorded; reported here, then undone.
    pub orphans: Vec<String>,
    /// Recorded, but gone by itself.
    pub vanished: Vec<String>,
    /// Recorded under a number or name that is somebody else's now: left alone.
    pub foreign: Vec<String>,
    /// Could not be undone.
    pub leaked: Vec<String>,
}

impl AuditReport {
    pub fn is_clean(&self) -> bool {
        self.leaked.is_empty()
    }
}

/// Undoes every recorded plan for which `live` is false, then what is named as ours and not recorded.
pub fn audit(
    ledger: &mut Ledger,
    sys: &dyn Sys,
    installation: InstallationId,
    scratch: &Path,
    live: &dyn Fn(&str) -> bool,
) -> Result<AuditReport, LedgerError> {
    let plans: Vec<OpenPlan> = ledger.open_plans().filter(|p| !live(&p.name)).cloned().collect();
    // Later plans lie in what earlier ones made (sessions in the scratch mount, siblings on templates).
    let (mounts, others): (Vec<_>, Vec<_>) =
        plans.into_iter().partition(|p| p.entries.iter().any(|e| matches!(e.resource, Resource::Mount { .. })));
    // An earlier agent's shim first: it may be killing still, or starting what would be missed.
    let (shims, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|p| p.name == shim_plan(installation));
    let mut audit = Audit { ledger, sys, installation, report: AuditReport::default() };
    audit.undo_plans(&shims)?;
    audit.undo_plans(&others)?;
    audit.orphans(scratch);
    audit.undo_plans(&mounts)?;
    Ok(audit.report)
}

/// Name of the plan that holds an agent's shim.
pub fn shim_plan(installation: InstallationId) -> String {
    format!("drums-{installation}-shim")
}

/// What the scratch file system of an installation is called in the list of mounts.
pub fn scratch_source(installation: InstallationId) -> String {
    format!("drums-{installation}")
}

struct Audit<'a> {
    ledger: &'a mut Ledger,
    sys: &'a dyn Sys,
    installation: InstallationId,
    report: AuditReport,
}

enum Found {
    Undone,
    Absent,
    Foreign(String),
}

/// Its undo ends processes.
fn kills(resource: &Resource) -> bool {
    match resource {
        Resource::Cgroup { .. }
        | Resource::Process { .. }
        | Resource::RuncContainer { .. }
        | Resource::External { .. } => true,
        Resource::Dir { .. } | Resource::Mount { .. } | Resource::Link { .. } | Resource::Netns { .. } => false,
    }
}

impl Audit<'_> {
    /// Everything that ends processes first, of all plans: what runs on would write into the folders that are to be
    /// removed, and the agent that died may not have had the time to note what it had started. Then the rest; later
    /// plans and later entries first in both.
    fn undo_plans(&mut self, plans: &[OpenPlan]) -> Result<(), LedgerError> {
        let mut clean: BTreeMap<&str, bool> = plans.iter().map(|p| (p.name.as_str(), true)).collect();
        for killing in [true, false] {
            for plan in plans.iter().rev() {
                if !self.undo_part(plan, killing)? {
                    clean.insert(&plan.name, false);
                }
            }
        }
        for (plan, _) in clean.into_iter().filter(|(_, clean)| *clean) {
            self.ledger.released(plan)?;
        }
        Ok(())
    }

    /// False if something is left.
    fn undo_part(&mut self, plan: &OpenPlan, killing: bool) -> Result<bool, LedgerError> {
        let mut clean = true;
        for (index, entry) in plan.entries.iter().enumerate().rev() {
            if entry.disowned || kills(&entry.resource) != killing {
                continue;
            }
            // After a reboot pids and inodes count afresh: a receipt of another boot would name a stranger.
            let receipt = entry.receipt.as_ref().filter(|_| self.ledger.this_boot(plan));
            let label = format!("{} of {}", entry.resource, plan.name);
            match self.one(&entry.resource, receipt) {
                Ok(Found::Undone) => self.report.undone.push(label),
                Ok(Found::Absent) => self.report.vanished.push(label),
                Ok(Found::Foreign(what)) => {
                    // These are looked for by name, too.
                    if matches!(entry.resource, Resource::Cgroup { .. } | Resource::Dir { .. }) {
                        self.ledger.disowned(&plan.name, index)?;
                    }
                    self.report.foreign.push(format!("{label}: {what}"));
                }
                Err(why) => {
                    clean = false;
                    self.ledger.leaked(&plan.name, index, &why)?;
                    self.report.leaked.push(format!("{label}: {why}"));
                }
            }
        }
        Ok(clean)
    }

    /// Tried twice: something that was ending may have been in the way of the first.
    fn one(&self, resource: &Resource, receipt: Option<&Receipt>) -> Result<Found, String> {
        self.try_one(resource, receipt).or_else(|_| match self.try_one(resource, receipt)? {
            // The first attempt had an effect, only not to the end.
            Found::Absent => Ok(Found::Undone),
            found => Ok(found),
        })
    }

    fn try_one(&self, resource: &Resource, receipt: Option<&Receipt>) -> Result<Found, String> {
        let look = || undo::observe(resource, receipt, self.installation, self.sys).map_err(|e| chain(&e));
        match look()? {
            Seen::Absent => return Ok(Found::Absent),
            Seen::Foreign(what) => return Ok(Found::Foreign(what)),
            Seen::Ours => {}
        }
        undo::undo(resource, receipt, self.installation, self.sys).map_err(|e| chain(&e))?;
        match look()? {
            Seen::Absent | Seen::Foreign(_) => Ok(Found::Undone),
            Seen::Ours => Err("it is still there after its undo".to_owned()),
        }
    }

    /// Things whose name says that this installation made them, without a row: only a ledger that was lost leaves
    /// those.
    fn orphans(&mut self, scratch: &Path) {
        let prefix = format!("drums-{}-", self.installation);
        let (sys, installation) = (self.sys, self.installation);
        let mut found = Vec::new();
        let mut blind = Vec::new();
        match sys.cgroups_named(&prefix) {
            Ok(names) => found.extend(names.into_iter().map(|name| Resource::Cgroup { name })),
            Err(e) => blind.push(format!("control groups not looked at: {}", chain(&e))),
        }
        match sys.links_named(&SessionNet::link_prefix(installation)) {
            Ok(links) => {
                let ours = links.into_iter().filter(|(name, mac)| SessionNet::is_ours(installation, name, *mac));
                found.extend(ours.map(|(name, _)| Resource::Link { name }));
            }
            Err(e) => blind.push(format!("links not looked at: {}", chain(&e))),
        }
        match sys.list_dir(scratch) {
            Ok(names) => found.extend(
                names.into_iter().filter(|n| n.starts_with(&prefix)).map(|n| Resource::Dir { path: scratch.join(n) }),
            ),
            Err(e) => blind.push(format!("scratch folders not looked at: {}", chain(&e))),
        }
        // Last: the folders lie in it.
        match sys.tmpfs_source(scratch) {
            Ok(Some(source)) if source == scratch_source(installation) => {
                found.push(Resource::Mount { path: scratch.to_owned() });
            }
            Ok(_) => {}
            Err(e) => blind.push(format!("mounts not looked at: {}", chain(&e))),
        }
        self.report.leaked.extend(blind);
        // Plans that were undone are closed by now: what is recorded still is live, a stranger's, or has leaked and was
        // reported.
        let ledger = &*self.ledger;
        found.retain(|r| !ledger.open_plans().any(|p| p.entries.iter().any(|e| &e.resource == r)));
        for resource in found {
            tracing::warn!(%resource, "named as ours, not in the ledger; undoing it");
            match self.one(&resource, None) {
                Ok(_) => self.report.orphans.push(resource.to_string()),
                Err(why) => self.report.leaked.push(format!("{resource} (not recorded): {why}")),
            }
        }
    }
}
