//! The protocol cores on a simulated message network.
//!
//! ```text
//! real:       leases, run states, driver, control and its ports, SQLite store; the agents' link, decisions, journal,
//!             sending, spool on a real file system
//! simulated:  time, QUIC's streams and datagrams, sessions, the analysis
//! ```
//! One thread, one queue of events, one seed: the same seed gives the same trace, to the last event.

pub mod agent;
mod carrying;
mod dialling;
pub mod faults;
pub mod network;
pub mod serving;
pub mod world;

pub use faults::Temper;
pub use world::{Ended, Setup, World, run};
