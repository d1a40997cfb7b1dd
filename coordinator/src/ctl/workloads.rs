//! Workloads: stored by digest, file by file.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand};
use drums_common::ids::WorkloadName;
use drums_common::say;

use super::{Client, CtlError, Global, output};
use crate::api::views::{AddWorkload, WorkloadView};

#[derive(Debug, Subcommand)]
pub enum WorkloadCommand {
    /// Check a workload folder against its manifest and store it; prints its SHA-256.
    #[command(after_help = "Example: drumsctl workload add target/images/minimal")]
    Add(Add),
    /// List workloads.
    #[command(after_help = "Example: drumsctl workload list")]
    List,
}

#[derive(Debug, Args)]
pub struct Add {
    /// The folder that cargo xtask image made.
    pub dir: PathBuf,
    /// Its name in specs. Default: the folder's name.
    #[arg(long)]
    pub name: Option<WorkloadName>,
}

pub(super) async fn workload(global: &Global, c: WorkloadCommand) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    match c {
        WorkloadCommand::Add(add) => self::add(global, &client, add).await,
        WorkloadCommand::List => {
            let list: Vec<WorkloadView> = client.get("/workloads").await?;
            if global.json {
                output::json(&list)?;
            } else if list.is_empty() {
                say!("no workloads yet; cargo xtask image minimal makes one, drumsctl workload add DIR stores it")?;
            } else {
                let rows: Vec<Vec<String>> = list
                    .into_iter()
                    .map(|w| {
                        vec![
                            w.name.to_string(),
                            w.sha256.to_string(),
                            w.files.to_string(),
                            output::bytes(w.bytes),
                            output::time(&w.added),
                        ]
                    })
                    .collect();
                output::table(&["workload", "sha256", "files", "size", "added (UTC)"], &rows)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn add(global: &Global, client: &Client, c: Add) -> Result<ExitCode, CtlError> {
    if !c.dir.is_dir() {
        let message = format!("{} is not a folder", c.dir.display());
        return Err(CtlError::bad(message, "give the folder that cargo xtask image made"));
    }
    let name = match c.name {
        Some(name) => name,
        None => {
            let base = c.dir.canonicalize().map_err(CtlError::file("read", &c.dir))?;
            let base = base.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            base.parse().map_err(|e| CtlError::bad(format!("the folder's name will not do: {e}"), "give --name"))?
        }
    };
    let manifest = drums_infra::workload::verify(&c.dir).map_err(|e| {
        CtlError::bad(drums_common::telemetry::chain(&e), "make the workload again with cargo xtask image")
    })?;
    let mut sent = std::collections::BTreeSet::new();
    for (path, file) in manifest.files.iter().filter(|(_, f)| f.kind == "file") {
        let to = format!("/artifacts/{}", file.sha256);
        if !sent.insert(file.sha256) || client.has(&to).await? {
            continue;
        }
        let from = c.dir.join(path);
        let bytes = tokio::fs::read(&from).await.map_err(CtlError::file("read", &from))?;
        client.put(&to, bytes).await?;
    }
    let stored: WorkloadView = client.post("/workloads", &AddWorkload { name, manifest }).await?;
    if global.json {
        output::json(&stored)?;
    } else {
        say!("{} {}", stored.name, stored.sha256)?;
    }
    Ok(ExitCode::SUCCESS)
}
