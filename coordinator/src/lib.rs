//! The coordinator: `net` (agents and enrolment over QUIC), `pki` (the private CA), `config` (the home and the daemon's
//! settings), `account` (what an operator has in AWS), `instances` (AWS's certificates, by which launched hosts are
//! believed), `core` (every decision, purely), `store` (what must survive), `tasks` (the driver that owns the runs), `api`
//! (what operators and `drumsctl` speak) and `ctl` (`drumsctl` itself). Both daemons' words live in `drums-common`.

pub mod account;
pub mod api;
pub mod artifacts;
pub mod bucket;
pub mod clock;
pub mod config;
pub mod core;
pub mod ctl;
pub mod daemon;
pub mod disk;
pub mod instances;
pub mod net;
pub mod pki;
#[cfg(test)]
mod samples;
#[cfg(feature = "postgres")]
mod standby;
pub mod store;
pub mod tasks;
pub mod term;
