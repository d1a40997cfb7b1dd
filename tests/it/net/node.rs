//! A coordinator's process, with its home, and what a test writes and reads through it.

use std::{
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use drums_common::{
    clock::Micros,
    ids::{Generation, RunId},
};
use drums_infra::fleet::wait_until;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::fake::{Agent, log};

pub const PATIENCE: Duration = Duration::from_secs(60);

/// A home, and the process while it runs.
pub struct Node {
    pub home: PathBuf,
    pub programs: PathBuf,
    pub child: Option<Child>,
}

impl Node {
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("drumsctl"));
        command.arg("--home").arg(&self.home).args(arguments).stdin(Stdio::null()).env("NO_COLOR", "1");
        command
    }

    pub fn said(&self, arguments: &[&str]) -> String {
        let output = self.ctl(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "drumsctl {}: {}: {error}", arguments.join(" "), output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.said(arguments)).unwrap()
    }

    pub fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.home.join("log")).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(self.programs.join("drums-coordinator")).arg("--home");
        command.arg(&self.home).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    /// What a coordinator says of itself: that it serves, or that another one is active.
    pub fn until(&self, active: bool) {
        let mut last = String::new();
        let held = wait_until(PATIENCE, || {
            let output = self.ctl(&["fleet"]);
            last = String::from_utf8_lossy(&output.stderr).into_owned();
            output.status.success() == active && (active || last.contains("stands by"))
        });
        let log = std::fs::read_to_string(self.home.join("log")).unwrap_or_default();
        assert!(
            held,
            "{} is not {}: {last}\n{log}",
            self.home.display(),
            if active { "active" } else { "standing by" }
        );
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.as_ref().unwrap().id().cast_signed()), signal).unwrap();
    }

    pub fn ended(&mut self) -> ExitStatus {
        let child = self.child.as_mut().unwrap();
        let mut status = None;
        wait_until(PATIENCE, || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.expect("it ends by itself")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The lines that the agent wrote, as the coordinator has them.
pub fn lines(node: &Node, run: RunId) -> Vec<String> {
    let output = node.ctl(&["logs", &run.to_string(), "--json"]);
    let Ok(Value::Array(rows)) = serde_json::from_slice(&output.stdout) else { return Vec::new() };
    let of_agent = rows.iter().filter(|r| r["source"] == "h1" && r["kind"] == "info");
    of_agent.map(|r| r["text"].as_str().unwrap_or_default().replace("test: ", "")).collect()
}

pub fn write(agent: &Agent, run: RunId, numbers: std::ops::Range<u32>) {
    let spool = agent.run_spool(run);
    let mut writer = spool.writer().unwrap();
    for n in numbers {
        writer.append(Generation(1), Micros(i64::from(n)), log(&n.to_string())).unwrap();
    }
    writer.commit().unwrap();
}

pub fn wanted(n: u32) -> Vec<String> {
    (0..n).map(|i| i.to_string()).collect()
}
