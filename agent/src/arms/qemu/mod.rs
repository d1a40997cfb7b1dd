//! The qemu arms: a virtual machine booted by PVH (cold), or continued from a template whose RAM siblings map copy on
//! write (warm).

pub mod args;
pub mod initrd;
pub mod qmp;
pub mod template;
