//! The control plane's bench is a program of its own (`infra/bench`): its floors bring dependencies that nothing else
//! here needs. This builds it and what it measures for release, and runs it.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace;

#[derive(clap::Args)]
pub struct ControlPlaneArgs {
    /// Small numbers, for a test of the bench itself
    #[arg(long)]
    quick: bool,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these rows: beats, plan, idle, storm, upload, death, quiet, restart
    #[arg(long, value_name = "ROW", value_delimiter = ',')]
    rows: Vec<String>,
    /// Also write `{"rows": [...]}` here, after each row; rows of a file that is there are kept, or replaced
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave out what the file has already
    #[arg(long, requires = "json")]
    resume: bool,
}

pub fn run(args: &ControlPlaneArgs) -> Result<()> {
    let target = workspace::target_dir()?;
    workspace::run(workspace::cargo().args(["build", "--quiet", "--locked", "--release"]).args([
        "-p",
        "drums-bench",
        "--features",
        "drums-bench/grpc",
        "-p",
        "drums-agent",
        "-p",
        "drums-coordinator",
    ]))?;
    let program = target.join("release/drums-bench");
    let mut command = workspace::command(&program.display().to_string());
    command.arg("control-plane").args(["--seed", &args.seed.to_string()]);
    if args.quick {
        command.arg("--quick");
    }
    if !args.rows.is_empty() {
        command.args(["--rows", &args.rows.join(",")]);
    }
    if args.resume {
        command.arg("--resume");
    }
    if let Some(path) = &args.json {
        command.arg("--json").arg(std::path::absolute(path)?);
    }
    workspace::run(&mut command)
}
