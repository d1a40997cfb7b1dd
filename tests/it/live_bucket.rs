//! Coordinator and home gone for good in the middle of a run: what the agents leave is enough.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use drums_common::{
    bucket::{self, SegmentHead},
    evidence::{BlockResult, Body, Record, Teardown},
    segment,
};
use drums_tests::fleet::TestFleet;
use serde_json::Value;

use crate::live_fleet::{in_the_middle, spec};

/// A life lease of 12 s, what is left of a block before it, and the unwinding after it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Everything below a folder that ends so.
fn files(dir: &Path, end: &str) -> Result<Vec<std::path::PathBuf>> {
    let (mut out, mut open) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                out.push(path);
            }
        }
    }
    out.sort();
    Ok(out)
}

fn evidence(bucket: &Path) -> Result<Vec<(SegmentHead, Vec<Record>)>> {
    let mut out = Vec::new();
    for path in files(bucket, ".segment")? {
        let object = fs::read(&path)?;
        let (head, bytes) = bucket::unpack(&object).with_context(|| path.display().to_string())?;
        let mut records = Vec::new();
        for batch in segment::scan(bytes).batches {
            records.extend(segment::records(&bytes[batch.offset as usize..]).map_err(anyhow::Error::msg)?);
        }
        out.push((head, records));
    }
    Ok(out)
}

/// `drumsctl` with a home that has never seen anything.
fn verify(fleet: &TestFleet, home: &Path, bucket: &Path) -> Result<(Option<i32>, Value, String)> {
    let mut command = Command::new(&fleet.fleet.layout.binaries.drumsctl);
    let output = command.arg("--home").arg(home).arg("--json").arg("verify").arg(bucket).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
    Ok((output.status.code(), json, said))
}

#[test]
fn live_agents_whose_coordinator_is_gone_for_good_leave_a_bucket_that_verifies_by_itself() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start_with_bucket(&["h1", "h2"])?;
        let bucket = fleet.dir.join("bucket");
        fleet.register(&spec("EXP-905", &["drums-cold", "external"], 8, 2))?;
        fleet.ctl(&["run", "EXP-905"])?;
        in_the_middle(&fleet, 1)?;
        fleet.fleet.coordinator.take().context("it runs")?.kill();
        fs::remove_dir_all(&fleet.fleet.layout.home)?;

        fleet.wait("both hosts sealed and uploaded their last record", PATIENCE, |_| {
            let closed = evidence(&bucket)?.iter().filter(|(head, _)| head.closed).count();
            Ok((closed == 2, format!("{closed} hosts closed")))
        })?;
        // They finished what they held, and undid everything.
        let found = evidence(&bucket)?;
        let (mut finished, mut records) = (0, 0);
        for record in found.iter().flat_map(|(_, records)| records) {
            records += 1;
            match &record.body {
                Body::BlockEnded(e) => {
                    ensure!(e.result == BlockResult::Completed, "block {} of {}: {:?}", e.block, record.host, e.result);
                    finished += 1;
                }
                Body::Closed(c) => {
                    ensure!(c.teardown == Teardown::Clean, "{}: {:?}", record.host, c.teardown);
                    ensure!(c.reason.contains("life lease"), "{}: {}", record.host, c.reason);
                }
                _ => {}
            }
        }
        ensure!(finished > 1, "{finished} blocks ended");

        let home = fleet.dir.join("fresh");
        let (code, json, said) = verify(&fleet, &home, &bucket)?;
        ensure!(code == Some(13), "an incomplete run, not {code:?}: {said} {json}");
        ensure!(json["holds"] == true && json["verdict"] == "incomplete", "{json}");
        ensure!(json["records"] == records, "{records} records are in the bucket: {json}");
        ensure!(json["summary"]["reasons"].to_string().contains("life lease"), "{json}");
        ensure!(!home.exists(), "verifying makes no home");

        // Without one host's evidence the run is lost, and that is said.
        let of_h2 = files(&bucket, ".segment")?.into_iter().filter(|p| p.to_string_lossy().contains("/h2/"));
        for path in of_h2 {
            fs::remove_file(path)?;
        }
        let (code, json, said) = verify(&fleet, &home, &bucket)?;
        ensure!(code == Some(14) && json["verdict"] == "lost", "{code:?}: {said} {json}");
        ensure!(json["summary"]["reasons"].to_string().contains("no evidence of it"), "{json}");
        fleet.finish()
    };
    check().unwrap();
}
