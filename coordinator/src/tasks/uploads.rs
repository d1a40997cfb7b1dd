//! Places in the bucket for the evidence of hosts whose coordinator goes away, handed out while it is here.
//!
//! What judging a run takes lies in the bucket before the first place is handed out: whoever uploads evidence later adds
//! to something that can be verified.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use drums_common::{
    bucket::{HostDoc, InstallationDoc, Key, LAYOUT, RegistrationDoc, RunDoc, SEGMENTS, document},
    digest::Sha256,
    ids::{HostId, RunId},
    wire::latest::{RunUploads, Uploads},
};

use super::Control;
use crate::{
    bucket::{Bucket, BucketError},
    net::ports::Peer,
    store::StoreError,
};

/// An agent uploads for as long as its life lease lasts after the last word from here, and then closes and uploads the
/// rest. Twice that and an hour: places are renewed at half of it, so that what an agent holds is good for that long at
/// any time.
const BESIDE_LIFE_MS: u64 = 60 * 60_000;
/// S3 signs for no longer than a week.
const LONGEST_MS: u64 = 7 * 24 * 60 * 60_000;
/// Documents that are known to be there; more are written again, which changes nothing.
const REMEMBERED: usize = 65_536;

#[derive(Debug, thiserror::Error)]
pub enum OfferError {
    #[error(transparent)]
    Bucket(#[from] BucketError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The bucket, and what of it is known to be there.
pub struct Uploading {
    bucket: Bucket,
    ca_sha256: Sha256,
    written: Mutex<HashSet<Key>>,
}

impl Uploading {
    pub fn new(bucket: Bucket, ca_sha256: Sha256) -> Self {
        Self { bucket, ca_sha256, written: Mutex::default() }
    }

    /// Forgets everything rather than grow without bound.
    fn remember(&self, key: Key) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.len() >= REMEMBERED {
            written.clear();
        }
        written.insert(key);
    }

    fn is_written(&self, key: &Key) -> bool {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).contains(key)
    }
}

pub(super) fn valid_ms(life_ms: u64) -> u64 {
    life_ms.saturating_add(BESIDE_LIFE_MS).saturating_mul(2).min(LONGEST_MS)
}

impl Control {
    /// Places for these runs' evidence on a host; none without a bucket.
    pub(super) async fn offer(&self, peer: &Peer, runs: &[RunId]) -> Result<Uploads, OfferError> {
        let Some(to) = &self.uploading else { return Ok(Uploads::default()) };
        let valid_ms = valid_ms(self.leases().times().life_ms);
        let mut out = Vec::new();
        for run in runs {
            // A run that is not stored, or has this host no more, is not asked about again once orders say so.
            if !self.describe(to, peer, *run).await? {
                continue;
            }
            let mut segments = Vec::new();
            for index in 0..SEGMENTS {
                let key = Key::Segment(*run, peer.host.clone(), index).of(self.installation);
                segments.push(to.bucket.place(&key, Duration::from_millis(valid_ms)).await?);
            }
            out.push(RunUploads { run: *run, segments, valid_ms });
        }
        Ok(Uploads { runs: out })
    }

    /// Writes what a verdict on the run takes beside its evidence. False if there is no such run of this host.
    async fn describe(&self, to: &Uploading, peer: &Peer, run: RunId) -> Result<bool, OfferError> {
        let last = Key::Host(run, peer.host.clone());
        if to.is_written(&last) {
            return Ok(true);
        }
        let Some(documents) = self.documents(to, peer, run).await? else { return Ok(false) };
        for (key, bytes) in documents {
            if !to.is_written(&key) {
                to.bucket.put(&key.of(self.installation), bytes).await?;
                to.remember(key);
            }
        }
        Ok(true)
    }

    async fn documents(
        &self,
        to: &Uploading,
        peer: &Peer,
        run: RunId,
    ) -> Result<Option<Vec<(Key, Vec<u8>)>>, StoreError> {
        let host = peer.host.clone();
        let found = self
            .store
            .call(move |s| {
                let Some(row) = s.run(run)?.filter(|r| r.state.host(&host).is_some()) else { return Ok(None) };
                let sha256 = row.state.registration;
                let registration = s.registration(sha256)?;
                Ok(registration.zip(s.spec_of(sha256)?).map(|of_it| (row.state, of_it, s.host(&host))))
            })
            .await?;
        let Some((state, (registration, spec), host_row)) = found else { return Ok(None) };
        let hosts: Vec<HostId> = state.hosts.iter().map(|h| h.host.clone()).collect();
        let installation = InstallationDoc { layout: LAYOUT, installation: self.installation, ca_sha256: to.ca_sha256 };
        let frozen =
            RegistrationDoc { registered_at: registration.registered_at, canonical: registration.canonical, spec };
        let of_run = RunDoc { run, registration: registration.sha256, number: state.number, hosts };
        let of_host = HostDoc {
            host: peer.host.clone(),
            installation: peer.installation,
            certificate_sha256: peer.certificate,
            facts: host_row?.and_then(|r| r.facts),
        };
        Ok(Some(vec![
            (Key::Installation, document(&installation)),
            (Key::Registration(registration.sha256), document(&frozen)),
            (Key::Run(run), document(&of_run)),
            (Key::Host(run, peer.host.clone()), document(&of_host)),
        ]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_outlast_a_life_lease_at_any_time() {
        for life_ms in [12_000, 30 * 60_000, 24 * 3_600_000] {
            assert!(valid_ms(life_ms) / 2 > life_ms, "{life_ms}");
        }
        assert_eq!(valid_ms(u64::MAX), LONGEST_MS);
    }
}
