//! The runc arms: one container per session, cold, or restored from a checkpoint with the CRIU that the drums arm uses.
//!
//! runc gets every lever that a drums session gets: a network namespace and veth pair made beforehand, overlay layers on
//! a tmpfs, a frozen upper layer shared by siblings, CRIU's warm kernel data, the same CRIU options, no tmpfs on /dev.
//!
//! What differs is runc's own: to restore, it starts CRIU twice (once to ask for its version, then to restore), where the
//! drums arm starts it once. Both start the same CRIU through the same launcher script, with the log level that runc sets.
//!
//! The overlay is mounted in runc's private mount namespace, so it ends with the container.

mod arm;
mod config;
mod steps;

pub use arm::Runc;
