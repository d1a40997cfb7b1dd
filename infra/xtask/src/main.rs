//! The project's own tasks. Each is a subcommand; what a task knows lives in its own module.

mod check;
mod skips;
mod workspace;

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
}

fn main() -> std::process::ExitCode {
    let result = match Args::parse().task {
        Task::Check(args) => check::run(&args),
        Task::Advisories => check::advisories(),
        Task::Skips => skips::run(),
    };
    report(result)
}

fn report(result: Result<()>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
