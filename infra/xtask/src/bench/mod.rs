//! `cargo xtask bench`: our costs against peers' on this machine, interleaved.

mod create;
mod series;

use anyhow::Result;

#[derive(clap::Subcommand)]
pub enum Bench {
    /// Creating a process: bare against `unshare` and `bwrap`, full against `runc run`
    Create(create::CreateArgs),
}

pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Create(args) => create::run(args),
    }
}
