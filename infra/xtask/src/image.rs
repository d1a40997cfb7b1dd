//! `cargo xtask image`: builds a workload tree. What is in one is `drums_infra`'s recipe.

use std::path::Path;

use anyhow::{Result, bail};

pub fn minimal(out: &Path) -> Result<()> {
    bail!("the recipe of the minimal image is not there yet (wanted at {})", out.display())
}
