use std::fs;

use drums_common::{
    clock::Micros,
    evidence::{BlockEnded, BlockKind, BlockResult, Closed, Environment, Log, Teardown},
    ids::Generation,
};
use proptest::prelude::*;

use super::*;
use drums_common::evidence::{Body, Record};

fn meta() -> RunMeta {
    RunMeta { run: RunId([1; 6]), registration: Sha256::of(b"r"), host: "h1".parse().unwrap() }
}

fn log(text: &str) -> Body {
    Body::Log(Log { level: "info".into(), target: "t".into(), text: text.into() })
}

fn closed() -> Body {
    Body::Closed(Closed { teardown: Teardown::Clean, reason: String::new() })
}

fn open(dir: &Path) -> (Spool, Vec<Repair>) {
    let (spool, repairs, damaged) = Spool::open(dir, 0).unwrap();
    assert!(damaged.is_empty(), "{damaged:?}");
    (spool, repairs)
}

fn append(writer: &mut SpoolWriter, text: &str) -> u64 {
    writer.append(Generation(1), Micros(5), log(text)).unwrap()
}

fn texts(records: &[Record]) -> Vec<String> {
    records
        .iter()
        .map(|r| match &r.body {
            Body::Log(l) => l.text.clone(),
            other => format!("{other:?}"),
        })
        .collect()
}

fn segment_path(dir: &Path) -> PathBuf {
    dir.join(meta().run.to_string()).join(format!("segment-{:020}", 1))
}

#[test]
fn records_are_numbered_and_seen_only_after_their_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    assert_eq!((append(&mut writer, "a"), append(&mut writer, "b")), (1, 2));
    assert_eq!(run.last_seq(), 0);
    assert!(run.records().unwrap().is_empty());
    assert_eq!(writer.commit().unwrap(), 2);
    assert_eq!(append(&mut writer, "c"), 3);
    writer.commit().unwrap();
    assert_eq!(texts(&run.records().unwrap()), ["a", "b", "c"]);
    assert_eq!(texts(&run.read_after(1, usize::MAX).unwrap()), ["b", "c"]);
    assert_eq!(texts(&run.read_after(0, 1).unwrap()), ["a"], "at least one record, whatever the limit");
    assert!(run.read_after(3, usize::MAX).unwrap().is_empty());
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    let writer = run.writer().unwrap();
    assert!(matches!(run.writer(), Err(SpoolError::InUse { .. })));
    // Another process would have its own Spool over the same folder.
    let (other, _) = open(dir.path());
    assert!(matches!(other.run(meta().run).unwrap().writer(), Err(SpoolError::InUse { .. })));
    drop(writer);
    assert!(run.writer().is_ok());
}

#[test]
fn a_closed_run_takes_no_more_and_is_pruned_once_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    {
        let run = spool.create_run(meta()).unwrap();
        let mut writer = run.writer().unwrap();
        writer.append(Generation(1), Micros(0), closed()).unwrap();
        assert!(matches!(writer.append(Generation(1), Micros(0), log("x")), Err(SpoolError::Closed { .. })));
        writer.commit().unwrap();
        drop(writer);
        assert!(run.closed());
        assert!(matches!(run.writer(), Err(SpoolError::Closed { last_seq: 1, .. })));
    }
    assert_eq!(spool.prune(0, |_| false).unwrap(), [], "not acknowledged");
    drop(spool);
    let (spool, _) = open(dir.path());
    assert!(spool.states()[0].closed);
    spool.run(meta().run).unwrap().set_acked(1).unwrap();
    assert_eq!(spool.prune(1, |_| false).unwrap(), []);
    assert_eq!(spool.prune(0, |_| true).unwrap(), [], "it is asked for");
    assert_eq!(spool.prune(0, |_| false).unwrap(), [meta().run]);
    assert!(spool.runs().is_empty() && open(dir.path()).0.runs().is_empty());
}

/// Whoever is killed while it removes a run's files has removed some of them: what is left must not pass for a run that is
/// open, or for one that lost evidence.
#[test]
fn a_removal_that_broke_off_leaves_no_half_of_a_run() {
    for killed_after in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let (spool, _) = open(dir.path());
        let run = spool.create_run(meta()).unwrap();
        let mut writer = run.writer().unwrap();
        append(&mut writer, "a");
        writer.commit().unwrap();
        run.seal().unwrap();
        writer.append(Generation(1), Micros(0), closed()).unwrap();
        writer.commit().unwrap();
        run.set_acked(2).unwrap();
        let aside = spool.set_aside(meta().run).unwrap();
        // The marks of its end first.
        let mut files: Vec<PathBuf> = fs::read_dir(&aside).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort_by_key(|p| (!p.ends_with("acked"), std::cmp::Reverse(p.clone())));
        for file in files.iter().take(killed_after) {
            fs::remove_file(file).unwrap();
        }
        let (again, _) = open(dir.path());
        assert!(again.runs().is_empty(), "{killed_after}: {:?}", again.states());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{killed_after}: it is removed to the end");
    }
}

#[test]
fn acknowledgements_are_cumulative_and_survive() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    append(&mut writer, "a");
    append(&mut writer, "b");
    writer.commit().unwrap();
    run.set_acked(2).unwrap();
    run.set_acked(1).unwrap();
    assert_eq!(run.acked(), 2);
    assert!(matches!(run.set_acked(3), Err(SpoolError::AckBeyondEnd { last_seq: 2, .. })));
    drop((writer, run, spool));
    assert_eq!(open(dir.path()).0.run(meta().run).unwrap().acked(), 2);
}

#[test]
fn another_registration_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    spool.create_run(meta()).unwrap();
    let other = RunMeta { registration: Sha256::of(b"other"), ..meta() };
    assert!(matches!(spool.create_run(other), Err(SpoolError::OtherRegistration { .. })));
}

#[test]
fn on_a_full_disk_nothing_is_begun_and_what_was_begun_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (full, _, _) = Spool::open(dir.path(), u64::MAX).unwrap();
    let run = full.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    assert!(matches!(writer.room(), Err(SpoolError::DiskFull { .. })));
    append(&mut writer, "a");
    assert!(matches!(writer.commit(), Err(SpoolError::DiskFull { .. })));
    assert_eq!(run.last_seq(), 0);
    let ended = BlockEnded {
        block: 0,
        kind: BlockKind::Measured,
        result: BlockResult::Completed,
        environment: Environment::default(),
    };
    writer.append(Generation(1), Micros(0), Body::BlockEnded(ended)).unwrap();
    assert_eq!(writer.commit().unwrap(), 2);
    append(&mut writer, "b");
    assert!(matches!(writer.commit(), Err(SpoolError::DiskFull { .. })), "the reserve is for ends only");
    writer.append(Generation(1), Micros(0), closed()).unwrap();
    assert_eq!(writer.commit().unwrap(), 4);
    assert!(run.closed());
}

#[test]
fn a_damaged_run_is_not_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = two_batches(dir.path());
    let mut bytes = fs::read(segment_path(dir.path())).unwrap();
    bytes[first as usize - 1] ^= 1;
    fs::write(segment_path(dir.path()), &bytes).unwrap();
    let (spool, _, damaged) = Spool::open(dir.path(), 0).unwrap();
    assert_eq!(damaged.len(), 1);
    let e = spool.create_run(meta()).unwrap_err();
    assert!(matches!(e, SpoolError::Damaged { .. }) && e.permanent(), "{e}");
    assert_eq!(fs::read(segment_path(dir.path())).unwrap(), bytes);
}

#[test]
fn a_folder_that_holds_evidence_is_not_taken_for_a_new_run() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    // It came after this spool was opened: somebody put a state folder back under a living agent.
    two_batches(dir.path());
    let before = fs::read(segment_path(dir.path())).unwrap();
    let e = spool.create_run(meta()).unwrap_err();
    assert!(matches!(e, SpoolError::Exists { .. }) && e.permanent(), "{e}");
    assert_eq!(fs::read(segment_path(dir.path())).unwrap(), before);
}

#[test]
fn records_that_were_acknowledged_and_are_gone_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    two_batches(dir.path());
    open(dir.path()).0.run(meta().run).unwrap().set_acked(3).unwrap();
    fs::remove_file(segment_path(dir.path())).unwrap();
    let (spool, _, damaged) = Spool::open(dir.path(), 0).unwrap();
    assert!(damaged[0].to_string().contains("3 was acknowledged and the records end at 0"), "{}", damaged[0]);
    assert!(matches!(spool.create_run(meta()), Err(SpoolError::Damaged { .. })));
}

#[test]
fn a_new_writer_cuts_what_a_failed_write_left() {
    let dir = tempfile::tempdir().unwrap();
    let (_, all) = two_batches(dir.path());
    let (spool, _) = open(dir.path());
    let run = spool.run(meta().run).unwrap();
    // As a write that the disk cut short, by a writer that was given up after it.
    let mut bytes = fs::read(segment_path(dir.path())).unwrap();
    bytes.extend_from_slice(b"DSB1 half a batch");
    fs::write(segment_path(dir.path()), &bytes).unwrap();
    let mut writer = run.writer().unwrap();
    assert_eq!(append(&mut writer, "d"), 4);
    writer.commit().unwrap();
    assert_eq!(texts(&run.records().unwrap()), ["a", "b", "c", "d"]);
    drop((writer, run, spool));
    let (spool, repairs) = open(dir.path());
    assert!(repairs.is_empty());
    assert_eq!(texts(&spool.run(meta().run).unwrap().records().unwrap()), ["a", "b", "c", "d"]);
    assert!(fs::metadata(segment_path(dir.path())).unwrap().len() > all);
}

#[test]
fn too_long_a_record_is_refused_and_takes_no_number() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    let e = writer.append(Generation(1), Micros(0), log(&"x".repeat(600_000))).unwrap_err();
    assert!(matches!(e, SpoolError::RecordTooLong { .. }), "{e}");
    assert_eq!(append(&mut writer, "a"), 1);
    writer.commit().unwrap();
    assert_eq!(run.records().unwrap().len(), 1);
}

#[test]
fn large_batches_go_out_in_pieces_and_segments_roll() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    let text = "x".repeat(60_000);
    let mut n = 0;
    for _ in 0..12 {
        while !writer.commit_due() {
            n = append(&mut writer, &text);
        }
        writer.commit().unwrap();
    }
    let segments = fs::read_dir(dir.path().join(meta().run.to_string()))
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_str().unwrap().starts_with("segment-"))
        .count();
    assert!(segments > 1);
    let mut after = 0;
    while after < n {
        let records = run.read_after(after, 256 << 10).unwrap();
        assert!((1..=4).contains(&records.len()), "{}", records.len());
        assert_eq!(records[0].seq, after + 1);
        after = records.last().unwrap().seq;
    }
    drop(writer);
    drop((run, spool));
    assert_eq!(open(dir.path()).0.run(meta().run).unwrap().records().unwrap().len() as u64, n);
}

/// A run of two batches, "a b" and "c".
fn two_batches(dir: &Path) -> (u64, u64) {
    let (spool, _) = open(dir);
    let run = spool.create_run(meta()).unwrap();
    let mut writer = run.writer().unwrap();
    append(&mut writer, "a");
    append(&mut writer, "b");
    writer.commit().unwrap();
    let first = fs::metadata(segment_path(dir)).unwrap().len();
    append(&mut writer, "c");
    writer.commit().unwrap();
    (first, fs::metadata(segment_path(dir)).unwrap().len())
}

fn batch_sizes() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1usize..5, 1..6)
}

/// A segment of so many batches: where each ends, and how many records there are until then.
fn batches(dir: &Path, sizes: &[usize]) -> Vec<(u64, u64)> {
    let (spool, _) = open(dir);
    let mut writer = spool.create_run(meta()).unwrap().writer().unwrap();
    let mut ends = Vec::new();
    for size in sizes {
        for n in 0..*size {
            append(&mut writer, &"x".repeat(n * 7));
        }
        let last_seq = writer.commit().unwrap();
        ends.push((fs::metadata(segment_path(dir)).unwrap().len(), last_seq));
    }
    ends
}

#[test]
fn a_sealed_segment_never_changes_and_the_next_records_go_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, _) = open(dir.path());
    let run = spool.create_run(meta()).unwrap();
    run.seal().unwrap();
    assert_eq!(run.sealed(), [], "there is nothing in it");
    let mut writer = run.writer().unwrap();
    append(&mut writer, "a");
    writer.commit().unwrap();
    assert_eq!(run.sealed(), [], "it is being written");
    // As a write that the disk cut short: sealed with it, the segment would be taken for damaged.
    let mut file = fs::File::options().append(true).open(segment_path(dir.path())).unwrap();
    std::io::Write::write_all(&mut file, b"DSB1 half").unwrap();
    for _ in 0..2 {
        run.seal().unwrap();
    }
    let sealed = run.sealed();
    let bytes = fs::read(segment_path(dir.path())).unwrap();
    let one = Sealed {
        index: 0,
        path: segment_path(dir.path()),
        bytes: bytes.len() as u64,
        first_seq: 1,
        last_seq: 1,
        closed: false,
    };
    assert_eq!(sealed, [one]);
    append(&mut writer, "b");
    writer.commit().unwrap();
    writer.append(Generation(1), Micros(0), closed()).unwrap();
    writer.commit().unwrap();
    assert_eq!(fs::read(segment_path(dir.path())).unwrap(), bytes);
    let ends = |run: &RunSpool| run.sealed().iter().map(|s| (s.index, s.last_seq, s.closed)).collect::<Vec<_>>();
    assert_eq!(ends(&run), [(0, 1, false), (1, 3, true)], "closed, the last is sealed too");
    run.seal().unwrap();
    assert_eq!(ends(&run).len(), 2);
    drop((writer, run, spool));
    let (spool, repairs) = open(dir.path());
    assert!(repairs.is_empty());
    assert_eq!(ends(&spool.run(meta().run).unwrap()), [(0, 1, false), (1, 3, true)]);
}

#[test]
fn a_tail_torn_at_any_byte_is_reported_cut_and_written_on() {
    let dir = tempfile::tempdir().unwrap();
    let (first, all) = two_batches(dir.path());
    let whole = fs::read(segment_path(dir.path())).unwrap();
    for cut in first..all {
        fs::write(segment_path(dir.path()), &whole[..cut as usize]).unwrap();
        let (spool, repairs) = open(dir.path());
        let run = spool.run(meta().run).unwrap();
        if cut == first {
            assert!(repairs.is_empty());
        } else {
            assert_eq!(repairs, [Repair { run: meta().run, torn_bytes: cut - first, last_seq: 2 }]);
        }
        assert_eq!(texts(&run.records().unwrap()), ["a", "b"], "cut at {cut}");
        let mut writer = run.writer().unwrap();
        assert_eq!(append(&mut writer, "d"), 3);
        writer.commit().unwrap();
        drop(writer);
        drop((run, spool));
        let (spool, repairs) = open(dir.path());
        assert!(repairs.is_empty());
        assert_eq!(texts(&spool.run(meta().run).unwrap().records().unwrap()), ["a", "b", "d"]);
    }
}

#[test]
fn damage_before_the_tail_is_an_error_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = two_batches(dir.path());
    let whole = fs::read(segment_path(dir.path())).unwrap();
    for at in [0, 5, 19, first - 1] {
        let mut bytes = whole.clone();
        bytes[at as usize] ^= 1;
        fs::write(segment_path(dir.path()), &bytes).unwrap();
        let (spool, repairs, damaged) = Spool::open(dir.path(), 0).unwrap();
        assert!(repairs.is_empty() && spool.runs().is_empty());
        assert!(matches!(damaged[..], [SpoolError::Corrupt { at: 0, .. }]), "{damaged:?}");
        assert_eq!(fs::read(segment_path(dir.path())).unwrap(), bytes);
    }
}

#[test]
fn a_missing_segment_and_foreign_meta_data_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    two_batches(dir.path());
    let path = segment_path(dir.path());
    fs::rename(&path, path.with_file_name(format!("segment-{:020}", 4))).unwrap();
    let bytes = fs::read(path.with_file_name(format!("segment-{:020}", 4))).unwrap();
    // Only the second batch is left: record 3 with nothing before it.
    let (_, _, damaged) = Spool::open(dir.path(), 0).unwrap();
    assert!(damaged.is_empty(), "the name of a segment means nothing");
    fs::write(path.with_file_name(format!("segment-{:020}", 9)), &bytes).unwrap();
    let (_, _, damaged) = Spool::open(dir.path(), 0).unwrap();
    assert!(damaged[0].to_string().contains("record 1 follows 3"), "{}", damaged[0]);
    fs::write(dir.path().join(meta().run.to_string()).join("meta.json"), b"{").unwrap();
    let (_, _, damaged) = Spool::open(dir.path(), 0).unwrap();
    assert!(matches!(damaged[..], [SpoolError::Corrupt { .. }]));
}

#[test]
fn a_run_without_meta_data_was_never_made_and_strangers_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(RunId([3; 6]).to_string())).unwrap();
    fs::create_dir(dir.path().join("lost+found")).unwrap();
    assert!(open(dir.path()).0.runs().is_empty());
    assert!(!dir.path().join(RunId([3; 6]).to_string()).exists());
    assert!(dir.path().join("lost+found").exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any mix of appends, commits and reopenings: what was committed is there, once, in order, and no more.
    #[test]
    fn what_was_committed_is_there_once(steps in proptest::collection::vec(0u8..4, 1..40)) {
        let dir = tempfile::tempdir().unwrap();
        let (mut committed, mut pending, mut n) = (Vec::new(), Vec::new(), 0u32);
        let mut spool = open(dir.path()).0;
        spool.create_run(meta()).unwrap();
        let mut writer = Some(spool.run(meta().run).unwrap().writer().unwrap());
        for step in steps {
            match step {
                0 | 1 => {
                    n += 1;
                    append(writer.as_mut().unwrap(), &n.to_string());
                    pending.push(n.to_string());
                }
                2 => {
                    writer.as_mut().unwrap().commit().unwrap();
                    committed.append(&mut pending);
                }
                _ => {
                    drop(writer.take());
                    pending.clear();
                    spool = open(dir.path()).0;
                    writer = Some(spool.run(meta().run).unwrap().writer().unwrap());
                }
            }
            let records = spool.run(meta().run).unwrap().records().unwrap();
            prop_assert_eq!(&texts(&records), &committed);
            prop_assert!(records.iter().zip(1..).all(|(r, seq)| r.seq == seq));
        }
    }

    /// Whatever is cut off a segment, what is left is the whole batches before it; that something is gone is said unless
    /// the cut is between two.
    #[test]
    fn a_segment_cut_anywhere_keeps_its_whole_batches(sizes in batch_sizes(), at in 0.0..1.0f64) {
        let dir = tempfile::tempdir().unwrap();
        let ends = batches(dir.path(), &sizes);
        let whole = fs::read(segment_path(dir.path())).unwrap();
        let cut = (at * whole.len() as f64) as u64;
        fs::write(segment_path(dir.path()), &whole[..cut as usize]).unwrap();
        let (spool, repairs) = open(dir.path());
        let (end, kept) = ends.iter().rev().find(|(end, _)| *end <= cut).copied().unwrap_or((0, 0));
        prop_assert_eq!(spool.run(meta().run).unwrap().records().unwrap().len() as u64, kept);
        prop_assert_eq!(repairs.iter().map(|r| r.torn_bytes).sum::<u64>(), cut - end);
    }

    /// One flipped bit is never read as evidence: its batch and what follows are cut and reported, or the run is damaged.
    #[test]
    fn a_flipped_bit_is_seen(sizes in batch_sizes(), at in 0.0..1.0f64, bit in 0u8..8) {
        let dir = tempfile::tempdir().unwrap();
        let ends = batches(dir.path(), &sizes);
        let mut bytes = fs::read(segment_path(dir.path())).unwrap();
        let at = ((at * bytes.len() as f64) as usize).min(bytes.len() - 1);
        bytes[at] ^= 1 << bit;
        fs::write(segment_path(dir.path()), &bytes).unwrap();
        let (spool, repairs, damaged) = Spool::open(dir.path(), 0).unwrap();
        let intact = ends.iter().rev().find(|(end, _)| *end <= at as u64).map_or(0, |(_, kept)| *kept);
        match spool.run(meta().run) {
            None => prop_assert!(matches!(damaged[..], [SpoolError::Corrupt { .. }]), "{:?}", damaged),
            Some(run) => {
                prop_assert_eq!(run.records().unwrap().len() as u64, intact);
                prop_assert!(matches!(repairs[..], [Repair { torn_bytes: 1.., .. }]), "{:?}", repairs);
            }
        }
    }

    /// Random bytes instead of a segment never panic.
    #[test]
    fn garbage_segments_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), magic in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        two_batches(dir.path());
        let mut all = if magic { b"DSB1".to_vec() } else { Vec::new() };
        all.extend(bytes);
        fs::write(segment_path(dir.path()), &all).unwrap();
        let _ = Spool::open(dir.path(), 0).unwrap();
    }
}
