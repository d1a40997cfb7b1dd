//! What is ours: every resource is on disk before it exists and stays there until it was seen gone. After a crash the
//! ledger's rows are enough to undo everything.
//!
//! ```text
//! intend(plan, resources)  fsync, before the first system call
//!   held(plan, i, receipt)   what making it taught us (pid and start time); survives a killed agent, and after a
//!                            crash of the machine there is nothing left that it could name
//!   released(plan)           everything was seen gone
//!   leaked(plan, ...)        what could not be undone: stays, is reported, is tried again by the next audit
//!   disowned(plan, i)        the name is a stranger's: stays for ever, so that no audit takes it for ours by its name
//! ```
//!
//! Knows what a resource is called, not how it is undone (`steps::undo`), and never touches one. The file is
//! `journal`'s business.

pub mod audit;
mod journal;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use drums_common::ids::{Generation, SessionRef};
use serde::{Deserialize, Serialize};

use crate::steps::{Receipt, Resource};
use journal::Journal;

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("cannot {what} the ledger {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the ledger {} is damaged at byte {at}: {why}; keep a copy, move it away and look for leftovers by hand", path.display())]
    Damaged { path: PathBuf, at: u64, why: String },
    #[error("the ledger {} is in use by another agent; stop that one first", path.display())]
    Busy { path: PathBuf },
    #[error("the ledger has an open plan {0} already; session names are used once")]
    Twice(String),
}

impl LedgerError {
    fn disk_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(source.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)))
    }
}

/// Rows of the journal. Existing variants never change shape: an upgraded agent reads what the old one left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Row {
    /// Session numbers below this one may have been handed out.
    Numbers {
        below: u32,
    },
    Intent {
        plan: String,
        boot: String,
        resources: Vec<Resource>,
    },
    Held {
        plan: String,
        index: usize,
        receipt: Receipt,
    },
    Released {
        plan: String,
    },
    Leaked {
        plan: String,
        index: usize,
        why: String,
    },
    /// What carries the name is a stranger's.
    Disowned {
        plan: String,
        index: usize,
    },
}

/// A plan whose resources may exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenPlan {
    pub name: String,
    /// Boot id under which it was intended: receipts of another boot name nothing.
    pub boot: String,
    pub entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub resource: Resource,
    pub receipt: Option<Receipt>,
    /// Why it could not be undone when that was last tried.
    pub leaked: Option<String>,
    /// What carries the name is a stranger's: never touched, and no orphan either.
    pub disowned: bool,
}

/// The one owner of the ledger's folder.
#[derive(Debug)]
pub struct Ledger {
    journal: Journal,
    boot: String,
    open: BTreeMap<String, OpenPlan>,
    next: u32,
    below: u32,
    /// Holds the lock while it lives.
    _lock: File,
}

/// Numbers are reserved in batches, so that drawing one costs no fsync.
const BATCH: u32 = 256;
/// Beyond this the journal is rewritten with open plans only.
const COMPACT_AT: u64 = 4 << 20;

impl Ledger {
    /// Opens the ledger in `dir`, made if missing. Refuses when another agent has it.
    pub fn open(dir: &Path) -> Result<Self, LedgerError> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|source| LedgerError::Io {
            what: "learn the boot id for",
            path: dir.to_owned(),
            source,
        })?;
        Self::open_in_boot(dir, boot.trim())
    }

    fn open_in_boot(dir: &Path, boot: &str) -> Result<Self, LedgerError> {
        let fail = |what| move |source| LedgerError::Io { what, path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(fail("make"))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))
            .map_err(fail("open the lock of"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(LedgerError::Busy { path: dir.to_owned() }),
            Err(fs::TryLockError::Error(source)) => return Err(fail("lock")(source)),
        }
        let (journal, rows) = Journal::open(&dir.join("journal"))?;
        let mut ledger = Self { journal, boot: boot.to_owned(), open: BTreeMap::new(), next: 1, below: 1, _lock: lock };
        for row in rows {
            ledger.replay(row);
        }
        // Numbers of a batch that were not drawn before the last end are not drawn any more.
        ledger.next = ledger.below;
        ledger.compact()?;
        Ok(ledger)
    }

    fn replay(&mut self, row: Row) {
        match row {
            Row::Numbers { below } => self.below = self.below.max(below),
            Row::Intent { plan, boot, resources } => {
                let entries = resources
                    .into_iter()
                    .map(|resource| Entry { resource, receipt: None, leaked: None, disowned: false })
                    .collect();
                self.open.insert(plan.clone(), OpenPlan { name: plan, boot, entries });
            }
            Row::Held { plan, index, receipt } => {
                if let Some(entry) = self.entry(&plan, index) {
                    entry.receipt = Some(receipt);
                }
            }
            Row::Released { plan } => {
                if let Some(mut released) = self.open.remove(&plan) {
                    released.entries.retain(|e| e.disowned);
                    if !released.entries.is_empty() {
                        self.open.insert(plan, released);
                    }
                }
            }
            Row::Disowned { plan, index } => {
                if let Some(entry) = self.entry(&plan, index) {
                    entry.disowned = true;
                }
            }
            Row::Leaked { plan, index, why } => {
                if let Some(entry) = self.entry(&plan, index) {
                    entry.leaked = Some(why);
                }
            }
        }
    }

    fn entry(&mut self, plan: &str, index: usize) -> Option<&mut Entry> {
        self.open.get_mut(plan)?.entries.get_mut(index)
    }

    /// A session number that was never handed out, also not before a crash.
    pub fn next_session(&mut self, generation: Generation) -> Result<SessionRef, LedgerError> {
        if self.next >= self.below {
            let below = self.next.saturating_add(BATCH);
            self.journal.append(&Row::Numbers { below }, true)?;
            self.below = below;
        }
        let number = self.next;
        self.next += 1;
        Ok(SessionRef { number, generation })
    }

    /// Writes down what is about to be made; on disk when this returns.
    pub fn intend(&mut self, plan: &str, resources: &[Resource]) -> Result<(), LedgerError> {
        if self.open.contains_key(plan) {
            return Err(LedgerError::Twice(plan.to_owned()));
        }
        if self.journal.bytes() > COMPACT_AT {
            self.compact()?;
        }
        let row = Row::Intent { plan: plan.to_owned(), boot: self.boot.clone(), resources: resources.to_vec() };
        self.journal.append(&row, true)?;
        self.replay(row);
        Ok(())
    }

    /// Notes what making a resource taught. Not synced: see the module's text.
    pub fn held(&mut self, plan: &str, index: usize, receipt: &Receipt) -> Result<(), LedgerError> {
        let row = Row::Held { plan: plan.to_owned(), index, receipt: receipt.clone() };
        self.journal.append(&row, false)?;
        self.replay(row);
        Ok(())
    }

    /// Everything of the plan was seen gone.
    pub fn released(&mut self, plan: &str) -> Result<(), LedgerError> {
        let row = Row::Released { plan: plan.to_owned() };
        self.journal.append(&row, false)?;
        self.replay(row);
        Ok(())
    }

    /// Resource `index` of the plan could not be undone.
    pub fn leaked(&mut self, plan: &str, index: usize, why: &str) -> Result<(), LedgerError> {
        let row = Row::Leaked { plan: plan.to_owned(), index, why: why.to_owned() };
        self.journal.append(&row, true)?;
        self.replay(row);
        Ok(())
    }

    /// What carries the name of resource `index` is a stranger's.
    pub fn disowned(&mut self, plan: &str, index: usize) -> Result<(), LedgerError> {
        let row = Row::Disowned { plan: plan.to_owned(), index };
        self.journal.append(&row, false)?;
        self.replay(row);
        Ok(())
    }

    pub fn open_plans(&self) -> impl Iterator<Item = &OpenPlan> {
        self.open.values()
    }

    pub fn plan(&self, name: &str) -> Option<&OpenPlan> {
        self.open.get(name)
    }

    /// Receipts of another boot name nothing that exists.
    pub fn this_boot(&self, plan: &OpenPlan) -> bool {
        plan.boot == self.boot
    }

    fn compact(&mut self) -> Result<(), LedgerError> {
        let mut rows = vec![Row::Numbers { below: self.below }];
        for plan in self.open.values() {
            rows.push(Row::Intent {
                plan: plan.name.clone(),
                boot: plan.boot.clone(),
                resources: plan.entries.iter().map(|e| e.resource.clone()).collect(),
            });
            for (index, entry) in plan.entries.iter().enumerate() {
                if let Some(receipt) = &entry.receipt {
                    rows.push(Row::Held { plan: plan.name.clone(), index, receipt: receipt.clone() });
                }
                if let Some(why) = &entry.leaked {
                    rows.push(Row::Leaked { plan: plan.name.clone(), index, why: why.clone() });
                }
                if entry.disowned {
                    rows.push(Row::Disowned { plan: plan.name.clone(), index });
                }
            }
        }
        match self.journal.rewrite(&rows) {
            // The old file says the same at greater length. An agent that did not start would sweep nothing.
            Err(e) if e.disk_full() => {
                tracing::warn!(error = drums_common::telemetry::chain(&e), "the ledger stays as long as it is");
                Ok(())
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(path: &str) -> Resource {
        Resource::Dir { path: path.into() }
    }

    fn open(dir: &Path) -> Ledger {
        Ledger::open_in_boot(dir, "boot-a").unwrap()
    }

    #[test]
    fn rows_survive_and_released_plans_do_not() {
        let base = tempfile::tempdir().unwrap();
        let process = Receipt::Process(crate::steps::Process { pid: 7, start: 9 });
        {
            let mut l = open(base.path());
            l.intend("one", &[dir("/a"), Resource::Process { role: "session".into() }]).unwrap();
            l.held("one", 1, &process).unwrap();
            l.intend("two", &[dir("/b")]).unwrap();
            l.released("two").unwrap();
            l.leaked("one", 0, "busy").unwrap();
            assert!(matches!(l.intend("one", &[]), Err(LedgerError::Twice(_))));
        }
        let l = Ledger::open_in_boot(base.path(), "boot-b").unwrap();
        let plans: Vec<_> = l.open_plans().collect();
        assert_eq!(plans.len(), 1);
        assert_eq!(plans[0].entries[1].receipt, Some(process));
        assert_eq!(plans[0].entries[0].leaked.as_deref(), Some("busy"));
        assert!(!l.this_boot(plans[0]));
    }

    #[test]
    fn session_numbers_are_never_handed_out_twice() {
        let base = tempfile::tempdir().unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..4 {
            // Dropping it without a word is what a crash looks like to the next one.
            let mut l = open(base.path());
            for _ in 0..300 {
                assert!(seen.insert(l.next_session(Generation(1)).unwrap().number));
            }
        }
    }

    #[test]
    fn two_agents_never_share_a_ledger() {
        let base = tempfile::tempdir().unwrap();
        let _held = open(base.path());
        assert!(matches!(Ledger::open_in_boot(base.path(), "boot-a"), Err(LedgerError::Busy { .. })));
    }

    #[test]
    fn a_torn_tail_is_cut_off_wherever_it_was_torn() {
        let base = tempfile::tempdir().unwrap();
        {
            let mut l = open(base.path());
            l.intend("one", &[dir("/a")]).unwrap();
        }
        let path = base.path().join("journal");
        let whole = fs::read(&path).unwrap();
        {
            let mut l = open(base.path());
            l.intend("two", &[dir("/b")]).unwrap();
        }
        let longer = fs::read(&path).unwrap();
        for cut in (whole.len()..longer.len()).step_by(7) {
            fs::write(&path, &longer[..cut]).unwrap();
            let mut l = open(base.path());
            assert_eq!(l.open_plans().count(), 1, "cut at {cut}");
            l.intend("three", &[dir("/c")]).unwrap();
            drop(l);
            assert_eq!(open(base.path()).open_plans().count(), 2, "cut at {cut}");
        }
    }

    #[test]
    fn a_full_disk_leaves_the_journal_as_it_was() {
        let base = tempfile::tempdir().unwrap();
        {
            let mut l = open(base.path());
            l.intend("one", &[dir("/a")]).unwrap();
            l.intend("two", &[dir("/b")]).unwrap();
            l.released("two").unwrap();
        }
        let before = fs::read(base.path().join("journal")).unwrap();
        // Whatever is written through it finds no space.
        std::os::unix::fs::symlink("/dev/full", base.path().join("journal.new")).unwrap();
        let mut l = open(base.path());
        assert_eq!(l.open_plans().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["one"]);
        assert_eq!(fs::read(base.path().join("journal")).unwrap(), before);
        l.intend("three", &[dir("/c")]).unwrap();
        drop(l);
        assert_eq!(open(base.path()).open_plans().count(), 2, "and it is shortened when there is space");
    }

    #[test]
    fn a_strangers_name_stays_known_after_the_release() {
        let base = tempfile::tempdir().unwrap();
        {
            let mut l = open(base.path());
            l.intend("one", &[dir("/a"), dir("/b"), dir("/c")]).unwrap();
            l.disowned("one", 1).unwrap();
            l.released("one").unwrap();
        }
        for _ in 0..2 {
            let l = open(base.path());
            let entries = &l.plan("one").unwrap().entries;
            assert_eq!((entries.len(), &entries[0].resource, entries[0].disowned), (1, &dir("/b"), true));
        }
    }

    #[test]
    fn damage_before_the_end_is_refused_not_skipped() {
        let base = tempfile::tempdir().unwrap();
        {
            let mut l = open(base.path());
            l.intend("one", &[dir("/a")]).unwrap();
            l.intend("two", &[dir("/b")]).unwrap();
        }
        let path = base.path().join("journal");
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert!(matches!(Ledger::open_in_boot(base.path(), "boot-a"), Err(LedgerError::Damaged { .. })));
    }
}
