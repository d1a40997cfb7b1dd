//! Who may ask for what: certificates of people, their roles, and the check that every request passes.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Request, State},
    http::{Method, StatusCode},
    middleware::Next,
    response::Response,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use drums_common::{
    failure::{Failure, FailureClass},
    telemetry::chain,
};
use tokio::sync::watch;

use super::{
    ApiError, Body, Caller, Context, Operator, Shared,
    views::{AccessView, AddAccess, IssuedView, PersonView, RevokeAccess, RevokedView, utc},
};
use crate::{
    pki::{Role, ServerCertificate, SigningRequest},
    store::{PersonRow, Who},
};

/// Requests of POST that change nothing.
const DRY: [&str; 1] = ["/api/v1/plan"];

/// What a request takes.
fn needed(method: &Method, path: &str) -> Role {
    let looks = matches!(*method, Method::GET | Method::HEAD) || DRY.contains(&path);
    if looks { Role::Viewer } else { Role::Operator }
}

/// Lets a request through, or says why not. A certificate is looked up with every request, so that one that was revoked
/// is of no use from then on, also over a connection that was open.
pub(super) async fn admit(State(c): Shared, mut request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        // No server of ours puts nobody into a request.
        return Err(denied("unknown-caller", "nobody is known to ask".to_owned(), "report it"));
    };
    if let Some(certificate) = caller.certificate {
        let found = c.control.store.call(move |s| s.person(certificate)).await?;
        let why = match found {
            None => Some("it was not issued by this coordinator"),
            Some(row) if row.revoked.is_some() => Some("it was revoked"),
            Some(row) if row.expires <= c.control.now() => Some("it has expired"),
            Some(_) => None,
        };
        if let Some(why) = why {
            let message = format!("the certificate of {} is not accepted: {why}", caller.name);
            return Err(denied("certificate-refused", message, "an operator issues a new one: drumsctl access add"));
        }
    }
    let needed = needed(request.method(), request.uri().path());
    if needed == Role::Operator && caller.role != Role::Operator {
        let message = format!("{} is a {}, and this takes an operator", caller.name, caller.role);
        return Err(denied("role", message, "ask an operator, or for an operator's certificate: drumsctl access add"));
    }
    request.extensions_mut().insert(Operator(Who::new(caller.name, caller.from)));
    Ok(next.run(request).await)
}

fn denied(code: &str, message: String, help: &str) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, Failure::refused(code, message, help))
}

pub(super) async fn list(State(c): Shared) -> Result<Json<AccessView>, ApiError> {
    let rows = c.control.store.call(|s| s.people()).await?;
    Ok(Json(AccessView { people: rows.into_iter().map(view).collect() }))
}

fn view(row: PersonRow) -> PersonView {
    PersonView {
        name: row.name,
        role: row.role,
        certificate: row.certificate,
        issued: utc(row.issued),
        expires: utc(row.expires),
        revoked: row.revoked.map(utc),
    }
}

/// A name is a word: it is in a certificate and in the audit trail.
fn is_name(name: &str) -> bool {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'@');
    (1..=64).contains(&name.len()) && name.bytes().all(fine)
}

pub(super) async fn add(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<AddAccess>,
) -> Result<(StatusCode, Json<IssuedView>), ApiError> {
    if !is_name(&body.name) {
        let message = format!("{:?} is no name for a person", body.name);
        return Err(ApiError::bad("bad-name", message, "1 to 64 letters, digits and . _ - @"));
    }
    let der = STANDARD.decode(&body.signing_request).map_err(|e| {
        ApiError::bad(
            "bad-request",
            format!("the signing request is not base64: {e}"),
            "use a drumsctl of this release",
        )
    })?;
    let request = SigningRequest::parse(&der)
        .map_err(|e| ApiError::bad("bad-request", chain(&e), "use a drumsctl of this release"))?;
    let now = c.control.now();
    let issued = c
        .pki
        .issue_person(&request, &body.name, body.role, now)
        .map_err(|e| Failure::new(FailureClass::Transient, "pki", chain(&e), "see the coordinator's log"))?;
    let row = PersonRow {
        certificate: issued.sha256,
        name: body.name,
        role: body.role,
        issued: now,
        expires: issued.expires,
        revoked: None,
    };
    let detail = format!("{} {}, certificate {}", row.role, row.name, row.certificate.short());
    let audit = c.control.audit_row(&by, "access-add").detail(&detail);
    let (stored, replace) = (row.clone(), body.replace);
    // Recorded before anybody has it.
    let replaced = c.control.store.call(move |s| s.add_person(&stored, replace, &audit)).await?;
    let view =
        IssuedView { certificate_pem: issued.pem, ca_pem: c.pki.ca_pem().to_owned(), person: view(row), replaced };
    Ok((StatusCode::CREATED, Json(view)))
}

pub(super) async fn revoke(
    State(c): Shared,
    Extension(Operator(by)): Extension<Operator>,
    Body(body): Body<RevokeAccess>,
) -> Result<Json<RevokedView>, ApiError> {
    let RevokeAccess { who } = body;
    let audit = c.control.audit_row(&by, "access-revoke").detail(&who);
    let named = who.clone();
    let revoked = c.control.store.call(move |s| s.revoke_people(&named, &audit)).await?;
    if revoked == 0 {
        return Err(ApiError::missing("valid certificate of", &who, "drumsctl access list shows them"));
    }
    Ok(Json(RevokedView { revoked }))
}

/// The operator who made the home is a person like others: also this certificate can be revoked.
pub async fn register_first(context: &Arc<Context>) -> Result<(), crate::store::StoreError> {
    let (certificate, expires) = match context.pki.first_operator() {
        Ok(found) => found,
        Err(e) => {
            tracing::error!(error = chain(&e), "the home's own operator has no access over HTTPS");
            return Ok(());
        }
    };
    let row = PersonRow {
        certificate,
        name: "operator".to_owned(),
        role: Role::Operator,
        issued: context.control.now(),
        expires,
        revoked: None,
    };
    let audit = context.control.audit_row(&Who::coordinator(), "access-add").detail("the operator who made this home");
    context
        .control
        .store
        .call(move |s| if s.person(certificate)?.is_some() { Ok(0) } else { s.add_person(&row, false, &audit) })
        .await
        .map(|_| ())
}

/// Writes down each server certificate that comes into use. Rotations are made in the home's files, which may be while no
/// coordinator has the store; here it is known that one counts.
pub async fn audit_rotations(context: Arc<Context>, mut down: watch::Receiver<bool>) {
    let mut shown = context.pki.shown().changes();
    loop {
        // Cancel-safe: a change stays one until it is seen.
        tokio::select! {
            Ok(()) = shown.changed() => {}
            _ = down.wait_for(|d| *d) => return,
        }
        let ServerCertificate { sha256, expires } = *shown.borrow_and_update();
        let row = context.control.audit_row(&Who::coordinator(), "access-rotate-server");
        let row = row.detail(&format!("certificate {} until {}", sha256.short(), utc(expires)));
        if let Err(e) = context.control.store.call(move |s| s.add_audit(&row)).await {
            tracing::error!(error = chain(&e), "the audit trail was not written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changes_nothing_is_for_viewers() {
        for (method, path, role) in [
            (Method::GET, "/api/v1/runs", Role::Viewer),
            (Method::HEAD, "/api/v1/artifacts/x", Role::Viewer),
            (Method::POST, "/api/v1/plan", Role::Viewer),
            (Method::POST, "/api/v1/plan/", Role::Operator),
            (Method::POST, "/api/v1/runs", Role::Operator),
            (Method::POST, "/api/v1/hosts", Role::Operator),
            (Method::POST, "/api/v1/hosts/h1/upgrade", Role::Operator),
            (Method::PUT, "/api/v1/artifacts/x", Role::Operator),
            (Method::POST, "/api/v1/access/revoke", Role::Operator),
            (Method::DELETE, "/api/v1/runs", Role::Operator),
            (Method::OPTIONS, "/api/v1/runs", Role::Operator),
        ] {
            assert_eq!(needed(&method, path), role, "{method} {path}");
        }
    }

    #[test]
    fn names_are_words() {
        for (name, fine) in [("ada", true), ("a.b@c-d_1", true), ("", false), ("a b", false), ("a:b", false)] {
            assert_eq!(is_name(name), fine, "{name:?}");
        }
        assert!(!is_name(&"x".repeat(65)));
    }
    use std::path::Path;

    use drums_common::{clock::Clock as _, digest::Sha256, lease::LeaseTimes};
    use rcgen::{CertificateParams, KeyPair};

    use crate::{
        api::{self, views::*},
        artifacts::Artifacts,
        clock::SystemClock,
        config::Home,
        ctl::{ApiAddress, Client, CtlError, Global},
        pki::Pki,
        store::{SqliteStore, StoreHandle},
        tasks::Control,
    };

    /// A key and a request to have it certified.
    fn key() -> (KeyPair, Vec<u8>) {
        let key = KeyPair::generate().unwrap();
        let request = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
        (key, request)
    }

    fn keep(dir: &Path, certificate: &str, key: &KeyPair, ca: &str) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("cert"), certificate).unwrap();
        std::fs::write(dir.join("key"), key.serialize_pem()).unwrap();
        std::fs::write(dir.join("ca"), ca).unwrap();
    }

    async fn look(client: &Client) -> Result<(), CtlError> {
        client.get::<RunsView>("/runs").await.map(|_| ())
    }

    async fn change(client: &Client, host: &str) -> Result<(), CtlError> {
        let body = AddHost {
            name: host.parse().unwrap(),
            kind: "metal".into(),
            addresses: vec!["c.example".into()],
            valid_minutes: 5,
        };
        client.post::<_, TokenView>("/hosts", &body).await.map(|_| ())
    }

    fn code(answer: Result<(), CtlError>) -> String {
        match answer {
            Ok(()) => "done".to_owned(),
            Err(CtlError::Refused(failure)) => failure.code,
            Err(CtlError::Unreachable { .. }) => "unreachable".to_owned(),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_call_takes_a_certificate_that_counts_and_a_role() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let pki = Arc::new(Pki::open_or_create(&home.pki(), SystemClock.now()).unwrap().0);
        let (down, is_down) = tokio::sync::watch::channel(false);
        let store = StoreHandle::start(Box::new(SqliteStore::open(&home.store()).unwrap())).unwrap();
        let artifacts = Artifacts::new(home.artifacts());
        let (control, driver) =
            Control::start(store, artifacts, Arc::new(SystemClock), LeaseTimes::default(), None, is_down.clone())
                .await
                .unwrap();
        let sha = Sha256::of(b"-");
        let enrolment = api::Enrolment { ca: sha, addresses: vec![], agents_port: 1, enrol_port: 2 };
        let context = Arc::new(Context { control, enrolment, home: String::new(), build: sha, pki: pki.clone() });
        register_first(&context).await.unwrap();
        // A second start finds it registered.
        register_first(&context).await.unwrap();
        let router = api::router(context);
        let any = "127.0.0.1:0".parse().unwrap();
        let (https, at) = api::serve_https(any, &pki, router.clone(), is_down.clone()).await.unwrap();
        let unix = api::serve_unix(&home.socket(), router, is_down).unwrap();

        let global = Global { home: dir.path().into(), api: None, cert: None, key: None, ca: None, json: false };
        let local = Client::new(&global);
        let api: ApiAddress = format!("https://localhost:{}", at.port()).parse().unwrap();
        let over_https = |folder: &Path| {
            Client::new(&Global {
                api: Some(api.clone()),
                cert: Some(folder.join("cert")),
                key: Some(folder.join("key")),
                ca: Some(folder.join("ca")),
                ..global.clone()
            })
        };
        let operator = Client::new(&Global { api: Some(api.clone()), ..global.clone() });
        assert_eq!(code(change(&local, "h1").await), "done");
        assert_eq!(code(change(&operator, "h2").await), "done");

        // A viewer looks and changes nothing.
        let (key_of_ada, request) = key();
        let ask = |name: &str, replace| AddAccess {
            name: name.to_owned(),
            role: Role::Viewer,
            signing_request: STANDARD.encode(&request),
            replace,
        };
        let issued: IssuedView = operator.post("/access", &ask("ada", false)).await.unwrap();
        let folder = dir.path().join("ada");
        keep(&folder, &issued.certificate_pem, &key_of_ada, &issued.ca_pem);
        let ada = over_https(&folder);
        assert_eq!(code(look(&ada).await), "done");
        assert_eq!(code(change(&ada, "h3").await), "role");
        let more = ada.post::<_, IssuedView>("/access", &ask("eve", false)).await;
        assert_eq!(code(more.map(|_| ())), "role");

        // Revoked: of no use from then on.
        let done: RevokedView = local.post("/access/revoke", &RevokeAccess { who: "ada".into() }).await.unwrap();
        assert_eq!(done.revoked, 1);
        assert_eq!(code(look(&ada).await), "certificate-refused");
        let again = local.post::<_, RevokedView>("/access/revoke", &RevokeAccess { who: "ada".into() }).await;
        assert_eq!(code(again.map(|_| ())), "not-found");

        // Of this CA, but recorded by nobody.
        let (key_of_eve, request) = key();
        let request = SigningRequest::parse(&request).unwrap();
        let issued = pki.issue_person(&request, "eve", Role::Operator, SystemClock.now()).unwrap();
        let folder = dir.path().join("eve");
        keep(&folder, &issued.pem, &key_of_eve, pki.ca_pem());
        assert_eq!(code(look(&over_https(&folder)).await), "certificate-refused");

        // An agent's certificate opens no connection.
        let (host, installation) = ("h1".parse().unwrap(), drums_common::ids::InstallationId([1, 2, 3, 4]));
        let issued = pki.issue_agent(&request, &host, installation, SystemClock.now()).unwrap();
        keep(&folder, &issued.pem, &key_of_eve, pki.ca_pem());
        assert_eq!(code(look(&over_https(&folder)).await), "unreachable");

        // The first operator is one like others.
        let done: RevokedView = local.post("/access/revoke", &RevokeAccess { who: "operator".into() }).await.unwrap();
        assert_eq!(done.revoked, 1);
        assert_eq!(code(look(&operator).await), "certificate-refused");
        assert_eq!(code(look(&local).await), "done");

        down.send_replace(true);
        https.await.unwrap();
        unix.await.unwrap();
        driver.await.unwrap();
    }
}
