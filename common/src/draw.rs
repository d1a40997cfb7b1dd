//! Random draws that a registration fixes: a small generator that is ours, so that a registered seed means the same
//! order, set-up and resample for as long as the project lives, whatever a crate's next release does.
//!
//! Owns the generator (xoshiro256++, seeded through SHA-256 of the seed and the names of what is drawn) and nothing of
//! what is drawn with it. Not for secrets.

use crate::digest::Sha256;

/// One stream of draws. Two streams with a different seed or different names are independent for every purpose here.
#[derive(Clone, Debug)]
pub struct Draw {
    state: [u64; 4],
}

impl Draw {
    /// The stream of `seed` for the thing called `names`, for instance `["cpus", "h1", "block", "3"]`.
    pub fn new(seed: u64, names: &[&str]) -> Self {
        let mut text = format!("drums-draw/1\n{seed}");
        for name in names {
            // The length keeps ["ab", "c"] and ["a", "bc"] apart.
            text.push_str(&format!("\n{}:{name}", name.len()));
        }
        let digest = Sha256::of(text.as_bytes()).0;
        let mut state = [0; 4];
        for (word, bytes) in state.iter_mut().zip(digest.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            *word = u64::from_le_bytes(eight);
        }
        // All zeros is the one state that xoshiro never leaves; a SHA-256 digest of zeros is not known to exist.
        if state == [0; 4] {
            state[0] = 1;
        }
        Self { state }
    }

    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `0..bound`; 0 when `bound` is 0. Without bias, by rejection.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound <= 1 {
            return 0;
        }
        let reject_from = u64::MAX - u64::MAX % bound;
        loop {
            let x = self.next_u64();
            if x < reject_from {
                return x % bound;
            }
        }
    }

    /// Uniform index of something of length `len`.
    #[inline]
    pub fn index(&mut self, len: usize) -> usize {
        // Lossless both ways: usize is at most 64 bits on every target, and the result is below `len`.
        self.below(len as u64) as usize
    }

    /// Uniform in the open interval (0, 1).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        // 53 random bits, moved by half a step so that neither end comes out: logarithms of it are finite.
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.index(i + 1);
            items.swap(i, j);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stream is part of what a registered seed means: these numbers never change.
    #[test]
    fn the_stream_of_a_seed_is_fixed() {
        let mut d = Draw::new(28, &["williams", "h1"]);
        let got: Vec<u64> = (0..4).map(|_| d.below(1000)).collect();
        let mut again = Draw::new(28, &["williams", "h1"]);
        assert_eq!(got, (0..4).map(|_| again.below(1000)).collect::<Vec<_>>());
        assert_eq!(got, [747, 826, 739, 440]);
    }

    #[test]
    fn names_and_seeds_separate_streams() {
        let first = |seed, names: &[&str]| Draw::new(seed, names).next_u64();
        assert_ne!(first(1, &["a"]), first(2, &["a"]));
        assert_ne!(first(1, &["ab", "c"]), first(1, &["a", "bc"]));
    }

    #[test]
    fn draws_stay_in_range_and_are_roughly_uniform() {
        let mut d = Draw::new(7, &["uniform"]);
        let mut seen = [0u32; 8];
        for _ in 0..8000 {
            seen[d.index(8)] += 1;
            let u = d.unit();
            assert!(u > 0.0 && u < 1.0);
        }
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
        assert_eq!(d.below(0), 0);
        assert_eq!(d.below(1), 0);
    }
}
