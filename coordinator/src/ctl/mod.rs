//! `drumsctl`: the operator's words.
//!
//! Speaks the API over the home's unix socket or over HTTPS, never the home's files (`init`, `doctor`, `backup` and `access
//! rotate-server` excepted: they make, look at and copy a home, and give it a key). `sweep` and `host
//! provision` speak to AWS and need neither home nor coordinator. Each command says on an error what was
//! attempted, why it failed and what to do next; exit codes are for scripts.

mod access;
mod aws;
mod client;
mod error;
mod events;
mod experiments;
mod fleet;
mod home;
mod output;
mod place;
mod provision;
mod results;
mod runs;
mod server;
mod sweep;
mod verify;
mod watch;
mod workloads;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use drums_common::{note, say};

pub use client::{ApiAddress, Client, Target};
pub use error::CtlError;

const AFTER_HELP: &str = "\
Example: drumsctl --home /var/lib/drums init && drums-coordinator --home /var/lib/drums

Exit codes: 0 done, or verdict pass; 1 failed; 2 bad input, nothing was recorded; 3 the coordinator cannot be reached;
verdicts: 10 fail, 11 undecided, 12 invalid, 13 incomplete, 14 lost, 15 cancelled; 20 a sweep that missed its canary;
130 detached by Ctrl-C; 141 nobody read the answer.
With --json the last line of standard error is {\"error\": {\"code\", \"message\", \"help\", \"exit\"}} unless all went well.
Times are UTC. NO_COLOR is honoured.";

#[derive(Debug, Parser)]
#[command(
    name = "drumsctl",
    about = "Compare sandboxes for computer-use agents: register, run, watch, report, verify",
    after_help = AFTER_HELP,
    disable_version_flag = true,
    max_term_width = 120
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Print the version and the digest of this build.
    #[arg(long, short = 'V')]
    pub version: bool,
}

#[derive(Clone, Debug, Args)]
pub struct Global {
    /// The coordinator's home; its unix socket is spoken to.
    #[arg(long, global = true, env = "DRUMS_HOME", default_value = crate::config::DEFAULT_HOME, value_name = "DIR")]
    pub home: PathBuf,
    /// Speak to a coordinator elsewhere: https://HOST:7443. Needs --cert, --key and --ca, or a copy of them in HOME/pki.
    #[arg(long, global = true, env = "DRUMS_API", value_name = "URL")]
    pub api: Option<ApiAddress>,
    /// The operator's certificate (PEM).
    #[arg(long, global = true, env = "DRUMS_CERT", value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// The key of the certificate (PEM).
    #[arg(long, global = true, env = "DRUMS_KEY", value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The CA's certificate (PEM).
    #[arg(long, global = true, env = "DRUMS_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Print JSON instead of tables; errors, too, as one line on standard error.
    #[arg(long, global = true)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a coordinator's home: CA, operator identity, store, artifact folder. Safe to repeat.
    #[command(
        after_help = "Examples: drumsctl --home /var/lib/drums init\n          drumsctl init --store 'postgres://drums@/drums?host=/run/postgresql'"
    )]
    Init(home::Init),
    /// Hosts: add, list, release.
    #[command(subcommand, after_help = "Example: drumsctl host add h1 --address 10.0.0.5 > h1.token")]
    Host(fleet::HostCommand),
    /// People who may ask over HTTPS: add, list, revoke certificates; rotate the server's own.
    #[command(subcommand, after_help = "Example: drumsctl access add ada --role viewer --out ada")]
    Access(access::AccessCommand),
    /// Workloads: add, list.
    #[command(subcommand, after_help = "Example: drumsctl workload add target/images/minimal")]
    Workload(workloads::WorkloadCommand),
    /// Store a spec's canonical form and its SHA-256 before anything runs.
    #[command(after_help = "Example: drumsctl register docs/experiments/EXP-028.toml")]
    Register(experiments::Register),
    /// Dry run: hosts, order, expected duration, gates, and what is missing where. Records nothing.
    #[command(after_help = "Example: drumsctl plan docs/experiments/EXP-028.toml")]
    Plan(experiments::Plan),
    /// Run a registered experiment, or watch a run.
    #[command(after_help = "Examples: drumsctl run EXP-028 --watch\n          drumsctl run EXP-028 --attach")]
    Run(runs::Run),
    /// Hosts: state, age of the last heartbeat, activity, lease.
    #[command(after_help = "Example: drumsctl fleet --watch")]
    Fleet(fleet::Fleet),
    /// List runs.
    #[command(after_help = "Example: drumsctl runs EXP-028")]
    Runs(runs::Runs),
    /// A run's history and its agents' log lines.
    #[command(after_help = "Example: drumsctl logs run-0123456789ab")]
    Logs(runs::Logs),
    /// Stop a run at once; its hosts unwind.
    #[command(after_help = "Examples: drumsctl cancel run-0123456789ab\n          drumsctl cancel --all")]
    Cancel(runs::Cancel),
    /// Numbers and verdict of an experiment, over all its runs.
    #[command(
        after_help = "Examples: drumsctl results EXP-028\n          drumsctl results EXP-028 --format csv > samples.csv"
    )]
    Results(results::Results),
    /// One self-contained HTML file.
    #[command(after_help = "Example: drumsctl report EXP-028 -o report.html")]
    Report(results::Report),
    /// Everything that the verdict rests on, as a folder or FILE.tar.zst.
    #[command(after_help = "Example: drumsctl export EXP-028 -o EXP-028.tar.zst")]
    Export(results::Export),
    /// Recompute every number and the verdict of a bundle, offline; or of what hosts left in a bucket.
    #[command(after_help = "Exit code: the verdict's if every byte and number holds, 1 if not: the file is named.\n\
                      Examples: drumsctl verify EXP-028.tar.zst --registration SHA256\n          \
                      drumsctl verify s3://evidence/lab --registration SHA256")]
    Verify(verify::Verify),
    /// End this installation's paid hosts that are past their deadline, by what AWS shows alone; needs no coordinator.
    #[command(
        after_help = "Needs a build with --features ec2, and AWS's credentials in the environment. Tells who is spared, too.\n\
                      Exit code: 0 all was seen and all that is overdue is ended; 1 a region was not seen, or something lives on;\n\
                      20 a canary was not found, so others may not have been either. What was seen is ended all the same.\n\
                      Examples: drumsctl sweep --installation 0a1b2c3d --canary eu-central-1/i-0123456789abcdef0 --shadow\n          \
                      drumsctl sweep --installation 0a1b2c3d --region eu-central-1 --canary i-0123456789abcdef0 --json"
    )]
    Sweep(sweep::Sweep),
    /// Try out what this home and its coordinator need.
    #[command(after_help = "Example: drumsctl doctor")]
    Doctor(home::Doctor),
    /// Copy a home into one file, also while its coordinator runs. Holds the CA's key: keep it as you keep that.
    #[command(after_help = "Example: drumsctl backup /root/drums-backup.tar.zst")]
    Backup(home::Backup),
    /// Everything that changed something: who, what, when, from where. Latest last; nothing is ever taken out of it.
    #[command(
        alias = "audit",
        after_help = "Examples: drumsctl events --since 2h\n          drumsctl events --run run-0123456789ab --follow"
    )]
    Events(events::Events),
    /// Print a shell's completions.
    #[command(after_help = "Example: drumsctl completions bash > /etc/bash_completion.d/drumsctl")]
    Completions {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
}

/// Runs one command line; standard error has said everything when this returns.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // clap prints usage errors with what was expected; help goes to standard output.
            let said = e.print().map_err(say::Unsaid::from);
            return match said {
                Err(unsaid) if !e.use_stderr() => unsaid.exit("drumsctl"),
                _ => ExitCode::from(if e.use_stderr() { error::BAD_INPUT } else { 0 }),
            };
        }
    };
    let json = cli.global.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(source) => return CtlError::Runtime(source).report(json),
    };
    match runtime.block_on(run(cli)) {
        Ok(code) => code,
        Err(e) => e.report(json),
    }
}

async fn run(cli: Cli) -> Result<ExitCode, CtlError> {
    let global = cli.global;
    if cli.version {
        let build = crate::daemon::build_digest().map_or_else(|_| "unknown".to_owned(), |d| format!("sha256:{d}"));
        say!("drumsctl {} (build {build})", env!("CARGO_PKG_VERSION"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(command) = cli.command else {
        let help = Cli::command().render_help();
        note!("{help}");
        return Ok(ExitCode::from(2));
    };
    match command {
        Command::Init(c) => home::init(&global, &c),
        Command::Host(c) => fleet::host(&global, c).await,
        Command::Access(c) => access::access(&global, c).await,
        Command::Workload(c) => workloads::workload(&global, c).await,
        Command::Register(c) => experiments::register(&global, c).await,
        Command::Plan(c) => experiments::plan(&global, c).await,
        Command::Run(c) => runs::run(&global, c).await,
        Command::Fleet(c) => fleet::fleet(&global, c).await,
        Command::Runs(c) => runs::runs(&global, c).await,
        Command::Logs(c) => runs::logs(&global, c).await,
        Command::Cancel(c) => runs::cancel(&global, c).await,
        Command::Results(c) => results::results(&global, c).await,
        Command::Report(c) => results::report(&global, c).await,
        Command::Export(c) => results::export(&global, c).await,
        Command::Verify(c) => verify::verify(&global, &c).await,
        Command::Sweep(c) => sweep::sweep(&global, c).await,
        Command::Doctor(c) => home::doctor(&global, c).await,
        Command::Backup(c) => home::backup(&global, &c),
        Command::Events(c) => events::events(&global, c).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "drumsctl", &mut script);
            say::text(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound_and_every_command_has_an_example() {
        let command = Cli::command();
        command.clone().debug_assert();
        let mut open = vec![&command];
        while let Some(c) = open.pop() {
            let help = c.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{} has no example", c.get_name());
            open.extend(c.get_subcommands().filter(|c| c.get_name() != "help"));
        }
    }
}
