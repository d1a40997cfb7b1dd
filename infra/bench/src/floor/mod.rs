//! Floors: what the same exchange costs with nothing of ours in it. Each server is a process of its own, so that its CPU
//! time and its memory are its alone; clients live in the bench, beside the simulated agents.

pub mod client;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod quic;
pub mod ssh;
pub mod tls;
pub mod udp;
