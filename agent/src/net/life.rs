//! How long the life lease is, for an agent that is started again and hears nobody: what it held must end some time.

use std::{fs, path::Path};

/// Below the spool's folder; named like no run's.
const FILE: &str = "life-lease-ms";

/// The life lease under which an earlier life of this agent was given work, milliseconds.
pub(crate) fn noted(spool: &Path) -> Option<u64> {
    fs::read_to_string(spool.join(FILE)).ok()?.trim().parse().ok()
}

/// Not waited for: it rarely changes, and each welcome says it again.
pub(super) fn note(spool: &Path, life_ms: u64) {
    if noted(spool) == Some(life_ms) {
        return;
    }
    let (path, new) = (spool.join(FILE), spool.join("life-lease-ms.new"));
    if let Err(e) = fs::write(&new, life_ms.to_string()).and_then(|()| fs::rename(&new, &path)) {
        tracing::warn!(path = %path.display(), error = %e, "the life lease was not written down");
    }
}
