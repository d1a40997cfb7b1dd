//! The positive control's delay as it was injected: read from timelines, not taken from the plan.

use std::collections::BTreeMap;

use drums_common::{
    evidence::INJECTED_DELAY,
    experiment::{Control, Experiment, Metric},
    ids::HostId,
};

use crate::{
    collect::{Row, RunEvidence},
    gates::{BlockFate, Effect, Gate, JudgedBlock, Taken},
    machines::machines,
    stats::median,
    summary::GateKind,
    value::percent,
};

/// Part of the registered share by which the injected one may miss it. The size is taken from warm-up sessions and the
/// share from measured ones, so both have their noise; a control that misses by more is not the registered one.
pub const TOLERANCE: f64 = 0.2;

pub(crate) struct Injected {
    /// Median over blocks of the delay over the create time of the base arm's session in the same block.
    pub(crate) share: f64,
    /// Median by host.
    pub(crate) ms: BTreeMap<HostId, f64>,
}

/// What was injected into `delayed` over these blocks; none where no block has both sessions and a timeline that shows it.
pub(crate) fn injected<'x, 'e: 'x, 'a: 'e>(
    blocks: impl Iterator<Item = &'x JudgedBlock<'e, 'a>>,
    delayed: usize,
    base: usize,
) -> Option<Injected> {
    let (mut shares, mut ms): (Vec<f64>, BTreeMap<HostId, Vec<f64>>) = Default::default();
    for b in blocks {
        let create = b.rows.iter().find(|r| r.arm == base).and_then(|r| r.values.get(&Metric::CreateToReady));
        let delay = b.attempt.rows.iter().find(|r| r.arm == delayed).and_then(delay_ms);
        if let (Some(Taken::Valid(create)), Some(delay)) = (create, delay) {
            shares.push(delay / create);
            ms.entry(b.attempt.host.clone()).or_default().push(delay);
        }
    }
    let ms = ms.into_iter().filter_map(|(host, all)| Some((host, median(&all)?))).collect();
    Some(Injected { share: median(&shares)?, ms })
}

fn delay_ms(row: &Row<'_>) -> Option<f64> {
    let create = row.timelines.iter().find(|t| t.operation == "create")?;
    let delays: Vec<u64> = create
        .phases
        .iter()
        .filter(|p| p.name == INJECTED_DELAY)
        .map(|p| p.end_us.saturating_sub(p.start_us))
        .collect();
    (!delays.is_empty()).then(|| delays.iter().sum::<u64>() as f64 / 1e3)
}

/// `registered 25 %, injected 24.6 %`.
pub(crate) fn shares(registered: f64, injected: Option<f64>) -> String {
    let got = injected.map_or("unknown".to_owned(), percent);
    format!("registered {}, injected {got}", percent(registered))
}

/// Was the registered share what was injected, on every machine? None without a positive control.
pub(crate) fn gate(
    experiment: &Experiment,
    evidence: &RunEvidence<'_>,
    blocks: &[JudgedBlock<'_, '_>],
) -> Option<Gate> {
    let mut gate: Option<Gate> = None;
    let mut read = Vec::new();
    for (index, arm) in experiment.arms.iter().enumerate() {
        let Some(Control::Delayed { arm: base, fraction }) = &arm.control else { continue };
        let Some(base) = experiment.arms.iter().position(|a| &a.name == base) else { continue };
        let limit = format!(
            "the injected delay is {} of the base arm's create, within {} of that",
            percent(*fraction),
            percent(TOLERANCE)
        );
        let gate =
            gate.get_or_insert_with(|| Gate::new("positive-control", GateKind::Fidelity, Effect::Invalidates, limit));
        for machine in machines(experiment, std::slice::from_ref(evidence)).machines {
            let counted: Vec<_> = blocks
                .iter()
                .filter(|b| b.fate == BlockFate::Counted && machine.hosts.contains(b.attempt.host))
                .collect();
            let hosts: Vec<&str> = machine.hosts.iter().map(HostId::as_str).collect();
            let place = format!("{} on {}", arm.name, hosts.join(" and "));
            let due = counted.iter().any(|b| b.rows.iter().any(|r| r.arm == index && r.session_valid));
            match injected(counted.iter().copied(), index, base) {
                Some(i) => {
                    let both = format!("{place}: {}", shares(*fraction, Some(i.share)));
                    if (i.share - fraction).abs() > TOLERANCE * fraction {
                        gate.found(format!("{both}, which is another control"));
                    }
                    read.push(both);
                }
                None if due => gate.found(format!("{place}: no timeline shows the injected delay")),
                // Sessions that failed are the arm's, and nothing was there to be delayed.
                None => {}
            }
        }
    }
    gate.map(|mut g| {
        g.reading = read.join(", ");
        g
    })
}
