//! The qemu arms: a virtual machine booted by PVH (cold), or continued from a template whose RAM siblings map copy on
//! write (warm).
//!
//! ```text
//! cold      boot, answer
//! template  boot with RAM in a shared file, answer, stop, save device state, seal with a manifest
//! sibling   check the manifest, map the RAM privately, load the device state, personalise, answer
//! ```

pub mod args;
mod arm;
pub mod initrd;
pub mod qmp;
mod steps;
pub mod template;

pub use arm::Qemu;
