//! Applies plans: in order, timed, recorded, and undone in reverse when anything fails. `api` is what callers see.

pub mod api;
mod handle;
