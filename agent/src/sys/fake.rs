//! A kernel in memory: the same behaviour as far as steps and undo can see it, and it may be told to fail.
//!
//! Every call that changes something is counted; [`Fault`] names one of them. What exists is [`Fake::left`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use drums_common::{digest::Sha256, evidence::LimitsRead};

use super::{CgroupLimits, Child, Exit, Leaf, LeafOf, SessionNet, SessionSpec, Sys, SysError, ToolSpec};
use crate::steps::{Inode, Netns, Process};

/// Which changing call fails, counted from 0, and whether it has had its effect by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub call: usize,
    pub after_effect: bool,
}

#[derive(Debug, Default)]
struct State {
    now_us: u64,
    calls: usize,
    fault: Option<Fault>,
    errno: i32,
    /// There is no shim any more.
    helpless: bool,
    /// Hierarchies that new processes are not put into.
    astray: BTreeSet<String>,
    /// What the fault hit.
    fired: Option<String>,
    groups: BTreeMap<String, LimitsRead>,
    dirs: BTreeSet<PathBuf>,
    files: BTreeMap<PathBuf, Vec<u8>>,
    /// With the name of what is mounted.
    mounts: BTreeMap<PathBuf, String>,
    /// Of groups and folders, by how `left` names them: each that is made gets the next one.
    inodes: BTreeMap<String, u64>,
    links: BTreeMap<String, [u8; 6]>,
    /// Living processes: start time and group.
    processes: BTreeMap<i32, (u64, Option<String>)>,
    exits: BTreeMap<i32, Exit>,
    next_pid: i32,
    /// When the newest process was started.
    spawned_us: u64,
    /// Cookies: of the newest network namespace, and by process.
    newest_netns: u64,
    netns_of: BTreeMap<i32, u64>,
    stubborn_groups: BTreeSet<String>,
    /// Processes that keep a folder from being emptied while they live.
    writers: BTreeMap<i32, PathBuf>,
}

/// A handle; clones see the same kernel.
#[derive(Clone, Debug, Default)]
pub struct Fake {
    state: Arc<Mutex<State>>,
}

impl Fake {
    pub fn new() -> Self {
        let fake = Self::default();
        {
            let mut s = fake.lock();
            (s.next_pid, s.errno) = (100, libc::EPERM);
        }
        fake
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next calls are counted from 0, and this one fails.
    pub fn fail(&self, fault: Option<Fault>) {
        let mut s = self.lock();
        (s.calls, s.fault, s.fired) = (0, fault, None);
    }
    /// The error that faults are from now on.
    pub fn fail_with(&self, errno: i32) {
        self.lock().errno = errno;
    }
    /// Processes are in no group of this controller from now on.
    pub fn lead_astray(&self, controller: &str) {
        self.lock().astray.insert(controller.to_owned());
    }
    /// The shim dies, and what it started with it.
    pub fn lose_shim(&self) {
        let mut s = self.lock();
        s.helpless = true;
        s.processes.clear();
    }
    /// What the fault hit, if it did.
    pub fn fired(&self) -> Option<String> {
        self.lock().fired.clone()
    }
    /// When the newest process was started.
    pub fn spawned_us(&self) -> u64 {
        self.lock().spawned_us
    }
    /// Everything that exists, in words.
    pub fn left(&self) -> Vec<String> {
        let s = self.lock();
        let mut out: Vec<String> = s.groups.keys().map(|g| format!("group {g}")).collect();
        out.extend(s.dirs.iter().map(|d| format!("folder {}", d.display())));
        out.extend(s.mounts.keys().map(|d| format!("mount {}", d.display())));
        out.extend(s.links.keys().map(|l| format!("link {l}")));
        out.extend(s.processes.keys().map(|p| format!("process {p}")));
        out
    }

    // What others have made.
    pub fn plant_group(&self, name: &str) {
        let limits = LimitsRead { cpu_milli: 0, cpus: Vec::new(), memory_bytes: 0 };
        let mut s = self.lock();
        s.groups.insert(name.to_owned(), limits);
        s.numbered(format!("group {name}"));
    }
    pub fn plant_dir(&self, path: &Path) {
        let mut s = self.lock();
        s.dirs.insert(path.to_owned());
        s.numbered(format!("folder {}", path.display()));
    }
    pub fn plant_mount(&self, path: &Path, source: &str) {
        self.lock().mounts.insert(path.to_owned(), source.to_owned());
    }
    /// A process in a group; a folder in which it writes can be removed only once it is gone.
    pub fn plant_writer(&self, group: &str, folder: &Path) {
        let mut s = self.lock();
        let pid = s.start(Some(&LeafOf { group: group.to_owned(), leaf: Leaf::Session })).pid;
        s.writers.insert(pid, folder.to_owned());
    }
    /// Everything is gone, and nobody was asked.
    pub fn lose_everything(&self) {
        let mut s = self.lock();
        (s.groups, s.dirs, s.files, s.mounts, s.links, s.processes) = Default::default();
    }
    pub fn plant_link(&self, name: &str, mac: [u8; 6]) {
        self.lock().links.insert(name.to_owned(), mac);
    }
    pub fn plant_process(&self, process: Process) {
        let mut s = self.lock();
        s.processes.insert(process.pid, (process.start, None));
        // Whoever had that number has taken its namespace along.
        s.netns_of.remove(&process.pid);
    }
    /// Its removal runs into its deadline from now on, or no longer.
    pub fn stubborn(&self, group: &str, stubborn: bool) {
        let groups = &mut self.lock().stubborn_groups;
        if stubborn {
            groups.insert(group.to_owned())
        } else {
            groups.remove(group)
        };
    }

    fn change<T>(&self, what: &str, effect: impl FnOnce(&mut State) -> Result<T, SysError>) -> Result<T, SysError> {
        let mut s = self.lock();
        s.now_us += 10;
        let call = s.calls;
        s.calls += 1;
        let Some(fault) = s.fault.filter(|f| f.call == call) else { return effect(&mut s) };
        if fault.after_effect {
            effect(&mut s)?;
        }
        s.fired = Some(what.to_owned());
        Err(SysError::os("pretend to", what, io::Error::from_raw_os_error(s.errno)))
    }

    /// A change that the shim makes.
    fn by_shim<T>(&self, what: &str, effect: impl FnOnce(&mut State) -> Result<T, SysError>) -> Result<T, SysError> {
        self.standing()?;
        self.change(what, effect)
    }

    fn look<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        let mut s = self.lock();
        s.now_us += 1;
        f(&s)
    }
}

impl State {
    /// A session's process as /proc shows it: one thread, no children, an overlay for a root.
    fn proc_file(&self, path: &Path) -> Option<Vec<u8>> {
        let (_, group) = self.processes.get(&proc_pid(path)?)?;
        let at = |controller: &str| match group {
            Some(group) if !self.astray.contains(controller) => format!("/{group}/session"),
            _ => "/".to_owned(),
        };
        let text = match path.file_name()?.to_str()? {
            "status" => "NSpid:\t100\t1\nSeccomp:\t2\n".to_owned(),
            "mountinfo" => "92 68 0:40 / / rw - overlay overlay rw\n".to_owned(),
            "children" => String::new(),
            "cgroup" => ["memory", "cpuset", "cpu", "cpuacct"]
                .iter()
                .zip(2..)
                .map(|(controller, n)| format!("{n}:{controller}:{}\n", at(controller)))
                .collect(),
            _ => return None,
        };
        Some(text.into_bytes())
    }

    fn numbered(&mut self, what: String) {
        let next = self.inodes.values().max().map_or(1, |n| n + 1);
        self.inodes.insert(what, next);
    }
    fn inode(&self, what: &str) -> Option<Inode> {
        self.inodes.get(what).map(|inode| Inode { device: 1, inode: *inode })
    }
    fn start(&mut self, group: Option<&LeafOf>) -> Process {
        let pid = self.next_pid;
        self.next_pid += 1;
        self.spawned_us = self.now_us;
        let start = u64::from(pid.unsigned_abs()) * 1_000;
        self.processes.insert(pid, (start, group.map(|l| l.group.clone())));
        self.netns_of.insert(pid, self.newest_netns);
        Process { pid, start }
    }
}

/// The process that a path below /proc is about.
fn proc_pid(path: &Path) -> Option<i32> {
    path.strip_prefix("/proc").ok()?.components().next()?.as_os_str().to_str()?.parse().ok()
}

fn no(what: &'static str, target: impl std::fmt::Display, errno: i32) -> SysError {
    SysError::os(what, target, io::Error::from_raw_os_error(errno))
}

impl Sys for Fake {
    fn now_us(&self) -> u64 {
        self.look(|s| s.now_us)
    }

    fn make_dir(&self, path: &Path, _: u32) -> Result<(), SysError> {
        self.change(&format!("make {}", path.display()), |s| {
            if !s.dirs.insert(path.to_owned()) {
                return Err(no("make", path.display(), libc::EEXIST));
            }
            s.numbered(format!("folder {}", path.display()));
            Ok(())
        })
    }
    fn write_file(&self, path: &Path, bytes: &[u8], _: u32) -> Result<(), SysError> {
        self.change(&format!("write {}", path.display()), |s| {
            s.files.insert(path.to_owned(), bytes.to_vec());
            Ok(())
        })
    }
    fn new_file(&self, path: &Path, mode: u32) -> Result<Option<OwnedFd>, SysError> {
        if self.path_exists(path)? {
            return Err(no("make", path.display(), libc::EEXIST));
        }
        self.write_file(path, &[], mode).map(|()| None)
    }
    fn set_mode(&self, path: &Path, _: u32) -> Result<(), SysError> {
        self.change(&format!("change the mode of {}", path.display()), |_| Ok(()))
    }
    fn read_file(&self, path: &Path) -> Result<Vec<u8>, SysError> {
        self.look(|s| s.files.get(path).cloned().or_else(|| s.proc_file(path)))
            .ok_or_else(|| no("read", path.display(), libc::ENOENT))
    }
    fn path_exists(&self, path: &Path) -> Result<bool, SysError> {
        Ok(self.look(|s| s.dirs.contains(path) || s.files.contains_key(path)))
    }
    fn path_inode(&self, path: &Path) -> Result<Option<Inode>, SysError> {
        let of = |s: &State| s.inode(&format!("folder {}", path.display())).filter(|_| s.dirs.contains(path));
        Ok(self.look(of))
    }
    fn remove_tree(&self, path: &Path) -> Result<(), SysError> {
        self.look(|_| ());
        let mut s = self.lock();
        if s.writers.iter().any(|(pid, d)| d.starts_with(path) && s.processes.contains_key(pid)) {
            return Err(no("remove", path.display(), libc::ENOTEMPTY));
        }
        if s.mounts.keys().any(|m| m.starts_with(path)) {
            return Err(no("remove", path.display(), libc::EXDEV));
        }
        s.dirs.retain(|d| !d.starts_with(path));
        s.files.retain(|f, _| !f.starts_with(path));
        Ok(())
    }
    fn read_link(&self, path: &Path) -> Result<PathBuf, SysError> {
        let text = path.display().to_string();
        let kind = text.rsplit('/').next().unwrap_or("").to_owned();
        // One namespace of each kind per process, and the agent's own.
        let of = text.split('/').nth(2).and_then(|p| p.parse::<i32>().ok()).unwrap_or(1);
        Ok(PathBuf::from(format!("{kind}:[{of}]")))
    }
    fn digest_tree(&self, path: &Path) -> Result<(u64, Sha256), SysError> {
        Ok((0, Sha256::of(path.display().to_string().as_bytes())))
    }
    fn list_dir(&self, path: &Path) -> Result<Vec<String>, SysError> {
        Ok(self.look(|s| {
            if let Some(pid) = proc_pid(path).filter(|pid| s.processes.contains_key(pid)) {
                return vec![pid.to_string()];
            }
            let below = s.dirs.iter().filter(|d| d.parent() == Some(path));
            below.filter_map(|d| Some(d.file_name()?.to_str()?.to_owned())).collect()
        }))
    }

    fn mount_tmpfs(&self, path: &Path, source: &str, _: u64) -> Result<(), SysError> {
        self.change(&format!("mount {}", path.display()), |s| {
            s.mounts.insert(path.to_owned(), source.to_owned());
            Ok(())
        })
    }
    fn unmount(&self, path: &Path) -> Result<(), SysError> {
        self.lock().mounts.remove(path);
        Ok(())
    }
    fn is_mounted(&self, path: &Path) -> Result<bool, SysError> {
        Ok(self.look(|s| s.mounts.contains_key(path)))
    }
    fn tmpfs_source(&self, path: &Path) -> Result<Option<String>, SysError> {
        Ok(self.look(|s| s.mounts.get(path).cloned()))
    }

    fn cgroup_create(&self, name: &str, limits: &CgroupLimits) -> Result<(), SysError> {
        self.change(&format!("make the group {name}"), |s| {
            if s.groups.contains_key(name) {
                return Err(no("make the group", name, libc::EEXIST));
            }
            let read = LimitsRead {
                cpu_milli: limits.cpu_milli,
                cpus: limits.cpus.clone(),
                memory_bytes: limits.memory_bytes,
            };
            s.groups.insert(name.to_owned(), read);
            s.numbered(format!("group {name}"));
            Ok(())
        })
    }
    fn cgroup_exists(&self, name: &str) -> Result<bool, SysError> {
        Ok(self.look(|s| s.groups.contains_key(name)))
    }
    fn cgroup_inode(&self, name: &str) -> Result<Option<Inode>, SysError> {
        Ok(self.look(|s| s.inode(&format!("group {name}")).filter(|_| s.groups.contains_key(name))))
    }
    fn cgroup_limits(&self, name: &str) -> Result<LimitsRead, SysError> {
        self.look(|s| s.groups.get(name).cloned()).ok_or_else(|| no("read the limits of", name, libc::ENOENT))
    }
    fn cgroup_cpu_us(&self, name: &str) -> Result<u64, SysError> {
        if self.cgroup_exists(name)? { Ok(1_000) } else { Err(no("read the account of", name, libc::ENOENT)) }
    }
    fn cgroup_procs(&self, name: &str) -> Result<Vec<i32>, SysError> {
        Ok(self
            .look(|s| s.processes.iter().filter(|(_, (_, g))| g.as_deref() == Some(name)).map(|(p, _)| *p).collect()))
    }
    fn cgroup_remove(&self, name: &str, timeout_ms: u64) -> Result<(), SysError> {
        let mut s = self.lock();
        if s.stubborn_groups.contains(name) {
            return Err(SysError::Deadline { what: format!("removal of {name}"), waited_ms: timeout_ms });
        }
        s.processes.retain(|_, (_, g)| g.as_deref() != Some(name));
        s.groups.remove(name);
        Ok(())
    }
    fn cgroups_named(&self, prefix: &str) -> Result<Vec<String>, SysError> {
        Ok(self.look(|s| s.groups.keys().filter(|g| g.starts_with(prefix)).cloned().collect()))
    }

    fn link_mac(&self, name: &str) -> Result<Option<[u8; 6]>, SysError> {
        Ok(self.look(|s| s.links.get(name).copied()))
    }
    fn link_delete(&self, name: &str) -> Result<(), SysError> {
        self.lock().links.remove(name);
        Ok(())
    }
    fn links_named(&self, prefix: &str) -> Result<Vec<(String, [u8; 6])>, SysError> {
        Ok(self.look(|s| s.links.iter().filter(|(l, _)| l.starts_with(prefix)).map(|(l, m)| (l.clone(), *m)).collect()))
    }
    /// Each has the inode of the one before it, as if that had just ended.
    fn netns(&self) -> Result<(Option<OwnedFd>, Netns), SysError> {
        self.by_shim("make a network namespace", |s| {
            s.newest_netns += 1;
            Ok((None, Netns { inode: 1, cookie: Some(s.newest_netns) }))
        })
    }
    fn netns_in_use(&self, netns: Netns) -> Result<bool, SysError> {
        let is_it = |cookie: &u64| netns.cookie.is_none_or(|c| c == *cookie);
        Ok(self.look(|s| s.processes.keys().any(|pid| s.netns_of.get(pid).is_some_and(is_it))))
    }
    fn veth(&self, net: &SessionNet, _: Option<BorrowedFd<'_>>) -> Result<(), SysError> {
        self.by_shim(&format!("make the veth pair {}", net.link), |s| {
            if s.links.contains_key(&net.link) {
                return Err(no("make the veth pair", &net.link, libc::EEXIST));
            }
            s.links.insert(net.link.clone(), net.host_mac);
            Ok(())
        })
    }
    fn tap(&self, net: &SessionNet) -> Result<Option<OwnedFd>, SysError> {
        self.by_shim(&format!("make the tap {}", net.link), |s| {
            if s.links.contains_key(&net.link) {
                return Err(no("make the tap", &net.link, libc::EBUSY));
            }
            s.links.insert(net.link.clone(), net.host_mac);
            Ok(None)
        })
    }

    fn standing(&self) -> Result<(), SysError> {
        if self.look(|s| s.helpless) { Err(crate::shim::ShimError::Gone.into()) } else { Ok(()) }
    }
    fn spawn_session(&self, spec: &SessionSpec, _: Option<BorrowedFd<'_>>) -> Result<Child, SysError> {
        self.by_shim("start a session", |s| Ok(Child { process: s.start(spec.leaf.as_ref()), pidfd: None }))
    }
    /// CRIU as far as files and processes show it: a restore leaves a process and its pid in the pid file, a dump ends
    /// the process. Any other tool ends at once with code 0.
    fn spawn_tool(&self, spec: &ToolSpec, _: &[BorrowedFd<'_>]) -> Result<Child, SysError> {
        let after = |flag: &str| spec.args.iter().skip_while(|a| *a != flag).nth(1).cloned();
        let name = spec.args.first().cloned().unwrap_or_default();
        self.by_shim(&format!("run {name}"), |s| {
            if let Some(file) = after("--pidfile") {
                let restored = s.start(spec.leaf.as_ref());
                s.files.insert(file.into(), restored.pid.to_string().into_bytes());
            }
            if let (true, Some(pid)) = (name == "dump", after("-t").and_then(|p| p.parse::<i32>().ok())) {
                s.processes.remove(&pid);
            }
            let process = s.start(None);
            s.processes.remove(&process.pid);
            s.exits.insert(process.pid, Exit::Code(0));
            Ok(Child { process, pidfd: None })
        })
    }
    fn adopt(&self, pid: i32) -> Result<Child, SysError> {
        self.by_shim(&format!("adopt {pid}"), |s| match s.processes.get(&pid) {
            Some((start, _)) => Ok(Child { process: Process { pid, start: *start }, pidfd: None }),
            None => Err(no("adopt", pid, libc::ESRCH)),
        })
    }
    fn wait(&self, child: &Child, timeout_ms: u64) -> Result<Exit, SysError> {
        self.look(|s| {
            let pid = child.process.pid;
            if s.processes.contains_key(&pid) {
                return Err(SysError::Deadline { what: format!("pid {pid}"), waited_ms: timeout_ms });
            }
            Ok(s.exits.get(&pid).copied().unwrap_or(Exit::Unknown))
        })
    }
    fn alive(&self, child: &Child) -> bool {
        self.look(|s| s.processes.contains_key(&child.process.pid))
    }
    fn signal(&self, child: &Child, _: i32) -> Result<(), SysError> {
        self.lock().processes.remove(&child.process.pid);
        Ok(())
    }

    fn process_start(&self, pid: i32) -> Result<Option<u64>, SysError> {
        Ok(self.look(|s| s.processes.get(&pid).map(|(start, _)| *start)))
    }
    fn kill_process(&self, process: Process, _: u64) -> Result<(), SysError> {
        let mut s = self.lock();
        if s.processes.get(&process.pid).is_some_and(|(start, _)| *start == process.start) {
            s.processes.remove(&process.pid);
        }
        Ok(())
    }
    fn own_cpu_us(&self) -> u64 {
        self.look(|s| s.now_us)
    }
}
