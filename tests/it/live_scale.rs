//! The control plane under many simulated agents: real QUIC against the real daemon, no arms.

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use drums_bench::rows::{
    NAMES,
    restart::{Scale, kill},
};
use serde_json::Value;

/// The acceptance's bound for a thousand agents; a debug build with a hundred has to keep it too.
const BACK: Duration = Duration::from_secs(5);

#[test]
fn live_a_coordinator_killed_under_many_agents_and_ten_runs_is_back_in_five_seconds_and_all_runs_complete() {
    let check = || -> Result<()> {
        let programs = drums_tests::programs()?;
        let dir = tempfile::tempdir()?;
        let scale = Scale { agents: 100, runs: 10, blocks: 4, block: Duration::from_millis(1_500) };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let back = runtime.block_on(kill(dir.path(), &programs.join("drums-coordinator"), scale, 1, true))?;
        for back in back {
            ensure!(back.going_on <= BACK, "it took {back:?}");
        }
        Ok(())
    };
    check().unwrap();
}

/// With numbers that prove nothing: what is checked is that every row can be measured and says what the file promises.
#[test]
fn live_the_control_plane_bench_measures_every_row() {
    let check = || -> Result<()> {
        let bench = drums_tests::programs()?.join("drums-bench");
        let dir = tempfile::tempdir()?;
        let file = |row: &str| dir.path().join(format!("{row}.json"));
        // Rows wait more than they compute, so all are measured at once.
        let mut running = Vec::new();
        for row in NAMES {
            let mut command = Command::new(&bench);
            command.args(["control-plane", "--quick", "--rows", row, "--json"]).arg(file(row));
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            running.push((row, command.spawn().context("cannot start the bench")?));
        }
        for (row, child) in running {
            let output = child.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "the row {row} ended with {}: {said}", output.status);
            let results: Value = serde_json::from_str(&fs::read_to_string(file(row))?)?;
            let rows = results["rows"].as_array().context("no rows")?;
            ensure!(!rows.is_empty(), "{row} gave nothing");
            rows.iter().try_for_each(|r| well_formed(r).with_context(|| format!("a row of {row}: {r}")))?;
        }
        Ok(())
    };
    check().unwrap();
}

fn well_formed(row: &Value) -> Result<()> {
    let text = |key: &str| row[key].as_str().with_context(|| format!("{key} is no text"));
    let number = |key: &str| row[key].as_f64().with_context(|| format!("{key} is no number"));
    ensure!(number("n")? >= 1.0 && !text("name")?.is_empty() && !text("unit")?.is_empty(), "something is empty");
    text("peer")?;
    if row["ratio"].is_null() {
        // Twenty agents may weigh less than what a process takes and gives back meanwhile.
        ensure!(text("note")?.contains("no ratio") && row["met"] != true, "no ratio, and nothing says so");
        return Ok(());
    }
    // Four rounds on a busy machine may leave the high end open.
    let high = if row["high"].is_null() { f64::INFINITY } else { number("high")? };
    let (ratio, low) = (number("ratio")?, number("low")?);
    ensure!(low <= ratio && ratio <= high, "the ratio does not lie in its interval");
    let goal = row["goal"].as_f64().unwrap_or(f64::NAN);
    let met = match text("bound")? {
        "low" => Some(low >= goal),
        "high" => Some(high <= goal),
        "both" => Some(low >= 1.0 / (1.0 + goal) && high <= 1.0 + goal),
        _ => None,
    };
    ensure!(row["met"].as_bool() == met, "it says that its bound is met: {}", row["met"]);
    Ok(())
}
