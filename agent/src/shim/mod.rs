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

/// Closes every descriptor from `first` upwards. What a process inherited from whoever started it must not reach what is
/// saved: CRIU cannot save a file of a mount that is not there.
///
/// # Safety
/// Nothing in this process may own a descriptor from `first` upwards.
pub unsafe fn close_inherited(first: u32) -> std::io::Result<()> {
    // SAFETY: closing is what the caller has allowed.
    match unsafe { libc::close_range(first, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

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
