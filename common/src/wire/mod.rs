//! The wire between agents and the coordinator.
//!
//! Owns framing, the codec, the version handshake and the messages. Knows no sockets: both daemons' `net` modules read
//! and write the bytes. Core code never sees a version module, only what `latest` re-exports.
//!
//! ```text
//! connection:  hello (fixed bytes) → hello reply (fixed bytes) on the first stream, then that stream is the control lane
//! any stream:  one lane byte (other than on the first stream), then frames: u32 length, payload
//! datagram:    payload alone
//! ```

pub mod close;
pub mod codec;
pub mod frame;
#[cfg(test)]
mod golden;
pub mod hello;
pub mod latest;
pub mod v1;
pub mod v2;

/// ALPN of the agents' endpoint.
pub const ALPN_AGENTS: &[u8] = b"drums/1";
/// ALPN of the enrolment endpoint.
pub const ALPN_ENROL: &[u8] = b"drums-enrol/1";
/// The name in the coordinator's server certificate. Fixed, so that its addresses may change: what agents trust is the
/// private CA, never the name system.
pub const SERVER_NAME: &str = "drums-coordinator";
