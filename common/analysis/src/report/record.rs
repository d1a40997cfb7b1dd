//! The report's sections on what stands behind the numbers: gates, accounting, hosts, registration.

use std::fmt::Write as _;

use drums_common::{
    experiment::{BarRule, Registration},
    ids::HostId,
};

use super::{
    esc,
    sections::{end, list, on_machine, section, table, tag},
    utc,
};
use crate::{
    Summary,
    value::{Value, percent},
};

pub(super) fn gates(h: &mut String, s: &Summary) {
    section(h, "gates", "Gates");
    for run in &s.runs.list {
        let class = if run.state == "complete" { "t-good" } else { "t-warn" };
        let _ = write!(
            h,
            r#"<h3>Run {} of {} made · <span class="mono">{}</span> {}</h3>"#,
            run.number,
            s.runs.made,
            run.run,
            tag(class, &run.state)
        );
        list(h, run.reasons.iter().chain(&run.voids));
        let rows: Vec<Vec<String>> = s
            .gates
            .iter()
            .filter(|g| g.run == run.run)
            .map(|g| {
                let findings: Vec<String> = g.findings.iter().map(|f| esc(f)).collect();
                vec![
                    g.kind.as_str().to_owned(),
                    format!("<b>{}</b>", esc(&g.name)),
                    tag(
                        match (g.passed, g.findings.is_empty()) {
                            (true, _) => "t-good",
                            (false, true) => "t-warn",
                            (false, false) => "t-bad",
                        },
                        &g.answer,
                    ),
                    esc(&g.reading),
                    esc(&g.limit),
                    if findings.is_empty() {
                        format!(r#"<span class="soft">{}</span>"#, esc(&g.effect))
                    } else {
                        format!("{}: {}", esc(&g.effect), findings.join("<br>"))
                    },
                ]
            })
            .collect();
        table(h, &["kind", "gate", "answer", "read", "registered", "a failure of it"], &rows);
    }
    end(h);
}

pub(super) fn accounting(h: &mut String, s: &Summary) {
    section(h, "accounting", "Accounting and disturbance");
    let a = &s.accounting;
    let _ = write!(
        h,
        r#"<p>started <b>{}</b> = valid <b>{}</b> + failed <b>{}</b> + voided <b>{}</b> + lost <b>{}</b> samples {}; {} of them not counted (runs that are not pooled, blocks beyond the registered number). Blocks: {} due, {} started, {} voided, {} counted. Late records: {}.</p>"#,
        a.samples_started,
        a.samples_valid,
        a.samples_failed,
        a.samples_voided,
        a.samples_lost,
        if a.balanced { tag("t-good", "balances") } else { tag("t-bad", "does not balance") },
        a.samples_not_counted,
        a.blocks_due,
        a.blocks_started,
        a.blocks_voided,
        a.blocks_counted,
        a.late_records
    );
    list(h, a.unaccounted.iter());
    if !s.harness.is_empty() {
        h.push_str("<h3>The harness's own disturbance, per block</h3>");
        let percent = |v: Value| percent(v.get());
        let rows: Vec<Vec<String>> = s
            .harness
            .iter()
            .map(|x| {
                vec![
                    esc(x.host.as_str()),
                    format!(r#"<span class="mono">{}</span>"#, x.run),
                    format!("{} / {}", percent(x.median_cpu_fraction), percent(x.max_cpu_fraction)),
                    format!("{} / {}", percent(x.median_outside_cpu_fraction), percent(x.max_outside_cpu_fraction)),
                    percent(x.max_steal_fraction),
                    x.max_canary_ratio.to_string(),
                    format!("{} ms", x.median_settle_ms),
                ]
            })
            .collect();
        let header = [
            "host",
            "run",
            "agent's CPU, median / most#",
            "others' CPU, median / most#",
            "steal, most#",
            "canary, most#",
            "settling, median#",
        ];
        table(h, &header, &rows);
    }
    let shares: Vec<Vec<String>> = s
        .arms
        .iter()
        .filter(|a| !a.variance_shares.is_empty())
        .map(|a| {
            let text: Vec<String> =
                a.variance_shares.iter().map(|v| format!("{} {}", esc(&v.level), percent(v.share.get()))).collect();
            vec![format!("{}{}", a.arm, on_machine(s, &a.machine)), text.join(" · ")]
        })
        .collect();
    if !shares.is_empty() {
        h.push_str("<h3>Where the variance arises (logarithm of the primary metric)</h3>");
        table(h, &["arm", "share by level"], &shares);
    }
    end(h);
}

pub(super) fn hosts(h: &mut String, s: &Summary) {
    section(h, "hosts", "Machines, hosts and tools");
    for m in &s.machines {
        let names: Vec<&str> = m.hosts.iter().map(HostId::as_str).collect();
        let _ = write!(
            h,
            r#"<h3>Machine <span class="mono">{}</span>: {}</h3><ul>"#,
            esc(&m.machine),
            esc(&names.join(", "))
        );
        for (mechanism, stratum) in &m.strata {
            let _ = write!(h, "<li>stratum of {}: {}</li>", esc(mechanism), esc(stratum));
        }
        h.push_str("</ul>");
    }
    let rows: Vec<Vec<String>> = s
        .hosts
        .iter()
        .map(|x| {
            let tools: Vec<String> = x.tools.iter().map(|(n, t)| format!("{} {}", esc(n), esc(t))).collect();
            vec![
                format!("<b>{}</b><br>{}", esc(x.host.as_str()), esc(&x.hostname)),
                format!("{}<br>kernel {}", esc(&x.os), esc(&x.kernel)),
                format!("{}<br>microcode {}<br>{} CPUs", esc(&x.cpu_model), esc(&x.microcode), x.cpus),
                format!("{} MiB", x.memory_bytes >> 20),
                format!("v{}", x.cgroup_version),
                format!(r#"{}<br><span class="soft">{}</span>"#, esc(&x.accelerator), esc(&x.accelerator_detail)),
                format!(
                    r#"agent {} (<span class="mono">{}</span>)<br>{}"#,
                    esc(&x.agent_version),
                    x.agent_sha256.short(),
                    tools.join("<br>")
                ),
            ]
        })
        .collect();
    table(h, &["host", "system", "CPU", "memory", "cgroup", "accelerator", "tools (digest)"], &rows);
    h.push_str("<details><summary>Mitigations</summary>");
    let rows: Vec<Vec<String>> = s
        .hosts
        .iter()
        .flat_map(|x| x.mitigations.iter().map(|(k, v)| vec![esc(x.host.as_str()), esc(k), esc(v)]))
        .collect();
    table(h, &["host", "vulnerability", "mitigation"], &rows);
    h.push_str("</details>");
    end(h);
}

pub(super) fn registered(h: &mut String, registration: &Registration) {
    section(h, "registered", "What was registered before the first sample");
    let e = &registration.experiment;
    let d = &e.design;
    let _ = write!(
        h,
        r#"<p>SHA-256 of the canonical form: <span class="mono">{}</span>, registered {}.</p><ul>
<li>{} Williams-balanced blocks per host after {} of warm-up, seed {}, {} template builds per host, at most {} runs</li>
<li>margin {}, alpha {}, ready within {} ms, deadline {} s</li>
<li>limits: {} CPU on {} CPUs, {} MiB (QEMU {} MiB more)</li><li>workload {} <span class="mono">{}</span></li></ul>"#,
        registration.sha256,
        utc(registration.registered_at),
        d.blocks_per_host,
        d.warmup_blocks,
        d.seed,
        d.template_builds_per_host,
        d.max_runs,
        percent(d.margin),
        d.alpha,
        d.ready_timeout_ms,
        e.deadline_ms / 1000,
        f64::from(e.limits.cpu_milli) / 1000.0,
        e.limits.cpuset_size,
        e.limits.memory_bytes >> 20,
        e.limits.vmm_memory_overhead_bytes >> 20,
        e.workload.name,
        e.workload.sha256.map_or("not pinned".to_owned(), |x| x.to_string())
    );
    let rows: Vec<Vec<String>> = e
        .bars
        .iter()
        .map(|b| {
            vec![
                esc(&b.name),
                b.metric.as_str().to_owned(),
                format!("{} / {}", b.numerator, b.denominator),
                format!("≤ {}", b.at_most),
                match b.rule {
                    BarRule::Bound => "upper bound of the interval",
                    BarRule::Median => "ratio of medians",
                    BarRule::P95 => "ratio of 95th percentiles",
                }
                .to_owned(),
            ]
        })
        .collect();
    table(h, &["bar", "metric", "ratio", "at most#", "tested on"], &rows);
    let pretty = serde_json::to_string_pretty(e).unwrap_or_else(|_| registration.canonical.clone());
    let _ = write!(h, "<details><summary>The whole registration</summary><pre>{}</pre></details>", esc(&pretty));
    end(h);
}

pub(super) fn reproduce(h: &mut String, s: &Summary) {
    section(h, "reproduce", "Reproduce");
    let _ = write!(
        h,
        "<p>Every number on this page is computed from the raw records; this recomputes them offline from the exported bundle and compares:</p><pre>drumsctl export {} --out bundle\ndrumsctl verify bundle --registration {}</pre>",
        s.experiment, s.registration
    );
    h.push_str(r#"<p class="small soft">Ratios: geometric mean of paired ratios; equal-tailed paired bootstrap-t with 9,999 resamples drawn from the registered seed, below 12 units the hull with Student's interval; contrasts with a restored arm resample template builds, others blocks. Closed loop: the next session starts after the last one settled; no queueing is measured. Medians: order statistics. Rates: Clopper-Pearson.</p>"#);
    end(h);
}
