//! Hosts and the fleet.

use std::{process::ExitCode, time::Duration};

use clap::{Args, Subcommand};
use drums_common::ids::HostId;
use drums_common::{note, say};

use super::{Client, CtlError, Global, client::segment, output};
use crate::api::views::{AddHost, FleetView, HostView, TokenView};

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
pub struct Fleet {
    /// Show it anew every second until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
}

pub(super) async fn host(global: &Global, c: HostCommand) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    match c {
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
        h.version.clone().unwrap_or_else(dash),
    ]
}
