//! The newest version of every message, for code that does not care about versions.

pub use super::v1::*;
