//! Paid hosts: launched with a deadline, and dead by it whatever else dies.
//!
//! Owns every decision about a paid host (may it be launched, what comes next in its launch, what is due to be ended,
//! is it really gone, what did it cost) as functions of data and `now`, and the [port](cloud::Cloud) to the cloud that
//! shows and does what they need. Knows no SDK, no runtime, no store.
//!
//! ```text
//! ask::RawAsk, limits::Limits, gates::Setup          as an operator wrote them
//!   ─▶ gates::look, gates::judge ─▶ Clearance        what the cloud says of it, and whether it may be
//!   ─▶ Clearance::confirm ─▶ launch::Launch          in one transaction with books::Books and what is stored of it
//!   ─▶ Launch::decide, Launch::heard ─▶ reap::Reap   for ever, each decision stored before its act
//!   ─▶ Reap::decide, Reap::heard ─▶ receipt::Receipt
//! reap::strays, sweep, Books::demands                beside it, by the clock
//! ```

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
pub mod user_data;
pub mod words;
