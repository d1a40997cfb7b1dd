//! The tags of everything that we make in the cloud: set in the call that makes it, read by whoever has nothing else.

use std::collections::BTreeMap;

use crate::{host::OwnedHost, words::instant_text};

/// The installation that launched it, 8 hexadecimal digits. What EC2's filter asks for.
pub const INSTALLATION: &str = "drums:installation";
/// The absolute deadline, RFC 3339. The one tag that may be edited: an earlier instant shortens the host's life.
pub const DEADLINE: &str = "drums:deadline";
pub const HOST: &str = "drums:host";
pub const CAMPAIGN: &str = "drums:campaign";
/// Absent where the campaign is of no experiment.
pub const EXPERIMENT: &str = "drums:experiment";
/// The client token; on volumes, which have no token of their own, it tells whose they were.
pub const TOKEN: &str = "drums:token";
/// [`CANARY`] on the sweeper's canary; hosts have no such tag.
pub const ROLE: &str = "drums:role";
pub const CANARY: &str = "canary";
/// On a canary: when a sweep last found and spared it, RFC 3339.
pub const SWEPT: &str = "drums:swept";

/// All tags of a host's instance and of its volumes. EC2 shows `Name` to people.
pub fn of(host: &OwnedHost) -> BTreeMap<String, String> {
    let campaign = host.campaign();
    let mut tags = BTreeMap::from([
        ("Name".to_owned(), format!("drums {} {}", host.host(), campaign.id())),
        (INSTALLATION.to_owned(), host.installation().to_string()),
        (DEADLINE.to_owned(), instant_text(host.deadline())),
        (HOST.to_owned(), host.host().to_string()),
        (CAMPAIGN.to_owned(), campaign.id().to_string()),
        (TOKEN.to_owned(), host.token().to_string()),
    ]);
    if let Some(experiment) = campaign.experiment() {
        tags.insert(EXPERIMENT.to_owned(), experiment.to_string());
    }
    tags
}
