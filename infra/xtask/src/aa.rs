//! `cargo xtask aa`: does the estimator call identical arms different as often as its level says?

use std::path::PathBuf;

use anyhow::Result;
use drums_analysis::simulate::{AaSimulated, aa_simulated};
use serde::Serialize;

use crate::rows;

#[derive(clap::Args)]
pub struct AaArgs {
    /// How many A/A experiments to simulate, each of skewed data with block effects, drift and a slower first position
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    simulated: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write `{"rows": [...]}` here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    seed: u64,
    experiments: usize,
    /// Experiments whose 95 % interval excludes 1 although the arms are identical.
    excluded: usize,
    nominal: f64,
}

pub fn run(args: &AaArgs) -> Result<()> {
    let AaSimulated { experiments, excluded } = aa_simulated(args.simulated as usize, args.seed);
    println!(
        "{excluded} of {experiments} simulated A/A experiments exclude 1 at 95 % (seed {}; 5 % would be {})",
        args.seed,
        experiments / 20
    );
    if let Some(path) = &args.json {
        rows::write(path, &[Row { name: "A/A simulated", seed: args.seed, experiments, excluded, nominal: 0.05 }])?;
    }
    Ok(())
}
