//! `cargo xtask chaos`: a real coordinator and real agents in namespaces, real arms, and faults from a seeded schedule;
//! then, from outside, whether every promise held. The same seed is the same schedule.
//!
//! What is done to processes, disks and packets is `field`'s, when is `schedule`'s, what must hold is `invariants`'.

mod clocks;
mod disk;
mod field;
mod invariants;
mod operator;
mod relay;
mod schedule;
mod spec;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use drums_common::{clock::Micros, ids::HostId};
use drums_infra::{
    fleet::Binaries,
    leakgate::{self, Scope, Snapshot},
};
use serde::Serialize;

use self::{
    field::{Field, Happened, LIFE_MS, tended},
    invariants::{Evidence, Findings, Judged},
    operator::{Ctl, Operator, Told, open_runs},
    relay::Packets,
    schedule::{Fault, Kind, Target, count, schedule},
};

#[derive(clap::Args)]
pub struct ChaosArgs {
    /// Of the schedule
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long faults are done; a minute holds every kind of them
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Also write counts, findings and the log of the faults here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Build nothing: take this image of the workload, and the programs beside this one as they are
    #[arg(long, value_name = "DIR")]
    image: Option<PathBuf>,
    /// Only print the schedule
    #[arg(long)]
    schedule: bool,
}

const HOSTS: [&str; 3] = ["h1", "h2", "h3"];
const TOOLS: &str = "/var/lib/drums-tools";
/// An experiment on one host, one on two.
const EXPERIMENTS: [(&str, usize); 2] = [("EXP-910", 1), ("EXP-911", 2)];
const BLOCKS: u32 = 2;
/// Open runs at the end: three in a row, each within its deadline and what closing may take.
const CLOSING: Duration = Duration::from_secs(3 * 240);
const LOOK_EVERY: Duration = Duration::from_secs(1);
const BACK: Duration = Duration::from_secs(90);
const SETTLE: Duration = Duration::from_secs(20);

/// What the file says.
#[derive(Serialize)]
struct Report<'a> {
    seed: u64,
    minutes: f64,
    holds: bool,
    /// Faults that were really done, by kind.
    faults: BTreeMap<Kind, usize>,
    packets: Packets,
    operator: &'a Told,
    findings: &'a Findings,
    happened: &'a [Happened],
}

pub fn run(args: &ChaosArgs) -> Result<()> {
    ensure!(args.minutes > 0.0 && args.minutes <= 24.0 * 60.0, "--minutes is above 0 and at most a day");
    let total = Duration::from_secs_f64(args.minutes * 60.0);
    let faults = schedule(args.seed, u64::try_from(total.as_millis())?, HOSTS.len(), LIFE_MS);
    if args.schedule {
        for fault in &faults {
            println!("{}", serde_json::to_string(fault)?);
        }
        return Ok(());
    }
    ensure!(nix::unistd::geteuid().is_root(), "processes are killed and disks frozen for real: run it as root");
    disk::own_mounts()?;
    let (binaries, image) = prepare(args.image.as_deref())?;
    // Kept on failure: logs, spools and store are what a failure is understood from.
    let mut folder = tempfile::Builder::new().prefix("drums-chaos-").tempdir()?;
    folder.disable_cleanup(true);
    let done = chaos(args, &faults, total, folder.path(), binaries, &image);
    if done.is_ok() {
        folder.disable_cleanup(false);
        return done;
    }
    let kept = folder.path().display();
    done.with_context(|| format!("chaos of seed {} failed; logs, spools and store are in {kept}", args.seed))
}

fn prepare(image: Option<&Path>) -> Result<(Binaries, PathBuf)> {
    let (agent, tree) = crate::fault_windows::prepare(image)?;
    let folder = agent.parent().context("the agent lies in no folder")?;
    let image = tree.parent().context("the tree lies in no image")?.to_owned();
    crate::workspace::run(std::process::Command::new(&agent).args(["setup", "--tools", TOOLS]))?;
    Ok((Binaries::beside(folder), image))
}

fn chaos(
    args: &ChaosArgs,
    faults: &[Fault],
    total: Duration,
    dir: &Path,
    binaries: Binaries,
    image: &Path,
) -> Result<()> {
    let before = Snapshot::take()?;
    let mut names = vec![dir.display().to_string()];
    let mut field = Field::start(dir, binaries, Path::new(TOOLS), &HOSTS, args.seed)?;
    let ctl = Ctl { program: field.fleet.layout.binaries.drumsctl.clone(), home: field.fleet.layout.home.clone() };
    ctl.text(&["workload", "add", image.to_str().context("the image's path is not UTF-8")?, "--name", "minimal"])?;
    for (id, hosts) in EXPERIMENTS {
        let path = dir.join(format!("{id}.toml"));
        fs::write(&path, spec::spec(id, hosts, BLOCKS))?;
        ctl.text(&["register", path.to_str().context("not UTF-8")?])?;
    }
    let operator = Operator::start(ctl.clone(), EXPERIMENTS.map(|(id, _)| id.to_owned()).to_vec());
    println!("seed {}: {} faults in {:.0} s; folder {}", args.seed, faults.len(), total.as_secs_f64(), dir.display());
    inflict(&mut field, &operator, faults, total)?;
    operator.close();

    let back = tended(&mut field, BACK, Field::all_up)?;
    ensure!(back, "not every daemon came back: {:?}", field.surprises);
    let closed = all_closed(&mut field, &ctl)?;
    let mut told = operator.end();
    let mut found = Findings::default();
    if !closed {
        found.violated(format!("runs are open {} s after the last fault", CLOSING.as_secs()));
    }
    afterwards(&mut field, &ctl, &mut told, &mut found)?;
    look(&mut field, &ctl, dir, &told, &mut found)?;
    let packets = field.packets();
    let happened = std::mem::take(&mut field.happened);
    names.extend(field.fleet.installations());
    drop(field);
    let left = leakgate::settle(&before, &Scope::from_env(names), SETTLE)?;
    found.violations.extend(left.iter().map(|l| format!("left on the machine: {l}")));

    let mut counts = count(happened.iter().map(|h| h.fault.kind));
    counts.insert(Kind::Cancel, told.cancelled.len());
    report(args, &counts, packets, &told, &found, &happened)
}

/// Waits until no run is open.
fn all_closed(field: &mut Field, ctl: &Ctl) -> Result<bool> {
    let mut looked = Instant::now();
    tended(field, CLOSING, |_| {
        let due = looked.elapsed() >= LOOK_EVERY;
        if due {
            looked = Instant::now();
        }
        due && ctl.json(&["runs", "--json"]).is_ok_and(|runs| open_runs(&runs).is_empty())
    })
}

/// The fleet works after all that: a run that nothing is done to is complete.
fn afterwards(field: &mut Field, ctl: &Ctl, told: &mut Told, found: &mut Findings) -> Result<()> {
    let (id, _) = EXPERIMENTS[0];
    let mut made = None;
    // Refused until its host is connected again.
    tended(field, BACK, |_| {
        made = ctl.json(&["run", id, "--json"]).ok().and_then(|view| view["run"].as_str().map(str::to_owned));
        made.is_some()
    })?;
    let Some(made) = made else {
        found.violated(format!("no run could be made within {} s after the last fault", BACK.as_secs()));
        return Ok(());
    };
    all_closed(field, ctl)?;
    let runs = ctl.json(&["runs", "--json"])?;
    let last = runs["runs"].as_array().and_then(|l| l.iter().find(|r| r["run"].as_str() == Some(&made)));
    let verdict = last.and_then(|r| r["verdict"].as_str()).unwrap_or_default();
    if !["pass", "fail", "undecided"].contains(&verdict) {
        let why = last.map(|r| r["ending"].to_string()).unwrap_or_default();
        found.violated(format!("{made}, to which nothing was done, closed as {verdict:?}: {why}"));
    }
    told.made.push(made);
    Ok(())
}

/// Does what the schedule says, when it says so, and keeps everybody up who should be.
fn inflict(field: &mut Field, operator: &Operator, faults: &[Fault], total: Duration) -> Result<()> {
    let start = Instant::now();
    let mut to_come = faults.iter().copied().collect::<std::collections::VecDeque<_>>();
    let mut going_on: Vec<(u64, usize)> = Vec::new();
    while start.elapsed() < total || !going_on.is_empty() {
        let next = to_come.front().map(|f| f.at_ms).into_iter().chain(going_on.iter().map(|(end, _)| *end)).min();
        let next = Duration::from_millis(next.unwrap_or(u64::MAX)).min(total.max(start.elapsed()));
        tended(field, next.saturating_sub(start.elapsed()), |_| start.elapsed() >= next)?;
        let now = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        for (_, index) in going_on.extract_if(.., |(end, _)| *end <= now) {
            field.end(index)?;
        }
        while let Some(fault) = to_come.pop_front_if(|f| f.at_ms <= now) {
            println!("{:7.1} s  {}", start.elapsed().as_secs_f64(), serde_json::to_string(&fault)?);
            match fault.target {
                Target::Run(number) => operator.cancel(number),
                _ => going_on.push((fault.end_ms().max(now), field.begin(fault)?)),
            }
        }
    }
    Ok(())
}

/// Everything that is looked at from outside, daemons up, then ended.
fn look(field: &mut Field, ctl: &Ctl, dir: &Path, told: &Told, found: &mut Findings) -> Result<()> {
    let runs = ctl.json(&["runs", "--json"])?;
    invariants::closed(&runs, &told.made, &told.cancelled, found);
    invariants::judged(&judgements(ctl, &runs)?, &field.happened, found);
    let mut evidence = Vec::new();
    for (id, _) in EXPERIMENTS {
        let list = runs["runs"].as_array();
        if !list.is_some_and(|l| l.iter().any(|r| r["experiment"].as_str() == Some(id))) {
            continue;
        }
        let bundle = dir.join(format!("{id}.bundle"));
        let path = bundle.to_str().context("not UTF-8")?;
        ctl.text(&["export", id, "--out", path])?;
        // Exit codes 0 and from 10 on are verdicts; 1 is a bundle that does not hold.
        let verified = field.fleet.ctl_output(&["verify", path])?;
        if !matches!(verified.status.code(), Some(0 | 10..=15)) {
            let said = String::from_utf8_lossy(&verified.stderr);
            found.violated(format!("the bundle of {id} does not verify: {}: {}", verified.status, said.trim()));
        }
        evidence.push(Evidence::read(&bundle)?);
    }
    invariants::verdicts(&evidence, &runs, found);
    field.stop()?;
    let mut states = Vec::new();
    for host in HOSTS {
        states.push((host.parse::<HostId>()?, field.state(host)));
    }
    invariants::once(&evidence, &states, found)?;
    for host in HOSTS {
        let audit = field.fleet.audit(host)?;
        if !audit.status.success() {
            let said = String::from_utf8_lossy(&audit.stdout).into_owned() + &String::from_utf8_lossy(&audit.stderr);
            found.violated(format!("the audit of {host} ended with {}: {}", audit.status, said.trim()));
        }
    }
    found.violations.append(&mut field.surprises);
    Ok(())
}

/// Every time that a host was judged lost, from the runs' own history.
fn judgements(ctl: &Ctl, runs: &serde_json::Value) -> Result<Vec<Judged>> {
    let mut out = Vec::new();
    for run in runs["runs"].as_array().into_iter().flatten().filter_map(|r| r["run"].as_str()) {
        let lines = ctl.json(&["logs", run, "--json"])?;
        for line in lines.as_array().into_iter().flatten().filter(|l| l["kind"] == "host-lost") {
            let host = HOSTS.iter().position(|h| line["source"].as_str() == Some(*h)).context("an unknown host")?;
            let at: jiff::Timestamp =
                line["at"].as_str().unwrap_or_default().parse().context("no time of a judgement")?;
            out.push(Judged { run: run.to_owned(), host, at: Micros(at.as_microsecond()) });
        }
    }
    Ok(out)
}

fn report(
    args: &ChaosArgs,
    counts: &BTreeMap<Kind, usize>,
    packets: Packets,
    told: &Told,
    found: &Findings,
    happened: &[Happened],
) -> Result<()> {
    let holds = found.violations.is_empty();
    if let Some(path) = &args.json {
        let report = Report {
            seed: args.seed,
            minutes: args.minutes,
            holds,
            faults: counts.clone(),
            packets,
            operator: told,
            findings: found,
            happened,
        };
        let text = serde_json::to_string_pretty(&report).context("a report is plain data")?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("faults      {}", serde_json::to_string(counts)?);
    println!("packets     {}", serde_json::to_string(&packets)?);
    println!("runs        {} closed: {}", found.runs, serde_json::to_string(&found.verdicts)?);
    println!(
        "evidence    {} records, {} samples; {} acknowledged records compared, {} verdicts computed again",
        found.records, found.samples, found.acknowledged, found.recomputed
    );
    println!("judged lost {}", found.hosts_judged_lost);
    for what in &found.violations {
        println!("VIOLATED    {what}");
    }
    ensure!(holds, "{} invariants are violated", found.violations.len());
    let none: Vec<String> = counts.iter().filter(|(_, n)| **n == 0).map(|(kind, _)| format!("{kind:?}")).collect();
    // A shorter one is for trying things out.
    ensure!(none.is_empty() || args.minutes < 1.0, "no fault of these kinds was done: {}", none.join(", "));
    Ok(())
}
