//! The shim: a single-threaded process of our own binary, and the only place where fork, clone3, unshare, setns and
//! pivot_root happen. It is started by exec before the agent has any runtime, and is spoken to over a socketpair.
//!
//! It owns the processes it started or adopted, and nothing else: which ones there should be, what they are for and
//! what is undone after them is the agent's business. When the agent is gone (end of file on the socket) it kills them
//! all and ends.
//!
//! ```text
//! agent ── SOCK_SEQPACKET, JSON requests, descriptors by SCM_RIGHTS ──▶ shim ── clone3 ──▶ sessions and tools
//! ```

mod child;
mod client;
mod namespaces;
mod protocol;
mod server;

pub use client::ShimClient;
pub use protocol::{Failed, Reply, Request};
pub use server::serve;

/// The shim could not be spoken to, or refused.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("cannot {what} the shim")]
    Socket {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("the shim has ended or hangs, and nothing can be started without it")]
    Gone,
    #[error("the shim answered out of turn: {0}")]
    Protocol(String),
}
