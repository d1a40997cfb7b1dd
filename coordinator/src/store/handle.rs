//! The one writer: a thread that owns the store, fed by a bounded queue.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::{Store, StoreError};

type Job = Box<dyn FnOnce(&mut dyn Store) + Send>;

/// Waiting jobs beyond this make callers wait: evidence comes no faster than it can be committed.
const QUEUE: usize = 64;

/// Cheap to clone. The thread ends when the last handle is dropped and the queue is empty.
#[derive(Clone)]
pub struct StoreHandle {
    jobs: mpsc::Sender<Job>,
    thread: Arc<Thread>,
}

struct Thread(std::sync::Mutex<Option<std::thread::JoinHandle<()>>>);

impl StoreHandle {
    pub fn start(mut store: Box<dyn Store>) -> std::io::Result<Self> {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let thread = std::thread::Builder::new().name("store".to_owned()).spawn(move || {
            while let Some(job) = queue.blocking_recv() {
                job(store.as_mut());
            }
        })?;
        Ok(Self { jobs, thread: Arc::new(Thread(std::sync::Mutex::new(Some(thread)))) })
    }

    /// Runs one or more transactions on the writer thread. They are done even if the caller goes away.
    pub async fn call<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&mut dyn Store) -> Result<T, StoreError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |store| {
            // The caller may have gone; the work is done either way.
            let _ = reply.send(work(store));
        });
        self.jobs.send(job).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Hands work in without waiting for its result. False when the queue is full or closed.
    pub fn post<F>(&self, work: F) -> bool
    where
        F: FnOnce(&mut dyn Store) + Send + 'static,
    {
        self.jobs.try_send(Box::new(work)).is_ok()
    }

    /// Waits until everything that was handed in is done and the store is closed; other handles must be gone.
    pub async fn close(self) {
        let Self { jobs, thread } = self;
        drop(jobs);
        let handle = thread.0.lock().ok().and_then(|mut t| t.take());
        if let Some(handle) = handle {
            // A panic on the writer thread has been reported by the panic hook.
            let _ = tokio::task::spawn_blocking(move || handle.join()).await;
        }
    }
}
