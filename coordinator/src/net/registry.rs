//! Who is connected now. One connection per host: the same agent may replace its own, a second one is refused.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use drums_common::{ids::HostId, machine::MachineIdentity};
use quinn::Connection;

/// How long a connection that a second agent disputes has to show a sign of life. Its QUIC stack answers a probe in one
/// round trip, also while the agent keeps a declared silence.
const PROBE: Duration = Duration::from_secs(1);
const PROBE_STEP: Duration = Duration::from_millis(20);
/// What is on its way arrives within so many round trips, and not all of it within the shortest.
const UNDER_WAY_RTTS: u32 = 3;
const UNDER_WAY_LEAST: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Registry {
    live: Mutex<HashMap<HostId, Live>>,
}

#[derive(Clone, Debug)]
struct Live {
    connection: Connection,
    instance: u64,
}

/// What a newcomer may do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It is the host's connection now.
    Granted,
    /// Another agent holds the identity, and lives.
    Disputed,
}

/// True if a host that was seen on `before` may be on `now`: the same machine, perhaps rebooted.
pub fn may_be_rebooted(before: &MachineIdentity, now: &MachineIdentity) -> bool {
    let installed = !now.machine_id.is_empty() && now.machine_id == before.machine_id;
    before.same_machine(now) || (before.hardware == now.hardware && before.dmi_uuid == now.dmi_uuid && installed)
}

impl Registry {
    /// Claims a host for a connection. The same process reconnecting takes over at once; another process only if the
    /// connection it would replace is dead.
    pub async fn claim(&self, host: &HostId, connection: &Connection, instance: u64) -> Claim {
        let old = self.lock().get(host).cloned();
        if let Some(old) = old
            && old.instance != instance
            && old.connection.close_reason().is_none()
            && alive(&old.connection).await
        {
            return Claim::Disputed;
        }
        let replaced = self.lock().insert(host.clone(), Live { connection: connection.clone(), instance });
        if let Some(replaced) = replaced {
            use drums_common::wire::close::Close;
            replaced.connection.close(Close::Replaced.code().into(), Close::Replaced.words().as_bytes());
        }
        Claim::Granted
    }

    /// True if the host has a connection, dead or alive.
    pub fn is_held(&self, host: &HostId) -> bool {
        self.lock().contains_key(host)
    }

    /// Gives a host up. True if `connection` still held it, false if another one has replaced it.
    pub fn release(&self, host: &HostId, connection: &Connection) -> bool {
        let mut live = self.lock();
        let ours = live.get(host).is_some_and(|l| l.connection.stable_id() == connection.stable_id());
        if ours {
            live.remove(host);
        }
        ours
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<HostId, Live>> {
        // Single inserts and removes; a panic elsewhere cannot leave the map half-changed.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the peer's QUIC stack: it must acknowledge the probe. What a process sent just before it was killed is still on its
/// way and no sign of life, so that comes in first.
async fn alive(connection: &Connection) -> bool {
    tokio::time::sleep((connection.rtt() * UNDER_WAY_RTTS).clamp(UNDER_WAY_LEAST, PROBE)).await;
    let received = || connection.stats().udp_rx.datagrams;
    let before = received();
    // An empty datagram is no message; the agent drops it.
    if connection.send_datagram(bytes::Bytes::from_static(&[0])).is_err() {
        return false;
    }
    let probe = async {
        // The statistics have no event to wait for.
        while received() == before && connection.close_reason().is_none() {
            tokio::time::sleep(PROBE_STEP).await;
        }
        connection.close_reason().is_none()
    };
    tokio::time::timeout(PROBE, probe).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(boot: &str, id: &str, dmi: &str, hardware: &str) -> MachineIdentity {
        MachineIdentity {
            boot_id: boot.into(),
            machine_id: id.into(),
            dmi_uuid: dmi.into(),
            btime_s: 0,
            hardware: hardware.into(),
        }
    }

    #[test]
    fn a_reboot_is_no_second_machine() {
        for (before, now, same) in [
            (machine("b1", "m", "", "x"), machine("b1", "m", "", "x"), true),
            (machine("b1", "m", "", "x"), machine("b2", "m", "", "x"), true),
            (machine("b1", "m", "d", "x"), machine("b2", "m", "d", "x"), true),
            (machine("b1", "m", "d", "x"), machine("b2", "n", "d", "x"), true),
            (machine("b1", "m", "", "x"), machine("b2", "n", "", "x"), false),
            (machine("b1", "", "", "x"), machine("b2", "", "", "x"), false),
            (machine("b1", "m", "d", "x"), machine("b2", "m", "e", "x"), false),
            (machine("b1", "m", "", "x"), machine("b2", "m", "", "y"), false),
        ] {
            assert_eq!(may_be_rebooted(&before, &now), same, "{before:?} {now:?}");
        }
    }
}
