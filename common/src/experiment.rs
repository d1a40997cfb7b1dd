//! The validated experiment: what a spec becomes once every rule held, and what a registration freezes.
//!
//! `Registration::canonical` is the canonical form (JSON, keys sorted, no spaces); its SHA-256 names the registration
//! and every sample carries it. Reading TOML is `spec`'s business; this module knows only the result.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    arm::ArmKind,
    clock::Micros,
    digest::Sha256,
    ids::{ArmName, ExperimentId, HostId, WorkloadName},
    range::{self, Real, Whole},
    williams,
};

/// Version of the canonical form. A change of meaning takes a new number.
pub const CANONICAL_VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    pub version: u32,
    pub id: ExperimentId,
    pub title: String,
    pub hypothesis: String,
    pub workload: WorkloadRef,
    pub limits: Limits,
    pub design: Design,
    pub hosts: HostsRule,
    pub arms: Vec<Arm>,
    pub metrics: Vec<MetricSpec>,
    pub bars: Vec<Bar>,
    pub gates: Gates,
    /// Runs of this registration end by this long after their start; blocks not done by then are missing.
    pub deadline_ms: u64,
    /// No run may start after this.
    pub not_after: Option<Micros>,
}

impl Experiment {
    pub fn arm(&self, name: &ArmName) -> Option<&Arm> {
        self.arms.iter().find(|a| &a.name == name)
    }
    pub fn metric(&self, metric: Metric) -> Option<&MetricSpec> {
        self.metrics.iter().find(|m| m.metric == metric)
    }

    /// Every rule that an experiment keeps, wherever it comes from: what plans, runs and analyses it relies on them.
    pub fn check(&self) -> Result<(), Unsound> {
        let sound = |holds: bool, what: &str| if holds { Ok(()) } else { Err(Unsound(what.to_owned())) };
        let whole = |name: &str, value: u64, range: Whole| {
            let (low, high) = (range.start(), range.end());
            sound(range.contains(&value), &format!("{name} is {value}, not a number from {low} to {high}"))
        };
        let real = |name: &str, value: f64, range: Real| {
            let (from, low, high) = (if range.closed { "from" } else { "above" }, range.low, range.high);
            sound(range.contains(value), &format!("{name} is {value}, not a number {from} {low} to {high}"))
        };
        const MIB: u64 = 1 << 20;
        sound(self.version == CANONICAL_VERSION, "its version is not the one that is known here")?;
        let Limits { cpu_milli, cpuset_size, memory_bytes, vmm_memory_overhead_bytes } = self.limits;
        whole("cpu_milli", cpu_milli.into(), range::CPU_MILLI)?;
        whole("cpuset_size", cpuset_size.into(), range::CPUSET_SIZE)?;
        whole("memory in MiB", memory_bytes / MIB, range::MEMORY_MIB)?;
        whole("vmm_memory_overhead in MiB", vmm_memory_overhead_bytes / MIB, range::OVERHEAD_MIB)?;
        sound(cpu_milli <= cpuset_size * 1_000, "cpu_milli is more than its set of CPUs has")?;

        let d = &self.design;
        whole("blocks_per_host", d.blocks_per_host.into(), range::BLOCKS)?;
        whole("warmup_blocks", d.warmup_blocks.into(), range::WARMUP)?;
        whole("template_builds_per_host", d.template_builds_per_host.into(), range::BUILDS)?;
        whole("seed", d.seed, range::SEED)?;
        whole("max_runs", d.max_runs.into(), range::MAX_RUNS)?;
        whole("ready_timeout_ms", d.ready_timeout_ms, range::READY_TIMEOUT_MS)?;
        whole("the deadline in minutes", self.deadline_ms / 60_000, range::DEADLINE_MINUTES)?;
        real("margin", d.margin, range::MARGIN)?;
        real("alpha", d.alpha, range::ALPHA)?;
        sound(d.template_builds_per_host <= d.blocks_per_host, "there are more template builds than blocks")?;

        whole("the count of hosts", self.hosts.count.into(), range::HOSTS)?;
        let named = self.hosts.names.len();
        sound(named == 0 || named == self.hosts.count as usize, "count and names of its hosts differ")?;
        sound(distinct(&self.hosts.names), "it names a host twice")?;

        sound(self.arms.len() >= 2, "it has fewer than two arms")?;
        sound(distinct(self.arms.iter().map(|a| &a.name)), "it has two arms of one name")?;
        for arm in &self.arms {
            let external = arm.kind == ArmKind::External;
            sound(
                external == arm.command.first().is_some_and(|c| c.starts_with('/')),
                "an arm's command does not fit its kind",
            )?;
            let Some(control) = &arm.control else { continue };
            let base = self.arm(control.base());
            let fits = base.is_some_and(|b| b.control.is_none() && b.kind == arm.kind && b.name != arm.name);
            sound(fits, &format!("{} is no control of an arm of its kind", arm.name))?;
            if let Control::Delayed { fraction, .. } = control {
                sound((fraction - d.margin).abs() <= 1e-9, &format!("{} is not delayed by the margin", arm.name))?;
            }
        }
        let rows = williams::square_size(self.arms.len()) as u32;
        sound(d.blocks_per_host.is_multiple_of(rows), "its blocks do not balance the arms over positions")?;

        sound(distinct(self.metrics.iter().map(|m| m.metric)), "it lists a metric twice")?;
        sound(self.metrics.iter().any(|m| m.primary), "it has no primary metric")?;
        sound(distinct(self.bars.iter().map(|b| &b.name)), "it has two bars of one name")?;
        for bar in &self.bars {
            real("a bar", bar.at_most, range::AT_MOST)?;
            let arms = [&bar.numerator, &bar.denominator];
            sound(arms[0] != arms[1] && arms.iter().all(|a| self.arm(a).is_some()), "a bar is not on two of its arms")?;
            sound(self.metric(bar.metric).is_some_and(|m| m.primary), "a bar is not on a primary metric")?;
        }

        let g = &self.gates;
        real("max_steal_fraction", g.max_steal_fraction, range::STEAL)?;
        real("max_outside_cpu_fraction", g.max_outside_cpu_fraction, range::OUTSIDE_CPU)?;
        real("max_canary_ratio", g.max_canary_ratio, range::CANARY)?;
        real("max_clock_step_ms", g.max_clock_step_ms, range::CLOCK_STEP_MS)?;
        whole("settle_timeout_ms", g.settle_timeout_ms, range::SETTLE_MS)?;
        real("max_void_fraction", g.max_void_fraction, range::VOID)
    }
}

fn distinct<T: Ord>(items: impl IntoIterator<Item = T>) -> bool {
    let mut seen = BTreeSet::new();
    items.into_iter().all(|item| seen.insert(item))
}

/// A rule of experiments that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsound(String);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadRef {
    pub name: WorkloadName,
    /// Digest of the workload's manifest; pinned by `register` when the spec names none.
    pub sha256: Option<Sha256>,
}

/// Declared once, put around the whole tree of every arm, read back in every arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// CPU quota in thousandths of a CPU.
    pub cpu_milli: u32,
    /// CPUs in the set; which ones is drawn per block.
    pub cpuset_size: u32,
    pub memory_bytes: u64,
    /// What a virtual machine monitor may use beyond its guest's memory; added to `memory_bytes` for QEMU's tree only.
    pub vmm_memory_overhead_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Design {
    /// Measured blocks on every host; a multiple of the Williams square's order so that positions balance.
    pub blocks_per_host: u32,
    /// Blocks before the first measured one: run, recorded, never counted.
    pub warmup_blocks: u32,
    pub template_builds_per_host: u32,
    pub seed: u64,
    pub max_runs: u32,
    /// A session that is not ready by then has failed.
    pub ready_timeout_ms: u64,
    /// Margin of equivalence and size of the positive control, as a fraction: 0.25 means 25 %.
    pub margin: f64,
    /// Two-sided error of every interval: 0.05 gives 95 %.
    pub alpha: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostsRule {
    /// Named hosts, or empty: any `count` hosts that can run every arm.
    pub names: Vec<HostId>,
    pub count: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    pub name: ArmName,
    pub kind: ArmKind,
    pub control: Option<Control>,
    /// For `external` only: program and arguments on the host.
    pub command: Vec<String>,
}

/// Arms that test the measurement instead of a mechanism.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Control {
    /// The same arm under a second name: must never come out different.
    SameAs { arm: ArmName },
    /// `arm` with `fraction` of its warm-up median added inside the timed window: must be found slower.
    Delayed { arm: ArmName, fraction: f64 },
}

impl Control {
    /// The arm that it is a control of.
    pub fn base(&self) -> &ArmName {
        match self {
            Self::SameAs { arm } | Self::Delayed { arm, .. } => arm,
        }
    }
}

/// What is measured per session. The unit is part of the name in every file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Metric {
    /// Intended start to the first full answer with a fresh nonce (E3), milliseconds.
    #[serde(rename = "create_to_ready_ms")]
    CreateToReady,
    /// Intended reset of a used session to the first full answer with a fresh nonce, milliseconds.
    #[serde(rename = "reset_to_ready_ms")]
    ResetToReady,
    /// Intended destroy until nothing of the session is observed, milliseconds.
    #[serde(rename = "destroy_ms")]
    Destroy,
    /// CPU time of the group that holds the tool and the session, over create to ready, seconds.
    #[serde(rename = "create_cpu_s")]
    CreateCpu,
}

impl Metric {
    pub const ALL: [Self; 4] = [Self::CreateToReady, Self::ResetToReady, Self::Destroy, Self::CreateCpu];
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CreateToReady => "create_to_ready_ms",
            Self::ResetToReady => "reset_to_ready_ms",
            Self::Destroy => "destroy_ms",
            Self::CreateCpu => "create_cpu_s",
        }
    }
    pub fn unit(self) -> &'static str {
        match self {
            Self::CreateCpu => "s",
            _ => "ms",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricSpec {
    pub metric: Metric,
    /// `E1` to `E6`; this workload has E3.
    pub endpoint: String,
    /// `K0` to `K6`: where templates are saved.
    pub position: String,
    /// For instance `cold as shipped` or `restored steady`, for people.
    pub base_case: String,
    pub primary: bool,
}

/// A threshold on a ratio of two arms, fixed before measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    pub name: String,
    pub metric: Metric,
    pub numerator: ArmName,
    pub denominator: ArmName,
    pub at_most: f64,
    pub rule: BarRule,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BarRule {
    /// The upper bound of the ratio's interval meets the bar (the default).
    Bound,
    /// The ratio of medians meets the bar, as in the seed records.
    Median,
    /// The ratio of 95th percentiles meets the bar.
    P95,
}

/// Limits of the environment gates, fixed before the run. Evidence holds the readings; the analysis judges them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// Steal time over the block, fraction of one CPU.
    pub max_steal_fraction: f64,
    /// CPU used outside the run over the block, fraction of one CPU.
    pub max_outside_cpu_fraction: f64,
    /// Slowest canary loop of a block over the median of the host's canaries.
    pub max_canary_ratio: f64,
    /// Largest step of the wall clock against CLOCK_MONOTONIC_RAW within a block.
    pub max_clock_step_ms: f64,
    /// Between samples zombies, dying cgroups and namespaces must be gone by then.
    pub settle_timeout_ms: u64,
    /// More voided blocks than this fraction makes the run invalid.
    pub max_void_fraction: f64,
}

/// What a run executes: stored append-only before the first sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    pub sha256: Sha256,
    pub canonical: String,
    pub experiment: Experiment,
    pub registered_at: Micros,
}

impl Registration {
    /// Freezes an experiment. Fails only if a number in it is not finite, which validation has refused before.
    pub fn freeze(experiment: Experiment, registered_at: Micros) -> Result<Self, serde_json::Error> {
        // serde_json's Map is sorted by key, so a pass through Value gives the canonical order.
        let value = serde_json::to_value(&experiment)?;
        let canonical = serde_json::to_string(&value)?;
        Ok(Self { sha256: Sha256::of(canonical.as_bytes()), canonical, experiment, registered_at })
    }

    /// Reads a canonical form back; refuses one whose digest is not `expected`.
    pub fn thaw(canonical: &str, expected: Sha256, registered_at: Micros) -> Result<Self, ThawError> {
        let got = Sha256::of(canonical.as_bytes());
        if got != expected {
            return Err(ThawError::Digest { expected, got });
        }
        let experiment: Experiment = serde_json::from_str(canonical).map_err(ThawError::Shape)?;
        experiment.check()?;
        Ok(Self { sha256: got, canonical: canonical.to_owned(), experiment, registered_at })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ThawError {
    #[error("the registration's canonical form has SHA-256 {got}, not {expected}")]
    Digest { expected: Sha256, got: Sha256 },
    #[error("the registration's canonical form is not an experiment of version {CANONICAL_VERSION}")]
    Shape(#[source] serde_json::Error),
    #[error("the registration's experiment could not have been registered")]
    Unsound(#[from] Unsound),
}

/// A frozen folder tree: relative path → size and digest. The workload's name is the SHA-256 of its canonical JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadManifest {
    pub version: u32,
    pub files: BTreeMap<String, ManifestFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// `file`, `dir` or `symlink`.
    pub kind: String,
    /// Unix permission bits.
    pub mode: u32,
    pub bytes: u64,
    /// Of the content; for a symlink of its target.
    pub sha256: Sha256,
    /// Target of a symlink, else empty.
    pub target: String,
}

impl WorkloadManifest {
    pub fn canonical(&self) -> String {
        serde_json::to_string(self).expect("a map of strings and numbers always serialises")
    }
    pub fn sha256(&self) -> Sha256 {
        Sha256::of(self.canonical().as_bytes())
    }
}
