//! Launch gates: what must be known and true before anything is launched, as a table of evidence. They fail closed: what
//! could not be found out, or is zero, is a refusal.

mod rows;

use std::{collections::BTreeMap, fmt};

use drums_common::{clock::Micros, ids::HostId};
use serde::{Deserialize, Serialize};

use crate::{
    ask::Ask,
    cloud::{Account, Canary, ImageFacts, Instance, Placement, Quota, TypeFacts},
    deadline::Campaign,
    failure::CloudError,
    host::OwnedHost,
    money::{Quoted, UsdMicros},
    spend::Meter,
    words::Region,
};

/// What one gate asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gate {
    /// The credentials hold, and are of the account that the operator named.
    Account,
    /// This machine's clock agrees with AWS's.
    Clock,
    /// The deadline is far enough away to be of use, and not farther than the maximum.
    Deadline,
    /// Not more hosts at once than the operator allows.
    Hosts,
    /// A type of that name, with processors of its own, in the zones wanted.
    Type,
    /// Nested virtualisation is offered, where it is wanted.
    Nested,
    Image,
    /// AWS's quota of virtual CPUs.
    Quota,
    /// Both prices are known, and of when.
    Price,
    /// The launch itself, by `DryRun`, in every subnet named.
    Launch,
    /// Terminating is permitted, by `DryRun`.
    Terminate,
    /// The one-time schedule's group, role and dead-letter queue.
    Schedule,
    /// The sweeper saw its canary in that region lately.
    Sweeper,
    /// Worst case under the run's cap.
    RunCap,
    /// Worst case of the dearest day under the day's cap.
    DayCap,
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Account => "account",
            Self::Clock => "clock",
            Self::Deadline => "deadline",
            Self::Hosts => "hosts",
            Self::Type => "type",
            Self::Nested => "nested",
            Self::Image => "image",
            Self::Quota => "quota",
            Self::Price => "price",
            Self::Launch => "launch",
            Self::Terminate => "terminate",
            Self::Schedule => "schedule",
            Self::Sweeper => "sweeper",
            Self::RunCap => "run cap",
            Self::DayCap => "day cap",
        })
    }
}

/// One gate about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub gate: Gate,
    /// A host, a region or the campaign.
    pub about: String,
    pub passed: bool,
    /// What was found; of a refusal also what to do.
    pub evidence: String,
}

/// What was found out; a call that failed is kept as its failure.
#[derive(Clone, Debug)]
pub struct Facts {
    pub account: Result<Account, CloudError>,
    /// 12 digits, from the operator's configuration.
    pub expected_account: String,
    pub local: Micros,
    /// The canaries that the sweeper knows, as they are shown.
    pub canaries: Vec<(Canary, Result<Instance, CloudError>)>,
    /// How long ago a sweep may have been. Zero is refused.
    pub sweep_age_ms: u64,
    /// [`Cloud::would_terminate`](crate::cloud::Cloud::would_terminate) of the region's canary.
    pub terminate: BTreeMap<Region, Result<(), CloudError>>,
    /// [`Cloud::prove_schedules`](crate::cloud::Cloud::prove_schedules).
    pub schedules: BTreeMap<Region, Result<String, CloudError>>,
    pub hosts: BTreeMap<HostId, HostFacts>,
    /// Instances of this installation that are not terminated, canaries not counted.
    pub alive: Result<u32, CloudError>,
    /// Every meter of this installation, from the store.
    pub meters: Vec<Meter>,
    /// [`Patience::least_life_ms`](crate::launch::Patience::least_life_ms).
    pub least_life_ms: u64,
}

#[derive(Clone, Debug)]
pub struct HostFacts {
    pub kind: Result<TypeFacts, CloudError>,
    pub image: Result<ImageFacts, CloudError>,
    pub hour: Result<Quoted<UsdMicros>, CloudError>,
    pub gib_month: Result<Quoted<UsdMicros>, CloudError>,
    pub quota: Result<Quoted<Quota>, CloudError>,
    /// [`Cloud::would_run`](crate::cloud::Cloud::would_run) for each placement.
    pub launches: Vec<(Placement, Result<(), CloudError>)>,
}

/// The gates of one ask, in the order of [`Gate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    pub rows: Vec<Row>,
}

/// That every gate of a campaign was passed. Nothing is launched without it; only [`judge`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clearance {
    campaign: Campaign,
    hosts: Vec<HostId>,
}

impl Clearance {
    pub fn clears(&self, host: &OwnedHost) -> bool {
        self.campaign == *host.campaign() && self.hosts.contains(host.host())
    }
}

/// All rows, and the clearance if none of them refuses.
pub fn judge(ask: &Ask, facts: &Facts) -> (Table, Option<Clearance>) {
    let mut rows = rows::all(ask, facts);
    rows.sort_by_key(|r| r.gate);
    let passed = !rows.is_empty() && rows.iter().all(|r| r.passed);
    let clearance = passed.then(|| Clearance {
        campaign: ask.campaign.clone(),
        hosts: ask.hosts.iter().map(|h| h.host.clone()).collect(),
    });
    (Table { rows }, clearance)
}

impl Table {
    pub fn refusals(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|r| !r.passed)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|r| r.about.chars().count()).max().unwrap_or(0);
        for row in &self.rows {
            let verdict = if row.passed { "ok" } else { "REFUSED" };
            writeln!(f, "{:<9}  {:<width$}  {verdict:<7}  {}", row.gate.to_string(), row.about, row.evidence)?;
        }
        Ok(())
    }
}
