//! The life lease as the agent keeps it for the watchdog: one small file, renewed by a rename.
//!
//! ```text
//! {"boot":"3f2c…","life_ends_us":1812345678,"life_ms":1800000,"deadline_us":1796000000000000}
//! 9a0b…                                                     SHA-256 of the line above
//! ```
//! The end is a point on CLOCK_BOOTTIME, so it means something in one boot only. A file that was written by another build
//! may say more than this one reads: it is the older watchdog that outlives an agent's upgrade.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use drums_common::{
    clock::{Micros, MonoMicros},
    digest::Sha256,
};
use serde::{Deserialize, Serialize};

pub const NAME: &str = "life-lease";
const MAX_BYTES: u64 = 4 << 10;
const STEP_MAX_MS: u64 = 60_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The kernel's boot id.
    pub boot: String,
    /// When the life lease ends if nothing renews it.
    #[serde(rename = "life_ends_us")]
    pub life_ends: MonoMicros,
    pub life_ms: u64,
    /// The absolute deadline as the agent knows it.
    #[serde(rename = "deadline_us")]
    pub deadline: Option<Micros>,
}

#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("cannot {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is torn or was changed: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
}

impl LeaseError {
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// This boot of this machine.
pub fn boot_id() -> Result<String, LeaseError> {
    let path = PathBuf::from("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(&path).map_err(|source| LeaseError::Io { what: "read", path, source })?;
    Ok(text.trim().to_owned())
}

/// By how much the end that was written may lag behind the lease's: a sixteenth of it, and a minute at most. Whoever goes by
/// what was written gives this on top.
pub fn step_ms(life_ms: u64) -> u64 {
    (life_ms / 16).min(STEP_MAX_MS)
}

/// Whether a lease that ends at `ends` is to be written although one that ends at `written` was: an end that moved little
/// is not worth waking anybody, one that came closer is.
pub fn is_due(written: Option<MonoMicros>, ends: MonoMicros, life_ms: u64) -> bool {
    written.is_none_or(|w| ends < w || ends > w.plus_ms(step_ms(life_ms)))
}

impl Lease {
    /// Whole or not at all, as far as whoever reads it now is concerned. Nothing is synced: after a crash of the kernel the
    /// file is of another boot.
    pub fn write(&self, path: &Path) -> Result<(), LeaseError> {
        let json = serde_json::to_string(self).expect("strings and numbers always serialise");
        let text = format!("{json}\n{}\n", Sha256::of(json.as_bytes()));
        let new = path.with_extension("new");
        fs::write(&new, text).map_err(|source| LeaseError::Io { what: "write", path: new.clone(), source })?;
        fs::rename(&new, path).map_err(|source| LeaseError::Io { what: "put in place", path: path.to_owned(), source })
    }

    pub fn read(path: &Path) -> Result<Self, LeaseError> {
        use io::Read as _;
        let mut bytes = Vec::new();
        let read = fs::File::open(path).and_then(|f| f.take(MAX_BYTES).read_to_end(&mut bytes));
        read.map_err(|source| LeaseError::Io { what: "read", path: path.to_owned(), source })?;
        Self::parse(&bytes).map_err(|why| LeaseError::Damaged { path: path.to_owned(), why })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
        let (json, digest) = text.split_once('\n').ok_or("it has no second line")?;
        if digest.trim_end() != Sha256::of(json.as_bytes()).to_string() {
            return Err("its digest is not that of its content".to_owned());
        }
        serde_json::from_str(json).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> Lease {
        Lease {
            boot: "b1".to_owned(),
            life_ends: MonoMicros(90_000_000),
            life_ms: 60_000,
            deadline: Some(Micros(1_796_000_000_000_000)),
        }
    }

    #[test]
    fn a_lease_is_read_as_it_was_written_and_every_tear_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        assert!(Lease::read(&path).unwrap_err().is_absent());
        lease().write(&path).unwrap();
        assert_eq!(Lease::read(&path).unwrap(), lease());
        let whole = fs::read(&path).unwrap();
        for end in 0..whole.len() - 1 {
            fs::write(&path, &whole[..end]).unwrap();
            let e = Lease::read(&path).unwrap_err();
            assert!(matches!(e, LeaseError::Damaged { .. }), "{end} bytes: {e}");
        }
        for (place, _) in whole.iter().enumerate().take(whole.len() - 1) {
            let mut changed = whole.clone();
            changed[place] ^= 1;
            fs::write(&path, &changed).unwrap();
            assert!(Lease::read(&path).is_err(), "byte {place}");
        }
    }

    #[test]
    fn what_a_later_build_adds_is_not_minded() {
        let json = serde_json::to_string(&lease()).unwrap().replace('}', ",\"more\":[1]}");
        let text = format!("{json}\n{}\n", Sha256::of(json.as_bytes()));
        assert_eq!(Lease::parse(text.as_bytes()).unwrap(), lease());
    }

    #[test]
    fn an_end_that_moved_little_is_not_written_again() {
        let w = MonoMicros(1_000_000_000);
        assert!(is_due(None, w, 1_800_000));
        assert!(!is_due(Some(w), w.plus_ms(60_000), 1_800_000) && is_due(Some(w), w.plus_ms(60_001), 1_800_000));
        assert!(!is_due(Some(w), w.plus_ms(1_000), 16_000) && is_due(Some(w), w.plus_ms(1_001), 16_000));
        assert!(is_due(Some(w), MonoMicros(w.0 - 1), 1_800_000), "a shorter lease counts at once");
    }
}
