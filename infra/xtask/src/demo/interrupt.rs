//! Ctrl-C and SIGTERM: remembered, so that every step can end in order and the teardown still runs.

use std::{
    process::{Command, ExitStatus},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use drums_infra::fleet::wait_until;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static SEEN: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_: i32) {
    SEEN.store(true, Ordering::SeqCst);
}

pub fn watch() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(remember), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler stores into an atomic and does nothing else, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }.context("cannot watch for Ctrl-C")?;
    }
    Ok(())
}

pub fn seen() -> bool {
    SEEN.load(Ordering::SeqCst)
}

/// An error once somebody has asked for the end.
pub fn check() -> Result<()> {
    if seen() {
        bail!("interrupted");
    }
    Ok(())
}

/// Runs a command with inherited streams. A Ctrl-C reaches it from the terminal as it reaches us; a signal to us alone is
/// passed on.
pub fn wait(command: &mut Command) -> Result<ExitStatus> {
    let mut child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    let mut passed_on = false;
    loop {
        let mut status = None;
        wait_until(Duration::from_secs(1), || {
            status = child.try_wait().transpose();
            status.is_some()
        });
        if let Some(status) = status {
            return status.context("cannot wait for a child");
        }
        if seen() && !passed_on {
            let _ = nix::sys::signal::kill(pid, Signal::SIGINT);
            passed_on = true;
        }
    }
}
