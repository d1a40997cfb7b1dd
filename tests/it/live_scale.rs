//! The control plane under many simulated agents: real QUIC against the real daemon, no arms.

use std::time::Duration;

use anyhow::{Result, ensure};
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
