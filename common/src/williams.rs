//! Orders of arms within blocks: Williams squares, balanced for position and first-order carry-over.
//!
//! Over one square (k blocks for an even number of arms, 2k for an odd one) every arm stands once (twice) at every
//! position, and every arm follows every other arm equally often. The registered seed, the host's name and the number of
//! the square decide which arm is which letter and in which order the rows come. Planner and analysis both ask
//! [`block_order`]: the one draws with it, the other checks that the blocks were run in that order.

use crate::{
    draw::Draw,
    evidence::BlockKind,
    experiment::Experiment,
    ids::{ArmName, HostId},
};

/// Blocks in one balanced square of `arms` arms: `blocks_per_host` is a multiple of it.
pub fn square_size(arms: usize) -> usize {
    if arms.is_multiple_of(2) || arms == 1 { arms } else { 2 * arms }
}

/// The plain Williams square: `square_size(k)` rows, each a permutation of `0..k`.
pub fn square(k: usize) -> Vec<Vec<usize>> {
    if k == 0 {
        return Vec::new();
    }
    // 0, 1, k-1, 2, k-2 ...: neighbouring differences are all different modulo k (k even), so that its k rotations
    // contain every ordered pair of neighbours once. An odd k needs the mirror images too.
    let first: Vec<usize> = (0..k).map(|i| if i % 2 == 1 { i.div_ceil(2) } else { (k - i / 2) % k }).collect();
    let mut rows: Vec<Vec<usize>> = (0..k).map(|r| first.iter().map(|x| (x + r) % k).collect()).collect();
    if square_size(k) == 2 * k {
        let mirrored: Vec<Vec<usize>> = rows.iter().map(|row| row.iter().rev().copied().collect()).collect();
        rows.extend(mirrored);
    }
    rows
}

/// Order of block `index` (0, 1, 2 ... without end) as positions into the registered list of `arms` arms.
///
/// `stream` separates uses of one seed. Square after square is drawn anew, so an index beyond the base number (a
/// replacement for a voided block) has its order fixed by the registration as well.
pub fn order(seed: u64, host: &HostId, stream: &str, arms: usize, index: u32) -> Vec<usize> {
    let size = square_size(arms);
    if size == 0 {
        return Vec::new();
    }
    let (square_number, row_number) = (index as usize / size, index as usize % size);
    let mut draw = Draw::new(seed, &["williams", stream, host.as_str(), &square_number.to_string()]);
    let mut letters: Vec<usize> = (0..arms).collect();
    draw.shuffle(&mut letters);
    let mut rows: Vec<usize> = (0..size).collect();
    draw.shuffle(&mut rows);
    square(arms).swap_remove(rows[row_number]).into_iter().map(|letter| letters[letter]).collect()
}

/// The registered order of one block on one host. Warm-up blocks are numbered from 0 by themselves, and so are measured
/// ones: block `b` of a kind is the `b`-th of that kind on that host.
pub fn block_order(experiment: &Experiment, host: &HostId, kind: BlockKind, block: u32) -> Vec<ArmName> {
    let stream = match kind {
        BlockKind::WarmUp => "warm-up",
        BlockKind::Measured => "measured",
    };
    order(experiment.design.seed, host, stream, experiment.arms.len(), block)
        .into_iter()
        .map(|i| experiment.arms[i].name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host(name: &str) -> HostId {
        name.parse().expect("a host name of the test")
    }

    /// Rows are permutations; every arm is at every position, and after every other arm, equally often.
    fn assert_balanced(rows: &[Vec<usize>], k: usize) {
        let times = rows.len() / k;
        let mut at = vec![vec![0; k]; k];
        let mut after = vec![vec![0; k]; k];
        for row in rows {
            let mut sorted = row.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..k).collect::<Vec<_>>(), "not a permutation: {row:?}");
            for (position, &arm) in row.iter().enumerate() {
                at[arm][position] += 1;
            }
            for pair in row.windows(2) {
                after[pair[0]][pair[1]] += 1;
            }
        }
        for a in 0..k {
            for p in 0..k {
                assert_eq!(at[a][p], times, "arm {a} at position {p}");
                assert_eq!(after[a][p], if a == p { 0 } else { times }, "arm {p} after arm {a}");
            }
        }
    }

    #[test]
    fn plain_squares_are_balanced() {
        for k in 2..=17 {
            let rows = square(k);
            assert_eq!(rows.len(), square_size(k));
            assert_balanced(&rows, k);
        }
        assert_eq!(square(1), vec![vec![0]]);
        assert!(square(0).is_empty());
        assert!(order(1, &host("h1"), "measured", 0, 0).is_empty());
    }

    proptest! {
        #[test]
        fn drawn_squares_are_balanced(seed: u64, k in 1usize..=12, number in 0u32..4, name in "[a-z]{1,8}") {
            let size = square_size(k) as u32;
            let rows: Vec<_> = (0..size).map(|i| order(seed, &host(&name), "measured", k, number * size + i)).collect();
            assert_balanced(&rows, k);
        }

        #[test]
        fn an_order_depends_on_nothing_but_its_names(seed: u64, index in 0u32..100) {
            let a = order(seed, &host("h1"), "measured", 8, index);
            prop_assert_eq!(&a, &order(seed, &host("h1"), "measured", 8, index));
        }
    }

    #[test]
    fn hosts_seeds_squares_and_streams_differ() {
        let rows = |seed, name: &str, stream: &str, from: u32| -> Vec<Vec<usize>> {
            (from..from + 8).map(|i| order(seed, &host(name), stream, 8, i)).collect()
        };
        let base = rows(1, "h1", "measured", 0);
        for other in [
            rows(2, "h1", "measured", 0),
            rows(1, "h2", "measured", 0),
            rows(1, "h1", "warm-up", 0),
            rows(1, "h1", "measured", 8),
        ] {
            assert_ne!(base, other);
        }
    }
}
