//! The link to the coordinator.
//!
//! Owns the connection (dialling, enrolment, reconnecting for ever), beats, leases as shared with the measuring side, and
//! the sending of evidence from the spool. Refuses to know what a run does: `Desired` goes to the measuring side as it
//! came, and evidence is only carried.
//!
//! ```text
//! measure thread ── Link (lock, condition) ── link task: connect → hello → desired … ⟲ backoff
//!                                             ├ beat task: beats, quiet intervals
//!                                             ├ evidence task: spool → batches → acks
//!                                             └ fetch task: workloads by digest
//! ```
//! **Invariant:** while a quiet interval is declared, nothing is sent by this module.

mod link;

pub use self::link::{FetchError, Link, QuietGuard, Stop, View};
