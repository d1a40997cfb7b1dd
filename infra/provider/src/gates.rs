//! Launch gates: what must be known and true before anything is launched, as a table of evidence. They fail closed: what
//! could not be found out, or is zero, is a refusal.
//!
//! ```text
//! ask, limits ─▶ look ─▶ facts ─▶ judge ─▶ table, and a clearance if all passed
//!                                              │ in the transaction that stores launches, with the books as they are there
//!                                              ▼
//!                                           confirm ─▶ launches, or a table that refuses
//! ```
//! Invariant: what is launched is what was tried and priced: a clearance has the recipes, their schedules' setup and their
//! prices in it, holds for [`HOLDS_MS`], and nothing else makes a launch.

mod look;
mod rows;

use std::{collections::BTreeMap, fmt};

use drums_common::{
    clock::Micros,
    ids::{HostId, InstallationId},
};
use serde::{Deserialize, Serialize};

use crate::{
    ask::Ask,
    books::Books,
    cloud::{Account, Canary, ImageFacts, Instance, Placement, Quota, Recipe, ScheduleSetup, TypeFacts},
    deadline::Campaign,
    failure::CloudError,
    host::OwnedHost,
    launch::Launch,
    limits::Limits,
    money::{Quoted, UsdMicros},
    spend::{Caps, Rates},
    words::Region,
};

pub use look::{RegionSetup, Setup, look};

/// How long a clearance holds. Ten minutes: time for a person to read the table and say yes; what was tried, priced and
/// swept is not much older than that when it counts.
pub const HOLDS_MS: u64 = 10 * 60_000;

/// What one gate asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gate {
    /// The credentials hold, and are of the account that the operator named.
    Account,
    /// This machine's clock agrees with AWS's.
    Clock,
    /// The clearance was given lately.
    Age,
    /// What is stored of the campaign is what is asked for.
    Campaign,
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
    /// The instance profile is there, and hosts may be given it: by it a host without its tags is ended.
    Profile,
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
            Self::Age => "age",
            Self::Campaign => "campaign",
            Self::Deadline => "deadline",
            Self::Hosts => "hosts",
            Self::Type => "type",
            Self::Nested => "nested",
            Self::Image => "image",
            Self::Quota => "quota",
            Self::Price => "price",
            Self::Launch => "launch",
            Self::Profile => "profile",
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
    pub installation: InstallationId,
    pub account: Result<Account, CloudError>,
    pub local: Micros,
    /// The canaries that the sweeper knows, as they are shown.
    pub canaries: Vec<(Canary, Result<Instance, CloudError>)>,
    /// [`Cloud::would_terminate`](crate::cloud::Cloud::would_terminate) of the region's canary.
    pub terminate: BTreeMap<Region, Result<(), CloudError>>,
    /// What schedules are made with, and [`Cloud::prove_schedules`](crate::cloud::Cloud::prove_schedules) of it.
    pub schedules: BTreeMap<Region, (ScheduleSetup, Result<String, CloudError>)>,
    pub hosts: BTreeMap<HostId, HostFacts>,
    /// Instances of this installation that are not terminated, canaries not counted.
    pub alive: Result<u32, CloudError>,
    /// From the store.
    pub books: Books,
}

#[derive(Clone, Debug)]
pub struct HostFacts {
    pub kind: Result<TypeFacts, CloudError>,
    pub image: Result<ImageFacts, CloudError>,
    pub hour: Result<Quoted<UsdMicros>, CloudError>,
    pub gib_month: Result<Quoted<UsdMicros>, CloudError>,
    pub quota: Result<Quoted<Quota>, CloudError>,
    /// What is to be launched, as it was tried.
    pub recipe: Result<Recipe, CloudError>,
    /// [`Cloud::would_run`](crate::cloud::Cloud::would_run) of it in each placement.
    pub launches: Vec<(Placement, Result<(), CloudError>)>,
}

/// The gates of one ask, in the order of [`Gate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    pub rows: Vec<Row>,
}

/// That every gate of an ask was passed, and for what. Nothing is launched without it; only [`judge`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clearance {
    /// When it was given, by AWS's clock.
    at: Micros,
    installation: InstallationId,
    campaign: Campaign,
    caps: Caps,
    limits: Limits,
    /// Instances that AWS showed beyond those in the books.
    unknown: u32,
    hosts: Vec<Cleared>,
}

/// One host of a clearance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cleared {
    host: HostId,
    recipe: Recipe,
    setup: ScheduleSetup,
    rates: Rates,
}

/// All rows, and the clearance if none of them refuses.
pub fn judge(ask: &Ask, limits: &Limits, facts: &Facts) -> (Table, Option<Clearance>) {
    let (rows, clearance) = rows::all(ask, limits, facts);
    let table = Table::new(rows);
    let clearance = clearance.filter(|_| table.passed());
    (table, clearance)
}

impl Clearance {
    /// Who is to have a launch.
    pub fn hosts(&self) -> impl Iterator<Item = (&HostId, &Recipe)> {
        self.hosts.iter().map(|h| (&h.host, &h.recipe))
    }
    pub fn campaign(&self) -> &Campaign {
        &self.campaign
    }
    /// To be stored with the campaign, if it is not stored yet.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// Judged again, within the transaction that stores what comes of it: campaign, caps and launches, whose meters run from
    /// `now` on. `books` are read in the same transaction, `now` is AWS's time.
    pub fn confirm(&self, books: &Books, now: Micros) -> Result<Vec<Launch>, Table> {
        let table = Table::new(rows::again(self, books, now));
        if !table.passed() {
            return Err(table);
        }
        let begin = |h: &Cleared| {
            let host = OwnedHost::first(self.installation, h.host.clone(), self.campaign.clone());
            Launch::begin(host, h.recipe.clone(), h.setup.clone(), h.rates.clone(), now)
        };
        Ok(self.hosts.iter().map(begin).collect())
    }
}

impl Table {
    fn new(mut rows: Vec<Row>) -> Self {
        rows.sort_by_key(|r| r.gate);
        Self { rows }
    }
    /// A table without rows shows nothing, and passes nothing.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|r| r.passed)
    }
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
