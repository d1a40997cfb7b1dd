//! The project's own tasks. Each is a subcommand; what a task knows lives in its own module.

mod aa;
mod bench;
mod chaos;
mod check;
mod demo;
mod fault_windows;
mod image;
mod kill_matrix;
mod rows;
mod sim;
mod skips;
mod workspace;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the DrumsBench workspace", max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything that is checked without running tests: formatting, clippy, lints, documentation, tidiness
    Check(check::CheckArgs),
    /// Scan dependencies for advisories (needs cargo-deny and the network; not part of `check`)
    Advisories,
    /// Name and count the skips of the last nextest run; fails on one that this project does not allow
    Skips,
    /// Run EXP-028 on this machine: coordinator and two agents in namespaces, results under target/demo
    Demo(demo::DemoArgs),
    /// Remove what crashed demos left behind
    DemoClean,
    /// Simulate A/A experiments: how often does the estimator call identical arms different?
    Aa(aa::AaArgs),
    /// Our costs against peers', interleaved on this machine
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
    },
    /// Do faults to a coordinator and its agents at work, by a seed, and look whether every promise held
    Chaos(chaos::ChaosArgs),
    /// Kill the agent, its shim and tools at every fault window of every arm; is everything gone, and only ours?
    FaultWindows(fault_windows::FaultWindowsArgs),
    /// Which layer ends a paid host when which faults strike, and when? Fails where one is not dead within its bound
    KillMatrix(kill_matrix::KillMatrixArgs),
    /// Simulate hours of coordinator, agents and network by seed, every invariant checked after every event
    Sim(sim::SimArgs),
    /// Build a workload tree and its manifest, or the image of a server
    Image {
        #[command(subcommand)]
        recipe: Recipe,
    },
}

#[derive(Subcommand)]
enum Recipe {
    /// busybox and drums-guest
    Minimal {
        /// Folder to write the tree and its manifest into
        #[arg(long)]
        out: PathBuf,
    },
    /// A machine of a cloud: Debian with systemd and cloud-init, to be booted by QEMU (as root; some minutes, once)
    Server {
        /// Folder of the disk, the kernel, the initrd and server.json
        #[arg(long)]
        out: PathBuf,
    },
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
        Task::Check(args) => check::run(&args)?,
        Task::Advisories => check::advisories()?,
        Task::Skips => skips::run()?,
        Task::Demo(args) => return demo::demo(&args),
        Task::DemoClean => demo::clean()?,
        Task::Aa(args) => aa::run(&args)?,
        Task::Chaos(args) => chaos::run(&args)?,
        Task::Sim(args) => sim::run(&args)?,
        Task::KillMatrix(args) => kill_matrix::run(&args)?,
        Task::FaultWindows(args) => fault_windows::run(&args)?,
        Task::Bench { bench } => bench::run(&bench)?,
        Task::Image { recipe: Recipe::Server { out } } => println!("{}  {}", image::server(&out)?, out.display()),
        Task::Image { recipe: Recipe::Minimal { out } } => println!("{}  {}", image::minimal(&out)?, out.display()),
    }
    Ok(ExitCode::SUCCESS)
}
