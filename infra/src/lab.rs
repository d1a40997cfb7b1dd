//! A small lab network on one machine: three network namespaces (coordinator, h1, h2), a bridge inside the
//! coordinator's, 198.18.0.0/24.
//!
//! The namespaces have no names and no mounts: they live in descriptors of this process and in the processes started in
//! them, so that nothing is left when those end, however they end. Entered by setns only: `ip netns exec` would remount
//! /sys and hide every cgroup.

use std::{
    fs::File,
    io,
    net::Ipv4Addr,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    process::Command,
};

use nix::sched::{CloneFlags, setns, unshare};

#[derive(Debug, thiserror::Error)]
pub enum LabError {
    #[error("cannot make a network namespace for {member}; this needs root")]
    Namespace {
        member: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot start `ip {arguments}` for {member}; iproute2 provides it")]
    Start {
        member: String,
        arguments: String,
        #[source]
        source: io::Error,
    },
    #[error("`ip {arguments}` failed for {member}: {said}")]
    Ip { member: String, arguments: String, said: String },
}

/// One namespace of the lab.
#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub address: Ipv4Addr,
    namespace: File,
}

impl Member {
    fn new(name: &str, address: Ipv4Addr) -> Result<Self, LabError> {
        let namespace = new_namespace().map_err(|source| LabError::Namespace { member: name.to_owned(), source })?;
        Ok(Self { name: name.to_owned(), address, namespace })
    }

    /// Makes `command` start inside this namespace.
    pub fn enter<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let namespace = self.namespace.try_clone();
        let hook = move || match &namespace {
            Ok(file) => setns(file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from),
            Err(e) => Err(io::Error::from(e.kind())),
        };
        // SAFETY: between fork and exec only setns is called, which is async-signal-safe; the descriptor is owned by
        // the closure and stays open until the exec.
        unsafe { command.pre_exec(hook) }
    }

    /// What a thread of this process calls to step into this namespace for good.
    pub fn entering(&self) -> io::Result<impl FnOnce() -> io::Result<()> + Send + 'static> {
        let namespace = self.namespace.try_clone()?;
        Ok(move || setns(&namespace, CloneFlags::CLONE_NEWNET).map_err(io::Error::from))
    }

    /// Gives a member with a bridge another address on it.
    pub fn also_at(&self, address: Ipv4Addr) -> Result<(), LabError> {
        self.ip(&format!("addr add {address}/24 dev br0"))
    }

    /// What the kernel calls this namespace, as in `/proc/PID/ns/net`.
    pub fn kernel_name(&self) -> Option<String> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.namespace.as_raw_fd())).ok()?;
        Some(link.display().to_string())
    }

    fn ip(&self, arguments: &str) -> Result<(), LabError> {
        let failed = |said: String| LabError::Ip { member: self.name.clone(), arguments: arguments.to_owned(), said };
        let mut command = Command::new("ip");
        command.args(arguments.split(' '));
        let output = self.enter(&mut command).output().map_err(|source| LabError::Start {
            member: self.name.clone(),
            arguments: arguments.to_owned(),
            source,
        })?;
        if output.status.success() {
            return Ok(());
        }
        Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// The coordinator's namespace with its bridge, and one namespace per host behind it.
#[derive(Debug)]
pub struct Lab {
    pub coordinator: Member,
    pub hosts: Vec<Member>,
}

impl Lab {
    /// Makes the namespaces and joins them; `hosts` in the order of their addresses.
    pub fn new(hosts: &[&str]) -> Result<Self, LabError> {
        let coordinator = Member::new("coordinator", Ipv4Addr::new(198, 18, 0, 1))?;
        coordinator.ip("link set lo up")?;
        coordinator.ip("link add br0 type bridge")?;
        coordinator.ip("addr add 198.18.0.1/24 dev br0")?;
        coordinator.ip("link set br0 up")?;
        let mut members = Vec::new();
        for (name, last) in hosts.iter().zip(11..) {
            let member = Member::new(name, Ipv4Addr::new(198, 18, 0, last))?;
            let port = format!("to-{name}");
            // The peer is made inside the host's namespace straight away, named by our descriptor of it.
            let peer = format!("/proc/{}/fd/{}", std::process::id(), member.namespace.as_raw_fd());
            coordinator.ip(&format!("link add {port} type veth peer name eth0 netns {peer}"))?;
            coordinator.ip(&format!("link set {port} master br0"))?;
            coordinator.ip(&format!("link set {port} up"))?;
            member.ip("link set lo up")?;
            member.ip(&format!("addr add {}/24 dev eth0", member.address))?;
            member.ip("link set eth0 up")?;
            members.push(member);
        }
        Ok(Self { coordinator, hosts: members })
    }

    pub fn host(&self, name: &str) -> Option<&Member> {
        self.hosts.iter().find(|m| m.name == name)
    }
}

/// A new network namespace, made by a thread that ends with it: this process stays where it is.
fn new_namespace() -> io::Result<File> {
    let made = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        File::open("/proc/thread-self/ns/net")
    });
    made.join().unwrap_or_else(|_| Err(io::Error::other("the thread that makes the namespace died")))
}

#[cfg(test)]
mod tests {
    use std::{process::Stdio, time::Duration};

    use super::*;
    use crate::leakgate::{Scope, Snapshot, settle};

    fn inside(member: &Member, script: &str) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        let output = member.enter(&mut command).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn live_members_reach_each_other_see_the_cgroups_and_leave_nothing() {
        let before = Snapshot::take().unwrap();
        let lab = Lab::new(&["h1", "h2"]).unwrap();
        let h1 = lab.host("h1").unwrap();
        let said = inside(h1, "busybox ping -c 1 -W 5 198.18.0.1 && busybox ping -c 1 -W 5 198.18.0.12");
        assert_eq!(said.matches("1 packets received").count(), 2, "{said}");
        let names = [&lab.coordinator, h1, lab.host("h2").unwrap()].map(|m| m.kernel_name().unwrap());
        assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
        let here = std::fs::read_dir("/sys/fs/cgroup").unwrap().count();
        assert_eq!(inside(h1, "ls /sys/fs/cgroup | wc -l").trim(), here.to_string());
        drop(lab);
        let after = settle(&before, &Scope::from_env(names.to_vec()), Duration::from_secs(10)).unwrap();
        let links_and_namespaces: Vec<_> = after.iter().filter(|l| l.kind == "link" || l.kind == "namespace").collect();
        assert!(links_and_namespaces.is_empty(), "{links_and_namespaces:?}");
    }
}
