//! Resources as the ledger records them.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Something on the host that outlives a system call. Rows of the ledger: existing variants never change shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Control groups `NAME`, `NAME/tool` and `NAME/session` in every hierarchy used. Its undo kills what is in them.
    Cgroup { name: String },
    /// A folder under the scratch or state folder; undo removes the tree. Must not hold mounts.
    Dir { path: PathBuf },
    /// A mount in the agent's own mount namespace.
    Mount { path: PathBuf },
    /// A link in the agent's own network namespace: the host's end of a veth pair, or a tap.
    Link { name: String },
    /// A network namespace held open by descriptor only; it ends with its last process and descriptor.
    Netns { name: String },
    /// A process that the shim started or adopted; its receipt says which.
    Process { role: String },
    /// A runc container; undo is `runc delete --force` and, should that fail, the removal of its state folder.
    RuncContainer { runc: PathBuf, root: PathBuf, id: String },
    /// A session that an external program made; the program is asked to undo it, by name.
    External { command: Vec<String>, dir: PathBuf, session: String },
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cgroup { name } => write!(f, "cgroup {name}"),
            Self::Dir { path } => write!(f, "folder {}", path.display()),
            Self::Mount { path } => write!(f, "mount {}", path.display()),
            Self::Link { name } => write!(f, "link {name}"),
            Self::Netns { name } => write!(f, "network namespace {name}"),
            Self::Process { role } => write!(f, "process {role}"),
            Self::RuncContainer { id, .. } => write!(f, "runc container {id}"),
            Self::External { command, session, .. } => {
                write!(f, "session {session} of {}", command.first().map_or("an external program", String::as_str))
            }
        }
    }
}

/// A process without the danger of a reused pid: the start time (clock ticks since boot, /proc/PID/stat field 22) must
/// agree before it is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    pub start: u64,
}

/// A file or folder without the danger of a reused name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    pub device: u64,
    pub inode: u64,
}

/// A network namespace without the danger of a reused number: the next one that anybody makes gets the inode of one that
/// ended, and a cookie is given once. None where an earlier agent made the row, or on a kernel before 5.14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netns {
    pub inode: u64,
    #[serde(default)]
    pub cookie: Option<u64>,
}

/// What a step learnt by making its resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Receipt {
    #[default]
    Made,
    Process(Process),
    Netns(Netns),
    /// Of a folder, or of a control group in the first hierarchy that we use.
    Inode(Inode),
}

/// What the kernel shows of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Absent,
    Ours,
    /// Something is there under that name or number that is not the recorded one: hands off.
    Foreign(String),
}
