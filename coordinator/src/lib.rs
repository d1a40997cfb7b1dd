//! The coordinator: `net` (agents and enrolment over QUIC), `pki` (the private CA), `config` (the home and the daemon's
//! settings). Policy lives in pure cores, the database behind the store, and both daemons' words in `drums-common`.

pub mod clock;
pub mod config;
pub mod net;
pub mod pki;
