//! Fault windows: named instants between two changes of the kernel or of the disk, at which a test stops this process to
//! kill it, its shim or a tool. [`Windowed`](crate::sys::Windowed) puts one before and one after every changing call of
//! the kernel's trait, so that a call without windows does not compile. What changes nothing through that trait has none:
//! the ledger's own writes lie between two of them, and so does what a QEMU step says to QEMU's monitor.
//!
//! A window is called `OPERATION/CALL.N/EDGE`: the n-th such call of an operation (`create`, `reset`, `sweep`, ...).
//!
//! Owns the process's one plan of where to stop. Production has none, and passing a window is then one load.

use std::{
    collections::BTreeMap,
    fmt,
    fs::OpenOptions,
    io::{self, Write as _},
    path::PathBuf,
    sync::{Mutex, OnceLock, PoisonError},
};

/// Where a window lies, seen from the change that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Edge {
    Before,
    After,
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Before => "before",
            Self::After => "after",
        })
    }
}

/// What a test asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct WindowArgs {
    /// Stop this process (SIGSTOP) at that fault window
    #[arg(long, value_name = "WINDOW", hide = true)]
    pub stop_at: Option<String>,
    /// Append the name of every fault window that is passed to this file
    #[arg(long, value_name = "FILE", hide = true)]
    pub list_windows: Option<PathBuf>,
}

struct Plan {
    wanted: WindowArgs,
    operation: &'static str,
    /// How often each call was passed in this operation.
    passed: BTreeMap<(&'static str, Edge), u32>,
}

static PLAN: OnceLock<Mutex<Plan>> = OnceLock::new();

/// Begins to look out for windows, if any are wanted. Once per process, before the first operation.
pub fn look_out(wanted: &WindowArgs) {
    if *wanted != WindowArgs::default() {
        let plan = Plan { wanted: wanted.clone(), operation: "open", passed: BTreeMap::new() };
        let _ = PLAN.set(Mutex::new(plan));
    }
}

/// Names what is under way; calls are counted afresh.
pub fn operation(name: &'static str) {
    if let Some(plan) = PLAN.get() {
        let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
        plan.operation = name;
        plan.passed.clear();
    }
}

/// Passes a window, or stops in it.
pub fn pass(call: &'static str, edge: Edge) {
    let Some(plan) = PLAN.get() else { return };
    let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
    let name = plan.name(call, edge);
    if let Err(error) = plan.note(&name) {
        tracing::error!(window = %name, %error, "a fault window could not be listed");
    }
    if plan.wanted.stop_at.as_deref() == Some(&name) {
        // Whoever asked for it waits for the stop, kills whom it likes, and may let this process go on.
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP);
    }
}

impl Plan {
    fn name(&mut self, call: &'static str, edge: Edge) -> String {
        let n = self.passed.entry((call, edge)).or_default();
        *n += 1;
        format!("{}/{call}.{n}/{edge}", self.operation)
    }

    fn note(&self, name: &str) -> io::Result<()> {
        let Some(path) = &self.wanted.list_windows else { return Ok(()) };
        writeln!(OpenOptions::new().create(true).append(true).open(path)?, "{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_named_by_operation_call_number_and_edge() {
        let mut plan = Plan { wanted: WindowArgs::default(), operation: "create", passed: BTreeMap::new() };
        assert_eq!(plan.name("make-dir", Edge::Before), "create/make-dir.1/before");
        assert_eq!(plan.name("make-dir", Edge::After), "create/make-dir.1/after");
        assert_eq!(plan.name("make-dir", Edge::Before), "create/make-dir.2/before");
    }

    #[test]
    fn nothing_happens_where_nothing_was_asked_for() {
        look_out(&WindowArgs::default());
        assert!(PLAN.get().is_none());
        pass("make-dir", Edge::Before);
    }
}
