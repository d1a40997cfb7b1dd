//! The ledger against the kernel. Recorded and there: undone. Recorded and gone: released. Named as ours but not
//! recorded: reported, then undone. Everything else is foreign and not looked at twice. What cannot be undone stays in
//! the ledger as leaked.

use std::path::Path;

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
    let mut report = AuditReport::default();
    let plans: Vec<OpenPlan> = ledger.open_plans().filter(|p| !live(&p.name)).cloned().collect();
    // Later plans lie in what earlier ones made (sessions in the scratch mount, siblings on templates).
    let (mounts, others): (Vec<_>, Vec<_>) =
        plans.into_iter().partition(|p| p.entries.iter().any(|e| matches!(e.resource, Resource::Mount { .. })));
    for plan in others.iter().rev() {
        undo_plan(ledger, sys, plan, &mut report)?;
    }
    orphans(ledger, sys, installation, scratch, &mut report);
    for plan in mounts.iter().rev() {
        undo_plan(ledger, sys, plan, &mut report)?;
    }
    Ok(report)
}

fn undo_plan(ledger: &mut Ledger, sys: &dyn Sys, plan: &OpenPlan, report: &mut AuditReport) -> Result<(), LedgerError> {
    let mut clean = true;
    for (index, entry) in plan.entries.iter().enumerate().rev() {
        // After a reboot pids and inodes count afresh: a receipt of another boot would name a stranger.
        let receipt = entry.receipt.as_ref().filter(|_| ledger.this_boot(plan));
        let label = format!("{} of {}", entry.resource, plan.name);
        match one(&entry.resource, receipt, sys) {
            Ok(Found::Undone) => report.undone.push(label),
            Ok(Found::Absent) => report.vanished.push(label),
            Ok(Found::Foreign(what)) => report.foreign.push(format!("{label}: {what}")),
            Err(why) => {
                clean = false;
                ledger.leaked(&plan.name, index, &why)?;
                report.leaked.push(format!("{label}: {why}"));
            }
        }
    }
    if clean {
        ledger.released(&plan.name)?;
    }
    Ok(())
}

enum Found {
    Undone,
    Absent,
    Foreign(String),
}

fn one(resource: &Resource, receipt: Option<&Receipt>, sys: &dyn Sys) -> Result<Found, String> {
    let look = |sys: &dyn Sys| undo::observe(resource, receipt, sys).map_err(|e| chain(&e));
    match look(sys)? {
        Seen::Absent => return Ok(Found::Absent),
        Seen::Foreign(what) => return Ok(Found::Foreign(what)),
        Seen::Ours => {}
    }
    undo::undo(resource, receipt, sys).map_err(|e| chain(&e))?;
    match look(sys)? {
        Seen::Absent | Seen::Foreign(_) => Ok(Found::Undone),
        Seen::Ours => Err("it is still there after its undo".to_owned()),
    }
}

/// Things whose name says that this installation made them, without a row: only a ledger that was lost leaves those.
fn orphans(ledger: &Ledger, sys: &dyn Sys, installation: InstallationId, scratch: &Path, report: &mut AuditReport) {
    let prefix = format!("drums-{installation}-");
    // Plans that were undone are closed by now: what is recorded still is live, or has leaked and was reported.
    let recorded = |resource: &Resource| ledger.open_plans().any(|p| p.entries.iter().any(|e| &e.resource == resource));
    let mut found = Vec::new();
    match sys.cgroups_named(&prefix) {
        Ok(names) => found.extend(names.into_iter().map(|name| Resource::Cgroup { name })),
        Err(e) => report.leaked.push(format!("control groups not looked at: {}", chain(&e))),
    }
    match sys.links_named(&SessionNet::link_prefix(installation)) {
        Ok(links) => {
            let ours = links.into_iter().filter(|(name, mac)| SessionNet::is_ours(installation, name, *mac));
            found.extend(ours.map(|(name, _)| Resource::Link { name }));
        }
        Err(e) => report.leaked.push(format!("links not looked at: {}", chain(&e))),
    }
    match sys.list_dir(scratch) {
        Ok(names) => found.extend(
            names.into_iter().filter(|n| n.starts_with(&prefix)).map(|n| Resource::Dir { path: scratch.join(n) }),
        ),
        Err(e) => report.leaked.push(format!("scratch folders not looked at: {}", chain(&e))),
    }
    for resource in found.into_iter().filter(|r| !recorded(r)) {
        tracing::warn!(%resource, "named as ours, not in the ledger; undoing it");
        match one(&resource, None, sys) {
            Ok(_) => report.orphans.push(resource.to_string()),
            Err(why) => report.leaked.push(format!("{resource} (not recorded): {why}")),
        }
    }
}
