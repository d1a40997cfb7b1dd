//! What the pieces do together.

mod gates;
mod launch;
mod model;
mod ownership;
mod reap;
mod support;
mod sweep;
