//! Simulated hours by hand: `cargo xtask sim`.

use std::process::ExitCode;

use clap::Parser;
use drums_sim::{
    message::{self, Setup},
    pool, quic,
};

#[derive(Parser)]
#[command(about = "Simulate hours of coordinator, agents and network; every invariant is checked after every event")]
struct Args {
    /// Seed of the first world; the others follow it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Simulated hours altogether
    #[arg(long, default_value_t = 1_000)]
    hours: u64,
    /// Hours of each world
    #[arg(long, default_value_t = pool::WORLD_HOURS, value_parser = clap::value_parser!(u64).range(1..))]
    world_hours: u64,
    /// How many worlds, instead of so many hours
    #[arg(long)]
    worlds: Option<u64>,
    /// With quinn in memory, instead of on the message network
    #[arg(long)]
    quic: bool,
    /// So many host-hours of the lease cores alone, instead
    #[arg(long)]
    host_hours: Option<u64>,
    /// Print every event (use it with --worlds 1)
    #[arg(long)]
    aloud: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(hours) = args.host_hours {
        return match pool::host_hours(args.seed, hours) {
            Ok(judged) => {
                println!("{hours} host-hours: {judged:?}; nobody judged wrongly");
                ExitCode::SUCCESS
            }
            Err(broken) => {
                println!("BROKEN {broken}");
                ExitCode::FAILURE
            }
        };
    }
    let worlds = args.worlds.unwrap_or(args.hours.div_ceil(args.world_hours));
    let setups = (args.seed..args.seed + worlds)
        .map(|seed| Setup { aloud: args.aloud, ..Setup::of_seed(seed, args.world_hours) })
        .collect();
    let report = pool::run(setups, if args.quic { quic::run } else { message::run });
    println!("{report}");
    for broken in &report.broken {
        println!("\nBROKEN {broken}");
    }
    if report.broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
