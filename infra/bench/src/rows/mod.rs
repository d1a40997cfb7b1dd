//! What is measured. Every row interleaves the coordinator with its floors, block by block, in a seeded random order.

mod beats;
mod death;
mod idle;
mod plan;
mod quiet;
pub mod restart;
mod storm;
mod upload;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use drums_common::{digest::Sha256, experiment::Experiment, ids::RunId, lease::LeaseTimes};
use serde::Serialize;
use tokio::time::sleep;

use crate::{
    home::{Coordinator, Home, free_address},
    process::{Helper, cpu_ns},
    row::{Reading, Row},
};

/// How much of everything.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Size {
    pub agents: usize,
    /// Of what takes seconds.
    pub rounds: usize,
    /// Of what begins with fresh processes each time.
    pub fresh_rounds: usize,
    /// The first rounds of `plan` have OpenSSH in them, with so many hosts.
    pub ssh_rounds: usize,
    pub ssh_hosts: u8,
    /// Of a block of heartbeats.
    pub period_ms: u64,
    pub deaths: usize,
    pub kills: usize,
    /// How long a block takes in the runs that a kill disturbs.
    pub block_ms: u64,
    /// Of evidence from each agent.
    pub upload_bytes: usize,
    /// How many quiet intervals, and how long each.
    pub silences: usize,
    pub quiet_ms: u64,
    /// Rounds of the arm's latency, and how many creations make one reading of it.
    pub latency_rounds: usize,
    pub creations: u32,
    /// Between blocks: acknowledgements on their way, timers that are due.
    pub settle_ms: u64,
    /// A missing OpenSSH is no reason to fail.
    pub quick: bool,
}

impl Size {
    pub const FULL: Self = Self {
        agents: 1_000,
        rounds: 20,
        fresh_rounds: 12,
        ssh_rounds: 8,
        ssh_hosts: 50,
        period_ms: 2_000,
        deaths: 20,
        kills: 3,
        block_ms: 5_000,
        upload_bytes: 1 << 20,
        silences: 10,
        quiet_ms: 2_000,
        // By the spread of 200 (0.087 of a ratio's logarithm): an equivalence within 2 % that is true is shown 99 times of 100.
        latency_rounds: 360,
        creations: 10,
        settle_ms: 300,
        quick: false,
    };
    /// For tests: does everything over, as often as an interval needs, and proves nothing.
    pub const QUICK: Self = Self {
        agents: 20,
        rounds: 4,
        fresh_rounds: 4,
        ssh_rounds: 4,
        ssh_hosts: 2,
        period_ms: 100,
        deaths: 1,
        kills: 1,
        block_ms: 700,
        upload_bytes: 128 << 10,
        silences: 2,
        quiet_ms: 300,
        latency_rounds: 4,
        creations: 3,
        settle_ms: 20,
        quick: true,
    };

    fn settle(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }
}

/// What rows need.
pub struct Bench {
    pub size: Size,
    pub seed: u64,
    pub dir: PathBuf,
    pub programs: PathBuf,
}

/// A row may take this long for one step of one block; a step that does not come by then never will.
const PATIENCE: Duration = Duration::from_secs(120);

pub const NAMES: [&str; 8] = ["beats", "plan", "idle", "storm", "upload", "death", "quiet", "restart"];

impl Bench {
    /// Measures one of `NAMES`.
    pub async fn measure(&self, name: &str) -> Result<Vec<Row>> {
        // Each row has its own home: nothing that one left in the store counts in another.
        let dir = self.dir.join(name);
        let rows = match name {
            "beats" => beats::rows(self, &dir).await,
            "plan" => plan::rows(self, &dir).await,
            "idle" => idle::rows(self, &dir).await,
            "storm" => storm::rows(self, &dir).await,
            "upload" => upload::rows(self, &dir).await,
            "death" => death::rows(self, &dir).await,
            "quiet" => quiet::rows(self, &dir).await,
            _ => restart::rows(self, &dir).await,
        };
        let rows = rows.with_context(|| format!("the row {name} could not be measured"))?;
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        Ok(rows)
    }

    /// What is measured.
    pub fn build(&self) -> Result<String> {
        let path = self.coordinator();
        let program = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Sha256::of(&program).short())
    }

    async fn settle(&self) {
        sleep(self.size.settle()).await;
    }

    fn coordinator(&self) -> PathBuf {
        self.programs.join("drums-coordinator")
    }

    fn home(&self, dir: &Path, leases: LeaseTimes, experiments: &[Experiment]) -> Result<Home> {
        Home::make(&dir.join("home"), &self.coordinator(), self.size.agents, leases, experiments)
    }
}

/// How far a row is: it takes minutes.
fn told(row: &str, round: usize, of: usize, arms: &[&str], readings: &[Vec<Reading>]) {
    let last = arms.iter().zip(readings).filter_map(|(arm, r)| Some(format!("{arm} {:.3}", r.last()?.value)));
    eprintln!("{row}: {} of {of}: {}", round + 1, last.collect::<Vec<_>>().join(", "));
}

/// Bare quinn beside a home: the same certificates and settings.
struct Floor {
    helper: Helper,
    address: std::net::SocketAddr,
}

impl Floor {
    fn start(home: &Home, database: &Path) -> Result<Self> {
        let address = free_address()?;
        let (home, database) = (home.dir.display().to_string(), database.display().to_string());
        let helper = Helper::start(&["floor-quic", &home, &address.to_string(), &database])?;
        Ok(Self { helper, address })
    }
}

/// CPU time of a server over a piece of work.
struct Cpu {
    pid: u32,
    began: u64,
}

impl Cpu {
    fn of(pid: u32) -> Result<Self> {
        Ok(Self { pid, began: cpu_ns(pid)? })
    }

    /// Microseconds per operation so far.
    #[allow(clippy::cast_precision_loss)] // nanoseconds of one block
    fn us_per(&self, operations: f64) -> Result<f64> {
        Ok((cpu_ns(self.pid)? - self.began) as f64 / 1e3 / operations)
    }
}

/// Operations per second of the server's CPU.
fn per_core(cpu_us: f64) -> Reading {
    Reading { value: 1e6 / cpu_us, cpu_us }
}

/// Cancels a run and waits until it is closed.
async fn end_run(coordinator: &Coordinator, run: RunId) -> Result<()> {
    coordinator.cancel(run)?;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let view = coordinator.api("GET", &format!("runs/{run}"), None)?;
        let unreported = view["unreported"].as_array().map_or(0, Vec::len);
        if !view["closed"].is_null() && unreported == 0 {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < deadline, "{run} was cancelled and is not closed: {view}");
        sleep(Duration::from_millis(50)).await;
    }
}
