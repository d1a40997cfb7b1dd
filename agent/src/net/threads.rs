//! The network side's threads: one that beats, one that may have to wait for a disk.
//!
//! Beats say that this agent lives, so nothing that touches a file runs between them: a disk that hangs must not look like
//! a dead agent. One thread each: a second one may still wake up for a timer that the first has cancelled, also in the middle
//! of a quiet interval.

use std::{io, time::Duration};

use tokio::runtime::{Builder, Handle, Runtime};

/// A thread of the pool that is no longer needed is kept: its end would be a wake-up too, ten seconds later by default.
const KEEP_ALIVE: Duration = Duration::from_hours(24);
/// What is still waiting for a disk at the end is left to it.
const END: Duration = Duration::from_secs(2);

pub struct Threads {
    link: Runtime,
    disk: Runtime,
}

impl Threads {
    pub fn start() -> io::Result<Self> {
        let one = |name: &str| {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(1).thread_name(name).thread_keep_alive(KEEP_ALIVE).enable_all().build()
        };
        Ok(Self { link: one("net")?, disk: one("net-disk")? })
    }

    /// Connections and beats.
    pub fn link(&self) -> &Runtime {
        &self.link
    }

    /// Evidence, workloads and whatever else is read from a disk or written to one.
    pub fn disk(&self) -> Handle {
        self.disk.handle().clone()
    }

    pub fn end(self) {
        self.link.shutdown_timeout(END);
        self.disk.shutdown_timeout(END);
    }
}
