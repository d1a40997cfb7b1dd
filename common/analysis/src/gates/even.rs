//! Does disturbance fall on the arms alike? If not, noise, or what voids because of it, favours some of them.
//!
//! Every window of every completed block is used, voided or not. A window is an arm's turn with the readings right
//! before and after it; its disturbance is the largest of these readings, as a share of what would void the block. The
//! arm order of each block was drawn at random, so exchanging the arms of a block shows what chance alone would do.

use drums_common::{draw::Draw, experiment::Experiment};

use super::{Effect, Gate, environment::host_canary};
use crate::{
    collect::{Attempt, RunEvidence},
    summary::GateKind,
};

const LEVEL: f64 = 0.01;
const EXCHANGES: u32 = 1_999;
/// A smaller excess of one arm's disturbance over the others', as a share of what voids, changes no verdict however
/// surely it is there.
const MATTERS: f64 = 0.1;

/// Disturbances of one block, by arm.
type Windows = Vec<(usize, f64)>;

pub(super) fn gate(experiment: &Experiment, evidence: &RunEvidence<'_>) -> Gate {
    let mut gate = Gate::new(
        "voids-even",
        GateKind::Environment,
        Effect::Invalidates,
        format!(
            "no arm's windows are disturbed more than the others' ({LEVEL} level, by {MATTERS} of what voids or more)"
        ),
    );
    let mut blocks: Vec<Windows> = Vec::new();
    for run in evidence.hosts.values() {
        let Some(usual) = host_canary(run).filter(|m| *m > 0.0) else { continue };
        let completed = run.attempts.iter().filter(|a| a.measured() && a.completed());
        blocks.extend(completed.filter_map(|a| windows(experiment, a, usual)));
    }
    let arms = experiment.arms.len();
    // The surest that chance can look: one arm the most disturbed in every block, whichever it is.
    if arms < 2 || (arms as f64).powi(1 - blocks.len() as i32) >= LEVEL {
        gate.unanswered(format!("{} blocks of {arms} arms cannot tell", blocks.len()));
        return gate;
    }
    let (arm, excess) = most(arms, &blocks);
    let mut draw = Draw::new(experiment.design.seed, &["voids-even", &evidence.meta.run.to_string()]);
    let mut as_much = 0;
    for _ in 0..EXCHANGES {
        for block in &mut blocks {
            let mut values: Vec<f64> = block.iter().map(|(_, x)| *x).collect();
            draw.shuffle(&mut values);
            block.iter_mut().zip(values).for_each(|(w, x)| w.1 = x);
        }
        // Sums of the same numbers in another order differ in their last bits.
        as_much += u32::from(most(arms, &blocks).1 >= excess - 1e-9);
    }
    let p = f64::from(as_much + 1) / f64::from(EXCHANGES + 1);
    gate.reading = format!(
        "most: {excess:.3} of what voids above the others', in the windows of {} (p {p:.3}, {} blocks)",
        experiment.arms[arm].name,
        blocks.len()
    );
    if p < LEVEL && excess >= MATTERS {
        gate.found(gate.reading.clone());
    }
    gate
}

/// The arm whose windows are the most disturbed, and by how much on average beyond the others' in the same block.
fn most(arms: usize, blocks: &[Windows]) -> (usize, f64) {
    let mut sums = vec![0.0; arms];
    for block in blocks {
        let all: f64 = block.iter().map(|(_, x)| x).sum();
        for (arm, x) in block {
            sums[*arm] += x - (all - x) / (block.len() - 1) as f64;
        }
    }
    let n = blocks.len() as f64;
    sums.iter().enumerate().map(|(i, s)| (i, s / n)).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0))
}

/// None where the readings of a block are not all there.
fn windows(experiment: &Experiment, attempt: &Attempt<'_>, usual: f64) -> Option<Windows> {
    let e = &attempt.ended?.environment;
    let g = &experiment.gates;
    let canary = |j: usize| {
        let beyond = e.canaries_ms.get(j)? / usual - 1.0;
        Some(beyond / (g.max_canary_ratio - 1.0).max(f64::EPSILON))
    };
    let settle = |j: usize| Some(e.settle_ms.get(j)? / (g.settle_timeout_ms.max(1) as f64));
    if attempt.rows.len() != experiment.arms.len() {
        return None;
    }
    attempt
        .rows
        .iter()
        .map(|row| {
            let (before, after) = (row.position, row.position + 1);
            let worst =
                [canary(before)?, canary(after)?, settle(before)?, settle(after)?].into_iter().fold(0.0, f64::max);
            worst.is_finite().then(|| (row.arm, worst.min(1.0)))
        })
        .collect()
}
