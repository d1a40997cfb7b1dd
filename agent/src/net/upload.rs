//! Sealed evidence to a bucket, while the coordinator is away.
//!
//! The coordinator hands out places ahead, as long as it is there; they are kept on disk, so that a restart does not lose
//! them. Once the dispatch lease is lost, no connection is there and nothing is measured, every run's segments are sealed
//! and put, in order, each once. What was acknowledged goes too: who is away may never come back, and its store with it.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use drums_common::{
    bucket::{self, SegmentHead},
    clock::Micros,
    digest::Sha256,
    ids::RunId,
    telemetry::chain,
    wire::latest::{UploadUrl, Uploads},
};
use quinn::Connection;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::sleep};

use super::{
    link::Shared,
    put::{self, Put, PutError},
};
use crate::spool::{RunSpool, Sealed, Spool, SpoolError};

/// Between two looks while the coordinator is away, and after an attempt that failed; doubling up to the maximum.
const LOOK: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Below the spool's folder; beside the runs' folders, and named like none of them.
const FILE: &str = "uploads.json";

#[derive(Debug, thiserror::Error)]
enum UploadError {
    #[error(transparent)]
    Put(#[from] PutError),
    #[error("cannot seal what is there")]
    Seal(#[source] SpoolError),
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} has {got} bytes, and {wanted} were written", path.display())]
    Short { path: PathBuf, got: u64, wanted: u64 },
    #[error("the bucket takes {places} segments of a run and there are {segments}; the rest stays in the spool")]
    NoPlace { places: usize, segments: usize },
}

/// Where a run's segments may go, and how many went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    /// Only for forgetting it: whether a place still takes anything is the bucket's to say, by its own clock.
    valid_until: Micros,
    places: Vec<UploadUrl>,
    uploaded: u32,
}

/// What the coordinator handed out.
#[derive(Debug)]
pub(super) struct Offers {
    path: PathBuf,
    held: Mutex<BTreeMap<RunId, Offer>>,
}

impl Offers {
    /// Those of an earlier life of this agent. Without the file, or with one that cannot be read, there are none: the
    /// coordinator hands them out again.
    pub fn load(spool: &Path) -> Self {
        let path = spool.join(FILE);
        let held = match fs::read(&path).map(|text| serde_json::from_slice(&text)) {
            Ok(Ok(held)) => held,
            Ok(Err(e)) => {
                tracing::warn!(path = %path.display(), error = %e, "places to upload to cannot be read; they are handed out again");
                BTreeMap::new()
            }
            Err(_) => BTreeMap::new(),
        };
        Self { path, held: Mutex::new(held) }
    }

    /// Takes what the coordinator hands out. Runs that it does not name keep theirs until those are no longer valid.
    pub fn take(&self, uploads: Uploads, now: Micros) {
        let mut held = self.lock();
        held.retain(|_, offer| now < offer.valid_until);
        for run in uploads.runs {
            let uploaded = held.get(&run.run).map_or(0, |o| o.uploaded);
            held.insert(run.run, Offer { valid_until: now.plus_ms(run.valid_ms), places: run.segments, uploaded });
        }
        self.save(&held);
    }

    fn get(&self, run: RunId) -> Option<Offer> {
        self.lock().get(&run).cloned()
    }

    fn uploaded(&self, run: RunId, through: u32) {
        let mut held = self.lock();
        if let Some(offer) = held.get_mut(&run) {
            offer.uploaded = offer.uploaded.max(through);
        }
        self.save(&held);
    }

    /// Only root reads it: who has a place can write there. Losing it costs nothing while the coordinator is there.
    fn save(&self, held: &BTreeMap<RunId, Offer>) {
        let new = self.path.with_extension("new");
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(held).map_err(io::Error::other)?;
            let mut file = fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
            io::Write::write_all(&mut file, &text)?;
            fs::rename(&new, &self.path)
        };
        if let Err(e) = write() {
            tracing::warn!(path = %self.path.display(), error = %e, "places to upload to were not written down");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RunId, Offer>> {
        // Single inserts and assignments; a panic elsewhere cannot leave it half-changed.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything that is on disk of a run is in its bucket.
    pub fn all_uploaded(&self, run: &RunSpool) -> bool {
        let sealed = run.sealed();
        let all = sealed.last().is_some_and(|s| s.last_seq == run.last_seq());
        all && self.get(run.meta().run).is_some_and(|o| o.uploaded as usize >= sealed.len())
    }
}

/// What of a run is to be put, and where.
fn due(offer: &Offer, sealed: &[Sealed]) -> Result<Vec<(Sealed, UploadUrl)>, UploadError> {
    let waiting = sealed.get(offer.uploaded as usize..).unwrap_or_default();
    if waiting.is_empty() {
        return Ok(Vec::new());
    }
    let place = |s: &Sealed| Some((s.clone(), offer.places.get(s.index as usize)?.clone()));
    let due: Vec<_> = waiting.iter().filter_map(place).collect();
    if due.is_empty() {
        return Err(UploadError::NoPlace { places: offer.places.len(), segments: sealed.len() });
    }
    Ok(due)
}

/// The uploader: a task for the agent's life.
pub(super) struct Uploader {
    pub shared: Arc<Shared>,
    pub spool: Arc<Spool>,
    pub offers: Arc<Offers>,
    /// The connection of the moment; while there is one, evidence goes over it.
    pub current: watch::Receiver<Option<Connection>>,
    pub ca_file: PathBuf,
}

impl Uploader {
    pub async fn run(mut self) {
        let mut pause = LOOK;
        let mut last_words: BTreeMap<RunId, String> = BTreeMap::new();
        // Ends with the link.
        while self.current.wait_for(Option::is_none).await.is_ok() {
            self.shared.not_quiet().await;
            let mut failed = false;
            for run in self.spool.runs() {
                let id = run.meta().run;
                if let Err(e) = self.upload(&run).await {
                    failed = true;
                    let words = chain(&e);
                    // The same trouble once.
                    if last_words.insert(id, words.clone()).is_none_or(|before| before != words) {
                        tracing::warn!(run = %id, error = words, "evidence was not uploaded; trying again");
                    }
                }
            }
            pause = if failed { (pause * 2).min(MAX_PAUSE) } else { LOOK };
            sleep(pause).await;
        }
    }

    /// All that is due of one run, unless the coordinator is back.
    async fn upload(&self, run: &Arc<RunSpool>) -> Result<(), UploadError> {
        let id = run.meta().run;
        let Some(offer) = self.offers.get(id) else { return Ok(()) };
        if !self.shared.away() {
            return Ok(());
        }
        let sealing = run.clone();
        let sealed = blocking(move || sealing.seal().map(|()| sealing.sealed())).await.map_err(UploadError::Seal)?;
        for (segment, url) in due(&offer, &sealed)? {
            if !self.shared.away() {
                return Ok(());
            }
            let of = run.clone();
            let (part, through) = (segment.clone(), segment.index + 1);
            let object = blocking(move || object(&of, &part)).await?;
            let bytes = object.len();
            let put = put::put(&url, object, &self.ca_file).await?;
            self.offers.uploaded(id, through);
            let was_there = put == Put::WasThere;
            tracing::info!(run = %id, segment = segment.index, last_seq = segment.last_seq, bytes, was_there, closed = segment.closed, "evidence uploaded");
        }
        Ok(())
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}

fn object(run: &RunSpool, sealed: &Sealed) -> Result<Vec<u8>, UploadError> {
    let path = sealed.path.clone();
    let segment = fs::read(&path).map_err(|source| UploadError::Read { path: path.clone(), source })?;
    if segment.len() as u64 != sealed.bytes {
        return Err(UploadError::Short { path, got: segment.len() as u64, wanted: sealed.bytes });
    }
    let meta = run.meta();
    let head = SegmentHead {
        run: meta.run,
        registration: meta.registration,
        host: meta.host.clone(),
        index: sealed.index,
        first_seq: sealed.first_seq,
        last_seq: sealed.last_seq,
        closed: sealed.closed,
        bytes: sealed.bytes,
        sha256: Sha256::of(&segment),
    };
    Ok(bucket::pack(head, &segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: RunId = RunId([1; 6]);

    fn sealed(index: u32) -> Sealed {
        Sealed { index, path: "/x".into(), bytes: 1, first_seq: 1, last_seq: 2, closed: false }
    }

    fn places(n: usize) -> Vec<UploadUrl> {
        (0..n).map(|i| UploadUrl(format!("https://b/{i}?signature"))).collect()
    }

    fn offered(n: usize, valid_ms: u64) -> Uploads {
        let run = drums_common::wire::latest::RunUploads { run: RUN, segments: places(n), valid_ms };
        Uploads { runs: vec![run] }
    }

    #[test]
    fn what_is_due_is_what_was_sealed_and_not_put_yet() {
        let offer = Offer { valid_until: Micros(10), places: places(3), uploaded: 1 };
        let all: Vec<Sealed> = (0..5).map(sealed).collect();
        let urls = |r: Result<Vec<(Sealed, UploadUrl)>, UploadError>| {
            r.unwrap().into_iter().map(|(s, u)| (s.index, u.shown().to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(urls(due(&offer, &all[..2])), [(1, "https://b/1".to_owned())]);
        assert_eq!(urls(due(&offer, &all[..1])), []);
        assert_eq!(urls(due(&offer, &all)).len(), 2, "as far as there are places");
        let full = Offer { uploaded: 3, ..offer };
        assert!(matches!(due(&full, &all), Err(UploadError::NoPlace { places: 3, segments: 5 })));
    }

    #[test]
    fn offers_are_kept_over_a_restart_by_root_alone_and_no_longer_than_valid() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let offers = Offers::load(dir.path());
        offers.take(offered(2, 5), Micros(1_000));
        offers.uploaded(RUN, 1);
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = Offers::load(dir.path());
        assert_eq!(again.get(RUN), Some(Offer { valid_until: Micros(6_000), places: places(2), uploaded: 1 }));
        // Renewed: what went, went.
        again.take(offered(3, 5), Micros(2_000));
        assert_eq!(again.get(RUN), Some(Offer { valid_until: Micros(7_000), places: places(3), uploaded: 1 }));
        again.take(Uploads::default(), Micros(6_999));
        assert!(again.get(RUN).is_some());
        again.take(Uploads::default(), Micros(7_000));
        assert!(again.get(RUN).is_none());
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(Offers::load(dir.path()).get(RUN).is_none());
    }
}
