//! What the pieces do together.

mod attempts;
mod coordinator;
mod edits;
mod gates;
mod launch;
mod look;
mod memory;
mod model;
mod ownership;
mod readback;
mod reap;
mod support;
mod sweep;
