//! The newest version of every message, for code that does not care about versions.

// What is named here takes the place of what version 1 has under that name.
pub use super::{
    v1::*,
    v2::{EnrolRequest, InstanceProof},
};
