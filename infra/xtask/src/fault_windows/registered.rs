//! What an arm's windows must be at least: a mechanism that lost its windows would pass every case that is left.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use drums_common::arm::{ArmKind, Mechanism};

/// Of each Drums arm, as many as the earlier study of this mechanism registered.
const FEWEST_OF_DRUMS: usize = 22;

/// Operations in which an arm is stopped.
fn operations(arm: ArmKind) -> Vec<&'static str> {
    let mut all = vec!["open", "create", "reset", "destroy", "close", "sweep"];
    all.extend(arm.from_template().then_some("template"));
    all
}

/// Calls that must lie between windows.
fn calls(arm: ArmKind) -> Vec<(&'static str, &'static str)> {
    let mut all = vec![
        ("open", "mount"),
        ("create", "make-cgroup"),
        ("create", "make-dir"),
        ("destroy", "remove-cgroup"),
        ("destroy", "remove-tree"),
        ("sweep", "remove-cgroup"),
        ("sweep", "unmount"),
    ];
    match arm.mechanism() {
        Mechanism::Drums if arm.from_template() => {
            all.extend([("template", "spawn-session"), ("template", "spawn-tool"), ("template", "wait")]);
            all.extend([("create", "spawn-tool"), ("create", "wait"), ("create", "adopt"), ("create", "make-veth")]);
        }
        Mechanism::Drums => {
            all.extend([("create", "make-netns"), ("create", "make-veth"), ("create", "spawn-session")])
        }
        Mechanism::Runc => {
            all.extend([("create", "write-file"), ("create", "spawn-tool"), ("create", "wait"), ("create", "adopt")]);
            if arm.from_template() {
                all.extend([("template", "spawn-tool"), ("template", "wait")]);
            }
        }
        Mechanism::Qemu => {
            all.extend([("create", "make-tap"), ("create", "spawn-tool"), ("create", "qmp-negotiate")]);
            if arm.from_template() {
                let saving = ["qmp-stop", "new-file", "qmp-set-capabilities", "qmp-take-descriptor", "qmp-migrate"];
                all.extend(saving.map(|call| ("template", call)));
                all.extend([("template", "qmp-quit"), ("template", "set-mode"), ("template", "write-file")]);
                all.extend([("create", "qmp-set-capabilities"), ("create", "qmp-migrate-incoming")]);
            }
        }
        Mechanism::External => {}
    }
    all
}

/// Fails when an arm has fewer windows than it must have.
pub fn check(arm: ArmKind, listed: &[String]) -> Result<()> {
    let distinct: BTreeSet<&String> = listed.iter().collect();
    ensure!(distinct.len() == listed.len(), "{arm} names two of its windows alike");
    if arm.mechanism() == Mechanism::Drums {
        let n = distinct.len();
        ensure!(n >= FEWEST_OF_DRUMS, "{arm} has {n} windows, and must have {FEWEST_OF_DRUMS} at least");
    }
    for operation in operations(arm) {
        let there = listed.iter().any(|w| w.starts_with(&format!("{operation}/")));
        ensure!(there, "{arm} has no window in its {operation}");
    }
    for (operation, call) in calls(arm) {
        for edge in ["before", "after"] {
            let window = format!("{operation}/{call}.1/{edge}");
            ensure!(distinct.contains(&window), "{arm} has no window {window}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(arm: ArmKind) -> Vec<String> {
        let mut all: BTreeSet<String> = BTreeSet::new();
        for (operation, call) in calls(arm) {
            all.extend(["before", "after"].map(|edge| format!("{operation}/{call}.1/{edge}")));
        }
        for operation in operations(arm) {
            all.extend((1..=8).map(|n| format!("{operation}/make-dir.{n}/before")));
        }
        all.into_iter().collect()
    }

    #[test]
    fn an_arm_that_lost_windows_is_refused() {
        for arm in ArmKind::BUILT_IN {
            let whole = windows(arm);
            check(arm, &whole).unwrap();
            let few = &whole[..8];
            assert!(check(arm, few).is_err(), "{arm}");
            for (operation, call) in calls(arm) {
                let lost: Vec<String> =
                    whole.iter().filter(|w| **w != format!("{operation}/{call}.1/after")).cloned().collect();
                assert!(check(arm, &lost).unwrap_err().to_string().contains(call), "{arm}: {operation}/{call}");
            }
            assert!(check(arm, &[whole.clone(), whole[..1].to_vec()].concat()).is_err(), "{arm}: a name twice");
        }
    }

    #[test]
    fn fewer_than_twenty_two_windows_of_drums_are_too_few() {
        let whole = windows(ArmKind::DrumsCold);
        let said = check(ArmKind::DrumsCold, &whole[..21]).unwrap_err().to_string();
        assert!(said.contains("must have 22"), "{said}");
    }
}
