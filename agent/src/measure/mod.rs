//! The measuring side: one synchronous thread that runs granted blocks and writes down exactly what happened.
//!
//! ```text
//! Desired + leases + what the spool holds ── decide (pure) ──▶ one action ── runner ──▶ prepare | block | close
//!                                                                             block ──▶ turn per arm ──▶ the engine
//! ```
//! Owns the order of things: settle, canary, set-up drawn from the grant's seed, silence around timed windows, gates,
//! records. Refuses to know how a session is made (the engine does), how evidence travels (the spool and the link do),
//! and what any reading means for a verdict (the analysis does).
//!
//! **Invariant:** per turn and registered metric there is exactly one of a `Sample` and an entry in the `Outcome`'s
//! `failed_metrics`.
//! **Invariant:** nothing is written to disk and nothing is sent inside a timed window.
//! **Invariant:** a block whose `BlockStarted` was committed gets exactly one `BlockEnded`, by a restarted agent if need
//! be.

pub mod block;
pub mod canary;
pub mod clock;
pub mod decide;
pub mod draw;
pub mod gates;
pub mod journal;
pub mod lock;
pub mod noise;
pub mod progress;
pub mod runner;
pub mod settle;
pub mod surroundings;
pub mod templates;
pub mod turn;
mod upgrade;
mod watch;

#[cfg(test)]
mod tests;
