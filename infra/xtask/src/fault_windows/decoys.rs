//! Things that look like ours and are not. Nobody may touch them.

mod neighbour;

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use drums_agent::{
    ledger::Ledger,
    steps::{Inode, Process, Receipt, Resource},
    sys::{SessionNet, procfs},
};
use drums_common::ids::InstallationId;
use drums_infra::fleet::wait_until;

use self::neighbour::Neighbour;
pub use self::neighbour::audit;
use super::stopped::end_with_parent;

/// A stranger's MAC, on a link named like ours.
const MAC: &str = "02:aa:bb:cc:dd:ee";
/// Inside the addresses that sessions get.
const ROUTE: &str = "198.19.255.252/30";

/// Removed again when dropped, and by the next run's [`Decoys::clear`] if this one was killed.
pub struct Decoys {
    names: Names,
    /// In a group each: one, and one whose command line is ours. One in a network namespace of its own, and one whose
    /// number a ledger gives to something of ours that ended.
    processes: Vec<(&'static str, Child)>,
    /// Drawn before the processes end, so that they are seen alive.
    neighbour: Neighbour,
}

/// What the decoys are called: the same in every run, so that the next one finds what a killed one left.
struct Names {
    ours: InstallationId,
    /// Named like a session of another installation, and like one of ours: only a ledger tells that it is not.
    groups: [String; 2],
    link: String,
    table: String,
    folder: PathBuf,
}

impl Names {
    fn new(ours: InstallationId, folder: &Path) -> Self {
        let other = InstallationId(ours.0.map(|b| b ^ 0x5a));
        let name = format!("drums-{other}-s1g1");
        Self {
            ours,
            folder: folder.join(&name),
            groups: [name, format!("drums-{ours}-s65002g1")],
            link: format!("{}65001", SessionNet::link_prefix(ours)),
            table: format!("drums-{ours}"),
        }
    }

    /// In every hierarchy that has groups of sessions, with the index of the process that is in the group.
    fn group_folders(&self) -> Vec<(PathBuf, usize)> {
        ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
            .iter()
            .map(Path::new)
            // On cgroup v1 the top is no hierarchy.
            .filter(|root| root.join("cgroup.procs").is_file())
            .flat_map(|root| self.groups.iter().map(|g| root.join(g)).zip(0..))
            .collect()
    }

    fn remove(&self) {
        let _ = quiet(Command::new("nft").args(["delete", "table", "inet", &self.table]));
        // Its routes go with it.
        let _ = quiet(Command::new("ip").args(["link", "delete", &self.link]));
        for (group, _) in self.group_folders() {
            // Busy until the dead process has left it.
            let gone = wait_until(Duration::from_secs(5), || fs::remove_dir(&group).is_ok() || !group.exists());
            if !gone {
                eprintln!("{} stays behind: remove it by hand", group.display());
            }
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Decoys {
    /// Removes what a run left that was killed.
    pub fn clear(ours: InstallationId, agent: &Path, folder: &Path) -> Result<()> {
        Neighbour::clear(agent, folder)?;
        Names::new(ours, folder).remove();
        Ok(())
    }

    pub fn plant(ours: InstallationId, agent: &Path, tree: &Path, folder: &Path) -> Result<Self> {
        let names = Names::new(ours, folder);
        let neighbour = Neighbour::start(agent, tree, folder)?;
        let mut decoys = Self { names, processes: Vec::new(), neighbour };
        let names = &decoys.names;
        fs::create_dir(&names.folder).context("cannot plant a folder")?;
        fs::write(names.folder.join("file"), "a stranger's\n").context("cannot plant a file")?;
        run("ip", &["link", "add", &names.link, "address", MAC, "type", "bridge"])?;
        run("ip", &["link", "set", &names.link, "up"])?;
        run("ip", &["route", "add", ROUTE, "dev", &names.link])?;
        run("nft", &["add", "table", "inet", &names.table])?;
        for what in ["grouped", "named", "in a namespace", "with a reused number"] {
            let (program, arguments): (_, &[&str]) = match what {
                "in a namespace" => ("unshare", &["--net", "sleep", "infinity"]),
                _ => ("sleep", &["infinity"]),
            };
            let mut command = Command::new(program);
            if what == "named" {
                command.arg0(format!("drums-{ours}-s65001g1"));
            }
            end_with_parent(&mut command);
            let child = command.args(arguments).stdin(Stdio::null()).spawn();
            decoys.processes.push((what, child.with_context(|| format!("cannot plant a process: {program}"))?));
        }
        for (group, owner) in decoys.names.group_folders() {
            fs::create_dir(&group).with_context(|| format!("cannot plant {}", group.display()))?;
            let pid = decoys.processes[owner].1.id().to_string();
            fs::write(group.join("cgroup.procs"), pid).context("cannot plant a process in a group")?;
        }
        Ok(decoys)
    }

    /// A ledger that remembers things of ours under names and numbers that are a stranger's by now.
    pub fn haunt(&self, ledger: &Path) -> Result<()> {
        let pid = self.processes.last().context("no process was planted")?.1.id().cast_signed();
        let start = procfs::stat(pid)?.context("the planted process is gone")?.start;
        let mut ledger = Ledger::open(ledger)?;
        let another = Receipt::Inode(Inode { device: 0, inode: 1 });
        let rows = [
            (Resource::Process { role: "session".to_owned() }, Receipt::Process(Process { pid, start: start + 1 })),
            (Resource::Cgroup { name: self.names.groups[1].clone() }, another.clone()),
            (Resource::Dir { path: self.names.folder.clone() }, another),
            (Resource::Link { name: self.names.link.clone() }, Receipt::Made),
        ];
        let plan = format!("drums-{}-s65000g1", self.names.ours);
        let resources: Vec<Resource> = rows.iter().map(|(resource, _)| resource.clone()).collect();
        ledger.intend(&plan, &resources)?;
        for (index, (_, receipt)) in rows.iter().enumerate().filter(|(_, (_, receipt))| *receipt != Receipt::Made) {
            ledger.held(&plan, index, receipt)?;
        }
        Ok(())
    }

    /// What is gone or changed.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = self.neighbour.missing();
        for (what, child) in &self.processes {
            // A zombie's command line is empty.
            if fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(|c| !c.is_empty()) {
                continue;
            }
            missing.push(format!("decoy process ({what})"));
        }
        let names = &self.names;
        let address = fs::read_to_string(format!("/sys/class/net/{}/address", names.link)).unwrap_or_default();
        if address.trim() != MAC {
            missing.push(format!("decoy link {}", names.link));
        }
        if !said("ip", &["route", "show", ROUTE]).contains(&names.link) {
            missing.push(format!("decoy route {ROUTE}"));
        }
        if !said("nft", &["list", "tables", "inet"]).contains(&names.table) {
            missing.push(format!("decoy firewall table {}", names.table));
        }
        if fs::read_to_string(names.folder.join("file")).is_err() {
            missing.push(format!("decoy folder {}", names.folder.display()));
        }
        for (group, _) in names.group_folders() {
            if !fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|procs| !procs.trim().is_empty()) {
                missing.push(format!("decoy control group {}", group.display()));
            }
        }
        missing
    }
}

impl Drop for Decoys {
    fn drop(&mut self) {
        for (_, child) in &mut self.processes {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.names.remove();
    }
}

fn quiet(command: &mut Command) -> std::io::Result<std::process::ExitStatus> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {program}; `infra/prepare test` installs it"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot plant a decoy: {program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
}
