//! drums-ec2 against the tests' AWS (`infra/emulator`): real requests of the real SDK, answered by moto's server.

mod ctl;
mod ends;
mod facts;
mod gates;
mod launch;
mod lists;
mod peer;
mod policy;
mod provision;
mod schedules;
mod sweep;
