//! What a machine needs before and beside a run: image recipes, the lab network of demos and tests, the leak gate.

pub mod cargo;
pub mod cpio;
pub mod fleet;
pub mod guest;
pub mod image;
pub mod lab;
pub mod leakgate;
pub mod loopback;
pub mod once;
pub mod postgres;
pub mod workload;
