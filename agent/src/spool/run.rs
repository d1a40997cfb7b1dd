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
/// Disk space taken ahead behind the records, for the ends: of a block with what was buffered of it, and of the run. What
/// is buffered is half of that at most before it must be committed.
const RESERVED: u64 = 4 << 20;
/// What a buffered batch may hold before it must be committed in pieces.
const BATCH_BYTES: usize = 1 << 20;
/// Files that must still fit on the disk to begin something: a fetched workload's are checked as they are made.
const MIN_NAMES: u64 = 64;
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
    /// Held while segments are written or sealed; before `state`, never inside it.
    segments: Mutex<()>,
    writing: AtomicBool,
    committed: Arc<Notify>,
}

/// A segment that never changes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// 0, 1, 2 ... of the run.
    pub index: u32,
    pub path: PathBuf,
    pub bytes: u64,
    pub first_seq: u64,
    pub last_seq: u64,
    /// The run's last record is in it.
    pub closed: bool,
}

impl RunSpool {
    pub(super) fn create(
        dir: &Path,
        meta: RunMeta,
        min_free_bytes: u64,
        committed: Arc<Notify>,
    ) -> Result<Self, SpoolError> {
        fs::create_dir_all(dir).map_err(io_error("make the folder", dir))?;
        if !segments_of(dir)?.is_empty() {
            return Err(SpoolError::Exists { path: dir.to_owned() });
        }
        let state = State { segments: Vec::new(), last_seq: 0, acked: 0, closed: false, changed: SystemTime::now() };
        let new = Self {
            dir: dir.to_owned(),
            meta,
            min_free_bytes,
            state: Mutex::new(state),
            segments: Mutex::new(()),
            writing: AtomicBool::new(false),
            committed,
        };
        new.lay_out().inspect_err(|_| {
            // Nothing was recorded in it, and half of it would hold space and names on a disk that has none.
            let _ = fs::remove_dir_all(dir);
        })?;
        Ok(new)
    }

    /// Everything that a run will need names for, and space for its ends: what is missing shows before it begins.
    fn lay_out(&self) -> Result<(), SpoolError> {
        let json = serde_json::to_vec(&self.meta).expect("strings always serialise");
        write_whole(&self.dir.join("meta.json"), &json)?;
        self.begin_segment(1)?;
        sync_dir(self.dir.parent().unwrap_or(&self.dir))
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
            segments: Mutex::new(()),
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
                    reserved_to: 0,
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

    /// Ends the segment that is being written: what is in it never changes again. Waits for a commit under way.
    pub fn seal(&self) -> Result<(), SpoolError> {
        let _alone = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let (open, next_seq) = {
            let state = self.lock();
            let last = state.segments.last().filter(|s| !state.closed && !s.batches.is_empty());
            (last.map(|s| (s.path.clone(), s.bytes)), state.last_seq + 1)
        };
        let Some((path, bytes)) = open else { return Ok(()) };
        // Behind what is known to be whole lies at most what a failed write left; with a segment after it, it would be
        // taken for damage.
        let file = OpenOptions::new().write(true).open(&path).map_err(io_error("open", &path))?;
        file.set_len(bytes).and_then(|()| file.sync_all()).map_err(io_error("cut a failed write of", &path))?;
        self.begin_segment(next_seq).map(drop)
    }

    /// All segments that are sealed, in order.
    pub fn sealed(&self) -> Vec<Sealed> {
        let state = self.lock();
        let count = state.segments.len();
        let sealed = |(i, s): (usize, &Segment)| {
            let (first, last) = (s.batches.first()?, s.batches.last()?);
            let (path, bytes, first_seq, last_seq) = (s.path.clone(), s.bytes, first.first_seq, last.last_seq());
            let closed = state.closed && last_seq == state.last_seq;
            (i + 1 < count || closed).then_some(Sealed { index: 0, path, bytes, first_seq, last_seq, closed })
        };
        // Only the last may be empty, so the index is the place among those that are not.
        let all = state.segments.iter().enumerate().filter_map(sealed).zip(0..);
        all.map(|(s, index)| Sealed { index, ..s }).collect()
    }

    /// A fresh segment behind the others. The caller holds `segments`.
    fn begin_segment(&self, first_seq: u64) -> Result<(PathBuf, File), SpoolError> {
        let path = self.dir.join(format!("segment-{first_seq:020}"));
        // Truncated: a file of that name can only be what a failed attempt left, before it was known to anyone.
        let file = File::create(&path).and_then(|_| OpenOptions::new().append(true).open(&path));
        let file = file.map_err(io_error("make", &path))?;
        reserve(&file, &path, 0, RESERVED).inspect_err(|_| {
            // Nobody knows of it yet.
            let _ = fs::remove_file(&path);
        })?;
        sync_dir(&self.dir)?;
        self.lock().segments.push(Segment { path: path.clone(), bytes: 0, batches: Vec::new() });
        Ok((path, file))
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
    /// The segment being written, by its path; `None` until the next commit opens one.
    file: Option<(PathBuf, File)>,
    /// Space of that file is taken up to here.
    reserved_to: u64,
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

    /// Refuses when the disk is so full that nothing may be begun that will have to be recorded: too few bytes, or too few
    /// names for files.
    pub fn room(&self) -> Result<(), SpoolError> {
        check_space(&self.spool.dir, self.spool.min_free_bytes)?;
        check_names(&self.spool.dir)
    }

    /// True when so much is buffered that a commit is due at the next chance outside a timed window.
    pub fn commit_due(&self) -> bool {
        self.pending.len() >= BATCH_BYTES
    }

    /// Writes what is buffered and waits for the disk. After an error nothing of it counts as written; calling again
    /// tries again. What ends a block or the run uses the space that was taken ahead, and finds it on a disk that others
    /// have filled meanwhile; anything else leaves that space as it is.
    pub fn commit(&mut self) -> Result<u64, SpoolError> {
        if self.pending_count == 0 {
            return Ok(self.next_seq - 1);
        }
        if !self.terminal {
            check_space(&self.spool.dir, self.spool.min_free_bytes)?;
        }
        let first_seq = self.next_seq - u64::from(self.pending_count);
        let bytes = segment::encode_batch(first_seq, self.pending_count, &self.pending);
        let spool = self.spool.clone();
        let _alone = spool.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let (path, offset) = self.segment(first_seq)?;
        let Some((_, file)) = self.file.as_mut() else {
            unreachable!("segment() has just opened it");
        };
        let end = offset + bytes.len() as u64;
        if !self.terminal && self.reserved_to < end + RESERVED {
            // More than is needed, so that not every commit has to.
            self.reserved_to = end + 2 * RESERVED;
            reserve(file, &path, offset, self.reserved_to - offset).inspect_err(|_| self.reserved_to = 0)?;
        }
        if let Err(e) = file.write_all(&bytes).and_then(|()| file.sync_data()) {
            // Opening it again cuts what was written of the batch.
            self.file = None;
            return Err(io_error("write evidence to", &path)(e));
        }
        if self.closing {
            // Nothing follows: the space that was taken ahead is given back. Without that it is only not used.
            let _ = file.set_len(end);
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
        let fresh = match &last {
            Some((_, bytes)) if *bytes < SEGMENT_BYTES => None,
            _ => match self.spool.begin_segment(first_seq) {
                Ok(fresh) => Some(fresh),
                // The last one goes on, longer than it should be, in the space that was taken for it.
                Err(e) if last.is_some() && e.no_space() => None,
                Err(e) => return Err(e),
            },
        };
        match (fresh, last) {
            (Some((path, file)), last) => {
                let written = self.file.replace((path.clone(), file));
                if let (Some((old_path, old)), Some((last_path, bytes))) = (written, last)
                    && old_path == last_path
                {
                    // Nothing follows in it, so the space behind it is given back.
                    let _ = old.set_len(bytes);
                }
                self.reserved_to = RESERVED;
                Ok((path, 0))
            }
            (None, Some((path, bytes))) => {
                if self.file.as_ref().is_none_or(|(opened, _)| *opened != path) {
                    self.file = Some((path.clone(), reopen(&path, bytes)?));
                    self.reserved_to = 0;
                }
                Ok((path, bytes))
            }
            (None, None) => unreachable!("without a last one it is fresh, or an error"),
        }
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

fn check_names(dir: &Path) -> Result<(), SpoolError> {
    let stat = nix::sys::statvfs::statvfs(dir).map_err(|e| io_error("ask for free files on", dir)(e.into()))?;
    let names = stat.files_available();
    // A file system that makes them as it goes says that it has none at all.
    if stat.files() > 0 && names < MIN_NAMES {
        return Err(SpoolError::NoNames { path: dir.to_owned(), free: names, wanted: MIN_NAMES });
    }
    Ok(())
}

/// Takes disk space for a part of the file without making it longer.
fn reserve(file: &File, path: &Path, offset: u64, bytes: u64) -> Result<(), SpoolError> {
    use nix::{errno::Errno, fcntl};
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return Ok(()) };
    match fcntl::fallocate(file, fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, bytes) {
        // A file system that reserves nothing still keeps evidence.
        Ok(()) | Err(Errno::EOPNOTSUPP) => Ok(()),
        Err(e) => Err(io_error("take disk space ahead for", path)(e.into())),
    }
}

/// Opens a segment to write on behind its first `bytes`.
fn reopen(path: &Path, bytes: u64) -> Result<File, SpoolError> {
    let file = OpenOptions::new().append(true).open(path).map_err(io_error("open", path))?;
    // Behind what is known to be whole lies at most what a failed write left, of this writer or an earlier. Cutting also
    // gives back the space that was taken ahead, so only then.
    if file.metadata().map_err(io_error("look at", path))?.len() > bytes {
        file.set_len(bytes).map_err(io_error("cut a failed write of", path))?;
    }
    Ok(file)
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
