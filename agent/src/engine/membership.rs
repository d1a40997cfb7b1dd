//! Whether the limits are around a session: they were written to a group, and hold for nobody who is not in it.

use std::{collections::BTreeSet, path::Path};

use crate::{arms::Plan, steps::Cx, sys::Sys};

/// What limits and accounts are made of.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuacct", "cpuset", "memory"];
/// A process that forks for ever must not keep us reading.
const MOST: usize = 4_096;

/// How many threads of the session were looked at; who is outside its group goes to `faults`. Looked at are the processes
/// that the arm started, their descendants, and whoever is in the group in any one hierarchy.
pub(super) fn read(sys: &dyn Sys, plan: &Plan, cx: &Cx, faults: &mut Vec<String>) -> usize {
    let own: Vec<i32> = cx.children.values().filter(|c| sys.alive(c)).map(|c| c.process.pid).collect();
    if own.is_empty() {
        faults.push("no process of the session is known, so its limits cannot be shown to hold".to_owned());
    }
    let mut next = own.clone();
    match sys.cgroup_procs(&plan.cgroup) {
        Ok(pids) => next.extend(pids),
        Err(e) => faults.push(format!("who is in {}: {}", plan.cgroup, drums_common::telemetry::chain(&e))),
    }
    let (mut seen, mut threads) = (BTreeSet::new(), 0);
    while let Some(pid) = next.pop() {
        if seen.len() >= MOST || !seen.insert(pid) {
            continue;
        }
        let tasks = format!("/proc/{pid}/task");
        let mut looked = 0;
        for tid in sys.list_dir(Path::new(&tasks)).unwrap_or_default() {
            let file = |name: &str| {
                let bytes = sys.read_file(Path::new(&format!("{tasks}/{tid}/{name}"))).ok()?;
                Some(String::from_utf8_lossy(&bytes).into_owned())
            };
            // A thread that has ended since it was listed is outside nothing.
            let Some(groups) = file("cgroup") else { continue };
            looked += 1;
            for (controller, at) in outside(&groups, &plan.cgroup) {
                faults.push(format!("thread {tid} of pid {pid} is in {at} for {controller}, not in {}", plan.cgroup));
            }
            let children = file("children").unwrap_or_default();
            next.extend(children.split_ascii_whitespace().filter_map(|p| p.parse::<i32>().ok()));
        }
        if looked == 0 && own.contains(&pid) {
            faults.push(format!("the threads of pid {pid} cannot be seen, so its limits cannot be shown to hold"));
        }
        threads += looked;
    }
    threads
}

/// Controllers in which a process is neither in `group` nor below it, and where it is. `groups` is its /proc/PID/cgroup:
/// `N:CONTROLLERS:PATH`; a controller without a hierarchy of its own is in the unified one, `0::PATH`.
fn outside(groups: &str, group: &str) -> Vec<(&'static str, String)> {
    let at = |wanted: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers.split(',').any(|c| c == wanted).then(|| path.to_owned())
        })
    };
    let inside = |path: &str| {
        path.strip_prefix('/')
            .and_then(|p| p.strip_prefix(group))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    CONTROLLERS
        .into_iter()
        .map(|c| (c, at(c).or_else(|| at("")).unwrap_or_else(|| "no group".to_owned())))
        .filter(|(_, path)| !inside(path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_controller_counts() {
        let v1 = "6:pids:/\n4:memory:/s/tool\n3:cpuset:/s\n2:cpu,cpuacct:/s/session/x\n0::/\n";
        assert_eq!(outside(v1, "s"), []);
        assert_eq!(outside(&v1.replace("cpuset:/s", "cpuset:/"), "s"), [("cpuset", "/".to_owned())]);
        let both = [("cpu", "/s2/session".to_owned()), ("cpuacct", "/s2/session".to_owned())];
        assert_eq!(outside(&v1.replace("/s/session/x", "/s2/session"), "s"), both, "a name that begins alike");
        assert_eq!(outside("0::/s/session\n", "s"), []);
        assert_eq!(outside("0::/user.slice\n", "s").len(), 4);
        assert_eq!(outside("", "s").len(), 4);
    }
}
