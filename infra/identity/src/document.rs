//! What an identity document says, against what was launched.

use std::fmt;

use drums_common::clock::Micros;
use drums_provider::{
    cloud::Instance,
    words::{ImageId, InstanceId, InstanceType, Region, instant_text, read_instant},
};
use serde::{Deserialize, Deserializer, de};

/// EC2's launch time and the document's differ by a second at most; a minute is another start.
const SAME_START_MS: u64 = 60_000;

/// What is gone by; AWS puts more into it, and may put more.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    pub account_id: String,
    pub region: Region,
    pub instance_id: InstanceId,
    pub image_id: ImageId,
    pub instance_type: InstanceType,
    /// When this start of the instance began.
    #[serde(deserialize_with = "instant")]
    pub pending_time: Micros,
}

fn instant<'de, D: Deserializer<'de>>(d: D) -> Result<Micros, D::Error> {
    let text = String::deserialize(d)?;
    read_instant(&text).ok_or_else(|| de::Error::custom(format!("{text:?} is no instant")))
}

/// What was launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// 12 digits.
    pub account: String,
    pub region: Region,
    pub instance: InstanceId,
    pub image: ImageId,
    pub kind: InstanceType,
    /// EC2's launch time, as it was shown when the launch was read back.
    pub launched: Micros,
}

/// One thing in which a document is not of what was launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: &'static str,
    pub launched: String,
    pub shown: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} was launched, and {} is shown", self.what, self.launched, self.shown)
    }
}

impl Expected {
    /// `None` if the cloud does not show what image or type it is: what is not known is not compared, and so not expected.
    pub fn of(account: &str, seen: &Instance) -> Option<Self> {
        Some(Self {
            account: account.to_owned(),
            region: seen.region.clone(),
            instance: seen.id.clone(),
            image: seen.image.clone()?,
            kind: seen.kind.clone()?,
            launched: seen.launched,
        })
    }

    /// All of them: whoever looks into it needs the whole.
    pub fn differences(&self, shown: &Document) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut same = |what, launched: &dyn fmt::Display, shown: &dyn fmt::Display| {
            let (launched, shown) = (launched.to_string(), shown.to_string());
            if launched != shown {
                found.push(Difference { what, launched, shown });
            }
        };
        same("account", &self.account, &shown.account_id);
        same("region", &self.region, &shown.region);
        same("instance", &self.instance, &shown.instance_id);
        same("image", &self.image, &shown.image_id);
        same("type", &self.kind, &shown.instance_type);
        let (at, started) = (self.launched, shown.pending_time);
        if at.ms_since(started).max(started.ms_since(at)) > SAME_START_MS {
            // A document of an earlier start, or one of a start since: neither is of the launch.
            same("the start of", &instant_text(at), &instant_text(started));
        }
        found
    }
}
