//! What an operator has in AWS and allows there: the table `[ec2]` of a file.
//!
//! TOML → raw structs (unknown fields are errors) → the gates' [`Setup`] and [`Limits`], and what is the same for all hosts
//! of an ask.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    ask::{BadAsk, Refusal, read_usd},
    cloud::{Canary, ImageSource, ScheduleSetup},
    gates::{RegionSetup, Setup},
    limits::{Limits, RawLimits},
    money::{Quoted, Source, UsdMicros},
    words::{ImageId, InstanceId, InstanceProfile, InstanceType, Region, SecurityGroupId, SubnetId, read_instant},
};
use serde::{Deserialize, Deserializer, de};

/// What is wrong with such a file.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not an account's configuration: {}", path.display(), text.trim_end())]
    Parse { path: PathBuf, text: String },
    #[error("{} is not acceptable:\n{refusals}", path.display())]
    Refused { path: PathBuf, refusals: BadAsk },
}

/// An account that hosts may be launched in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsAccount {
    pub setup: Setup,
    pub limits: Limits,
    /// The profile that every host bears.
    pub profile: InstanceProfile,
    /// What a host needs to finish its block and upload its evidence.
    pub drain_minutes: u64,
    pub volume_gib: u32,
    /// Where hosts are put in a region, in order of preference.
    pub subnets: BTreeMap<Region, Vec<SubnetId>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    ec2: RawAccount,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAccount {
    installation: InstallationId,
    instance_profile: InstanceProfile,
    drain_minutes: u64,
    volume_gib: u32,
    limits: RawLimits,
    regions: BTreeMap<Region, RawRegion>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRegion {
    #[serde(deserialize_with = "image")]
    image: ImageSource,
    subnets: Vec<SubnetId>,
    security_groups: Vec<SecurityGroupId>,
    canary: InstanceId,
    schedules: ScheduleSetup,
    /// Instead of AWS's list.
    prices: Option<RawPrices>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPrices {
    /// When they were looked up.
    #[serde(deserialize_with = "instant")]
    as_of: Micros,
    #[serde(default, deserialize_with = "some_usd")]
    gib_month: Option<UsdMicros>,
    #[serde(default)]
    hours: BTreeMap<InstanceType, Usd>,
}

#[derive(Deserialize)]
struct Usd(#[serde(deserialize_with = "usd")] UsdMicros);

/// An image's id, or the name of an SSM parameter that holds one.
fn image<'de, D: Deserializer<'de>>(d: D) -> Result<ImageSource, D::Error> {
    let text = String::deserialize(d)?;
    if text.starts_with('/') {
        return Ok(ImageSource::Parameter(text));
    }
    let id: ImageId = text.parse().map_err(de::Error::custom)?;
    Ok(ImageSource::Id(id))
}

fn instant<'de, D: Deserializer<'de>>(d: D) -> Result<Micros, D::Error> {
    let text = String::deserialize(d)?;
    read_instant(&text).ok_or_else(|| de::Error::custom(format!("{text:?} is no instant; as \"2026-11-30T19:10:00Z\"")))
}

fn usd<'de, D: Deserializer<'de>>(d: D) -> Result<UsdMicros, D::Error> {
    let text = String::deserialize(d)?;
    read_usd(&text).ok_or_else(|| de::Error::custom(format!("{text:?} is not dollars; as \"0.0937\", to six decimals")))
}

fn some_usd<'de, D: Deserializer<'de>>(d: D) -> Result<Option<UsdMicros>, D::Error> {
    usd(d).map(Some)
}

impl AwsAccount {
    pub fn read(path: &Path) -> Result<Self, AccountError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| AccountError::Read { path: path.to_owned(), source })?;
        // The TOML error's own text has line, column and a picture; it is the message, not a cause.
        let raw: RawFile =
            toml::from_str(&text).map_err(|e| AccountError::Parse { path: path.to_owned(), text: e.to_string() })?;
        let refused = |refusals| AccountError::Refused { path: path.to_owned(), refusals: BadAsk(refusals) };
        let limits = raw.ec2.limits.read().map_err(|BadAsk(all)| {
            refused(all.into_iter().map(|r| Refusal { place: format!("ec2.limits.{}", r.place), ..r }).collect())
        })?;
        if raw.ec2.regions.is_empty() {
            let message = "there is none; add a table [ec2.regions.REGION] for each that hosts are launched in";
            return Err(refused(vec![Refusal { place: "ec2.regions".to_owned(), message: message.to_owned() }]));
        }
        Ok(raw.ec2.account(limits, path))
    }
}

impl RawAccount {
    fn account(self, limits: Limits, path: &Path) -> AwsAccount {
        let (mut regions, mut subnets) = (BTreeMap::new(), BTreeMap::new());
        for (region, raw) in self.regions {
            subnets.insert(region.clone(), raw.subnets);
            let place = format!("{}, ec2.regions.{region}.prices", path.display());
            let quoted =
                |as_of: Micros, value: UsdMicros| Quoted { value, source: Source::Config(place.clone()), as_of };
            let (mut hours, mut gib_month) = (BTreeMap::new(), None);
            if let Some(prices) = raw.prices {
                hours = prices.hours.into_iter().map(|(kind, Usd(usd))| (kind, quoted(prices.as_of, usd))).collect();
                gib_month = prices.gib_month.map(|usd| quoted(prices.as_of, usd));
            }
            let there = RegionSetup {
                image: raw.image,
                security_groups: raw.security_groups,
                schedules: raw.schedules,
                canary: Canary { region: region.clone(), instance: raw.canary },
                hours,
                gib_month,
            };
            regions.insert(region, there);
        }
        AwsAccount {
            setup: Setup { installation: self.installation, regions },
            limits,
            profile: self.instance_profile,
            drain_minutes: self.drain_minutes,
            volume_gib: self.volume_gib,
            subnets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = include_str!("../../docs/account.example.toml");

    fn read(text: &str) -> Result<AwsAccount, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("account.toml");
        std::fs::write(&path, text).unwrap();
        AwsAccount::read(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn the_example_is_read() {
        let account = read(GOOD).unwrap();
        let region: Region = "eu-central-1".parse().unwrap();
        let there = &account.setup.regions[&region];
        assert!(matches!(&there.image, ImageSource::Parameter(name) if name.contains("al2023")));
        assert_eq!((account.limits.max_hosts, account.subnets[&region].len()), (4, 2));
        let (kind, price) = there.hours.first_key_value().unwrap();
        assert_eq!((kind.as_str(), price.value), ("c8i.xlarge", UsdMicros(210_000)));
        assert!(matches!(&price.source, Source::Config(place) if place.ends_with("ec2.regions.eu-central-1.prices")));
        assert_eq!(there.gib_month.as_ref().unwrap().value, UsdMicros(95_200));
    }

    #[test]
    fn what_is_unknown_absent_or_nonsense_is_refused_with_its_line() {
        let with = |old: &str, new: &str| {
            assert!(GOOD.contains(old), "{old}");
            GOOD.replacen(old, new, 1)
        };
        let line_of = |what: &str| 1 + GOOD.lines().position(|l| l.starts_with(what)).unwrap();
        for (key, text) in [
            ("drain_minutes", with("drain_minutes", "dry_minutes")),
            ("max_hosts", with("max_hosts", "most_hosts")),
            ("canary", with("canary", "bird")),
            ("as_of", with("as_of", "of")),
            ("installation", with("0a1b2c3d\"", "0a1b2c3\"")),
            ("image", with("/aws/service", "aws/service")),
            ("schedules", with("group = ", "groups = ")),
            ("gib_month", with("0.0952", "0,0952")),
            ("as_of", with("2026-11-01T00:00:00Z", "yesterday")),
        ] {
            let said = read(&text).unwrap_err();
            assert!(said.contains(&format!("line {}", line_of(key))), "{key}: {said}");
        }
        let none = with("max_usd_per_day = \"40.00\"", "max_usd_per_day = \"0\"");
        let said = read(&none).unwrap_err();
        assert!(said.contains("ec2.limits.max_usd_per_day: 0 is no cap"), "{said}");
        let (before, _) = GOOD.split_once("[ec2.regions").unwrap();
        let empty = before.replacen("volume_gib = 30", "volume_gib = 30\nregions = {}", 1);
        let said = read(&empty).unwrap_err();
        assert!(said.contains("ec2.regions: there is none"), "{said}");
        assert!(read("").unwrap_err().contains("ec2"));
    }

    #[test]
    fn fuzz_an_account() {
        drums_fuzz::decoder!(500, vec![GOOD.as_bytes().to_vec()], |bytes: &[u8]| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = read(text);
            }
        });
    }
}
