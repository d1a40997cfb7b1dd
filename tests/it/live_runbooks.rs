//! The runbooks' commands, executed as they stand, against a real fleet in the state that each runbook is for.

use std::{fs, os::unix::fs::symlink, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use drums_tests::{fleet::TestFleet, root};

/// The commands of a runbook: the lines of its `sh` blocks, in order.
fn commands(runbook: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(root().join("runbooks").join(runbook))?;
    let mut found = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside && !line.is_empty() => found.push(line.to_owned()),
            _ => {}
        }
    }
    ensure!(!found.is_empty(), "{runbook} has no commands");
    Ok(found)
}

/// Runs the commands on host `host`. Only what a production machine fixes by its defaults is put in from outside: the
/// home, the agent's folders, and that the agent runs in its namespace and in the background.
fn execute(fleet: &mut TestFleet, host: &str, commands: &[String]) -> Result<()> {
    let docs = fleet.dir.join("docs");
    if !docs.exists() {
        symlink(root().join("docs"), &docs)?;
    }
    let bin = fleet.fleet.layout.binaries.agent.parent().context("the agent lies in a folder")?.display().to_string();
    let path = format!("{bin}:{}", std::env::var("PATH").unwrap_or_default());
    for command in commands {
        if let Some(rest) = command.strip_prefix("drums-agent run --token-file ") {
            let token = fleet.dir.join(rest);
            fleet.fleet.start_new_agent(host, &token)?;
            continue;
        }
        if command == "drums-agent audit" {
            if let Some(mut agent) = fleet.fleet.host_mut(host)?.agent.take() {
                ensure!(agent.stop(Duration::from_secs(60)), "the agent did not end by itself");
            }
            let audit = fleet.fleet.audit(host)?;
            ensure!(audit.status.success(), "`{command}`: {}", String::from_utf8_lossy(&audit.stderr));
            continue;
        }
        let output = Command::new("sh")
            .args(["-ec", command])
            .current_dir(&fleet.dir)
            .env("PATH", &path)
            .env("DRUMS_HOME", &fleet.fleet.layout.home)
            .stdin(std::process::Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{command}` ended with {}: {said}", output.status);
    }
    Ok(())
}

#[test]
fn live_the_runbook_for_adding_a_host_works_as_written() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start_coordinator(&["h1"])?;
        execute(&mut fleet, "h1", &commands("add-a-host.md")?)?;
        let state = fleet.fleet.host_state("h1")?;
        ensure!(state == "released", "after the undo the host is {state}");
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn live_the_runbook_for_a_lost_coordinator_works_as_written() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start(&["h1"])?;
        fleet.register(&crate::live_fleet::spec("EXP-905", &["drums-cold", "runc-cold"], 8, 1))?;
        fleet.ctl(&["run", "EXP-905"])?;
        crate::live_fleet::in_the_middle(&fleet, 1)?;
        fleet.fleet.coordinator.take().context("it runs")?.kill();
        fleet.fleet.start_coordinator()?;
        execute(&mut fleet, "h1", &commands("agent-lost-coordinator.md")?)?;
        let verdict = crate::live_fleet::closed(&fleet)?;
        ensure!(verdict == "cancelled", "verdict {verdict}");
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn live_the_runbook_for_access_works_as_written() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start_coordinator(&[])?;
        execute(&mut fleet, "", &commands("give-access.md")?)?;
        execute(&mut fleet, "", &commands("rotate-the-server-key.md")?)?;
        let people = fleet.ctl_json(&["access", "list", "--json"])?;
        let valid = |p: &&serde_json::Value| p["name"] == "ada" && p["revoked"].is_null();
        let people = people["people"].as_array().context("no list of people")?;
        ensure!(people.iter().filter(|p| p["name"] == "ada").count() == 2, "{people:?}");
        ensure!(!people.iter().any(|p| valid(&p)), "{people:?}");
        fleet.finish()
    };
    check().unwrap();
}

#[test]
fn live_the_runbook_for_upgrading_agents_works_as_written() {
    let check = || -> Result<()> {
        let mut fleet = TestFleet::start(&["h1"])?;
        let installed = fs::read(&fleet.fleet.layout.binaries.agent)?;
        for (folder, more) in [("old", ""), ("new", "another build")] {
            fs::create_dir(fleet.dir.join(folder))?;
            fs::write(fleet.dir.join(folder).join("drums-agent"), [&installed[..], more.as_bytes()].concat())?;
        }
        execute(&mut fleet, "h1", &commands("upgrade-agents.md")?)?;
        let events = fleet.ctl(&["events", "--host", "h1"])?;
        ensure!(events.matches("upgraded").count() == 2, "{events}");
        fleet.finish()
    };
    check().unwrap();
}
