//! The API of operators: JSON over HTTP/1.1, `/api/v1/...`.
//!
//! Served over HTTPS to holders of a person's certificate, as far as its role allows, and over the unix socket of the home
//! to whoever may open it (mode 0600), who is an operator. Owns routes and mirror types ([`views`]); decides nothing. Errors are [`Failure`]s with a status.
//!
//! ```text
//! GET  status                          GET  hosts           POST hosts            POST hosts/H/release
//! GET  workloads   POST workloads      PUT  artifacts/SHA   HEAD artifacts/SHA
//! POST plan        POST registrations  GET  registrations   GET  registrations/SHA
//! GET  runs        POST runs           GET  runs/R          POST runs/R/cancel
//! GET  runs/R/events?after=N&wait_s=S  GET  runs/R/meta     GET  runs/R/evidence/H?after=N
//! GET  events?since_us=T&run=R&host=H&after=N&limit=L&wait_s=S
//! GET  access      POST access         POST access/revoke
//! ```

mod access;
mod events;
mod experiments;
mod hosts;
mod runs;
mod serve;
pub mod views;

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, FromRequest as _, Request},
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use drums_common::{
    digest::Sha256,
    failure::{Failure, FailureClass},
    spec::BadSpec,
    telemetry::chain,
};
use serde::{Deserialize, Serialize};

pub use access::{audit_rotations, register_first};
pub use serve::{ServeError, Served, serve_https, serve_unix};

use crate::{
    pki::{Pki, Role},
    store::{StoreError, Who},
    tasks::Control,
};

/// A spec may have 256 KiB; escaped as JSON text it may double.
const MAX_JSON: usize = 1 << 20;
/// A manifest, which has its own limit, inside a request.
const MAX_MANIFEST: usize = 17 << 20;

/// The largest of these bodies comes within it also over a slow line; one that trickles holds its connection no longer.
const SLOW_BODY: Duration = Duration::from_secs(60);

/// What routes share.
pub struct Context {
    pub control: Arc<Control>,
    /// What tokens say.
    pub enrolment: Enrolment,
    pub home: String,
    pub build: Sha256,
    pub pki: Arc<Pki>,
}

/// How agents find this coordinator.
#[derive(Clone, Debug)]
pub struct Enrolment {
    pub ca: Sha256,
    /// Used when the operator names none.
    pub addresses: Vec<String>,
    pub agents_port: u16,
    pub enrol_port: u16,
}

type Shared = axum::extract::State<Arc<Context>>;

/// Who asks, and from where: put into each request by the server that accepted the connection.
#[derive(Clone, Debug)]
pub struct Caller {
    pub name: String,
    /// Where it asks from: for the audit trail.
    pub from: String,
    pub role: Role,
    /// None over the unix socket: the file's mode has decided.
    pub certificate: Option<Sha256>,
}

/// A caller who was let in: what the audit trail says.
#[derive(Clone, Debug)]
pub struct Operator(pub Who);

/// An error answer. The body is `{"error": Failure, "spec": BadSpec or null}`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: Failure,
    pub spec: Option<BadSpec>,
}

#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    body: Box<ErrorBody>,
}

impl ApiError {
    fn new(status: StatusCode, error: Failure) -> Self {
        Self { status, body: Box::new(ErrorBody { error, spec: None }) }
    }
    fn bad_spec(spec: BadSpec) -> Self {
        let message = match spec.faults.len() + spec.more {
            1 => format!("{} has a fault", spec.file),
            n => format!("{} has {n} faults", spec.file),
        };
        let error = Failure::refused("bad-spec", message, "correct the spec; nothing was recorded");
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, body: Box::new(ErrorBody { error, spec: Some(spec) }) }
    }
    fn missing(what: &str, id: &str, help: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Failure::refused("not-found", format!("there is no {what} {id}"), help))
    }
    fn bad(code: &str, message: impl Into<String>, help: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Failure::refused(code, message, help))
    }
}

impl From<Failure> for ApiError {
    fn from(error: Failure) -> Self {
        let status = match error.class {
            FailureClass::Refused => StatusCode::CONFLICT,
            FailureClass::Transient => StatusCode::SERVICE_UNAVAILABLE,
            FailureClass::Permanent => StatusCode::UNPROCESSABLE_ENTITY,
            FailureClass::Bug => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error)
    }
}

impl From<StoreError> for ApiError {
    fn from(e: StoreError) -> Self {
        tracing::error!(error = chain(&e), "the store failed a request");
        let help = "see the coordinator's log; is its disk full?";
        Failure::new(FailureClass::Transient, "store", chain(&e), help).into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

/// A JSON body that answers a malformed one with a failure, as every other error.
struct Body<T>(T);

impl<T: serde::de::DeserializeOwned, S: Send + Sync> axum::extract::FromRequest<S> for Body<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        Self::within(SLOW_BODY, request, state).await
    }
}

impl<T: serde::de::DeserializeOwned> Body<T> {
    async fn within<S: Send + Sync>(patience: Duration, request: Request, state: &S) -> Result<Self, ApiError> {
        let slow = |_| {
            let message = format!("the request was not complete within {} s", patience.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, Failure::refused("slow-request", message, "try again"))
        };
        match tokio::time::timeout(patience, Json::<T>::from_request(request, state)).await.map_err(slow)? {
            Ok(Json(value)) => Ok(Self(value)),
            Err(e) => Err(ApiError::new(
                e.status(),
                Failure::refused(
                    "bad-request",
                    e.body_text(),
                    "drumsctl and the coordinator may be of different versions",
                ),
            )),
        }
    }
}

pub fn router(context: Arc<Context>) -> Router {
    let v1 = Router::new()
        .route("/status", get(hosts::status))
        .route("/hosts", get(hosts::list).post(hosts::add))
        .route("/hosts/{host}/release", post(hosts::release))
        .route("/hosts/{host}/upgrade", post(hosts::upgrade))
        .route("/events", get(events::list))
        .route(
            "/workloads",
            get(experiments::workloads).post(experiments::add_workload).layer(DefaultBodyLimit::max(MAX_MANIFEST)),
        )
        .route(
            "/artifacts/{sha}",
            axum::routing::put(experiments::put_artifact)
                .head(experiments::has_artifact)
                .layer(DefaultBodyLimit::disable()),
        )
        .route("/plan", post(experiments::plan))
        .route("/registrations", get(experiments::registrations).post(experiments::register))
        .route("/registrations/{sha}", get(experiments::registration))
        .route("/access", get(access::list).post(access::add))
        .route("/access/revoke", post(access::revoke))
        .route("/runs", get(runs::list).post(runs::create))
        .route("/runs/{run}", get(runs::one))
        .route("/runs/{run}/cancel", post(runs::cancel))
        .route("/runs/{run}/events", get(runs::events))
        .route("/runs/{run}/meta", get(runs::meta))
        .route("/runs/{run}/evidence/{host}", get(runs::evidence));
    Router::new()
        .nest("/api/v1", v1)
        .fallback(|request: Request| async move {
            ApiError::missing(
                "route",
                request.uri().path(),
                "drumsctl and the coordinator may be of different versions",
            )
        })
        .layer(axum::middleware::from_fn_with_state(context.clone(), access::admit))
        .layer(axum::middleware::from_fn(log))
        .layer(DefaultBodyLimit::max(MAX_JSON))
        .with_state(context)
}

/// What a coordinator that stands by answers: who is active.
pub fn standby(active: tokio::sync::watch::Receiver<String>) -> Router {
    Router::new().fallback(move || async move {
        let message = format!("this coordinator stands by; {} is active", *active.borrow());
        let help = "ask the active one; this one takes over when that one is gone";
        ApiError::from(Failure::new(FailureClass::Transient, "standby", message, help))
    })
}

async fn log(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    tracing::debug!(method = %method, path, status = response.status().as_u16(), "api");
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_that_never_ends_is_given_up() {
        let pending = futures_util::stream::pending::<Result<bytes::Bytes, std::io::Error>>();
        let request = axum::http::Request::builder()
            .header("content-type", "application/json")
            .body(axum::body::Body::from_stream(pending))
            .unwrap();
        let read = Body::<serde_json::Value>::within(Duration::from_millis(10), request, &()).await;
        assert_eq!(read.err().map(|e| e.status), Some(StatusCode::REQUEST_TIMEOUT));
    }
}
