//! The whole path on the real kernel: coordinator, agents, sessions, verdict, bundle; and what is left when one of them is
//! killed. Everything is waited for by its condition; every test ends at the leak gate.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use drums_tests::fleet::TestFleet;
use serde_json::Value;

/// A run of these specs takes some seconds; a loaded machine gets more.
const PATIENCE: Duration = Duration::from_secs(240);

/// An experiment small enough for a test. `gates` are wide: what is tested here is the path, not the machine.
pub(crate) fn spec(id: &str, arms: &[&str], blocks: u32, hosts: u32) -> String {
    // Wide too: an experiment has at least one bar.
    let bar = format!(
        "[[bar]]\nname = \"the path\"\nmetric = \"create_to_ready_ms\"\nnumerator = \"{}\"\ndenominator = \"{}\"\n\
         at_most = 1000.0\nrule = \"bound\"\n",
        arms[0], arms[1]
    );
    let arms: String = arms
        .iter()
        .map(|a| match *a {
            "external" => format!(
                "[[arm]]\nname = \"external\"\nkind = \"external\"\ncommand = [\"{}\"]\n",
                drums_tests::root().join("tests/external/plain-process.sh").display()
            ),
            kind => format!("[[arm]]\nname = \"{kind}\"\nkind = \"{kind}\"\n"),
        })
        .collect();
    format!(
        "id = \"{id}\"\ntitle = \"A test of the path\"\nhypothesis = \"The path holds.\"\n\
         [workload]\nname = \"minimal\"\n\
         [limits]\ncpu_milli = 1000\ncpuset_size = 1\nmemory_mib = 256\nvmm_memory_overhead_mib = 256\n\
         [design]\norder = \"williams\"\nblocks_per_host = {blocks}\nwarmup_blocks = 1\ntemplate_builds_per_host = 1\n\
         seed = 7\nready_timeout_ms = 60000\nmargin = 0.25\nalpha = 0.05\n\
         [run]\nmax_runs = 2\ndeadline_minutes = 10\n\
         [hosts]\ncount = {hosts}\n{arms}\
         [[metric]]\nmetric = \"create_to_ready_ms\"\nendpoint = \"E3\"\nposition = \"K2\"\nbase_case = \"cold as shipped\"\nprimary = true\n\
         {bar}\
         [gates]\nmax_steal_fraction = 1.0\nmax_outside_cpu_fraction = 64.0\nmax_canary_ratio = 100.0\n\
         max_clock_step_ms = 1000.0\nsettle_timeout_ms = 10000\nmax_void_fraction = 1.0\n"
    )
}

fn latest_run(fleet: &TestFleet) -> Result<Value> {
    let runs = fleet.ctl_json(&["runs", "--json"])?;
    let list = runs["runs"].as_array().context("no list of runs")?;
    list.last().cloned().context("there is no run")
}

/// Waits until the latest run is closed; its verdict.
pub(crate) fn closed(fleet: &TestFleet) -> Result<String> {
    let mut verdict = String::new();
    fleet.wait("the run is closed", PATIENCE, |f| {
        let run = latest_run(f)?;
        verdict = run["verdict"].as_str().unwrap_or_default().to_owned();
        Ok((!run["closed"].is_null(), run.to_string()))
    })?;
    Ok(verdict)
}

/// Waits until at least `blocks` blocks ended and another has begun.
pub(crate) fn in_the_middle(fleet: &TestFleet, blocks: u64) -> Result<Value> {
    let mut run = Value::Null;
    fleet.wait("a block in the middle of the run has begun", PATIENCE, |f| {
        run = latest_run(f)?;
        ensure!(run["closed"].is_null(), "the run is closed already: {run}");
        let busy = run["hosts"].as_array().is_some_and(|hosts| hosts.iter().any(|h| !h["block"].is_null()));
        Ok((run["blocks_done"].as_u64() >= Some(blocks) && busy, run.to_string()))
    })?;
    Ok(run)
}

/// All records of a bundle, from its JSON lines.
fn records(bundle: &Path) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for file in manifest_paths(bundle)?.iter().filter(|p| p.ends_with(".jsonl")) {
        for line in fs::read_to_string(bundle.join(file))?.lines() {
            let value: Value = serde_json::from_str(line).with_context(|| format!("{file}: {line}"))?;
            if value.get("seq").is_some() || value.get("record").is_some() {
                found.push(value.get("record").cloned().unwrap_or(value));
            }
        }
    }
    Ok(found)
}

fn manifest_paths(bundle: &Path) -> Result<Vec<String>> {
    let manifest: Value = serde_json::from_str(&fs::read_to_string(bundle.join("manifest.json"))?)?;
    let files = manifest["files"].as_array().context("the manifest lists no files")?;
    Ok(files.iter().filter_map(|f| f["path"].as_str().map(str::to_owned)).collect())
}

/// Each (run, host, seq) once and without gaps; each measured (host, block, arm) sampled once per metric.
fn each_once(records: &[Value]) -> Result<()> {
    let mut seqs = std::collections::BTreeMap::<String, Vec<u64>>::new();
    let mut samples = std::collections::BTreeSet::new();
    for record in records {
        let key = format!("{} {}", record["run"], record["host"]);
        seqs.entry(key).or_default().push(record["seq"].as_u64().context("no seq")?);
        let sample = &record["body"]["sample"];
        if !sample.is_null() {
            let place = format!(
                "{} {} {} {} {} {}",
                record["run"], record["host"], sample["kind"], sample["block"], sample["position"], sample["metric"]
            );
            ensure!(samples.insert(place.clone()), "sampled twice: {place}");
        }
    }
    ensure!(!samples.is_empty(), "there are no samples");
    for (key, mut seqs) in seqs {
        seqs.sort_unstable();
        let wanted: Vec<u64> = (1..=seqs.len() as u64).collect();
        ensure!(seqs == wanted, "{key}: sequence numbers {seqs:?}");
    }
    Ok(())
}

fn export(fleet: &TestFleet, id: &str) -> Result<std::path::PathBuf> {
    let bundle = fleet.dir.join("bundle");
    fleet.ctl(&["export", id, "--out", bundle.to_str().context("not UTF-8")?])?;
    Ok(bundle)
}

#[test]
fn live_a_small_experiment_runs_to_a_verdict_that_verifies() {
    let check = || -> Result<()> {
        let fleet = TestFleet::start(&["h1", "h2"])?;
        fleet.register(&spec("EXP-900", &["drums-cold", "runc-cold", "external"], 6, 2))?;
        let output = fleet.fleet.ctl_output(&["run", "EXP-900", "--watch"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        let complete = matches!(output.status.code(), Some(0 | 10 | 11));
        ensure!(complete, "a complete run passes, fails or is undecided; {}: {said}", output.status);
        let results = fleet.ctl_json(&["results", "EXP-900", "--format", "json"])?;
        for key in ["verdict", "registration", "machines", "hosts", "arms", "ratios", "gates", "controls"] {
            ensure!(!results[key].is_null(), "results have no {key}: {results}");
        }
        ensure!(results["machines"].as_array().map(Vec::len) == Some(1), "one machine: {results}");
        let csv = fleet.ctl(&["results", "EXP-900", "--format", "csv"])?;
        ensure!(csv.lines().count() > 3, "csv: {csv}");
        let report = fleet.dir.join("report.html");
        fleet.ctl(&["report", "EXP-900", "--out", report.to_str().context("not UTF-8")?])?;
        let html = fs::read_to_string(&report)?;
        ensure!(html.contains("EXP-900") && !html.contains("src=\"http"), "the report is not self-contained");

        let bundle = export(&fleet, "EXP-900")?;
        let records = records(&bundle)?;
        each_once(&records)?;
        let path = bundle.to_str().context("not UTF-8")?;
        let verified = fleet.fleet.ctl_output(&["verify", path])?;
        // `verify` reproduces the verdict, and exits with its code.
        let reproduced = verified.status.code() == output.status.code();
        ensure!(reproduced, "verify: {}: {}", verified.status, String::from_utf8_lossy(&verified.stderr));
        tampering_is_named(&fleet, &bundle, output.status.code())?;
        fleet.finish()
    };
    check().unwrap();
}

/// One byte of one file of each kind is changed; `verify` must name that file and fail.
fn tampering_is_named(fleet: &TestFleet, bundle: &Path, untouched: Option<i32>) -> Result<()> {
    let paths = manifest_paths(bundle)?;
    for kind in ["samples/", "registration", "logs/"] {
        // A run in which nothing was worth a log line has its history in the events only.
        let found = paths.iter().find(|p| p.contains(kind)).or_else(|| paths.iter().find(|p| p.contains("events/")));
        let file = found.with_context(|| format!("no {kind} among {paths:?}"))?;
        let path = bundle.join(file);
        let good = fs::read(&path)?;
        let mut bad = good.clone();
        let at = bad.iter().rposition(u8::is_ascii_digit).with_context(|| format!("{file} has no digit"))?;
        bad[at] = if bad[at] == b'1' { b'2' } else { b'1' };
        fs::write(&path, &bad)?;
        let output = fleet.fleet.ctl_output(&["verify", bundle.to_str().context("not UTF-8")?])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(1), "a changed {file} verifies: {}", output.status);
        ensure!(said.contains(file.as_str()), "verify does not name {file}: {said}");
        fs::write(&path, &good)?;
    }
    let output = fleet.fleet.ctl_output(&["verify", bundle.to_str().context("not UTF-8")?])?;
    ensure!(output.status.code() == untouched, "the mended bundle does not verify: {}", output.status);
    Ok(())
}

#[test]
fn live_a_killed_coordinator_comes_back_and_the_run_completes() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start(&["h1"])?;
        fleet.register(&spec("EXP-901", &["drums-cold", "runc-cold"], 8, 1))?;
        fleet.ctl(&["run", "EXP-901"])?;
        in_the_middle(&fleet, 2)?;
        fleet.fleet.coordinator.take().context("it runs")?.kill();
        fleet.fleet.start_coordinator()?;
        let verdict = closed(&fleet)?;
        ensure!(["pass", "fail", "undecided"].contains(&verdict.as_str()), "verdict {verdict}");
        let bundle = export(&fleet, "EXP-901")?;
        let records = records(&bundle)?;
        each_once(&records)?;
        let samples = records
            .iter()
            .map(|r| &r["body"]["sample"])
            .filter(|s| s["kind"] == "measured" && s["metric"] == "create_to_ready_ms")
            .count();
        ensure!(samples == 16, "{samples} samples of 8 blocks of 2 arms");
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn live_a_killed_agent_that_is_back_in_time_leaves_an_incomplete_run_and_names_the_block() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start(&["h1"])?;
        fleet.register(&spec("EXP-902", &["drums-cold", "runc-cold"], 8, 1))?;
        fleet.ctl(&["run", "EXP-902"])?;
        let run = in_the_middle(&fleet, 1)?;
        fleet.fleet.host_mut("h1")?.agent.take().context("it runs")?.kill();
        fleet.fleet.start_agent("h1")?;
        let verdict = closed(&fleet)?;
        ensure!(verdict == "incomplete", "verdict {verdict}");
        let id = run["run"].as_str().context("no run id")?.to_owned();
        let told = fleet.ctl(&["logs", &id])? + &fleet.ctl(&["results", "EXP-902"])?;
        ensure!(told.to_lowercase().contains("interrupted"), "the block is not named: {told}");
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn row_08_an_agent_killed_in_an_arm_loses_its_run_and_the_next_audit_leaves_nothing() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start(&["h1"])?;
        fleet.register(&spec("EXP-903", &["drums-cold", "runc-cold"], 8, 1))?;
        fleet.ctl(&["run", "EXP-903"])?;
        in_the_middle(&fleet, 1)?;
        fleet.fleet.host_mut("h1")?.agent.take().context("it runs")?.kill();
        let verdict = closed(&fleet)?;
        ensure!(verdict == "lost", "verdict {verdict}");
        // finish() audits: what the dead agent held must be undone by it.
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn live_a_cancelled_run_ends_cancelled_and_clean() {
    let check = || -> Result<()> {
        let fleet = TestFleet::start(&["h1"])?;
        fleet.register(&spec("EXP-904", &["drums-cold", "runc-cold"], 8, 1))?;
        fleet.ctl(&["run", "EXP-904"])?;
        let run = in_the_middle(&fleet, 1)?;
        fleet.ctl(&["cancel", run["run"].as_str().context("no run id")?])?;
        let verdict = closed(&fleet)?;
        ensure!(verdict == "cancelled", "verdict {verdict}");
        let watched = fleet.fleet.ctl_output(&["run", "EXP-904", "--attach"])?;
        ensure!(watched.status.code() == Some(15), "exit code of a cancelled run: {}", watched.status);
        fleet.finish()
    };
    check().unwrap();
}
