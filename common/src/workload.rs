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

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{digest::Sha256, experiment::WorkloadManifest};

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

/// Why a text is not a manifest that anybody should act on.
#[derive(Debug, thiserror::Error)]
pub enum BadManifest {
    #[error("the manifest has SHA-256 {got}, not {expected}")]
    Digest { expected: Sha256, got: Sha256 },
    #[error("the manifest is larger than {MAX_MANIFEST_BYTES} bytes")]
    TooLarge,
    #[error("the manifest cannot be read")]
    Shape(#[source] serde_json::Error),
    /// Its digest names the workload, so there must be only one way to write it.
    #[error("the manifest is not in canonical form")]
    NotCanonical,
    #[error("the manifest is not acceptable: {0}")]
    Rule(String),
}

/// Reads a manifest that came from outside; `expected` is the digest under which it was asked for, if it was.
pub fn parse(text: &[u8], expected: Option<Sha256>) -> Result<WorkloadManifest, BadManifest> {
    if text.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(BadManifest::TooLarge);
    }
    let got = Sha256::of(text);
    if let Some(expected) = expected.filter(|e| *e != got) {
        return Err(BadManifest::Digest { expected, got });
    }
    let manifest: WorkloadManifest = serde_json::from_slice(text).map_err(BadManifest::Shape)?;
    check(&manifest)?;
    if manifest.canonical().as_bytes() == text { Ok(manifest) } else { Err(BadManifest::NotCanonical) }
}

/// Rules that need no file: layout, bounds, and paths that cannot lead out of the folder. A parent of every entry is an
/// entry of kind `dir` itself, so nothing is ever written through a symbolic link.
pub fn check(manifest: &WorkloadManifest) -> Result<(), BadManifest> {
    broken_rule(manifest).map_or(Ok(()), |why| Err(BadManifest::Rule(why)))
}

fn broken_rule(manifest: &WorkloadManifest) -> Option<String> {
    if manifest.version != LAYOUT_VERSION {
        return Some(format!("its version is {}, this build knows {LAYOUT_VERSION}", manifest.version));
    }
    if manifest.files.len() > MAX_FILES {
        return Some(format!("it names more than {MAX_FILES} files"));
    }
    if manifest.files.get(TREE).is_none_or(|f| f.kind != "dir") {
        return Some(format!("it has no folder {TREE}"));
    }
    let mut total: u64 = 0;
    for (name, file) in &manifest.files {
        let path = Path::new(name);
        let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
        let spelled = path.components().collect::<PathBuf>().as_os_str() == name.as_str();
        let top = name.split('/').next().unwrap_or_default();
        if !plain || !spelled || name.contains('\0') || !matches!(top, TREE | BOOT) {
            return Some(format!("{name:?} is not a plain path inside {TREE} or {BOOT}"));
        }
        if let Some((parent, _)) = name.rsplit_once('/')
            && manifest.files.get(parent).is_none_or(|p| p.kind != "dir")
        {
            return Some(format!("{name:?} is not in a folder of the manifest"));
        }
        let fine = match file.kind.as_str() {
            "file" => file.target.is_empty(),
            "dir" => file.target.is_empty() && file.bytes == 0,
            "symlink" => !file.target.is_empty() && file.bytes == 0 && !file.target.contains('\0'),
            _ => false,
        };
        if !fine || file.mode > 0o7777 {
            return Some(format!("{name:?} is neither a proper file nor a dir nor a symlink"));
        }
        total = total.saturating_add(file.bytes);
    }
    if total > MAX_TOTAL_BYTES {
        return Some(format!("its files have {total} bytes, more than {MAX_TOTAL_BYTES}"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::ManifestFile;

    fn manifest(files: &[(&str, &str, u64, &str)]) -> WorkloadManifest {
        let files = files
            .iter()
            .map(|(name, kind, bytes, target)| {
                let sha256 = Sha256::of(target.as_bytes());
                let (kind, target) = ((*kind).to_owned(), (*target).to_owned());
                ((*name).to_owned(), ManifestFile { kind, mode: 0o755, bytes: *bytes, sha256, target })
            })
            .collect();
        WorkloadManifest { version: LAYOUT_VERSION, files }
    }

    #[test]
    fn manifests_that_lead_out_or_beyond_bounds_are_refused() {
        let tree = ("tree", "dir", 0, "");
        for (files, word) in [
            (vec![tree, ("tree/../../x", "file", 0, "")], "plain path"),
            (vec![tree, ("/etc", "dir", 0, ""), ("/etc/x", "file", 0, "")], "plain path"),
            (vec![tree, ("tree//x", "file", 0, "")], "plain path"),
            (vec![tree, ("tree/./x", "file", 0, "")], "plain path"),
            (vec![tree, ("tree/", "file", 0, "")], "plain path"),
            (vec![tree, ("", "file", 0, "")], "plain path"),
            (vec![tree, ("manifest.json", "file", 0, "")], "plain path"),
            (vec![tree, ("tree/a/b", "file", 0, "")], "folder of the manifest"),
            (vec![tree, ("tree/a", "symlink", 0, "/etc"), ("tree/a/b", "file", 0, "")], "folder of the manifest"),
            (vec![tree, ("tree/a", "device", 0, "")], "neither"),
            (vec![tree, ("tree/a", "symlink", 0, "")], "neither"),
            (vec![tree, ("tree/a", "file", MAX_TOTAL_BYTES + 1, "")], "more than"),
            (vec![], "no folder tree"),
        ] {
            let error = check(&manifest(&files)).unwrap_err().to_string();
            assert!(error.contains(word), "{files:?}: {error}");
        }
    }

    #[test]
    fn a_manifest_reads_back_under_its_own_digest_and_in_one_form_only() {
        let m = manifest(&[("tree", "dir", 0, ""), ("tree/a", "file", 1, "")]);
        let text = m.canonical();
        assert_eq!(parse(text.as_bytes(), Some(m.sha256())).unwrap(), m);
        assert!(matches!(parse(text.as_bytes(), Some(Sha256::of(b"other"))), Err(BadManifest::Digest { .. })));
        assert!(matches!(parse(format!("{text} ").as_bytes(), None), Err(BadManifest::NotCanonical)));
        assert!(matches!(parse(b"{}", None), Err(BadManifest::Shape(_))));
    }
}
