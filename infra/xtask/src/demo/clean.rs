//! `cargo xtask demo-clean`: after a crash, removes what earlier demos noted and did not remove themselves.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail};
use drums_infra::fleet::{audit, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::made::{Made, Process};
use crate::workspace::root;

pub fn clean() -> Result<()> {
    let demos = root().join("target/demo");
    let mut cleaned = 0;
    let entries = match fs::read_dir(&demos) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            println!("no demo has run here");
            return Ok(());
        }
        Err(e) => return Err(e).with_context(|| format!("cannot list {}", demos.display())),
    };
    for entry in entries {
        let out = entry?.path();
        let Some(made) = Made::load(&out)? else { continue };
        println!("cleaning up after {}", out.display());
        one(&made)?;
        Made::finish(&out)?;
        cleaned += 1;
    }
    println!("{cleaned} crashed demos cleaned up after; results are kept");
    Ok(())
}

fn one(made: &Made) -> Result<()> {
    // The coordinator was noted first; agents end before it, as in an orderly end.
    for daemon in made.daemons.iter().rev() {
        end(daemon)?;
    }
    for state in made.states.iter().filter(|s| s.exists()) {
        let output = audit(&made.agent, state, &made.tools)?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        if !output.status.success() {
            bail!(
                "the audit of {} ended with {}: {}; runbooks/agent-lost-coordinator.md says what to do about leaks",
                state.display(),
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        fs::remove_dir_all(state).with_context(|| format!("cannot remove {}", state.display()))?;
    }
    Ok(())
}

fn end(daemon: &Process) -> Result<()> {
    for (signal, patience) in [(Signal::SIGTERM, 60), (Signal::SIGKILL, 10)] {
        if !daemon.is_alive() {
            return Ok(());
        }
        println!("ending {} (pid {})", daemon.name, daemon.pid);
        // Fails only when it has just ended, which is what is wanted.
        let _ = kill(Pid::from_raw(daemon.pid.cast_signed()), signal);
        if wait_until(Duration::from_secs(patience), || !daemon.is_alive()) {
            return Ok(());
        }
    }
    bail!(
        "{} (pid {}) does not end even when killed; see what it waits for with `cat /proc/{}/stack`",
        daemon.name,
        daemon.pid,
        daemon.pid
    )
}
