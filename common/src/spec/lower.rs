//! From the TOML tree to an [`Experiment`]: every rule that needs nothing but the file.

use std::{collections::BTreeMap, ops::Range};

use toml::de::DeTable;

use super::{
    diagnostic::Faults,
    reader::{Sp, Tab},
};
use crate::{
    arm::ArmKind,
    clock::Micros,
    experiment::{
        Arm, Bar, BarRule, CANONICAL_VERSION, Control, Design, Experiment, Gates, HostsRule, Limits, Metric,
        MetricSpec, WorkloadRef,
    },
    ids::{ArmName, ExperimentId, HostId, WorkloadName},
    range, williams,
};

const ROOT: [&str; 12] =
    ["id", "title", "hypothesis", "workload", "limits", "design", "run", "hosts", "arm", "metric", "bar", "gates"];
const WORKLOAD: [&str; 2] = ["name", "sha256"];
const LIMITS: [&str; 4] = ["cpu_milli", "cpuset_size", "memory_mib", "vmm_memory_overhead_mib"];
const DESIGN: [&str; 8] = [
    "order",
    "blocks_per_host",
    "warmup_blocks",
    "template_builds_per_host",
    "seed",
    "ready_timeout_ms",
    "margin",
    "alpha",
];
const RUN: [&str; 3] = ["max_runs", "deadline_minutes", "not_after"];
const HOSTS: [&str; 2] = ["count", "names"];
const ARM: [&str; 4] = ["name", "kind", "control", "command"];
const CONTROL: [&str; 3] = ["same_as", "delayed", "fraction"];
const METRIC: [&str; 5] = ["metric", "endpoint", "position", "base_case", "primary"];
const BAR: [&str; 6] = ["name", "metric", "numerator", "denominator", "at_most", "rule"];
const GATES: [&str; 6] = [
    "max_steal_fraction",
    "max_outside_cpu_fraction",
    "max_canary_ratio",
    "max_clock_step_ms",
    "settle_timeout_ms",
    "max_void_fraction",
];

/// Limits of the environment gates when a spec names none. They are part of the canonical form either way.
/// Steal and outside load: a twentieth of a CPU is what an idle machine's own services stay below.
const DEFAULT_STEAL: f64 = 0.05;
const DEFAULT_OUTSIDE: f64 = 0.25;
/// Half again as slow as usual is more than frequency scaling does on a machine at rest.
const DEFAULT_CANARY: f64 = 1.5;
/// Ten milliseconds: far above slewing, far below a step by a time daemon.
const DEFAULT_CLOCK_STEP_MS: f64 = 10.0;
/// Dying cgroups and namespaces go in milliseconds; ten seconds says that something holds them.
const DEFAULT_SETTLE_MS: u64 = 10_000;
/// method.md: more than 10 % voids make a run invalid.
const DEFAULT_VOID: f64 = 0.10;

/// Where things that other rules judge stand in the source.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    pub(super) id: Range<usize>,
    pub(super) workload: Range<usize>,
    pub(super) workload_sha256: Option<Range<usize>>,
    pub(super) hosts: Vec<Range<usize>>,
    pub(super) not_after: Option<Range<usize>>,
}

/// None, or an incomplete result, whenever a fault was added.
pub(super) fn lower(root: &DeTable<'_>, source: &str, faults: &mut Faults<'_>) -> Option<(Experiment, Places)> {
    // Something that is missing from the file as a whole is reported at its first line.
    let first_line = 0..source.find('\n').unwrap_or(source.len());
    let root = Tab::new("the spec", first_line, root, &ROOT, faults);
    let mut places = Places::default();

    let id = root.id::<ExperimentId>("id", "\"EXP-NNN\"", faults);
    if let Some(id) = &id {
        places.id = id.span.clone();
    }
    let title = root.text("title", "\"one line\"", faults);
    let hypothesis = root.text("hypothesis", "\"what is expected, and what would refute it\"", faults);
    let workload = root.table("workload", &WORKLOAD, faults).and_then(|t| workload(&t, &mut places, faults));
    let limits = root.table("limits", &LIMITS, faults).and_then(|t| limits(&t, faults));
    let arms = arms(&root, faults);
    let design_table = root.table("design", &DESIGN, faults);
    let run_table = root.table("run", &RUN, faults);
    let max_runs = run_table.as_ref().and_then(|t| t.int("max_runs", range::MAX_RUNS, faults));
    let deadline = run_table.as_ref().and_then(|t| t.int("deadline_minutes", range::DEADLINE_MINUTES, faults));
    let not_after = run_table.as_ref().and_then(|t| t.instant_or_none("not_after", faults));
    if let Some(at) = &not_after {
        places.not_after = Some(at.span.clone());
    }
    let design = design_table.as_ref().and_then(|t| design(t, arms.len(), max_runs, faults));
    if let Some(design) = &design {
        delays_match_margin(&arms, design.margin, faults);
    }
    let hosts = root.table("hosts", &HOSTS, faults).and_then(|t| hosts(&t, &mut places, faults));
    let metrics = metrics(&root, faults);
    let bars = bars(&root, &arms, &metrics, faults);
    let gates = match root.table_or_none("gates", &GATES, faults) {
        Some(t) => gates(&t, faults),
        None if root.has("gates") => None,
        None => Some(default_gates()),
    };

    let first_line = root.span();
    let experiment = Experiment {
        version: CANONICAL_VERSION,
        id: id?.value,
        title: title?.value,
        hypothesis: hypothesis?.value.trim().to_owned(),
        workload: workload?,
        limits: limits?,
        design: design?,
        hosts: hosts?,
        arms: arms.into_iter().map(|a| a.value).collect(),
        metrics: metrics.into_iter().map(|m| m.value).collect(),
        bars,
        gates: gates?,
        deadline_ms: deadline?.value * 60_000,
        not_after: not_after.map(|at| Micros(at.value)),
    };
    if faults.is_empty()
        && let Err(e) = experiment.check()
    {
        // What the rules with a place above have let through.
        faults.add("unsound", first_line, e.to_string(), "begin with a copy of docs/experiments/EXP-028.toml");
    }
    Some((experiment, places))
}

fn workload(t: &Tab<'_, '_>, places: &mut Places, faults: &mut Faults<'_>) -> Option<WorkloadRef> {
    let name = t.id::<WorkloadName>("name", "\"minimal\"", faults);
    let sha256 = t.id_or_none("sha256", faults);
    places.workload_sha256 = sha256.as_ref().map(|s| s.span.clone());
    let name = name?;
    places.workload = name.span.clone();
    Some(WorkloadRef { name: name.value, sha256: sha256.map(|s| s.value) })
}

fn limits(t: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Option<Limits> {
    const MIB: u64 = 1024 * 1024;
    let cpu = t.int("cpu_milli", range::CPU_MILLI, faults);
    let set = t.int("cpuset_size", range::CPUSET_SIZE, faults);
    let memory = t.int("memory_mib", range::MEMORY_MIB, faults);
    let overhead = t.int("vmm_memory_overhead_mib", range::OVERHEAD_MIB, faults);
    let (cpu, set) = (cpu?, set?);
    if cpu.value > set.value * 1_000 {
        let message = format!("{} thousandths of a CPU do not fit a set of {}", cpu.value, set.value);
        faults.add("limits-contradict", cpu.span, message, "cpu_milli is at most 1000 x cpuset_size");
        return None;
    }
    Some(Limits {
        cpu_milli: u32::try_from(cpu.value).ok()?,
        cpuset_size: u32::try_from(set.value).ok()?,
        memory_bytes: memory?.value * MIB,
        vmm_memory_overhead_bytes: overhead?.value * MIB,
    })
}

fn design(t: &Tab<'_, '_>, arms: usize, max_runs: Option<Sp<u64>>, faults: &mut Faults<'_>) -> Option<Design> {
    let order = t.text("order", "\"williams\"", faults);
    if let Some(order) = &order
        && order.value != "williams"
    {
        let message = format!("order {:?} is not balanced", order.value);
        let help = "write order = \"williams\": drawn from the seed, balanced over positions and carry-over. A fixed order confounds the arms with whatever drifts";
        faults.add("fixed-order", order.span.clone(), message, help);
    }
    let blocks = t.int("blocks_per_host", range::BLOCKS, faults);
    let warmup = t.int("warmup_blocks", range::WARMUP, faults);
    let builds = t.int("template_builds_per_host", range::BUILDS, faults);
    let seed = t.int("seed", range::SEED, faults);
    let ready = t.int("ready_timeout_ms", range::READY_TIMEOUT_MS, faults);
    let margin = t.float("margin", range::MARGIN, faults);
    let alpha = t.float("alpha", range::ALPHA, faults);
    if let Some(blocks) = &blocks
        && arms >= 2
    {
        let order = williams::square_size(arms) as u64;
        if blocks.value % order != 0 {
            let message = format!("{} blocks do not balance {arms} arms over positions", blocks.value);
            let help = format!(
                "blocks_per_host is a multiple of the Williams square's {order} rows: {order}, {}, ...",
                2 * order
            );
            faults.add("unbalanced", blocks.span.clone(), message, help);
        }
    }
    if let (Some(builds), Some(blocks)) = (&builds, &blocks)
        && builds.value > blocks.value
    {
        let message = format!("{} template builds for {} blocks", builds.value, blocks.value);
        faults.add(
            "out-of-range",
            builds.span.clone(),
            message,
            "a build serves at least one block: at most blocks_per_host",
        );
    }
    let small = |v: u64| u32::try_from(v).ok();
    Some(Design {
        blocks_per_host: small(blocks?.value)?,
        warmup_blocks: small(warmup?.value)?,
        template_builds_per_host: small(builds?.value)?,
        seed: seed?.value,
        max_runs: small(max_runs?.value)?,
        ready_timeout_ms: ready?.value,
        margin: margin?.value,
        alpha: alpha?.value,
    })
}

fn hosts(t: &Tab<'_, '_>, places: &mut Places, faults: &mut Faults<'_>) -> Option<HostsRule> {
    let count = t.int("count", range::HOSTS, faults);
    let mut names: Vec<HostId> = Vec::new();
    for text in t.texts_or_empty("names", faults) {
        match text.value.parse::<HostId>() {
            Ok(host) if names.contains(&host) => {
                faults.add("duplicate", text.span, format!("host {host} is named twice"), "name each host once");
            }
            Ok(host) => {
                names.push(host);
                places.hosts.push(text.span);
            }
            Err(e) => {
                let help = format!("expected {}", e.expected);
                faults.add("bad-value", text.span, format!("{:?} is not {}", text.value, e.what), help);
            }
        }
    }
    let count = count?;
    if !names.is_empty() && names.len() as u64 != count.value {
        let message = format!("count is {}, but {} hosts are named", count.value, names.len());
        faults.add("hosts-contradict", count.span, message, "name exactly count hosts, or none to take any");
        return None;
    }
    Some(HostsRule { names, count: u32::try_from(count.value).ok()? })
}

fn arms(root: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Vec<Sp<Arm>> {
    struct Raw {
        name: Sp<ArmName>,
        kind: Option<Sp<ArmKind>>,
        control: Option<Sp<Control>>,
        command: Vec<String>,
        span: Range<usize>,
    }
    let mut raw: Vec<Raw> = Vec::new();
    let mut broken = false;
    let tables = root.tables("arm", &ARM, faults);
    for t in &tables {
        let name = t.id::<ArmName>("name", "\"drums-cold\"", faults);
        let kind = t.id_or_none::<ArmKind>("kind", faults);
        let has_control = t.has("control");
        let control = t.table_or_none("control", &CONTROL, faults).and_then(|c| control(&c, faults));
        broken |= t.has("kind") && kind.is_none() || has_control && control.is_none();
        let command: Vec<String> = t.texts_or_empty("command", faults).into_iter().map(|c| c.value).collect();
        let Some(name) = name else {
            broken = true;
            continue;
        };
        if raw.iter().any(|a| a.name.value == name.value) {
            let message = format!("there are two arms {}", name.value);
            faults.add("duplicate", name.span, message, "give each arm its own name");
            broken = true;
            continue;
        }
        if kind.is_none() && !has_control && !t.has("kind") {
            let message = format!("arm {} has no kind", name.value);
            faults.add("missing-field", t.span(), message, "add kind = \"drums-cold\" or another kind");
            broken = true;
            continue;
        }
        raw.push(Raw { name, kind, control, command, span: t.span() });
    }
    if tables.len() == 1 && !broken {
        faults.add("one-arm", raw[0].span.clone(), "one arm compares with nothing", "add a second [[arm]]");
    }
    if broken {
        return Vec::new();
    }
    let kinds: BTreeMap<ArmName, (Option<ArmKind>, bool)> =
        raw.iter().map(|a| (a.name.value.clone(), (a.kind.as_ref().map(|k| k.value), a.control.is_some()))).collect();
    let count = raw.len();
    let mut out = Vec::new();
    for a in raw {
        let kind = match (&a.control, &a.kind) {
            (Some(control), kind) => {
                let base = control.value.base();
                match kinds.get(base) {
                    _ if *base == a.name.value => {
                        faults.add(
                            "self-control",
                            control.span.clone(),
                            format!("{base} is a control of itself"),
                            "name another arm",
                        );
                        continue;
                    }
                    None => {
                        let help = format!("the arms are {}", names(kinds.keys()));
                        faults.add("unknown-arm", control.span.clone(), format!("there is no arm {base}"), help);
                        continue;
                    }
                    Some((_, true)) => {
                        faults.add(
                            "control-of-control",
                            control.span.clone(),
                            format!("{base} is a control itself"),
                            "a control names an arm that is none",
                        );
                        continue;
                    }
                    Some((Some(base_kind), false)) => {
                        if let Some(kind) = kind
                            && kind.value != *base_kind
                        {
                            let message = format!("arm {} is {}, but {base} is {base_kind}", a.name.value, kind.value);
                            faults.add(
                                "control-differs",
                                kind.span.clone(),
                                message,
                                "leave kind out: a control has the kind of its arm",
                            );
                            continue;
                        }
                        *base_kind
                    }
                    Some((None, false)) => continue,
                }
            }
            (None, Some(kind)) => kind.value,
            (None, None) => continue,
        };
        match (kind, a.command.is_empty()) {
            (ArmKind::External, true) => {
                let message = format!("arm {} is external and has no command", a.name.value);
                faults.add(
                    "missing-field",
                    a.span.clone(),
                    message,
                    "add command = [\"/path/to/program\", \"argument\"]",
                );
            }
            (ArmKind::External, false) if !a.command[0].starts_with('/') => {
                let message = format!("{:?} is not an absolute path", a.command[0]);
                faults.add(
                    "bad-value",
                    a.span.clone(),
                    message,
                    "an external arm's program is found by its absolute path",
                );
            }
            (ArmKind::External, false) | (_, true) => {}
            (_, false) => {
                let message = format!("arm {} is {kind} and takes no command", a.name.value);
                faults.add("unknown-field", a.span.clone(), message, "only external arms have a command");
            }
        }
        let arm = Arm { name: a.name.value, kind, control: a.control.map(|c| c.value), command: a.command };
        out.push(Sp { span: a.span, value: arm });
    }
    // An incomplete list would make other rules report faults that are none.
    if out.len() == count { out } else { Vec::new() }
}

fn control(t: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Option<Sp<Control>> {
    let same = t.id_or_none::<ArmName>("same_as", faults);
    let delayed = t.id_or_none::<ArmName>("delayed", faults);
    match (same, delayed) {
        (Some(same), None) => {
            if t.has("fraction") {
                faults.add("unknown-field", t.span(), "an arm that is the same has no fraction", "remove fraction");
                return None;
            }
            Some(Sp { span: same.span, value: Control::SameAs { arm: same.value } })
        }
        (None, Some(delayed)) => {
            let fraction = t.float("fraction", range::MARGIN, faults)?;
            Some(Sp { span: delayed.span, value: Control::Delayed { arm: delayed.value, fraction: fraction.value } })
        }
        (same, delayed) => {
            if same.is_some() || delayed.is_some() || !(t.has("same_as") || t.has("delayed")) {
                let help = "write control = { same_as = \"ARM\" } or control = { delayed = \"ARM\", fraction = 0.25 }";
                faults.add("bad-control", t.span(), "a control is one of same_as and delayed", help);
            }
            None
        }
    }
}

/// The positive control is the registered margin, injected: any other size answers another question.
fn delays_match_margin(arms: &[Sp<Arm>], margin: f64, faults: &mut Faults<'_>) {
    for arm in arms {
        if let Some(Control::Delayed { fraction, .. }) = &arm.value.control
            && (fraction - margin).abs() > 1e-9
        {
            let message = format!("arm {} is delayed by {fraction}, but the margin is {margin}", arm.value.name);
            faults.add(
                "control-differs",
                arm.span.clone(),
                message,
                "inject the registered margin: fraction equals design.margin",
            );
        }
    }
}

fn metrics(root: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Vec<Sp<MetricSpec>> {
    let mut out: Vec<Sp<MetricSpec>> = Vec::new();
    let tables = root.tables("metric", &METRIC, faults);
    for t in &tables {
        let metric = metric(t, faults);
        let endpoint = t.text("endpoint", "\"E3\"", faults);
        let position = t.text("position", "\"K2\"", faults);
        let base_case = t.text("base_case", "\"cold as shipped\"", faults);
        let primary = t.bool_or("primary", false, faults);
        let coded = |v: &Sp<String>, letter: char, low: u8, high: u8| {
            let b = v.value.as_bytes();
            b.len() == 2 && v.value.starts_with(letter) && (low..=high).contains(&b[1])
        };
        if let Some(e) = &endpoint
            && e.value != "E3"
        {
            let known = coded(e, 'E', b'1', b'6');
            let message = if known {
                format!("this workload has no endpoint {}", e.value)
            } else {
                format!("{:?} is not an endpoint", e.value)
            };
            faults.add(
                "unknown-endpoint",
                e.span.clone(),
                message,
                "write endpoint = \"E3\": the guest server answers a full request",
            );
        }
        if let Some(p) = &position
            && !coded(p, 'K', b'0', b'6')
        {
            let message = format!("{:?} is not a position", p.value);
            faults.add(
                "unknown-position",
                p.span.clone(),
                message,
                "a checkpoint's position is K0 to K6; K2 is the guest server",
            );
        }
        let (Some(metric), Some(endpoint), Some(position), Some(base_case), Some(primary)) =
            (metric, endpoint, position, base_case, primary)
        else {
            continue;
        };
        if out.iter().any(|m| m.value.metric == metric.value) {
            let message = format!("metric {} is listed twice", metric.value.as_str());
            faults.add("duplicate", metric.span, message, "list each metric once");
            continue;
        }
        let spec = MetricSpec {
            metric: metric.value,
            endpoint: endpoint.value,
            position: position.value,
            base_case: base_case.value,
            primary,
        };
        out.push(Sp { span: metric.span, value: spec });
    }
    if !out.is_empty() && out.len() == tables.len() && !out.iter().any(|m| m.value.primary) {
        faults.add(
            "no-primary",
            out[0].span.clone(),
            "no metric is primary",
            "add primary = true to what the hypothesis is about",
        );
    }
    out
}

fn metric(t: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Option<Sp<Metric>> {
    let text = t.text("metric", "\"create_to_ready_ms\"", faults)?;
    if let Some(metric) = Metric::ALL.into_iter().find(|m| m.as_str() == text.value) {
        return Some(Sp { span: text.span, value: metric });
    }
    let stem = |s: &str| s.rsplit_once('_').map_or(s.to_owned(), |(stem, _)| stem.to_owned());
    let all: Vec<_> = Metric::ALL.iter().map(|m| m.as_str()).collect();
    let sibling = Metric::ALL.into_iter().find(|m| {
        let whole = stem(m.as_str());
        whole == stem(&text.value) || whole == text.value
    });
    match sibling {
        Some(m) => {
            let message = format!("{:?} is not in the unit that is measured", text.value);
            faults.add(
                "unit-mismatch",
                text.span,
                message,
                format!("write {:?}: its unit is {}", m.as_str(), m.unit()),
            );
        }
        None => {
            let message = format!("there is no metric {:?}", text.value);
            faults.add("unknown-metric", text.span, message, format!("the metrics are {}", all.join(", ")));
        }
    }
    None
}

fn bars(root: &Tab<'_, '_>, arms: &[Sp<Arm>], metrics: &[Sp<MetricSpec>], faults: &mut Faults<'_>) -> Vec<Bar> {
    let mut out: Vec<Bar> = Vec::new();
    for t in &root.tables("bar", &BAR, faults) {
        let name = t.text("name", "\"qemu warm over cold\"", faults);
        let metric = metric(t, faults);
        let numerator = t.id::<ArmName>("numerator", "\"ARM\"", faults);
        let denominator = t.id::<ArmName>("denominator", "\"ARM\"", faults);
        let at_most = t.float("at_most", range::AT_MOST, faults);
        let rule = match t.text_or_none("rule", faults) {
            Some(text) => match text.value.as_str() {
                "bound" => Some(BarRule::Bound),
                "median" => Some(BarRule::Median),
                "p95" => Some(BarRule::P95),
                _ => {
                    let message = format!("{:?} is not a rule of a bar", text.value);
                    faults.add("unknown-rule", text.span, message, "expected bound (the default), median or p95");
                    None
                }
            },
            None if t.has("rule") => None,
            None => Some(BarRule::Bound),
        };
        if let Some(metric) = &metric {
            match metrics.iter().find(|m| m.value.metric == metric.value) {
                None => {
                    let message = format!("a bar on {}, which is not measured", metric.value.as_str());
                    faults.add(
                        "not-measured",
                        metric.span.clone(),
                        message,
                        "add a [[metric]] for it, or set the bar on one that is measured",
                    );
                }
                Some(m) if !m.value.primary => {
                    let message = format!("a bar on {}, which is not primary", metric.value.as_str());
                    faults.add(
                        "not-primary",
                        metric.span.clone(),
                        message,
                        "mark the metric primary = true: bars are what the hypothesis is about",
                    );
                }
                Some(_) => {}
            }
        }
        for arm in [&numerator, &denominator].into_iter().flatten() {
            if !arms.is_empty() && !arms.iter().any(|a| a.value.name == arm.value) {
                let help = format!("the arms are {}", names(arms.iter().map(|a| &a.value.name)));
                faults.add("unknown-arm", arm.span.clone(), format!("there is no arm {}", arm.value), help);
            }
        }
        let (Some(name), Some(metric), Some(numerator), Some(denominator), Some(at_most), Some(rule)) =
            (name, metric, numerator, denominator, at_most, rule)
        else {
            continue;
        };
        if numerator.value == denominator.value {
            let message = format!("a ratio of {} over itself is always 1", numerator.value);
            faults.add("same-arm", denominator.span, message, "name two different arms");
            continue;
        }
        if out.iter().any(|b| b.name == name.value) {
            faults.add(
                "duplicate",
                name.span,
                format!("there are two bars {:?}", name.value),
                "give each bar its own name",
            );
            continue;
        }
        out.push(Bar {
            name: name.value,
            metric: metric.value,
            numerator: numerator.value,
            denominator: denominator.value,
            at_most: at_most.value,
            rule,
        });
    }
    out
}

fn gates(t: &Tab<'_, '_>, faults: &mut Faults<'_>) -> Option<Gates> {
    Some(Gates {
        max_steal_fraction: t.float_or("max_steal_fraction", range::STEAL, DEFAULT_STEAL, faults)?,
        max_outside_cpu_fraction: t.float_or(
            "max_outside_cpu_fraction",
            range::OUTSIDE_CPU,
            DEFAULT_OUTSIDE,
            faults,
        )?,
        max_canary_ratio: t.float_or("max_canary_ratio", range::CANARY, DEFAULT_CANARY, faults)?,
        max_clock_step_ms: t.float_or("max_clock_step_ms", range::CLOCK_STEP_MS, DEFAULT_CLOCK_STEP_MS, faults)?,
        settle_timeout_ms: t.int_or("settle_timeout_ms", range::SETTLE_MS, DEFAULT_SETTLE_MS, faults)?,
        max_void_fraction: t.float_or("max_void_fraction", range::VOID, DEFAULT_VOID, faults)?,
    })
}

fn default_gates() -> Gates {
    Gates {
        max_steal_fraction: DEFAULT_STEAL,
        max_outside_cpu_fraction: DEFAULT_OUTSIDE,
        max_canary_ratio: DEFAULT_CANARY,
        max_clock_step_ms: DEFAULT_CLOCK_STEP_MS,
        settle_timeout_ms: DEFAULT_SETTLE_MS,
        max_void_fraction: DEFAULT_VOID,
    }
}

fn names<'n>(names: impl Iterator<Item = &'n ArmName>) -> String {
    names.map(ArmName::as_str).collect::<Vec<_>>().join(", ")
}
