//! The leak gate: what the kernel showed before, against what it shows now.
//!
//! Owns the listing of processes, mounts, namespaces, cgroups, links, routes, firewall tables and listening ports, and the
//! comparison. Knows nothing of who should have removed a thing. On a machine that others use as well (`DRUMS_SHARED_MACHINE` set), only
//! what carries this installation's own names is counted; on a machine of one's own, everything new is.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

#[derive(Debug, thiserror::Error)]
#[error("cannot read {path} for the leak check")]
pub struct LeakGateError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Set when others work on the machine at the same time.
pub const SHARED_MACHINE: &str = "DRUMS_SHARED_MACHINE";

/// Something that is there now and was not before.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leak {
    /// `process`, `mount`, `namespace`, `cgroup`, `link`, `route`, `table` or `port`.
    pub kind: &'static str,
    pub what: String,
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.what)
    }
}

/// What counts as leaked.
#[derive(Clone, Debug)]
pub enum Scope {
    /// Everything new.
    Machine,
    /// What names one of these: installation ids, state folders.
    Names(Vec<String>),
}

impl Scope {
    /// `Machine`, or `Names` where the environment says that the machine is shared.
    pub fn from_env(names: Vec<String>) -> Self {
        if std::env::var_os(SHARED_MACHINE).is_some() { Self::Names(names) } else { Self::Machine }
    }

    fn counts(&self, text: &str) -> bool {
        match self {
            Self::Machine => true,
            Self::Names(names) => names.iter().any(|n| text.contains(n.as_str())),
        }
    }
}

/// Pid and start time: together they name a process for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ProcessKey {
    pid: i32,
    start: u64,
}

#[derive(Clone, Debug)]
struct ProcessInfo {
    parent: i32,
    /// Command line, or the name in brackets.
    shown: String,
    /// Everything that may tell whose it is: command line, executable, cgroup.
    traces: String,
    namespaces: Vec<String>,
}

/// What the kernel shows at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    processes: BTreeMap<ProcessKey, ProcessInfo>,
    mounts: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    links: BTreeSet<String>,
    routes: BTreeSet<String>,
    tables: BTreeSet<String>,
    ports: BTreeSet<String>,
}

impl Snapshot {
    pub fn take() -> Result<Self, LeakGateError> {
        let processes = processes()?;
        let namespaces = processes.values().flat_map(|p| p.namespaces.iter().cloned()).collect();
        Ok(Self {
            processes,
            mounts: mounts()?,
            namespaces,
            cgroups: cgroups()?,
            links: links()?,
            routes: routes()?,
            tables: tables(),
            ports: ports()?,
        })
    }

    /// What `self` shows and `before` did not, as far as `scope` counts it.
    pub fn new_since(&self, before: &Self, scope: &Scope) -> Vec<Leak> {
        let mut leaks = BTreeSet::new();
        let mut add = |kind, what: &str, traces: &str| {
            if scope.counts(traces) {
                leaks.insert(Leak { kind, what: what.to_owned() });
            }
        };
        let mut ours_or_unclear = BTreeSet::new();
        for (key, process) in &self.processes {
            if before.processes.contains_key(key) || self.is_foreign(*key, before) {
                continue;
            }
            add("process", &format!("{} ({})", key.pid, process.shown), &process.traces);
            if scope.counts(&process.traces) {
                ours_or_unclear.extend(process.namespaces.iter());
            }
        }
        for namespace in ours_or_unclear {
            if !before.namespaces.contains(namespace) {
                leaks.insert(Leak { kind: "namespace", what: namespace.clone() });
            }
        }
        // In a scope of names the rest is told apart by its own text. A bare port number never carries a name, so ports
        // are counted only on a machine of one's own; a listener that outlives us is then a leaked process anyway.
        let mut add = |kind, now: &BTreeSet<String>, then: &BTreeSet<String>| {
            for what in now.difference(then).filter(|w| scope.counts(w)) {
                leaks.insert(Leak { kind, what: what.clone() });
            }
        };
        add("mount", &self.mounts, &before.mounts);
        add("cgroup", &self.cgroups, &before.cgroups);
        add("link", &self.links, &before.links);
        add("route", &self.routes, &before.routes);
        add("table", &self.tables, &before.tables);
        add("port", &self.ports, &before.ports);
        leaks.into_iter().collect()
    }

    /// True for descendants of a process that was there before and is not an ancestor of this one: ours would be
    /// children of this process, or, once orphaned, of init or another ancestor.
    fn is_foreign(&self, key: ProcessKey, before: &Self) -> bool {
        let by_pid: BTreeMap<i32, (ProcessKey, &ProcessInfo)> =
            self.processes.iter().map(|(k, p)| (k.pid, (*k, p))).collect();
        let me = std::process::id().cast_signed();
        let mut ancestors = BTreeSet::from([0, 1]);
        let mut at = me;
        while let Some((_, info)) = by_pid.get(&at) {
            if !ancestors.insert(info.parent) {
                break;
            }
            at = info.parent;
        }
        let mut at = self.processes[&key].parent;
        loop {
            if at == me || ancestors.contains(&at) {
                return false;
            }
            match by_pid.get(&at) {
                Some((k, _)) if before.processes.contains_key(k) => return true,
                Some((_, info)) => at = info.parent,
                None => return false,
            }
        }
    }
}

/// Waits until nothing new is left, at most `timeout`, and returns what still is. Zombies, dying cgroups and closing
/// sockets take the kernel a moment, which is why one look is not enough.
pub fn settle(before: &Snapshot, scope: &Scope, timeout: Duration) -> Result<Vec<Leak>, LeakGateError> {
    let deadline = Instant::now() + timeout;
    loop {
        let leaks = Snapshot::take()?.new_since(before, scope);
        if leaks.is_empty() || Instant::now() >= deadline {
            return Ok(leaks);
        }
        pause(Duration::from_millis(50));
    }
}

/// The pause between two looks at a condition for which the kernel sends no event.
#[allow(clippy::disallowed_methods)] // a poll with a deadline, which is what the ban asks for
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

fn read(path: impl AsRef<Path>) -> Result<String, LeakGateError> {
    let path = path.as_ref();
    fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|source| LeakGateError { path: path.to_owned(), source })
}

/// All processes but the kernel's threads. One that ends while being read is left out: it is gone.
fn processes() -> Result<BTreeMap<ProcessKey, ProcessInfo>, LeakGateError> {
    let path = PathBuf::from("/proc");
    let entries = fs::read_dir(&path).map_err(|source| LeakGateError { path, source })?;
    let mut found = BTreeMap::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|s| s.parse::<i32>().ok()) else { continue };
        if let Some((key, info)) = process(pid) {
            found.insert(key, info);
        }
    }
    Ok(found)
}

fn process(pid: i32) -> Option<(ProcessKey, ProcessInfo)> {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let stat = read(dir.join("stat")).ok()?;
    // The name stands in parentheses and may hold anything, so fields count from the last one.
    let (head, tail) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let parent: i32 = fields.get(1)?.parse().ok()?;
    let start: u64 = fields.get(19)?.parse().ok()?;
    if pid == 2 || parent == 2 {
        return None; // kernel threads come and go as they like
    }
    let name = head.split_once('(').map_or("", |(_, n)| n);
    let state = fields.first().copied().unwrap_or_default();
    let command = read(dir.join("cmdline")).unwrap_or_default().trim_end_matches('\0').replace('\0', " ");
    let shown = match (command.is_empty(), state) {
        (_, "Z") => format!("[{name}] zombie"),
        (true, _) => format!("[{name}]"),
        (false, _) => command.chars().take(160).collect(),
    };
    let exe = fs::read_link(dir.join("exe")).map(|p| p.display().to_string()).unwrap_or_default();
    let cgroup = read(dir.join("cgroup")).unwrap_or_default();
    let mut namespaces = Vec::new();
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        if let Ok(target) = fs::read_link(dir.join("ns").join(kind)) {
            namespaces.push(target.display().to_string());
        }
    }
    // A namespace that nobody is in lives on in an open descriptor.
    for entry in fs::read_dir(dir.join("fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.display().to_string();
        if ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"].iter().any(|k| target.starts_with(&format!("{k}:["))) {
            namespaces.push(target);
        }
    }
    let traces = format!("{command}\n{exe}\n{cgroup}");
    Some((ProcessKey { pid, start }, ProcessInfo { parent, shown, traces, namespaces }))
}

/// Root, mount point, type and source of every mount in this namespace; ids are left out, since a remount changes them.
/// A bind-mounted namespace is one of these.
fn mounts() -> Result<BTreeSet<String>, LeakGateError> {
    let text = read("/proc/self/mountinfo")?;
    let line = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        Some(format!("{} from {} ({}, {})", left.get(4)?, left.get(3)?, right.first()?, right.get(1)?))
    };
    Ok(text.lines().filter_map(line).collect())
}

fn cgroups() -> Result<BTreeSet<String>, LeakGateError> {
    let mut found = BTreeSet::new();
    let mut todo = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = todo.pop() {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            // Removed between listing and opening; at the top it means that there are no cgroups to leak.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(LeakGateError { path: dir, source }),
        };
        for entry in entries.flatten() {
            // `cpu -> cpu,cpuacct` and its like are symlinks, which file_type does not follow.
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                found.insert(entry.path().display().to_string());
                todo.push(entry.path());
            }
        }
    }
    Ok(found)
}

fn links() -> Result<BTreeSet<String>, LeakGateError> {
    let text = read("/proc/thread-self/net/dev")?;
    Ok(text.lines().skip(2).filter_map(|l| l.split_once(':')).map(|(name, _)| name.trim().to_owned()).collect())
}

/// IPv4 routes of this network namespace; each names its link.
fn routes() -> Result<BTreeSet<String>, LeakGateError> {
    let text = read("/proc/thread-self/net/route")?;
    let line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let address = |at: usize| {
            let number = u32::from_str_radix(fields.get(at)?, 16).ok()?;
            Some(std::net::Ipv4Addr::from(number.to_le_bytes()))
        };
        Some(format!("{}/{} dev {} via {}", address(1)?, address(7)?, fields.first()?, address(2)?))
    };
    Ok(text.lines().skip(1).filter_map(line).collect())
}

/// Firewall tables of this network namespace, as nft lists them. The project makes none; where nft is not installed,
/// neither does anything else that is looked at.
fn tables() -> BTreeSet<String> {
    let listed = std::process::Command::new("nft").args(["list", "tables"]).stdin(std::process::Stdio::null()).output();
    let text = listed.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// TCP listeners and unconnected UDP sockets of this network namespace, and the named unix sockets that listen.
fn ports() -> Result<BTreeSet<String>, LeakGateError> {
    let mut found = BTreeSet::new();
    for (protocol, wanted) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
        let path = format!("/proc/thread-self/net/{protocol}");
        if !Path::new(&path).exists() {
            continue; // no IPv6 here
        }
        for line in read(path)?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if fields.get(3) == Some(&wanted)
                && let Some(local) = fields.get(1)
            {
                found.insert(format!("{protocol} {}", endpoint(local)));
            }
        }
    }
    for line in read("/proc/thread-self/net/unix")?.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Flag 0x10000: it accepts connections.
        if fields.get(3) == Some(&"00010000")
            && let Some(name) = fields.get(7)
        {
            found.insert(format!("unix {name}"));
        }
    }
    Ok(found)
}

/// The kernel's hexadecimal address as people write it; left as it is where it is not IPv4.
fn endpoint(text: &str) -> String {
    let readable = || {
        let (address, port) = text.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        if address.len() != 8 {
            return Some(format!("[{address}]:{port}"));
        }
        let address = std::net::Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.to_le_bytes());
        Some(format!("{address}:{port}"))
    };
    readable().unwrap_or_else(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    struct Reaped(Child);
    impl Drop for Reaped {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn sleeper(mark: &str) -> Reaped {
        let script = format!("read -r line # {mark}");
        Reaped(Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap())
    }

    #[test]
    fn nothing_happened_is_no_leak() {
        let before = Snapshot::take().unwrap();
        let scope = Scope::Names(vec!["leakgate-quiet".to_owned()]);
        assert_eq!(settle(&before, &scope, Duration::from_secs(5)).unwrap(), []);
    }

    #[test]
    fn a_new_process_is_found_and_gone_after_its_end() {
        let mark = format!("leakgate-process-{}", std::process::id());
        let before = Snapshot::take().unwrap();
        let scope = Scope::Names(vec![mark.clone()]);
        let child = sleeper(&mark);
        // The shell's command line is there once exec is done, which spawn waits for.
        let leaks = Snapshot::take().unwrap().new_since(&before, &scope);
        assert!(leaks.iter().any(|l| l.kind == "process" && l.what.contains(&mark)), "{leaks:?}");
        assert!(Snapshot::take().unwrap().new_since(&before, &Scope::Machine).iter().any(|l| l.what.contains(&mark)));
        drop(child);
        assert_eq!(settle(&before, &scope, Duration::from_secs(5)).unwrap(), []);
    }

    #[test]
    fn a_listening_port_is_found() {
        let before = Snapshot::take().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let shown = format!("tcp {}", listener.local_addr().unwrap());
        let leaks = Snapshot::take().unwrap().new_since(&before, &Scope::Machine);
        assert!(leaks.iter().any(|l| l.kind == "port" && l.what == shown), "{leaks:?}");
    }

    #[test]
    fn live_a_route_and_a_firewall_table_are_found() {
        // In a namespace of this thread's own, which ends with it.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let run = |line: &str| {
            let mut words = line.split(' ');
            let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
            assert!(status.success(), "{line}");
        };
        run("ip link add leakgate0 type bridge");
        run("ip link set leakgate0 up");
        let before = Snapshot::take().unwrap();
        run("ip route add 198.19.255.248/30 dev leakgate0");
        run("nft add table inet leakgate");
        let leaks = Snapshot::take().unwrap().new_since(&before, &Scope::Names(vec!["leakgate".to_owned()]));
        let shown: Vec<String> = leaks.iter().map(ToString::to_string).collect();
        let route = "route 198.19.255.248/255.255.255.252 dev leakgate0 via 0.0.0.0";
        assert_eq!(shown, [route, "table table inet leakgate"]);
    }

    #[test]
    fn a_namespace_held_by_a_new_process_is_found() {
        // Works without privileges where user namespaces do; as root always.
        let mark = format!("leakgate-namespace-{}", std::process::id());
        let before = Snapshot::take().unwrap();
        let scope = Scope::Names(vec![mark.clone()]);
        let script = format!("echo in; read -r line # {mark}");
        let mut child = Reaped(
            Command::new("unshare")
                .args(["--net", "sh", "-c", &script])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let mut said = [0; 3];
        io::Read::read_exact(child.0.stdout.as_mut().unwrap(), &mut said).unwrap();
        let leaks = Snapshot::take().unwrap().new_since(&before, &scope);
        assert!(leaks.iter().any(|l| l.kind == "namespace" && l.what.starts_with("net:[")), "{leaks:?}");
    }
}
