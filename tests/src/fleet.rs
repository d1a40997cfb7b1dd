//! The fleet under test: the real daemons in namespaces, in folders of their own, with short leases; at the end nothing
//! may be left of it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use drums_infra::{
    fleet::{Binaries, Fleet, Layout, wait_until},
    leakgate::{self, Scope, Snapshot},
};
use serde_json::Value;

/// Beats four times a second and a life of 12 s: what takes minutes in the field takes seconds here.
pub const SHORT_LEASES: &str =
    "[leases]\nbeat_ms = 250\ndispatch_ms = 2000\nlife_ms = 12000\nsilent_ms = 1000\nquiet_slack_ms = 2500\n";

/// Where the tools are installed once for all tests and demos of a machine.
pub const TOOLS: &str = "/var/lib/drums-tools";

#[derive(Debug)]
pub struct TestFleet {
    pub fleet: Fleet,
    pub dir: PathBuf,
    before: Snapshot,
    // Removed last, and only when the test passed: logs of a failure are kept.
    keep: Option<tempfile::TempDir>,
}

impl TestFleet {
    /// Builds, installs the tools, makes the workload, and starts a coordinator with one agent per host.
    pub fn start(hosts: &[&str]) -> Result<Self> {
        Self::start_logging(hosts, None)
    }

    /// As `start`; the daemons log what `filter` says.
    pub fn start_logging(hosts: &[&str], filter: Option<&str>) -> Result<Self> {
        let mut me = Self::coordinator(hosts, filter, |_| String::new())?;
        for host in hosts {
            me.fleet.enrol(host)?;
        }
        Ok(me)
    }

    /// As `start`, with a folder as bucket, `bucket` of the test's folder.
    pub fn start_with_bucket(hosts: &[&str]) -> Result<Self> {
        let bucket = |dir: &Path| format!("[bucket]\nurl = \"{}\"\n", dir.join("bucket").display());
        let mut me = Self::coordinator(hosts, None, bucket)?;
        for host in hosts {
            me.fleet.enrol(host)?;
        }
        Ok(me)
    }

    /// As `start`, with hosts that nobody has added yet.
    pub fn start_coordinator(hosts: &[&str]) -> Result<Self> {
        Self::coordinator(hosts, None, |_| String::new())
    }

    /// `more` is what the coordinator's configuration says beside short leases, for the test's folder.
    fn coordinator(hosts: &[&str], filter: Option<&str>, more: impl FnOnce(&Path) -> String) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "live tests need root: they make namespaces and cgroups for real");
        let binaries = Binaries::beside(&crate::programs()?);
        setup(&binaries.agent)?;
        let image = crate::image()?;
        let temporary = tempfile::Builder::new().prefix("drums-it-").tempdir()?;
        let dir = temporary.path().to_owned();
        let before = Snapshot::take()?;
        let layout = Layout {
            binaries,
            home: dir.join("home"),
            states: dir.join("agents"),
            logs: dir.join("logs"),
            tools: TOOLS.into(),
            coordinator_config: SHORT_LEASES.to_owned() + &more(&dir),
            log: filter.map(str::to_owned),
        };
        let mut fleet = Fleet::prepare(layout, hosts)?;
        fleet.start_coordinator()?;
        let mut me = Self { fleet, dir, before, keep: Some(temporary) };
        me.keep_on_failure();
        me.ctl(&["workload", "add", image.to_str().context("the image's path is not UTF-8")?, "--name", "minimal"])?;
        Ok(me)
    }

    pub fn ctl(&self, arguments: &[&str]) -> Result<String> {
        Ok(self.fleet.ctl(arguments)?)
    }

    pub fn ctl_json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.ctl(arguments)?;
        serde_json::from_str(&text)
            .with_context(|| format!("`drumsctl {}` printed no JSON: {text}", arguments.join(" ")))
    }

    /// Writes a spec and registers it.
    pub fn register(&self, spec: &str) -> Result<()> {
        let path = self.dir.join("spec.toml");
        fs::write(&path, spec)?;
        self.ctl(&["register", path.to_str().context("not UTF-8")?])?;
        Ok(())
    }

    /// Waits for a condition over what the fleet shows; an error says what it showed last.
    pub fn wait(
        &self,
        what: &str,
        patience: Duration,
        mut holds: impl FnMut(&Self) -> Result<(bool, String)>,
    ) -> Result<()> {
        let mut last = String::new();
        let held = wait_until(patience, || match holds(self) {
            Ok((held, state)) => {
                last = state;
                held
            }
            Err(e) => {
                last = format!("{e:#}");
                false
            }
        });
        ensure!(held, "not seen within {} s: {what}; last: {last}; logs in {}", patience.as_secs(), self.dir.display());
        Ok(())
    }

    /// Ends everything in order, audits every agent, and holds the machine against what it was before.
    pub fn finish(mut self) -> Result<()> {
        self.end()?;
        let mut names = vec![self.dir.display().to_string()];
        names.extend(self.fleet.installations());
        let left = leakgate::settle(&self.before, &Scope::from_env(names), Duration::from_secs(15))?;
        ensure!(left.is_empty(), "left on the machine: {left:#?}");
        if let Some(keep) = self.keep.take() {
            fs::remove_dir_all(keep.keep())?;
        }
        Ok(())
    }

    /// Daemons first, then what their ledgers say.
    fn end(&mut self) -> Result<()> {
        let killed = self.fleet.stop();
        let mut said = Vec::new();
        for host in &self.fleet.hosts {
            if !host.state.exists() {
                continue;
            }
            let audit = self.fleet.audit(&host.name)?;
            if !audit.status.success() {
                let text =
                    format!("{}{}", String::from_utf8_lossy(&audit.stdout), String::from_utf8_lossy(&audit.stderr));
                said.push(format!("the audit of {} ended with {}: {text}", host.name, audit.status));
            }
        }
        ensure!(killed.is_empty(), "had to be killed: {killed:?}; logs in {}", self.dir.display());
        ensure!(said.is_empty(), "{}", said.join("; "));
        Ok(())
    }

    /// From here on the folder outlives the test unless `finish` removes it.
    fn keep_on_failure(&mut self) {
        if let Some(temporary) = self.keep.as_mut() {
            temporary.disable_cleanup(true);
        }
    }
}

impl Drop for TestFleet {
    /// A test that failed half-way still leaves nothing running or mounted; its logs are kept.
    fn drop(&mut self) {
        if self.keep.is_some()
            && let Err(e) = self.end()
        {
            eprintln!("after the failure: {e:#}");
        }
    }
}

fn setup(agent: &Path) -> Result<()> {
    let output = Command::new(agent).args(["setup", "--tools", TOOLS]).output().context("cannot start drums-agent")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`drums-agent setup` ended with {}: {said}", output.status);
    Ok(())
}
