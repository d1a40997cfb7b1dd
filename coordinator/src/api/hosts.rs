//! Status, hosts, tokens.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
};
use drums_common::{
    failure::Failure,
    ids::HostId,
    lease::Health,
    token::{Address, Secret, Token, is_host},
    wire::latest::{Activity, Upgrade},
};

use super::{
    ApiError, Body, Operator, Shared,
    experiments::artifact_error,
    views::{AddHost, FleetView, HostView, StatusView, TokenView, UpgradeHost, utc},
};
use crate::{
    store::{Ownership, StoreError},
    tasks,
};

/// A token is for now: an hour is enough to log in to a machine and start its agent; a week is the most one may ask.
const MAX_TOKEN_MINUTES: u64 = 7 * 24 * 60;
const KINDS: [&str; 4] = ["sandbox", "ec2", "metal", "mac"];

pub(super) async fn status(State(c): Shared) -> Json<StatusView> {
    Json(StatusView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: c.build,
        home: c.home.clone(),
        installation: c.control.installation,
        ca: c.enrolment.ca,
        up_since: utc(c.control.up_since),
        now: utc(c.control.now()),
    })
}

pub(super) async fn list(State(c): Shared) -> Result<Json<FleetView>, ApiError> {
    let hosts = c.control.host_views().await?;
    Ok(Json(FleetView { hosts: hosts.into_iter().map(view).collect() }))
}

pub(super) fn activity(activity: &Activity) -> String {
    match activity {
        Activity::Idle => "idle".to_owned(),
        Activity::Preparing { run } => format!("preparing {run}"),
        Activity::Building { run, arm } => format!("building {arm}'s template for {run}"),
        Activity::Measuring { run, block, arm } => format!("{run} block {block}: {arm}"),
        Activity::Unwinding { run } => format!("unwinding {run}"),
    }
}

fn view(h: tasks::HostView) -> HostView {
    let state = match (&h.row.released, h.connected, &h.health) {
        (Some(_), _, _) => "released",
        (None, _, Some(Health::Lost { .. })) => "lost",
        (None, true, Some(Health::Silent { .. } | Health::QuietOverrun { .. })) => "silent",
        (None, true, Some(Health::Stuck { .. })) => "stuck",
        (None, true, _) => "connected",
        (None, false, _) if h.row.welcomed.is_some() => "disconnected",
        (None, false, _) if h.row.installation.is_some() => "enrolled",
        (None, false, _) => "new",
    };
    let activity = match (&h.lease, h.connected) {
        (Some(lease), true) => activity(&lease.activity),
        _ => String::new(),
    };
    HostView {
        name: h.row.host,
        kind: h.row.kind,
        ownership: match h.row.ownership {
            Ownership::Adopted => "adopted".to_owned(),
            Ownership::Owned => "owned".to_owned(),
        },
        state: state.to_owned(),
        heartbeat_ms: h.heard_ms,
        activity,
        life_left_ms: h.life_left_ms,
        generation: h.row.generation.0,
        cost: None,
        version: h.row.agent_version,
        agent_sha256: h.row.agent_sha256,
        upgrade: h.row.upgrade.map(|u| u.sha256),
        machine: h.row.facts.as_ref().map(|f| f.identity.key()),
        added: utc(h.row.added),
        released: h.row.released.map(utc),
        welcomed: h.row.welcomed.map(utc),
        facts: h.row.facts,
    }
}

pub(super) async fn add(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<AddHost>,
) -> Result<(StatusCode, Json<TokenView>), ApiError> {
    if !KINDS.contains(&body.kind.as_str()) {
        let message = format!("{:?} is not a kind of host", body.kind);
        return Err(ApiError::bad("bad-kind", message, "expected sandbox, ec2, metal or mac"));
    }
    if body.valid_minutes == 0 || body.valid_minutes > MAX_TOKEN_MINUTES {
        let message = format!("a token cannot be valid for {} minutes", body.valid_minutes);
        return Err(ApiError::bad("bad-validity", message, "expected 1 to 10080 minutes (a week)"));
    }
    let names = if body.addresses.is_empty() { c.enrolment.addresses.clone() } else { body.addresses };
    if names.is_empty() || names.len() > 8 {
        let message = format!("a token names 1 to 8 addresses of the coordinator, not {}", names.len());
        return Err(ApiError::bad("bad-address", message, "give --address, or advertise in coordinator.toml"));
    }
    if let Some(bad) = names.iter().find(|a| !is_host(a)) {
        let message = format!("{bad:?} is neither an IP address nor a DNS name");
        return Err(ApiError::bad(
            "bad-address",
            message,
            "give the address at which the host reaches this coordinator",
        ));
    }
    let addresses: Vec<Address> = names
        .into_iter()
        .map(|host| Address { host, agents: c.enrolment.agents_port, enrol: c.enrolment.enrol_port })
        .collect();
    let now = c.control.now();
    let secret = Secret::new(rand::random());
    let expires = now.plus_ms(body.valid_minutes * 60_000);
    let token = Token { addresses: addresses.clone(), ca: c.enrolment.ca, host: body.name.clone(), secret, expires };
    let (host, kind, sha) = (body.name.clone(), body.kind.clone(), token.secret.sha256());
    let added = c.control.audit_row(&by, "host-add").host(&body.name).detail(&body.kind);
    let invited = c.control.audit_row(&by, "token-add").host(&body.name).detail(&format!("until {}", utc(expires)));
    c.control
        .store
        .call(move |s| {
            match s.add_host(&host, &kind, Ownership::Adopted, &added) {
                // A further token for a host that never enrolled, or whose machine was set up anew.
                Err(StoreError::HostExists(_)) => {}
                other => other?,
            }
            s.add_token(sha, &host, expires, &invited)
        })
        .await?;
    let view = TokenView { token: token.reveal(), host: body.name, addresses, expires: utc(expires) };
    Ok((StatusCode::CREATED, Json(view)))
}

pub(super) async fn upgrade(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Path(host): Path<String>,
    Body(body): Body<UpgradeHost>,
) -> Result<Json<UpgradeHost>, ApiError> {
    let host = name(&host)?;
    let upgrade = match body.sha256 {
        None => None,
        Some(sha256) => {
            let content = c.control.artifacts.read(sha256, 0).await.map_err(artifact_error)?;
            let missing = || {
                let message = format!("artifact {} is not in this home", sha256.short());
                ApiError::bad("missing-artifact", message, "drumsctl host upgrade uploads the build first")
            };
            let bytes = content.ok_or_else(missing)?.total_bytes;
            Some(Upgrade { sha256, bytes, ordered: c.control.now() })
        }
    };
    c.control.order_upgrade(&host, upgrade, &by).await?;
    Ok(Json(body))
}

fn name(host: &str) -> Result<HostId, Failure> {
    host.parse().map_err(|e| Failure::refused("bad-host", format!("{e}"), "drumsctl fleet lists them"))
}

pub(super) async fn release(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Path(host): Path<String>,
) -> Result<Json<FleetView>, ApiError> {
    c.control.release(name(&host)?, by).await?;
    list(State(c)).await
}
