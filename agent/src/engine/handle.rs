//! A live session in its owner's hands.

use drums_common::{arm::ArmKind, ids::SessionRef};

use super::{api::Target, run::Made};

/// A live session. It ends by `ArmEngine::destroy` or `reset`; dropping it does no I/O and leaves the session to the
/// next audit, loudly.
#[derive(Debug)]
#[must_use = "a session that is only dropped stays until the next audit"]
pub struct SessionHandle {
    pub(super) session: SessionRef,
    pub(super) kind: ArmKind,
    pub(super) target: Target,
    pub(super) made: Made,
}

impl SessionHandle {
    pub fn session(&self) -> SessionRef {
        self.session
    }
    pub fn kind(&self) -> ArmKind {
        self.kind
    }
    /// Where its guest server answers.
    pub fn target(&self) -> &Target {
        &self.target
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        if !self.made.entries.is_empty() {
            tracing::error!(session = %self.session, plan = %self.made.plan, "session dropped instead of destroyed; the next audit undoes it");
        }
    }
}

#[cfg(test)]
impl SessionHandle {
    /// A handle of a session that holds nothing on this host: for engines that live in a test's memory.
    pub(crate) fn in_memory(session: SessionRef, kind: ArmKind) -> Self {
        let target = Target::new(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 1));
        Self { session, kind, target, made: Made::default() }
    }
}
