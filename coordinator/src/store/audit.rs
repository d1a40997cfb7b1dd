//! The audit trail's words: who did what, when, from where, to which run or host.
//!
//! **Invariant:** a change and its row are one transaction; the store writes the rows of a run's notes by itself, so that
//! no caller can forget them. Evidence is its own trail: each record is stored with its host and when it came.

use std::borrow::Cow;

use drums_common::{
    clock::Micros,
    ids::{HostId, RunId},
};

use crate::core::run::Note;

/// A peer's words are quoted up to this length.
const DETAIL_CHARS: usize = 500;

/// Who causes a change, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    pub actor: String,
    /// An address, `unix socket`, or nothing for what the coordinator does by itself.
    pub peer: String,
}

impl Who {
    pub fn new(actor: impl Into<String>, peer: impl Into<String>) -> Self {
        Self { actor: actor.into(), peer: peer.into() }
    }

    pub fn coordinator() -> Self {
        Self::new("coordinator", "")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    pub at: Micros,
    pub who: Who,
    pub action: String,
    pub run: Option<RunId>,
    pub host: Option<HostId>,
    pub detail: String,
}

impl AuditRow {
    pub fn new(at: Micros, who: Who, action: &str) -> Self {
        Self { at, who, action: action.to_owned(), run: None, host: None, detail: String::new() }
    }

    pub fn run(self, run: RunId) -> Self {
        Self { run: Some(run), ..self }
    }

    pub fn host(self, host: &HostId) -> Self {
        Self { host: Some(host.clone()), ..self }
    }

    /// What more there is to say, cut to a bounded length.
    pub fn detail(self, detail: &str) -> Self {
        let detail = match detail.char_indices().nth(DETAIL_CHARS) {
            Some((cut, _)) => format!("{}...", &detail[..cut]),
            None => detail.to_owned(),
        };
        Self { detail, ..self }
    }

    /// The row of a note in a run's history.
    pub(super) fn of_note(at: Micros, run: RunId, note: &Note) -> Self {
        let Note { kind, host, text } = note;
        Self { host: host.clone(), ..Self::new(at, Who::coordinator(), kind).run(run).detail(text) }
    }
}

/// A row as it is stored; numbers grow in the order in which rows were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    pub number: u64,
    pub row: AuditRow,
}

/// Which rows. Without `after` and `since` the latest `limit` of those that fit, else the first `limit`; oldest first in
/// both cases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditQuery {
    pub after: Option<u64>,
    pub since: Option<Micros>,
    pub run: Option<RunId>,
    pub host: Option<HostId>,
    pub limit: u32,
}

impl AuditQuery {
    pub fn latest(limit: u32) -> Self {
        Self { limit, ..Self::default() }
    }

    /// True if the latest rows are wanted, and not the first after a point.
    pub(super) fn counts_from_the_end(&self) -> bool {
        self.after.is_none() && self.since.is_none()
    }
}

/// Text without zero characters, which PostgreSQL cannot hold. What peers say goes through here.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_cut_and_zeros_replaced() {
        let row = AuditRow::new(Micros(1), Who::coordinator(), "x").detail(&"é".repeat(600));
        assert_eq!(row.detail.chars().count(), DETAIL_CHARS + 3);
        assert_eq!(plain("a\0b"), "a\u{fffd}b");
    }
}
