//! One run's spool: a writer for the measuring side, a reader for the sender.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{Body, Record},
    ids::{Generation, HostId, RunId},
    wire::{codec, frame::Lane},
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{
    SpoolError, io_error,
    segment::{self, Batch},
};

/// A new segment begins when the last one is this long: a scan at start reads whole segments.
const SEGMENT_BYTES: u64 = 8 << 20;
/// What a buffered batch may hold before it must be committed in pieces.
const BATCH_BYTES: usize = 1 << 20;
/// A record leaves room in a frame for its neighbours and the batch's head.
const MAX_RECORD: usize = Lane::Evidence.cap() / 2;

/// What every record of a run on a host has in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunMeta {
    pub run: RunId,
    pub registration: Sha256,
    pub host: HostId,
}

#[derive(Debug)]
struct Segment {
    path: PathBuf,
    bytes: u64,
    batches: Vec<Batch>,
}

#[derive(Debug)]
struct State {
    segments: Vec<Segment>,
    /// Last sequence number on disk, 0 for none.
    last_seq: u64,
    acked: u64,
    closed: bool,
    changed: SystemTime,
}

#[derive(Debug)]
pub struct RunSpool {
    dir: PathBuf,
    meta: RunMeta,
    min_free_bytes: u64,
    state: Mutex<State>,
    writing: AtomicBool,
    committed: Arc<Notify>,
}

impl RunSpool {
    pub(super) fn create(
        dir: &Path,
        meta: RunMeta,
        min_free_bytes: u64,
        committed: Arc<Notify>,
    ) -> Result<Self, SpoolError> {
        let parent = dir.parent().unwrap_or(dir);
        fs::create_dir_all(dir).map_err(io_error("make the folder", dir))?;
        if !segments_of(dir)?.is_empty() {
            return Err(SpoolError::Exists { path: dir.to_owned() });
        }
        let path = dir.join("meta.json");
        let json = serde_json::to_vec(&meta).expect("strings always serialise");
        write_whole(&path, &json)?;
        sync_dir(dir)?;
        sync_dir(parent)?;
        let state = State { segments: Vec::new(), last_seq: 0, acked: 0, closed: false, changed: SystemTime::now() };
        Ok(Self {
            dir: dir.to_owned(),
            meta,
            min_free_bytes,
            state: Mutex::new(state),
            writing: AtomicBool::new(false),
            committed,
        })
    }

    /// `None` if the run was never really made. The second value counts torn bytes that were cut.
    pub(super) fn open(
        dir: &Path,
        run: RunId,
        min_free_bytes: u64,
        committed: Arc<Notify>,
    ) -> Result<Option<(Self, u64)>, SpoolError> {
        let meta_path = dir.join("meta.json");
        let json = match fs::read(&meta_path) {
            Ok(json) => json,
            Err(e) if e.kind() == io::ErrorKind::NotFound && segments_of(dir)?.is_empty() => return Ok(None),
            Err(e) => return Err(io_error("read", &meta_path)(e)),
        };
        let corrupt = |path: &Path, at, what: String| SpoolError::Corrupt { path: path.to_owned(), at, what };
        let meta: RunMeta = serde_json::from_slice(&json).map_err(|e| corrupt(&meta_path, 0, e.to_string()))?;
        if meta.run != run {
            return Err(corrupt(&meta_path, 0, format!("it names {}", meta.run)));
        }
        let paths = segments_of(dir)?;
        let mut state =
            State { segments: Vec::new(), last_seq: 0, acked: 0, closed: false, changed: SystemTime::UNIX_EPOCH };
        let mut torn = 0;
        let count = paths.len();
        for (i, path) in paths.into_iter().enumerate() {
            let scan = segment::scan(&path)?;
            if let Some(fault) = scan.fault {
                if i + 1 < count || scan.valid_behind {
                    return Err(corrupt(&path, scan.good, fault.to_owned()));
                }
                torn = scan.total - scan.good;
                let file = OpenOptions::new().write(true).open(&path).map_err(io_error("open", &path))?;
                file.set_len(scan.good)
                    .and_then(|()| file.sync_all())
                    .map_err(io_error("cut the torn end of", &path))?;
            }
            for batch in &scan.batches {
                if batch.first_seq != state.last_seq + 1 {
                    let what = format!("record {} follows {}", batch.first_seq, state.last_seq);
                    return Err(corrupt(&path, batch.offset, what));
                }
                state.last_seq = batch.last_seq();
            }
            let modified = fs::metadata(&path).and_then(|m| m.modified()).map_err(io_error("look at", &path))?;
            state.changed = state.changed.max(modified);
            state.segments.push(Segment { path, bytes: scan.good, batches: scan.batches });
        }
        if let Some(segment) = state.segments.iter().rev().find(|s| !s.batches.is_empty())
            && let Some(batch) = segment.batches.last()
        {
            let records = segment::read_batch(&segment.path, batch)?;
            state.closed = matches!(records.last().map(|r| &r.body), Some(Body::Closed(_)));
        }
        // A lost or odd mark only means that records are sent again, which is harmless. One beyond the end means that
        // records are gone.
        let mark = dir.join("acked");
        state.acked = fs::read_to_string(&mark).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
        if state.acked > state.last_seq {
            let what = format!("{} was acknowledged and the records end at {}", state.acked, state.last_seq);
            return Err(corrupt(&mark, 0, what));
        }
        let spool = Self {
            dir: dir.to_owned(),
            meta,
            min_free_bytes,
            state: Mutex::new(state),
            writing: AtomicBool::new(false),
            committed,
        };
        Ok(Some((spool, torn)))
    }

    pub fn meta(&self) -> &RunMeta {
        &self.meta
    }
    pub fn last_seq(&self) -> u64 {
        self.lock().last_seq
    }
    pub fn acked(&self) -> u64 {
        self.lock().acked
    }
    pub fn closed(&self) -> bool {
        self.lock().closed
    }
    pub(super) fn last_change(&self) -> SystemTime {
        self.lock().changed
    }

    /// The one writer. A second is refused while the first lives, in this process or another.
    pub fn writer(self: &Arc<Self>) -> Result<SpoolWriter, SpoolError> {
        let in_use = || SpoolError::InUse { path: self.dir.clone() };
        {
            let state = self.lock();
            if state.closed {
                return Err(SpoolError::Closed { run: self.meta.run, last_seq: state.last_seq });
            }
        }
        if self.writing.swap(true, Ordering::AcqRel) {
            return Err(in_use());
        }
        let path = self.dir.join("lock");
        let lock = || -> Result<File, SpoolError> {
            let file = OpenOptions::new().create(true).append(true).open(&path).map_err(io_error("open", &path))?;
            match file.try_lock() {
                Ok(()) => Ok(file),
                Err(TryLockError::WouldBlock) => Err(in_use()),
                Err(TryLockError::Error(e)) => Err(io_error("lock", &path)(e)),
            }
        };
        match lock() {
            Ok(file) => {
                let next_seq = self.lock().last_seq + 1;
                Ok(SpoolWriter {
                    spool: self.clone(),
                    _lock: file,
                    file: None,
                    next_seq,
                    pending: Vec::new(),
                    pending_count: 0,
                    closing: false,
                    terminal: false,
                })
            }
            Err(e) => {
                self.writing.store(false, Ordering::Release);
                Err(e)
            }
        }
    }

    /// Committed records after `after`, in order: whole batches until `max_bytes` are reached, cut to fit a frame.
    pub fn read_after(&self, after: u64, max_bytes: usize) -> Result<Vec<Record>, SpoolError> {
        let wanted: Vec<(PathBuf, Batch)> = {
            let state = self.lock();
            let mut bytes = 0;
            state
                .segments
                .iter()
                .flat_map(|s| s.batches.iter().map(|b| (s.path.clone(), *b)))
                .filter(|(_, b)| b.last_seq() > after)
                .take_while(|(_, b)| {
                    let first = bytes == 0;
                    bytes += b.payload as usize;
                    first || bytes <= max_bytes
                })
                .collect()
        };
        let (mut out, mut size) = (Vec::new(), 0);
        for (path, batch) in wanted {
            for record in segment::read_batch(&path, &batch)? {
                if record.seq <= after {
                    continue;
                }
                // Encoded once more to know its size; a batch may be larger than what one frame takes.
                size += codec::encode(Lane::Evidence, &record)
                    .map_err(|source| SpoolError::Encode { run: self.meta.run, source })?
                    .len();
                if !out.is_empty() && size > max_bytes {
                    return Ok(out);
                }
                out.push(record);
            }
        }
        Ok(out)
    }

    /// Everything that is on disk, in order: how a restarted agent learns which blocks ended.
    pub fn records(&self) -> Result<Vec<Record>, SpoolError> {
        self.read_after(0, usize::MAX)
    }

    /// The coordinator committed everything up to `through`. Never goes back.
    pub fn set_acked(&self, through: u64) -> Result<(), SpoolError> {
        {
            let mut state = self.lock();
            if through > state.last_seq {
                let run = self.meta.run;
                return Err(SpoolError::AckBeyondEnd { run, acked: through, last_seq: state.last_seq });
            }
            if through <= state.acked {
                return Ok(());
            }
            state.acked = through;
        }
        // Not waited for: losing it only sends some records again.
        let (path, new) = (self.dir.join("acked"), self.dir.join("acked.new"));
        fs::write(&new, through.to_string()).map_err(io_error("write", &new))?;
        fs::rename(&new, &path).map_err(io_error("write", &path))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Changed by plain assignments after the disk answered; a panic elsewhere cannot leave it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The measuring side's handle: synchronous, single.
#[derive(Debug)]
pub struct SpoolWriter {
    spool: Arc<RunSpool>,
    _lock: File,
    /// The segment being written; `None` until the next commit opens one.
    file: Option<File>,
    next_seq: u64,
    pending: Vec<u8>,
    pending_count: u32,
    closing: bool,
    /// The end of a block or of the run is among what is buffered.
    terminal: bool,
}

impl SpoolWriter {
    /// Gives the record its number and buffers it. Nothing is durable, nor seen by the sender, until `commit`.
    pub fn append(&mut self, generation: Generation, at: Micros, body: Body) -> Result<u64, SpoolError> {
        let meta = self.spool.meta.clone();
        if self.closing {
            return Err(SpoolError::Closed { run: meta.run, last_seq: self.next_seq - 1 });
        }
        if self.pending.len() > segment::MAX_PAYLOAD - MAX_RECORD {
            return Err(SpoolError::CommitDue { run: meta.run, bytes: self.pending.len() });
        }
        let closing = matches!(body, Body::Closed(_));
        let terminal = closing || matches!(body, Body::BlockEnded(_));
        let seq = self.next_seq;
        let record =
            Record { registration: meta.registration, run: meta.run, host: meta.host, seq, at, generation, body };
        let before = self.pending.len();
        segment::push_record(&mut self.pending, &record)
            .map_err(|source| SpoolError::Encode { run: meta.run, source })?;
        let bytes = self.pending.len() - before;
        if bytes > MAX_RECORD {
            self.pending.truncate(before);
            return Err(SpoolError::RecordTooLong { run: meta.run, bytes });
        }
        self.pending_count += 1;
        self.next_seq += 1;
        self.closing = closing;
        self.terminal |= terminal;
        Ok(seq)
    }

    /// Refuses when the disk is so full that nothing may be begun that will have to be recorded.
    pub fn room(&self) -> Result<(), SpoolError> {
        check_space(&self.spool.dir, self.spool.min_free_bytes)
    }

    /// True when so much is buffered that a commit is due at the next chance outside a timed window.
    pub fn commit_due(&self) -> bool {
        self.pending.len() >= BATCH_BYTES
    }

    /// Writes what is buffered and waits for the disk. After an error nothing of it counts as written; calling again
    /// tries again. The space that is to stay free is a reserve for ends: what ends a block or the run may use it.
    pub fn commit(&mut self) -> Result<u64, SpoolError> {
        if self.pending_count == 0 {
            return Ok(self.next_seq - 1);
        }
        if !self.terminal {
            self.room()?;
        }
        let first_seq = self.next_seq - u64::from(self.pending_count);
        let bytes = segment::encode_batch(first_seq, self.pending_count, &self.pending);
        let (path, offset) = self.segment(first_seq)?;
        let Some(file) = self.file.as_mut() else {
            unreachable!("segment() has just opened it");
        };
        if let Err(e) = file.write_all(&bytes).and_then(|()| file.sync_data()) {
            // Opening it again cuts what was written of the batch.
            self.file = None;
            return Err(io_error("write evidence to", &path)(e));
        }
        let batch = Batch { offset, first_seq, count: self.pending_count, payload: self.pending.len() as u32 };
        self.pending.clear();
        self.pending_count = 0;
        self.terminal = false;
        let last_seq = batch.last_seq();
        {
            let mut state = self.spool.lock();
            if let Some(segment) = state.segments.last_mut() {
                segment.bytes = batch.end();
                segment.batches.push(batch);
            }
            state.last_seq = last_seq;
            state.closed = self.closing;
            state.changed = SystemTime::now();
        }
        self.spool.committed.notify_one();
        Ok(last_seq)
    }

    pub fn last_committed(&self) -> u64 {
        self.spool.last_seq()
    }

    pub fn spool(&self) -> &Arc<RunSpool> {
        &self.spool
    }

    /// The segment to append to, opened, and where the next batch goes.
    fn segment(&mut self, first_seq: u64) -> Result<(PathBuf, u64), SpoolError> {
        let last = self.spool.lock().segments.last().map(|s| (s.path.clone(), s.bytes));
        if let Some((path, bytes)) = last
            && bytes < SEGMENT_BYTES
        {
            if self.file.is_none() {
                let file = OpenOptions::new().append(true).open(&path).map_err(io_error("open", &path))?;
                // Behind what is known to be whole lies at most what a failed write left, of this writer or an earlier.
                file.set_len(bytes).map_err(io_error("cut a failed write of", &path))?;
                self.file = Some(file);
            }
            return Ok((path, bytes));
        }
        let path = self.spool.dir.join(format!("segment-{first_seq:020}"));
        // Truncated: a file of that name can only be what a failed attempt left, before it was known to anyone.
        let file = File::create(&path).and_then(|_| OpenOptions::new().append(true).open(&path));
        self.file = Some(file.map_err(io_error("make", &path))?);
        sync_dir(&self.spool.dir)?;
        self.spool.lock().segments.push(Segment { path: path.clone(), bytes: 0, batches: Vec::new() });
        Ok((path, 0))
    }
}

impl Drop for SpoolWriter {
    fn drop(&mut self) {
        if self.pending_count > 0 {
            tracing::error!(run = %self.spool.meta.run, records = self.pending_count, "evidence dropped without a commit");
        }
        self.spool.writing.store(false, Ordering::Release);
    }
}

fn segments_of(dir: &Path) -> Result<Vec<PathBuf>, SpoolError> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        let entry = entry.map_err(io_error("list", dir))?;
        if entry.file_name().to_str().is_some_and(|n| n.starts_with("segment-")) {
            out.push(entry.path());
        }
    }
    // Zero-padded numbers sort as text.
    out.sort();
    Ok(out)
}

fn check_space(dir: &Path, wanted: u64) -> Result<(), SpoolError> {
    let stat = nix::sys::statvfs::statvfs(dir).map_err(|e| io_error("ask for free space on", dir)(e.into()))?;
    let free = stat.blocks_available() * stat.fragment_size();
    if free < wanted {
        return Err(SpoolError::DiskFull { path: dir.to_owned(), free, wanted });
    }
    Ok(())
}

fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), SpoolError> {
    let new = path.with_extension("new");
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(io_error("write", path))
}

fn sync_dir(dir: &Path) -> Result<(), SpoolError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(io_error("sync the folder", dir))
}
