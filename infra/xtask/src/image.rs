//! `cargo xtask image`: builds a workload tree, or the image of a server. What is in one is `drums_infra`'s recipe.

use std::path::Path;

use anyhow::{Context as _, Result};
use drums_common::digest::Sha256;
use drums_infra::image::{
    minimal::{self, build_guest},
    server,
};

use crate::workspace::{root, target_dir};

/// Writes the minimal workload into `out` and returns its digest. Packages are downloaded once into the build folder.
pub fn minimal(out: &Path) -> Result<Sha256> {
    let guest = build_guest(root()).context("cannot build the guest server")?;
    let options = minimal::Options { out: out.to_owned(), guest, cache: target_dir()?.join("packages") };
    let manifest =
        minimal::build(&options).with_context(|| format!("cannot build the minimal workload at {}", out.display()))?;
    Ok(manifest.sha256())
}

/// The image of a server in `out`, made there if it is not; returns the digest of what it is made of.
pub fn server(out: &Path) -> Result<Sha256> {
    let options = server::Options { out: out.to_owned(), cache: target_dir()?.join("packages") };
    let made =
        server::build(&options).with_context(|| format!("cannot build the image of a server at {}", out.display()))?;
    Ok(made.manifest.inputs_sha256)
}
