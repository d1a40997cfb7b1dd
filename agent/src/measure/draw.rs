//! A block's set-up, drawn from its grant's seed: which CPUs, how much environment, who the sessions are.
//!
//! Pure. ChaCha by its defined stream and plain arithmetic on it, so that a seed means the same in every version.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore as _, SeedableRng as _},
};

/// Enough to move a stack by whole pages (Mytkowicz: environment size changes conclusions).
const MAX_ENVIRONMENT_BYTES: u64 = 4_096;

/// Set-up of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draws {
    /// The CPU set of every session of the block, ascending.
    pub cpus: Vec<u32>,
    pub environment_bytes: u32,
    /// Seeds of the created and of the reset session's identity, by position.
    pub identities: Vec<(u64, u64)>,
}

/// Draws for `positions` arms out of the CPUs that this agent may use.
pub fn block(seed: u64, available: &[u32], cpuset_size: u32, positions: usize) -> Draws {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pool = available.to_vec();
    let mut cpus = Vec::new();
    for _ in 0..cpuset_size {
        if pool.is_empty() {
            break;
        }
        // The modulo's bias over 2^64 is nothing for a handful of CPUs.
        let i = usize::try_from(rng.next_u64() % pool.len() as u64).unwrap_or(0);
        cpus.push(pool.remove(i));
    }
    cpus.sort_unstable();
    let environment_bytes = u32::try_from(rng.next_u64() % (MAX_ENVIRONMENT_BYTES + 1)).unwrap_or(0);
    let identities = (0..positions).map(|_| (rng.next_u64(), rng.next_u64())).collect();
    Draws { cpus, environment_bytes, identities }
}

/// Seed of a template's own identity: a stream apart from the block's, so that building one moves no other draw.
pub fn template_identity(seed: u64, arm_index: usize) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(arm_index as u64 + 1);
    rng.next_u64()
}

/// Seeds of the identities of a position's `nth` turn beyond its first, in a stream of its own for the same reason.
pub fn further_identities(seed: u64, position: u32, nth: u32) -> (u64, u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(1 << 63 | u64::from(position) << 32 | u64::from(nth));
    (rng.next_u64(), rng.next_u64())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_seed_means_the_same_for_ever() {
        let d = block(28, &[0, 1, 2, 3], 2, 2);
        assert_eq!(d, block(28, &[0, 1, 2, 3], 2, 2));
        assert_ne!(d, block(29, &[0, 1, 2, 3], 2, 2));
        // Golden: a changed stream would silently change every registered set-up.
        assert_eq!(format!("{:?} {} {:x}", d.cpus, d.environment_bytes, d.identities[0].0), GOLDEN);
    }
    const GOLDEN: &str = "[1, 3] 3797 d61dcb289bbd8002";

    #[test]
    fn templates_draw_from_their_own_streams() {
        let a = template_identity(28, 0);
        assert_ne!(a, template_identity(28, 1));
        assert_ne!(a, template_identity(29, 0));
        assert!(!block(28, &[0], 1, 8).identities.iter().any(|(c, r)| *c == a || *r == a));
    }

    #[test]
    fn further_turns_are_somebody_else() {
        let all: Vec<u64> = (0..2)
            .flat_map(|position| (0..5).map(move |nth| further_identities(28, position, nth)))
            .chain(block(28, &[0], 1, 2).identities)
            .flat_map(|(created, reset)| [created, reset])
            .collect();
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn every_cpu_is_drawn_about_equally_often() {
        let ones = (0..1_000).filter(|s| block(*s, &[0, 1], 1, 8).cpus == [1]).count();
        assert!((400..600).contains(&ones), "{ones}");
    }

    proptest! {
        #[test]
        fn draws_are_within_bounds(seed: u64, cpus in 1u32..16, size in 1u32..20, positions in 0usize..10) {
            let available: Vec<u32> = (0..cpus).collect();
            let d = block(seed, &available, size, positions);
            prop_assert_eq!(d.cpus.len() as u32, size.min(cpus));
            prop_assert!(d.cpus.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(d.cpus.iter().all(|c| available.contains(c)));
            prop_assert!(u64::from(d.environment_bytes) <= MAX_ENVIRONMENT_BYTES);
            prop_assert_eq!(d.identities.len(), positions);
        }
    }
}
