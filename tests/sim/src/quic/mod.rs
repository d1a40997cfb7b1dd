//! The real network code of both daemons with quinn in memory, under tokio's paused clock.
//!
//! ```text
//! real:       agent: link, session, evidence, TLS, spool, journal, decisions     quinn, rustls, tokio
//!             coordinator: connections, registry, control, driver, SQLite store
//! simulated:  time, the UDP packets' way, sessions, the analysis
//! ```
//! The schedule of faults follows from the seed. TLS draws its own keys and the runtime its own order, so two runs of a seed
//! break the same things at the same times and do not send the same packets.

mod wire;
mod world;

pub use world::run;
