//! Arms: which isolation mechanism, in which mode.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::ids::BadId;

/// One isolation mechanism in one mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArmKind {
    DrumsCold,
    DrumsRestored,
    RuncCold,
    RuncRestored,
    QemuCold,
    QemuWarm,
    /// A program spoken to in JSON over its standard streams, under the same gates.
    External,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    Drums,
    Runc,
    Qemu,
    External,
}

impl ArmKind {
    pub const ALL: [Self; 7] = [
        Self::DrumsCold,
        Self::DrumsRestored,
        Self::RuncCold,
        Self::RuncRestored,
        Self::QemuCold,
        Self::QemuWarm,
        Self::External,
    ];

    /// Those that the agent makes itself, without a program of somebody else's.
    pub const BUILT_IN: [Self; 6] =
        [Self::DrumsCold, Self::DrumsRestored, Self::RuncCold, Self::RuncRestored, Self::QemuCold, Self::QemuWarm];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::DrumsCold => "drums-cold",
            Self::DrumsRestored => "drums-restored",
            Self::RuncCold => "runc-cold",
            Self::RuncRestored => "runc-restored",
            Self::QemuCold => "qemu-cold",
            Self::QemuWarm => "qemu-warm",
            Self::External => "external",
        }
    }

    pub fn mechanism(self) -> Mechanism {
        match self {
            Self::DrumsCold | Self::DrumsRestored => Mechanism::Drums,
            Self::RuncCold | Self::RuncRestored => Mechanism::Runc,
            Self::QemuCold | Self::QemuWarm => Mechanism::Qemu,
            Self::External => Mechanism::External,
        }
    }

    /// True for arms whose sessions come from a saved template.
    pub fn from_template(self) -> bool {
        matches!(self, Self::DrumsRestored | Self::RuncRestored | Self::QemuWarm)
    }
}

impl fmt::Display for ArmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ArmKind {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        Self::ALL.into_iter().find(|k| k.as_str() == s).ok_or_else(|| BadId {
            what: "an arm kind",
            got: s.chars().take(80).collect(),
            expected: "drums-cold, drums-restored, runc-cold, runc-restored, qemu-cold, qemu-warm or external",
        })
    }
}
