//! What to make, as data: groups, networks, sessions and tools. These are also the shim's messages.

use std::{net::Ipv4Addr, path::PathBuf};

use drums_common::ids::{InstallationId, SessionRef};
use serde::{Deserialize, Serialize};

/// Limits of a session's parent group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupLimits {
    pub cpu_milli: u32,
    pub cpus: Vec<u32>,
    pub memory_bytes: u64,
    pub pids: u32,
}

/// The two leaves of a session's group. Processes live in leaves only (version 2 wants it so).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leaf {
    /// runc, criu, QEMU's monitor: what makes and keeps the session.
    Tool,
    /// The session's own processes.
    Session,
}

impl Leaf {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tool => "tool",
            Self::Session => "session",
        }
    }
}

/// A leaf of a named group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafOf {
    pub group: String,
    pub leaf: Leaf,
}

/// Addresses, link name and MACs of a session: all follow from its number, so that nothing is asked or guessed later.
/// A /30 of 198.19.0.0/16 (RFC 2544): host .1, guest .2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionNet {
    /// Host's end; at most 15 bytes.
    pub link: String,
    pub host: Ipv4Addr,
    pub guest: Ipv4Addr,
    pub prefix: u8,
    pub host_mac: [u8; 6],
    pub guest_mac: [u8; 6],
    /// An address that the guest has at first and gives up when it is personalised: its template's. Routed to the link,
    /// so that a machine that checks where packets come from lets the guest's answers in.
    pub first_guest: Option<Ipv4Addr>,
}

impl SessionNet {
    pub fn new(installation: InstallationId, session: SessionRef) -> Self {
        let n = session.number;
        // 16384 networks of 4; a number comes round again only after as many sessions.
        let base = u32::from(Ipv4Addr::new(198, 19, 0, 0)) + (n % 16_384) * 4;
        let [_, b, c, d] = n.to_be_bytes();
        let [.., i2, i3] = installation.0;
        Self {
            link: format!("{}{n}", Self::link_prefix(installation)),
            host: (base + 1).into(),
            guest: (base + 2).into(),
            prefix: 30,
            // Locally administered, unicast. The name holds two bytes of the installation and the MAC the other two, so
            // that an audit can tell our links from those of an installation with a similar id.
            host_mac: [0x02, i2, i3, b, c, d],
            guest_mac: [0x06, i2, i3, b, c, d],
            first_guest: None,
        }
    }
    /// What the name of every link of an installation begins with.
    pub fn link_prefix(installation: InstallationId) -> String {
        let [i0, i1, ..] = installation.0;
        format!("d{i0:02x}{i1:02x}")
    }
    /// True if name and MAC together carry the whole installation id, as only links of ours do.
    pub fn is_ours(installation: InstallationId, name: &str, mac: [u8; 6]) -> bool {
        let [.., i2, i3] = installation.0;
        let number = name.strip_prefix(&Self::link_prefix(installation)).unwrap_or("");
        !number.is_empty()
            && number.bytes().all(|b| b.is_ascii_digit())
            && matches!(mac, [0x02, a, b, ..] if (a, b) == (i2, i3))
    }
    pub fn guest_cidr(&self) -> String {
        format!("{}/{}", self.guest, self.prefix)
    }
}

/// A session's pid 1 in namespaces of its own (mount, pid, ipc, uts, and the given network namespace).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// Joined before anything else; none only for the bare floor of the benchmark.
    pub leaf: Option<LeafOf>,
    /// The root; none keeps the host's root in the private mount namespace (bare floor).
    pub root: Option<OverlayRoot>,
    pub hostname: String,
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    /// A new network namespace, when no descriptor is handed in.
    pub new_netns: bool,
    /// Deny `pkey_alloc` with ENOSPC: CRIU restores no protection keys.
    pub deny_pkeys: bool,
    /// Standard output and error; null when none.
    pub output: Option<PathBuf>,
}

/// Overlay that becomes `/`, mounted with `index=on,nfs_export=on` (or CRIU walks all of it for watches).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayRoot {
    /// Topmost first.
    pub lower: Vec<PathBuf>,
    pub upper: PathBuf,
    pub work: PathBuf,
    /// An existing folder, the mount point within the private mount namespace.
    pub target: PathBuf,
}

/// A mount made in a tool's private mount namespace before its program runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreMount {
    Overlay(OverlayRoot),
    Bind { source: PathBuf, target: PathBuf, read_only: bool },
    Tmpfs { target: PathBuf, options: String },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdIo {
    #[default]
    Null,
    /// Appended to.
    File(PathBuf),
}

/// A program that makes or keeps a session, or asks something of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Absolute path.
    pub program: PathBuf,
    /// Without the program itself.
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Joined before anything else.
    pub leaf: Option<LeafOf>,
    /// Not empty: the tool gets a private mount namespace with these.
    pub mounts: Vec<PreMount>,
    /// Enter the network namespace that is the last of the passed descriptors.
    pub enter_netns: bool,
    /// Target numbers of the passed descriptors (3 or more), in order.
    pub fds: Vec<i32>,
    pub cwd: Option<PathBuf>,
    /// CPUs to run on, where no group says it.
    pub cpus: Vec<u32>,
    pub stdout: StdIo,
    pub stderr: StdIo,
}
