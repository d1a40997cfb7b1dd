//! Control groups, version 1 (hierarchies of their own, as on hybrid systems) and version 2, in one layout: `NAME` holds
//! the limits and the account, its leaves `tool` and `session` hold the processes.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use drums_common::evidence::LimitsRead;

use crate::steps::Inode;

use super::{CgroupLimits, Leaf, LeafOf, SysError, clock, procfs, signal};

const LEAVES: [Leaf; 2] = [Leaf::Tool, Leaf::Session];
/// Period of the CPU quota; the kernel's and runc's default.
const PERIOD_US: u64 = 100_000;

/// Where this machine's control groups are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `used` by controller; co-mounted ones share a folder. `others` are the hierarchies that we do not use but runc
    /// makes groups in.
    V1 {
        used: BTreeMap<&'static str, PathBuf>,
        others: Vec<PathBuf>,
    },
    V2(PathBuf),
}

/// Version 1 controllers that we use: limits, account, and the freezer (a frozen task ignores SIGKILL until thawed, so
/// it must be ours to thaw).
const V1: [&str; 6] = ["cpu", "cpuacct", "cpuset", "memory", "pids", "freezer"];

impl Layout {
    /// Reads /proc/self/mountinfo. Hybrid counts as version 1: the controllers are there.
    pub fn discover() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo")?).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "no control groups with cpu, cpuset, memory and pids are mounted (version 1 or 2)",
            )
        })
    }

    fn parse(mountinfo: &str) -> Option<Self> {
        let mut v1 = BTreeMap::new();
        let mut v2 = None;
        let mut all = Vec::new();
        for line in mountinfo.lines() {
            let (left, right) = line.split_once(" - ")?;
            let mut left = left.split(' ');
            let root = left.clone().nth(3)?;
            let path = PathBuf::from(left.nth(4)?);
            let mut right = right.split(' ');
            let (kind, options) = (right.next()?, right.nth(1)?);
            if kind == "cgroup2" || (kind == "cgroup" && root == "/") {
                all.push(path.clone());
            }
            if kind == "cgroup2" {
                v2.get_or_insert(path);
            } else if kind == "cgroup" && root == "/" {
                for name in V1 {
                    if options.split(',').any(|o| o == name) {
                        v1.entry(name).or_insert_with(|| path.clone());
                    }
                }
            }
        }
        if ["cpu", "cpuacct", "cpuset", "memory", "pids"].iter().all(|c| v1.contains_key(c)) {
            all.retain(|path| !v1.values().any(|used| used == path));
            return Some(Self::V1 { used: v1, others: all });
        }
        v2.map(Self::V2)
    }

    pub fn version(&self) -> u8 {
        match self {
            Self::V1 { .. } => 1,
            Self::V2(_) => 2,
        }
    }

    /// The distinct folders at the top.
    fn roots(&self) -> Vec<&Path> {
        match self {
            Self::V1 { used: map, .. } => {
                let mut roots: Vec<&Path> = map.values().map(PathBuf::as_path).collect();
                roots.sort_unstable();
                roots.dedup();
                roots
            }
            Self::V2(root) => vec![root],
        }
    }

    /// Every hierarchy in which a group of ours may exist.
    fn everywhere(&self) -> Vec<&Path> {
        let mut roots = self.roots();
        if let Self::V1 { others, .. } = self {
            roots.extend(others.iter().map(PathBuf::as_path));
        }
        roots
    }

    fn folder(&self, controller: &str) -> &Path {
        match self {
            // `parse` has checked the five that are asked for.
            Self::V1 { used: map, .. } => map.get(controller).map_or(Path::new("/nonexistent"), |p| p),
            Self::V2(root) => root,
        }
    }

    /// Makes the group with its limits and leaves. What it made before failing is removed by [`Self::remove`], but for a
    /// name that is taken: then the group is somebody else's, and nothing of ours is left beside it.
    pub fn create(&self, name: &str, limits: &CgroupLimits) -> Result<(), SysError> {
        for (made, root) in self.roots().into_iter().enumerate() {
            let Err(e) = fs::create_dir(root.join(name)) else { continue };
            if e.kind() == io::ErrorKind::AlreadyExists {
                for root in self.roots().into_iter().take(made) {
                    // Made a moment ago and empty.
                    let _ = fs::remove_dir(root.join(name));
                }
            }
            return Err(SysError::os("make the control group", root.join(name).display(), e));
        }
        let cpus = cpu_list(&limits.cpus);
        let quota = u64::from(limits.cpu_milli) * PERIOD_US / 1_000;
        match self {
            Self::V1 { .. } => {
                let cpuset = self.folder("cpuset");
                let mems = read(&cpuset.join("cpuset.effective_mems"))?;
                for root in self.roots() {
                    let parent = root.join(name);
                    if root == cpuset {
                        write(&parent.join("cpuset.cpus"), &cpus)?;
                        write(&parent.join("cpuset.mems"), mems.trim())?;
                        // Leaves begin with the parent's set instead of an empty one.
                        write(&parent.join("cgroup.clone_children"), "1")?;
                    }
                    for leaf in LEAVES {
                        mkdir(&parent.join(leaf.as_str()))?;
                    }
                }
                let memory = self.folder("memory").join(name);
                write(&memory.join("memory.limit_in_bytes"), &limits.memory_bytes.to_string())?;
                // Of memory and swap together.
                without_swap(&memory.join("memory.memsw.limit_in_bytes"), &limits.memory_bytes.to_string())?;
                let cpu = self.folder("cpu").join(name);
                write(&cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
                write(&cpu.join("cpu.cfs_quota_us"), &quota.to_string())?;
                write(&self.folder("pids").join(name).join("pids.max"), &limits.pids.to_string())?;
            }
            Self::V2(root) => {
                const CONTROLLERS: &str = "+cpu +cpuset +memory +pids";
                let parent = root.join(name);
                write(&root.join("cgroup.subtree_control"), CONTROLLERS)?;
                write(&parent.join("cpuset.cpus"), &cpus)?;
                write(&parent.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
                write(&parent.join("memory.max"), &limits.memory_bytes.to_string())?;
                without_swap(&parent.join("memory.swap.max"), "0")?;
                write(&parent.join("pids.max"), &limits.pids.to_string())?;
                write(&parent.join("cgroup.subtree_control"), CONTROLLERS)?;
                for leaf in LEAVES {
                    mkdir(&parent.join(leaf.as_str()))?;
                }
            }
        }
        Ok(())
    }

    pub fn exists(&self, name: &str) -> Result<bool, SysError> {
        for root in self.everywhere() {
            let path = root.join(name);
            if path.try_exists().map_err(|e| SysError::os("look for", path.display(), e))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Which group it is.
    pub fn inode(&self, name: &str) -> Result<Option<Inode>, SysError> {
        let Some(root) = self.roots().first().map(|r| r.join(name)) else { return Ok(None) };
        procfs::inode(&root).map_err(|e| SysError::os("look at", root.display(), e))
    }

    /// Limits as the kernel has them; of memory and swap together.
    pub fn limits(&self, name: &str) -> Result<LimitsRead, SysError> {
        let (cpu, cpuset, memory) =
            (self.folder("cpu").join(name), self.folder("cpuset").join(name), self.folder("memory").join(name));
        // "max" and -1 mean no limit: reported as the largest number, which no registration asks for.
        let bytes = |file: &str| read(&memory.join(file)).map(|text| text.trim().parse::<u64>().unwrap_or(u64::MAX));
        let if_there = |file: &str| memory.join(file).exists().then(|| bytes(file)).transpose();
        let (quota, period, cpus, memory_bytes) = match self {
            Self::V1 { .. } => (
                read(&cpu.join("cpu.cfs_quota_us"))?,
                read(&cpu.join("cpu.cfs_period_us"))?,
                read(&cpuset.join("cpuset.effective_cpus"))?,
                match if_there("memory.memsw.limit_in_bytes")? {
                    Some(both) => both.max(bytes("memory.limit_in_bytes")?),
                    None => bytes("memory.limit_in_bytes")?,
                },
            ),
            Self::V2(_) => {
                let max = read(&cpu.join("cpu.max"))?;
                let (quota, period) = max.trim().split_once(' ').unwrap_or((max.trim(), "100000"));
                (
                    quota.to_owned(),
                    period.to_owned(),
                    read(&cpuset.join("cpuset.cpus.effective"))?,
                    bytes("memory.max")?.saturating_add(if_there("memory.swap.max")?.unwrap_or(0)),
                )
            }
        };
        let quota = quota.trim().parse::<u64>().ok();
        let period = period.trim().parse::<u64>().unwrap_or(PERIOD_US).max(1);
        let milli = quota.map_or(u32::MAX, |q| u32::try_from(q.saturating_mul(1_000) / period).unwrap_or(u32::MAX));
        Ok(LimitsRead { cpu_milli: milli, cpus: parse_cpus(cpus.trim()), memory_bytes })
    }

    /// CPU time of the whole tree, microseconds.
    pub fn cpu_us(&self, name: &str) -> Result<u64, SysError> {
        match self {
            Self::V1 { .. } => {
                let path = self.folder("cpuacct").join(name).join("cpuacct.usage");
                let ns: u64 = number(&path, &read(&path)?)?;
                Ok(ns / 1_000)
            }
            Self::V2(root) => {
                let path = root.join(name).join("cpu.stat");
                let text = read(&path)?;
                let value = text.lines().find_map(|l| l.strip_prefix("usage_usec ")).unwrap_or("");
                number(&path, value)
            }
        }
    }

    /// Processes in the group and its sub-groups, ours or made by what runs in it (runc makes some).
    pub fn procs(&self, name: &str) -> Result<Vec<i32>, SysError> {
        let mut pids = Vec::new();
        for root in self.roots() {
            collect_procs(&root.join(name), &mut pids)?;
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Kills what is in it until it is empty, and removes it from every hierarchy.
    pub fn remove(&self, name: &str, timeout_ms: u64) -> Result<(), SysError> {
        let started = clock::raw_us();
        let deadline = started + timeout_ms * 1_000;
        let mut busy = String::new();
        loop {
            self.thaw_and_kill(name, deadline)?;
            let mut gone = true;
            // Backwards: the folder that its identity is of goes last, and only once the others are gone. What carries
            // the name when it is not there any more is then a stranger's.
            for (at, root) in self.everywhere().into_iter().enumerate().rev() {
                if at == 0 && !gone {
                    continue;
                }
                match remove_groups(&root.join(name)) {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                        gone = false;
                        busy = root.join(name).display().to_string();
                    }
                    Err(e) => return Err(SysError::os("remove the control group", root.join(name).display(), e)),
                }
            }
            if gone {
                return Ok(());
            }
            if clock::raw_us() >= deadline {
                let waited_ms = (clock::raw_us() - started) / 1_000;
                return Err(SysError::Deadline {
                    what: format!("removal of the busy control group {busy}"),
                    waited_ms,
                });
            }
            // EBUSY lasts until the last task has passed through the scheduler once more; there is no event for it.
            clock::between_looks(500);
        }
    }

    fn thaw_and_kill(&self, name: &str, deadline_us: u64) -> Result<(), SysError> {
        let pids = self.procs(name)?;
        if pids.is_empty() {
            return Ok(());
        }
        match self {
            Self::V1 { used: map, .. } => {
                if let Some(freezer) = map.get("freezer") {
                    thaw(&freezer.join(name));
                }
            }
            Self::V2(root) => {
                let _ = write(&root.join(name).join("cgroup.freeze"), "0");
                // Not there before Linux 5.14; the loop below does the same, slower.
                let _ = write(&root.join(name).join("cgroup.kill"), "1");
            }
        }
        let mut ending = Vec::new();
        for pid in pids {
            // The descriptor first, then the look: if the pid is in our group *now*, the descriptor is of that process.
            let Ok(pidfd) = signal::open(pid) else { continue };
            if member(pid, name) {
                signal::send(&pidfd, libc::SIGKILL)
                    .map_err(|e| SysError::os("kill", format!("pid {pid} of {name}"), e))?;
                ending.push(pidfd);
            }
        }
        for pidfd in ending {
            // Its end takes it out of the group, reaped or not. If it hangs, the deadline of the caller says so.
            let _ = procfs::wait_ended(&pidfd, deadline_us);
        }
        Ok(())
    }

    /// Names at the top that begin with `prefix`.
    pub fn named(&self, prefix: &str) -> Result<Vec<String>, SysError> {
        let mut names = Vec::new();
        for root in self.everywhere() {
            let list = fs::read_dir(root).map_err(|e| SysError::os("list", root.display(), e))?;
            for entry in list.flatten() {
                if let Some(name) = entry.file_name().to_str().filter(|n| n.starts_with(prefix))
                    && entry.file_type().is_ok_and(|t| t.is_dir())
                {
                    names.push(name.to_owned());
                }
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Version 1: files to which a new process writes `0` to join the leaf.
    ///
    /// `tasks`, not `cgroup.procs`: for the writing thread itself the kernel then skips the lock that keeps every
    /// fork and exit of the machine out (and may wait for an RCU grace period). A new process has one thread.
    pub fn join_files(&self, leaf: &LeafOf) -> Vec<PathBuf> {
        match self {
            Self::V1 { .. } => {
                self.roots().iter().map(|r| r.join(&leaf.group).join(leaf.leaf.as_str()).join("tasks")).collect()
            }
            Self::V2(_) => Vec::new(),
        }
    }

    /// Files to which any process writes `0` to join the leaf, whatever the version.
    pub fn doors(&self, leaf: &LeafOf) -> Vec<PathBuf> {
        match self {
            Self::V1 { .. } => self.join_files(leaf),
            Self::V2(root) => vec![root.join(&leaf.group).join(leaf.leaf.as_str()).join("cgroup.procs")],
        }
    }

    /// Version 2: the folder for CLONE_INTO_CGROUP.
    pub fn clone_into(&self, leaf: &LeafOf) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::V1 { .. } => Ok(None),
            Self::V2(root) => {
                let path = root.join(&leaf.group).join(leaf.leaf.as_str());
                let dir = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC).open(path)?;
                Ok(Some(dir.into()))
            }
        }
    }
}

fn member(pid: i32, name: &str) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return false };
    let (exact, below) = (format!(":/{name}"), format!(":/{name}/"));
    text.lines().any(|l| l.ends_with(&exact) || l.contains(&below))
}

fn collect_procs(folder: &Path, pids: &mut Vec<i32>) -> Result<(), SysError> {
    let text = match fs::read_to_string(folder.join("cgroup.procs")) {
        Ok(text) => text,
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => return Ok(()),
        Err(e) => return Err(SysError::os("read the processes of", folder.display(), e)),
    };
    pids.extend(text.split_ascii_whitespace().filter_map(|p| p.parse::<i32>().ok()).filter(|&p| p > 0));
    for child in sub_groups(folder).map_err(|e| SysError::os("list", folder.display(), e))? {
        collect_procs(&child, pids)?;
    }
    Ok(())
}

fn sub_groups(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(list) => Ok(list.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Leaves first. A group that is not there is fine.
fn remove_groups(folder: &Path) -> io::Result<()> {
    for leaf in LEAVES {
        remove_one(&folder.join(leaf.as_str()))?;
    }
    remove_one(folder)
}

fn remove_one(folder: &Path) -> io::Result<()> {
    match fs::remove_dir(folder) {
        Ok(()) => Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            // Groups that something in ours has made (runc, a container's own) go first, then it is tried again.
            let below = sub_groups(folder)?;
            if below.is_empty() {
                return Err(e);
            }
            for child in below {
                remove_one(&child)?;
            }
            fs::remove_dir(folder)
        }
        Err(e) => Err(e),
    }
}

fn thaw(folder: &Path) {
    // The parent first: a child of a frozen group stays frozen.
    let _ = write(&folder.join("freezer.state"), "THAWED");
    for child in sub_groups(folder).unwrap_or_default() {
        thaw(&child);
    }
}

/// Keeps swap from a group: what a session may push out of its memory is memory beyond its limit, and is slow for whoever
/// did it. A kernel that does not count swap cannot keep it from anybody; that matters only where there is some.
fn without_swap(limit: &Path, value: &str) -> Result<(), SysError> {
    if limit.exists() {
        return write(limit, value);
    }
    let swaps = read(Path::new("/proc/swaps")).unwrap_or_default();
    if has_swap(&swaps) {
        let why = "this kernel does not count swap: turn it off (`swapoff -a`), or boot with swapaccount=1";
        return Err(SysError::os("keep swap from", limit.display(), io::Error::new(io::ErrorKind::Unsupported, why)));
    }
    Ok(())
}

/// Of /proc/swaps, which has a line of headings; empty where the kernel has no swap at all.
fn has_swap(swaps: &str) -> bool {
    swaps.lines().skip(1).any(|line| !line.trim().is_empty())
}

fn mkdir(path: &Path) -> Result<(), SysError> {
    fs::create_dir(path).map_err(|e| SysError::os("make the control group", path.display(), e))
}

fn write(path: &Path, text: &str) -> Result<(), SysError> {
    OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut f| f.write_all(text.as_bytes()))
        .map_err(|e| SysError::os("write", format!("{text:?} to {}", path.display()), e))
}

fn read(path: &Path) -> Result<String, SysError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|mut f| f.read_to_string(&mut text))
        .map_err(|e| SysError::os("read", path.display(), e))?;
    Ok(text)
}

fn number(path: &Path, text: &str) -> Result<u64, SysError> {
    text.trim().parse().map_err(|_| {
        SysError::os("read a number from", path.display(), io::Error::new(io::ErrorKind::InvalidData, text.to_owned()))
    })
}

/// `0,2,3`, as the kernel reads it.
pub fn cpu_list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// `0-1,4`, as the kernel writes it.
pub fn parse_cpus(text: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(low), Ok(high)) = (low.parse::<u32>(), high.parse::<u32>()) {
            cpus.extend(low..=high.min(low.saturating_add(4_095)));
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 25 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
35 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn hybrid_is_version_one_and_shared_hierarchies_count_once() {
        let layout = Layout::parse(HYBRID).unwrap();
        assert_eq!(layout.version(), 1);
        assert_eq!(layout.roots().len(), 4);
        // runc makes groups in those that we do not use, and they are ours to remove.
        assert_eq!(layout.everywhere().len(), 5);
        assert_eq!(layout.folder("cpuacct"), layout.folder("cpu"));
    }

    #[test]
    fn only_unified_is_version_two() {
        let text = "35 30 0:31 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(Layout::parse(text), Some(Layout::V2("/sys/fs/cgroup".into())));
        assert_eq!(Layout::parse("1 2 0:3 / / rw - ext4 /dev/vda rw\n"), None);
    }

    #[test]
    fn swap_is_there_when_a_line_follows_the_headings() {
        assert!(!has_swap("") && !has_swap("Filename\tType\tSize\tUsed\tPriority\n"));
        assert!(has_swap("Filename\tType\tSize\tUsed\tPriority\n/dev/vda2 partition 1048572 0 -2\n"));
    }

    #[test]
    fn cpu_lists_read_back_as_written() {
        assert_eq!(parse_cpus("0-2,7"), [0, 1, 2, 7]);
        assert_eq!(parse_cpus(&cpu_list(&[1, 3])), [1, 3]);
        assert_eq!(parse_cpus(""), [0; 0]);
    }
}
