//! `cargo xtask kill-matrix`: which layer ends a paid host when which faults strike, and when.
//!
//! A row is a set of faults and the layers that are left: once all of them, and then, for each layer that the faults leave
//! able, that one alone, so that none that is broken hides behind another. Each row is run at several moments and with
//! drawn ones; what it shows is the run that came closest to its bound, or past it. A layer that the faults are to take
//! away is run alone as well, and must not kill: a fault that does nothing would prove nothing.
//!
//! ```text
//! cell (specification) ─▶ plans ─▶ world (aws, coordinator, host, timer) ─▶ outcomes ─▶ judged against cell ─▶ rows
//! ```
//! What is real in it, and what stands in for what: docs/decisions/0033-the-kill-matrix.md.

mod account;
mod aws;
mod cell;
mod client;
mod coordinator;
mod guest;
mod host;
mod row;
mod rows;
mod timer;
mod trials;
mod world;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use self::{account::InAccount, row::Row, world::Site};

#[derive(clap::Args)]
pub struct KillMatrixArgs {
    /// Of the drawn moments and delays
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Drawn runs of each row, beside those at fixed moments
    #[arg(long, default_value_t = 2)]
    draws: u32,
    /// Also write `{"rows": [...], "only_in_an_account": [...]}` here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What the file says.
#[derive(Serialize)]
struct Report<'a> {
    seed: u64,
    rows: &'a [Row],
    /// Not counted among the rows: no test here can prove them.
    only_in_an_account: &'a [InAccount],
}

pub fn run(args: &KillMatrixArgs) -> Result<()> {
    let site = Site::deployed()?;
    let mut rows = rows::rows(&site, &cell::cells(), args.seed, args.draws)?;
    rows.extend(trials::rows(&site, args.seed, args.draws)?);
    rows.extend(guest::rows()?);
    for row in &rows {
        println!("{row}");
    }
    for row in account::ROWS {
        println!("only in an account, not counted: {row}");
    }
    if let Some(path) = &args.json {
        let report = Report { seed: args.seed, rows: &rows, only_in_an_account: &account::ROWS };
        let text = serde_json::to_string_pretty(&report).context("rows are plain data")?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    let bad: Vec<&Row> = rows.iter().filter(|r| !r.in_bound).collect();
    println!("{} rows, {} of them not in bound", rows.len(), bad.len());
    let named: Vec<String> = bad.iter().map(|r| r.name()).collect();
    ensure!(bad.is_empty(), "not in bound: {}", named.join("; "));
    Ok(())
}
