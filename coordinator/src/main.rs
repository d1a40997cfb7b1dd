//! The coordinator daemon's command line: settings in, the daemon run, its end as an exit code.

use std::{net::IpAddr, net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use drums_common::{
    note, say,
    telemetry::{self, chain},
};
use drums_coordinator::{
    config::{DEFAULT_HOME, Home, RawConfig},
    daemon,
};

const NAME: &str = "drums-coordinator";
const EXIT_BAD_INPUT: u8 = 2;

/// Coordinator of DrumsBench: grants turns to hosts, keeps their evidence, answers operators.
#[derive(Parser)]
#[command(
    name = "drums-coordinator",
    after_help = "Example: drumsctl init --home /var/lib/drums && drums-coordinator --home /var/lib/drums\n\n\
        Settings come from coordinator.toml in the home; flags override it. Exit codes: 0 orderly end, 1 failure, \
        2 bad input."
)]
struct Cli {
    /// The home that drumsctl init made
    #[arg(long, value_name = "DIR", default_value = DEFAULT_HOME)]
    home: PathBuf,
    /// Settings, TOML, instead of the home's coordinator.toml
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address that the UDP endpoints listen on
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<IpAddr>,
    /// UDP port of the agents' endpoint
    #[arg(long, value_name = "PORT")]
    agents_port: Option<u16>,
    /// UDP port of the enrolment endpoint
    #[arg(long, value_name = "PORT")]
    enrol_port: Option<u16>,
    /// Address and TCP port of the HTTPS API
    #[arg(long, value_name = "ADDRESS:PORT")]
    api: Option<SocketAddr>,
    /// Address that tokens tell agents; may be given several times
    #[arg(long, value_name = "ADDRESS")]
    advertise: Vec<String>,
    /// Log lines as JSON
    #[arg(long)]
    log_json: bool,
    /// Read the settings, print them, and end
    #[arg(long)]
    check_config: bool,
}

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(e) => {
            // To standard output for --help and --version, to standard error otherwise.
            return match e.print().map_err(say::Unsaid::from) {
                Err(unsaid) if !e.use_stderr() => unsaid.exit(NAME),
                _ => ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(EXIT_BAD_INPUT)),
            };
        }
    };
    let home = Home::new(std::path::absolute(&cli.home).unwrap_or_else(|_| cli.home.clone()));
    let raw = match settings(&cli, &home) {
        Ok(raw) => raw,
        Err(e) => return fail(EXIT_BAD_INPUT, &*e),
    };
    let shown = toml::to_string(&raw).unwrap_or_default();
    let config = match raw.validate() {
        Ok(config) => config,
        Err(e) => return fail(EXIT_BAD_INPUT, &e),
    };
    if cli.check_config {
        return match say::text(&shown) {
            Ok(()) => ExitCode::SUCCESS,
            Err(unsaid) => unsaid.exit(NAME),
        };
    }
    telemetry::init(cli.log_json);
    match daemon::run(&home, &config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is_bad_input() => fail(EXIT_BAD_INPUT, &e),
        Err(e) => fail(1, &e),
    }
}

fn settings(cli: &Cli, home: &Home) -> Result<RawConfig, Box<dyn std::error::Error>> {
    let path = cli.config.clone().unwrap_or_else(|| home.config());
    let mut raw = match RawConfig::read(&path)? {
        Some(raw) => raw,
        None if cli.config.is_some() => return Err(format!("there is no {}", path.display()).into()),
        None => RawConfig::default(),
    };
    if let Some(listen) = cli.listen {
        raw.listen = listen;
    }
    if let Some(port) = cli.agents_port {
        raw.agents_port = port;
    }
    if let Some(port) = cli.enrol_port {
        raw.enrol_port = port;
    }
    if let Some(api) = cli.api {
        raw.api = api;
    }
    if !cli.advertise.is_empty() {
        raw.advertise.clone_from(&cli.advertise);
    }
    Ok(raw)
}

/// With the build's digest in the version, which takes reading the executable: only when it is asked for.
fn parse() -> Result<Cli, clap::Error> {
    let asked = std::env::args_os().skip(1).any(|a| a == "--version" || a == "-V");
    let mut version = env!("CARGO_PKG_VERSION").to_owned();
    if asked && let Ok(digest) = daemon::build_digest() {
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
