//! Words that the coordinator, the agent and the analysis share.
//!
//! Owns the vocabulary (ids, arms, specs, evidence) and the wire. Knows nothing of runtimes, sockets or the operating
//! system: everything here is data and pure functions of data and `now`.

pub mod arm;
pub mod bucket;
pub mod clock;
pub mod digest;
pub mod draw;
pub mod evidence;
pub mod experiment;
pub mod failure;
#[cfg(test)]
mod fuzz;
pub mod ids;
pub mod lease;
pub mod machine;
pub mod plan;
pub mod range;
pub mod say;
pub mod segment;
pub mod spec;
pub mod telemetry;
pub mod token;
pub mod verdict;
pub mod williams;
pub mod wire;
pub mod workload;
