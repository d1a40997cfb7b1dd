//! The operator of the chaos: keeps runs going and cancels some, through `drumsctl`, on a thread of its own, because an
//! answer may take as long as the coordinator stands still.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result};
use drums_infra::fleet::wait_until;
use serde::Serialize;
use serde_json::Value;

/// Runs that are open at once, at most.
const OPEN: usize = 3;
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Longer than any fault of the coordinator. A command that takes longer is killed, and its answer is lost.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the operator did and was told.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Told {
    /// Runs that were answered as made.
    pub made: Vec<String>,
    /// Cancels that were answered as done.
    pub cancelled: Vec<String>,
    /// Commands that got no answer, or an error: the coordinator was away.
    pub unanswered: u64,
    /// The most runs that were seen open at once.
    pub most_open: usize,
}

#[derive(Default)]
struct Shared {
    told: Mutex<Told>,
    /// Drawn numbers of runs to cancel.
    to_cancel: Mutex<Vec<u32>>,
    /// No new runs any more.
    closing: AtomicBool,
    end: AtomicBool,
}

pub struct Operator {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Operator {
    /// Begins to make runs of these experiments, by turns.
    pub fn start(ctl: Ctl, experiments: Vec<String>) -> Self {
        let shared = Arc::<Shared>::default();
        let theirs = shared.clone();
        let thread = std::thread::spawn(move || {
            let mut next = 0;
            while !theirs.end.load(Ordering::Relaxed) {
                if look(&theirs, &ctl, &experiments[next % experiments.len()]) {
                    next += 1;
                }
                wait_until(LOOK_EVERY, || theirs.end.load(Ordering::Relaxed));
            }
        });
        Self { shared, thread: Some(thread) }
    }

    pub fn cancel(&self, number: u32) {
        lock(&self.shared.to_cancel).push(number);
    }

    /// Makes no more runs.
    pub fn close(&self) {
        self.shared.closing.store(true, Ordering::Relaxed);
    }

    pub fn end(mut self) -> Told {
        self.join();
        lock(&self.shared.told).clone()
    }

    fn join(&mut self) {
        self.shared.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.join();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One look at the runs: cancels what shall be cancelled, makes one if there is room. True if one was made.
fn look(shared: &Shared, ctl: &Ctl, experiment: &str) -> bool {
    let answered = |result: Result<Value>| {
        if result.is_err() {
            lock(&shared.told).unanswered += 1;
        }
        result.ok()
    };
    let Some(runs) = answered(ctl.json(&["runs", "--json"])) else { return false };
    let open = open_runs(&runs);
    {
        let mut told = lock(&shared.told);
        told.most_open = told.most_open.max(open.len());
    }
    // One goes on: what is cancelled at once is no test of anything else.
    if open.len() > 1
        && let Some(number) = lock(&shared.to_cancel).pop()
    {
        let run = &open[number as usize % open.len()];
        // Refused when it ends already, which is an answer too.
        if answered(ctl.json(&["cancel", run, "--json"])).is_some() {
            lock(&shared.told).cancelled.push(run.clone());
        }
    }
    if open.len() >= OPEN || shared.closing.load(Ordering::Relaxed) {
        return false;
    }
    match answered(ctl.json(&["run", experiment, "--json"])) {
        Some(view) => {
            lock(&shared.told).made.extend(view["run"].as_str().map(str::to_owned));
            true
        }
        // It may have been made all the same.
        None => false,
    }
}

pub fn open_runs(runs: &Value) -> Vec<String> {
    let list = runs["runs"].as_array().cloned().unwrap_or_default();
    list.iter().filter(|r| r["closed"].is_null()).filter_map(|r| r["run"].as_str().map(str::to_owned)).collect()
}

/// `drumsctl` for one home, with a bound on its time.
#[derive(Clone, Debug)]
pub struct Ctl {
    pub program: PathBuf,
    pub home: PathBuf,
}

impl Ctl {
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.text(arguments)?;
        serde_json::from_str(&text).with_context(|| format!("drumsctl {} printed no JSON", arguments.join(" ")))
    }

    pub fn text(&self, arguments: &[&str]) -> Result<String> {
        let shown = format!("drumsctl {}", arguments.join(" "));
        // Files, not pipes: nobody has to empty them while it runs.
        let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let mut child = Command::new(&self.program)
            .arg("--home")
            .arg(&self.home)
            .args(arguments)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(err.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {shown}"))?;
        let mut status = None;
        wait_until(PATIENCE, || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        });
        let Some(status) = status else {
            let _ = child.kill();
            let _ = child.wait();
            anyhow::bail!("{shown} gave no answer within {} s", PATIENCE.as_secs());
        };
        let (said, complaint) = (read(&mut out)?, read(&mut err)?);
        anyhow::ensure!(status.success(), "{shown} ended with {status}: {}", complaint.trim());
        Ok(said)
    }
}

fn read(file: &mut std::fs::File) -> Result<String> {
    use std::io::{Read as _, Seek as _};
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}
