//! The wire between agents and the coordinator.
pub mod v1;
