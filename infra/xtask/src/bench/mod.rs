//! `cargo xtask bench`: our costs against peers' on this machine, interleaved.

mod control_plane;
mod create;
mod series;

use anyhow::Result;

#[derive(clap::Subcommand)]
pub enum Bench {
    /// Creating a process: bare against `unshare` and `bwrap`, full against `runc run`
    Create(create::CreateArgs),
    /// The coordinator under a thousand agents, against bare quinn, raw UDP, tonic and OpenSSH
    ControlPlane(control_plane::ControlPlaneArgs),
}

pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Create(args) => create::run(args),
        Bench::ControlPlane(args) => control_plane::run(args),
    }
}
