//! Specs: `register` and `plan`.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use drums_common::spec;
use drums_common::{note, say};

use super::{Client, CtlError, Global, output};
use crate::api::views::{PlanView, RegistrationView, SpecBody};

#[derive(Debug, Args)]
pub struct Register {
    /// The spec, a TOML file.
    pub spec: PathBuf,
    /// This is a later version of a registered experiment: keep both.
    #[arg(long)]
    pub amend: bool,
}

#[derive(Debug, Args)]
pub struct Plan {
    /// The spec, a TOML file.
    pub spec: PathBuf,
    /// Print every block's order.
    #[arg(long)]
    pub order: bool,
}

/// Reads a spec and checks what needs no coordinator; a file that is too large is not read.
fn read(path: &Path) -> Result<SpecBody, CtlError> {
    let file = path.display().to_string();
    let handle = std::fs::File::open(path).map_err(CtlError::file("read", path))?;
    let meta = handle.metadata().map_err(CtlError::file("read", path))?;
    if meta.is_dir() {
        return Err(CtlError::bad(format!("{file} is a folder"), "give the spec's TOML file"));
    }
    if meta.len() > spec::MAX_SPEC_BYTES {
        return Err(CtlError::BadSpec(Box::new(spec::too_large(&file, meta.len()))));
    }
    let mut bytes = Vec::new();
    // One byte more than is allowed tells a pipe or a growing file that is too large.
    handle.take(spec::MAX_SPEC_BYTES + 1).read_to_end(&mut bytes).map_err(CtlError::file("read", path))?;
    spec::parse(&file, &bytes).map_err(|bad| CtlError::BadSpec(Box::new(bad)))?;
    // `parse` refused what is not UTF-8.
    let source = String::from_utf8_lossy(&bytes).into_owned();
    Ok(SpecBody { file, source, amend: false })
}

pub(super) async fn register(global: &Global, c: Register) -> Result<ExitCode, CtlError> {
    let body = SpecBody { amend: c.amend, ..read(&c.spec)? };
    let r: RegistrationView = Client::new(global).post("/registrations", &body).await?;
    if global.json {
        output::json(&r)?;
    } else {
        say!("{} {}", r.experiment, r.sha256)?;
        let was = if r.new { "registered" } else { "was registered already, on" };
        note!("{} {was} {}; {} of {} runs made", r.experiment, output::time(&r.registered), r.runs, r.max_runs);
        if r.latest != r.sha256 {
            note!(
                "note: a run takes the latest registration, {}; name this one to run it: drumsctl run {} --registration {}",
                r.latest.short(),
                r.experiment,
                r.sha256
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn plan(global: &Global, c: Plan) -> Result<ExitCode, CtlError> {
    let body = read(&c.spec)?;
    let plan: PlanView = Client::new(global).post("/plan", &body).await?;
    if global.json {
        output::json(&plan)?;
        return Ok(ExitCode::SUCCESS);
    }
    show(&plan, c.order)?;
    Ok(ExitCode::SUCCESS)
}

fn show(p: &PlanView, order: bool) -> Result<(), CtlError> {
    let e = &p.experiment;
    say!("{}  {}", e.id, e.title)?;
    let registered = if p.registered { "registered" } else { "not registered" };
    say!("registration   {} ({registered})", p.registration.map_or_else(|| "-".to_owned(), output::short))?;
    let sha = e.workload.sha256.map_or_else(|| "not stored here".to_owned(), output::short);
    say!("workload       {} ({sha})", e.workload.name)?;
    say!(
        "limits         {} thousandths of a CPU on a set of {}, {} of memory",
        e.limits.cpu_milli,
        e.limits.cpuset_size,
        output::bytes(e.limits.memory_bytes)
    )?;
    let d = &e.design;
    say!(
        "design         {} warm-up and {} measured blocks per host, {} template builds, seed {}, margin {} %, alpha {}",
        d.warmup_blocks,
        d.blocks_per_host,
        d.template_builds_per_host,
        d.seed,
        d.margin * 100.0,
        d.alpha
    )?;
    say!(
        "expected       {} ({}); deadline {}",
        output::duration(p.expected_ms),
        p.expected_from,
        output::duration(e.deadline_ms)
    )?;
    say!("machines       {}", p.machines)?;
    say!("")?;
    let rows: Vec<Vec<String>> = e
        .arms
        .iter()
        .map(|a| {
            let control = match &a.control {
                None => String::new(),
                Some(drums_common::experiment::Control::SameAs { arm }) => format!("A/A control of {arm}"),
                Some(drums_common::experiment::Control::Delayed { arm, fraction }) => {
                    format!("{arm} delayed by {} %", fraction * 100.0)
                }
            };
            vec![a.name.to_string(), a.kind.to_string(), control]
        })
        .collect();
    output::table(&["arm", "kind", "control"], &rows)?;
    say!("")?;
    let rows: Vec<Vec<String>> = e
        .bars
        .iter()
        .map(|b| {
            let rule = match b.rule {
                drums_common::experiment::BarRule::Bound => "bound of the interval",
                drums_common::experiment::BarRule::Median => "ratio of medians",
                drums_common::experiment::BarRule::P95 => "ratio of 95th percentiles",
            };
            vec![
                b.name.clone(),
                b.metric.as_str().to_owned(),
                format!("{} / {}", b.numerator, b.denominator),
                b.at_most.to_string(),
                rule.to_owned(),
            ]
        })
        .collect();
    output::table(&["bar", "metric", "ratio", "at most", "tested on"], &rows)?;
    say!("")?;
    let g = &e.gates;
    let gates = [
        ("steal", format!("at most {} of a CPU", g.max_steal_fraction), "environment: voids the block"),
        ("outside load", format!("at most {} of a CPU", g.max_outside_cpu_fraction), "environment: voids the block"),
        ("canary", format!("at most {} of its median", g.max_canary_ratio), "environment: voids the block"),
        ("clock step", format!("at most {} ms", g.max_clock_step_ms), "environment: voids the block"),
        ("settle", format!("within {}", output::duration(g.settle_timeout_ms)), "environment: voids the block"),
        ("voids", format!("at most {} %", g.max_void_fraction * 100.0), "else the run is invalid"),
        (
            "mechanism, limits, equivalence, completeness",
            "as registered".to_owned(),
            "fidelity: else the run is invalid",
        ),
        (
            "function, identity, ready time-out",
            format!("ready within {}", output::duration(d.ready_timeout_ms)),
            "outcome: else the session is at plus infinity",
        ),
    ];
    let rows: Vec<Vec<String>> = gates.into_iter().map(|(a, b, c)| vec![a.to_owned(), b, c.to_owned()]).collect();
    output::table(&["gate", "limit", "effect"], &rows)?;
    say!("")?;
    let rows: Vec<Vec<String>> = p
        .hosts
        .iter()
        .map(|h| {
            vec![
                h.host.to_string(),
                if h.chosen { "yes" } else { "no" }.to_owned(),
                h.machine.clone().unwrap_or_else(|| "-".to_owned()),
                h.blocks.len().to_string(),
                if h.lacks.is_empty() { "-".to_owned() } else { h.lacks.join("; ") },
            ]
        })
        .collect();
    output::table(&["host", "chosen", "machine", "blocks", "lacks"], &rows)?;
    if order {
        for h in p.hosts.iter().filter(|h| h.chosen) {
            say!("")?;
            say!("{}", h.host)?;
            for b in &h.blocks {
                say!("  {:<8} {:>3}  build {}  {}", b.kind, b.block, b.template_build, b.order.join(" "))?;
            }
        }
    }
    for n in &p.notes {
        say!("note: {n}")?;
    }
    for m in &p.missing {
        say!("missing: {m}")?;
    }
    if p.missing.is_empty() {
        say!("a run could start now: drumsctl run {} --watch", e.id)?;
    }
    Ok(())
}
