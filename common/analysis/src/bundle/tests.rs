use super::*;
use crate::{Verdict, synthetic::Scenario};

fn bundle() -> BTreeMap<String, Vec<u8>> {
    let s = Scenario::exp028(1);
    let (meta, records) = s.run(1);
    files(&s.registration(), &[meta], 1, &records).unwrap().into_iter().map(|f| (f.path, f.bytes)).collect()
}

#[test]
fn an_untouched_bundle_holds_and_gives_the_verdict_again() {
    let b = bundle();
    let v = verify(&b, Some(Scenario::exp028(1).registration().sha256));
    assert!(v.holds(), "{:#?}", v.problems);
    assert_eq!(v.analysis.unwrap().summary.verdict, Verdict::Pass);
    assert!(v.notes.is_empty());
    assert_eq!(v.files + 1, b.len());
}

#[test]
fn one_changed_byte_anywhere_is_seen_and_named() {
    let b = bundle();
    for path in b.keys() {
        let mut changed = b.clone();
        let bytes = changed.get_mut(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] = if bytes[middle] == b'1' { b'2' } else { b'1' };
        let v = verify(&changed, None);
        assert!(!v.holds(), "{path}");
        assert!(v.problems.iter().any(|p| p.path.starts_with(path.as_str())), "{path}: {:#?}", v.problems);
    }
    let mut spaced = b.clone();
    spaced.get_mut(MANIFEST).unwrap().push(b' ');
    assert_eq!(verify(&spaced, None).problems[0].path, MANIFEST);
}

#[test]
fn missing_and_added_files_are_named() {
    let mut b = bundle();
    let log = b.keys().find(|p| p.starts_with("logs/")).unwrap().clone();
    b.remove(&log);
    b.insert("extra.txt".to_owned(), Vec::new());
    let v = verify(&b, None);
    let named: Vec<&str> = v.problems.iter().map(|p| p.path.as_str()).collect();
    assert!(named.contains(&log.as_str()) && named.contains(&"extra.txt"), "{named:?}");
}

/// Who rewrites a sample and the manifest too is caught by the summary.
#[test]
fn a_consistent_forgery_of_a_sample_contradicts_the_summary() {
    let mut b = bundle();
    let path = b.keys().find(|p| p.starts_with("samples/")).unwrap().clone();
    let text = String::from_utf8(b[&path].clone()).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for line in &mut lines {
        let mut r: Record = serde_json::from_str(line).unwrap();
        if let Body::Sample(s) = &mut r.body
            && s.arm.as_str() == "drums-cold"
        {
            s.value *= 0.5;
        }
        *line = serde_json::to_string(&r).unwrap();
    }
    b.insert(path.clone(), (lines.join("\n") + "\n").into_bytes());
    let mut m: Manifest = serde_json::from_slice(&b[MANIFEST]).unwrap();
    for e in &mut m.files {
        e.bytes = b[&e.path].len() as u64;
        e.sha256 = Sha256::of(&b[&e.path]);
    }
    m.bundle_sha256 = m.digest();
    b.insert(MANIFEST.to_owned(), m.text().into_bytes());
    let v = verify(&b, None);
    assert!(v.problems.iter().all(|p| p.path == SUMMARY) && !v.holds(), "{:#?}", v.problems);
}

/// A bundle whose manifest fits what was changed in it.
fn forged(mut b: BTreeMap<String, Vec<u8>>, change: impl FnOnce(&mut Manifest)) -> BTreeMap<String, Vec<u8>> {
    let mut m: Manifest = serde_json::from_slice(&b[MANIFEST]).unwrap();
    for e in &mut m.files {
        e.bytes = b[&e.path].len() as u64;
        e.sha256 = Sha256::of(&b[&e.path]);
    }
    change(&mut m);
    m.bundle_sha256 = m.digest();
    b.insert(MANIFEST.to_owned(), m.text().into_bytes());
    b
}

/// Whatever is in a bundle's files, and even if its manifest fits: an answer, never a panic.
#[test]
fn fuzz_bundles() {
    // A part of the records: an input is verified in a moment.
    let mut b = bundle();
    for (path, bytes) in &mut b {
        let lines = bytes.split_inclusive(|b| *b == b'\n').take(if path.ends_with(".jsonl") { 8 } else { usize::MAX });
        *bytes = lines.collect::<Vec<_>>().concat();
    }
    let paths: Vec<String> = b.keys().cloned().collect();
    let seeds = b.values().cloned().collect();
    drums_fuzz::decoder!(100, seeds, |bytes: &[u8]| {
        // In place of the file that it resembles.
        let start = &bytes[..bytes.len().min(16)];
        let path = paths.iter().find(|p| b[*p].starts_with(start)).unwrap_or(&paths[0]);
        let mut changed = b.clone();
        changed.insert(path.clone(), bytes.to_vec());
        let _ = verify(&changed, None);
        if path != MANIFEST {
            let _ = verify(&forged(changed, |_| {}), None);
        }
    });
}

#[test]
fn a_run_that_was_left_out_leaves_a_gap() {
    let s = Scenario::exp028(1);
    let of = |numbers: &[u32], made| {
        let (metas, records): (Vec<_>, Vec<_>) = numbers.iter().map(|n| s.run(*n)).unzip();
        let files = files(&s.registration(), &metas, made, &records.concat()).unwrap();
        let b: BTreeMap<_, _> = files.into_iter().map(|f| (f.path, f.bytes)).collect();
        verify(&b, None).problems
    };
    assert_eq!(of(&[1, 2, 3], 3), []);
    assert_eq!(of(&[2], 3), [], "the export of one run");
    for (numbers, made) in [(&[1, 3][..], 2), (&[1, 3], 3), (&[2], 1), (&[1, 2], 1), (&[], 0)] {
        let problems = of(numbers, made);
        let seen = problems.iter().any(|p| p.path == RUNS);
        assert_eq!(seen, made > 0, "{numbers:?} of {made}: {problems:?}");
    }
    let max = s.registration().experiment.design.max_runs;
    assert_eq!(of(&[1], max + 1)[0].path, MANIFEST);
}

#[test]
fn records_of_a_run_that_is_not_listed_are_seen() {
    let mut b = bundle();
    b.insert(RUNS.to_owned(), b"[]\n".to_vec());
    let v = verify(&forged(b, |m| m.runs_made = 0), None);
    assert!(v.problems.iter().any(|p| p.path == RUNS && p.what.contains("of which there are records")));
}

#[test]
fn a_registration_that_no_spec_could_give_is_refused() {
    let mut b = bundle();
    let mut json: Json = serde_json::from_slice(&b[REGISTRATION]).unwrap();
    json["design"]["alpha"] = 2.5.into();
    let text = json.to_string();
    let sha = Sha256::of(text.as_bytes());
    b.insert(REGISTRATION.to_owned(), text.into_bytes());
    let v = verify(&forged(b, |m| m.registration = sha), None);
    assert!(v.problems[0].what.contains("alpha is 2.5"), "{:?}", v.problems);
    assert!(v.analysis.is_none());
}

#[test]
fn what_is_larger_than_it_says_is_not_read() {
    let v = verify(&forged(bundle(), |m| m.files[0].bytes = MAX_BYTES), None);
    assert!(v.problems[0].what.contains("more than the"), "{:?}", v.problems);
    let mut long = bundle();
    long.get_mut(SUMMARY).unwrap().push(b' ');
    assert!(verify(&long, None).problems.iter().any(|p| p.path == SUMMARY && p.what.contains("are expected")));
}

#[test]
fn another_registration_garbage_and_a_part_are_told_apart() {
    let v = verify(&bundle(), Some(Sha256::of(b"another")));
    assert_eq!(v.problems[0].path, MANIFEST);
    assert!(!verify(&BTreeMap::<String, Vec<u8>>::new(), None).holds());
    let garbage = BTreeMap::from([(MANIFEST.to_owned(), vec![0xff; 100])]);
    assert!(!verify(&garbage, None).holds());

    let s = Scenario::exp028(1);
    let (meta, records) = s.run(1);
    let part = files(&s.registration(), &[meta], 2, &records).unwrap();
    let v = verify(&part.into_iter().map(|f| (f.path, f.bytes)).collect::<BTreeMap<_, _>>(), None);
    assert!(v.holds() && v.notes[0].contains("1 of 2 runs"));
}
