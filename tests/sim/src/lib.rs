//! DrumsBench in simulated time.
//!
//! [`message`]: the protocol cores on a simulated message network, thousands of hours by seed. [`quic`]: the real network
//! code of both daemons with quinn in memory under a paused clock. [`leases`]: the lease cores alone, for very many hosts.
//! What they share: [`fleet`], [`home`], [`measurer`], and [`truth`], which knows what really happened and checks the
//! invariants. The model of leases and hand-over is a test of its own (`tests/it/model.rs`), described in `docs/model.md`.

pub mod fleet;
pub mod home;
pub mod leases;
pub mod measurer;
pub mod message;
pub mod pool;
pub mod quic;
pub mod time;
pub mod trace;
pub mod truth;
