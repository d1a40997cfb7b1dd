//! Every decision about runs, as functions of data and `now` that return data.
//!
//! Owns the run's state machine ([`run`]), whose turn it is on a machine ([`turns`]), what an agent is told
//! ([`desired`]) and which hosts a run gets ([`placement`]). Knows nothing of sockets, threads, SQL or clocks.

pub mod desired;
pub mod placement;
pub mod run;
#[cfg(test)]
mod tests;
pub mod turns;
