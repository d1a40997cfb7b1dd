//! Where a home keeps things, and what the daemon's configuration may say.
//!
//! TOML → raw struct (unknown fields are errors) → validated `Config`. Only `main` reads files.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use drums_common::{
    lease::{BadLeaseTimes, LeaseTimes},
    token::is_host,
};
use drums_identity::Certificates;
use serde::{Deserialize, Serialize};

use crate::{
    bucket::{BucketConfig, BucketError},
    instances::{IdentityConfig, IdentityConfigError},
};

/// Default home of a coordinator.
pub const DEFAULT_HOME: &str = "/var/lib/drums";

/// Paths of a home; `drumsctl init` makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    dir: PathBuf,
}

impl Home {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }
    pub fn dir(&self) -> &Path {
        &self.dir
    }
    /// Daemon configuration; absent means all defaults.
    pub fn config(&self) -> PathBuf {
        self.dir.join("coordinator.toml")
    }
    pub fn pki(&self) -> PathBuf {
        self.dir.join("pki")
    }
    pub fn store(&self) -> PathBuf {
        self.dir.join("store.sqlite")
    }
    /// Content-addressed: the file `artifacts/<sha256>` has that digest. A workload is its manifest's canonical JSON
    /// under the workload's digest, and every file of it under its own.
    pub fn artifacts(&self) -> PathBuf {
        self.dir.join("artifacts")
    }
    /// HTTP for the local operator.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("drums.sock")
    }
    /// Which of the coordinators of a shared store this home's is. Not part of a backup.
    pub fn node(&self) -> PathBuf {
        self.dir.join("node")
    }
    /// Held by the one daemon of a home.
    pub fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }
}

/// As written in `coordinator.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// Address the UDP endpoints listen on. All of them: agents dial in from elsewhere, and nothing is accepted without
    /// a certificate or a token.
    pub listen: IpAddr,
    /// 7400: agents, QUIC.
    pub agents_port: u16,
    /// 7401: enrolment, QUIC. A port of its own, so that it can be closed once all hosts are enrolled.
    pub enrol_port: u16,
    /// Address and port of HTTPS `/api/v1`. Loopback: the local operator is the common case, and remote access is a
    /// decision.
    pub api: SocketAddr,
    /// Addresses that agents are told in tokens, IP addresses or names. Empty: found out from the machine's interfaces.
    pub advertise: Vec<String>,
    pub leases: LeaseTimes,
    /// Where agents put sealed evidence when this coordinator is away. None: it stays on their disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<BucketConfig>,
    /// Absent: SQLite in the home.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postgres: Option<PostgresConfig>,
    /// What launched hosts prove with which instance they are. Absent: no host that was launched is enrolled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<IdentityConfig>,
}

/// A store on a PostgreSQL server, which several coordinators may share: one is active, the others stand by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PostgresConfig {
    /// `postgres://USER@HOST/DATABASE`, or `postgres://USER@/DATABASE?host=/FOLDER` for a unix socket; never with a
    /// password.
    pub url: String,
    /// The password is this file's first line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
    /// PEM of the CA that the server's certificate must be of; needed over a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// How long the active coordinator's lease holds without renewal. Ten seconds: a hand-over is over before agents lose
    /// their life lease by far, and a pause of the machine costs none.
    #[serde(default = "lease_ms")]
    pub lease_ms: u64,
}

fn lease_ms() -> u64 {
    10_000
}

impl PostgresConfig {
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), password_file: None, ca: None, lease_ms: lease_ms() }
    }
}

impl Default for RawConfig {
    fn default() -> Self {
        Self {
            listen: Ipv4Addr::UNSPECIFIED.into(),
            agents_port: 7400,
            enrol_port: 7401,
            api: SocketAddr::from((Ipv4Addr::LOCALHOST, 7443)),
            advertise: Vec::new(),
            leases: LeaseTimes::default(),
            postgres: None,
            bucket: None,
            identity: None,
        }
    }
}

/// A configuration that holds together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub agents: SocketAddr,
    pub enrol: SocketAddr,
    pub api: SocketAddr,
    pub advertise: Vec<String>,
    pub leases: LeaseTimes,
    pub postgres: Option<PostgresConfig>,
    pub bucket: Option<BucketConfig>,
    /// AWS's, by region; none where no hosts are launched.
    pub certificates: Certificates,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not a configuration: {}", path.display(), text.trim_end())]
    Parse { path: PathBuf, text: String },
    #[error("agents_port and enrol_port are both {0}; give each its own UDP port")]
    SamePort(u16),
    #[error("{0} is 0; give a port from 1 to 65535")]
    ZeroPort(&'static str),
    #[error("advertise names {0:?}, which is neither an IP address nor a DNS name")]
    BadAddress(String),
    #[error("advertise names {0} addresses; 8 are enough")]
    ManyAddresses(usize),
    #[error("postgres.lease_ms is {0}; give at least 1000, since it is renewed three times in that time")]
    ShortLease(u64),
    #[error("leases are wrong")]
    Leases(#[from] BadLeaseTimes),
    #[error("the bucket is wrong")]
    Bucket(#[from] BucketError),
    #[error("the certificates of launched hosts are wrong")]
    Identity(#[from] IdentityConfigError),
}

impl RawConfig {
    /// Reads a file; `None` for one that does not exist.
    pub fn read(path: &Path) -> Result<Option<Self>, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ConfigError::Read { path: path.to_owned(), source }),
        };
        // The TOML error's own text has line, column and a picture; it is the message, not a cause.
        toml::from_str(&text).map(Some).map_err(|e| ConfigError::Parse { path: path.to_owned(), text: e.to_string() })
    }

    pub fn validate(self) -> Result<Config, ConfigError> {
        for (name, port) in
            [("agents_port", self.agents_port), ("enrol_port", self.enrol_port), ("api's port", self.api.port())]
        {
            if port == 0 {
                return Err(ConfigError::ZeroPort(name));
            }
        }
        if self.agents_port == self.enrol_port {
            return Err(ConfigError::SamePort(self.agents_port));
        }
        if self.advertise.len() > 8 {
            return Err(ConfigError::ManyAddresses(self.advertise.len()));
        }
        if let Some(bad) = self.advertise.iter().find(|a| !is_host(a)) {
            return Err(ConfigError::BadAddress(bad.clone()));
        }
        self.leases.validate()?;
        if let Some(p) = self.postgres.as_ref().filter(|p| p.lease_ms < 1_000) {
            return Err(ConfigError::ShortLease(p.lease_ms));
        }
        self.bucket.as_ref().map(BucketConfig::validate).transpose()?;
        let certificates = self.identity.as_ref().map(IdentityConfig::certificates).transpose()?.unwrap_or_default();
        Ok(Config {
            agents: SocketAddr::from((self.listen, self.agents_port)),
            enrol: SocketAddr::from((self.listen, self.enrol_port)),
            api: self.api,
            advertise: self.advertise,
            leases: self.leases,
            postgres: self.postgres,
            bucket: self.bucket,
            certificates,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzz_the_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.toml");
        let seed = toml::to_string_pretty(&RawConfig::default()).unwrap();
        drums_fuzz::decoder!(500, vec![seed.into_bytes()], |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            if let Ok(Some(raw)) = RawConfig::read(&path) {
                let _ = raw.validate();
            }
        });
    }

    #[test]
    fn the_defaults_hold_together() {
        let c = RawConfig::default().validate().unwrap();
        assert_eq!((c.agents.port(), c.enrol.port(), c.api.port()), (7400, 7401, 7443));
        assert!(c.api.ip().is_loopback());
    }

    #[test]
    fn bad_configurations_are_refused_with_a_reason() {
        for (text, want) in [
            ("agents_port = 7401", "own UDP port"),
            ("enrol_port = 0", "enrol_port is 0"),
            ("advertise = [\"a b\"]", "neither an IP address"),
            ("[leases]\nbeat_ms = 1000", "missing field"),
            ("colour = 1", "unknown field"),
            ("listen = 7", "invalid type"),
            ("[postgres]\nurl = \"x\"\nlease_ms = 10", "at least 1000"),
            ("listen = \"nowhere\"", "invalid IP address"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("c.toml");
            std::fs::write(&path, text).unwrap();
            let e = RawConfig::read(&path).and_then(|c| c.unwrap().validate()).unwrap_err();
            assert!(e.to_string().contains(want), "{text}: {e}");
        }
        let bucket = toml::from_str::<RawConfig>("[bucket]\nurl = \"evidence\"").unwrap().validate().unwrap_err();
        assert!(drums_common::telemetry::chain(&bucket).contains("absolute path"), "{bucket}");
        let leases = LeaseTimes { beat_ms: 0, ..Default::default() };
        let e = RawConfig { leases, ..Default::default() }.validate().unwrap_err();
        assert!(drums_common::telemetry::chain(&e).contains("beat_ms is 0"));
    }
}
