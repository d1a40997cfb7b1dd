//! What shows that a container really is one, and that a restored one really was restored: read in the same way for every
//! arm that makes containers.

use std::{collections::BTreeMap, path::Path};

use crate::sys::Sys;

fn text(sys: &dyn Sys, path: &str) -> Option<String> {
    sys.read_file(Path::new(path)).ok().map(|b| String::from_utf8_lossy(&b).into_owned())
}

/// Reads /proc of the container's pid 1.
pub fn container(sys: &dyn Sys, pid: i32, read: &mut BTreeMap<String, String>, faults: &mut Vec<String>) {
    match text(sys, &format!("/proc/{pid}/status")) {
        Some(status) => {
            let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
            match field("NSpid:").and_then(|v| v.split_whitespace().last()) {
                Some("1") => drop(read.insert("pid_in_namespace".to_owned(), "1".to_owned())),
                other => faults.push(format!("the container's first process is {other:?} in its namespace, not 1")),
            }
            match field("Seccomp:") {
                Some("2") => drop(read.insert("seccomp".to_owned(), "filter".to_owned())),
                other => faults.push(format!("the container's seccomp mode is {other:?}, not a filter")),
            }
        }
        None => faults.push(format!("/proc/{pid}/status cannot be read")),
    }
    match text(sys, &format!("/proc/{pid}/mountinfo")).as_deref().map(root_kind) {
        Some(Some(kind)) if kind == "overlay" => drop(read.insert("root".to_owned(), kind)),
        Some(other) => faults.push(format!("the container's root is {other:?}, not an overlay")),
        None => faults.push(format!("/proc/{pid}/mountinfo cannot be read")),
    }
    for kind in ["pid", "mnt", "net", "ipc", "uts"] {
        let link = |of: &str| sys.read_link(Path::new(&format!("/proc/{of}/ns/{kind}"))).ok();
        match (link(&pid.to_string()), link("self")) {
            (Some(theirs), Some(ours)) if theirs == ours => {
                faults.push(format!("the session's {kind} namespace is the agent's"));
            }
            (Some(theirs), Some(_)) => drop(read.insert(format!("{kind}_namespace"), theirs.display().to_string())),
            _ => faults.push(format!("the session's {kind} namespace cannot be seen")),
        }
    }
}

/// File system type of `/`.
fn root_kind(mountinfo: &str) -> Option<String> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (left.split(' ').nth(4)? == "/").then(|| right.split(' ').next().unwrap_or_default().to_owned())
    })
}

/// Reads CRIU's log of the restore.
pub fn restored(sys: &dyn Sys, log: &Path, read: &mut BTreeMap<String, String>, faults: &mut Vec<String>) {
    match sys.read_file(log) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            match text.lines().find_map(|l| l.split_once("Version: ").map(|(_, v)| v.trim())) {
                Some(version) => drop(read.insert("criu_version".to_owned(), version.to_owned())),
                None => faults.push(format!("CRIU's {} names no version", log.display())),
            }
            if text.contains("Restore finished successfully") {
                read.insert("restored_by".to_owned(), "criu".to_owned());
            } else {
                faults.push(format!("CRIU's {} does not say that the restore finished", log.display()));
            }
        }
        Err(e) => faults.push(format!("CRIU's log: {}", drums_common::telemetry::chain(&e))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_s_file_system_is_read_from_mountinfo() {
        let info =
            "93 92 0:44 / /proc rw - proc proc rw\n92 68 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/t\n";
        assert_eq!(root_kind(info).as_deref(), Some("overlay"));
        assert_eq!(root_kind(""), None);
    }
}
