//! What an operator asks for, read and refused with its place. Nothing is taken as "unlimited": what is absent or zero is
//! refused. What bounds every ask is the configuration's: [`Limits`](crate::limits::Limits).

use std::{collections::BTreeSet, fmt};

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, HostId},
};
use serde::{Deserialize, Serialize};

use crate::{
    cloud::{ImageFacts, Market, Placement, Recipe, TypeFacts, VolumeKind},
    deadline::Campaign,
    money::UsdMicros,
    words::{CampaignId, InstanceProfile, InstanceType, Region, SecurityGroupId, SubnetId, read_instant},
};

/// As written: every field may be missing or nonsense.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawAsk {
    pub campaign: String,
    pub experiment: Option<String>,
    /// RFC 3339 with its offset.
    pub deadline: String,
    /// US dollars, as `12.50`.
    pub max_usd: String,
    pub drain_minutes: u64,
    /// The profile that every host bears: by it a host is ended whose tags were taken away.
    pub instance_profile: String,
    pub hosts: Vec<RawHost>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawHost {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub region: String,
    /// In order of preference; each is a zone to fall back to.
    pub subnets: Vec<String>,
    pub volume_gib: u32,
    pub spot: bool,
    /// Whether its arms need virtual machines with hardware support.
    pub nested: bool,
}

impl Default for RawHost {
    fn default() -> Self {
        let empty = String::new;
        Self {
            name: empty(),
            kind: empty(),
            region: empty(),
            subnets: Vec::new(),
            volume_gib: 0,
            spot: false,
            nested: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub campaign: Campaign,
    /// What the campaign may cost.
    pub run_usd: UsdMicros,
    /// What a host needs to finish its block and upload its evidence.
    pub drain_ms: u64,
    pub hosts: Vec<AskedHost>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedHost {
    pub host: HostId,
    pub kind: InstanceType,
    pub region: Region,
    pub subnets: Vec<SubnetId>,
    pub volume_gib: u32,
    pub market: Market,
    pub nested: bool,
    pub profile: InstanceProfile,
}

impl AskedHost {
    /// What is to be launched for it, once type and image are known.
    pub fn recipe(
        &self,
        kind: &TypeFacts,
        image: &ImageFacts,
        security_groups: Vec<SecurityGroupId>,
        placements: Vec<Placement>,
    ) -> Recipe {
        Recipe {
            region: self.region.clone(),
            kind: self.kind.clone(),
            image: image.id.clone(),
            root_device: image.root_device.clone(),
            volume: VolumeKind::Gp3,
            volume_gib: self.volume_gib,
            market: self.market,
            nested: self.nested && !kind.bare_metal,
            prove_guest: self.nested,
            security_groups,
            profile: self.profile.clone(),
            placements,
        }
    }
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// As `hosts[1].type`.
    pub place: String,
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Everything that is wrong with an ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct BadAsk(pub Vec<Refusal>);

impl fmt::Display for BadAsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, refusal) in self.0.iter().enumerate() {
            write!(f, "{}{refusal}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

/// EBS's own maximum of gp3.
const MAX_VOLUME_GIB: u32 = 65_536;
const MAX_HOSTS: usize = 1_000;

/// Collects what is wrong.
#[derive(Default)]
pub(crate) struct Reader {
    refusals: Vec<Refusal>,
}

impl Reader {
    pub(crate) fn into_refusals(self) -> BadAsk {
        BadAsk(self.refusals)
    }
    pub(crate) fn refuse<T>(&mut self, place: &str, message: impl fmt::Display) -> Option<T> {
        self.refusals.push(Refusal { place: place.to_owned(), message: message.to_string() });
        None
    }
    fn parse<T: std::str::FromStr<Err: fmt::Display>>(&mut self, place: &str, text: &str) -> Option<T> {
        text.parse().map_or_else(|e| self.refuse(place, e), Some)
    }
    pub(crate) fn usd(&mut self, place: &str, text: &str) -> Option<UsdMicros> {
        match read_usd(text) {
            Some(UsdMicros(0)) => self.refuse(place, "0 is no cap: give dollars above zero, as 12.50"),
            Some(usd) => Some(usd),
            None if text.is_empty() => self.refuse(place, "there is no cap, and none means none is allowed; as 12.50"),
            None => self.refuse(place, format!("{text:?} is not dollars; as 12.50, to six decimals")),
        }
    }
    pub(crate) fn above_zero(&mut self, place: &str, value: u64, unit: &str) -> Option<u64> {
        if value == 0 { self.refuse(place, format!("0 or absent: give {unit} above zero")) } else { Some(value) }
    }
    /// In milliseconds.
    pub(crate) fn minutes(&mut self, place: &str, value: u64) -> Option<u64> {
        self.above_zero(place, value, "minutes").map(|m| m.saturating_mul(60_000))
    }
}

impl RawAsk {
    /// Every refusal at once, in the order of the text.
    pub fn read(&self) -> Result<Ask, BadAsk> {
        let mut r = Reader::default();
        let id: Option<CampaignId> = r.parse("campaign", &self.campaign);
        let experiment: Option<Option<ExperimentId>> = match &self.experiment {
            None => Some(None),
            Some(text) => r.parse("experiment", text).map(Some),
        };
        let deadline: Option<Micros> = match read_instant(&self.deadline) {
            Some(at) => Some(at),
            None if self.deadline.is_empty() => r.refuse("deadline", "there is none; as 2026-11-30T19:10:00Z"),
            None => r.refuse("deadline", format!("{:?} is no instant; as 2026-11-30T19:10:00Z", self.deadline)),
        };
        let campaign = match (id, experiment, deadline) {
            (Some(id), Some(experiment), Some(at)) => {
                Campaign::new(id, at, experiment).map_or_else(|e| r.refuse("deadline", e), Some)
            }
            _ => None,
        };
        let run_usd = r.usd("max_usd", &self.max_usd);
        let drain_ms = r.minutes("drain_minutes", self.drain_minutes);
        let profile: Option<InstanceProfile> = r.parse("instance_profile", &self.instance_profile);
        if self.hosts.is_empty() {
            r.refuse::<()>("hosts", "there are none; name at least one");
        }
        if self.hosts.len() > MAX_HOSTS {
            r.refuse::<()>("hosts", format!("{} of them; {MAX_HOSTS} at most", self.hosts.len()));
        }
        let mut names = BTreeSet::new();
        let each = self.hosts.iter().take(MAX_HOSTS).enumerate();
        let hosts: Vec<_> = each.map(|(i, h)| h.read(&mut r, i, &mut names, profile.as_ref())).collect();
        let hosts: Option<Vec<_>> = hosts.into_iter().collect();
        match (campaign, run_usd, drain_ms, hosts) {
            (Some(campaign), Some(run_usd), Some(drain_ms), Some(hosts)) if r.refusals.is_empty() => {
                Ok(Ask { campaign, run_usd, drain_ms, hosts })
            }
            _ => Err(r.into_refusals()),
        }
    }
}

impl RawHost {
    fn read(
        &self,
        r: &mut Reader,
        i: usize,
        names: &mut BTreeSet<HostId>,
        profile: Option<&InstanceProfile>,
    ) -> Option<AskedHost> {
        let at = |field: &str| format!("hosts[{i}].{field}");
        let host: Option<HostId> = r.parse(&at("name"), &self.name);
        if let Some(host) = &host
            && !names.insert(host.clone())
        {
            r.refuse::<()>(&at("name"), format!("{host} stands twice"));
        }
        let kind: Option<InstanceType> = r.parse(&at("type"), &self.kind);
        let kind = match kind {
            Some(kind) if kind.is_flex() => r.refuse(
                &at("type"),
                format!("{kind} shares its processors with others; no timing of it means anything"),
            ),
            kind => kind,
        };
        let region: Option<Region> = r.parse(&at("region"), &self.region);
        let mut subnets = Vec::new();
        for (n, subnet) in self.subnets.iter().enumerate() {
            let subnet: Option<SubnetId> = r.parse(&at(&format!("subnets[{n}]")), subnet);
            match subnet {
                Some(s) if subnets.contains(&s) => {
                    r.refuse::<()>(&at(&format!("subnets[{n}]")), format!("{s} stands twice"));
                }
                subnet => subnets.extend(subnet),
            }
        }
        if self.subnets.is_empty() {
            r.refuse::<()>(&at("subnets"), "there are none; name at least one");
        }
        if !(1..=MAX_VOLUME_GIB).contains(&self.volume_gib) {
            r.refuse::<()>(&at("volume_gib"), format!("{} is not 1 to {MAX_VOLUME_GIB}", self.volume_gib));
        }
        let market = if self.spot { Market::Spot } else { Market::OnDemand };
        Some(AskedHost {
            host: host?,
            kind: kind?,
            region: region?,
            subnets,
            volume_gib: self.volume_gib,
            market,
            nested: self.nested,
            profile: profile?.clone(),
        })
    }
}

/// Dollars as people write them, exactly: digits, and at most six after the point.
pub fn read_usd(text: &str) -> Option<UsdMicros> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 6 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let micros: u64 = format!("{part:0<6}").parse().ok()?;
    Some(UsdMicros(whole.checked_mul(1_000_000)?.checked_add(micros)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> RawAsk {
        let host = |name: &str| RawHost {
            name: name.to_owned(),
            kind: "c8i.2xlarge".to_owned(),
            region: "eu-central-1".to_owned(),
            subnets: vec!["subnet-0123456789abcdef0".to_owned(), "subnet-0123456789abcdef1".to_owned()],
            volume_gib: 30,
            spot: false,
            nested: true,
        };
        RawAsk {
            campaign: "run-0123456789ab".to_owned(),
            experiment: Some("EXP-028".to_owned()),
            deadline: "2026-11-30T19:10:00Z".to_owned(),
            max_usd: "12.50".to_owned(),
            drain_minutes: 15,
            instance_profile: "drums-host-0a1b2c3d".to_owned(),
            hosts: vec![host("h1"), host("h2")],
        }
    }

    #[test]
    fn a_good_ask_is_read() {
        let ask = good().read().unwrap();
        assert_eq!((ask.run_usd, ask.drain_ms), (UsdMicros(12_500_000), 15 * 60_000));
        assert_eq!((ask.hosts.len(), ask.hosts[1].subnets.len()), (2, 2));
    }

    #[test]
    fn bad_input_is_refused_with_its_place_and_all_at_once() {
        type Case = (&'static str, fn(&mut RawAsk));
        let cases: [Case; 21] = [
            ("campaign", |a| a.campaign.clear()),
            ("experiment", |a| a.experiment = Some("EXP-1".into())),
            ("deadline", |a| a.deadline.clear()),
            ("deadline", |a| a.deadline = "tomorrow".into()),
            ("deadline", |a| a.deadline = "1969-01-01T00:00:00Z".into()),
            ("max_usd", |a| a.max_usd.clear()),
            ("max_usd", |a| a.max_usd = "0.00".into()),
            ("max_usd", |a| a.max_usd = "-1".into()),
            ("max_usd", |a| a.max_usd = "unlimited".into()),
            ("drain_minutes", |a| a.drain_minutes = 0),
            ("instance_profile", |a| a.instance_profile.clear()),
            ("instance_profile", |a| a.instance_profile = "a profile".into()),
            ("hosts", |a| a.hosts.clear()),
            ("hosts[1].name", |a| a.hosts[1].name = "h1".into()),
            ("hosts[0].type", |a| a.hosts[0].kind = "c8i".into()),
            ("hosts[1].type", |a| a.hosts[1].kind = "m7i-flex.large".into()),
            ("hosts[0].region", |a| a.hosts[0].region = "Frankfurt".into()),
            ("hosts[1].subnets", |a| a.hosts[1].subnets.clear()),
            ("hosts[1].subnets[1]", |a| a.hosts[1].subnets[1] = "subnet-0123456789abcdef0".into()),
            ("hosts[0].subnets[0]", |a| a.hosts[0].subnets[0] = "vpc-1".into()),
            ("hosts[0].volume_gib", |a| a.hosts[0].volume_gib = 0),
        ];
        for (place, spoil) in cases {
            let mut ask = good();
            spoil(&mut ask);
            let BadAsk(refusals) = ask.read().unwrap_err();
            let places: Vec<_> = refusals.iter().map(|r| r.place.as_str()).collect();
            assert_eq!(places, [place], "{refusals:?}");
        }
        let BadAsk(all) = RawAsk::default().read().unwrap_err();
        assert_eq!(all.len(), 6, "{all:?}");
    }

    #[test]
    fn dollars_are_read_exactly_or_not_at_all() {
        assert_eq!(read_usd("0.1"), Some(UsdMicros(100_000)));
        assert_eq!(read_usd("12"), Some(UsdMicros(12_000_000)));
        assert_eq!(read_usd("0.000001"), Some(UsdMicros(1)));
        for bad in ["", ".", "1.", ".5", "1e3", "1,5", "inf", "NaN", "-1", "+1", "0.0000001", "99999999999999999999"] {
            assert_eq!(read_usd(bad), None, "{bad}");
        }
    }
}
