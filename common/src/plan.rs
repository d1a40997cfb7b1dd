//! What a registration makes of a host: which blocks, in which order, from which template build, with which draws.
//!
//! Pure: the same registration and host always give the same plan, so the coordinator grants from it, `drumsctl plan`
//! prints it and the analysis checks the evidence against it. Knows nothing of when a block is granted.

use crate::{
    arm::ArmKind, draw::Draw, evidence::BlockKind, experiment::Experiment, ids::HostId, williams, wire::latest::Grant,
};

/// One block of the plan. `index` counts from 0 within its kind; a measured index beyond `blocks_per_host` is a
/// replacement for a voided block, and its order is registered like every other.
pub fn grant(experiment: &Experiment, host: &HostId, kind: BlockKind, index: u32) -> Grant {
    let stream = match kind {
        BlockKind::WarmUp => "warm-up",
        BlockKind::Measured => "measured",
    };
    let seed = Draw::new(experiment.design.seed, &["block", stream, host.as_str(), &index.to_string()]).next_u64();
    Grant {
        block: index,
        kind,
        order: williams::block_order(experiment, host, kind, index),
        template_build: template_build(experiment, kind, index),
        seed,
    }
}

/// Builds come one after the other, each for an equal share of the measured blocks, so that an agent keeps one set of
/// templates at a time. Warm-up uses the first build, replacements the last.
pub fn template_build(experiment: &Experiment, kind: BlockKind, index: u32) -> u32 {
    let (blocks, builds) =
        (experiment.design.blocks_per_host.max(1), experiment.design.template_builds_per_host.max(1));
    match kind {
        BlockKind::WarmUp => 0,
        BlockKind::Measured => {
            let share = u64::from(index) * u64::from(builds) / u64::from(blocks);
            u32::try_from(share).unwrap_or(u32::MAX).min(builds - 1)
        }
    }
}

/// The blocks of one host without replacements: warm-up first.
pub fn blocks(experiment: &Experiment, host: &HostId) -> Vec<Grant> {
    let warmup = (0..experiment.design.warmup_blocks).map(|i| grant(experiment, host, BlockKind::WarmUp, i));
    let measured = (0..experiment.design.blocks_per_host).map(|i| grant(experiment, host, BlockKind::Measured, i));
    warmup.chain(measured).collect()
}

/// How many measured blocks over all hosts may be replaced before the run is invalid anyway: the largest number of voids
/// that stays within `max_void_fraction` of all blocks that were run.
pub fn replacements_allowed(experiment: &Experiment) -> u32 {
    let planned = f64::from(experiment.design.blocks_per_host) * f64::from(experiment.hosts.count);
    let fraction = experiment.gates.max_void_fraction.clamp(0.0, 0.5);
    // v / (planned + v) <= fraction
    (planned * fraction / (1.0 - fraction) + 1e-9).floor() as u32
}

/// A guess of how long a session of a kind takes, milliseconds: for the dry run's estimate before any run was made, never
/// for a result. From the seed measurements, on the slow side (QEMU without KVM).
pub fn guessed_session_ms(kind: ArmKind) -> f64 {
    match kind {
        ArmKind::DrumsCold => 400.0,
        ArmKind::DrumsRestored => 1_000.0,
        ArmKind::RuncCold => 800.0,
        ArmKind::RuncRestored => 1_500.0,
        ArmKind::QemuCold => 6_000.0,
        ArmKind::QemuWarm => 1_200.0,
        ArmKind::External => 5_000.0,
    }
}

/// A guess of one block's length on one host: each arm is created, reset (destroyed and created) and destroyed, and the
/// machine settles and is probed between arms.
pub fn guessed_block_ms(experiment: &Experiment) -> f64 {
    const BETWEEN_ARMS_MS: f64 = 700.0;
    experiment.arms.iter().map(|a| 2.5 * guessed_session_ms(a.kind) + BETWEEN_ARMS_MS).sum()
}

/// A host that has a block, or prepares, shows some progress within this: each arm is created and reset within its
/// time-out, and five minutes are for templates, settling and what is tried out.
pub fn progress_bound_ms(experiment: &Experiment) -> u64 {
    const ALLOWANCE_MS: u64 = 300_000;
    2 * experiment.design.ready_timeout_ms * experiment.arms.len() as u64 + ALLOWANCE_MS
}

/// A guess of a run's length when `hosts_on_machine` is the largest number of hosts that share one machine: their blocks
/// come one after the other. Template builds are counted as two cold sessions each.
pub fn guessed_run_ms(experiment: &Experiment, hosts_on_machine: u32) -> f64 {
    let design = &experiment.design;
    let blocks = f64::from(design.warmup_blocks + design.blocks_per_host);
    let templates: f64 = experiment
        .arms
        .iter()
        .filter(|a| a.kind.from_template())
        .map(|a| match a.kind {
            ArmKind::QemuWarm => 2.0 * guessed_session_ms(ArmKind::QemuCold),
            _ => 2.0 * guessed_session_ms(a.kind),
        })
        .sum();
    const PREFLIGHT_MS: f64 = 15_000.0;
    let one = blocks * guessed_block_ms(experiment) + f64::from(design.template_builds_per_host) * templates;
    PREFLIGHT_MS + f64::from(hosts_on_machine.max(1)) * one
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::spec;

    fn experiment() -> Experiment {
        let text = include_str!("../../docs/experiments/EXP-028.toml");
        spec::parse("EXP-028.toml", text.as_bytes()).unwrap().experiment
    }

    #[test]
    fn the_first_comparison_has_nine_blocks_a_host_and_two_per_build() {
        let e = experiment();
        let blocks = blocks(&e, &"h1".parse().unwrap());
        assert_eq!(blocks.len(), 9);
        assert_eq!(blocks[0].kind, BlockKind::WarmUp);
        let builds: Vec<u32> = blocks[1..].iter().map(|b| b.template_build).collect();
        assert_eq!(builds, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(template_build(&e, BlockKind::Measured, 9), 3);
        assert_eq!(replacements_allowed(&e), 1);
    }

    #[test]
    fn every_arm_stands_once_at_every_position_of_a_square() {
        let e = experiment();
        for host in ["h1", "h2"] {
            let mut seen: BTreeMap<(String, usize), u32> = BTreeMap::new();
            for block in blocks(&e, &host.parse().unwrap()).iter().filter(|b| b.kind == BlockKind::Measured) {
                for (position, arm) in block.order.iter().enumerate() {
                    *seen.entry((arm.to_string(), position)).or_default() += 1;
                }
            }
            assert_eq!(seen.len(), 64);
            assert!(seen.values().all(|n| *n == 1));
        }
    }

    #[test]
    fn draws_differ_between_blocks_and_hosts_and_repeat() {
        let e = experiment();
        let h1 = "h1".parse().unwrap();
        let seeds: std::collections::BTreeSet<u64> =
            blocks(&e, &h1).iter().chain(&blocks(&e, &"h2".parse().unwrap())).map(|b| b.seed).collect();
        assert_eq!(seeds.len(), 18);
        assert_eq!(blocks(&e, &h1), blocks(&e, &h1));
    }
}
