//! The subject of the disturbance rows, as a process: the real agent's link, told what to do over standard input.
//!
//! ```text
//! quiet MS             declares silence and keeps it; wake-ups of all threads but the one that keeps it
//! beat MS              beats as ever; CPU time of the process
//! create live|closed N creates N processes, with the link connected (in quiet intervals) or gone; without a link each is
//!                      preceded by as long a wait as declaring silence took last, so that the CPUs had slept as long
//! ```

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::{
    arms::ToolPaths,
    engine::{EngineConfig, bench::CreateBench},
    net::{Identity, Link, Net, NetConfig, Threads},
    spool::Spool,
    sys::CgroupLimits,
};
use drums_analysis::stats::median;
use drums_common::digest::Sha256;
use drums_coordinator::clock::SystemClock;
use serde_json::{Value, json};

use crate::{
    agents::preflight,
    home::experiment,
    process::{cpu_ns, serve_lines},
};

const CONNECT: Duration = Duration::from_secs(20);
/// What declaring silence takes, before any was declared.
const DECLARING: Duration = Duration::from_millis(32);
/// What a quiet interval of the creations is declared to last at most.
const CREATION: Duration = Duration::from_secs(5);

struct Subject {
    threads: Threads,
    state: PathBuf,
    agent: PathBuf,
    net: Option<(Net, Link)>,
    bench: Option<CreateBench>,
    /// How long declaring silence took.
    declared: VecDeque<Duration>,
}

pub fn serve(state: &Path, agent: &Path) -> Result<()> {
    let threads = Threads::start()?;
    let mut subject = Subject {
        threads,
        state: state.to_owned(),
        agent: agent.to_owned(),
        net: None,
        bench: None,
        declared: VecDeque::new(),
    };
    subject.link()?;
    let end = serve_lines(|line| subject.answer(line));
    let leaked = subject.bench.take().map(CreateBench::close).unwrap_or_default();
    ensure!(leaked.is_empty(), "could not be undone: {leaked:?}");
    end
}

impl Subject {
    fn answer(&mut self, line: &str) -> Result<Value> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["quiet", ms] => self.quiet(Duration::from_millis(ms.parse()?)),
            ["beat", ms] => self.beat(Duration::from_millis(ms.parse()?)),
            ["create", how, n, ..] => self.create(*how == "live", n.parse()?),
            _ => bail!("{line:?} is nothing to do"),
        }
    }

    /// The link, connected.
    fn link(&mut self) -> Result<Link> {
        if let Some((_, link)) = &self.net {
            return Ok(link.clone());
        }
        let identity = Identity::load(&self.state)?.context("the state folder has no identity")?;
        let any = experiment(900, Vec::new(), 2, 2, 4096)?;
        let facts = preflight(&any, &identity.host, 0).facts;
        let (spool, ..) = Spool::open(&self.state.join("spool"), 0)?;
        let config = NetConfig {
            identity,
            workloads: self.state.join("workloads"),
            build: Sha256::of(b"link"),
            facts,
            clock: Arc::new(SystemClock),
            spool: Arc::new(spool),
            // There is no bucket.
            ca_file: PathBuf::new(),
            disk: self.threads.disk(),
        };
        let entered = self.threads.link().enter();
        let (net, link) = Net::start(config)?;
        drop(entered);
        let deadline = Instant::now() + CONNECT;
        let mut view = link.view();
        while !view.connected {
            ensure!(Instant::now() < deadline, "the link is not connected");
            view = link.wait(view.version, CONNECT);
        }
        self.net = Some((net, link.clone()));
        Ok(link)
    }

    fn quiet(&mut self, period: Duration) -> Result<Value> {
        let link = self.link()?;
        let guard = link.quiet(period + CREATION);
        let (before, cpu) = (switches()?, cpu_ns(std::process::id())?);
        keep_still(period);
        let (after, spent) = (switches()?, cpu_ns(std::process::id())? - cpu);
        ensure!(!guard.overrun(), "the quiet interval overran its bound");
        drop(guard);
        Ok(json!({ "wakeups": after - before, "cpu_us": spent / 1_000 }))
    }

    fn beat(&mut self, period: Duration) -> Result<Value> {
        self.link()?;
        let cpu = cpu_ns(std::process::id())?;
        keep_still(period);
        Ok(json!({ "cpu_us": (cpu_ns(std::process::id())? - cpu) / 1_000 }))
    }

    fn create(&mut self, live: bool, n: u32) -> Result<Value> {
        if self.bench.is_none() {
            let config =
                EngineConfig { state: self.state.join("engine"), tools: ToolPaths::default(), scratch_bytes: 64 << 20 };
            let limits = CgroupLimits { cpu_milli: 1_000, cpus: vec![0], memory_bytes: 256 << 20, pids: 64 };
            self.bench = Some(CreateBench::open(&config, &self.agent, self.state.clone(), limits)?);
        }
        let link = if live {
            Some(self.link()?)
        } else {
            if let Some((net, _)) = self.net.take() {
                self.threads.link().block_on(net.finish(CONNECT));
            }
            None
        };
        let bench = self.bench.as_mut().context("it was opened just now")?;
        let mut times = Vec::new();
        for _ in 0..n {
            let began = Instant::now();
            let guard = link.as_ref().map(|l| l.quiet(CREATION));
            match &guard {
                Some(_) => self.declared.push_back(began.elapsed()),
                None => keep_still(self.declared.pop_front().unwrap_or(DECLARING)),
            }
            times.push(bench.bare()?.duration_ms());
            drop(guard);
        }
        self.declared.truncate(n as usize);
        Ok(json!({ "median_ms": median(&times) }))
    }
}

/// How often all other threads of this process were given a CPU so far.
fn switches() -> Result<u64> {
    let own = nix::unistd::gettid().to_string();
    let mut sum = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        if task.file_name().to_string_lossy() == own {
            continue;
        }
        let status = fs::read_to_string(task.path().join("status"))?;
        let lines = status.lines().filter_map(|l| l.split_once("ctxt_switches:"));
        sum += lines.filter_map(|(_, n)| n.trim().parse::<u64>().ok()).sum::<u64>();
    }
    Ok(sum)
}

/// One long wait: a poll would be what is measured.
#[allow(clippy::disallowed_methods)] // nothing is waited for but the end of the period
fn keep_still(period: Duration) {
    std::thread::sleep(period);
}
