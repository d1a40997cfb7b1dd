//! Layer 2 of a paid host's end: a process of its own that powers the host off at its deadline, at the end of its
//! registered lifetime, or when its life lease is over, whichever comes first (docs/decisions/0026-the-watchdog.md).
//!
//! ```text
//! coordinator ── answers ──▶ agent ── lease file (renewed by a rename) ──▶ watchdog ── power off
//!                                     /etc/drums/deadline ────────────────────┘
//! ```
//! Owns the decision ([`decide`]), the files that it goes by ([`lease`], [`bounds`]), and how a machine is powered off
//! ([`power`]). Refuses to know what the agent is doing: an agent that is dead, frozen or looping looks the same, its lease
//! is not renewed. Between two renewals nothing of this process runs, so that it is in no timed window: it sleeps until
//! the one instant that it was told, and whoever renews wakes it, which is never done while silence is declared.
//!
//! **Invariant:** whatever is missing, torn, of another boot or unbelievable never means more time than the deadline and
//! the registered lifetime give.

pub mod bounds;
pub mod decide;
pub mod lease;
pub mod power;
mod run;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

pub use run::{WatchdogError, run};

pub const DEFAULT_DEADLINE: &str = "/etc/drums/deadline";
pub const DEFAULT_FOLDER: &str = "/run/drums-watchdog";
pub const DEFAULT_LIVED: &str = "/var/lib/drums/lived";
/// Of the longest time to finish, seconds: what is not uploaded by then is not going to be.
const LONGEST_FINISH_S: u64 = 3_600;

/// The part of the settings that only a paid host uses; agent and watchdog read the same file, so that they agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaidSettings {
    /// Deadline and registered lifetime, as user data wrote them. Its presence is what makes a host a paid one.
    pub deadline: PathBuf,
    /// Where the agent keeps its life lease for the watchdog. Under `/run`: in memory, so that no renewal touches a disk,
    /// and gone after a reboot, as the boot clock that it is counted on.
    pub folder: PathBuf,
    /// Seconds that this host was up in each boot, as its own timer counts them.
    pub lived: PathBuf,
    /// After the end of the life lease, seconds. 300: what is under way is given up and undone within two minutes, and the
    /// evidence of a block is uploaded in one.
    pub finish_s: u64,
    /// Instance metadata, which says what machine a launched host is. EC2's own address.
    pub imds: SocketAddr,
    /// In tests only: a program that is run instead of powering off. Refused where one of the paths above is the one of a
    /// real host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_off_in_tests: Option<PathBuf>,
}

impl Default for PaidSettings {
    fn default() -> Self {
        Self {
            deadline: DEFAULT_DEADLINE.into(),
            folder: DEFAULT_FOLDER.into(),
            lived: DEFAULT_LIVED.into(),
            finish_s: 300,
            imds: SocketAddr::from((Ipv4Addr::new(169, 254, 169, 254), 80)),
            power_off_in_tests: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BadSettings {
    #[error("paid.{name} is {}, and must be an absolute path", path.display())]
    Relative { name: &'static str, path: PathBuf },
    #[error("paid.finish_s is {0}; give 1 to {LONGEST_FINISH_S}")]
    Finish(u64),
    #[error(
        "paid.power_off_in_tests is set, and paid.{name} is {}, which is a real host's: a host that is paid for must power off; remove power_off_in_tests, or give deadline, folder and lived other places",
        path.display()
    )]
    NotATest { name: &'static str, path: PathBuf },
}

impl PaidSettings {
    pub fn validate(&self) -> Result<(), BadSettings> {
        let paths = [
            ("deadline", &self.deadline, DEFAULT_DEADLINE),
            ("folder", &self.folder, DEFAULT_FOLDER),
            ("lived", &self.lived, DEFAULT_LIVED),
        ];
        let program = self.power_off_in_tests.iter().map(|p| ("power_off_in_tests", p));
        for (name, path) in paths.iter().map(|(name, path, _)| (*name, *path)).chain(program) {
            if !path.is_absolute() {
                return Err(BadSettings::Relative { name, path: path.clone() });
            }
        }
        if !(1..=LONGEST_FINISH_S).contains(&self.finish_s) {
            return Err(BadSettings::Finish(self.finish_s));
        }
        if self.power_off_in_tests.is_some() {
            for (name, path, real) in paths {
                if path == Path::new(real) {
                    return Err(BadSettings::NotATest { name, path: path.clone() });
                }
            }
        }
        Ok(())
    }

    /// Whether this host was launched by us and is paid for.
    pub fn is_paid_host(&self) -> bool {
        // What cannot be looked at may be there.
        self.deadline.try_exists().unwrap_or(true)
    }

    pub fn lease_file(&self) -> PathBuf {
        self.folder.join(lease::NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_host_is_powered_off_by_nothing_but_itself() {
        let elsewhere = PaidSettings {
            deadline: "/tmp/t/deadline".into(),
            folder: "/tmp/t/run".into(),
            lived: "/tmp/t/lived".into(),
            finish_s: 1,
            imds: PaidSettings::default().imds,
            power_off_in_tests: Some("/tmp/t/off".into()),
        };
        elsewhere.validate().unwrap();
        let real = PaidSettings::default();
        real.validate().unwrap();
        for bad in [
            PaidSettings { deadline: real.deadline.clone(), ..elsewhere.clone() },
            PaidSettings { folder: real.folder.clone(), ..elsewhere.clone() },
            PaidSettings { lived: real.lived.clone(), ..elsewhere.clone() },
            PaidSettings { power_off_in_tests: Some("/bin/true".into()), ..real.clone() },
        ] {
            let said = bad.validate().unwrap_err().to_string();
            assert!(said.contains("power_off_in_tests") && said.contains("real host"), "{said}");
        }
    }

    #[test]
    fn times_to_finish_are_bounded_and_paths_absolute() {
        for finish_s in [0, LONGEST_FINISH_S + 1, u64::MAX] {
            let said = PaidSettings { finish_s, ..PaidSettings::default() }.validate().unwrap_err().to_string();
            assert!(said.contains("give 1 to"), "{said}");
        }
        let bad = PaidSettings { folder: "run".into(), ..PaidSettings::default() };
        assert!(bad.validate().unwrap_err().to_string().contains("absolute"));
    }
}
