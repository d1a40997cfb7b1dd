//! `cargo xtask demo`: EXP-028 for real on this machine, with nothing left behind.
//!
//! Owns the order of the steps and what a person sees of them. How daemons are started is `drums_infra::fleet`'s
//! business; what a verdict means is the analysis'.

mod clean;
mod interrupt;
mod made;
mod preflight;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use drums_infra::{
    fleet::{Binaries, Fleet, Layout},
    leakgate::{self, Scope, Snapshot},
};

use crate::workspace::{self, cargo, root};
pub use clean::clean;
use made::Made;

#[derive(clap::Args)]
pub struct DemoArgs {
    /// The spec to run
    #[arg(long, default_value = "docs/experiments/EXP-028.toml")]
    spec: PathBuf,
    /// Where CRIU, runc and QEMU are installed
    #[arg(long, default_value = "/var/lib/drums-tools")]
    tools: PathBuf,
}

const HOSTS: [&str; 2] = ["h1", "h2"];

/// Verdicts that are results: the demo did what it promises, whatever the bars say.
const RESULTS: [i32; 3] = [0, 10, 11];

pub fn demo(args: &DemoArgs) -> Result<ExitCode> {
    preflight::check(root())?;
    interrupt::watch()?;
    let started = Instant::now();
    let out = out_dir()?;
    let binaries = build()?;
    let workload = image()?;
    say("tools", &format!("CRIU, runc and QEMU in {}", args.tools.display()));
    let mut setup = std::process::Command::new(&binaries.agent);
    workspace::run(setup.arg("setup").arg("--tools").arg(&args.tools))?;
    interrupt::check()?;
    say("prepared", &format!("after {}", seconds(started.elapsed())));

    // Everything up to here is installation and stays for the next time; from here on all must go again.
    let before = Snapshot::take()?;
    let made = Made::begin(&out, &binaries.agent, &args.tools)?;
    let mut names = vec![out.display().to_string()];
    let (result, leaked) = with_fleet(args, &out, &binaries, &workload, made, &mut names);
    let mut left = leakgate::settle(&before, &Scope::from_env(names), Duration::from_secs(15))?
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>();
    left.extend(leaked);
    if left.is_empty() {
        say("leak check", "no new process, mount, namespace, cgroup, link or listening port");
        Made::finish(&out)?;
    } else {
        eprintln!("\nleft on this machine:\n  {}", left.join("\n  "));
        eprintln!("`make demo-clean` removes what the demo recorded in {}", out.display());
    }
    let code = result?;
    show(&out, started)?;
    if !left.is_empty() {
        bail!("the demo left {} things behind, listed above", left.len());
    }
    Ok(if RESULTS.contains(&code) { ExitCode::SUCCESS } else { ExitCode::from(u8::try_from(code).unwrap_or(1)) })
}

/// Starts the fleet, runs, and ends everything again whatever happened. Returns `drumsctl run`'s exit code, and what
/// teardown could not remove; adds to `names` what everything that agents made is named after.
fn with_fleet(
    args: &DemoArgs,
    out: &Path,
    binaries: &Binaries,
    workload: &Path,
    made: Made,
    names: &mut Vec<String>,
) -> (Result<i32>, Vec<String>) {
    let layout = Layout {
        binaries: binaries.clone(),
        home: out.join("home"),
        states: out.join("agents"),
        logs: out.join("logs"),
        tools: args.tools.clone(),
        coordinator_config: String::new(),
        log: None,
    };
    say("network", "coordinator 198.18.0.1, h1 198.18.0.11, h2 198.18.0.12, each in a namespace of its own");
    let mut fleet = match Fleet::prepare(layout, &HOSTS) {
        Ok(fleet) => fleet,
        Err(e) => return (Err(e.into()), Vec::new()),
    };
    let result = run(args, out, workload, &mut fleet, made);
    names.extend(fleet.installations());
    say("teardown", "ending the daemons, then auditing what they made");
    let mut left: Vec<String> = fleet.stop().iter().map(|name| format!("{name} had to be killed")).collect();
    for name in HOSTS {
        match fleet.audit(name) {
            Ok(audit) if audit.status.success() => {}
            Ok(audit) => left.push(format!(
                "the audit of {name} says: {}{}",
                String::from_utf8_lossy(&audit.stdout).trim(),
                String::from_utf8_lossy(&audit.stderr).trim()
            )),
            Err(e) => left.push(format!("{name} could not be audited: {:#}", anyhow::Error::from(e))),
        }
    }
    if left.is_empty()
        && let Err(e) = fs::remove_dir_all(&fleet.layout.states)
    {
        left.push(format!("{}: {e}", fleet.layout.states.display()));
    }
    (result, left)
}

fn run(args: &DemoArgs, out: &Path, workload: &Path, fleet: &mut Fleet, mut made: Made) -> Result<i32> {
    fleet.start_coordinator()?;
    made.daemon(fleet.coordinator.as_ref())?;
    for name in HOSTS {
        made.state(&fleet.layout.states.join(name))?;
        fleet.enrol(name)?;
        made.daemon(fleet.host_mut(name)?.agent.as_ref())?;
        say("agent", &format!("{name} is connected"));
        interrupt::check()?;
    }
    let workload = workload.to_str().context("the workload's path is not UTF-8")?;
    say("workload", fleet.ctl(&["workload", "add", workload, "--name", "minimal"])?.trim());
    let spec = root().join(&args.spec);
    let spec = spec.to_str().context("the spec's path is not UTF-8")?;
    let id = experiment_id(Path::new(spec))?;
    say("registered", fleet.ctl(&["register", spec])?.trim());
    interrupt::check()?;

    let status = interrupt::wait(&mut fleet.drumsctl(&["run", &id, "--watch"]))?;
    if interrupt::seen() {
        // The watcher has only detached: the run itself must end before its agents do.
        let _ = fleet.ctl(&["cancel", "--all"]);
        interrupt::check()?;
    }
    let code = status.code().context("`drumsctl run` was ended by a signal")?;
    if code == 2 || code == 3 || code == 1 {
        bail!(
            "`drumsctl run {id}` ended with exit code {code}; the daemons' logs are in {}",
            fleet.layout.logs.display()
        );
    }
    println!("\n{}", fleet.ctl(&["results", &id])?);
    let summary = fleet.ctl(&["results", &id, "--format", "json"])?;
    fs::write(out.join("summary.json"), &summary).context("cannot write summary.json")?;
    let path = |name: &str| out.join(name).display().to_string();
    fleet.ctl(&["report", &id, "--out", &path("report.html")])?;
    fleet.ctl(&["export", &id, "--out", &path("bundle")])?;
    let verified = fleet.ctl_output(&["verify", &path("bundle")])?;
    if !RESULTS.contains(&verified.status.code().unwrap_or(1)) && verified.status.code() != Some(code) {
        bail!("the bundle does not verify: {}", String::from_utf8_lossy(&verified.stderr).trim());
    }
    say("verified", String::from_utf8_lossy(&verified.stdout).lines().next().unwrap_or_default());
    Ok(code)
}

/// The id that the spec's file name carries.
fn experiment_id(spec: &Path) -> Result<String> {
    let text = fs::read_to_string(spec).with_context(|| format!("cannot read the spec {}", spec.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("{} is not TOML", spec.display()))?;
    let id = table.get("id").or_else(|| table.get("experiment").and_then(|e| e.get("id"))).and_then(|v| v.as_str());
    id.map(str::to_owned).with_context(|| format!("{} names no experiment id", spec.display()))
}

/// A new folder `target/demo/<UTC>` of the clone.
fn out_dir() -> Result<PathBuf> {
    let stamp = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let out = root().join("target/demo").join(stamp);
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    Ok(out)
}

/// Optimised builds of the programs that measure: a debug build would be measured as such.
fn build() -> Result<Binaries> {
    say("build", "optimised build of the coordinator and the agent (some minutes the first time)");
    // The same selection of packages as in the Makefile, so that dependencies are built once with one set of features.
    workspace::run(
        cargo()
            .args(["build", "--quiet", "--locked", "--profile", "quick", "-p", "xtask", "-p", "drums-agent"])
            .args(["-p", "drums-coordinator"]),
    )?;
    interrupt::check()?;
    Ok(Binaries::beside(&workspace::target_dir()?.join("quick")))
}

/// The workload: one userland tree for every arm.
fn image() -> Result<PathBuf> {
    let out = workspace::target_dir()?.join("images/minimal");
    let sha256 = crate::image::minimal(&out)?;
    say("image", &format!("minimal workload {}", sha256.short()));
    Ok(out)
}

fn show(out: &Path, started: Instant) -> Result<()> {
    let summary = root().join("target/demo/summary.json");
    fs::copy(out.join("summary.json"), &summary).with_context(|| format!("cannot write {}", summary.display()))?;
    println!("took      {}", seconds(started.elapsed()));
    println!("report    {}", out.join("report.html").display());
    println!("bundle    {}", out.join("bundle").display());
    println!("home      {}", out.join("home").display());
    println!("summary   {}", summary.display());
    Ok(())
}

fn say(what: &str, detail: &str) {
    println!("{what:<12}{detail}");
}

fn seconds(duration: Duration) -> String {
    let s = duration.as_secs();
    if s < 60 { format!("{s} s") } else { format!("{} min {} s", s / 60, s % 60) }
}
