//! The command line of a host's agent. The shim is decided on first: it must be the only thing in its process.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use drums_agent::{
    agent::{self, AgentConfig, AgentError},
    config::{self, Config, ConfigError, RawConfig},
    engine::{api::AuditReport, trial},
    net::{EnrolError, Identity, Stop, instance::InstanceError},
    setup::{self, ToolsDir, doctor, listener, tools},
    shim,
    succession::{self, Succession, Successor, Trial},
    watchdog::{self, WatchdogError},
    windows::{self, WindowArgs},
};
use drums_common::{
    note, say,
    say::Unsaid,
    telemetry::{self, chain},
    token::Token,
    wire::latest::Upgrade,
};

const NAME: &str = "drums-agent";

/// Exit codes of `drums-agent run` beside 0 for an orderly end and 1 for a failure.
const EXIT_BAD_INPUT: u8 = 2;
const EXIT_UNREACHABLE: u8 = 3;
const EXIT_REFUSED: u8 = 20;
const EXIT_RETIRED: u8 = 21;

/// Host agent of DrumsBench: makes sessions, measures them, and keeps the evidence until its coordinator has it.
#[derive(Parser)]
#[command(
    name = "drums-agent",
    after_help = "Example: drums-agent setup && drums-agent run --token-file /etc/drums/token\n\n\
        Exit codes: 0 orderly end, 1 failure, 2 bad input, 3 coordinator unreachable at enrolment or not ready for it, \
        20 refused by the coordinator or on another machine than it enrolled on, 21 released by the coordinator."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the agent; enrol first if this host has no identity yet
    #[command(after_help = "Example: drums-agent run --token-file - < token")]
    Run(RunArgs),
    /// Install CRIU, runc and QEMU on this host; does only what is missing
    #[command(after_help = "Example: drums-agent setup --tools /var/lib/drums-tools")]
    Setup(SetupArgs),
    /// Say what works on this host, by trying it
    #[command(after_help = "Example: drums-agent doctor --json")]
    Doctor(DoctorArgs),
    /// Compare the ledger with the kernel and undo what an earlier agent left; the agent must not be running
    #[command(after_help = "Example: drums-agent audit --state /var/lib/drums-agent")]
    Audit(AuditArgs),
    /// Make, reset and destroy sessions of one arm by hand, and see where the time goes
    #[command(after_help = "Example: drums-agent try drums-cold --workload target/images/minimal -n 5")]
    Try(trial::TryArgs),
    /// On a paid host: power it off at its deadline, at the end of its lifetime, or when its life lease is over
    #[command(
        long_about = "On a paid host: power it off at its deadline, at the end of the lifetime registered with its launch, or \
            when its life lease is over, whichever comes first.\n\n\
            A process of its own, so that it works whatever becomes of the agent, which renews the lease in a file while its \
            coordinator answers. A host without the deadline's file (paid.deadline, /etc/drums/deadline) is not a paid \
            one: it is refused, and never powered off.\n\n\
            In tests, paid.power_off_in_tests in the settings names a program that is run instead, with the reason as its \
            argument. It is refused together with any path of a real host.",
        after_help = "Examples: drums-agent watchdog\n          drums-agent watchdog --config /etc/drums/agent.toml --check-config\n\n\
            Exit codes: 0 the host is ending, 1 it could not be powered off or watched over, 2 bad input or no paid host."
    )]
    Watchdog(WatchdogArgs),
    /// Print the completion script of a shell
    #[command(after_help = "Example: drums-agent completions bash > /etc/bash_completion.d/drums-agent")]
    Completions { shell: Shell },
}

#[derive(Args)]
struct ConfigArgs {
    /// Settings, TOML; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// State folder [default: /var/lib/drums-agent]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Tools folder, shared by the agents of a machine [default: /var/lib/drums-tools]
    #[arg(long, value_name = "DIR")]
    tools: Option<PathBuf>,
}

impl ConfigArgs {
    fn raw(&self) -> Result<RawConfig, ConfigError> {
        let mut raw = match &self.config {
            Some(path) => RawConfig::read(path)?,
            None => RawConfig::default(),
        };
        if let Some(state) = &self.state {
            raw.state.clone_from(state);
        }
        if let Some(tools) = &self.tools {
            raw.tools.clone_from(tools);
        }
        // Written on a command line, a path is relative to where it was written.
        for path in [&mut raw.state, &mut raw.tools] {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        Ok(raw)
    }
}

#[derive(Args)]
struct RunArgs {
    #[command(flatten)]
    common: ConfigArgs,
    /// File with the token that drumsctl host add printed, or - for standard input; needed once
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Lock that whoever measures on this machine holds [default: /run/lock/drums-measure.lock]
    #[arg(long, value_name = "FILE")]
    measure_lock: Option<PathBuf>,
    /// Log lines as JSON
    #[arg(long)]
    log_json: bool,
    /// Read the settings, print them, and end
    #[arg(long)]
    check_config: bool,
    /// Be welcomed by the coordinator, then end: how an upgrade is tried
    #[arg(long, hide = true)]
    trial: bool,
}

#[derive(Args)]
struct SetupArgs {
    /// Tools folder, shared by the agents of a machine
    #[arg(long, value_name = "DIR", default_value = ToolsDir::DEFAULT)]
    tools: PathBuf,
    /// Install CRIU again even if a working one is there
    #[arg(long)]
    renew: bool,
    /// Print what is installed as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct DoctorArgs {
    /// Tools folder, shared by the agents of a machine
    #[arg(long, value_name = "DIR", default_value = ToolsDir::DEFAULT)]
    tools: PathBuf,
    /// Print the trials as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct WatchdogArgs {
    /// Settings, TOML, as the agent's; its table [paid] counts
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// State folder of the agent [default: /var/lib/drums-agent]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Log lines as JSON
    #[arg(long)]
    log_json: bool,
    /// Read the settings, print them, and end
    #[arg(long)]
    check_config: bool,
}

#[derive(Args)]
struct AuditArgs {
    #[command(flatten)]
    common: ConfigArgs,
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    windows: WindowArgs,
}

fn main() -> ExitCode {
    // Before any thread or runtime can exist.
    let first = std::env::args_os().nth(1);
    if first.as_ref().is_some_and(|a| a == "shim") {
        return shim::serve();
    }
    // The doctor's own victim of a dump and restore.
    if first.as_ref().is_some_and(|a| a == listener::SUBCOMMAND) {
        return listen();
    }
    let cli = match parse() {
        Ok(cli) => cli,
        Err(e) => {
            // To standard output for --help and --version, to standard error otherwise.
            return match e.print().map_err(Unsaid::from) {
                Err(unsaid) if !e.use_stderr() => unsaid.exit(NAME),
                _ => ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(EXIT_BAD_INPUT)),
            };
        }
    };
    obey(cli.command).unwrap_or_else(|unsaid| unsaid.exit(NAME))
}

fn obey(command: Command) -> Result<ExitCode, Unsaid> {
    Ok(match command {
        Command::Run(args) => run(&args)?,
        Command::Setup(args) => install(&args)?,
        Command::Doctor(args) => examine(&args)?,
        Command::Audit(args) => audit(&args)?,
        Command::Try(args) => {
            telemetry::init(false);
            let dir = ToolsDir::new(ToolsDir::DEFAULT);
            let mut paths = tools::find(&dir);
            if let Some(criu) = std::env::var_os("DRUMS_CRIU") {
                paths.criu = Some(criu.into());
            }
            trial::main(&args, paths)
        }
        Command::Watchdog(args) => watch_over(args)?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
            say::text(&String::from_utf8_lossy(&script))?;
            ExitCode::SUCCESS
        }
    })
}

/// With the build's digest in the version, which takes reading the executable: only when it is asked for.
fn parse() -> Result<Cli, clap::Error> {
    let asked = std::env::args_os().skip(1).any(|a| a == "--version" || a == "-V");
    let mut version = env!("CARGO_PKG_VERSION").to_owned();
    if asked && let Ok(digest) = agent::build_digest() {
        version = format!("{version} (build sha256:{digest})");
    }
    // The process prints it and ends.
    let version: &'static str = version.leak();
    Cli::from_arg_matches(&Cli::command().version(version).try_get_matches()?)
}

fn fail(code: u8, error: &(dyn std::error::Error + 'static)) -> ExitCode {
    note!("{NAME}: {}", chain(error));
    ExitCode::from(code)
}

fn run(args: &RunArgs) -> Result<ExitCode, Unsaid> {
    let raw = args.common.raw().map(|mut raw| {
        if let Some(lock) = &args.measure_lock {
            raw.measure_lock.clone_from(lock);
        }
        raw.log_json |= args.log_json;
        raw
    });
    let shown = raw.as_ref().ok().and_then(|r| toml::to_string(r).ok());
    let config: Config = match raw.and_then(RawConfig::validate) {
        Ok(config) => config,
        Err(e) => return Ok(fail(EXIT_BAD_INPUT, &e)),
    };
    if args.check_config {
        say::text(&shown.unwrap_or_default())?;
        return Ok(ExitCode::SUCCESS);
    }
    telemetry::init(config.log_json);
    let succession = Succession::of(&config.state);
    if args.trial {
        // The agent that tries this one out may die.
        if let Err(e) = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL) {
            return Ok(fail(1, &e));
        }
    } else if let Some(failed) = take_place(&succession) {
        return Ok(failed);
    }
    tracing::info!(settings = %shown.unwrap_or_default().trim_end().replace('\n', ", "), "agent starts");
    let token = match token(&config, args.token_file.as_deref()) {
        Ok(token) => token,
        Err(e) => return Ok(fail(EXIT_BAD_INPUT, &*e)),
    };
    Ok(match agent::run(agent_config(&config, token, args.trial)) {
        Ok(Stop::Upgrade(upgrade)) => make_way(&succession, &upgrade),
        Ok(Stop::Retired { reason }) => {
            note!("drums-agent: the coordinator released this host: {reason}");
            ExitCode::from(EXIT_RETIRED)
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => {
            let code = match &e {
                AgentError::NotEnrolled => EXIT_BAD_INPUT,
                AgentError::Refused(_)
                | AgentError::Instance(InstanceError::Another { .. })
                | AgentError::Enrol(EnrolError::OtherIdentity { .. }) => EXIT_REFUSED,
                AgentError::Enrol(e @ EnrolError::Refused { .. }) if !e.is_passing() => EXIT_REFUSED,
                AgentError::Enrol(EnrolError::Unreachable { .. } | EnrolError::Refused { .. }) => EXIT_UNREACHABLE,
                _ => 1,
            };
            fail(code, &e)
        }
    })
}

fn watch_over(args: WatchdogArgs) -> Result<ExitCode, Unsaid> {
    let common = ConfigArgs { config: args.config, state: args.state, tools: None };
    let raw = match common.raw() {
        Ok(raw) => raw,
        Err(e) => return Ok(fail(EXIT_BAD_INPUT, &e)),
    };
    let shown = toml::to_string(&raw).unwrap_or_default();
    let config = match raw.validate() {
        Ok(config) => config,
        Err(e) => return Ok(fail(EXIT_BAD_INPUT, &e)),
    };
    if args.check_config {
        say::text(&shown)?;
        return Ok(ExitCode::SUCCESS);
    }
    telemetry::init(config.log_json || args.log_json);
    Ok(match watchdog::run(&config.paid, &config.state) {
        Ok(why) => {
            note!("{NAME}: this host was powered off: {why}");
            ExitCode::SUCCESS
        }
        Err(e @ WatchdogError::NotPaid { .. }) => fail(EXIT_BAD_INPUT, &e),
        Err(e) => fail(1, &e),
    })
}

/// Becomes the build that took this one's place, if there is one; comes back with a code only if that failed.
fn take_place(succession: &Succession) -> Option<ExitCode> {
    let program =
        agent::build_digest().map_err(|e| fail(1, &e)).and_then(|me| succession.at_start(me).map_err(|e| fail(1, &e)));
    match program {
        Ok(None) => None,
        Ok(Some(program)) => Some(fail(1, &succession::become_it(&program, &arguments()))),
        Err(code) => Some(code),
    }
}

/// Tries the ordered build out and becomes it, or what this process was.
fn make_way(succession: &Succession, upgrade: &Upgrade) -> ExitCode {
    let (program, successor) =
        (succession.program(upgrade.sha256), Successor { sha256: upgrade.sha256, ordered: upgrade.ordered });
    let outcome = agent::build_digest().map_err(|e| fail(1, &e)).and_then(|me| {
        let settled = match succession::try_out(&program, &arguments(), succession::TRIAL) {
            Ok(Trial::Stopped) => return Err(ExitCode::SUCCESS),
            Ok(Trial::Proven) => {
                tracing::info!(build = %upgrade.sha256.short(), "the ordered build works here and takes over");
                succession.crown(upgrade.sha256, me).map(|()| program.clone())
            }
            Ok(Trial::Failed(why)) => {
                tracing::error!(build = %upgrade.sha256.short(), why, "the ordered build did not work; this one goes on");
                succession.note_failed(&successor, &why).map(|()| agent::THIS_PROGRAM.into())
            }
            Err(e) => Err(e),
        };
        settled.map_err(|e| fail(1, &e))
    });
    match outcome {
        Ok(program) => fail(1, &succession::become_it(&program, &arguments())),
        Err(code) => code,
    }
}

fn arguments() -> Vec<std::ffi::OsString> {
    std::env::args_os().skip(1).collect()
}

fn agent_config(config: &Config, token: Option<Token>, trial: bool) -> AgentConfig {
    AgentConfig {
        state: config.state.clone(),
        token,
        tools: config.tools.clone(),
        lock: config.measure_lock.clone(),
        scratch_bytes: config.scratch_bytes,
        min_free_bytes: config.min_free_bytes,
        ca_file: config.ca_file.clone(),
        paid: config.paid.clone(),
        trial,
    }
}

/// The token, unless its file is gone and we do not need it any more: it was read once, at enrolment.
fn token(config: &Config, file: Option<&Path>) -> Result<Option<Token>, Box<dyn std::error::Error>> {
    let Some(file) = file else { return Ok(None) };
    match config::read_token(file) {
        Ok(token) => Ok(Some(token)),
        Err(e) if e.is_absent() && Identity::load(&config.state)?.is_some() => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn install(args: &SetupArgs) -> Result<ExitCode, Unsaid> {
    telemetry::init(false);
    let options = setup::SetupOptions { renew: args.renew };
    let mut progress = |line: &str| note!("{line}");
    Ok(match setup::run(&ToolsDir::new(&args.tools), &options, &mut progress) {
        Ok(installed) if args.json => print_json(&installed)?,
        Ok(installed) => {
            for line in &installed.done {
                say!("{line}")?;
            }
            say!("criu {}, runc {}, qemu {}", installed.criu.version, installed.runc, installed.qemu)?;
            ExitCode::SUCCESS
        }
        Err(e) => fail(1, &e),
    })
}

fn examine(args: &DoctorArgs) -> Result<ExitCode, Unsaid> {
    telemetry::init(false);
    // The trials go on when nobody reads any more: they undo what they made.
    let mut said = Ok(());
    let mut seen = |trial: &setup::Trial| {
        if !args.json && said.is_ok() {
            let mark = if trial.ok { "ok  " } else { "FAIL" };
            said = say!("{mark} {} ({} ms): {}", trial.name, trial.duration_ms, trial.detail);
        }
    };
    let report = doctor::examine(&ToolsDir::new(&args.tools), &doctor::DoctorOptions::default(), &mut seen);
    said?;
    if args.json {
        print_json(&report)?;
    } else {
        for (kind, why) in report.unfit() {
            say!("{kind} cannot run here: {why}")?;
        }
    }
    Ok(if report.healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn audit(args: &AuditArgs) -> Result<ExitCode, Unsaid> {
    telemetry::init(false);
    windows::look_out(&args.windows);
    windows::operation("sweep");
    let config = match args.common.raw().and_then(RawConfig::validate) {
        Ok(config) => config,
        Err(e) => return Ok(fail(EXIT_BAD_INPUT, &e)),
    };
    let report = match agent::audit(&agent_config(&config, None, false)) {
        Ok(report) => report,
        Err(e) => return Ok(fail(1, &e)),
    };
    let AuditReport { undone, orphans, vanished, leaked, foreign } = &report;
    if args.json {
        print_json(&serde_json::json!({
            "undone": undone, "orphans": orphans, "vanished": vanished, "leaked": leaked, "foreign": foreign,
        }))?;
    } else if !config.state.exists() {
        say!("there is no state folder {}: nothing was looked at", config.state.display())?;
    } else if report == AuditReport::default() {
        say!("nothing is left")?;
    } else {
        for (what, list) in [
            ("undone", undone),
            ("undone, was in no record", orphans),
            ("gone by itself", vanished),
            ("left alone, not ours", foreign),
            ("COULD NOT BE UNDONE", leaked),
        ] {
            for resource in list {
                say!("{what}: {resource}")?;
            }
        }
    }
    Ok(if leaked.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn listen() -> ExitCode {
    let Some(port_file) = std::env::args_os().nth(2) else {
        note!("drums-agent: this subcommand is the doctor's own");
        return ExitCode::from(EXIT_BAD_INPUT);
    };
    // SAFETY: this is the start of the process; it has opened nothing yet.
    let alone = unsafe { shim::close_inherited(3) };
    match alone.and_then(|()| listener::serve(Path::new(&port_file))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(1, &e),
    }
}

fn print_json(value: &impl serde::Serialize) -> Result<ExitCode, Unsaid> {
    match serde_json::to_string_pretty(value) {
        Ok(text) => say::text(&(say::json_text(&text) + "\n")).map(|()| ExitCode::SUCCESS),
        Err(e) => Ok(fail(1, &e)),
    }
}
