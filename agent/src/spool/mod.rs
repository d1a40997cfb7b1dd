//! The spool: evidence on disk until the coordinator has committed it.
//!
//! One folder per run, holding batches in checksummed segments. Sequence numbers are given here, 1, 2, 3 ... without
//! gaps. `append` only buffers; `commit` writes one batch and waits for the disk, and is called outside timed windows.
//! A torn batch at the end (a crash inside `commit`) was never acknowledged to anyone: it is reported and cut on opening.
//! Damage anywhere else is an error, never skipped, and a run whose evidence is damaged is never begun again: its records
//! would take numbers that others have. Refuses to know the network and what records mean, but for `Closed`,
//! after which a run takes no more.
//!
//! ```text
//! spool/<run>/meta.json  lock  acked  segment-<first seq>   segment-...
//!       removed-<run>                 a finished run that is being removed
//! ```

mod run;
mod segment;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use drums_common::{digest::Sha256, ids::RunId, wire::latest::SpoolState};
use tokio::sync::Notify;

pub use self::run::{RunMeta, RunSpool, Sealed, SpoolWriter};

/// Closed and fully acknowledged runs that stay on disk, newest first: enough to look something up after an incident.
pub const KEEP_FINISHED: usize = 16;
/// Before the name of a run whose files are being removed: some of them would pass for another state of it.
const REMOVED: &str = "removed-";

#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is damaged at byte {at}: {what}; evidence before it is intact, keep the folder and report it", path.display())]
    Corrupt { path: PathBuf, at: u64, what: String },
    #[error("{} holds evidence of registration {held} while {wanted} was asked for", path.display())]
    OtherRegistration { path: PathBuf, held: Sha256, wanted: Sha256 },
    #[error("{} holds evidence already, and a run begins with an empty folder; keep the folder and report it", path.display())]
    Exists { path: PathBuf },
    #[error("the evidence of {run} in {} is damaged; keep the folder and report it", path.display())]
    Damaged { run: RunId, path: PathBuf },
    #[error("{} is being written by another handle or process", path.display())]
    InUse { path: PathBuf },
    #[error("{run} is closed; its last record is {last_seq}")]
    Closed { run: RunId, last_seq: u64 },
    #[error("{} has {free} bytes left on its disk and evidence needs {wanted}; free some space", path.display())]
    DiskFull { path: PathBuf, free: u64, wanted: u64 },
    #[error("{} has room for {free} more files on its disk and {wanted} may be needed; remove some", path.display())]
    NoNames { path: PathBuf, free: u64, wanted: u64 },
    #[error("{run}'s record of {bytes} bytes is larger than evidence may be")]
    RecordTooLong { run: RunId, bytes: usize },
    #[error("{run} has {bytes} bytes of evidence waiting; commit before adding more")]
    CommitDue { run: RunId, bytes: usize },
    #[error("a record of {run} cannot be encoded")]
    Encode { run: RunId, source: drums_common::wire::codec::CodecError },
    #[error("{run}: {acked} was acknowledged, but only {last_seq} records were ever written")]
    AckBeyondEnd { run: RunId, acked: u64, last_seq: u64 },
}

impl SpoolError {
    /// Trying again changes nothing: the run cannot be recorded here.
    pub fn permanent(&self) -> bool {
        matches!(
            self,
            Self::Corrupt { .. }
                | Self::OtherRegistration { .. }
                | Self::Exists { .. }
                | Self::Damaged { .. }
                | Self::AckBeyondEnd { .. }
        )
    }
}

impl SpoolError {
    /// The disk has no space, or no names for files.
    fn no_space(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::DiskFull { .. } | Self::NoNames { .. } => true,
            Self::Io { source, .. } => matches!(source.kind(), StorageFull | QuotaExceeded),
            _ => false,
        }
    }
}

pub(crate) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SpoolError {
    let path = path.to_owned();
    move |source| SpoolError::Io { doing, path, source }
}

/// What opening had to mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    pub run: RunId,
    /// Bytes of a batch that a crash cut short; none of its records was acknowledged.
    pub torn_bytes: u64,
    pub last_seq: u64,
}

/// All runs' spools of one agent.
#[derive(Debug)]
pub struct Spool {
    dir: PathBuf,
    min_free_bytes: u64,
    runs: Mutex<BTreeMap<RunId, Arc<RunSpool>>>,
    /// Runs whose folder is left as it was found, and which take no evidence.
    damaged: BTreeSet<RunId>,
    /// Told after each commit; the sender waits on it.
    committed: Arc<Notify>,
}

impl Spool {
    /// Opens the folder (making it when absent), checks every run in it and cuts torn tails. Runs whose files are damaged
    /// are returned beside, left as they are.
    pub fn open(dir: &Path, min_free_bytes: u64) -> Result<(Self, Vec<Repair>, Vec<SpoolError>), SpoolError> {
        fs::create_dir_all(dir).map_err(io_error("make the folder", dir))?;
        let committed = Arc::new(Notify::new());
        let (mut runs, mut repairs) = (BTreeMap::new(), Vec::new());
        let (mut damaged, mut faults) = (BTreeSet::new(), Vec::new());
        for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
            let entry = entry.map_err(io_error("list", dir))?;
            if entry.file_name().to_str().is_some_and(|n| n.starts_with(REMOVED)) {
                fs::remove_dir_all(entry.path()).map_err(io_error("remove the finished", &entry.path()))?;
                continue;
            }
            // Anything that is not named like a run is not ours.
            let Some(run) = entry.file_name().to_str().and_then(|n| n.parse::<RunId>().ok()) else { continue };
            match RunSpool::open(&entry.path(), run, min_free_bytes, committed.clone()) {
                Ok(Some((spool, torn_bytes))) => {
                    if torn_bytes > 0 {
                        repairs.push(Repair { run, torn_bytes, last_seq: spool.last_seq() });
                    }
                    runs.insert(run, Arc::new(spool));
                }
                // A crash before the run's first byte of meta data: nothing was ever recorded.
                Ok(None) => {
                    fs::remove_dir_all(entry.path()).map_err(io_error("remove the empty", &entry.path()))?;
                }
                Err(e) => {
                    damaged.insert(run);
                    faults.push(e);
                }
            }
        }
        Ok((Self { dir: dir.to_owned(), min_free_bytes, runs: Mutex::new(runs), damaged, committed }, repairs, faults))
    }

    /// The run's spool, made if it does not exist. Refused for another registration, and for a run whose evidence is
    /// damaged.
    pub fn create_run(&self, meta: RunMeta) -> Result<Arc<RunSpool>, SpoolError> {
        let mut runs = self.lock();
        let path = self.dir.join(meta.run.to_string());
        if let Some(spool) = runs.get(&meta.run) {
            if spool.meta().registration != meta.registration {
                let held = spool.meta().registration;
                return Err(SpoolError::OtherRegistration { path, held, wanted: meta.registration });
            }
            return Ok(spool.clone());
        }
        let run = meta.run;
        if self.damaged.contains(&run) {
            return Err(SpoolError::Damaged { run, path });
        }
        let spool = Arc::new(RunSpool::create(&path, meta, self.min_free_bytes, self.committed.clone())?);
        runs.insert(run, spool.clone());
        Ok(spool)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn run(&self, run: RunId) -> Option<Arc<RunSpool>> {
        self.lock().get(&run).cloned()
    }

    pub fn runs(&self) -> Vec<Arc<RunSpool>> {
        self.lock().values().cloned().collect()
    }

    /// For the hello.
    pub fn states(&self) -> Vec<SpoolState> {
        self.runs()
            .iter()
            .map(|r| SpoolState { run: r.meta().run, last_seq: r.last_seq(), closed: r.closed() })
            .collect()
    }

    /// Waits until a commit happened since the last call. Level-triggered: look at the runs after every wake.
    pub async fn committed(&self) {
        self.committed.notified().await;
    }

    /// Wakes `committed` without a commit.
    pub fn wake(&self) {
        self.committed.notify_one();
    }

    /// Removes the oldest runs that are closed and acknowledged to the last record, but for `keep` of them and those that
    /// are still asked for.
    pub fn prune(&self, keep: usize, wanted: impl Fn(&RunId) -> bool) -> Result<Vec<RunId>, SpoolError> {
        let mut finished: Vec<_> = self
            .lock()
            .values()
            .filter(|r| r.closed() && r.acked() == r.last_seq() && Arc::strong_count(r) == 1)
            .map(|r| (r.last_change(), r.meta().run))
            .collect();
        finished.sort_unstable_by(|a, b| b.cmp(a));
        let mut removed = Vec::new();
        for (_, run) in finished.into_iter().skip(keep).filter(|(_, run)| !wanted(run)) {
            let aside = self.set_aside(run)?;
            removed.push(run);
            fs::remove_dir_all(&aside).map_err(io_error("remove the finished", &aside))?;
        }
        Ok(removed)
    }

    /// From here on the run is none of the spool's, whatever becomes of its files.
    fn set_aside(&self, run: RunId) -> Result<PathBuf, SpoolError> {
        let (path, aside) = (self.dir.join(run.to_string()), self.dir.join(format!("{REMOVED}{run}")));
        let mut runs = self.lock();
        fs::rename(&path, &aside).map_err(io_error("set aside the finished", &path))?;
        runs.remove(&run);
        drop(runs);
        // Before any of its files goes.
        fs::File::open(&self.dir).and_then(|d| d.sync_all()).map_err(io_error("sync", &self.dir))?;
        Ok(aside)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<RunId, Arc<RunSpool>>> {
        // The map is changed by single inserts and removes, so a panic elsewhere cannot leave it half-changed.
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
