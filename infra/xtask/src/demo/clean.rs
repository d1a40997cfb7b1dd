//! `cargo xtask demo-clean`: after a crash, removes what earlier demos noted and did not remove themselves.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, bail};
use drums_infra::fleet::{audit, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::made::{Made, Process};
use crate::workspace::root;

pub fn clean() -> Result<()> {
    match clean_in(&root().join("target/demo"))? {
        None => println!("no demo has run here"),
        Some(cleaned) => println!("{cleaned} crashed demos cleaned up after; results are kept"),
    }
    Ok(())
}

/// How many of the demos in this folder had crashed.
fn clean_in(demos: &Path) -> Result<Option<u32>> {
    let entries = match fs::read_dir(demos) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot list {}", demos.display())),
    };
    let mut cleaned = 0;
    for entry in entries {
        let entry = entry?;
        // Beside the demos' folders lies the summary of the last one.
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let out = entry.path();
        let Some(made) = Made::load(&out)? else { continue };
        println!("cleaning up after {}", out.display());
        one(&made)?;
        Made::finish(&out)?;
        cleaned += 1;
    }
    Ok(Some(cleaned))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_and_a_demo_that_ended_are_left_alone_and_a_crashed_one_is_cleaned_once() {
        let dir = tempfile::tempdir().unwrap();
        let demos = dir.path().join("demo");
        assert_eq!(clean_in(&demos).unwrap(), None);
        let (ended, crashed) = (demos.join("1"), demos.join("2"));
        for folder in [&ended, &crashed] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(demos.join("summary.json"), "{}").unwrap();
        Made::begin(&crashed, Path::new("/bin/true"), Path::new("/nowhere")).unwrap();
        assert_eq!(clean_in(&demos).unwrap(), Some(1));
        assert_eq!(clean_in(&demos).unwrap(), Some(0));
    }
}
