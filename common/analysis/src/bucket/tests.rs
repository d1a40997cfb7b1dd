use drums_common::{
    bucket::{SegmentHead, document, pack},
    evidence::Teardown,
    ids::InstallationId,
};

use super::*;
use crate::{Verdict, synthetic::Scenario};

const INSTALLATION: InstallationId = InstallationId([1, 2, 3, 4]);

type Bucket = BTreeMap<String, Vec<u8>>;

/// The bucket that the agents of a whole run would leave, in segments of 100 records; each host ends with `reason`.
fn bucket(reason: &str) -> (Bucket, Registration, RunDoc) {
    let scenario = Scenario::exp028(1);
    let registration = scenario.registration();
    let (meta, mut records) = scenario.run(1);
    for r in &mut records {
        if let Body::Closed(c) = &mut r.body {
            *c = Closed { teardown: Teardown::Clean, reason: reason.to_owned() };
        }
    }
    let hosts: BTreeSet<HostId> = records.iter().map(|r| r.host.clone()).collect();
    let doc =
        RunDoc { run: meta.run, registration: registration.sha256, number: 1, hosts: hosts.into_iter().collect() };
    let mut out = Bucket::new();
    let ca_sha256 = Sha256::of(b"ca");
    let whose = InstallationDoc { layout: LAYOUT, installation: INSTALLATION, ca_sha256 };
    out.insert(Key::Installation.of(INSTALLATION), document(&whose));
    let frozen = RegistrationDoc {
        registered_at: registration.registered_at,
        canonical: registration.canonical.clone(),
        spec: String::new(),
    };
    out.insert(Key::Registration(registration.sha256).of(INSTALLATION), document(&frozen));
    out.insert(Key::Run(meta.run).of(INSTALLATION), document(&doc));
    for host in &doc.hosts {
        let of_host: Vec<&Record> = records.iter().filter(|r| r.host == *host).collect();
        for (index, part) in of_host.chunks(100).enumerate() {
            let (key, object) = object(&doc, host, index as u32, part);
            out.insert(key, object);
        }
    }
    (out, registration, doc)
}

fn object(doc: &RunDoc, host: &HostId, index: u32, records: &[&Record]) -> (String, Vec<u8>) {
    let mut bytes = Vec::new();
    for batch in records.chunks(30) {
        let mut payload = Vec::new();
        for r in batch {
            segment::push_record(&mut payload, r).unwrap();
        }
        bytes.extend(segment::encode_batch(batch[0].seq, batch.len() as u32, &payload));
    }
    let last = records.last().unwrap();
    let head = SegmentHead {
        run: doc.run,
        registration: doc.registration,
        host: host.clone(),
        index,
        first_seq: records[0].seq,
        last_seq: last.seq,
        closed: matches!(last.body, Body::Closed(_)),
        bytes: 0,
        sha256: Sha256([0; 32]),
    };
    (Key::Segment(doc.run, host.clone(), index).of(INSTALLATION), pack(head, &bytes))
}

fn verdict(v: &Verification) -> Verdict {
    v.analysis.as_ref().unwrap().summary.verdict
}

fn reasons(v: &Verification) -> String {
    v.analysis.as_ref().unwrap().summary.reasons.join("\n")
}

#[test]
fn a_bucket_alone_gives_the_verdict_of_the_evidence_in_it() {
    let (bucket, registration, doc) = bucket("");
    let v = verify(&bucket, None);
    assert!(v.holds(), "{:?}", v.problems);
    let (meta, records) = Scenario::exp028(1).run(1);
    assert_eq!(v.analysis.as_ref().unwrap().summary, analyse(&registration, &[meta], &records).summary);
    // The same from the installation's own folder, and only that of the registration that is asked for.
    let own: Bucket = bucket.iter().map(|(k, b)| (k["01020304/".len()..].to_owned(), b.clone())).collect();
    assert!(verify(&own, Some(registration.sha256)).holds());
    let other = verify(&bucket, Some(Sha256::of(b"another")));
    assert!(other.problems[0].to_string().contains("is not in it"), "{:?}", other.problems);
    assert_eq!(doc.hosts.len(), 2);
}

#[test]
fn a_run_that_its_coordinator_left_alone_is_incomplete() {
    let why = "the life lease ended without word from the coordinator";
    let v = verify(&bucket(why).0, None);
    assert!(v.holds(), "{:?}", v.problems);
    assert_eq!(verdict(&v), Verdict::Incomplete);
    assert!(reasons(&v).contains(why), "{}", reasons(&v));
    assert_eq!(verdict(&verify(&bucket(CANCELLED).0, None)), Verdict::Cancelled);
}

#[test]
fn what_is_missing_is_named_and_makes_the_run_lost() {
    let (whole, registration, doc) = bucket("");
    let of = |host: &HostId| format!("01020304/runs/{}/{host}/", doc.run);
    let (host, segments) = (&doc.hosts[1], whole.keys().filter(|k| k.starts_with(&of(&doc.hosts[1]))).count() as u32);
    assert!(segments > 2);

    let mut no_host = whole.clone();
    no_host.retain(|k, _| !k.starts_with(&of(host)));
    let v = verify(&no_host, None);
    assert!(v.holds(), "what never came is no damage: {:?}", v.problems);
    assert_eq!(verdict(&v), Verdict::Lost);
    assert!(reasons(&v).contains(&format!("host {host}: no evidence of it is in the bucket")), "{}", reasons(&v));

    let mut no_end = whole.clone();
    no_end.remove(&Key::Segment(doc.run, host.clone(), segments - 1).of(INSTALLATION)).unwrap();
    let v = verify(&no_end, None);
    assert!(v.holds());
    assert_eq!(verdict(&v), Verdict::Lost);
    assert!(reasons(&v).contains("without an end"), "{}", reasons(&v));

    let mut gap = whole.clone();
    let key = Key::Segment(doc.run, host.clone(), 1).of(INSTALLATION);
    gap.remove(&key).unwrap();
    let v = verify(&gap, None);
    assert_eq!(v.problems.iter().map(|p| p.path.as_str()).collect::<Vec<_>>(), [key.as_str()]);
    assert_ne!(verdict(&v), Verdict::Pass);

    let mut no_run = whole.clone();
    no_run.retain(|k, _| !k.contains("/runs/"));
    let v = verify(&no_run, None);
    assert_eq!(verdict(&v), Verdict::Incomplete, "no run was made");

    let mut no_registration = whole;
    no_registration.remove(&Key::Registration(registration.sha256).of(INSTALLATION)).unwrap();
    let v = verify(&no_registration, None);
    assert!(!v.holds() && v.analysis.is_none());
}

#[test]
fn one_changed_byte_of_any_object_is_seen_and_named() {
    let (whole, ..) = bucket("");
    // The documents, and a segment of each host: each look is a whole analysis.
    let segment = |k: &str| k.ends_with(".segment");
    let tried = |k: &&String| !k.ends_with(bucket::INSTALLATION) && (!segment(k) || k.ends_with("/00001.segment"));
    for key in whole.keys().filter(tried) {
        let bytes = &whole[key];
        for at in [0, bytes.len() / 3, bytes.len() / 2, bytes.len() - 2] {
            let mut bad = whole.clone();
            bad.get_mut(key).unwrap()[at] ^= 1;
            let v = verify(&bad, None);
            assert!(!v.holds(), "{key} changed at {at} holds");
            let named = v.problems.iter().any(|p| p.path == *key || p.path == "." || p.path.ends_with("run.json"));
            assert!(named || key.ends_with("run.json"), "{key} at {at}: {:?}", v.problems);
        }
    }
}

#[test]
fn foreign_evidence_is_not_taken_for_a_hosts_own() {
    let (whole, _, doc) = bucket("");
    let [one, other] = [0, 1].map(|i| Key::Segment(doc.run, doc.hosts[i].clone(), 0).of(INSTALLATION));
    let mut swapped = whole.clone();
    swapped.insert(one.clone(), whole[&other].clone());
    let v = verify(&swapped, None);
    assert!(v.problems.iter().any(|p| p.path == one), "{:?}", v.problems);

    // An agent that repeats numbers under a later segment.
    let mut twice = whole.clone();
    let indices = whole.keys().filter(|k| k.contains(&format!("/{}/0", doc.hosts[0]))).count() as u32;
    let (_, records) = Scenario::exp028(1).run(1);
    let first: Vec<&Record> = records.iter().filter(|r| r.host == doc.hosts[0]).take(50).collect();
    let (key, object) = object(&doc, &doc.hosts[0], indices, &first);
    twice.insert(key.clone(), object);
    let v = verify(&twice, None);
    assert!(v.problems.iter().any(|p| p.path == key && p.what.contains("earlier ones")), "{:?}", v.problems);
}
