//! What is ours: resources on disk before they exist, until they are observed gone.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("cannot {what} the ledger {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the ledger {} is damaged at byte {at}: {why}; move it away only after drums-agent audit found nothing", path.display())]
    Damaged { path: PathBuf, at: u64, why: String },
}
