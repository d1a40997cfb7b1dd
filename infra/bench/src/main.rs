//! The bench's command line. `cargo xtask bench control-plane` builds everything for release and calls this.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use drums_agent::net::Identity;
use drums_bench::{
    agents::{Host, Pace, Swarm},
    floor, home, link,
    process::serve_lines,
    results::Results,
    rows::{
        Bench, NAMES, Size,
        restart::{self, Scale},
    },
};
use serde_json::{Value, json};

#[derive(Parser)]
#[command(
    name = "drums-bench",
    about = "Our control plane beside its floors, interleaved on this machine",
    max_term_width = 110
)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Every row, or those that are named
    ControlPlane {
        /// Small numbers, for a test of the bench itself
        #[arg(long)]
        quick: bool,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Instead of a thousand
        #[arg(long)]
        agents: Option<usize>,
        /// Rounds of the short rows
        #[arg(long)]
        rounds: Option<usize>,
        /// Only these rows
        #[arg(long = "rows", value_name = "ROW", value_delimiter = ',', value_parser = NAMES)]
        only: Vec<String>,
        /// Also write `{"rows": [...]}` here, after each row; rows of a file that is there are kept, or replaced
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Leave out what the file has already
        #[arg(long, requires = "json")]
        resume: bool,
        /// Folder of drums-coordinator and drums-agent; by default this program's own
        #[arg(long, value_name = "DIR")]
        programs: Option<PathBuf>,
    },
    /// Kill a coordinator under load; say how long it took until all was as before
    Restart {
        #[arg(long, default_value_t = 1_000)]
        agents: usize,
        #[arg(long, default_value_t = 10)]
        runs: usize,
        #[arg(long, default_value_t = 1)]
        times: usize,
    },
    #[command(hide = true)]
    FloorQuic { home: PathBuf, address: SocketAddr, database: PathBuf },
    #[command(hide = true)]
    FloorUdp { address: SocketAddr },
    #[cfg(feature = "grpc")]
    #[command(hide = true)]
    FloorGrpc { address: SocketAddr },
    /// One simulated agent with a state folder
    #[command(hide = true)]
    Agent { state: PathBuf, machine: u32 },
    #[command(hide = true)]
    Link { state: PathBuf, agent: PathBuf },
}

fn main() -> ExitCode {
    match perform(Args::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<ExitCode> {
    match task {
        Task::ControlPlane { quick, seed, agents, rounds, only, json, resume, programs } => {
            let mut size = if quick { Size::QUICK } else { Size::FULL };
            size.agents = agents.unwrap_or(size.agents);
            size.rounds = rounds.unwrap_or(size.rounds);
            let temporary = tempfile::Builder::new().prefix("drums-bench-").tempdir()?;
            let programs = programs.map_or_else(own_folder, Ok)?;
            let bench = Bench { size, seed, dir: temporary.path().to_owned(), programs };
            let mut results = Results::open(json, json!({ "seed": seed, "size": size }))?;
            allow_many_files()?;
            let (runtime, build) = (runtime()?, bench.build()?);
            let wanted = |name: &str| only.is_empty() || only.iter().any(|n| n == name);
            for name in NAMES.into_iter().filter(|n| wanted(n)) {
                if resume && results.has(name) {
                    eprintln!("{name}: measured before");
                    continue;
                }
                let rows = runtime.block_on(bench.measure(name))?;
                rows.iter().for_each(|row| println!("{}", row.in_words()));
                results.put(name, &build, &rows)?;
            }
            println!("{}", results.in_words());
        }
        Task::Restart { agents, runs, times } => {
            allow_many_files()?;
            let temporary = tempfile::Builder::new().prefix("drums-bench-").tempdir()?;
            let scale = Scale { agents, runs, blocks: 10, block: Duration::from_secs(5) };
            let program = own_folder()?.join("drums-coordinator");
            for back in runtime()?.block_on(restart::kill(temporary.path(), &program, scale, times, false))? {
                println!(
                    "it answers after {:.3} s, all agents are connected after {:.3} s, all runs go on after {:.3} s",
                    back.answers.as_secs_f64(),
                    back.connected.as_secs_f64(),
                    back.going_on.as_secs_f64()
                );
            }
        }
        Task::FloorQuic { home, address, database } => floor::quic::serve(&home, address, &database)?,
        Task::FloorUdp { address } => floor::udp::serve(address)?,
        #[cfg(feature = "grpc")]
        Task::FloorGrpc { address } => floor::grpc::serve(address)?,
        Task::Agent { state, machine } => agent(&state, machine)?,
        Task::Link { state, agent } => link::serve(&state, &agent)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

fn own_folder() -> Result<PathBuf> {
    let me = std::env::current_exe().context("cannot ask for this program's own path")?;
    Ok(me.parent().context("this program lies in no folder")?.to_owned())
}

/// A thousand agents have a thousand sockets, and so have the floors' clients.
fn allow_many_files() -> Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    const WANTED: u64 = 16_384;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    ensure!(hard >= WANTED, "this process may open {hard} files, and the bench needs {WANTED}: raise `ulimit -Hn`");
    setrlimit(Resource::RLIMIT_NOFILE, WANTED.max(hard.min(65_536)), hard)
        .context("cannot raise the limit of open files")
}

fn agent(state: &Path, machine: u32) -> Result<()> {
    let identity = Identity::load(state)?.context("the state folder has no identity")?;
    let address = identity.addresses.first().context("the identity names no coordinator")?;
    let coordinator: SocketAddr = format!("{}:{}", address.host, address.agents).parse()?;
    let any = home::experiment(900, Vec::new(), 2, 2, 4096)?;
    let runtime = runtime()?;
    let _entered = runtime.enter();
    let swarm = Swarm::start(vec![Host { identity, machine }], coordinator, &any, Pace::default())?;
    runtime.block_on(swarm.connected(Duration::from_secs(60)))?;
    serve_lines(|_| Ok(Value::Null))
}
