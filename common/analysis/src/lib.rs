//! From evidence to a verdict, purely.
pub mod stats;
