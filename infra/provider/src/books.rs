//! The books: which campaigns there are and what their hosts cost, as the store has it; what fits under the caps, and what
//! the caps demand.
//!
//! Gates read them, and they are read again in the transaction that stores launches: two asks at once cannot both fit.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{clock::Micros, ids::HostId};
use serde::{Deserialize, Serialize};

use crate::{
    deadline::Campaign,
    money::UsdMicros,
    spend::{Caps, KILL_BOUND_MS, Meter, day_of},
    words::CampaignId,
};

/// A campaign as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registered {
    pub campaign: Campaign,
    pub caps: Caps,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Books {
    pub campaigns: BTreeMap<CampaignId, Registered>,
    /// Of every launch and every reap of this installation. Those that ended before today may be left out where their
    /// campaign has none that runs and is not asked for.
    pub meters: Vec<Meter>,
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

impl Books {
    pub fn running(&self) -> impl Iterator<Item = &Meter> {
        self.meters.iter().filter(|m| m.is_running())
    }

    /// Whether this host was ever launched in this campaign, or is about to be.
    pub fn has(&self, campaign: &CampaignId, host: &HostId) -> bool {
        self.meters.iter().any(|m| m.campaign == *campaign && m.host == *host)
    }

    /// The least of this cap and of every campaign's that has a running host: who is asked for last must not make another
    /// one's hosts end. Refused where a running campaign has no cap on record.
    pub fn day_cap(&self, own: UsdMicros) -> Result<UsdMicros, String> {
        self.running().try_fold(own, |least, m| match self.campaigns.get(&m.campaign) {
            Some(there) => Ok(least.min(there.caps.day())),
            None => Err(format!("campaign {} has running hosts and no cap on record; end them first", m.campaign)),
        })
    }

    /// Worst case of one campaign.
    pub fn worst_case(&self, campaign: &CampaignId, now: Micros) -> UsdMicros {
        self.meters.iter().filter(|m| m.campaign == *campaign).map(|m| m.worst_case(now)).sum()
    }

    /// The dearest day of everything, worst case, in days since 1970, and its cost; days before today are paid.
    pub fn dearest_day(&self, now: Micros) -> (i64, UsdMicros) {
        let today = day_of(now);
        let last = self.meters.iter().map(|m| day_of(m.last(now))).max().unwrap_or(today).max(today);
        let days = (today..=last).map(|day| (day, self.of_day(day, Micros(i64::MAX), now)));
        days.max_by_key(|(day, cost)| (*cost, -day)).unwrap_or((today, UsdMicros(0)))
    }

    /// Why nothing more may be launched for a campaign, its own worst case and everybody's counted; `None` if it may. For
    /// [`View::unaffordable`](crate::launch::View::unaffordable), with the launch's own meter among the meters.
    pub fn unaffordable(&self, campaign: &CampaignId, now: Micros) -> Option<String> {
        let Some(there) = self.campaigns.get(campaign) else {
            return Some(format!("campaign {campaign} has no cap on record"));
        };
        let day_cap = match self.day_cap(there.caps.day()) {
            Ok(cap) => cap,
            Err(why) => return Some(why),
        };
        let (run, day) = (self.worst_case(campaign, now), self.dearest_day(now).1);
        let over = |worst, cap, what| (worst > cap).then(|| format!("cap of the {what}: {worst} at worst, of {cap}"));
        over(run, there.caps.run(), "run").or_else(|| over(day, day_cap, "day"))
    }

    /// Campaigns with running hosts that a cap demands something of. Each demand comes so early that what it leads to still
    /// fits under the cap: a terminate is asked for while the kill bound is still paid for. Of a campaign whose worst case
    /// fits under every cap nothing is demanded.
    pub fn demands(&self, now: Micros) -> BTreeMap<CampaignId, (Demand, String)> {
        let running: BTreeSet<&CampaignId> = self.running().map(|m| &m.campaign).collect();
        let each = running.into_iter().filter_map(|campaign| {
            let demand = match self.campaigns.get(campaign) {
                None => (Demand::Terminate, "it has no cap on record, so none of it is allowed".to_owned()),
                Some(there) => self.demand(campaign, &there.caps, now)?,
            };
            Some((campaign.clone(), demand))
        });
        each.collect()
    }

    fn demand(&self, campaign: &CampaignId, caps: &Caps, now: Micros) -> Option<(Demand, String)> {
        let today = day_of(now);
        let own = |at| self.meters.iter().filter(|m| m.campaign == *campaign).map(|m| m.cost_by(at, now)).sum();
        // Minutes after midnight are another day's, which has its own cap.
        let dearest = |at: Micros| (today..=day_of(at)).map(|day| self.of_day(day, at, now)).max().unwrap_or_default();
        let demand = |cost: &dyn Fn(Micros) -> UsdMicros, cap: UsdMicros, what: &str| {
            // A cap may be reached and not passed.
            let passes = |ms: u64| cost(now.plus_ms(ms + 1)) > cap;
            let demand = if passes(KILL_BOUND_MS) {
                Demand::Terminate
            } else if passes(KILL_BOUND_MS + caps.drain_ms()) {
                Demand::Stop
            } else {
                return None;
            };
            Some((demand, format!("cap of the {what}: {} spent of {cap}", cost(now))))
        };
        let both = [demand(&own, caps.run(), "run"), demand(&dearest, caps.day(), "day")];
        both.into_iter().flatten().max()
    }

    fn of_day(&self, day: i64, at: Micros, now: Micros) -> UsdMicros {
        self.meters.iter().map(|m| m.cost_in_day(day, at, now)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        money::{Quoted, Source},
        spend::{Rates, Until},
    };

    const HOUR_MS: u64 = 3_600_000;
    const MINUTE_MS: u64 = 60_000;
    const DAY_US: i64 = 86_400_000_000;
    const DRAIN_MS: u64 = 15 * MINUTE_MS;
    const NOON: Micros = Micros(20_000 * DAY_US + DAY_US / 2);
    const MIDNIGHT: Micros = Micros(20_001 * DAY_US);

    fn rates() -> Rates {
        let quoted = |v| Quoted { value: UsdMicros(v), source: Source::Config("prices.toml".into()), as_of: Micros(0) };
        Rates { hour: quoted(400_000), gib_month: quoted(95_200), volume_gib: 30 }
    }

    fn meter(campaign: &str, from: Micros, until: Until) -> Meter {
        let campaign = campaign.parse().unwrap();
        Meter { host: "h1".parse().unwrap(), campaign, experiment: None, rates: rates(), from, until }
    }

    fn books(run: u64, day: u64, meters: Vec<Meter>) -> Books {
        let caps = Caps::new(UsdMicros(run), UsdMicros(day), DRAIN_MS).unwrap();
        let named = |id: &str| {
            let id: CampaignId = id.parse().unwrap();
            let campaign = Campaign::new(id.clone(), NOON.plus_ms(10 * HOUR_MS), None).unwrap();
            (id, Registered { campaign, caps })
        };
        Books { campaigns: BTreeMap::from(["c1", "c2"].map(named)), meters }
    }

    fn demanded(books: &Books, now: Micros) -> Vec<Demand> {
        books.demands(now).into_values().map(|(demand, _)| demand).collect()
    }

    #[test]
    fn a_cap_stops_and_then_terminates_and_is_not_passed() {
        let books = books(403_913, 100_000_000, vec![meter("c1", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)))]);
        let at = |minutes: u64| demanded(&books, NOON.plus_ms(minutes * MINUTE_MS));
        assert_eq!(at(39), []);
        assert_eq!(at(40), [Demand::Stop]);
        assert_eq!(at(54), [Demand::Stop]);
        assert_eq!(at(55), [Demand::Terminate]);
        assert_eq!(books.meters[0].so_far(NOON.plus_ms(55 * MINUTE_MS + KILL_BOUND_MS)), UsdMicros(403_913));
    }

    #[test]
    fn the_days_cap_counts_every_campaign_and_only_today() {
        let yesterday = meter("c2", Micros(NOON.0 - DAY_US), Until::Ended(Micros(NOON.0 - DAY_US).plus_ms(HOUR_MS)));
        let today = meter("c1", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)));
        let other = meter("c2", NOON, Until::Deadline(NOON.plus_ms(10 * HOUR_MS)));
        let later = NOON.plus_ms(HOUR_MS);
        let found = |meters: &[&Meter], day| {
            books(100_000_000, day, meters.iter().map(|m| (*m).clone()).collect()).demands(later).len()
        };
        assert_eq!(found(&[&yesterday, &today], 1_000_000), 0);
        assert_eq!(found(&[&yesterday, &today, &other], 800_000), 2, "both are told");
        let unknown = Books { campaigns: BTreeMap::new(), meters: vec![today] };
        assert_eq!(demanded(&unknown, later), [Demand::Terminate], "a campaign without a cap is not unlimited");
        assert!(
            unknown.day_cap(UsdMicros(1)).is_err() && unknown.unaffordable(&"c1".parse().unwrap(), later).is_some()
        );
        assert_eq!(books(1, 1, vec![Meter { until: Until::Ended(NOON), ..other }]).demands(later).len(), 0);
    }

    #[test]
    fn a_launch_over_midnight_counts_for_both_days() {
        let from = Micros(MIDNIGHT.0 - 3_600_000_000);
        let over = books(1, 1, vec![meter("c1", from, Until::Deadline(from.plus_ms(10 * HOUR_MS)))]);
        assert_eq!(over.dearest_day(from), (20_001, rates().cost(9 * HOUR_MS + KILL_BOUND_MS)));
        assert_eq!(books(1, 1, Vec::new()).dearest_day(from), (20_000, UsdMicros(0)));
    }

    #[test]
    fn minutes_after_midnight_are_not_todays() {
        // Twelve hours to midnight and one beyond: the cap of a day is what today's part comes to.
        let today = rates().cost(12 * HOUR_MS);
        let one = meter("c1", NOON, Until::Deadline(MIDNIGHT.plus_ms(HOUR_MS)));
        let books = |day: u64| books(100_000_000, day, vec![one.clone()]);
        assert_eq!(books(today.0).unaffordable(&"c1".parse().unwrap(), NOON), None, "what the gate lets pass");
        for minutes in [30, 16, 5, 4, 1] {
            let before = Micros(MIDNIGHT.0 - minutes * 60_000_000);
            assert_eq!(demanded(&books(today.0), before), [], "{minutes} minutes to midnight");
            assert_eq!(
                demanded(&books(today.0 - 1), before).is_empty(),
                minutes == 30,
                "what passes the cap by midnight"
            );
        }
        // And what is tomorrow's has tomorrow's cap.
        let dear = rates().cost(4 * MINUTE_MS).0 - 1;
        let few = meter("c1", Micros(MIDNIGHT.0 - 60_000_000), Until::Deadline(MIDNIGHT.plus_ms(HOUR_MS)));
        let few = Books { meters: vec![few], ..books(dear) };
        assert_eq!(demanded(&few, Micros(MIDNIGHT.0 - 30_000_000)), [Demand::Terminate]);
    }

    #[test]
    fn the_least_day_cap_of_all_that_run_counts() {
        let mut books = books(100_000_000, 9_000_000, vec![meter("c1", NOON, Until::Deadline(NOON.plus_ms(HOUR_MS)))]);
        let lower = Caps::new(UsdMicros(100_000_000), UsdMicros(500_000), 1).unwrap();
        books.campaigns.get_mut(&"c2".parse().unwrap()).unwrap().caps = lower;
        assert_eq!(
            books.day_cap(UsdMicros(2_000_000)),
            Ok(UsdMicros(2_000_000)),
            "the other one has nothing that runs"
        );
        books.meters.push(meter("c2", NOON, Until::Deadline(NOON.plus_ms(MINUTE_MS))));
        assert_eq!(books.day_cap(UsdMicros(2_000_000)), Ok(UsdMicros(500_000)));
    }

    proptest! {
        #[test]
        fn nothing_is_demanded_of_what_fits_under_every_cap(
            hosts in prop::collection::vec((0u64..20, 10u64..2_000), 1..5), slack in 0u64..1_000, minutes in 0u64..2_100,
        ) {
            let each = hosts.iter().enumerate().map(|(i, (from, life))| {
                let from = NOON.plus_ms(from * MINUTE_MS);
                meter(if i % 2 == 0 { "c1" } else { "c2" }, from, Until::Deadline(from.plus_ms(life * MINUTE_MS)))
            });
            let mut all = books(1, 1, each.collect());
            let now = NOON.plus_ms(20 * MINUTE_MS);
            let run = ["c1", "c2"].map(|c| all.worst_case(&c.parse().unwrap(), now)).into_iter().max().unwrap();
            let day = all.dearest_day(now).1;
            all.campaigns = books(run.0 + slack, day.0 + slack, Vec::new()).campaigns;
            for campaign in all.campaigns.keys() {
                prop_assert_eq!(all.unaffordable(campaign, now), None);
            }
            let later = now.plus_ms(minutes * MINUTE_MS);
            for m in &mut all.meters {
                if let Until::Deadline(at) = m.until && at <= later {
                    m.until = Until::Ended(at);
                }
            }
            prop_assert_eq!(all.demands(later), BTreeMap::new());
        }
    }
}
