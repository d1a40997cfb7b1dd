//! Receipts: when a paid host died, what it left and what it cost; added up per campaign and per experiment.

use std::collections::BTreeMap;

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, HostId},
};
use serde::{Deserialize, Serialize};

use crate::{
    host::OwnedInstance,
    launch::Why,
    money::UsdMicros,
    words::{CampaignId, VolumeId},
};

/// Written once, on an observed `terminated`; or by a person, and then it says so.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    pub host: HostId,
    pub campaign: CampaignId,
    pub experiment: Option<ExperimentId>,
    pub instance: OwnedInstance,
    pub why: Why,
    /// From the intent to launch, which is earlier than any charge.
    pub from: Micros,
    /// First observed to be going: charged no longer.
    pub charged_until: Micros,
    /// First observed as `terminated`; `None` if nobody observed it and a person closed it.
    pub terminated: Option<Micros>,
    /// Volumes that outlived it: empty, or an alarm was raised.
    pub volumes_left: Vec<VolumeId>,
    pub cost: UsdMicros,
}

impl Receipt {
    pub fn billed_ms(&self) -> u64 {
        self.charged_until.ms_since(self.from)
    }
    /// How long after the registered deadline it was seen to be dead, 0 if before; `None` if nobody saw it.
    pub fn after_deadline_ms(&self) -> Option<u64> {
        Some(self.terminated?.ms_since(self.instance.deadline()))
    }
}

/// What receipts come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    pub hosts: u64,
    pub billed_ms: u64,
    pub cost: UsdMicros,
}

impl Sum {
    fn add(&mut self, receipt: &Receipt) {
        self.hosts += 1;
        self.billed_ms = self.billed_ms.saturating_add(receipt.billed_ms());
        self.cost = self.cost.plus(receipt.cost);
    }

    /// For each valid session, rounded up; `None` when there is none: no division makes that a number.
    pub fn per_valid_session(&self, valid: u64) -> Option<UsdMicros> {
        (valid > 0).then(|| UsdMicros(self.cost.0.div_ceil(valid)))
    }

    /// Share of billed time inside measured windows, parts per million; `None` when nothing was billed.
    pub fn measured_ppm(&self, measured_ms: u64) -> Option<u64> {
        let ppm = u128::from(measured_ms) * 1_000_000 / u128::from(self.billed_ms.max(1));
        (self.billed_ms > 0).then(|| u64::try_from(ppm).unwrap_or(u64::MAX))
    }
}

pub fn by_campaign(receipts: &[Receipt]) -> BTreeMap<CampaignId, Sum> {
    let mut sums: BTreeMap<_, Sum> = BTreeMap::new();
    receipts.iter().for_each(|r| sums.entry(r.campaign.clone()).or_default().add(r));
    sums
}

/// Campaigns of no experiment are under `None`.
pub fn by_experiment(receipts: &[Receipt]) -> BTreeMap<Option<ExperimentId>, Sum> {
    let mut sums: BTreeMap<_, Sum> = BTreeMap::new();
    receipts.iter().for_each(|r| sums.entry(r.experiment).or_default().add(r));
    sums
}
