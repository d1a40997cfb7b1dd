//! The spec: a TOML file that people write, read into a validated [`Experiment`].
//!
//! Owns the format of the file, the rules that need nothing but the file ([`parse`]), and those that need to know what
//! the coordinator knows ([`Parsed::check`]: taken ids, hosts, workloads, the time). Every fault carries its place in the
//! source, what was expected and what to do; one pass reports them all. Knows nothing of files, terminals or the store.
//!
//! ```text
//! bytes ─ parse ─▶ Parsed { experiment, places } ─ check(&Known) ─▶ Experiment ─ Registration::freeze ─▶ registration
//!            └──────────── BadSpec { faults } ◀──────────┘
//! ```

mod diagnostic;
mod known;
mod lower;
mod reader;
#[cfg(test)]
mod tests;

use toml::de::DeTable;

pub use diagnostic::{BadSpec, Fault, MAX_FAULTS};
pub use known::{Known, Parsed, Reserved, reserved};

use crate::experiment::Experiment;
use diagnostic::Faults;

/// A spec is a page of text; anything larger is a mistake and is refused before it is read.
pub const MAX_SPEC_BYTES: u64 = 256 * 1024;

/// The fault of a file that is larger than [`MAX_SPEC_BYTES`].
pub fn too_large(file: &str, bytes: u64) -> BadSpec {
    let message = format!("the spec has {bytes} bytes, more than the {MAX_SPEC_BYTES} that a spec may have");
    BadSpec::whole(
        file,
        "too-large",
        message,
        "is this the right file? A spec is a page of TOML; see docs/experiments/EXP-028.toml",
    )
}

/// Reads a spec. `file` is how the user named it.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Parsed, BadSpec> {
    if bytes.len() as u64 > MAX_SPEC_BYTES {
        return Err(too_large(file, bytes.len() as u64));
    }
    let source = match std::str::from_utf8(bytes) {
        Ok(source) => source,
        Err(e) => {
            let good = String::from_utf8_lossy(&bytes[..e.valid_up_to()]).into_owned();
            let mut faults = Faults::new(&good);
            let end = good.len();
            faults.add("not-utf8", end..end, "this byte is not UTF-8", "a spec is text: save it as UTF-8");
            return Err(faults.into_bad_spec(file));
        }
    };
    let mut faults = Faults::new(source);
    if source.trim().is_empty() {
        return Err(BadSpec::whole(
            file,
            "empty",
            "the spec is empty".to_owned(),
            "begin with a copy of docs/experiments/EXP-028.toml",
        ));
    }
    let (root, errors) = DeTable::parse_recoverable(source);
    for e in &errors {
        let span = e.span().unwrap_or(0..0);
        faults.add("not-toml", span, e.message().trim().to_owned(), "correct the TOML at this place");
    }
    if !errors.is_empty() {
        return Err(faults.into_bad_spec(file));
    }
    match lower::lower(root.get_ref(), source, &mut faults) {
        Some((experiment, places)) if faults.is_empty() => {
            Ok(Parsed { file: file.to_owned(), source: source.to_owned(), experiment, places })
        }
        _ => Err(faults.into_bad_spec(file)),
    }
}

/// Reads a spec and applies the rules that need the coordinator's knowledge.
pub fn parse_and_check(file: &str, bytes: &[u8], known: &Known) -> Result<Experiment, BadSpec> {
    let parsed = parse(file, bytes)?;
    parsed.check(known)?;
    Ok(parsed.experiment)
}
