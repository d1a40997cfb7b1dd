//! What a live session is, read outside every timed window, for the fidelity gates.

use std::collections::BTreeMap;

use drums_common::evidence::LimitsRead;

use super::{
    Engine,
    api::{FidelityReading, GuestReady, SessionOrder, Target},
    membership,
    operate::CALL_TIMEOUT,
};
use crate::{
    arms::{self, Plan},
    steps::Cx,
};

impl Engine {
    pub(super) fn read(
        &self,
        order: &SessionOrder<'_>,
        plan: &Plan,
        target: &Target,
        cx: &Cx,
        ready: &GuestReady,
    ) -> FidelityReading {
        let mut faults = Vec::new();
        let limits = self.sys.cgroup_limits(&plan.cgroup).unwrap_or_else(|e| {
            faults.push(format!("limits could not be read back: {}", drums_common::telemetry::chain(&e)));
            LimitsRead { cpu_milli: u32::MAX, cpus: Vec::new(), memory_bytes: u64::MAX }
        });
        let wanted = arms::cgroup_limits(order);
        let mut cpus = wanted.cpus.clone();
        cpus.sort_unstable();
        if (limits.cpu_milli, limits.memory_bytes) != (wanted.cpu_milli, wanted.memory_bytes) || limits.cpus != cpus {
            faults.push(format!(
                "limits read {} thousandths of a CPU, CPUs {:?}, {} bytes; declared were {}, {:?}, {}",
                limits.cpu_milli, limits.cpus, limits.memory_bytes, wanted.cpu_milli, cpus, wanted.memory_bytes
            ));
        }
        let guest_sha256 = match self.prober.get(target, "/drums/digest", CALL_TIMEOUT, &mut self.lives(cx)) {
            Ok(answer) => answer.get("guest_sha256").and_then(|v| v.as_str()).and_then(|s| s.parse().ok()),
            Err(e) => {
                faults.push(format!("the guest's digest could not be asked: {}", drums_common::telemetry::chain(&e)));
                None
            }
        };
        if guest_sha256.is_some_and(|got| got != order.workload.guest_sha256) {
            faults.push("the guest server's binary is not the workload's".to_owned());
        }
        self.carried_state(order, ready, &mut faults);
        let mut mechanism = match self.arm(order.arm.kind) {
            Ok(arm) => arm.mechanism(&self.site, order, &*self.sys, cx, &mut faults),
            Err(_) => BTreeMap::new(),
        };
        let outside = faults.len();
        let threads = membership::read(&*self.sys, plan, cx, &mut faults);
        if faults.len() == outside {
            mechanism.insert("inside_limits".to_owned(), format!("all {threads} threads"));
        }
        FidelityReading { mechanism, limits, guest_sha256, faults }
    }

    /// A restored session carries its template's state and nothing of its identity.
    fn carried_state(&self, order: &SessionOrder<'_>, ready: &GuestReady, faults: &mut Vec<String>) {
        let key = (order.run, order.arm.name.clone(), order.template_build);
        match self.templates.get(&key) {
            Some(held) if order.arm.kind.from_template() && ready.state != held.template.state => {
                faults
                    .push(format!("it carries state {:?}, not its template's {:?}", ready.state, held.template.state));
            }
            Some(_) if order.arm.kind.from_template() => {}
            _ if !ready.state.is_empty() => {
                faults.push(format!("a cold session carries saved state {:?}", ready.state));
            }
            _ => {}
        }
    }
}
