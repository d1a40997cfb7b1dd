//! The one writer: a thread that owns the store, fed by a bounded queue.
//!
//! Whatever waits is done together: each job is a transaction of its own inside one that all of them share, and all are
//! answered after its commit. A thousand hosts that send evidence at once cost a few syncs of the disk instead of a
//! thousand, and a job that fails takes only its own work back.
//!
//! Where time is simulated there is no thread: the caller does its own work, at once, so that one thread decides the order
//! of everything.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drums_common::telemetry::chain;
use tokio::sync::{mpsc, oneshot};

use super::{Store, StoreError};

/// Does its work and says how to answer, once it is known whether what it did is committed.
type Work = Box<dyn FnOnce(&mut dyn Store) -> Answer + Send>;
type Answer = Box<dyn FnOnce(Result<(), StoreError>)>;

struct Job {
    work: Work,
    /// About as much as it writes; none where that is little.
    bytes: usize,
}

/// Waiting jobs beyond this make callers wait: evidence comes no faster than it can be committed. What a job holds, its
/// caller held before.
const QUEUE: usize = 1_024;
/// Jobs that share a commit: as many as a fleet may send at once, few enough that the first need not wait long.
const TOGETHER: usize = 512;
/// Bytes that share a commit: a store holds them in memory until then, and the first waits until all are written.
const TOGETHER_BYTES: usize = 16 << 20;
/// After a commit that several shared, more are on their way: they get this long to share the next one. A thousand agents
/// that come back one after the other would each have a sync of their own otherwise. Who comes alone never waits.
const GATHER: Duration = Duration::from_millis(4);

/// Cheap to clone. The thread ends when the last handle is dropped and the queue is empty.
#[derive(Clone)]
pub struct StoreHandle(Writer);

#[derive(Clone)]
enum Writer {
    Thread { jobs: mpsc::Sender<Job>, thread: Arc<Thread> },
    Caller { store: SharedStore, reachable: Reachable },
}

struct Thread(Mutex<Option<std::thread::JoinHandle<()>>>);

/// A store that outlives the handles on it, as a file outlives the process that wrote it.
pub type SharedStore = Arc<Mutex<Box<dyn Store>>>;
/// Asked before and after each piece of work. Once it says no, the work is not done, or its answer is not heard: what a
/// kill at that instant looks like from outside.
pub type Reachable = Arc<dyn Fn() -> bool + Send + Sync>;

#[allow(clippy::disallowed_methods)] // for nothing in particular: whoever comes meanwhile is taken along
fn gather() {
    std::thread::sleep(GATHER);
}

impl StoreHandle {
    pub fn start(mut store: Box<dyn Store>) -> std::io::Result<Self> {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let thread = std::thread::Builder::new().name("store".to_owned()).spawn(move || {
            let mut answers = Vec::new();
            let mut shared = false;
            while let Some(first) = queue.blocking_recv() {
                if shared {
                    gather();
                }
                let begun = store.begin_together();
                let (mut next, mut bytes) = (Some(first), 0);
                while let Some(job) = next {
                    bytes += job.bytes;
                    answers.push((job.work)(store.as_mut()));
                    let more = answers.len() < TOGETHER && bytes < TOGETHER_BYTES;
                    next = if more { queue.try_recv().ok() } else { None };
                }
                // Only where each job commits by itself is nothing left to do. What could not be begun is not committed either.
                let together = !matches!(begun, Ok(false));
                let committed = begun.and_then(|_| if together { store.commit_together() } else { Ok(()) });
                shared = answers.len() > 1 && together;
                for answer in answers.drain(..) {
                    answer(committed.as_ref().copied().map_err(StoreError::again));
                }
            }
        })?;
        Ok(Self(Writer::Thread { jobs, thread: Arc::new(Thread(Mutex::new(Some(thread)))) }))
    }

    /// Without a thread. Calls are done when they return.
    pub fn of_caller(store: SharedStore, reachable: Reachable) -> Self {
        Self(Writer::Caller { store, reachable })
    }

    /// Runs one or more transactions on the writer thread. They are done even if the caller goes away.
    pub async fn call<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&mut dyn Store) -> Result<T, StoreError> + Send + 'static,
    {
        self.write(0, work).await
    }

    /// As `call`, for what writes so many bytes.
    pub async fn write<T, F>(&self, bytes: usize, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&mut dyn Store) -> Result<T, StoreError> + Send + 'static,
    {
        let jobs = match &self.0 {
            Writer::Thread { jobs, .. } => jobs,
            Writer::Caller { store, reachable } => {
                if !reachable() {
                    return Err(StoreError::Closed);
                }
                let result = work(lock(store).as_mut());
                return if reachable() { result } else { Err(StoreError::Closed) };
            }
        };
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move |store| {
            let done = work(store);
            Box::new(move |committed| {
                // The caller may have gone; the work is done either way.
                let _ = reply.send(committed.and(done));
            })
        });
        jobs.send(Job { work, bytes }).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Hands work in without waiting for its result. False when the queue is full or closed.
    pub fn post<F>(&self, work: F) -> bool
    where
        F: FnOnce(&mut dyn Store) + Send + 'static,
    {
        match &self.0 {
            Writer::Thread { jobs, .. } => {
                let work: Work = Box::new(move |store| {
                    work(store);
                    Box::new(|committed| {
                        if let Err(e) = committed {
                            tracing::error!(error = chain(&e), "what nobody waits for was not written");
                        }
                    })
                });
                jobs.try_send(Job { work, bytes: 0 }).is_ok()
            }
            Writer::Caller { store, reachable } => {
                let there = reachable();
                if there {
                    work(lock(store).as_mut());
                }
                there
            }
        }
    }

    /// Waits until everything that was handed in is done and the store is closed; other handles must be gone.
    pub async fn close(self) {
        let Self(Writer::Thread { jobs, thread }) = self else { return };
        drop(jobs);
        let handle = thread.0.lock().ok().and_then(|mut t| t.take());
        if let Some(handle) = handle {
            // A panic on the writer thread has been reported by the panic hook.
            let _ = tokio::task::spawn_blocking(move || handle.join()).await;
        }
    }
}

fn lock(store: &SharedStore) -> std::sync::MutexGuard<'_, Box<dyn Store>> {
    // Every method of a store is one transaction: a panic leaves none half done.
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use drums_common::clock::Micros;

    use super::*;
    use crate::store::{AuditRow, SqliteStore, Who};

    /// Whether somebody else sees what a job of so many bytes wrote, while the next one runs that waited with it.
    async fn committed_before_the_next(bytes: usize) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.sqlite");
        let handle = StoreHandle::start(Box::new(SqliteStore::open(&path).unwrap())).unwrap();
        let (go, gate) = oneshot::channel();
        // Polled in this order: both wait behind the first, which ends when they do.
        let first = handle.call(move |_| {
            gate.blocking_recv().unwrap();
            Ok(())
        });
        let audit = AuditRow::new(Micros(1), Who::coordinator(), "writes");
        let writes = handle.write(bytes, move |s| s.meta_or("key", "value", &audit));
        let looks = handle.call(move |_| {
            let other = rusqlite::Connection::open(&path).unwrap();
            Ok(other.query_row("SELECT count(*) FROM meta WHERE key = 'key'", [], |r| r.get::<_, i64>(0)).unwrap() == 1)
        });
        let (first, wrote, seen, ()) = tokio::join!(first, writes, looks, async move { go.send(()).unwrap() });
        first.unwrap();
        wrote.unwrap();
        seen.unwrap()
    }

    #[tokio::test]
    async fn what_waits_shares_a_commit_and_what_writes_much_ends_it() {
        assert!(!committed_before_the_next(0).await);
        assert!(committed_before_the_next(TOGETHER_BYTES).await);
    }
}
