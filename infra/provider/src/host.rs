//! Owned and adopted hosts: two types, so that no code path can end an adopted one.
//!
//! What [`Cloud::terminate`](crate::cloud::Cloud::terminate) takes is a [`KillId`]. Only an [`OwnedInstance`] gives one,
//! and that is made only from what the cloud shows under a token or tags of this installation, or from our own store's
//! row of such a one.
//!
//! An owned instance gives what a terminate takes:
//! ```
//! # use drums_provider::host::{KillId, OwnedInstance};
//! fn end(instance: &OwnedInstance) -> KillId {
//!     instance.kill_id()
//! }
//! ```
//! An adopted host does not:
//! ```compile_fail
//! # use drums_provider::host::{AdoptedHost, KillId};
//! fn end(host: &AdoptedHost) -> KillId {
//!     host.kill_id()
//! }
//! ```
//! The bare id of an instance is not enough:
//! ```compile_fail
//! # use drums_provider::{cloud::Cloud, words::InstanceId};
//! async fn end(cloud: &dyn Cloud, id: &InstanceId) {
//!     let _ = cloud.terminate(id).await;
//! }
//! ```
//! Nor can one be put together:
//! ```compile_fail
//! # use drums_provider::{host::KillId, words::{InstanceId, Region}};
//! fn end(region: Region, instance: InstanceId) -> KillId {
//!     KillId { region, instance }
//! }
//! ```
//! This is what differs from those that do not compile:
//! ```
//! # use drums_provider::{cloud::Cloud, host::OwnedInstance};
//! async fn end(cloud: &dyn Cloud, instance: &OwnedInstance) {
//!     let _ = cloud.terminate(&instance.kill_id()).await;
//! }
//! ```

use std::fmt;

use drums_common::{
    clock::Micros,
    ids::{HostId, InstallationId},
};
use serde::{Deserialize, Serialize};

use crate::{
    cloud::Instance,
    deadline::Campaign,
    tags,
    token::ClientToken,
    words::{InstanceId, Region},
};

/// A host that was there before us and stays: it is released and restored. It has no deadline, no token and no way to be
/// ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptedHost {
    pub host: HostId,
}

/// A host that we launch, or are about to, and that must die: one attempt of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnedHost {
    installation: InstallationId,
    host: HostId,
    campaign: Campaign,
    attempt: u16,
}

impl OwnedHost {
    /// The first attempt to launch this host in this campaign.
    pub fn first(installation: InstallationId, host: HostId, campaign: Campaign) -> Self {
        Self { installation, host, campaign, attempt: 1 }
    }

    /// The next attempt: another instance, the same host, the same campaign, the same deadline. `None` after 65,534 of
    /// them.
    pub fn relaunch(&self) -> Option<Self> {
        Some(Self { attempt: self.attempt.checked_add(1)?, ..self.clone() })
    }

    pub fn installation(&self) -> InstallationId {
        self.installation
    }
    pub fn host(&self) -> &HostId {
        &self.host
    }
    pub fn campaign(&self) -> &Campaign {
        &self.campaign
    }
    pub fn attempt(&self) -> u16 {
        self.attempt
    }
    /// As registered; tags may shorten it.
    pub fn deadline(&self) -> Micros {
        self.campaign.deadline()
    }
    /// To be on disk before any call that carries it.
    pub fn token(&self) -> ClientToken {
        ClientToken::new(self.installation, &self.host, &self.campaign, self.attempt)
    }

    /// The instance as ours, if it was launched under this attempt's token; `None` for every other.
    pub fn claim(&self, seen: &Instance) -> Option<OwnedInstance> {
        let token = self.token();
        (seen.token.as_deref() == Some(token.to_string().as_str())).then(|| OwnedInstance {
            region: seen.region.clone(),
            id: seen.id.clone(),
            token: Some(token),
            deadline: token.deadline(),
        })
    }
}

/// An instance that this installation launched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnedInstance {
    region: Region,
    id: InstanceId,
    /// `None` for one that carries our tags and was launched without a token of ours.
    token: Option<ClientToken>,
    /// As registered, before any tag shortened it.
    deadline: Micros,
}

/// Who an instance belongs to, by what the cloud shows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Belongs {
    Ours(OwnedInstance),
    /// Another installation's, by its token or, without one, by its tag.
    Theirs,
    /// Neither tag nor token is of DrumsBench.
    Foreign,
}

impl OwnedInstance {
    /// Exact ownership. The client token decides where there is one, since nobody can edit it; the installation's tag
    /// decides for an instance without a token of ours. `longest_life_ms` bounds the deadline of such a one from its
    /// launch, because its tag is all that there is and can be edited; without a readable tag it has none, and is due.
    pub fn read(installation: InstallationId, seen: &Instance, longest_life_ms: u64) -> Belongs {
        let token = seen.token.as_deref().and_then(|t| t.parse::<ClientToken>().ok());
        let tag = seen.tags.get(tags::INSTALLATION);
        let (ours, deadline) = match (token, tag) {
            (Some(token), _) => (token.installation() == installation, token.deadline()),
            (None, Some(tag)) => {
                let told = seen.tags.get(tags::DEADLINE).and_then(|t| crate::words::read_instant(t));
                let bound = seen.launched.plus_ms(longest_life_ms);
                (*tag == installation.to_string(), told.map_or(seen.launched, |t| t.min(bound)))
            }
            (None, None) => return Belongs::Foreign,
        };
        if !ours {
            return Belongs::Theirs;
        }
        Belongs::Ours(Self { region: seen.region.clone(), id: seen.id.clone(), token, deadline })
    }

    pub fn region(&self) -> &Region {
        &self.region
    }
    pub fn id(&self) -> &InstanceId {
        &self.id
    }
    pub fn token(&self) -> Option<ClientToken> {
        self.token
    }
    /// As registered; [`effective_deadline`](crate::deadline::effective_deadline) takes the tag into account.
    pub fn deadline(&self) -> Micros {
        self.deadline
    }
    /// What ends it, and nothing else.
    pub fn kill_id(&self) -> KillId {
        KillId { region: self.region.clone(), instance: self.id.clone() }
    }
}

impl fmt::Display for OwnedInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.id, self.region)
    }
}

/// One owned instance, to be ended. Neither made from parts nor read from text: see the module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KillId {
    region: Region,
    instance: InstanceId,
}

impl KillId {
    pub fn region(&self) -> &Region {
        &self.region
    }
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }
}

impl fmt::Display for KillId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.instance, self.region)
    }
}
