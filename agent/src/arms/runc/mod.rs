//! The runc arms: one container per session, cold, or restored from a checkpoint with the CRIU that the drums arm uses.
//!
//! runc gets every lever that a drums session gets: a network namespace and veth pair made beforehand, overlay layers on
//! a tmpfs, a frozen upper layer shared by siblings, CRIU's warm kernel data, the same CRIU options, no tmpfs on /dev.
//! The overlay is mounted in runc's private mount namespace, so it ends with the container.

mod arm;
pub mod bench;
pub mod config;
mod steps;

pub use arm::Runc;
