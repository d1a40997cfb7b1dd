//! Which hosts are to run another build of the agent. The store has the wish; here it is at hand for orders.

use std::{
    collections::BTreeMap,
    sync::{MutexGuard, PoisonError},
};

use drums_common::{digest::Sha256, failure::Failure, ids::HostId, telemetry::chain, wire::latest::Upgrade};

use super::Control;
use crate::{
    net::ports::Peer,
    store::{HostRow, StoreError, Who},
};

pub(super) type Upgrades = BTreeMap<HostId, Upgrade>;

/// Those that are still wished for.
pub(super) fn pending(hosts: &[HostRow]) -> Upgrades {
    let wished = hosts.iter().filter(|h| h.released.is_none());
    wished.filter_map(|h| Some((h.host.clone(), h.upgrade.clone()?))).collect()
}

impl Control {
    pub(super) fn upgrades(&self) -> MutexGuard<'_, Upgrades> {
        self.upgrades.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders a build for a host, or none. Its agent takes it between runs; one that runs it already is left alone.
    pub async fn order_upgrade(&self, host: &HostId, upgrade: Option<Upgrade>, by: &Who) -> Result<(), StoreError> {
        let name = host.clone();
        let runs = self.store.call(move |s| s.host(&name)).await?.and_then(|h| h.agent_sha256);
        let upgrade = upgrade.filter(|u| runs != Some(u.sha256));
        let audit = match &upgrade {
            Some(u) => self.audit_row(by, "upgrade").detail(&format!("build {}", u.sha256)),
            None => self.audit_row(by, "upgrade-cancel"),
        };
        self.wish(host, upgrade, audit.host(host)).await
    }

    /// The agent says which build it is: an order for that one is met.
    pub(super) async fn seen_build(&self, peer: &Peer, build: Sha256) {
        if self.upgrades().get(&peer.host).is_some_and(|u| u.sha256 == build) {
            let audit = self.row_of(peer, "upgraded").detail(&format!("build {build}"));
            self.settle(peer, audit).await;
        }
    }

    /// The agent says that what was ordered did not work.
    pub(super) async fn upgrade_failed(&self, peer: &Peer, upgrade: &Upgrade, failure: &Failure) {
        if self.upgrades().get(&peer.host) == Some(upgrade) {
            tracing::error!(host = %peer.host, build = %upgrade.sha256.short(), error = %failure, "an upgrade failed");
            let detail = format!("build {}: {}", upgrade.sha256.short(), failure.message);
            let audit = self.row_of(peer, "upgrade-failed").detail(&detail);
            self.settle(peer, audit).await;
        }
    }

    async fn settle(&self, peer: &Peer, audit: crate::store::AuditRow) {
        if let Err(e) = self.wish(&peer.host, None, audit).await {
            // The agent says it again with its next connection, or when the order reaches it once more.
            tracing::error!(host = %peer.host, error = chain(&e), "how an upgrade came out was not stored");
        }
    }

    async fn wish(
        &self,
        host: &HostId,
        upgrade: Option<Upgrade>,
        audit: crate::store::AuditRow,
    ) -> Result<(), StoreError> {
        let (name, wished) = (host.clone(), upgrade.clone());
        self.store.call(move |s| s.set_upgrade(&name, wished.as_ref(), &audit)).await?;
        match upgrade {
            Some(upgrade) => self.upgrades().insert(host.clone(), upgrade),
            None => self.upgrades().remove(host),
        };
        self.orders_due();
        self.wake.notify_one();
        self.changed();
        Ok(())
    }
}
