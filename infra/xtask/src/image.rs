//! `cargo xtask image`: builds a workload tree. What is in one is `drums_infra`'s recipe.

use std::path::Path;

use anyhow::{Context as _, Result};
use drums_common::digest::Sha256;
use drums_infra::image::minimal::{Options, build, build_guest};

use crate::workspace::{root, target_dir};

/// Writes the minimal workload into `out` and returns its digest. Packages are downloaded once into the build folder.
pub fn minimal(out: &Path) -> Result<Sha256> {
    let guest = build_guest(root()).context("cannot build the guest server")?;
    let options = Options { out: out.to_owned(), guest, cache: target_dir()?.join("packages") };
    let manifest =
        build(&options).with_context(|| format!("cannot build the minimal workload at {}", out.display()))?;
    Ok(manifest.sha256())
}
