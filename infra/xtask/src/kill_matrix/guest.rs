//! Rows on a guest that boots: a kernel that hangs, an agent that is killed or stopped, and a host that is cut off, each
//! ended by its own timer or its watchdog on a real kernel (`how`: `guest`), or seen to be ended by nothing of its own.

use anyhow::Result;

use super::row::Row;

/// There are none yet: a server's image is not built here.
#[expect(clippy::unnecessary_wraps, reason = "a boot that fails is an error of the matrix, not a row out of bound")]
pub fn rows() -> Result<Vec<Row>> {
    Ok(Vec::new())
}
