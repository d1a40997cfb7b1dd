//! The control plane under many simulated agents: real QUIC against the real daemon, no arms.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use drums_bench::rows::restart::{Scale, kill};

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

/// Every row with small numbers: that the bench measures, not what it finds.
#[test]
fn live_the_control_plane_bench_measures_every_row() {
    let check = || -> Result<()> {
        let programs = drums_tests::programs()?;
        let dir = tempfile::tempdir()?;
        let json = dir.path().join("rows.json");
        let mut command = Command::new(programs.join("drums-bench"));
        command.args(["control-plane", "--quick", "--json"]).arg(&json);
        let output = command.output().context("cannot start drums-bench")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the bench ended with {}: {said}", output.status);
        let rows: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
        let rows = rows["rows"].as_array().context("no rows")?;
        for bound in [
            "heartbeats per core",
            "plan of 4 KiB",
            "OpenSSH over ours, fresh",
            "OpenSSH over ours, warm",
            "memory per idle agent",
            "handshakes per core",
            "result upload",
            "death is shown",
            "wake-ups of the link",
            "share of a core",
            "link live / closed",
            "all runs go on",
        ] {
            let row =
                rows.iter().find(|r| r["name"].as_str().is_some_and(|n| n.contains(bound)) && !r["goal"].is_null());
            let row = row.with_context(|| format!("no row with a goal for {bound:?}: {rows:#?}"))?;
            for key in ["name", "ratio", "low", "high", "n", "bound", "goal", "met", "unit", "peer"] {
                ensure!(row.get(key).is_some_and(|v| !v.is_null()), "{bound}: {key} is missing: {row}");
            }
        }
        Ok(())
    };
    check().unwrap();
}
