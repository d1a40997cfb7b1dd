//! The machine's measuring lock: one block at a time on a machine, whoever grants it.
//!
//! A turn keeps two agents of one coordinator apart; the lock keeps two coordinators, or a test run, apart.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::clock;

/// The kernel tells nobody about a freed lock without blocking for it, so a waiter that must also hear of a
/// cancellation looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("cannot open the measuring lock {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot lock {}", path.display())]
    Lock { path: PathBuf, source: io::Error },
}

/// Held while a block is measured; freed when dropped, or by the kernel when the agent dies.
#[derive(Debug)]
pub struct MachineLock {
    _file: File,
}

impl MachineLock {
    /// Waits for the lock; `None` when `give_up` says so first.
    pub fn acquire(path: &Path, mut give_up: impl FnMut() -> bool) -> Result<Option<Self>, LockError> {
        let open = || {
            // Its folder is there on a machine that was booted, and may not be in a container.
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            OpenOptions::new().read(true).append(true).create(true).open(path)
        };
        let file = open().map_err(|source| LockError::Open { path: path.to_owned(), source })?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(TryLockError::WouldBlock) if give_up() => return Ok(None),
                Err(TryLockError::WouldBlock) => clock::pause_before_looking_again(LOOK_AGAIN),
                Err(TryLockError::Error(source)) => return Err(LockError::Lock { path: path.to_owned(), source }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not/there/lock");
        let held = MachineLock::acquire(&path, || true).unwrap().unwrap();
        let mut looked = 0;
        let second = MachineLock::acquire(&path, || {
            looked += 1;
            looked == 3
        });
        assert!(second.unwrap().is_none());
        assert_eq!(looked, 3);
        drop(held);
        assert!(MachineLock::acquire(&path, || true).unwrap().is_some());
        let nowhere = MachineLock::acquire(&path.join("lock"), || true).unwrap_err();
        assert!(nowhere.to_string().contains("not/there/lock/lock"));
    }
}
