//! The command line of a host's agent. The shim is decided on first: it must be the only thing in its process.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use drums_agent::{arms::ToolPaths, engine::trial, shim};

/// Host agent of DrumsBench.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make, reset and destroy sessions of one arm by hand, and see where the time goes
    Try(trial::TryArgs),
}

fn main() -> ExitCode {
    // Before any thread or runtime can exist.
    if std::env::args_os().nth(1).is_some_and(|a| a == "shim") {
        return shim::serve();
    }
    drums_common::telemetry::init(false);
    match Cli::parse().command {
        Command::Try(args) => {
            let tools = ToolPaths { criu: std::env::var_os("DRUMS_CRIU").map(Into::into), ..ToolPaths::default() };
            trial::main(&args, tools)
        }
    }
}
