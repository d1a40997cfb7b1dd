//! How each resource is observed and undone: functions of the ledger's row and the kernel.

use drums_common::ids::InstallationId;

use super::{Receipt, Resource, Seen};
use crate::{
    arms::external,
    sys::{SessionNet, Sys, SysError, ToolSpec},
};

/// A group or process that does not go away within this has leaked: killing is prompt unless something hangs in the
/// kernel, and then waiting longer does not help.
pub const UNDO_TIMEOUT_MS: u64 = 10_000;

/// Undoes it; safe to repeat, and succeeds when nothing is there, or when what is there under that name is a stranger's.
pub fn undo(
    resource: &Resource,
    receipt: Option<&Receipt>,
    installation: InstallationId,
    sys: &dyn Sys,
) -> Result<(), SysError> {
    let named = matches!(resource, Resource::Cgroup { .. } | Resource::Dir { .. } | Resource::Link { .. });
    if named && observe(resource, receipt, installation, sys)? != Seen::Ours {
        return Ok(());
    }
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

/// What the kernel shows of it. Without a receipt the name decides: it may have been made and the agent killed before
/// it could say so.
pub fn observe(
    resource: &Resource,
    receipt: Option<&Receipt>,
    installation: InstallationId,
    sys: &dyn Sys,
) -> Result<Seen, SysError> {
    let there = match (resource, receipt) {
        (Resource::Cgroup { name }, Some(Receipt::Inode(made))) => match sys.cgroup_inode(name)? {
            Some(inode) if inode != *made => return Ok(Seen::Foreign(format!("group {name} is another one now"))),
            Some(_) => true,
            // Its undo removes the folder that was recorded last.
            None if sys.cgroup_exists(name)? => {
                return Ok(Seen::Foreign(format!("the group {name} that is left is not the one that was made")));
            }
            None => false,
        },
        (Resource::Cgroup { name }, _) => sys.cgroup_exists(name)?,
        (Resource::Dir { path }, Some(Receipt::Inode(made))) => match sys.path_inode(path)? {
            Some(inode) if inode != *made => {
                return Ok(Seen::Foreign(format!("{} is another folder now", path.display())));
            }
            inode => inode.is_some(),
        },
        (Resource::Dir { path }, _) => sys.path_exists(path)?,
        (Resource::Mount { path }, _) => sys.is_mounted(path)?,
        (Resource::Link { name }, _) => match sys.link_mac(name)? {
            Some(mac) if !SessionNet::is_ours(installation, name, mac) => {
                return Ok(Seen::Foreign(format!("link {name} has the MAC of another")));
            }
            mac => mac.is_some(),
        },
        (Resource::Netns { .. }, Some(Receipt::Netns(made))) => sys.netns_in_use(*made)?,
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
