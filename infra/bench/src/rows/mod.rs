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
use drums_common::lease::LeaseTimes;
use tokio::time::sleep;

use crate::{
    home::{Coordinator, Home, free_address},
    process::{Helper, cpu_ns},
    row::{Reading, Row},
};

/// How much of everything.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub agents: usize,
    pub rounds: usize,
    /// For rows whose one round takes seconds.
    pub long_rounds: usize,
    /// Of a block of heartbeats.
    pub period: Duration,
    pub deaths: usize,
    pub quick: bool,
}

impl Size {
    pub const FULL: Self =
        Self { agents: 1_000, rounds: 20, long_rounds: 6, period: Duration::from_secs(2), deaths: 20, quick: false };
    /// For tests: does everything once over, and proves nothing.
    pub const QUICK: Self =
        Self { agents: 40, rounds: 4, long_rounds: 4, period: Duration::from_millis(300), deaths: 2, quick: true };
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
/// Between blocks: acknowledgements on their way, timers that are due.
const SETTLE: Duration = Duration::from_millis(300);

pub const NAMES: [&str; 8] = ["beats", "plan", "idle", "storm", "upload", "death", "quiet", "restart"];

impl Bench {
    /// The rows with these names, in the order of `NAMES`.
    pub async fn run(&self, names: &[String], mut show: impl FnMut(&Row)) -> Result<Vec<Row>> {
        let mut all = Vec::new();
        for name in NAMES.iter().filter(|n| names.iter().any(|wanted| wanted == *n)) {
            let rows = self.one(name).await.with_context(|| format!("the row {name} could not be measured"))?;
            rows.iter().for_each(&mut show);
            all.extend(rows);
        }
        Ok(all)
    }

    async fn one(&self, name: &str) -> Result<Vec<Row>> {
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
        }?;
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        Ok(rows)
    }

    fn coordinator(&self) -> PathBuf {
        self.programs.join("drums-coordinator")
    }

    fn home(
        &self,
        dir: &Path,
        leases: LeaseTimes,
        experiments: &[drums_common::experiment::Experiment],
    ) -> Result<Home> {
        Home::make(&dir.join("home"), &self.coordinator(), self.size.agents, leases, experiments)
    }
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

async fn settle() {
    sleep(SETTLE).await;
}

/// Cancels a run and waits until it is closed.
async fn end_run(coordinator: &Coordinator, run: drums_common::ids::RunId) -> Result<()> {
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
