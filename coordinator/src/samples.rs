//! Plain data that the unit tests of several modules begin with.

use drums_common::machine::{Accelerator, HostFacts, MachineIdentity};

/// A machine that lacks nothing.
pub fn facts(identity: MachineIdentity) -> HostFacts {
    HostFacts {
        identity,
        hostname: "machine".into(),
        kernel: "6.18".into(),
        os: "Debian 12".into(),
        cpu_model: "cpu".into(),
        microcode: "1".into(),
        mitigations: Default::default(),
        cpus: 2,
        memory_bytes: 1 << 34,
        disk_free_bytes: 1 << 34,
        cgroup_version: 1,
        accelerator: Accelerator::Tcg,
        accelerator_detail: String::new(),
        tools: Default::default(),
        unfit: Default::default(),
    }
}
