//! How each resource is observed and undone: functions of the ledger's row and the kernel.

use super::{Receipt, Resource, Seen};
use crate::{
    arms::external,
    sys::{Sys, SysError, ToolSpec},
};

/// A group or process that does not go away within this has leaked: killing is prompt unless something hangs in the
/// kernel, and then waiting longer does not help.
pub const UNDO_TIMEOUT_MS: u64 = 10_000;

/// Undoes it; safe to repeat, and succeeds when nothing is there.
pub fn undo(resource: &Resource, receipt: Option<&Receipt>, sys: &dyn Sys) -> Result<(), SysError> {
    match (resource, receipt) {
        (Resource::Cgroup { name }, _) => sys.cgroup_remove(name, UNDO_TIMEOUT_MS),
        (Resource::Dir { path }, _) => sys.remove_tree(path),
        (Resource::Mount { path }, _) => sys.unmount(path),
        (Resource::Link { name }, _) => sys.link_delete(name),
        // Ends with its last descriptor and process; both are other resources' undo.
        (Resource::Netns { .. }, _) => Ok(()),
        (Resource::Process { .. }, Some(Receipt::Process(process))) => sys.kill_process(*process, UNDO_TIMEOUT_MS),
        // It never came to be, or its group's undo takes it.
        (Resource::Process { .. }, _) => Ok(()),
        (Resource::RuncContainer { runc, root, id }, _) => runc_delete(runc, root, id, sys),
        (Resource::External { command, dir, session }, _) => external::destroy(sys, command, dir, session),
    }
}

/// What the kernel shows of it.
pub fn observe(resource: &Resource, receipt: Option<&Receipt>, sys: &dyn Sys) -> Result<Seen, SysError> {
    let there = match (resource, receipt) {
        (Resource::Cgroup { name }, _) => sys.cgroup_exists(name)?,
        (Resource::Dir { path }, _) => sys.path_exists(path)?,
        (Resource::Mount { path }, _) => sys.is_mounted(path)?,
        (Resource::Link { name }, _) => sys.link_exists(name)?,
        (Resource::Netns { .. }, Some(Receipt::Netns { inode })) => sys.netns_in_use(*inode)?,
        (Resource::Netns { .. }, _) => false,
        (Resource::Process { .. }, Some(Receipt::Process(process))) => match sys.process_start(process.pid)? {
            Some(start) if start == process.start => true,
            Some(_) => return Ok(Seen::Foreign(format!("pid {} is another process now", process.pid))),
            None => false,
        },
        (Resource::Process { .. }, _) => false,
        (Resource::RuncContainer { root, id, .. }, _) => sys.path_exists(&root.join(id))?,
        (Resource::External { command, dir, session }, _) => external::present(sys, command, dir, session)?,
    };
    Ok(if there { Seen::Ours } else { Seen::Absent })
}

fn runc_delete(runc: &std::path::Path, root: &std::path::Path, id: &str, sys: &dyn Sys) -> Result<(), SysError> {
    let state = root.join(id);
    if !sys.path_exists(&state)? {
        return Ok(());
    }
    let child = sys.spawn_tool(
        &ToolSpec {
            program: runc.to_owned(),
            args: ["--root".into(), root.display().to_string(), "delete".into(), "--force".into(), id.into()].into(),
            ..ToolSpec::default()
        },
        &[],
    )?;
    let exit = sys.wait(&child, UNDO_TIMEOUT_MS)?;
    if !exit.ok() && sys.path_exists(&state)? {
        // runc refuses a container whose state file was never finished; the group's undo has its processes.
        sys.remove_tree(&state)?;
    }
    Ok(())
}
