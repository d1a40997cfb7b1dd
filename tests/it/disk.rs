//! Disks without space, and without names for files: a small file system of the test's own, in a mount namespace that
//! ends with the test's thread.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use drums_agent::spool::{RunMeta, RunSpool, Spool, SpoolError};
use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockEnded, BlockKind, BlockResult, Body, Closed, Environment, Log, Record, Teardown},
    ids::{Generation, RunId},
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

const MIB: u64 = 1 << 20;
const RUN: RunId = RunId([1; 6]);

/// A tmpfs that only this thread sees.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn new(options: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test mounts a file system for itself, which needs root");
        let dir = tempfile::tempdir().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        mount(Some("drums-test"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
        Self { dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("spool")
    }

    /// Takes every byte that is left.
    fn fill(&self) {
        let mut file = File::create(self.dir.path().join("others")).unwrap();
        let zeros = vec![0; 64 << 10];
        while file.write_all(&zeros).is_ok() {}
        while file.write_all(&[0]).is_ok() {}
    }

    /// Takes every name that is left.
    fn crowd(&self) {
        (0..).take_while(|n| File::create(self.dir.path().join(format!("other-{n}"))).is_ok()).for_each(drop);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = nix::mount::umount(self.dir.path());
    }
}

fn meta(run: RunId) -> RunMeta {
    RunMeta { run, registration: Sha256::of(b"r"), host: "h1".parse().unwrap() }
}

fn open(path: &Path, min_free_bytes: u64) -> Spool {
    let (spool, repairs, damaged) = Spool::open(path, min_free_bytes).unwrap();
    assert!(repairs.is_empty() && damaged.is_empty(), "{repairs:?} {damaged:?}");
    spool
}

fn log(bytes: usize) -> Body {
    Body::Log(Log { level: "info".into(), target: "t".into(), text: "x".repeat(bytes) })
}

fn ended() -> Body {
    let result = BlockResult::Interrupted("the disk is full".into());
    Body::BlockEnded(BlockEnded { block: 0, kind: BlockKind::Measured, result, environment: Environment::default() })
}

fn closed() -> Body {
    Body::Closed(Closed { teardown: Teardown::Clean, reason: "x".repeat(60_000) })
}

fn records(spool: &Arc<RunSpool>) -> Vec<Record> {
    let records = spool.records().unwrap();
    assert!(records.iter().zip(1..).all(|(r, seq)| r.seq == seq));
    records
}

#[test]
fn a_disk_that_others_filled_in_flight_still_takes_the_ends() {
    let small = Small::new("size=64m");
    let spool = open(&small.path(), MIB);
    let run = spool.create_run(meta(RUN)).unwrap();
    let mut writer = run.writer().unwrap();
    writer.room().unwrap();
    for _ in 0..40 {
        writer.append(Generation(1), Micros(0), log(60_000)).unwrap();
        writer.commit().unwrap();
    }
    small.fill();
    assert!(matches!(writer.room(), Err(SpoolError::DiskFull { .. })));
    // A whole batch that was measured already, then the ends.
    while !writer.commit_due() {
        writer.append(Generation(1), Micros(0), log(60_000)).unwrap();
    }
    let refused = writer.commit().unwrap_err();
    assert!(matches!(refused, SpoolError::DiskFull { free: 0, .. }), "{refused}");
    writer.append(Generation(1), Micros(0), ended()).unwrap();
    writer.commit().unwrap();
    writer.append(Generation(1), Micros(0), closed()).unwrap();
    let last = writer.commit().unwrap();
    drop((writer, run, spool));
    let spool = open(&small.path(), MIB);
    let run = spool.run(RUN).unwrap();
    assert!(run.closed());
    assert_eq!(records(&run).len() as u64, last);
}

#[test]
fn an_agent_that_comes_back_to_a_full_disk_ends_its_runs_in_the_space_taken_before() {
    let small = Small::new("size=64m");
    {
        let spool = open(&small.path(), MIB);
        let run = spool.create_run(meta(RUN)).unwrap();
        let mut writer = run.writer().unwrap();
        writer.append(Generation(1), Micros(0), log(10)).unwrap();
        writer.commit().unwrap();
    }
    small.fill();
    let spool = open(&small.path(), MIB);
    let run = spool.run(RUN).unwrap();
    let mut writer = run.writer().unwrap();
    writer.append(Generation(1), Micros(0), ended()).unwrap();
    writer.commit().unwrap();
    writer.append(Generation(1), Micros(0), closed()).unwrap();
    assert_eq!(writer.commit().unwrap(), 3);
}

#[test]
fn without_space_or_names_no_run_is_begun_and_nothing_half_made_is_left() {
    let other = RunId([2; 6]);
    let small = Small::new("size=64m,nr_inodes=300");
    let spool = open(&small.path(), MIB);
    let run = spool.create_run(meta(RUN)).unwrap();
    let mut writer = run.writer().unwrap();
    small.crowd();
    let refused = writer.room().unwrap_err();
    assert!(matches!(refused, SpoolError::NoNames { .. }), "{refused}");
    let refused = spool.create_run(meta(other)).unwrap_err();
    assert!(!refused.permanent() && drums_common::telemetry::chain(&refused).contains("No space left"), "{refused}");
    assert!(!small.path().join(other.to_string()).exists());
    // What is under way goes on, beyond the length at which a new file would be begun.
    let mut written = 0;
    while written < 10 * MIB {
        writer.append(Generation(1), Micros(0), log(60_000)).unwrap();
        if writer.commit_due() {
            writer.commit().unwrap();
        }
        written += 60_000;
    }
    writer.append(Generation(1), Micros(0), closed()).unwrap();
    let last = writer.commit().unwrap();
    assert_eq!(records(&run).len() as u64, last);
    drop((writer, run));
    fs::remove_file(small.dir.path().join("other-0")).unwrap();

    small.fill();
    let refused = spool.create_run(meta(other)).unwrap_err();
    assert!(!refused.permanent(), "{refused}");
    assert!(!small.path().join(other.to_string()).exists());
}

#[test]
fn the_ledger_of_a_full_disk_notes_what_is_undone() {
    use drums_agent::{ledger::Ledger, steps::Resource};
    let small = Small::new("size=32m,nr_inodes=100");
    let dir = small.dir.path().join("ledger");
    let mut ledger = Ledger::open(&dir).unwrap();
    let resources = [Resource::Dir { path: "/a".into() }, Resource::Dir { path: "/b".into() }];
    ledger.intend("one", &resources).unwrap();
    small.fill();
    small.crowd();
    ledger.leaked("one", 1, "busy").unwrap();
    ledger.intend("two", &resources).unwrap();
    ledger.released("two").unwrap();
    drop(ledger);
    // A fresh agent on the same full disk knows as much.
    let ledger = Ledger::open(&dir).unwrap();
    let plans: Vec<_> = ledger.open_plans().map(|p| p.name.as_str()).collect();
    assert_eq!(plans, ["one"]);
    assert_eq!(ledger.plan("one").unwrap().entries[1].leaked.as_deref(), Some("busy"));
}
