//! The connection to the server: where it is, how it is made, and how long anything may take.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tokio::{runtime::Runtime, task::JoinHandle, time::timeout};
use tokio_postgres::{
    Client, Config, NoTls, Row, Statement,
    config::{Host, SslMode, TargetSessionAttrs},
    error::SqlState,
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::Params;
use crate::{
    config::PostgresConfig,
    store::{DbError, StoreError},
};

/// For one statement, the server's own bound included: what takes longer is taken for a server that is away.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(3);
/// After a failed attempt to connect, calls fail at once for this long: a queue of them must not wait one by one.
const PAUSE: Duration = Duration::from_millis(250);
/// Commits are on the server's disk before they are answered. A statement that waits for a lock, and a transaction whose
/// coordinator stands still, end by themselves: what they hold would keep others from taking over.
const SETTINGS: &str = "SET synchronous_commit = on; SET statement_timeout = '8s'; \
     SET idle_in_transaction_session_timeout = '4s'; SET client_min_messages = warning; SET timezone = 'UTC'";

pub(super) struct Link {
    place: String,
    config: Config,
    tls: Option<MakeRustlsConnect>,
    session: Option<Session>,
    failed: Option<Instant>,
    /// Taken when this is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.session = None;
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing, so that a store may be dropped anywhere.
            runtime.shutdown_background();
        }
    }
}

/// The runtime, apart from the session that it drives.
fn on(runtime: &Option<Runtime>) -> &Runtime {
    runtime.as_ref().expect("it is taken only by drop")
}

struct Session {
    client: Client,
    prepared: HashMap<&'static str, Statement>,
    task: JoinHandle<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Session {
    async fn prepare(&mut self, sql: &'static str) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.prepared.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(sql).await?;
        self.prepared.insert(sql, statement.clone());
        Ok(statement)
    }
}

impl Link {
    pub(super) fn new(at: &PostgresConfig) -> Result<Self, StoreError> {
        let place = at.url.clone();
        let bad = |what: String| StoreError::BadPlace { place: place.clone(), what };
        let mut config: Config = at.url.parse().map_err(|e: tokio_postgres::Error| bad(e.to_string()))?;
        if config.get_password().is_some() {
            return Err(StoreError::BadPlace {
                place: "(its address is not repeated here)".to_owned(),
                what: "the address holds a password; put it into a file that only you read, and name that with \
                       password_file"
                    .to_owned(),
            });
        }
        if let Some(path) = &at.password_file {
            let text = std::fs::read_to_string(path).map_err(|e| bad(format!("{}: {e}", path.display())))?;
            config.password(text.trim_end());
        }
        let remote = config.get_hosts().iter().any(|h| matches!(h, Host::Tcp(_)));
        if config.get_hosts().is_empty() {
            return Err(bad("the address names no server: postgres://USER@HOST/DATABASE, or \
                            postgres://USER@/DATABASE?host=/run/postgresql for a unix socket"
                .to_owned()));
        }
        let tls = match (&at.ca, remote) {
            (Some(ca), true) => Some(connector(ca).map_err(bad)?),
            (None, true) => {
                return Err(bad("over a network the server must show a certificate: name its CA's with ca".to_owned()));
            }
            (_, false) => None,
        };
        config
            .ssl_mode(if remote { SslMode::Require } else { SslMode::Disable })
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .application_name("drums-coordinator")
            .connect_timeout(CONNECT);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| StoreError::Open { place: place.clone(), source: e.into() })?;
        Ok(Self { place, config, tls, session: None, failed: None, runtime: Some(runtime) })
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    fn away(&self, source: impl Into<DbError>) -> StoreError {
        StoreError::Away { place: self.place.clone(), source: source.into() }
    }

    /// Makes sure that there is a connection; true if it was made just now.
    pub(super) fn connect(&mut self) -> Result<bool, StoreError> {
        if self.session.as_ref().is_some_and(|s| !s.client.is_closed()) {
            return Ok(false);
        }
        self.forget();
        if self.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return Err(self.away("the last attempt to connect failed a moment ago"));
        }
        let (config, tls) = (&self.config, self.tls.clone());
        let made = async {
            let (client, task) = match tls {
                Some(tls) => {
                    let (client, connection) = config.connect(tls).await?;
                    (client, tokio::spawn(drive(connection)))
                }
                None => {
                    let (client, connection) = config.connect(NoTls).await?;
                    (client, tokio::spawn(drive(connection)))
                }
            };
            let session = Session { client, prepared: HashMap::new(), task };
            session.client.batch_execute(SETTINGS).await?;
            Ok::<_, tokio_postgres::Error>(session)
        };
        // The bound is made on the runtime, whose clock it needs.
        let e = match on(&self.runtime).block_on(async { timeout(CONNECT + PATIENCE, made).await }) {
            Ok(Ok(session)) => {
                self.session = Some(session);
                self.failed = None;
                return Ok(true);
            }
            Ok(Err(e)) if e.as_db_error().is_some_and(|e| !passing(e.code())) => {
                StoreError::Open { place: self.place.clone(), source: e.into() }
            }
            Ok(Err(e)) => self.away(e),
            Err(_) => self.away(format!("no answer within {} s", (CONNECT + PATIENCE).as_secs())),
        };
        self.failed = Some(Instant::now());
        Err(e)
    }

    /// Drops the connection, and sees to it that the server notices.
    pub(super) fn forget(&mut self) {
        if self.session.take().is_some() {
            // The runtime stands still between calls: one turn lets it drop the socket.
            on(&self.runtime).block_on(tokio::task::yield_now());
        }
    }

    pub(super) fn query(
        &mut self,
        attempt: &'static str,
        sql: &'static str,
        params: Params<'_>,
    ) -> Result<Vec<Row>, StoreError> {
        self.run(attempt, PATIENCE, async |s| {
            let statement = s.prepare(sql).await?;
            s.client.query(&statement, params).await
        })
    }

    pub(super) fn execute(
        &mut self,
        attempt: &'static str,
        sql: &'static str,
        params: Params<'_>,
    ) -> Result<u64, StoreError> {
        self.run(attempt, PATIENCE, async |s| {
            let statement = s.prepare(sql).await?;
            s.client.execute(&statement, params).await
        })
    }

    pub(super) fn batch(
        &mut self,
        attempt: &'static str,
        sql: &'static str,
        patience: Duration,
    ) -> Result<(), StoreError> {
        self.run(attempt, patience, async |s| s.client.batch_execute(sql).await)
    }

    fn run<T>(
        &mut self,
        attempt: &'static str,
        patience: Duration,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let Some(session) = self.session.as_mut() else { return Err(self.away("the connection was lost")) };
        match on(&self.runtime).block_on(async { timeout(patience, work(session)).await }) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(e)) if is_away(&e) => {
                self.forget();
                Err(self.away(e))
            }
            Ok(Err(e)) => Err(StoreError::Sql { attempt, source: e.into() }),
            Err(_) => {
                self.forget();
                Err(self.away(format!("no answer within {} s", patience.as_secs())))
            }
        }
    }
}

/// Carries the session's bytes until it ends; why it ended is told to whoever uses it next.
async fn drive<F: Future<Output = Result<(), tokio_postgres::Error>>>(connection: F) {
    if let Err(e) = connection.await {
        tracing::debug!(error = drums_common::telemetry::chain(&e), "the connection to the store ended");
    }
}

fn is_away(e: &tokio_postgres::Error) -> bool {
    match e.as_db_error() {
        Some(db) => passing(db.code()),
        None => e.is_closed() || std::error::Error::source(e).is_some_and(|s| s.is::<std::io::Error>()),
    }
}

/// What a server says that starts, stops, is promoted, is full, or ended a session that stood still.
fn passing(code: &SqlState) -> bool {
    let class = code.code();
    class.starts_with("08")
        || class.starts_with("53")
        || class.starts_with("57P")
        || *code == SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
        || *code == SqlState::READ_ONLY_SQL_TRANSACTION
        || *code == SqlState::QUERY_CANCELED
}

fn connector(ca: &Path) -> Result<MakeRustlsConnect, String> {
    let at = |e: &dyn std::fmt::Display| format!("{}: {e}", ca.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|e| at(&e))? {
        roots.add(certificate.map_err(|e| at(&e))?).map_err(|e| at(&e))?;
    }
    if roots.is_empty() {
        return Err(at(&"there is no certificate in it"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}
