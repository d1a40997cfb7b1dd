//! Layer 1 as it is deployed: the guest's own scripts are run, each look of theirs, in a shell whose clock, service manager
//! and /proc are the simulation's.
//!
//! What a script is asked is how far away its deadline and the end of its lifetime are; only the last and the first
//! seconds around either are told apart, so that each answer is computed once.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, ensure};
use drums_agent::watchdog::bounds::Bounds;
use drums_common::clock::Micros;
use drums_provider::cloud::UserData;
use tempfile::TempDir;

const USER_DATA: &str = include_str!("../../../cloud/guest/user-data.sh");
const UNIT: &str = include_str!("../../../cloud/guest/drums-deadline");
/// Between two looks of the unit.
pub const LOOK_S: u64 = 5;
/// Farther from an edge than this, all looks are alike.
const EDGE_S: i64 = 20;
/// Where the guest's clock and its uptime stand when a script looks.
const WALL_S: i64 = 1_796_000_000;
const UP_S: i64 = 100_000;

/// Programs that stand before the machine's. A script that would wait has said all that it says now.
const STUBS: [(&str, &str); 6] = [
    ("date", r#"echo "$WALL""#),
    ("sleep", "kill -9 $PPID"),
    ("systemctl", r#"echo "systemctl $*" >>"$DID""#),
    ("systemd-run", r#"echo "systemd-run $*" >>"$DID""#),
    ("nohup", r#"echo "nohup $*" >>"$DID""#),
    ("timeout", r#"shift 3; exec "$@""#),
];

/// User data of a host with its deadline and lifetime in it. What it fetches and enrols with is not looked at here.
pub fn user_data(deadline: Micros, lifetime_ms: u64) -> UserData {
    let text = USER_DATA.replace("@DEADLINE_S@", &deadline.0.div_euclid(1_000_000).to_string());
    UserData(text.replace("@LIFETIME_S@", &(lifetime_ms / 1_000).to_string()))
}

/// The file that user data write for the timer and the watchdog, as they have it.
pub fn bounds(user_data: &UserData) -> Result<Bounds> {
    let number = |name: &str| {
        let line = user_data.0.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='));
        line.with_context(|| format!("user data have no line {name}"))?.parse::<u64>().context("it is no number")
    };
    let (deadline_s, lifetime_s) = (number("DEADLINE_S")?, number("LIFETIME_S")?);
    Ok(Bounds { deadline: Micros(0).plus_ms(deadline_s * 1_000), lifetime_ms: lifetime_s * 1_000 })
}

/// The scripts, and what they answered so far.
pub struct Scripts {
    first_line: String,
    unit: String,
    root: TempDir,
    /// One at a time: they share a root.
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    looks: BTreeMap<(i64, i64), bool>,
    armed: BTreeMap<(i64, i64), Option<u64>>,
}

impl Scripts {
    /// As deployed.
    pub fn deployed() -> Result<Self> {
        Self::with(|text| text.to_owned())
    }

    /// As deployed but for an edit; whoever tries the matrix edits what kills.
    pub fn with(edit: impl Fn(&str) -> String) -> Result<Self> {
        let first_line = USER_DATA.lines().nth(2).context("user data have a first line")?;
        ensure!(first_line.contains("@DEADLINE_S@"), "user data's first line knows no deadline any more");
        let root = TempDir::with_prefix("drums-kill-matrix-").context("cannot make a guest's root")?;
        let bin = root.path().join("bin");
        for folder in ["bin", "etc/drums", "proc/sys/kernel/random"] {
            fs::create_dir_all(root.path().join(folder)).context("cannot make a guest's root")?;
        }
        for (name, body) in STUBS {
            let path = bin.join(name);
            fs::write(&path, format!("#!/bin/sh\n{body}\n"))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        fs::write(root.path().join("proc/sys/kernel/random/boot_id"), "this\n")?;
        Ok(Self { first_line: edit(first_line), unit: edit(UNIT), root, known: Mutex::default() })
    }

    /// How many seconds after it was run the first line of user data powers the machine off, if it does.
    pub fn first_line_s(&self, to_deadline_s: i64, lifetime_s: i64) -> Result<Option<u64>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(armed) = known.armed.get(&(to_deadline_s, lifetime_s)) {
            return Ok(*armed);
        }
        let line = self.first_line.replace("@DEADLINE_S@", &(WALL_S + to_deadline_s).to_string());
        let did = self.run(&(line.replace("@LIFETIME_S@", &lifetime_s.to_string()) + "\nwait"))?;
        // Both of its ways say when; the one that needs no service manager counts.
        let way = did.lines().find_map(|l| l.strip_prefix("nohup sh -c sleep ")).context("it starts nothing")?;
        let (seconds, what) = way.split_once("; ").context("it starts something else")?;
        let armed = what.starts_with("poweroff").then(|| seconds.parse::<u64>()).transpose()?;
        known.armed.insert((to_deadline_s, lifetime_s), armed);
        Ok(armed)
    }

    /// Whether the unit, which looks now, asks for power-off.
    pub fn unit_is_due(&self, to_deadline_s: i64, to_lifetime_s: i64) -> Result<bool> {
        let near = |s: i64| s.clamp(-EDGE_S, EDGE_S);
        let key = (near(to_deadline_s), near(to_lifetime_s));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(due) = known.looks.get(&key) {
            return Ok(*due);
        }
        let told = format!("DEADLINE_S={}\nLIFETIME_S={}\n", WALL_S + key.0, UP_S + key.1);
        fs::write(self.root.path().join("etc/drums/deadline"), told)?;
        fs::write(self.root.path().join("proc/uptime"), format!("{UP_S}.00 0\n"))?;
        let due = self.run(&self.unit)?.lines().next() == Some("systemctl --no-block poweroff");
        known.looks.insert(key, due);
        Ok(due)
    }

    /// What a script called, a line each.
    fn run(&self, script: &str) -> Result<String> {
        let root = self.root.path();
        let did = root.join("did");
        fs::write(&did, "")?;
        let path = |p: &Path| p.display().to_string();
        let mut sh = Command::new("sh");
        sh.args(["-c", script]).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        sh.env("PATH", format!("{}:/usr/bin:/bin", path(&root.join("bin"))));
        sh.env("DRUMS_ROOT", root).env("DID", &did).env("WALL", WALL_S.to_string());
        sh.status().context("cannot run a guest's script: there is no sh")?;
        fs::read_to_string(&did).context("cannot read what a guest's script did")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deployed_scripts_power_off_at_the_deadline_and_at_the_end_of_the_lifetime_and_not_before() {
        let scripts = Scripts::deployed().unwrap();
        for (to_deadline, to_lifetime, due) in
            [(1, 1, false), (0, 20, true), (20, 0, true), (-300, 20, true), (5_000, 5_000, false), (1, -1, true)]
        {
            assert_eq!(scripts.unit_is_due(to_deadline, to_lifetime).unwrap(), due, "{to_deadline}, {to_lifetime}");
        }
        assert_eq!(scripts.first_line_s(3_580, 3_600).unwrap(), Some(3_580));
        assert_eq!(scripts.first_line_s(300_000_000, 3_600).unwrap(), Some(3_600), "a clock that is years behind");
        assert_eq!(scripts.first_line_s(-5, 3_600).unwrap(), Some(1));
    }

    #[test]
    fn a_script_that_halts_powers_nothing_off() {
        let halts = Scripts::with(|text| text.replace("poweroff", "halt")).unwrap();
        assert!(!halts.unit_is_due(-5, -5).unwrap());
        assert_eq!(halts.first_line_s(3_580, 3_600).unwrap(), None);
    }
}
