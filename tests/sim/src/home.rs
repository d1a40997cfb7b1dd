//! The coordinator's home in a simulation: the real store, control and driver, without threads, and an analyst that tells
//! from the evidence at once what the analysis would take a minute for.

use std::{
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering},
    },
};

use drums_common::{
    clock::Clock,
    evidence::{BlockKind, BlockResult, Body},
    experiment::Registration,
    ids::HostId,
    lease::LeaseTimes,
    verdict::Verdict,
    wire::latest::Beat,
};
use drums_coordinator::{
    artifacts::Artifacts,
    core::run::{Event, Pending, RunState},
    net::ports::Peer,
    store::{SharedStore, SqliteStore, StoreError, StoreHandle},
    tasks::{Analyst, Control, Driver, analysis_inputs},
};
use futures_util::{FutureExt as _, future::BoxFuture};

use crate::{
    fleet,
    truth::{Broken, Truth},
};

/// What survives every coordinator.
#[derive(Clone)]
pub struct Home {
    store: SharedStore,
    fuse: Arc<AtomicI64>,
    dir: std::path::PathBuf,
}

/// Far from burning down.
const NO_FUSE: i64 = i64::MAX / 2;

impl Home {
    pub fn furnish(dir: &std::path::Path, peers: &[Peer]) -> Result<Self, StoreError> {
        let mut store = SqliteStore::in_memory()?;
        fleet::furnish(&mut store, peers)?;
        let store: SharedStore = Arc::new(Mutex::new(Box::new(store)));
        Ok(Self { store, fuse: Arc::new(AtomicI64::new(NO_FUSE)), dir: dir.to_owned() })
    }

    /// A coordinator on it, and the driver for whoever keeps the time.
    pub async fn open(&self, clock: Arc<dyn Clock>, times: LeaseTimes) -> Result<(Arc<Control>, Driver), StoreError> {
        self.fuse.store(NO_FUSE, Ordering::Relaxed);
        let artifacts = Artifacts::new(self.dir.join("artifacts"));
        Control::open(self.handle(), artifacts, clock, times, None, Arc::new(Plain)).await
    }

    fn handle(&self) -> StoreHandle {
        let fuse = self.fuse.clone();
        StoreHandle::of_caller(self.store.clone(), Arc::new(move || fuse.fetch_sub(1, Ordering::Relaxed) > 0))
    }

    /// The coordinator will be killed at the `n`-th of the instants before and after its uses of the store.
    pub fn light_fuse(&self, n: u32) {
        self.fuse.store(i64::from(n), Ordering::Relaxed);
    }

    pub fn burnt(&self) -> bool {
        self.fuse.load(Ordering::Relaxed) <= 0
    }

    /// Looks at the store from outside.
    pub fn read<T>(
        &self,
        f: impl FnOnce(&mut dyn drums_coordinator::store::Store) -> Result<T, StoreError>,
    ) -> Result<T, String> {
        let mut store = self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        f(store.as_mut()).map_err(|e| drums_common::telemetry::chain(&e))
    }
}

impl Home {
    /// Tells the truth which hosts have been fenced.
    pub fn tell_fences(&self, truth: &mut Truth, now_us: u64) -> Result<(), Broken> {
        for row in self.read(|s| s.hosts())? {
            truth.fenced(&row.host, row.generation.0, now_us)?;
        }
        Ok(())
    }
}

/// Does what waits for nothing but the store, which is there at once.
pub fn now<T>(work: impl Future<Output = T>) -> Option<T> {
    work.now_or_never()
}

/// A beat counts, answered or not: not all are.
pub fn renews(control: &Control, peer: &Peer, beat: &Beat) -> bool {
    control.health(&peer.host).is_some_and(|(_, lease, _)| lease.generation == beat.generation)
}

/// Passes when every block that counts is there, and voids those that did not settle.
struct Plain;

impl Analyst for Plain {
    fn answer(
        &self,
        store: StoreHandle,
        registration: Arc<Registration>,
        state: RunState,
        pending: Pending,
    ) -> BoxFuture<'static, Result<Event, StoreError>> {
        Box::pin(async move {
            let (meta, records) = store.call(move |s| analysis_inputs(s, &state)).await?;
            let late = |host: &HostId, seq| meta.late.get(host).is_some_and(|l| l.contains(&seq));
            let (mut voided, mut sound) = (Vec::new(), 0);
            for r in records.iter().filter(|r| !late(&r.host, r.seq)) {
                if let Body::BlockEnded(b) = &r.body
                    && (b.kind, &b.result) == (BlockKind::Measured, &BlockResult::Completed)
                {
                    if b.environment.settled {
                        sound += 1;
                    } else {
                        voided.push((r.host.clone(), b.block));
                    }
                }
            }
            let e = &registration.experiment;
            Ok(match pending {
                Pending::FindVoids => Event::Voids(voided),
                Pending::Analyse => Event::Analysed {
                    verdict: if sound >= e.design.blocks_per_host * e.hosts.count {
                        Verdict::Pass
                    } else {
                        Verdict::Invalid
                    },
                },
            })
        })
    }
}
