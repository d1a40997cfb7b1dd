//! The shim: the only place where fork, clone3, unshare, setns and pivot_root happen.

/// The shim could not be spoken to, or refused.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("cannot {what} the shim")]
    Socket {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("the shim has ended")]
    Gone,
    #[error("the shim answered out of turn: {0}")]
    Protocol(String),
}
