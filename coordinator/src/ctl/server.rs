//! A store on a PostgreSQL server, as `init` and `doctor` need it.
//!
//! A home's keys and its store belong together: the store keeps the digest of the CA, so that a home with other keys can
//! neither be made for it nor run on it.

use drums_common::{digest::Sha256, ids::InstallationId, telemetry::chain};

use super::CtlError;
use crate::{
    config::{Home, PostgresConfig},
    store::WorkloadRow,
};
#[cfg(feature = "postgres")]
use crate::{
    pki::Pki,
    store::{PostgresStore, Store as _},
};

#[cfg(feature = "postgres")]
const HELP: &str = "is the server running, and may this user use the database? psql with the same address tells";

/// The store's installation, named now if it is a new store.
#[cfg(feature = "postgres")]
pub(super) fn installation(home: &Home, at: &PostgresConfig) -> Result<InstallationId, CtlError> {
    let attempt = || format!("making the home {} on {}", home.dir().display(), at.url);
    let fail = |e| CtlError::failed(attempt(), e, HELP);
    let keys = match Pki::is_there(&home.pki()) {
        true => Some(Pki::open(&home.pki()).map_err(|e| CtlError::failed(attempt(), e, "restore it from a backup"))?),
        false => None,
    };
    let keys = keys.map(|p| p.fingerprint().to_string());
    let (drawn, audit) = super::home::drawn();
    apart(|| {
        let mut store = PostgresStore::open(at).map_err(fail)?;
        let ca = store.meta("ca").map_err(fail)?;
        if ca.is_some() && ca != keys {
            return Err(other_keys(at));
        }
        let installation = store.init("installation", &drawn, &audit).map_err(fail)?;
        installation
            .parse()
            .map_err(|e: drums_common::ids::BadId| CtlError::failed(attempt(), e, "is it our database?"))
    })
}

/// Ties the store to the home's keys.
#[cfg(feature = "postgres")]
pub(super) fn register_ca(at: &PostgresConfig, ca: Sha256) -> Result<(), CtlError> {
    let fail = |e| CtlError::failed(format!("writing the home's CA down in {}", at.url), e, HELP);
    let audit = super::home::drawn().1.detail(&format!("CA {ca}"));
    let kept = apart(|| {
        let mut store = PostgresStore::open(at).map_err(fail)?;
        store.init("ca", &ca.to_string(), &audit).map_err(fail)
    })?;
    if kept == ca.to_string() { Ok(()) } else { Err(other_keys(at)) }
}

#[cfg(feature = "postgres")]
fn other_keys(at: &PostgresConfig) -> CtlError {
    CtlError::bad(
        format!("the store {} belongs to another home: its CA is not this one's", at.url),
        "a further coordinator's home is made from a backup of the first one's (runbooks/standby-coordinator.md)",
    )
}

/// The workloads that the store names.
#[cfg(feature = "postgres")]
pub(super) fn workloads(at: &PostgresConfig) -> Result<Vec<WorkloadRow>, CtlError> {
    apart(|| PostgresStore::open(at)?.workloads())
        .map_err(|e| CtlError::failed(format!("asking {} for its workloads", at.url), e, HELP))
}

/// For `doctor`.
#[cfg(feature = "postgres")]
pub(super) fn look(at: &PostgresConfig) -> Result<String, String> {
    apart(|| PostgresStore::open(at)).map(|_| at.url.clone()).map_err(|e| chain(&e))
}

/// The store waits by itself, which a thread that drives other tasks must not.
#[cfg(feature = "postgres")]
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|s| s.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

#[cfg(not(feature = "postgres"))]
pub(super) fn installation(_: &Home, at: &PostgresConfig) -> Result<InstallationId, CtlError> {
    Err(without(at))
}

#[cfg(not(feature = "postgres"))]
pub(super) fn register_ca(at: &PostgresConfig, _: Sha256) -> Result<(), CtlError> {
    Err(without(at))
}

#[cfg(not(feature = "postgres"))]
pub(super) fn workloads(at: &PostgresConfig) -> Result<Vec<WorkloadRow>, CtlError> {
    Err(without(at))
}

#[cfg(not(feature = "postgres"))]
pub(super) fn look(at: &PostgresConfig) -> Result<String, String> {
    Err(chain(&without(at)))
}

#[cfg(not(feature = "postgres"))]
fn without(at: &PostgresConfig) -> CtlError {
    CtlError::bad(
        format!("this build has no PostgreSQL, so it cannot use {}", at.url),
        "build with cargo build -p drums-coordinator --features postgres",
    )
}
