//! The summary: every number and the verdict of an experiment as one serialisable value. `summary.json`, the API and the
//! report all show this and nothing else; `verify` computes it anew and compares.

use std::collections::BTreeMap;

pub use drums_common::verdict::Verdict;
use drums_common::{
    arm::ArmKind,
    digest::Sha256,
    experiment::{BarRule, Metric},
    ids::{ArmName, ExperimentId, HostId, RunId},
};
use serde::{Deserialize, Serialize};

use crate::{stats::Answer, value::Value};

/// Status of the experiment's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Planned,
    Preliminary,
    Verified,
    Failed,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Preliminary => "preliminary",
            Self::Verified => "verified",
            Self::Failed => "failed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub verdict: Verdict,
    pub status: Status,
    /// One line: verdict, experiment, machines and agents, runs.
    pub headline: String,
    /// Why the verdict is what it is; for a pass, what carries it.
    pub reasons: Vec<String>,
    /// What the verdict does not say.
    pub limits_of_claim: Vec<String>,
    pub registration: Sha256,
    pub experiment: ExperimentId,
    pub title: String,
    pub hypothesis: String,
    /// `1 machine, 2 agents`.
    pub scale: String,
    pub machines: Vec<MachineSummary>,
    pub hosts: Vec<HostSummary>,
    pub runs: Runs,
    pub arms: Vec<ArmSummary>,
    pub ratios: Vec<RatioSummary>,
    pub gates: Vec<GateSummary>,
    pub controls: Controls,
    pub accounting: Accounting,
    pub harness: Vec<HarnessSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineSummary {
    pub machine: String,
    pub hosts: Vec<HostId>,
    pub cpu_model: String,
    pub kernel: String,
    /// Per mechanism: hosts of different strata are never pooled.
    pub strata: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostSummary {
    pub host: HostId,
    pub machine: String,
    pub hostname: String,
    pub os: String,
    pub kernel: String,
    pub cpu_model: String,
    pub microcode: String,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub cgroup_version: u8,
    pub accelerator: String,
    pub accelerator_detail: String,
    pub mitigations: BTreeMap<String, String>,
    /// Name → `version (digest)`.
    pub tools: BTreeMap<String, String>,
    pub agent_version: String,
    pub agent_sha256: Sha256,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Runs {
    /// `1 of 1`: pooled of made.
    pub text: String,
    pub pooled: u32,
    pub made: u32,
    pub max: u32,
    pub list: Vec<RunSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    pub run: RunId,
    pub number: u32,
    /// `complete` if it is pooled, else `invalid`, `incomplete`, `lost`, `cancelled` or `running`.
    pub state: String,
    pub reasons: Vec<String>,
    pub voided_blocks: u32,
    pub voids: Vec<String>,
}

/// One arm on one machine. The fields up to `high` are those of the first primary metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmSummary {
    pub arm: ArmName,
    pub kind: ArmKind,
    pub machine: String,
    /// `A/A control of X`, `X delayed: registered 25 %, injected 24.6 %`, or nothing.
    pub role: String,
    /// `own kernel`, `shared kernel` or `unknown`.
    pub isolation: String,
    pub metric: Metric,
    pub n: u32,
    pub median: Option<Value>,
    pub low: Option<Value>,
    pub high: Option<Value>,
    pub sessions: u32,
    pub valid_sessions: u32,
    pub valid_rate: Option<Value>,
    pub valid_low: Value,
    pub valid_high: Value,
    pub metrics: Vec<MetricSummary>,
    pub template: Option<TemplateSummary>,
    /// Medians of the phases of each operation, in order of start.
    pub phases: Vec<PhaseSummary>,
    /// Share of the variance of the logarithm of the first primary metric, by level.
    pub variance_shares: Vec<Share>,
    pub failures: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    pub level: String,
    pub share: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricSummary {
    pub metric: Metric,
    pub unit: String,
    pub endpoint: String,
    pub position: String,
    pub base_case: String,
    pub n: u32,
    /// Values that are plus infinity because the session failed.
    pub failed: u32,
    pub median: Option<Value>,
    /// Order statistics; none below n = 6 at 95 %.
    pub low: Option<Value>,
    pub high: Option<Value>,
    pub p95: Percentile,
    pub p99: Percentile,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Percentile {
    Known {
        value: Value,
        low: Value,
        high: Value,
    },
    /// `n too small`.
    Unknown(String),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TemplateSummary {
    pub builds: u32,
    pub median_build_ms: Value,
    pub median_bytes: u64,
    /// Against this cold arm of the same mechanism.
    pub cold_arm: Option<ArmName>,
    /// Sessions after which building the template has paid; none if a session from it is not faster.
    pub break_even_sessions: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseSummary {
    pub operation: String,
    pub phase: String,
    pub n: u32,
    pub median_start_ms: Value,
    pub median_ms: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioSummary {
    /// The bar's name, or one made of the arms.
    pub name: String,
    pub metric: Metric,
    pub numerator: ArmName,
    pub denominator: ArmName,
    pub machine: String,
    pub endpoint: String,
    pub position: String,
    pub base_case: String,
    /// `a` within an arm's mechanism, `b` between mechanisms on one path, `c` product contrast.
    pub family: String,
    pub isolation: String,
    /// Geometric mean of paired ratios.
    pub ratio: Option<Value>,
    pub low: Value,
    pub high: Value,
    pub ratio_of_medians: Option<Value>,
    /// Paired blocks, failed sessions included.
    pub blocks: u32,
    /// What was resampled: `block` or `template build`, and how many.
    pub unit: String,
    pub units: u32,
    /// At the registered margin.
    pub answer: Answer,
    pub mde: Option<Value>,
    /// Fewer than eight template builds on this machine.
    pub exploratory: bool,
    /// Blocks in which only one of both was valid, and McNemar's p value of that.
    pub only_numerator_valid: u32,
    pub only_denominator_valid: u32,
    pub mcnemar_p: Value,
    pub bar: Option<BarSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BarSummary {
    pub at_most: Value,
    pub rule: BarRule,
    /// The number that the rule tests.
    pub tested: Option<Value>,
    /// `pass`, `fail` or `undecided`.
    pub answer: Verdict,
    pub reason: String,
    /// One-sided, against a ratio of at least the bar.
    pub p: Value,
    /// Holm's correction over the machine's bars, for a claim on this bar alone.
    pub p_holm: Value,
    /// Chance that this rule passes two identical arms, by exchanging the arms of each pair at random.
    pub chance_for_identical_arms: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    Environment,
    Fidelity,
    Outcome,
}

impl GateKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Environment => "environment",
            Self::Fidelity => "fidelity",
            Self::Outcome => "outcome",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSummary {
    pub run: RunId,
    pub name: String,
    pub kind: GateKind,
    pub passed: bool,
    /// `holds`, `does not hold`, or why there is no answer: then it has not passed, and nothing is held against the run.
    pub answer: String,
    /// What a failure of it does.
    pub effect: String,
    /// What was registered.
    pub limit: String,
    /// What was read.
    pub reading: String,
    /// At most twenty; what did not hold, and where.
    pub findings: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Controls {
    /// The first A/A control on the first primary metric.
    pub aa: Option<AaSummary>,
    /// The first positive control on the first primary metric.
    pub delayed: Option<DelayedSummary>,
    pub all_aa: Vec<AaSummary>,
    pub all_delayed: Vec<DelayedSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AaSummary {
    pub arm: ArmName,
    pub base: ArmName,
    pub machine: String,
    pub metric: Metric,
    pub ratio: Option<Value>,
    pub low: Value,
    pub high: Value,
    /// Minimum detectable effect at the registered alpha and 80 % power, as a fraction.
    pub mde: Option<Value>,
    pub margin: Value,
    pub answer: Answer,
    pub units: u32,
    pub unit: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelayedSummary {
    pub arm: ArmName,
    pub base: ArmName,
    pub machine: String,
    pub metric: Metric,
    /// The registered share of the base arm's create.
    pub fraction: Value,
    /// The share that was injected: median over blocks of the delay in the timelines over the base arm's create.
    pub injected: Option<Value>,
    /// Median of the delays in the timelines, milliseconds, by host.
    pub injected_ms: BTreeMap<HostId, Value>,
    /// The whole interval lies above 1.
    pub found: bool,
    pub ratio: Option<Value>,
    pub low: Value,
    pub high: Value,
    pub mde: Option<Value>,
    pub units: u32,
}

/// To the sample: `started = valid + failed + voided + lost`, over measured blocks of pooled and unpooled runs. Started
/// comes from the orders of blocks, the rest from outcomes and samples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounting {
    pub blocks_due: u64,
    pub blocks_started: u64,
    pub blocks_voided: u64,
    pub blocks_counted: u64,
    pub samples_started: u64,
    pub samples_valid: u64,
    pub samples_failed: u64,
    pub samples_voided: u64,
    pub samples_lost: u64,
    /// Valid or failed samples of runs that are not pooled, or of blocks beyond the registered number.
    pub samples_not_counted: u64,
    pub late_records: u64,
    /// Turns without an outcome, outcomes without a sample, sessions that belong to no turn: each named.
    pub unaccounted: Vec<String>,
    /// Nothing is unaccounted for, and the sum holds.
    pub balanced: bool,
}

/// The harness's own disturbance on one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HarnessSummary {
    pub host: HostId,
    pub run: RunId,
    /// Of one CPU, per block.
    pub median_cpu_fraction: Value,
    pub max_cpu_fraction: Value,
    pub median_outside_cpu_fraction: Value,
    pub max_outside_cpu_fraction: Value,
    pub max_steal_fraction: Value,
    pub max_canary_ratio: Value,
    pub median_settle_ms: Value,
}
