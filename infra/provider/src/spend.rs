//! What paid hosts cost: worst case, so far, by day; and the caps on it.

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
        self.cost_by(now, now)
    }

    /// In the end, if nothing ends it before it must.
    pub fn worst_case(&self, now: Micros) -> UsdMicros {
        self.rates.cost(self.last(now).ms_since(self.from))
    }

    /// By then, which may be to come; but for no longer than it can be alive.
    pub fn cost_by(&self, at: Micros, now: Micros) -> UsdMicros {
        self.rates.cost(at.min(self.last(now)).ms_since(self.from))
    }

    /// The last moment at which it can be charged.
    pub fn last(&self, now: Micros) -> Micros {
        match self.until {
            Until::Ended(at) => at,
            Until::Deadline(deadline) => deadline.max(now).plus_ms(KILL_BOUND_MS),
        }
    }

    /// The part of [`Self::cost_by`] that is of one UTC day (days since 1970).
    pub fn cost_in_day(&self, day: i64, at: Micros, now: Micros) -> UsdMicros {
        let begins = |day: i64| Micros(day.saturating_mul(DAY_US));
        let (midnight, next) = (begins(day), begins(day.saturating_add(1)));
        let (from, to) = (self.from.max(midnight), at.min(self.last(now)).min(next));
        // Even one that ended at once costs its least, on the day on which it began.
        let none = self.from >= next || to < from || (to == from && self.from < midnight);
        if none { UsdMicros(0) } else { self.rates.cost(to.ms_since(from)) }
    }
}

/// Days since 1970, in UTC.
pub fn day_of(at: Micros) -> i64 {
    at.0.div_euclid(DAY_US)
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
    pub fn drain_ms(&self) -> u64 {
        self.drain_ms
    }
}

impl TryFrom<RawCaps> for Caps {
    type Error = ZeroCap;
    fn try_from(raw: RawCaps) -> Result<Self, ZeroCap> {
        Self::new(raw.run, raw.day, raw.drain_ms)
    }
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

    #[test]
    fn an_hour_costs_what_the_price_says_and_the_volumes_part() {
        // 30 GiB for an hour of 730: 30 * 95,200 / 730 = 3,912.3, rounded up.
        assert_eq!(rates(400_000).cost(HOUR_MS), UsdMicros(400_000 + 3_913));
        assert_eq!(rates(400_000).cost(1), rates(400_000).cost(60_000), "a minute is the least");
        let an_hour = meter("c1", NOON, Until::Deadline(NOON.plus_ms(HOUR_MS)));
        assert_eq!(an_hour.worst_case(NOON), rates(400_000).cost(HOUR_MS + KILL_BOUND_MS));
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
            let days = (day_of(NOON)..=day_of(m.last(NOON))).map(|day| m.cost_in_day(day, Micros(i64::MAX), NOON));
            prop_assert!(days.sum::<UsdMicros>() >= m.worst_case(NOON), "days round up, never down");
        }
    }
}
