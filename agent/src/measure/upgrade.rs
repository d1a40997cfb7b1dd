//! Between runs, another build may be ordered to take this agent's place: it is fetched, and this agent ends for it.

use drums_common::{
    failure::{Failure, FailureClass},
    telemetry::chain,
    wire::latest::Upgrade,
};

use super::runner::{RunState, Runner, TRY_AGAIN_MS};
use crate::{
    engine::api::ArmEngine,
    net::{FetchError, Stop, View},
    succession::{Succession, SuccessionError, Successor},
};

#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("the ordered build cannot be put in place")]
    Place(#[from] SuccessionError),
}

impl UpgradeError {
    /// Trying again changes nothing.
    fn permanent(&self) -> bool {
        matches!(self, Self::Fetch(FetchError::Failed { failure, .. }) if failure.class != FailureClass::Transient)
    }
}

impl<E: ArmEngine> Runner<E> {
    /// Asks this agent to end for an ordered build, once nothing is open and the build is here.
    pub(super) fn make_room(&mut self, view: &View) {
        let Some(upgrade) = &view.upgrade else { return };
        let now = self.parts.clock.boottime();
        let open = self.runs.values().any(|run| matches!(run.state, RunState::Open(_)));
        let tried = self.upgrade_tried.is_some_and(|(version, next)| version == view.version && now < next);
        if open || tried || upgrade.sha256 == self.parts.agent_sha256 {
            return;
        }
        self.upgrade_tried = Some((view.version, now.plus_ms(TRY_AGAIN_MS)));
        let refuse = |why: String| {
            let failure =
                Failure::refused("upgrade-failed", why, "order it again with drumsctl host upgrade, or another");
            self.parts.link.upgrade_failed(upgrade.clone(), failure);
        };
        match self.prepare_room(upgrade) {
            Ok(None) => {
                tracing::info!(build = %upgrade.sha256.short(), "another build is here; this agent ends for its trial");
                self.parts.link.stop(Stop::Upgrade(upgrade.clone()));
            }
            Ok(Some(why)) => refuse(why),
            Err(e) if e.permanent() => refuse(chain(&e).to_string()),
            Err(e) => tracing::warn!(error = chain(&e), "the ordered build is not here yet; it is tried again"),
        }
    }

    /// Why this order was given up before, or nothing and the build is in place.
    fn prepare_room(&self, upgrade: &Upgrade) -> Result<Option<String>, UpgradeError> {
        let succession: &Succession = &self.parts.succession;
        let successor = Successor { sha256: upgrade.sha256, ordered: upgrade.ordered };
        if let Some(why) = succession.failed(&successor)? {
            return Ok(Some(why));
        }
        if !succession.program(upgrade.sha256).exists() {
            let fetched = self.parts.link.fetch_file(upgrade.sha256, upgrade.bytes)?;
            succession.install(&fetched, upgrade.sha256)?;
        }
        Ok(None)
    }
}
