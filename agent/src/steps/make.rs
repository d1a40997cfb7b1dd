//! Steps that any arm may use.

use std::{os::fd::AsFd as _, path::PathBuf};

use super::{Cx, Inode, Receipt, Resource, Step, StepError, Tap};
use crate::sys::{CgroupLimits, Exit, SessionNet, SessionSpec, Sys, SysError, ToolSpec};

fn make(resource: &Resource) -> impl FnOnce(SysError) -> StepError + '_ {
    |source| StepError::Make { resource: resource.to_string(), source }
}

/// For resources whose making is exclusive: a name that is taken is somebody else's.
fn make_exclusive(resource: &Resource) -> impl FnOnce(SysError) -> StepError + '_ {
    |source| match source.errno() {
        Some(libc::EEXIST) => StepError::Taken { resource: resource.to_string(), source },
        _ => make(resource)(source),
    }
}

/// The identity is a help to later audits; what was made is made without it.
fn identified(inode: Result<Option<Inode>, SysError>) -> Receipt {
    inode.ok().flatten().map_or(Receipt::Made, Receipt::Inode)
}

/// The session's parent group with its limits, and its two leaves.
pub struct MakeCgroup {
    resource: Resource,
    name: String,
    limits: CgroupLimits,
}
impl MakeCgroup {
    pub fn new(name: impl Into<String>, limits: CgroupLimits) -> Self {
        let name = name.into();
        Self { resource: Resource::Cgroup { name: name.clone() }, name, limits }
    }
}
impl Step for MakeCgroup {
    fn phase(&self) -> &'static str {
        "limits"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        sys.cgroup_create(&self.name, &self.limits).map_err(make_exclusive(&self.resource))?;
        Ok(identified(sys.cgroup_inode(&self.name)))
    }
}

/// A folder of the session's own, with sub-folders; undone as one tree.
pub struct MakeDir {
    resource: Resource,
    path: PathBuf,
    below: Vec<&'static str>,
}
impl MakeDir {
    pub fn new(path: impl Into<PathBuf>, below: &[&'static str]) -> Self {
        let path = path.into();
        Self { resource: Resource::Dir { path: path.clone() }, path, below: below.to_vec() }
    }
}
impl Step for MakeDir {
    fn phase(&self) -> &'static str {
        "scratch"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        sys.make_dir(&self.path, 0o700).map_err(make_exclusive(&self.resource))?;
        for name in &self.below {
            sys.make_dir(&self.path.join(name), 0o755).map_err(make(&self.resource))?;
        }
        Ok(identified(sys.path_inode(&self.path)))
    }
}

/// A file inside a folder that an earlier step made.
pub struct WriteFile {
    pub path: PathBuf,
    pub bytes: Vec<u8>,
    pub mode: u32,
}
impl Step for WriteFile {
    fn phase(&self) -> &'static str {
        "scratch"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        sys.write_file(&self.path, &self.bytes, self.mode)
            .map_err(|source| StepError::Act { what: format!("write {}", self.path.display()), source })?;
        Ok(Receipt::Made)
    }
}

/// A tmpfs in the agent's own mount namespace.
pub struct MakeMount {
    resource: Resource,
    path: PathBuf,
    source: String,
    bytes: u64,
}
impl MakeMount {
    pub fn tmpfs(path: impl Into<PathBuf>, source: impl Into<String>, bytes: u64) -> Self {
        let path = path.into();
        Self { resource: Resource::Mount { path: path.clone() }, path, source: source.into(), bytes }
    }
}
impl Step for MakeMount {
    fn phase(&self) -> &'static str {
        "scratch"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        sys.mount_tmpfs(&self.path, &self.source, self.bytes).map_err(make(&self.resource))?;
        Ok(Receipt::Made)
    }
}

/// A network namespace with lo up; later steps find its descriptor in `cx.netns`.
pub struct MakeNetns {
    resource: Resource,
}
impl MakeNetns {
    pub fn new(name: impl Into<String>) -> Self {
        Self { resource: Resource::Netns { name: name.into() } }
    }
}
impl Step for MakeNetns {
    fn phase(&self) -> &'static str {
        "network"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let (fd, netns) = sys.netns().map_err(make(&self.resource))?;
        cx.netns = fd;
        Ok(Receipt::Netns(netns))
    }
}

/// The veth pair between the agent's namespace and the session's.
pub struct MakeVeth {
    resource: Resource,
    net: SessionNet,
}
impl MakeVeth {
    pub fn new(net: SessionNet) -> Self {
        Self { resource: Resource::Link { name: net.link.clone() }, net }
    }
}
impl Step for MakeVeth {
    fn phase(&self) -> &'static str {
        "network"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        sys.veth(&self.net, cx.netns.as_ref().map(|f| f.as_fd())).map_err(make(&self.resource))?;
        Ok(Receipt::Made)
    }
}

/// A tap in the agent's namespace; its descriptor goes to `cx.taps`.
pub struct MakeTap {
    resource: Resource,
    net: SessionNet,
}
impl MakeTap {
    pub fn new(net: SessionNet) -> Self {
        Self { resource: Resource::Link { name: net.link.clone() }, net }
    }
}
impl Step for MakeTap {
    fn phase(&self) -> &'static str {
        "network"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        if let Some(fd) = sys.tap(&self.net).map_err(make(&self.resource))? {
            cx.taps.push(Tap { link: self.net.link.clone(), fd });
        }
        Ok(Receipt::Made)
    }
}

/// A session's pid 1, in `cx.netns`; its role is [`Cx::SESSION`].
pub struct SpawnSession {
    resource: Resource,
    spec: SessionSpec,
}
impl SpawnSession {
    pub fn new(spec: SessionSpec) -> Self {
        Self { resource: Resource::Process { role: Cx::SESSION.to_owned() }, spec }
    }
}
impl Step for SpawnSession {
    fn phase(&self) -> &'static str {
        "spawn"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let child =
            sys.spawn_session(&self.spec, cx.netns.as_ref().map(|f| f.as_fd())).map_err(make(&self.resource))?;
        let process = child.process;
        cx.children.insert(Cx::SESSION.to_owned(), child);
        Ok(Receipt::Process(process))
    }
}

/// A tool that runs to its end within the step (`wait_ms`), or stays as a process of the session (`wait_ms` none).
pub struct SpawnTool {
    phase: &'static str,
    resource: Resource,
    role: String,
    spec: ToolSpec,
    wait_ms: Option<u64>,
    /// Read and quoted when the tool fails.
    log: Option<PathBuf>,
    pass_netns: Option<i32>,
    pass_taps: bool,
}
impl SpawnTool {
    /// A tool that must end with code 0 within `wait_ms`.
    pub fn run(phase: &'static str, role: impl Into<String>, spec: ToolSpec, wait_ms: u64) -> Self {
        let role = role.into();
        Self {
            phase,
            resource: Resource::Process { role: role.clone() },
            role,
            spec,
            wait_ms: Some(wait_ms),
            log: None,
            pass_netns: None,
            pass_taps: false,
        }
    }
    /// A tool that stays, such as QEMU.
    pub fn keep(phase: &'static str, role: impl Into<String>, spec: ToolSpec) -> Self {
        Self { wait_ms: None, ..Self::run(phase, role, spec, 0) }
    }
    /// File whose end is quoted when the tool fails.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }
    /// Pass the session's network namespace as this descriptor.
    #[must_use]
    pub fn pass_netns(mut self, number: i32) -> Self {
        self.pass_netns = Some(number);
        self
    }
    /// Pass the taps' descriptors from number 20 upwards.
    #[must_use]
    pub fn pass_taps(mut self) -> Self {
        self.pass_taps = true;
        self
    }
}
impl SpawnTool {
    /// First number of passed taps.
    pub const FIRST_TAP: i32 = 20;
}
impl Step for SpawnTool {
    fn phase(&self) -> &'static str {
        self.phase
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let mut spec = self.spec.clone();
        let mut fds = Vec::new();
        if self.pass_taps {
            for (number, tap) in (Self::FIRST_TAP..).zip(&cx.taps) {
                spec.fds.push(number);
                fds.push(tap.fd.as_fd());
            }
        }
        if let (Some(number), Some(netns)) = (self.pass_netns, &cx.netns) {
            spec.fds.push(number);
            fds.push(netns.as_fd());
        }
        let child = sys.spawn_tool(&spec, &fds).map_err(make(&self.resource))?;
        let process = child.process;
        if let Some(limit) = self.wait_ms {
            match sys.wait(&child, limit) {
                Ok(exit) if exit.ok() => {}
                Ok(exit) => return Err(self.failed(sys, exit)),
                Err(source) => {
                    // What it leaves behind is in the session's group and goes with it; the tool itself ends here.
                    let _ = sys.signal(&child, libc::SIGKILL);
                    return Err(StepError::Act { what: format!("run {}", self.role), source });
                }
            }
        }
        cx.children.insert(self.role.clone(), child);
        Ok(Receipt::Process(process))
    }
}
impl SpawnTool {
    fn failed(&self, sys: &dyn Sys, exit: Exit) -> StepError {
        let output = self.log.as_ref().map_or_else(String::new, |path| tail(sys, path));
        StepError::Tool { tool: self.role.clone(), status: exit.to_string(), output }
    }
}

/// The last lines of a log, for an error's text.
pub fn tail(sys: &dyn Sys, path: &std::path::Path) -> String {
    match sys.read_file(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(12)..].join(" | ")
        }
        Err(_) => format!("no output in {}", path.display()),
    }
}
