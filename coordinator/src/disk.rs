//! Whether a home has room to begin with.

use std::{io, path::Path};

/// A store's first tables and its log are a few MiB; with less than this, the first evidence would not fit.
pub const MIN_TO_START: u64 = 64 << 20;

/// Bytes that are free for us where `dir` is.
pub fn free(dir: &Path) -> io::Result<u64> {
    let s = nix::sys::statvfs::statvfs(dir)?;
    Ok(s.blocks_available() * s.fragment_size())
}
