//! `cargo xtask sim`: more simulated hours than a test run has, or one failing seed aloud. The simulator is a package of
//! its own, so that nothing else is built with it.

use anyhow::Result;

use crate::workspace;

#[derive(clap::Args)]
pub struct SimArgs {
    /// Seed of the first world; the others follow it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Simulated hours altogether
    #[arg(long, default_value_t = 1_000)]
    hours: u64,
    /// With quinn in memory, instead of on the message network
    #[arg(long)]
    quic: bool,
    /// Further arguments of the simulator, such as --worlds 1 --aloud
    #[arg(last = true)]
    further: Vec<String>,
}

pub fn run(args: &SimArgs) -> Result<()> {
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--quiet", "--locked", "--package", "drums-sim", "--"]);
    cargo.args(["--seed", &args.seed.to_string(), "--hours", &args.hours.to_string()]);
    cargo.args(args.quic.then_some("--quic")).args(&args.further);
    workspace::run(&mut cargo)
}
