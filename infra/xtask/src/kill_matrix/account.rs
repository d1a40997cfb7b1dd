//! What only a real account can prove. These are listed and not counted; the runbook has each of them.

use std::fmt;

use serde::Serialize;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct InAccount {
    pub what: &'static str,
    /// Of `runbooks/prove-kill-layers.md`.
    pub runbook_row: &'static str,
    pub bound_s: Option<u64>,
}

pub const ROWS: [InAccount; 11] = [
    InAccount {
        what: "IAM lets hosts be launched with their profile and in no other way",
        runbook_row: "0",
        bound_s: None,
    },
    InAccount {
        what: "an instance of EC2 that powers off by the first line of its user data is terminated and charged no longer",
        runbook_row: "1",
        bound_s: Some(120),
    },
    InAccount {
        what: "the deadline's unit alone does the same on the image that is launched",
        runbook_row: "2",
        bound_s: Some(120),
    },
    InAccount {
        what: "EventBridge Scheduler fires within its minute, as its role, and the role may terminate",
        runbook_row: "3",
        bound_s: Some(120),
    },
    InAccount {
        what: "the deployed sweeper ends a host without tags and with both protections, by its profile",
        runbook_row: "4",
        bound_s: Some(300),
    },
    InAccount {
        what: "a schedule whose role is broken leaves a letter and an alarm's mail",
        runbook_row: "5",
        bound_s: None,
    },
    InAccount {
        what: "a host that is cut off from a coordinator that is dead is ended by its life lease",
        runbook_row: "6",
        bound_s: None,
    },
    InAccount {
        what: "a host whose agent and coordinator are dead is ended by its watchdog",
        runbook_row: "7",
        bound_s: None,
    },
    InAccount { what: "a host whose kernel hangs is ended by its schedule", runbook_row: "8", bound_s: Some(120) },
    InAccount {
        what: "with the coordinator's credentials revoked in a run, timer and schedule end the host",
        runbook_row: "9",
        bound_s: Some(120),
    },
    InAccount {
        what: "the coordinator alone ends a host that it launched, and writes its receipt",
        runbook_row: "10",
        bound_s: Some(120),
    },
];

impl fmt::Display for InAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "row {} of runbooks/prove-kill-layers.md: {}", self.runbook_row, self.what)
    }
}
