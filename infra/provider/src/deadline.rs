//! The deadline: absolute, the campaign's, inherited by every relaunch, and only ever shortened.

use drums_common::{clock::Micros, ids::ExperimentId};
use serde::{Deserialize, Serialize};

use crate::words::{CampaignId, read_instant};

/// What every host of one campaign shares. A relaunch is of the same campaign, so it has the same deadline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, try_from = "Row")]
pub struct Campaign {
    id: CampaignId,
    deadline: Micros,
    experiment: Option<ExperimentId>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    id: CampaignId,
    deadline: Micros,
    experiment: Option<ExperimentId>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the deadline of campaign {id} is {got} microseconds since 1970, which no deadline is; give an instant after 1970 \
     and before 2514"
)]
pub struct BadDeadline {
    pub id: CampaignId,
    pub got: i64,
}

/// Seconds that fit into the ten hexadecimal digits of a client token are many more; a calendar ends earlier.
pub(crate) const LAST_S: i64 = 1 << 34;

impl Campaign {
    /// `deadline` is rounded down to the second, as tags and tokens write it.
    pub fn new(id: CampaignId, deadline: Micros, experiment: Option<ExperimentId>) -> Result<Self, BadDeadline> {
        let s = deadline.0.div_euclid(1_000_000);
        if !(1..LAST_S).contains(&s) {
            return Err(BadDeadline { id, got: deadline.0 });
        }
        Ok(Self { id, deadline: Micros(s * 1_000_000), experiment })
    }

    pub fn id(&self) -> &CampaignId {
        &self.id
    }
    /// The instant by which every host of it is to be dead, as registered.
    pub fn deadline(&self) -> Micros {
        self.deadline
    }
    pub fn experiment(&self) -> Option<ExperimentId> {
        self.experiment
    }
}

impl TryFrom<Row> for Campaign {
    type Error = BadDeadline;
    fn try_from(row: Row) -> Result<Self, BadDeadline> {
        Self::new(row.id, row.deadline, row.experiment)
    }
}

/// What a deadline's tag says beside the registered one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TagSays {
    Same,
    /// Someone wants it dead earlier, and so it will be.
    Earlier,
    /// Someone tried to extend it: of no effect, and reported.
    Later,
    /// Not an instant: of no effect, and reported.
    Unreadable,
    /// Taken away: of no effect, and reported.
    Missing,
}

/// The deadline that counts: the earlier of the registered one and the tag's.
///
/// ```
/// # use drums_common::clock::Micros;
/// # use drums_provider::deadline::{TagSays, effective_deadline};
/// let registered = Micros(1_796_000_000_000_000);
/// assert_eq!(effective_deadline(registered, Some("2999-01-01T00:00:00Z")), (registered, TagSays::Later));
/// assert_eq!(effective_deadline(registered, None), (registered, TagSays::Missing));
/// ```
pub fn effective_deadline(registered: Micros, tag: Option<&str>) -> (Micros, TagSays) {
    let Some(text) = tag else { return (registered, TagSays::Missing) };
    match read_instant(text) {
        None => (registered, TagSays::Unreadable),
        Some(at) if at < registered => (at, TagSays::Earlier),
        Some(at) if at > registered => (registered, TagSays::Later),
        Some(_) => (registered, TagSays::Same),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::words::instant_text;

    proptest! {
        #[test]
        fn no_tag_whatever_extends_a_deadline(
            registered in 1i64..4_000_000_000,
            tag in prop_oneof![
                Just(None),
                ".*".prop_map(Some),
                (1i64..8_000_000_000).prop_map(|s| Some(instant_text(Micros(s * 1_000_000)))),
            ],
        ) {
            let registered = Micros(registered * 1_000_000);
            prop_assert!(effective_deadline(registered, tag.as_deref()).0 <= registered);
        }

        #[test]
        fn a_tag_shortens_to_what_it_says(registered in 1i64..4_000_000_000, tag in 1i64..4_000_000_000) {
            let (registered, tag) = (Micros(registered * 1_000_000), Micros(tag * 1_000_000));
            let (at, says) = effective_deadline(registered, Some(&instant_text(tag)));
            prop_assert_eq!(at, registered.min(tag));
            prop_assert_eq!(says == TagSays::Later, tag > registered);
        }
    }

    #[test]
    fn a_deadline_that_no_calendar_has_is_refused_also_from_the_store() {
        let id: CampaignId = "c1".parse().unwrap();
        for bad in [i64::MIN, -1, 0, 999_999, i64::MAX] {
            assert!(Campaign::new(id.clone(), Micros(bad), None).is_err(), "{bad}");
        }
        let good = Campaign::new(id, Micros(1_796_000_000_900_000), None).unwrap();
        assert_eq!(good.deadline(), Micros(1_796_000_000_000_000), "rounded down");
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<Campaign>(&text).unwrap(), good);
        assert!(serde_json::from_str::<Campaign>(&text.replace("1796000000000000", "0")).is_err());
    }
}
