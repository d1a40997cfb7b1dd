//! The coordinator: `net` (agents and enrolment over QUIC), `pki` (the private CA). Policy lives in pure cores, the
//! database behind the store, and both daemons' words in `drums-common`.

pub mod net;
