//! Hosts and the fleet.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Subcommand};
use drums_common::{digest::Sha256, ids::HostId};
use drums_common::{note, say};

use super::{
    Client, CtlError, Global,
    client::segment,
    output,
    provision::{self, Provision},
};
use crate::api::views::{AddHost, FleetView, HostView, TokenView, UpgradeHost};

#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Make a single-use token for a host's agent; it goes to standard output.
    #[command(
        after_help = "Example: drumsctl host add h1 --address 10.0.0.5 > h1.token\n         then on the host: drums-agent run --token-file h1.token"
    )]
    Add(Add),
    /// List hosts.
    #[command(after_help = "Example: drumsctl host list --json")]
    List,
    /// Whether a paid host may be launched on EC2: each gate's evidence, the worst-case cost, and the calls to be made.
    #[command(
        after_help = "Needs a build with --features ec2, AWS's credentials in the environment, and --dry-run: launching is not\n\
                  built yet. Only asks, but for one disabled schedule that it makes, reads back and deletes, since EventBridge\n\
                  Scheduler has no dry run. Exit code: 0 every gate passed, 1 one refused.\n\
                  Example: drumsctl host provision h1 --type c8i.xlarge --campaign c1 --deadline 3h --max-usd 5 \\\n           \
                  --region eu-central-1 --account account.toml --dry-run"
    )]
    Provision(Provision),
    /// Have hosts run another build of the agent, from their next idle moment on; a build that does not work is rolled back.
    #[command(
        after_help = "Example: drumsctl host upgrade --all --agent target/release/drums-agent --wait\n         drumsctl host upgrade h1 --cancel"
    )]
    Upgrade(Upgrade),
    /// Revoke a host's certificates; its agent retires. The machine itself stays as it is.
    #[command(after_help = "Example: drumsctl host release h1")]
    Release {
        /// The host's name.
        name: HostId,
    },
}

#[derive(Debug, Args)]
pub struct Add {
    /// The host's name: a-z, 0-9 and -.
    pub name: HostId,
    /// Address at which the host reaches this coordinator; may be repeated. Default: advertise in coordinator.toml.
    #[arg(long, value_name = "HOST")]
    pub address: Vec<String>,
    /// sandbox, ec2, metal or mac.
    #[arg(long, default_value = "sandbox")]
    pub kind: String,
    /// How long the token is good for.
    #[arg(long, default_value_t = 60, value_name = "MINUTES")]
    pub valid_minutes: u64,
}

#[derive(Debug, Args)]
pub struct Upgrade {
    /// The hosts.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub names: Vec<HostId>,
    /// Every host that is not released.
    #[arg(long)]
    pub all: bool,
    /// The program drums-agent, for the hosts' architecture.
    #[arg(long, value_name = "FILE", required_unless_present = "cancel", conflicts_with = "cancel")]
    pub agent: Option<PathBuf>,
    /// Take back what was ordered and has not happened.
    #[arg(long)]
    pub cancel: bool,
    /// Return when every host runs the build, or one could not; exit code 1 then.
    #[arg(long, conflicts_with = "cancel")]
    pub wait: bool,
}

#[derive(Debug, Args)]
pub struct Fleet {
    /// Show it anew every second until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
}

pub(super) async fn host(global: &Global, c: HostCommand) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    match c {
        // Speaks to AWS, and needs no coordinator.
        HostCommand::Provision(c) => return provision::provision(global, c).await,
        HostCommand::Add(add) => {
            let body =
                AddHost { name: add.name, kind: add.kind, addresses: add.address, valid_minutes: add.valid_minutes };
            let token: TokenView = client.post("/hosts", &body).await?;
            if global.json {
                output::json(&token)?;
            } else {
                say!("{}", token.token)?;
                let addresses: Vec<String> = token.addresses.iter().map(ToString::to_string).collect();
                note!("host {} may enrol once until {}", token.host, output::time(&token.expires));
                note!("it will dial {}", addresses.join(", "));
            }
        }
        HostCommand::Upgrade(c) => return upgrade(global, &client, c).await,
        HostCommand::List => show(global, &client.get("/hosts").await?)?,
        HostCommand::Release { name } => {
            let path = format!("/hosts/{}/release", segment(&name));
            let fleet: FleetView = client.post(&path, &serde_json::json!({})).await?;
            if global.json {
                output::json(&fleet)?;
            } else {
                say!("host {name} is released: its certificates are revoked")?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn fleet(global: &Global, c: Fleet) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    if !c.watch {
        show(global, &client.get("/hosts").await?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut timer = tokio::time::interval(Duration::from_secs(1));
    loop {
        // Both branches are cancel-safe.
        tokio::select! {
            _ = timer.tick() => {}
            _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
        }
        let fleet: FleetView = client.get("/hosts").await?;
        if !global.json {
            // Home and clear: the table is drawn over the last one.
            say::text("\x1b[H\x1b[2J")?;
        }
        show(global, &fleet)?;
    }
}

async fn upgrade(global: &Global, client: &Client, c: Upgrade) -> Result<ExitCode, CtlError> {
    let fleet: FleetView = client.get("/hosts").await?;
    let names: Vec<HostId> = if c.all {
        fleet.hosts.iter().filter(|h| h.state != "released").map(|h| h.name.clone()).collect()
    } else {
        c.names
    };
    let sha256 = match &c.agent {
        None => None,
        Some(path) => {
            let bytes = tokio::fs::read(path).await.map_err(CtlError::file("read", path))?;
            if !bytes.starts_with(b"\x7fELF") {
                let message = format!("{} is no program of Linux", path.display());
                return Err(CtlError::bad(message, "give the drums-agent that was built for the hosts"));
            }
            let sha256 = Sha256::of(&bytes);
            client.put(&format!("/artifacts/{sha256}"), bytes).await?;
            Some(sha256)
        }
    };
    for name in &names {
        let _: UpgradeHost = client.post(&format!("/hosts/{}/upgrade", segment(name)), &UpgradeHost { sha256 }).await?;
    }
    let (fleet, failed) = match sha256.filter(|_| c.wait) {
        Some(build) => settled(client, &names, build).await?,
        None => (client.get("/hosts").await?, 0),
    };
    if global.json {
        output::json(&fleet)?;
    } else {
        for h in fleet.hosts.iter().filter(|h| names.contains(&h.name)) {
            let runs = h.agent_sha256.map_or_else(|| "nothing yet".to_owned(), |b| format!("build {}", b.short()));
            match (h.upgrade, sha256) {
                (Some(build), _) => say!("host {} runs {runs}, and build {} when it is idle", h.name, build.short())?,
                (None, Some(build)) if h.agent_sha256 != Some(build) => {
                    say!("host {} runs {runs}: build {} did not work there", h.name, build.short())?;
                }
                (None, _) => say!("host {} runs {runs}", h.name)?,
            }
        }
        if failed > 0 {
            note!("drumsctl events says why");
        }
    }
    Ok(if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The fleet once none of these hosts is to be upgraded any more, and how many do not run the build.
async fn settled(client: &Client, names: &[HostId], build: Sha256) -> Result<(FleetView, usize), CtlError> {
    let mut timer = tokio::time::interval(Duration::from_millis(500));
    let mut told = usize::MAX;
    loop {
        timer.tick().await;
        let fleet: FleetView = client.get("/hosts").await?;
        let of = || fleet.hosts.iter().filter(|h| names.contains(&h.name));
        let left = of().filter(|h| h.upgrade.is_some()).count();
        if left == 0 {
            let failed = of().filter(|h| h.agent_sha256 != Some(build)).count();
            return Ok((fleet, failed));
        }
        if left != told {
            note!("{left} of {} hosts still to be upgraded", names.len());
            told = left;
        }
    }
}

fn show(global: &Global, fleet: &FleetView) -> Result<(), CtlError> {
    if global.json {
        return output::json(fleet);
    }
    if fleet.hosts.is_empty() {
        say!("no hosts yet; drumsctl host add NAME makes a token for one")?;
        return Ok(());
    }
    let rows: Vec<Vec<String>> = fleet.hosts.iter().map(row).collect();
    output::table(
        &["host", "kind", "owner", "state", "heartbeat", "activity", "dies in", "gen", "cost", "machine", "version"],
        &rows,
    )
}

fn row(h: &HostView) -> Vec<String> {
    let dash = || "-".to_owned();
    let live = h.state != "released" && h.heartbeat_ms.is_some();
    vec![
        h.name.to_string(),
        h.kind.clone(),
        h.ownership.clone(),
        h.state.clone(),
        h.heartbeat_ms.filter(|_| live).map_or_else(dash, |ms| format!("{} ago", output::duration(ms))),
        if h.activity.is_empty() { dash() } else { h.activity.clone() },
        // An adopted host does not die; its work does when the lease ends.
        h.life_left_ms.filter(|_| live).map_or_else(dash, |ms| format!("never (work: {})", output::duration(ms))),
        h.generation.to_string(),
        h.cost.map_or_else(|| "none".to_owned(), |c| format!("{c:.2}")),
        h.machine.clone().unwrap_or_else(dash),
        match (&h.version, h.upgrade) {
            (version, Some(build)) => {
                format!("{} (to be {})", version.as_deref().unwrap_or("-"), build.short())
            }
            (version, None) => version.clone().unwrap_or_else(dash),
        },
    ]
}
