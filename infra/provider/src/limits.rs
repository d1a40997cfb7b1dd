//! What the operator's configuration allows whoever asks. An ask is under these and can widen none of them.

use serde::{Deserialize, Serialize};

use crate::{
    ask::{BadAsk, Reader},
    money::UsdMicros,
};

/// As written: every field may be missing or nonsense.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawLimits {
    /// 12 digits.
    pub account: String,
    /// US dollars, as `40.00`.
    pub max_usd_per_day: String,
    pub max_hosts: u32,
    pub longest_life_minutes: u64,
    pub least_life_minutes: u64,
    pub sweep_age_minutes: u64,
}

/// Zero never means unlimited: gates refuse it here too, whoever made these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The only account that is launched in: 12 digits.
    pub account: String,
    /// What all hosts together may cost on one UTC day.
    pub day_usd: UsdMicros,
    /// Hosts of this installation that may exist at once.
    pub max_hosts: u32,
    /// The farthest that a deadline may be away.
    pub longest_life_ms: u64,
    /// The nearest: [`Patience::least_life_ms`](crate::launch::Patience::least_life_ms).
    pub least_life_ms: u64,
    /// How long ago a sweep may have been.
    pub sweep_age_ms: u64,
}

impl RawLimits {
    /// Every refusal at once, in the order of the text.
    pub fn read(&self) -> Result<Limits, BadAsk> {
        let mut r = Reader::default();
        let digits = self.account.len() == 12 && self.account.bytes().all(|b| b.is_ascii_digit());
        let account = if digits {
            Some(self.account.clone())
        } else {
            r.refuse("account", format!("{:?} is no account of AWS; give its 12 digits", self.account))
        };
        let day = r.usd("max_usd_per_day", &self.max_usd_per_day);
        let hosts = r.above_zero("max_hosts", u64::from(self.max_hosts), "a number");
        let longest = r.minutes("longest_life_minutes", self.longest_life_minutes);
        let least = r.minutes("least_life_minutes", self.least_life_minutes);
        let age = r.minutes("sweep_age_minutes", self.sweep_age_minutes);
        match (account, day, hosts, longest, least, age) {
            (Some(account), Some(day_usd), Some(_), Some(longest_life_ms), Some(least_life_ms), Some(sweep_age_ms)) => {
                let max_hosts = self.max_hosts;
                Ok(Limits { account, day_usd, max_hosts, longest_life_ms, least_life_ms, sweep_age_ms })
            }
            _ => Err(r.into_refusals()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> RawLimits {
        RawLimits {
            account: "123456789012".to_owned(),
            max_usd_per_day: "40".to_owned(),
            max_hosts: 4,
            longest_life_minutes: 720,
            least_life_minutes: 10,
            sweep_age_minutes: 10,
        }
    }

    #[test]
    fn limits_are_read_or_refused_with_their_places_and_none_is_unlimited() {
        let limits = good().read().unwrap();
        assert_eq!((limits.day_usd, limits.longest_life_ms), (UsdMicros(40_000_000), 720 * 60_000));
        type Case = (&'static str, fn(&mut RawLimits));
        let cases: [Case; 7] = [
            ("account", |l| l.account = "12345678901".into()),
            ("max_usd_per_day", |l| l.max_usd_per_day.clear()),
            ("max_usd_per_day", |l| l.max_usd_per_day = "0".into()),
            ("max_hosts", |l| l.max_hosts = 0),
            ("longest_life_minutes", |l| l.longest_life_minutes = 0),
            ("least_life_minutes", |l| l.least_life_minutes = 0),
            ("sweep_age_minutes", |l| l.sweep_age_minutes = 0),
        ];
        for (place, spoil) in cases {
            let mut limits = good();
            spoil(&mut limits);
            let BadAsk(refusals) = limits.read().unwrap_err();
            assert_eq!(refusals.iter().map(|r| r.place.as_str()).collect::<Vec<_>>(), [place]);
        }
        assert_eq!(RawLimits::default().read().unwrap_err().0.len(), 6);
    }
}
