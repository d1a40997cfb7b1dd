//! Things that look like ours and are not. Nobody may touch them.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use drums_agent::sys::SessionNet;
use drums_common::ids::InstallationId;
use drums_infra::fleet::wait_until;

/// Removed again when dropped.
pub struct Decoys {
    /// Of another installation: a group with a live process in it, in every hierarchy that has groups of sessions.
    cgroups: Vec<PathBuf>,
    /// Named like a link of ours, with a stranger's MAC.
    link: String,
    /// Named like a session's folder of another installation.
    folder: PathBuf,
    /// A process in the group, one whose command line is ours, one in a network namespace of its own.
    processes: Vec<(&'static str, Child)>,
}

impl Decoys {
    pub fn plant(ours: InstallationId, folder: &Path) -> Result<Self> {
        let other = InstallationId(ours.0.map(|b| b ^ 0x5a));
        let name = format!("drums-{other}-s1g1");
        let mut decoys = Self {
            cgroups: Vec::new(),
            link: format!("{}65001", SessionNet::link_prefix(ours)),
            folder: folder.join(&name),
            processes: Vec::new(),
        };
        fs::create_dir(&decoys.folder).context("cannot plant a folder")?;
        fs::write(decoys.folder.join("file"), "a stranger's\n").context("cannot plant a file")?;
        let status = Command::new("ip")
            .args(["link", "add", &decoys.link, "address", "02:aa:bb:cc:dd:ee", "type", "bridge"])
            .status()
            .context("cannot run ip; install iproute2")?;
        anyhow::ensure!(
            status.success(),
            "cannot plant a link: ip ended with {status}; an earlier run that was killed leaves it: ip link delete {}",
            decoys.link
        );
        for (what, program) in [("grouped", "sleep"), ("named", "sleep"), ("in a namespace", "unshare")] {
            let mut command = Command::new(program);
            match what {
                "named" => command.arg0(format!("drums-{ours}-s65001g1")).arg("infinity"),
                "grouped" => command.arg("infinity"),
                _ => command.args(["--net", "sleep", "infinity"]),
            };
            let child =
                command.stdin(Stdio::null()).spawn().with_context(|| format!("cannot plant a process: {program}"))?;
            decoys.processes.push((what, child));
        }
        let pid = decoys.processes[0].1.id().to_string();
        for root in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"] {
            let root = Path::new(root);
            // On cgroup v1 the top is no hierarchy.
            if root.join("cgroup.procs").is_file() {
                let group = root.join(&name);
                fs::create_dir(&group).with_context(|| {
                    format!("cannot plant {0}; an earlier run that was killed leaves it: rmdir {0}", group.display())
                })?;
                decoys.cgroups.push(group.clone());
                fs::write(group.join("cgroup.procs"), &pid).context("cannot plant a process in a group")?;
            }
        }
        Ok(decoys)
    }

    /// What is gone or changed.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for (what, child) in &self.processes {
            // A zombie's command line is empty.
            if fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(|c| !c.is_empty()) {
                continue;
            }
            missing.push(format!("decoy process ({what})"));
        }
        let address = fs::read_to_string(format!("/sys/class/net/{}/address", self.link)).unwrap_or_default();
        if address.trim() != "02:aa:bb:cc:dd:ee" {
            missing.push(format!("decoy link {}", self.link));
        }
        if fs::read_to_string(self.folder.join("file")).is_err() {
            missing.push(format!("decoy folder {}", self.folder.display()));
        }
        for group in &self.cgroups {
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
        let _ = Command::new("ip").args(["link", "delete", &self.link]).status();
        for group in &self.cgroups {
            // Busy until the dead process has left it.
            let gone = wait_until(Duration::from_secs(5), || fs::remove_dir(group).is_ok() || !group.exists());
            if !gone {
                eprintln!("{} stays behind: remove it by hand", group.display());
            }
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
