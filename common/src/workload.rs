//! Layout of a workload folder, and what a virtual machine needs to boot it.
//!
//! ```text
//! DIR/manifest.json       WorkloadManifest over everything below, in canonical form: its SHA-256 names the workload
//! DIR/tree/               the userland, the same in every arm
//! DIR/boot/boot.json      BootManifest
//! DIR/boot/vmlinux        uncompressed guest kernel, booted by PVH
//! DIR/boot/modules.cpio   what only a virtual machine has: kernel modules, their list, and `/init`
//! ```
//!
//! A virtual machine boots a cpio of `tree/` followed by `modules.cpio`. The first is made from the verified tree on the
//! host, so no arm can run another userland than the one that the manifest names.

use serde::{Deserialize, Serialize};

use crate::digest::Sha256;

pub const MANIFEST: &str = "manifest.json";
pub const TREE: &str = "tree";
pub const BOOT: &str = "boot";
pub const BOOT_MANIFEST: &str = "boot/boot.json";
pub const KERNEL: &str = "boot/vmlinux";
pub const MODULES: &str = "boot/modules.cpio";

/// The guest's init and server inside the tree; every arm starts it as `GUEST init`.
pub const GUEST: &str = "/sbin/drums-guest";

/// Version of the folder's layout and of `WorkloadManifest`.
pub const LAYOUT_VERSION: u32 = 1;

/// What a host may refuse before it reads on: an artifact comes from outside.
pub const MAX_MANIFEST_BYTES: u64 = 16 << 20;
pub const MAX_FILES: usize = 200_000;
pub const MAX_TOTAL_BYTES: u64 = 16 << 30;

/// The guest kernel and how to start it. Part of the workload, so its digest covers the kernel too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootManifest {
    pub version: u32,
    pub kernel_release: String,
    /// Debian package and version that the kernel came from.
    pub kernel_package: String,
    pub kernel_package_version: String,
    pub kernel_sha256: Sha256,
    pub modules_sha256: Sha256,
    /// In the order in which they load.
    pub modules: Vec<String>,
    /// Kernel parameters of every boot; the session's own `drums.*` follow.
    pub command_line: String,
    /// Whether the kernel has a driver for the machine's generation id. Without one a restored kernel keeps its
    /// template's random state until the post-restore call stirs it.
    pub vmgenid: bool,
}
