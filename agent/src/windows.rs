//! Fault windows: named instants between two changes of the kernel, of the disk or of a virtual machine, at which a test
//! stops this process to kill it, its shim or a tool. [`Windowed`](crate::sys::Windowed) puts one before and one after
//! every changing call of the kernel's trait, QEMU's connection one before and after every command that changes
//! something: neither compiles without. A test holds arms and steps to changing nothing by other means. The ledger's own
//! writes lie between two windows.
//!
//! A window is called `OPERATION/CALL.N/EDGE`: the n-th such call of an operation (`create`, `reset`, `sweep`, ...). A tool
//! that is at work in a window is held there too: it would have ended before anybody could kill it.
//!
//! Owns the process's one plan of where to stop. Production has none, and passing a window is then one load.

use std::{
    collections::BTreeMap,
    fmt,
    fs::OpenOptions,
    io::{self, Write as _},
    os::fd::OwnedFd,
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

/// A change with a window before and one after it.
pub fn around<T>(call: &'static str, change: impl FnOnce() -> T) -> T {
    pass(call, Edge::Before, None);
    let out = change();
    pass(call, Edge::After, None);
    out
}

/// Passes a window, or stops in it; `tool` is at work meanwhile, and is stopped first.
pub fn pass(call: &'static str, edge: Edge, tool: Option<&OwnedFd>) {
    let Some(plan) = PLAN.get() else { return };
    let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
    let name = plan.name(call, edge);
    if let Err(error) = plan.note(&name) {
        tracing::error!(window = %name, %error, "a fault window could not be listed");
    }
    if plan.wanted.stop_at.as_deref() == Some(&name) {
        if let Some(tool) = tool {
            // One that has ended already is no victim.
            let _ = crate::sys::signal::send(tool, libc::SIGSTOP);
        }
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
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn a_window_is_named_by_operation_call_number_and_edge() {
        let mut plan = Plan { wanted: WindowArgs::default(), operation: "create", passed: BTreeMap::new() };
        assert_eq!(plan.name("make-dir", Edge::Before), "create/make-dir.1/before");
        assert_eq!(plan.name("make-dir", Edge::After), "create/make-dir.1/after");
        assert_eq!(plan.name("make-dir", Edge::Before), "create/make-dir.2/before");
    }

    /// A step that changed something by its own means would have no window, and nobody would notice. `initrd.rs` is the
    /// exception: it streams a file too large for a call of the trait, between windows of its own.
    #[test]
    fn arms_and_steps_change_nothing_without_a_window() {
        const WORDS: [&str; 14] = [
            "fs::write",
            "File::create",
            "OpenOptions",
            "create_dir",
            "DirBuilder",
            "remove_file",
            "remove_dir",
            "set_permissions",
            "fs::rename",
            "symlink(",
            "hard_link",
            "Command::new",
            "mknod",
            "nix::mount",
        ];
        fn look(path: &Path, found: &mut Vec<String>) {
            if path.is_dir() {
                fs::read_dir(path).unwrap().flatten().for_each(|e| look(&e.path(), found));
                return;
            }
            let text = fs::read_to_string(path).unwrap();
            let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
            let words = WORDS.iter().filter(|w| code.lines().any(|l| l.contains(**w) && !l.contains("sys.")));
            found.extend(words.map(|w| format!("{}: {w}", path.file_name().unwrap().display())));
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = Vec::new();
        for place in ["arms", "steps", "ledger/audit.rs", "engine/run.rs", "engine/operate.rs", "engine/template.rs"] {
            look(&source.join(place), &mut found);
        }
        found.retain(|f| !f.starts_with("initrd.rs: "));
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn nothing_happens_where_nothing_was_asked_for() {
        look_out(&WindowArgs::default());
        assert!(PLAN.get().is_none());
        pass("make-dir", Edge::Before, None);
        assert_eq!(around("make-dir", || 7), 7);
    }
}
