//! A row of the matrix as it is printed and written.

use std::fmt;

use serde::{Serialize, Serializer};

use super::cell::{Layer, Strike};

/// How a row came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// On a simulated clock.
    Simulated,
    /// On a guest that booted.
    #[expect(dead_code, reason = "rows of `guest::rows`, which has none yet")]
    Guest,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What struck, or what the host was put through.
    pub faults: Vec<String>,
    /// What must kill: the one layer that is left. `None`: whichever of those that are able is first.
    pub must_kill: Option<Layer>,
    /// Layers that these faults leave able to kill, in that run.
    pub able: Vec<Layer>,
    /// `None`: nothing did.
    pub killed_by: Option<Layer>,
    /// Negative: before it. Of the run that came closest to its bound, or past it.
    pub killed_after_deadline_s: Option<i64>,
    pub bound_s: u64,
    pub in_bound: bool,
    pub how: How,
    /// Layers that were switched off.
    pub disabled: Vec<Layer>,
    /// When each fault struck in that run.
    #[serde(serialize_with = "moments")]
    pub struck: Vec<Strike>,
    /// Runs of which that one is the worst.
    pub runs: usize,
    /// What is wrong with it; empty where it is in bound.
    pub wrong: String,
}

fn moments<S: Serializer>(strikes: &[Strike], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(strikes.iter().map(|(_, m)| m.to_string()))
}

impl Row {
    /// For messages.
    pub fn name(&self) -> String {
        let left = self.must_kill.map_or_else(|| "all layers".to_owned(), |l| format!("{l} alone"));
        format!("{}, {left}: {}", self.faults.join(" + "), self.wrong)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.must_kill.map_or_else(|| "all layers".to_owned(), |l| format!("{l} alone"));
        write!(f, "{:<46}  {left:<17}  ", self.faults.join(" + "))?;
        match (self.killed_by, self.killed_after_deadline_s) {
            (Some(by), Some(after_s)) => write!(f, "{by:<11}  {after_s:>6} s of {:>3}", self.bound_s)?,
            _ => write!(f, "{:<11}  {:>6} s of {:>3}", "nothing", "never", self.bound_s)?,
        }
        let moments: Vec<String> = self.struck.iter().map(|(_, m)| m.to_string()).collect();
        write!(f, "  {}", moments.join(", "))?;
        if self.in_bound { Ok(()) } else { write!(f, "  NOT IN BOUND: {}", self.wrong) }
    }
}
