//! What bounds a paid host's life whatever its agent does: the deadline and the lifetime that user data wrote down, and
//! the time that it has been up before this boot.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use drums_common::clock::Micros;

/// Two short lines; whatever is longer is something else.
const MAX_BYTES: u64 = 4 << 10;
/// Seconds since 1970 after which no deadline lies (the year 2514), nor is any lifetime longer.
const LAST_S: u64 = 1 << 34;

/// As registered with the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Absolute, the campaign's.
    pub deadline: Micros,
    /// From the launch to the deadline, counted while the host is up: what a host whose clock is wrong goes by.
    pub lifetime_ms: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum BoundsError {
    #[error("cannot read the deadline in {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} says no {what}; expected the lines DEADLINE_S=<seconds since 1970> and LIFETIME_S=<seconds>", path.display())]
    Damaged { path: PathBuf, what: &'static str },
}

/// Reads the file that user data wrote, and that the host's own timer goes by as well.
pub fn read(path: &Path) -> Result<Bounds, BoundsError> {
    let text = read_short(path).map_err(|source| BoundsError::Read { path: path.to_owned(), source })?;
    let number = |name: &'static str, what| {
        let value = text.lines().find_map(|l| l.trim().strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok());
        // Zero is no deadline, and never means that there is none.
        let value = value.filter(|s| (1..LAST_S).contains(s));
        value.ok_or_else(|| BoundsError::Damaged { path: path.to_owned(), what })
    };
    let (deadline_s, lifetime_s) = (number("DEADLINE_S", "deadline")?, number("LIFETIME_S", "lifetime")?);
    // Both are below 2^34, so that neither product overflows.
    Ok(Bounds { deadline: Micros(deadline_s.cast_signed() * 1_000_000), lifetime_ms: lifetime_s * 1_000 })
}

/// The seconds of a file of this folder each, but for this boot's. What cannot be read counts as nothing: this boot and the
/// deadline are counted all the same.
pub fn lived_before_ms(folder: &Path, boot: &str) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let of_other_boots = entries.flatten().filter(|e| e.file_name() != boot && e.file_name() != ".new");
    of_other_boots
        .filter_map(|e| read_short(&e.path()).ok()?.trim().parse::<u64>().ok())
        .fold(0, |sum: u64, s| sum.saturating_add(s.saturating_mul(1_000)))
}

fn read_short(path: &Path) -> io::Result<String> {
    use io::Read as _;
    let mut text = String::new();
    fs::File::open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_user_data_is_read_and_nothing_is_never_unlimited() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deadline");
        fs::write(&path, "DEADLINE_S=1796000000\nLIFETIME_S=7200\n").unwrap();
        let want = Bounds { deadline: Micros(1_796_000_000_000_000), lifetime_ms: 7_200_000 };
        assert_eq!(read(&path).unwrap(), want);
        for (bad, word) in [
            ("", "no deadline"),
            ("DEADLINE_S=1796000000", "no lifetime"),
            ("DEADLINE_S=1796000000\nLIFETIME_S=", "no lifetime"),
            ("DEADLINE_S=0\nLIFETIME_S=7200", "no deadline"),
            ("DEADLINE_S=1796000000\nLIFETIME_S=0", "no lifetime"),
            ("DEADLINE_S=-5\nLIFETIME_S=7200", "no deadline"),
            ("DEADLINE_S=99999999999999999999\nLIFETIME_S=7200", "no deadline"),
            ("DEADLINE_S=1796000000\nLIFETIME_S=17179869184", "no lifetime"),
        ] {
            fs::write(&path, bad).unwrap();
            let said = read(&path).unwrap_err().to_string();
            assert!(said.contains(word), "{bad:?}: {said}");
        }
        assert!(matches!(read(&dir.path().join("absent")), Err(BoundsError::Read { .. })));
    }

    #[test]
    fn time_up_is_summed_over_other_boots() {
        let dir = tempfile::tempdir().unwrap();
        for (boot, s) in [("this", "500"), ("first", "100\n"), ("second", "20"), ("torn", ""), (".new", "9000")] {
            fs::write(dir.path().join(boot), s).unwrap();
        }
        assert_eq!(lived_before_ms(dir.path(), "this"), 120_000);
        assert_eq!(lived_before_ms(&dir.path().join("absent"), "this"), 0);
    }
}
