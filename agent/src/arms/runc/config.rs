//! The OCI configuration of a runc container: the same namespaces, mounts, devices, environment and system call filter
//! that a drums session gets, so that the two differ in who makes them and in nothing else.

use std::path::Path;

use oci_spec::{
    OciSpecError,
    runtime::{
        Arch, Capabilities, Capability, LinuxBuilder, LinuxCapabilitiesBuilder, LinuxNamespaceBuilder,
        LinuxNamespaceType, LinuxSeccompAction, LinuxSeccompBuilder, LinuxSyscallBuilder, Mount, MountBuilder,
        ProcessBuilder, RootBuilder, Spec, SpecBuilder, UserBuilder,
    },
};

/// What differs from container to container.
pub struct Container<'a> {
    pub hostname: &'a str,
    pub argv: &'a [String],
    pub env: &'a [(String, String)],
    /// Group of the container's processes, from the top of each hierarchy.
    pub cgroup: &'a str,
    /// A path that leads to the network namespace while runc runs.
    pub netns: &'a Path,
    pub capabilities: Capabilities,
}

fn mount(destination: &str, kind: &str, options: &[&str]) -> Result<Mount, OciSpecError> {
    MountBuilder::default()
        .destination(destination)
        .typ(kind)
        .source(kind)
        .options(options.iter().map(|o| (*o).to_owned()).collect::<Vec<_>>())
        .build()
}

/// The capabilities of the calling process: a drums session inherits them, so a container gets them by name. All that a
/// machine's root has, which in a sandbox is not everything.
pub fn held(status: &str) -> Capabilities {
    use Capability as C;
    // In the kernel's order: the index is the bit.
    const BY_NUMBER: [Capability; 41] = [
        C::Chown,
        C::DacOverride,
        C::DacReadSearch,
        C::Fowner,
        C::Fsetid,
        C::Kill,
        C::Setgid,
        C::Setuid,
        C::Setpcap,
        C::LinuxImmutable,
        C::NetBindService,
        C::NetBroadcast,
        C::NetAdmin,
        C::NetRaw,
        C::IpcLock,
        C::IpcOwner,
        C::SysModule,
        C::SysRawio,
        C::SysChroot,
        C::SysPtrace,
        C::SysPacct,
        C::SysAdmin,
        C::SysBoot,
        C::SysNice,
        C::SysResource,
        C::SysTime,
        C::SysTtyConfig,
        C::Mknod,
        C::Lease,
        C::AuditWrite,
        C::AuditControl,
        C::Setfcap,
        C::MacOverride,
        C::MacAdmin,
        C::Syslog,
        C::WakeAlarm,
        C::BlockSuspend,
        C::AuditRead,
        C::Perfmon,
        C::Bpf,
        C::CheckpointRestore,
    ];
    let mask = status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .and_then(|v| u64::from_str_radix(v.trim(), 16).ok())
        .unwrap_or_default();
    BY_NUMBER.into_iter().enumerate().filter(|(bit, _)| mask >> bit & 1 == 1).map(|(_, c)| c).collect()
}

impl Container<'_> {
    pub fn spec(&self) -> Result<Spec, OciSpecError> {
        let namespace = |kind| LinuxNamespaceBuilder::default().typ(kind).build();
        let capabilities = LinuxCapabilitiesBuilder::default()
            .bounding(self.capabilities.clone())
            .effective(self.capabilities.clone())
            .permitted(self.capabilities.clone())
            .inheritable(Capabilities::default())
            .ambient(Capabilities::default())
            .build()?;
        let process = ProcessBuilder::default()
            .terminal(false)
            .user(UserBuilder::default().uid(0_u32).gid(0_u32).build()?)
            .args(self.argv.to_vec())
            .env(self.env.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>())
            .cwd("/")
            .capabilities(capabilities)
            .rlimits(Vec::new())
            .no_new_privileges(false)
            .build()?;
        // ENOSPC is what a machine without free keys answers; CRIU restores no protection keys.
        let pkeys = LinuxSyscallBuilder::default()
            .names(vec!["pkey_alloc".to_owned()])
            .action(LinuxSeccompAction::ScmpActErrno)
            .errno_ret(28_u32)
            .build()?;
        let linux = LinuxBuilder::default()
            .cgroups_path(self.cgroup)
            .namespaces(vec![
                namespace(LinuxNamespaceType::Mount)?,
                namespace(LinuxNamespaceType::Pid)?,
                namespace(LinuxNamespaceType::Ipc)?,
                namespace(LinuxNamespaceType::Uts)?,
                LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Network).path(self.netns).build()?,
            ])
            .seccomp(
                LinuxSeccompBuilder::default()
                    .default_action(LinuxSeccompAction::ScmpActAllow)
                    .architectures(vec![Arch::ScmpArchX86_64])
                    .syscalls(vec![pkeys])
                    .build()?,
            )
            .masked_paths(Vec::new())
            .readonly_paths(Vec::new())
            .build()?;
        SpecBuilder::default()
            .version("1.0.2")
            .hostname(self.hostname)
            .process(process)
            .root(RootBuilder::default().path("rootfs").readonly(false).build()?)
            .mounts(vec![
                mount("/proc", "proc", &["nosuid", "nodev", "noexec"])?,
                mount("/sys", "sysfs", &["nosuid", "nodev", "noexec", "ro"])?,
                // No tmpfs on /dev: its nodes live in the overlay's upper layer, as in a drums session, where CRIU
                // need not pack and unpack them.
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=620"])?,
            ])
            .linux(linux)
            .build()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_configuration_says_what_a_drums_session_has() {
        let argv = ["/sbin/drums-guest".to_owned(), "init".to_owned()];
        let env = [("DRUMS_PORT".to_owned(), "5000".to_owned())];
        let container = Container {
            hostname: "s7-x",
            argv: &argv,
            env: &env,
            cgroup: "/drums-0badcafe-s7g1/session",
            netns: Path::new("/proc/42/fd/9"),
            capabilities: held("Name:\tx\nCapEff:\t0000000000200021\n"),
        };
        let v: Value = serde_json::to_value(container.spec().unwrap()).unwrap();
        assert_eq!(v["process"]["args"], serde_json::json!(argv));
        assert_eq!(v["process"]["env"], serde_json::json!(["DRUMS_PORT=5000"]));
        assert_eq!(v["process"]["terminal"], false);
        let mut capabilities: Vec<&str> =
            v["process"]["capabilities"]["effective"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        capabilities.sort_unstable();
        assert_eq!(capabilities, ["CAP_CHOWN", "CAP_KILL", "CAP_SYS_ADMIN"]);
        assert_eq!(v["linux"]["cgroupsPath"], "/drums-0badcafe-s7g1/session");
        let namespaces = v["linux"]["namespaces"].as_array().unwrap();
        assert_eq!(namespaces.len(), 5);
        assert!(namespaces.iter().any(|n| n["type"] == "network" && n["path"] == "/proc/42/fd/9"));
        assert_eq!(v["linux"]["seccomp"]["syscalls"][0]["errnoRet"], 28);
        let mounts: Vec<&str> =
            v["mounts"].as_array().unwrap().iter().filter_map(|m| m["destination"].as_str()).collect();
        assert_eq!(mounts, ["/proc", "/sys", "/dev/pts"]);
        // Nothing that a drums session does not have.
        for absent in ["rlimits", "apparmorProfile", "selinuxLabel"] {
            assert!(v["process"][absent].as_array().is_none_or(Vec::is_empty), "{absent}");
        }
        assert!(v["linux"]["maskedPaths"].as_array().is_none_or(Vec::is_empty));
        assert!(v["linux"]["resources"]["memory"].is_null());
    }
}
