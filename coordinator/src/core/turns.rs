//! One measurement at a time per machine: whose turn it is.
//!
//! Hosts of one machine take turns of one block, in the run's order; machines do not wait for each other. A turn ends
//! when its block ended in committed evidence, so a coordinator that restarts never gives two.

use drums_common::{experiment::Experiment, machine::MachineIdentity, wire::latest::Grant};

use super::run::HostRun;

/// The blocks to grant now, by index of the host.
pub fn next(hosts: &[HostRun], experiment: &Experiment) -> Vec<(usize, Grant)> {
    let mut out = Vec::new();
    for group in machines(hosts.iter().map(|h| &h.machine)) {
        if group.iter().any(|&i| hosts[i].open_block().is_some()) {
            continue;
        }
        // Fewest blocks so far; of equals the first in the run's order. That alternates, and lets a host that needs a
        // replacement have it.
        let turn = group
            .iter()
            .filter(|&&i| !hosts[i].lost)
            .filter_map(|&i| Some((hosts[i].granted.len(), i, hosts[i].next_block(experiment)?)))
            .min_by_key(|(granted, i, _)| (*granted, *i));
        if let Some((_, i, grant)) = turn {
            out.push((i, grant));
        }
    }
    out
}

/// Indices grouped by machine: two agents on one machine are one machine. The relation is not transitive by itself
/// (boot id or DMI UUID), so groups that a third host joins are merged.
pub fn machines<'m>(identities: impl Iterator<Item = &'m MachineIdentity>) -> Vec<Vec<usize>> {
    let mut groups: Vec<(Vec<usize>, Vec<&MachineIdentity>)> = Vec::new();
    for (i, id) in identities.enumerate() {
        let (mut same, other): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|(_, ids)| ids.iter().any(|have| have.same_machine(id)));
        let mut merged = (Vec::new(), Vec::new());
        for (indices, ids) in same.drain(..) {
            merged.0.extend(indices);
            merged.1.extend(ids);
        }
        merged.0.push(i);
        merged.1.push(id);
        groups = other;
        groups.push(merged);
    }
    groups.sort_by_key(|(indices, _)| indices[0]);
    groups.into_iter().map(|(indices, _)| indices).collect()
}
