//! What this host is: probed, never declared.
//!
//! `Readings` are texts as the kernel gave them; `Readings::describe` is a pure function of them. Which tools there are,
//! what QEMU's accelerator really does and why an arm cannot run are others' findings (`setup`, the engine), handed in.

use std::{collections::BTreeMap, fs, path::Path};

use drums_common::{
    arm::ArmKind,
    machine::{Accelerator, HostFacts, MachineIdentity, Tool},
};

/// Texts that describe a machine, as read. An empty text is a source that this machine does not have.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    pub cpuinfo: String,
    pub meminfo: String,
    pub stat: String,
    pub os_release: String,
    pub boot_id: String,
    pub machine_id: String,
    pub dmi_uuid: String,
    pub kernel: String,
    pub hostname: String,
    /// `/sys/devices/system/cpu/vulnerabilities`, by name.
    pub vulnerabilities: BTreeMap<String, String>,
    pub mounts: String,
    pub disk_free_bytes: u64,
}

/// What others found out by trying.
#[derive(Clone, Debug)]
pub struct Findings {
    pub tools: BTreeMap<String, Tool>,
    pub accelerator: Accelerator,
    pub accelerator_detail: String,
    pub unfit: BTreeMap<ArmKind, String>,
}

impl Readings {
    /// Reads this machine. `state` is the folder whose file system counts as the host's disk.
    pub fn take(state: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let uname = nix::sys::utsname::uname().ok();
        let word = |f: fn(&nix::sys::utsname::UtsName) -> &std::ffi::OsStr| {
            uname.as_ref().map(|u| f(u).to_string_lossy().into_owned()).unwrap_or_default()
        };
        Self {
            cpuinfo: text("/proc/cpuinfo"),
            meminfo: text("/proc/meminfo"),
            stat: text("/proc/stat"),
            os_release: text("/etc/os-release"),
            boot_id: text("/proc/sys/kernel/random/boot_id"),
            machine_id: text("/etc/machine-id"),
            dmi_uuid: text("/sys/class/dmi/id/product_uuid"),
            kernel: format!(
                "{} {}",
                word(nix::sys::utsname::UtsName::release),
                word(nix::sys::utsname::UtsName::machine)
            ),
            hostname: word(nix::sys::utsname::UtsName::nodename),
            vulnerabilities: vulnerabilities(Path::new("/sys/devices/system/cpu/vulnerabilities")),
            mounts: text("/proc/self/mounts"),
            disk_free_bytes: nix::sys::statvfs::statvfs(state)
                .map(|s| s.blocks_available().saturating_mul(s.fragment_size()))
                .unwrap_or(0),
        }
    }

    /// The facts that these texts and findings amount to.
    pub fn describe(&self, findings: Findings) -> HostFacts {
        let cpu_model = cpu_field(&self.cpuinfo, "model name").unwrap_or("unknown").to_owned();
        let cpus = u32::try_from(self.cpuinfo.lines().filter(|l| l.starts_with("processor")).count()).unwrap_or(0);
        let memory_bytes = memory_bytes(&self.meminfo);
        HostFacts {
            identity: MachineIdentity {
                boot_id: self.boot_id.trim().to_owned(),
                machine_id: self.machine_id.trim().to_owned(),
                dmi_uuid: usable_uuid(&self.dmi_uuid),
                btime_s: btime_s(&self.stat),
                hardware: format!("{cpu_model}, {cpus} CPUs, {} MiB", memory_bytes >> 20),
            },
            hostname: self.hostname.trim().to_owned(),
            kernel: self.kernel.trim().to_owned(),
            os: os_name(&self.os_release),
            microcode: cpu_field(&self.cpuinfo, "microcode").unwrap_or("unknown").to_owned(),
            cpu_model,
            mitigations: self.vulnerabilities.iter().map(|(k, v)| (k.clone(), v.trim().to_owned())).collect(),
            cpus,
            memory_bytes,
            disk_free_bytes: self.disk_free_bytes,
            cgroup_version: cgroup_version(&self.mounts),
            accelerator: findings.accelerator,
            accelerator_detail: findings.accelerator_detail,
            tools: findings.tools,
            unfit: findings.unfit,
        }
    }
}

fn vulnerabilities(folder: &Path) -> BTreeMap<String, String> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| Some((e.file_name().into_string().ok()?, fs::read_to_string(e.path()).ok()?)))
        .collect()
}

fn cpu_field<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    cpuinfo.lines().find_map(|l| {
        let (k, v) = l.split_once(':')?;
        (k.trim() == name).then(|| v.trim())
    })
}

fn memory_bytes(meminfo: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .unwrap_or(0)
        .saturating_mul(1024)
}

fn btime_s(stat: &str) -> u64 {
    stat.lines().find_map(|l| l.strip_prefix("btime ")?.trim().parse().ok()).unwrap_or(0)
}

fn os_name(os_release: &str) -> String {
    os_release
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME="))
        .map_or_else(|| "unknown".to_owned(), |v| v.trim().trim_matches('"').to_owned())
}

/// Firmware that fills the field with one digit tells no machines apart.
fn usable_uuid(text: &str) -> String {
    let t = text.trim();
    let mut digits = t.chars().filter(char::is_ascii_hexdigit);
    let first = digits.next();
    if first.is_none() || digits.all(|d| Some(d) == first) { String::new() } else { t.to_owned() }
}

/// 2 when the unified hierarchy is the only one; a hybrid counts as 1, because controllers sit in version 1 there.
fn cgroup_version(mounts: &str) -> u8 {
    let any_v1 = mounts.lines().any(|l| {
        let mut w = l.split(' ').skip(2);
        w.next() == Some("cgroup") && w.next().is_some_and(|o| !o.contains("name="))
    });
    let any_v2 = mounts.lines().any(|l| l.split(' ').nth(2) == Some("cgroup2"));
    if any_v2 && !any_v1 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Findings {
        Findings {
            tools: BTreeMap::new(),
            accelerator: Accelerator::Tcg,
            accelerator_detail: "no guest answered with accel=kvm".into(),
            unfit: BTreeMap::from([(ArmKind::RuncCold, "runc is not installed: run drums-agent setup".into())]),
        }
    }

    fn recorded() -> Readings {
        Readings {
            cpuinfo: "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nmicrocode\t: 0x1000065\n\n\
                processor\t: 1\nmodel name\t: AMD EPYC\nmicrocode\t: 0x1000065\n"
                .into(),
            meminfo: "MemTotal:       24683656 kB\nMemFree:         9728872 kB\n".into(),
            stat: "cpu  1 2 3 4\nbtime 1795980117\n".into(),
            os_release: "NAME=\"Debian GNU/Linux\"\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n".into(),
            boot_id: "4f1c2c4e-0f0f-4c55-9d1c-6f4c2b7d6a11\n".into(),
            machine_id: "3d1219c7c4c5404aaa1f6d2a48adfda4\n".into(),
            dmi_uuid: String::new(),
            kernel: "6.18.44 x86_64".into(),
            hostname: "h1\n".into(),
            vulnerabilities: BTreeMap::from([("retbleed".into(), "Mitigation: untrained return thunk\n".into())]),
            mounts: "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
                .into(),
            disk_free_bytes: 1 << 33,
        }
    }

    #[test]
    fn a_recorded_machine_is_described() {
        let f = recorded().describe(findings());
        assert_eq!(f.identity.hardware, "AMD EPYC, 2 CPUs, 24105 MiB");
        assert_eq!(f.identity.boot_id, "4f1c2c4e-0f0f-4c55-9d1c-6f4c2b7d6a11");
        assert_eq!((f.cpus, f.cgroup_version, f.identity.btime_s), (2, 1, 1_795_980_117));
        assert_eq!(f.os, "Debian GNU/Linux 12 (bookworm)");
        assert_eq!(f.microcode, "0x1000065");
        assert_eq!(f.mitigations["retbleed"], "Mitigation: untrained return thunk");
        assert!(!f.can_run(ArmKind::RuncCold) && f.can_run(ArmKind::DrumsCold));
    }

    #[test]
    fn cgroup_versions_are_told_apart() {
        assert_eq!(cgroup_version("cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"), 2);
        // systemd's own named hierarchy holds no controllers.
        let named =
            "cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0";
        assert_eq!(cgroup_version(named), 2);
        assert_eq!(cgroup_version(&recorded().mounts), 1);
        assert_eq!(cgroup_version(""), 1);
    }

    #[test]
    fn a_uuid_of_one_digit_is_none() {
        assert_eq!(usable_uuid("00000000-0000-0000-0000-000000000000\n"), "");
        assert_eq!(usable_uuid("FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF"), "");
        assert_eq!(usable_uuid("4c4c4544-0042-3510-8051-b4c04f4b3033\n"), "4c4c4544-0042-3510-8051-b4c04f4b3033");
        assert_eq!(usable_uuid(""), "");
    }

    #[test]
    fn missing_sources_are_no_panic() {
        let f = Readings::default().describe(findings());
        assert_eq!((f.cpus, f.memory_bytes, f.cpu_model.as_str()), (0, 0, "unknown"));
    }

    #[test]
    fn this_machine_is_described() {
        let f = Readings::take(Path::new("/")).describe(findings());
        assert!(f.cpus > 0 && f.memory_bytes > 0 && !f.identity.boot_id.is_empty() && !f.kernel.is_empty());
        assert!(f.disk_free_bytes > 0);
    }
}
