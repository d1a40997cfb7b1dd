//! What paid hosts cost: worst case, so far, by day; and what the caps say of it.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, HostId},
};
use serde::{Deserialize, Serialize};

use crate::{
    money::{Quoted, UsdMicros},
    words::CampaignId,
};

/// The longest that a host may outlive its deadline: with two faults at once. It is paid for, so it is counted.
pub const KILL_BOUND_MS: u64 = 5 * 60_000;
const HOUR_MS: u64 = 3_600_000;
/// AWS prices volumes by months of 730 hours.
const MONTH_MS: u64 = 730 * HOUR_MS;
/// EC2 charges at least one minute.
const LEAST_MS: u64 = 60_000;
const DAY_US: i64 = 86_400_000_000;

/// What one host costs while it exists.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    pub hour: Quoted<UsdMicros>,
    pub gib_month: Quoted<UsdMicros>,
    pub volume_gib: u32,
}

impl Rates {
    /// Of a host that existed for so long: instance and volumes.
    pub fn cost(&self, ms: u64) -> UsdMicros {
        let ms = ms.max(LEAST_MS);
        let volumes = self.gib_month.value.times(u64::from(self.volume_gib));
        self.hour.value.for_ms(ms, HOUR_MS).plus(volumes.for_ms(ms, MONTH_MS))
    }

    /// From `from` to the last moment at which it can still be alive.
    pub fn worst_case(&self, from: Micros, deadline: Micros) -> UsdMicros {
        self.cost(deadline.plus_ms(KILL_BOUND_MS).ms_since(from))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// Still charged, as far as anybody has observed.
    Deadline(Micros),
    /// Charged no longer: observed.
    Ended(Micros),
}

/// One host's meter: it runs from the intent to launch, which is earlier than any charge.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meter {
    pub host: HostId,
    pub campaign: CampaignId,
    pub experiment: Option<ExperimentId>,
    pub rates: Rates,
    pub from: Micros,
    pub until: Until,
}

impl Meter {
    pub fn is_running(&self) -> bool {
        matches!(self.until, Until::Deadline(_))
    }

    /// So far; a host that outlives its deadline goes on costing.
    pub fn so_far(&self, now: Micros) -> UsdMicros {
        let end = match self.until {
            Until::Ended(at) => at,
            Until::Deadline(_) => now,
        };
        self.rates.cost(end.ms_since(self.from))
    }

    /// In the end, if nothing ends it before it must.
    pub fn worst_case(&self, now: Micros) -> UsdMicros {
        match self.until {
            Until::Ended(_) => self.so_far(now),
            Until::Deadline(deadline) => self.rates.worst_case(self.from, deadline.max(now)),
        }
    }

    /// Worst case by UTC day (days since 1970).
    fn by_day(&self, now: Micros) -> BTreeMap<i64, UsdMicros> {
        let end = match self.until {
            Until::Ended(at) => at,
            Until::Deadline(deadline) => deadline.max(now).plus_ms(KILL_BOUND_MS),
        };
        let mut days = BTreeMap::new();
        let mut from = self.from;
        loop {
            let day = from.0.div_euclid(DAY_US);
            let next = Micros(day.saturating_add(1).saturating_mul(DAY_US));
            days.insert(day, self.rates.cost(end.min(next).ms_since(from)));
            if next >= end {
                return days;
            }
            from = next;
        }
    }
}

/// Caps that must not be passed. There is no way to say "unlimited".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, try_from = "RawCaps")]
pub struct Caps {
    run: UsdMicros,
    day: UsdMicros,
    drain_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCaps {
    run: UsdMicros,
    day: UsdMicros,
    drain_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is 0, which would mean \"nothing\" or \"unlimited\"; give a number")]
pub struct ZeroCap {
    pub what: &'static str,
}

impl Caps {
    /// `drain_ms`: what a host needs to finish its block and upload its evidence; it is told to that long before it is
    /// ended.
    pub fn new(run: UsdMicros, day: UsdMicros, drain_ms: u64) -> Result<Self, ZeroCap> {
        for (what, value) in [("the cap per run", run.0), ("the cap per day", day.0), ("the time to drain", drain_ms)] {
            if value == 0 {
                return Err(ZeroCap { what });
            }
        }
        Ok(Self { run, day, drain_ms })
    }
    pub fn run(&self) -> UsdMicros {
        self.run
    }
    pub fn day(&self) -> UsdMicros {
        self.day
    }
}

impl TryFrom<RawCaps> for Caps {
    type Error = ZeroCap;
    fn try_from(raw: RawCaps) -> Result<Self, ZeroCap> {
        Self::new(raw.run, raw.day, raw.drain_ms)
    }
}

/// What a cap demands of a campaign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// No new blocks; finish, upload, end.
    Stop,
    /// Now.
    Terminate,
}

/// Campaigns with running hosts that a cap demands something of. Each demand comes so early that what it leads to still
/// fits under the cap: a terminate is asked for while the kill bound is still paid for.
pub fn demands(
    caps: &BTreeMap<CampaignId, Caps>,
    meters: &[Meter],
    now: Micros,
) -> BTreeMap<CampaignId, (Demand, String)> {
    let running: BTreeSet<&CampaignId> = meters.iter().filter(|m| m.is_running()).map(|m| &m.campaign).collect();
    let today = now.0.div_euclid(DAY_US);
    let midnight = Micros(today.saturating_mul(DAY_US));
    let of_today = |m: &Meter, at: Micros| {
        let end = if let Until::Ended(end) = m.until { end.min(at) } else { at };
        if end <= midnight { UsdMicros(0) } else { m.rates.cost(end.ms_since(m.from.max(midnight))) }
    };
    let mut found = BTreeMap::new();
    for campaign in running {
        let Some(caps) = caps.get(campaign) else {
            found.insert(
                campaign.clone(),
                (Demand::Terminate, "it has no cap on record, so none of it is allowed".into()),
            );
            continue;
        };
        let demand = |cost: &dyn Fn(Micros) -> UsdMicros, cap: UsdMicros, what: &str| {
            let so_far = cost(now);
            let reaches = |ms: u64| cost(now.plus_ms(ms)) >= cap;
            let demand = if reaches(KILL_BOUND_MS) {
                Demand::Terminate
            } else if reaches(KILL_BOUND_MS + caps.drain_ms) {
                Demand::Stop
            } else {
                return None;
            };
            Some((demand, format!("{what}: {so_far} spent of {cap}")))
        };
        let own = |at| meters.iter().filter(|m| m.campaign == *campaign).map(|m| m.so_far(at)).sum();
        let all = |at| meters.iter().map(|m| of_today(m, at)).sum();
        let both = [demand(&own, caps.run, "cap of the run"), demand(&all, caps.day, "cap of the day")];
        if let Some(worst) = both.into_iter().flatten().max() {
            found.insert(campaign.clone(), worst);
        }
    }
    found
}

/// The dearest day of what runs and of what is to be launched, worst case, and its cost; days before today are paid.
pub fn dearest_day(meters: &[Meter], now: Micros) -> (i64, UsdMicros) {
    let today = now.0.div_euclid(DAY_US);
    let mut days: BTreeMap<i64, UsdMicros> = BTreeMap::from([(today, UsdMicros(0))]);
    for (day, cost) in meters.iter().flat_map(|m| m.by_day(now)) {
        if day >= today {
            let sum = days.entry(day).or_default();
            *sum = sum.plus(cost);
        }
    }
    days.into_iter().max_by_key(|(day, cost)| (*cost, -day)).unwrap_or((today, UsdMicros(0)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::money::Source;

    const NOON: Micros = Micros(20_000 * DAY_US + DAY_US / 2);

    fn rates(hour: u64) -> Rates {
        let quoted = |v| Quoted { value: UsdMicros(v), source: Source::Config("prices.toml".into()), as_of: Micros(0) };
        Rates { hour: quoted(hour), gib_month: quoted(95_200), volume_gib: 30 }
    }

    fn meter(campaign: &str, from: Micros, until: Until) -> Meter {
        let campaign = campaign.parse().unwrap();
        Meter { host: "h1".parse().unwrap(), campaign, experiment: None, rates: rates(400_000), from, until }
    }

    fn caps(run: u64, day: u64) -> BTreeMap<CampaignId, Caps> {
        let caps = Caps::new(UsdMicros(run), UsdMicros(day), 15 * 60_000).unwrap();
        BTreeMap::from([("c1".parse().unwrap(), caps), ("c2".parse().unwrap(), caps)])
    }

    #[test]
    fn an_hour_costs_what_the_price_says_and_the_volumes_part() {
        // 30 GiB for an hour of 730: 30 * 95,200 / 730 = 3,912.3, rounded up.
        assert_eq!(rates(400_000).cost(HOUR_MS), UsdMicros(400_000 + 3_913));
        assert_eq!(rates(400_000).cost(1), rates(400_000).cost(60_000), "a minute is the least");
        let an_hour = NOON.plus_ms(HOUR_MS);
        assert_eq!(rates(400_000).worst_case(NOON, an_hour), rates(400_000).cost(HOUR_MS + KILL_BOUND_MS));
    }

    #[test]
    fn a_cap_stops_and_then_terminates_and_is_not_passed() {
        let meters = [meter("c1", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)))];
        let caps = caps(403_913, 100_000_000);
        let at = |minutes: u64| {
            demands(&caps, &meters, NOON.plus_ms(minutes * 60_000)).get(&"c1".parse().unwrap()).map(|d| d.0)
        };
        assert_eq!(at(39), None);
        assert_eq!(at(40), Some(Demand::Stop));
        assert_eq!(at(54), Some(Demand::Stop));
        assert_eq!(at(55), Some(Demand::Terminate));
        assert_eq!(meters[0].so_far(NOON.plus_ms(55 * 60_000 + KILL_BOUND_MS)), UsdMicros(403_913));
    }

    #[test]
    fn the_days_cap_counts_every_campaign_and_only_today() {
        let yesterday = meter("c2", Micros(NOON.0 - DAY_US), Until::Ended(Micros(NOON.0 - DAY_US).plus_ms(HOUR_MS)));
        let today = meter("c1", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)));
        let later = NOON.plus_ms(HOUR_MS);
        let found = |meters: &[Meter], day| demands(&caps(100_000_000, day), meters, later).len();
        assert_eq!(found(&[yesterday.clone(), today.clone()], 1_000_000), 0);
        let other = meter("c2", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)));
        assert_eq!(found(&[yesterday, today.clone(), other.clone()], 800_000), 2, "both are told");
        assert_eq!(demands(&BTreeMap::new(), &[today], later).len(), 1, "a campaign without a cap is not unlimited");
        assert_eq!(demands(&caps(1, 1), &[Meter { until: Until::Ended(NOON), ..other }], later).len(), 0);
    }

    #[test]
    fn a_launch_over_midnight_counts_for_both_days() {
        let from = Micros(20_001 * DAY_US - 3_600_000_000);
        let over = meter("c1", from, Until::Deadline(from.plus_ms(10 * HOUR_MS)));
        let (day, cost) = dearest_day(std::slice::from_ref(&over), from);
        assert_eq!((day, cost), (20_001, rates(400_000).cost(9 * HOUR_MS + KILL_BOUND_MS)));
        assert_eq!(dearest_day(&[], from), (20_000, UsdMicros(0)));
    }

    #[test]
    fn caps_of_zero_are_refused_also_from_the_store() {
        for (run, day, drain) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
            let e = Caps::new(UsdMicros(run), UsdMicros(day), drain).unwrap_err();
            assert!(e.to_string().contains("is 0"), "{e}");
        }
        assert!(serde_json::from_str::<Caps>(r#"{"run":0,"day":1,"drain_ms":1}"#).is_err());
        assert!(serde_json::from_str::<Caps>(r#"{"run":1,"drain_ms":1}"#).is_err(), "an absent one too");
    }

    proptest! {
        #[test]
        fn cost_never_shrinks_and_never_exceeds_the_worst_case(
            hour in 1u64..100_000_000, life_ms in 0u64..100 * HOUR_MS, a in 0u64..200 * HOUR_MS, b in 0u64..200 * HOUR_MS,
        ) {
            let (a, b) = (a.min(b), a.max(b));
            let m = Meter { rates: rates(hour), ..meter("c1", NOON, Until::Deadline(NOON.plus_ms(life_ms))) };
            prop_assert!(m.so_far(NOON.plus_ms(a)) <= m.so_far(NOON.plus_ms(b)));
            prop_assert!(m.so_far(NOON.plus_ms(b)) <= m.worst_case(NOON.plus_ms(b)));
            let days: UsdMicros = m.by_day(NOON).into_values().sum();
            prop_assert!(days >= m.worst_case(NOON), "days round up, never down");
        }
    }
}
