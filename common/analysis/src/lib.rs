//! From evidence to a verdict, purely.
//!
//! [`analyse`] takes a registration, what the store knows of its runs, and all their records; it returns every number and
//! the verdict. It reads no clock, no file and no network, so `drumsctl verify` computes the same from a bundle years
//! later. Resampling is drawn from the registered seed. How to measure and decide is written in `docs/method.md`.

mod accounting;
pub mod analysis;
mod arms;
pub mod bucket;
pub mod bundle;
pub mod collect;
pub mod contrast;
pub mod delay;
pub mod gates;
pub mod machines;
pub mod report;
pub mod series;
pub mod simulate;
pub mod stats;
pub mod summary;
pub mod synthetic;
pub mod tables;
pub mod value;
mod verdict;

#[cfg(test)]
mod tests;

pub use analysis::{Analysis, analyse};
pub use collect::{RunMeta, RunState};
pub use report::render_html;
pub use summary::{Status, Summary, Verdict};
