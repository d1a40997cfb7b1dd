//! One measurement at a time per machine: whose turn it is.
//!
//! Hosts of one machine take turns of one block, in the run's order; machines do not wait for each other. A turn ends
//! when its block ended in committed evidence, so a coordinator that restarts never gives two.

use std::collections::{BTreeMap, HashMap};

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
    // Hosts that share hardware and one of the two names are linked through whoever came first with it: a thousand hosts
    // are grouped in one pass.
    let mut first: HashMap<(&str, bool, &str), usize> = HashMap::new();
    let mut parent: Vec<usize> = Vec::new();
    for (i, id) in identities.enumerate() {
        parent.push(i);
        for (is_dmi, name) in [(false, id.boot_id.as_str()), (true, id.dmi_uuid.as_str())] {
            if name.is_empty() {
                continue;
            }
            let other = *first.entry((id.hardware.as_str(), is_dmi, name)).or_insert(i);
            let (a, b) = (root(&parent, i), root(&parent, other));
            parent[a.max(b)] = a.min(b);
        }
    }
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in 0..parent.len() {
        groups.entry(root(&parent, i)).or_default().push(i);
    }
    groups.into_values().collect()
}

/// The first host of a host's group.
fn root(parent: &[usize], mut i: usize) -> usize {
    while parent[i] != i {
        i = parent[i];
    }
    i
}
