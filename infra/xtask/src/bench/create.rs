//! The create bench: exec of `true` until it is reaped.
//!
//! *Bare*: new mount, pid, ipc, uts and network namespaces and nothing else, against `unshare` and `bwrap` making the same.
//! *Full*: ledger, cgroup with limits, overlay, pivot_root, and everything undone again, against `runc run` of the same
//! tree under the same limits, which also removes what it made.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use drums_agent::{
    arms::ToolPaths,
    engine::{
        EngineConfig,
        api::Timed,
        bench::{CreateBench, reaped_ms},
    },
    sys::CgroupLimits,
};
use nix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::series::{Contestant, Row, interleave, phase_row, ratio_row};
use crate::{rows, workspace};

#[derive(clap::Args)]
pub struct CreateArgs {
    /// Rounds that count; each runs every contestant once
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(20..))]
    rounds: u16,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write `{"rows": [...]}` here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Rounds before the first that counts: caches, the kernel's lazily made structures.
const WARMUPS: usize = 10;
/// Goals on the upper bound of the ratio, fixed beforehand.
const GOAL_BWRAP: f64 = 1.0;
const GOAL_RUNC: f64 = 0.35;
const CPU_MILLI: u32 = 1_000;
const MEMORY: u64 = 512 << 20;
const PIDS: u32 = 2048;

pub fn run(args: &CreateArgs) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "the bench makes namespaces and cgroups for real: run it as root");
    let target = workspace::target_dir()?;
    workspace::run(workspace::cargo().args(["build", "--quiet", "--locked", "--release"]).args([
        "-p",
        "xtask",
        "-p",
        "drums-agent",
        "-p",
        "drums-coordinator",
    ]))?;
    let image = target.join("images/minimal");
    crate::image::minimal(&image)?;
    let tree = image.join("tree");
    let temporary = tempfile::Builder::new().prefix("drums-bench-").tempdir()?;
    let config =
        EngineConfig { state: temporary.path().join("state"), tools: ToolPaths::default(), scratch_bytes: 256 << 20 };
    let limits = CgroupLimits { cpu_milli: CPU_MILLI, cpus: vec![0], memory_bytes: MEMORY, pids: PIDS };
    // The shim is the release build's, whatever this program is: a debug build would be measured as such.
    let agent = target.join("release/drums-agent");
    let bench = CreateBench::open(&config, &agent, tree.clone(), limits).context("cannot open the engine")?;
    let bundle = bundle(temporary.path(), &tree)?;
    let result = compare(args, bench, &bundle);
    let (rows, leaked) = result?;
    ensure!(leaked.is_empty(), "the bench could not undo: {}", leaked.join("; "));
    show(&rows);
    if let Some(path) = &args.json {
        rows::write(path, &rows)?;
    }
    Ok(())
}

fn compare(args: &CreateArgs, bench: CreateBench, bundle: &Path) -> Result<(Vec<Row>, Vec<String>)> {
    let bench = std::cell::RefCell::new(bench);
    let (bare_timelines, full_timelines) = (std::cell::RefCell::new(Vec::new()), std::cell::RefCell::new(Vec::new()));
    let number = std::cell::Cell::new(0_u32);
    let peer = |program: &'static str, arguments: &'static [&'static str]| Contestant {
        name: program,
        run: Box::new(move || timed(Command::new(program).args(arguments))),
    };
    let mut contestants = [
        Contestant { name: "bare", run: Box::new(|| Ok(keep(&bare_timelines, bench.borrow_mut().bare()?))) },
        peer("unshare", &["--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "/bin/true"]),
        // As pid 1, like ours and unshare's: without it bwrap would fork an init of its own.
        peer(
            "bwrap",
            &[
                "--unshare-pid",
                "--unshare-ipc",
                "--unshare-uts",
                "--unshare-net",
                "--as-pid-1",
                "--bind",
                "/",
                "/",
                "/bin/true",
            ],
        ),
        Contestant { name: "full", run: Box::new(|| Ok(keep(&full_timelines, bench.borrow_mut().full()?))) },
        Contestant {
            name: "runc run",
            run: Box::new(|| {
                number.set(number.get() + 1);
                let id = format!("drums-bench-{}-{}", std::process::id(), number.get());
                timed(Command::new("runc").arg("run").arg("--bundle").arg(bundle).arg(id))
            }),
        },
    ];
    let result = interleave(&mut contestants, WARMUPS, args.rounds.into(), args.seed);
    drop(contestants);
    // Whatever the series said, what it made is undone.
    let leaked = bench.into_inner().close();
    let times = result?;
    let [bare, unshare, bwrap, full, runc] = times.as_slice() else { bail!("five contestants give five series") };
    let mut rows = vec![
        ratio_row("create bare / unshare", bare, "unshare", unshare, None, args.seed),
        ratio_row("create bare / bwrap", bare, "bwrap", bwrap, Some(GOAL_BWRAP), args.seed),
        ratio_row("create full / runc run", full, "runc run", runc, Some(GOAL_RUNC), args.seed),
    ];
    let counted = |timelines: &std::cell::RefCell<Vec<Timed>>| timelines.borrow()[WARMUPS..].to_vec();
    let full_timelines = counted(&full_timelines);
    let reaped: Vec<f64> = full_timelines.iter().filter_map(reaped_ms).collect();
    rows.push(ratio_row("create full until reaped / runc run", &reaped, "runc run", runc, None, args.seed));
    rows.extend(phases("bare", &counted(&bare_timelines), bare));
    rows.extend(phases("full", &full_timelines, full));
    Ok((rows, leaked))
}

fn keep(timelines: &std::cell::RefCell<Vec<Timed>>, timed: Timed) -> f64 {
    let ms = timed.duration_ms();
    timelines.borrow_mut().push(timed);
    ms
}

/// One row per phase of a timeline, in order; a phase that occurs twice counts with its sum.
fn phases(name: &str, timelines: &[Timed], wholes: &[f64]) -> Vec<Row> {
    let mut names: Vec<&str> = Vec::new();
    for phase in timelines.iter().flat_map(|t| &t.phases) {
        if !names.contains(&phase.name.as_str()) {
            names.push(&phase.name);
        }
    }
    #[allow(clippy::cast_precision_loss)] // microseconds of one operation
    let sum = |timed: &Timed, name: &str| {
        timed.phases.iter().filter(|p| p.name == name).map(|p| (p.end_us - p.start_us) as f64 / 1e3).sum()
    };
    names
        .iter()
        .map(|phase| {
            let each: Vec<f64> = timelines.iter().map(|t| sum(t, phase)).collect();
            phase_row(&format!("create {name}: {phase}"), &each, name, wholes)
        })
        .collect()
}

/// Milliseconds from just before a program is started until it is reaped; an error if it fails.
fn timed(command: &mut Command) -> Result<f64> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let start = now_ms()?;
    let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let output = child.wait_with_output()?;
    let end = now_ms()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` ended with {}: {}", workspace::shown(command), output.status, said.trim());
    }
    Ok(end - start)
}

fn now_ms() -> Result<f64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_RAW).context("cannot read CLOCK_MONOTONIC_RAW")?;
    #[allow(clippy::cast_precision_loss)]
    // 2^53 ns are 104 days of uptime at full precision, and more than enough after
    Ok(now.tv_sec() as f64 * 1e3 + now.tv_nsec() as f64 / 1e6)
}

/// A bundle as `runc spec` makes it, with the same tree, namespaces and limits as ours. The tree is mounted read-only
/// instead of under an overlay, which is the less work for runc.
fn bundle(dir: &Path, tree: &Path) -> Result<PathBuf> {
    let bundle = dir.join("bundle");
    fs::create_dir(&bundle)?;
    workspace::run(Command::new("runc").arg("spec").arg("--bundle").arg(&bundle))?;
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/bin/true"]);
    config["root"] = json!({ "path": tree, "readonly": true });
    config["linux"]["namespaces"] =
        json!(["pid", "network", "ipc", "uts", "mount"].map(|kind| json!({ "type": kind })));
    config["linux"]["resources"]["memory"] = json!({ "limit": MEMORY });
    config["linux"]["resources"]["pids"] = json!({ "limit": PIDS });
    config["linux"]["resources"]["cpu"] =
        json!({ "quota": i64::from(CPU_MILLI) * 100, "period": 100_000, "cpus": "0" });
    fs::write(&path, serde_json::to_string_pretty(&config)?)?;
    Ok(bundle)
}

fn show(rows: &[Row]) {
    for row in rows {
        match (row.unit, row.met) {
            ("ratio", met) => {
                let goal = row.goal.map_or(String::new(), |g| {
                    format!("  goal {g}: {}", if met == Some(true) { "met" } else { "missed" })
                });
                println!(
                    "{:<38} {:.3} [{:.3}, {:.3}]  {:.2} ms against {:.2} ms, n = {}{goal}",
                    row.name, row.ratio, row.low, row.high, row.median_ms, row.peer_median_ms, row.n
                );
            }
            _ => println!("{:<38} {:>5.1} %  {:.3} ms", row.name, row.ratio * 100.0, row.median_ms),
        }
    }
}
