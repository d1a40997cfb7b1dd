//! The agent's settings: a TOML file, then flags over it, then validation. Only the command line reads files.

use std::{
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use drums_common::token::{Token, TokenError};
use serde::{Deserialize, Serialize};

use crate::watchdog::{BadSettings, PaidSettings};

pub const DEFAULT_STATE: &str = "/var/lib/drums-agent";
pub const DEFAULT_TOOLS: &str = "/var/lib/drums-tools";
pub const DEFAULT_CA_FILE: &str = "/etc/ssl/certs/ca-certificates.crt";
pub const DEFAULT_LOCK: &str = "/run/lock/drums-measure.lock";

/// A token file is a line; whatever is longer than this is something else.
const MAX_TOKEN_FILE: u64 = 64 << 10;

/// As written in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// Identity, ledger, spool, workloads and scratch of this agent. `/var/lib/drums-agent`: survives reboots, which the
    /// ledger must.
    pub state: PathBuf,
    /// CRIU and what else `drums-agent setup` has put on this machine; shared by its agents.
    pub tools: PathBuf,
    /// Held by whoever measures on this machine. `/run/lock`: gone after a reboot, seen by every agent.
    pub measure_lock: PathBuf,
    /// Size limit of the scratch tmpfs, MiB. 4096: a template of each arm and a session fit; memory is taken only as it
    /// fills.
    pub scratch_mib: u64,
    /// Evidence is refused when the disk has less left than this, MiB. 256: a run writes a few.
    pub min_free_mib: u64,
    /// Certificates that a bucket is checked against when evidence goes to one over HTTPS, PEM. Where Debian keeps those
    /// of the public authorities.
    pub ca_file: PathBuf,
    /// Log lines as JSON.
    pub log_json: bool,
    /// What only a host that was launched and is paid for uses.
    pub paid: PaidSettings,
}

impl Default for RawConfig {
    fn default() -> Self {
        Self {
            state: DEFAULT_STATE.into(),
            tools: DEFAULT_TOOLS.into(),
            measure_lock: DEFAULT_LOCK.into(),
            scratch_mib: 4_096,
            min_free_mib: 256,
            ca_file: DEFAULT_CA_FILE.into(),
            log_json: false,
            paid: PaidSettings::default(),
        }
    }
}

/// Settings that hold together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub state: PathBuf,
    pub tools: PathBuf,
    pub measure_lock: PathBuf,
    pub scratch_bytes: u64,
    pub min_free_bytes: u64,
    pub ca_file: PathBuf,
    pub log_json: bool,
    pub paid: PaidSettings,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not a configuration: {}", path.display(), text.trim_end())]
    Parse { path: PathBuf, text: String },
    #[error("{name} is {}, and must be an absolute path", path.display())]
    Relative { name: &'static str, path: PathBuf },
    #[error("{name} is {got} MiB; give {min} to {max}")]
    OutOfRange { name: &'static str, got: u64, min: u64, max: u64 },
    #[error("state and tools are both {}; the tools are shared by agents, the state is not", path.display())]
    SameFolder { path: PathBuf },
    #[error(transparent)]
    Paid(#[from] BadSettings),
}

impl RawConfig {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        // The TOML error's own text has line, column and a picture; it is the message, not a cause.
        toml::from_str(&text).map_err(|e| ConfigError::Parse { path: path.to_owned(), text: e.to_string() })
    }

    pub fn validate(self) -> Result<Config, ConfigError> {
        for (name, path) in [
            ("state", &self.state),
            ("tools", &self.tools),
            ("measure_lock", &self.measure_lock),
            ("ca_file", &self.ca_file),
        ] {
            if !path.is_absolute() {
                return Err(ConfigError::Relative { name, path: path.clone() });
            }
        }
        if self.state == self.tools {
            return Err(ConfigError::SameFolder { path: self.state });
        }
        for (name, got, min, max) in
            [("scratch_mib", self.scratch_mib, 256, 1 << 20), ("min_free_mib", self.min_free_mib, 16, 1 << 20)]
        {
            if !(min..=max).contains(&got) {
                return Err(ConfigError::OutOfRange { name, got, min, max });
            }
        }
        self.paid.validate()?;
        Ok(Config {
            state: self.state,
            tools: self.tools,
            measure_lock: self.measure_lock,
            scratch_bytes: self.scratch_mib << 20,
            min_free_bytes: self.min_free_mib << 20,
            ca_file: self.ca_file,
            log_json: self.log_json,
            paid: self.paid,
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    #[error("cannot read the token from {from}")]
    Read { from: String, source: std::io::Error },
    #[error("{from} is empty")]
    Empty { from: String },
    #[error("{from} is not text")]
    NotText { from: String },
    #[error("{from} does not hold a usable token")]
    Token { from: String, source: TokenError },
}

impl TokenFileError {
    /// A token that was read once may be gone: its file, or what came on standard input.
    pub fn is_absent(&self) -> bool {
        match self {
            Self::Read { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            Self::Empty { .. } => true,
            Self::NotText { .. } | Self::Token { .. } => false,
        }
    }
}

/// A token from a file, or from standard input for `-`. Never from an argument: those are seen by everybody.
pub fn read_token(path: &Path) -> Result<Token, TokenFileError> {
    let stdin = path == Path::new("-");
    let from = if stdin { "standard input".to_owned() } else { path.display().to_string() };
    let mut bytes = Vec::new();
    let read = if stdin {
        std::io::stdin().lock().take(MAX_TOKEN_FILE).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|f| f.take(MAX_TOKEN_FILE).read_to_end(&mut bytes))
    };
    read.map_err(|source| TokenFileError::Read { from: from.clone(), source })?;
    if !stdin && std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o077 != 0) {
        tracing::warn!(file = %from, "others can read the token, and enrol with it; chmod 600 it");
    }
    if stdin && bytes.is_empty() {
        return Err(TokenFileError::Empty { from });
    }
    let text = String::from_utf8(bytes).map_err(|_| TokenFileError::NotText { from: from.clone() })?;
    Token::parse(&text).map_err(|source| TokenFileError::Token { from, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzz_the_configuration_and_the_token_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        let seed = toml::to_string_pretty(&RawConfig::default()).unwrap();
        drums_fuzz::decoder!(500, vec![seed.into_bytes(), b"drums1.e30\n".to_vec()], |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            if let Ok(raw) = RawConfig::read(&path) {
                let _ = raw.validate();
            }
            let _ = read_token(&path);
        });
    }

    fn read(text: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, text).unwrap();
        RawConfig::read(&path)?.validate()
    }

    #[test]
    fn the_defaults_hold_together_and_a_file_changes_only_what_it_says() {
        assert_eq!(read("").unwrap(), RawConfig::default().validate().unwrap());
        let c = read("state = \"/srv/agent\"\nscratch_mib = 512").unwrap();
        assert_eq!((c.state.to_str(), c.scratch_bytes), (Some("/srv/agent"), 512 << 20));
        assert_eq!(c.tools, Path::new(DEFAULT_TOOLS));
    }

    #[test]
    fn bad_files_are_refused_with_a_reason() {
        for (text, want) in [
            ("states = 1", "unknown field `states`"),
            ("state = 1", "line 1"),
            ("state = \"x\"", "absolute"),
            ("scratch_mib = 0", "give 256 to"),
            ("min_free_mib = 1", "give 16 to"),
            ("tools = \"/var/lib/drums-agent\"", "shared by agents"),
            ("state = ", "line 1, column"),
            ("[paid]\nfinish_s = 0", "give 1 to"),
            ("[paid]\npower_off_in_tests = \"/bin/true\"", "a real host's"),
        ] {
            let e = read(text).unwrap_err().to_string();
            assert!(e.contains(want), "{text}: {e}");
        }
        assert!(RawConfig::read(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn bad_token_files_are_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let absent = read_token(&path).unwrap_err();
        assert!(absent.is_absent(), "{absent}");
        for (bytes, want) in
            [(&b""[..], "empty"), (b"\xff\xfe", "not text"), (b"secret", "does not begin with drums1.")]
        {
            std::fs::write(&path, bytes).unwrap();
            let e = read_token(&path).unwrap_err();
            assert!(drums_common::telemetry::chain(&e).contains(want), "{e}");
            assert!(!e.is_absent());
        }
    }
}
