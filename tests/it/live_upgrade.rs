//! Agents are upgraded between runs, by digest, and roll back when the other build does not work.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use drums_common::digest::Sha256;
use drums_infra::fleet::Binaries;
use drums_tests::fleet::TestFleet;
use serde_json::Value;

use crate::live_fleet::{closed, in_the_middle, spec};

const PATIENCE: Duration = Duration::from_secs(60);

fn host(fleet: &TestFleet) -> Result<Value> {
    let hosts = fleet.ctl_json(&["host", "list", "--json"])?;
    hosts["hosts"].as_array().and_then(|h| h.first()).cloned().context("no host")
}

fn build(fleet: &TestFleet) -> Result<String> {
    Ok(host(fleet)?["agent_sha256"].as_str().context("no build")?.to_owned())
}

fn runs_build(fleet: &TestFleet, wanted: &str) -> Result<()> {
    fleet.wait("the host runs the build", PATIENCE, |f| {
        let host = host(f)?;
        Ok((host["agent_sha256"] == wanted && host["state"] == "connected", host.to_string()))
    })
}

/// With a verdict from whole evidence: which one is the machine's business.
fn ran_to_its_end(fleet: &TestFleet) -> Result<()> {
    let verdict = closed(fleet)?;
    ensure!(["pass", "fail"].contains(&verdict.as_str()), "{verdict}");
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("not UTF-8")
}

#[test]
fn live_an_agent_is_upgraded_between_runs_survives_restarts_and_rolls_a_broken_build_back() -> Result<()> {
    let mut fleet = TestFleet::start(&["h1"])?;
    let installed = Binaries::beside(&drums_tests::programs()?).agent;
    let old = Sha256::of(&fs::read(&installed)?).to_string();
    runs_build(&fleet, &old)?;
    let pid = fleet.fleet.host_mut("h1")?.agent.as_ref().context("no agent")?.pid();

    // Another build that works: what comes after the sections of a program is never loaded.
    let other = fleet.dir.join("other");
    let mut bytes = fs::read(&installed)?;
    bytes.extend(b"another build");
    let new = Sha256::of(&bytes).to_string();
    fs::write(&other, bytes)?;

    // Ordered in the middle of a run, it waits for the run's end: the run sees one build.
    fleet.register(&spec("EXP-921", &["drums-cold", "external"], 4, 1))?;
    fleet.ctl(&["run", "EXP-921"])?;
    in_the_middle(&fleet, 1)?;
    fleet.ctl(&["host", "upgrade", "h1", "--agent", text(&other)?])?;
    ensure!(host(&fleet)?["upgrade"] == new.as_str(), "it is not shown: {}", host(&fleet)?);
    ensure!(build(&fleet)? == old, "a run was going on");
    ran_to_its_end(&fleet)?;
    runs_build(&fleet, &new)?;
    fleet.wait("the order is met", PATIENCE, |f| Ok((host(f)?["upgrade"].is_null(), host(f)?.to_string())))?;
    let agent = fleet.fleet.host_mut("h1")?.agent.as_ref().context("no agent")?;
    ensure!(agent.pid() == pid, "a service manager would have lost it");

    // One that ends at once is rolled back, and said.
    let broken = fs::canonicalize("/bin/false")?;
    let said = fleet.fleet.ctl_output(&["host", "upgrade", "--all", "--agent", text(&broken)?, "--wait"])?;
    ensure!(said.status.code() == Some(1), "{said:?}");
    ensure!(build(&fleet)? == new);
    let events = fleet.ctl(&["events", "--host", "h1"])?;
    for action in ["upgrade ", "upgraded", "upgrade-failed"] {
        ensure!(events.contains(action), "no {action}: {events}");
    }
    ensure!(events.contains("exit status: 1"), "{events}");

    // The installed program is started again, as after a crash: it becomes the build that took its place.
    fleet.fleet.host_mut("h1")?.agent.as_mut().context("no agent")?.kill();
    fleet.fleet.start_agent("h1")?;
    runs_build(&fleet, &new)?;

    // And it works.
    fleet.ctl(&["run", "EXP-921"])?;
    ran_to_its_end(&fleet)?;
    fleet.finish()
}
