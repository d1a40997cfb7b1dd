//! Paid hosts: launched with a deadline, and dead by it whatever else dies.
//!
//! Owns every decision about a paid host (may it be launched, what comes next in its launch, what is due to be ended,
//! is it really gone, what did it cost) as functions of data and `now`, and the [port](cloud::Cloud) to the cloud that
//! shows and does what they need. Knows no SDK, no runtime, no store.

pub mod alarm;
pub mod ask;
pub mod books;
pub mod cloud;
pub mod deadline;
pub mod failure;
pub mod gates;
pub mod host;
pub mod launch;
pub mod limits;
pub mod money;
pub mod reap;
pub mod receipt;
pub mod spend;
pub mod sweep;
pub mod tags;
pub mod token;
pub mod words;
