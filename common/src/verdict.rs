//! How a run, and an experiment, may end. Never collapsed into success and failure.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::ids::BadId;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every bar is met and every gate held.
    Pass,
    /// A bar is missed, or an arm breached function, hygiene or reset.
    Fail,
    /// The intervals do not decide.
    Undecided,
    /// A fidelity gate, or too many voided blocks: this is not what was registered.
    Invalid,
    /// The deadline or an interruption came before the last block.
    Incomplete,
    /// A host never came back.
    Lost,
    Cancelled,
}

impl Verdict {
    pub const ALL: [Self; 7] =
        [Self::Pass, Self::Fail, Self::Undecided, Self::Invalid, Self::Incomplete, Self::Lost, Self::Cancelled];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Undecided => "undecided",
            Self::Invalid => "invalid",
            Self::Incomplete => "incomplete",
            Self::Lost => "lost",
            Self::Cancelled => "cancelled",
        }
    }

    /// What a program that reports this verdict exits with. 2 (bad input) and 3 (unreachable) are no verdicts.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 10,
            Self::Undecided => 11,
            Self::Invalid => 12,
            Self::Incomplete => 13,
            Self::Lost => 14,
            Self::Cancelled => 15,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Verdict {
    type Err = BadId;
    fn from_str(s: &str) -> Result<Self, BadId> {
        Self::ALL.into_iter().find(|v| v.as_str() == s).ok_or_else(|| BadId {
            what: "a verdict",
            got: s.chars().take(80).collect(),
            expected: "pass, fail, undecided, invalid, incomplete, lost or cancelled",
        })
    }
}
