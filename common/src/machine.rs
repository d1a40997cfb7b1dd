//! Facts of a host, and which hosts are one machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    arm::{ArmKind, Mechanism},
    digest::Sha256,
};

/// What tells one machine from another: probed, not declared. Boot id alone is not enough (a clone of an image that
/// fakes it, a host seen before and after a reboot), so several components are kept and compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineIdentity {
    pub boot_id: String,
    /// `/etc/machine-id`, empty when there is none.
    pub machine_id: String,
    /// DMI product UUID, empty when unreadable.
    pub dmi_uuid: String,
    /// Boot time (`btime` of /proc/stat), seconds since 1970.
    pub btime_s: u64,
    /// CPU model, logical CPUs and memory: never enough to call two machines one, but a difference tells them apart.
    pub hardware: String,
}

impl MachineIdentity {
    /// True if both describe one machine: the same hardware, and the same boot or the same non-empty DMI UUID.
    pub fn same_machine(&self, other: &Self) -> bool {
        if self.hardware != other.hardware {
            return false;
        }
        let same = |a: &str, b: &str| !a.is_empty() && a == b;
        same(&self.boot_id, &other.boot_id) || same(&self.dmi_uuid, &other.dmi_uuid)
    }

    /// A stable name for the machine in tables: 12 hexadecimal digits.
    pub fn key(&self) -> String {
        let id = if self.dmi_uuid.is_empty() { &self.boot_id } else { &self.dmi_uuid };
        Sha256::of(format!("{id}\n{}", self.hardware).as_bytes()).short()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    Tcg,
    KvmOnMetal,
    KvmNested,
    /// No QEMU, so there is none.
    None,
}

/// One tool that an arm needs, as found on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    pub path: String,
    pub version: String,
    pub sha256: Sha256,
}

/// What a host says of itself after the preflight tried everything out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    pub identity: MachineIdentity,
    pub hostname: String,
    pub kernel: String,
    pub os: String,
    pub cpu_model: String,
    pub microcode: String,
    pub mitigations: BTreeMap<String, String>,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub disk_free_bytes: u64,
    /// 1 or 2; hybrid counts as 1.
    pub cgroup_version: u8,
    pub accelerator: Accelerator,
    /// Why the accelerator is what it is, in words.
    pub accelerator_detail: String,
    /// `criu`, `runc`, `qemu`, `kernel` (the guest's vmlinux), `agent`, by name.
    pub tools: BTreeMap<String, Tool>,
    /// Why an arm cannot run here, per kind; an absent kind can run.
    pub unfit: BTreeMap<ArmKind, String>,
}

impl HostFacts {
    pub fn can_run(&self, kind: ArmKind) -> bool {
        !self.unfit.contains_key(&kind)
    }

    /// The stratum of inference: hosts of different strata are never pooled.
    pub fn stratum(&self, mechanism: Mechanism) -> String {
        let accelerator = match (mechanism, self.accelerator) {
            (Mechanism::Qemu, Accelerator::Tcg) => "tcg",
            (Mechanism::Qemu, Accelerator::KvmOnMetal) => "kvm on metal",
            (Mechanism::Qemu, Accelerator::KvmNested) => "kvm nested",
            _ => "none",
        };
        format!("{} / {} / cgroup v{} / {accelerator}", self.cpu_model, self.kernel, self.cgroup_version)
    }
}
