//! The guest's userspace random stream: ChaCha20 as of RFC 8439, keyed at start and again by the post-restore call.
//!
//! It stands for the generators that programs keep in their memory (OpenSSL's, Python's, a browser's): a checkpoint
//! clones it, so two siblings print the same bytes until something re-keys them. That is what the identity gate looks for.

/// A keystream.
pub struct Stream {
    key: [u32; 8],
    counter: u64,
}

impl Stream {
    pub fn new(seed: &[u8; 32]) -> Self {
        let mut key = [0; 8];
        for (word, bytes) in key.iter_mut().zip(seed.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self { key, counter: 0 }
    }

    /// Sixteen bytes, never given out again.
    pub fn next16(&mut self) -> [u8; 16] {
        let block = block(&self.key, [self.counter as u32, (self.counter >> 32) as u32, 0, 0]);
        self.counter += 1;
        let mut out = [0; 16];
        for (bytes, word) in out.chunks_exact_mut(4).zip(block) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }
}

fn quarter(s: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    s[a] = s[a].wrapping_add(s[b]);
    s[d] = (s[d] ^ s[a]).rotate_left(16);
    s[c] = s[c].wrapping_add(s[d]);
    s[b] = (s[b] ^ s[c]).rotate_left(12);
    s[a] = s[a].wrapping_add(s[b]);
    s[d] = (s[d] ^ s[a]).rotate_left(8);
    s[c] = s[c].wrapping_add(s[d]);
    s[b] = (s[b] ^ s[c]).rotate_left(7);
}

fn block(key: &[u32; 8], tail: [u32; 4]) -> [u32; 16] {
    let mut start = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    start[4..12].copy_from_slice(key);
    start[12..].copy_from_slice(&tail);
    let mut s = start;
    for _ in 0..10 {
        quarter(&mut s, 0, 4, 8, 12);
        quarter(&mut s, 1, 5, 9, 13);
        quarter(&mut s, 2, 6, 10, 14);
        quarter(&mut s, 3, 7, 11, 15);
        quarter(&mut s, 0, 5, 10, 15);
        quarter(&mut s, 1, 6, 11, 12);
        quarter(&mut s, 2, 7, 8, 13);
        quarter(&mut s, 3, 4, 9, 14);
    }
    for (word, first) in s.iter_mut().zip(start) {
        *word = word.wrapping_add(first);
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_function_gives_the_standard_s_example() {
        // RFC 8439, section 2.3.2.
        let mut key = [0; 8];
        for (i, word) in key.iter_mut().enumerate() {
            let b = 4 * i as u32;
            *word = u32::from_le_bytes([b as u8, (b + 1) as u8, (b + 2) as u8, (b + 3) as u8]);
        }
        let out = block(&key, [1, 0x0900_0000, 0x4a00_0000, 0]);
        assert_eq!(out[0], 0xe4e7_f110);
        assert_eq!(out[15], 0x4e3c_50a2);
    }

    #[test]
    fn a_clone_of_the_seed_repeats_and_another_seed_does_not() {
        let (mut a, mut b, mut c) = (Stream::new(&[7; 32]), Stream::new(&[7; 32]), Stream::new(&[8; 32]));
        let first = a.next16();
        assert_eq!(first, b.next16());
        assert_ne!(first, c.next16());
        assert_ne!(first, a.next16());
    }
}
