//! What a session is made of. An arm's plan is a list of [`Step`]s; each makes exactly one [`Resource`] (or acts inside
//! one that an earlier step made). How a resource is observed and undone depends on the resource and the kernel alone
//! ([`undo`]), never on what the maker remembered: after a crash the ledger's rows are all there is.
//!
//! Knows nothing of arms, timing, the ledger's file or the order of steps.

mod cx;
mod make;
mod resource;
pub mod undo;

pub use cx::{Cx, Tap};
pub use make::{
    MakeCgroup, MakeDir, MakeMount, MakeNetns, MakeTap, MakeVeth, SpawnSession, SpawnTool, WriteFile, tail,
};
pub use resource::{Inode, Netns, Process, Receipt, Resource, Seen};

use crate::sys::{Sys, SysError};

/// Makes one resource. Must leave nothing behind when it fails, other than what undoing its resource removes.
pub trait Step: Send {
    /// Name of the timeline's phase; neighbours with the same name are one phase.
    fn phase(&self) -> &'static str;

    /// What this step makes; `None` when it only acts inside what earlier steps made (their undo covers it).
    fn resource(&self) -> Option<&Resource>;

    /// Does it. A step that can half-succeed is two steps; nothing fallible happens after its commit point.
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError>;
}

/// A step failed: what it attempted is in the text, the cause is the source.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("cannot make {resource}")]
    Make {
        resource: String,
        #[source]
        source: SysError,
    },
    /// Nothing was made, and what is there is a stranger's.
    #[error("cannot make {resource}: there is one of that name already, and it is not this plan's")]
    Taken {
        resource: String,
        #[source]
        source: SysError,
    },
    #[error("cannot {what}")]
    Act {
        what: String,
        #[source]
        source: SysError,
    },
    /// A tool ran and failed; the end of its output tells why.
    #[error("{tool} ended with {status}: {output}")]
    Tool { tool: String, status: String, output: String },
    /// What is neither the kernel nor a tool failed: a monitor's protocol, a file of ours.
    #[error("cannot {what}")]
    Failed {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Something else about the step, said in words.
    #[error("{0}")]
    Other(String),
}

/// An arm cannot plan this order.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("this host has no {tool}, which {arm} needs; run drums-agent setup")]
    NoTool { arm: String, tool: &'static str },
    #[error("{arm} has no template build {build} on this host; it must be built first")]
    NoTemplate { arm: String, build: u32 },
    #[error("{0}")]
    Other(String),
}
