//! The host agent: `shim` (the only place that forks), `sys` (what the kernel shows), `ledger` (what is ours), `arms`
//! and `steps` (what a session is made of), `engine` (applies plans), `measure` (runs blocks and writes evidence),
//! `spool` (evidence until it is acknowledged), `windows` (instants at which a test may stop the process), `net` (the
//! link to the coordinator), `setup` (tools of a host), `succession` (another build in this one's place), `watchdog` (what ends a paid
//! host).

pub mod agent;
pub mod arms;
pub mod config;
pub mod engine;
pub mod facts;
pub mod ledger;
pub mod measure;
pub mod net;
pub mod probe;
pub mod setup;
pub mod shim;
pub mod spool;
pub mod steps;
pub mod succession;
pub mod sys;
pub mod watchdog;
pub mod windows;
