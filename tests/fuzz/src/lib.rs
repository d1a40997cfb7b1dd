//! Fuzz targets of decoders. A target is a test: on a stable toolchain it replays its kept corpus
//! (`__fuzz__/<target>/corpus` beside its file) and then draws inputs for a bounded time; `cargo bolero test` runs the same
//! target under libFuzzer with coverage, and what it finds goes into the corpus.
//!
//! Random bytes end at a decoder's first check, so an input here is either taken as it is or read as edits of a good
//! message ([`input`]).

pub use bolero;

/// Drawn inputs of one target in a test run, unless the target names another number: its time is bounded by that.
pub const ITERATIONS: usize = 2_000;
/// Longest drawn program of edits, bytes: some forty edits.
pub const MAX_PROGRAM: usize = 160;

/// Runs `$decode` (a `Fn(&[u8])` that must not panic) on the corpus, on every seed, and on edits of the seeds. Used in a
/// `#[test]`; the name of the test is the name of the target. A slow decoder gets fewer drawn inputs.
#[macro_export]
macro_rules! decoder {
    ($seeds:expr, $decode:expr) => {
        $crate::decoder!($crate::ITERATIONS, $seeds, $decode)
    };
    ($iterations:expr, $seeds:expr, $decode:expr) => {{
        let seeds: Vec<Vec<u8>> = $seeds;
        let decode = $decode;
        for seed in &seeds {
            decode(seed);
        }
        $crate::bolero::check!()
            .with_iterations($iterations)
            .with_max_len($crate::MAX_PROGRAM)
            .for_each(|program: &[u8]| decode(&$crate::input(&seeds, program)));
    }};
}

/// Words at which decoders of text and of numbers break.
const WORDS: [&[u8]; 16] = [
    b"\"",
    b"\\",
    b"\0",
    b"\n",
    b"\r\n\r\n",
    b"-1",
    b"1e999",
    b"NaN",
    b"18446744073709551616",
    b"null",
    b"[[[[[[[[[[[[[[[[",
    b"{\"a\":{\"a\":{\"a\":",
    b"../",
    b"\xff\xfe",
    b"%00%",
    b"\xf0\x9f\xa5\x81",
];

/// The input that a program stands for: what follows a first byte below 128, or the seed that the second byte names, edited
/// by four bytes at a time (what, where, how).
pub fn input(seeds: &[Vec<u8>], program: &[u8]) -> Vec<u8> {
    match program {
        [] => Vec::new(),
        [raw, rest @ ..] if *raw < 128 || seeds.is_empty() => rest.to_vec(),
        [_, rest @ ..] => {
            let (which, edits) = rest.split_first().unwrap_or((&0, &[]));
            let mut out = seeds[usize::from(*which) % seeds.len()].clone();
            for edit in edits.chunks_exact(4) {
                apply(&mut out, seeds, edit[0], u16::from_be_bytes([edit[1], edit[2]]), edit[3]);
            }
            out
        }
    }
}

fn apply(out: &mut Vec<u8>, seeds: &[Vec<u8>], what: u8, place: u16, how: u8) {
    // From the start to the end inclusive, whatever the length.
    let at = (usize::from(place) * (out.len() + 1)) >> 16;
    let n = usize::from(how);
    match what % 8 {
        0 if at < out.len() => out[at] = how,
        1 if at < out.len() => out[at] ^= 1 << (how % 8),
        2 => out.truncate(at),
        3 => drop(out.splice(at..at, std::iter::repeat_n(how, 1 + n % 64))),
        4 => drop(out.drain(at..(at + 1 + n).min(out.len()).max(at))),
        5 => drop(out.splice(at..at, WORDS[n % WORDS.len()].iter().copied())),
        6 => {
            // A length as binary formats write it, at its extremes.
            let value = [0, 1, u32::MAX, i32::MAX as u32, out.len() as u32, out.len() as u32 + 1][n % 6];
            let bytes = if n & 128 == 0 { value.to_be_bytes() } else { value.to_le_bytes() };
            let end = (at + 4).min(out.len());
            out.splice(at..end, bytes);
        }
        7 => {
            let other = &seeds[n % seeds.len()];
            let from = at.min(other.len());
            let part = other[from..(from + 64).min(other.len())].to_vec();
            out.splice(at..at, part);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_raw_bytes_or_edits_of_a_seed() {
        let seeds = [b"hello".to_vec(), b"world".to_vec()];
        assert_eq!(input(&seeds, b"\0raw"), b"raw");
        assert_eq!(input(&seeds, &[200, 1]), b"world");
        assert_eq!(input(&seeds, &[200, 0, 0, 0, 0, b'j']), b"jello");
        assert_eq!(input(&seeds, &[200, 0, 2, 0x80, 0, 0]), b"hel");
        assert_eq!(input(&[], &[200, 1]), [1]);
    }

    /// The targets can find something: an index that is one too large is met.
    #[test]
    #[should_panic(expected = "test failed")]
    fn a_decoder_that_trusts_a_length_is_caught() {
        decoder!(vec![vec![3, 1, 2, 3]], |bytes: &[u8]| {
            if let Some((len, body)) = bytes.split_first() {
                let _ = (0..usize::from(*len)).fold(0u32, |sum, i| sum + u32::from(body[i]));
            }
        });
    }
}
