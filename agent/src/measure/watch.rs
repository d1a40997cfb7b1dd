//! The thread beside the measure thread: while that one is busy in the engine, it looks at the orders and raises a flag
//! when what is under way must end.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use drums_common::{clock::Clock, ids::RunId};

use super::runner::{LOOK_AGAIN, RunError, interruption};
use crate::net::Link;

/// Looks at the orders while the measure thread is busy in the engine, so that a cancellation reaches an operation
/// under way.
pub(super) struct Watch {
    shared: Arc<WatchShared>,
    flag: Arc<AtomicBool>,
}

struct WatchShared {
    run: Mutex<Option<RunId>>,
    over: AtomicBool,
}

impl Watch {
    pub(super) fn start(link: Link, clock: Arc<dyn Clock>) -> Result<Self, RunError> {
        let shared = Arc::new(WatchShared { run: Mutex::new(None), over: AtomicBool::new(false) });
        let flag = Arc::new(AtomicBool::new(false));
        let this = Self { shared: shared.clone(), flag: flag.clone() };
        let watch = move || {
            while !shared.over.load(Ordering::Acquire) {
                let view = link.view();
                {
                    // Held over the decision, so that `end` and `begin` cannot fall between it and the flag.
                    let run = shared.run.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(run) = *run
                        && interruption(run, &link, &*clock).is_some()
                    {
                        flag.store(true, Ordering::Release);
                    }
                }
                link.wait(view.version, LOOK_AGAIN);
            }
        };
        let spawned = std::thread::Builder::new().name("watch".to_owned()).spawn(watch);
        spawned.map(|_| this).map_err(RunError::Watch)
    }

    pub(super) fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    pub(super) fn begin(&self, run: RunId) {
        let mut held = self.shared.run.lock().unwrap_or_else(PoisonError::into_inner);
        self.flag.store(false, Ordering::Release);
        *held = Some(run);
    }

    pub(super) fn end(&self) {
        let mut held = self.shared.run.lock().unwrap_or_else(PoisonError::into_inner);
        *held = None;
        self.flag.store(false, Ordering::Release);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}
