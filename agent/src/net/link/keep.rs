//! On a paid host: the life lease as it is, kept in a file for the watchdog, which is another process and outlives this one.
//!
//! ```text
//! welcome, answer to a beat ─▶ its end moved by a step ─▶ disk thread, once nobody is quiet ─▶ file
//! silence agreed ────────────▶ its end moved by a step ─▶ measuring thread, before the silence begins ─▶ file
//! ```
//! Only what a coordinator gave is written: an agent that is started again writes nothing before it is welcomed, so that
//! the file of its earlier life goes on to count.
//!
//! **Invariant:** nothing is written while silence has begun, nor is it begun while something is written.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use drums_common::{
    clock::{Micros, MonoMicros},
    telemetry::chain,
};

use super::{Link, Shared};
use crate::watchdog::lease::{Lease, is_due};

/// Where the lease is kept, and what else its file says.
#[derive(Clone, Debug)]
pub struct KeptLease {
    pub path: PathBuf,
    pub boot: String,
    /// The absolute deadline, as far as it could be read.
    pub deadline: Option<Micros>,
}

pub(super) struct Keeper {
    kept: KeptLease,
    writer: Mutex<Writer>,
}

#[derive(Default)]
struct Writer {
    written: Option<MonoMicros>,
    /// The last trouble, said once.
    trouble: String,
}

impl Keeper {
    pub fn new(kept: KeptLease) -> Self {
        Self { kept, writer: Mutex::default() }
    }

    /// Writes if that is due; `given` is asked once nobody else is writing.
    pub fn write(&self, given: impl FnOnce() -> Option<(MonoMicros, u64)>) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((life_ends, life_ms)) = given() else { return };
        if !is_due(writer.written, life_ends, life_ms) {
            return;
        }
        let KeptLease { path, boot, deadline } = &self.kept;
        let lease = Lease { boot: boot.clone(), life_ends, life_ms, deadline: *deadline };
        match lease.write(path) {
            Ok(()) => {
                writer.written = Some(life_ends);
                writer.trouble.clear();
            }
            Err(e) => {
                let words = chain(&e).to_string();
                if words != writer.trouble {
                    tracing::error!(error = %words, "the watchdog is not told of this host's life lease, and will power it off; is drums-watchdog.service running?");
                    writer.trouble = words;
                }
            }
        }
    }
}

impl Link {
    /// From now on the end of the life lease is kept in a file, for this paid host's watchdog. What is returned writes it, on
    /// a thread that may wait for a disk.
    pub fn keep_lease(&self, kept: KeptLease) -> impl Future<Output = ()> + Send + use<> {
        let shared = self.shared.clone();
        // There is one link in an agent, which is asked once.
        let _ = shared.keeper.set(Keeper::new(kept));
        async move {
            loop {
                shared.not_quiet().await;
                shared.write_lease(false);
                shared.renewed.notified().await;
            }
        }
    }
}

impl Shared {
    /// Writes the lease down for the watchdog, if there is one and that is due. `before_silence` is for who declared it, and
    /// has not begun; for anybody else a silence is no time to write.
    pub(super) fn write_lease(&self, before_silence: bool) {
        let Some(keeper) = self.keeper.get() else { return };
        keeper.write(|| {
            let state = self.lock();
            let may = before_silence || state.quiet.is_none();
            state.lease.given().filter(|_| may)
        });
    }
}
