//! Enrolment: a token in, an identity on disk out.
//!
//! The key is made before the request and kept until an answer arrived: if the answer was lost, the same token with the
//! same key is accepted once more.

use std::{path::Path, sync::atomic::Ordering, time::Duration};

use drums_common::{
    digest::Sha256,
    failure::{Failure, FailureClass},
    telemetry::chain,
    token::{Address, Token},
    wire::{
        close::Close,
        frame::Lane,
        latest::{EnrolReply, EnrolRequest, InstanceProof},
        v1,
    },
};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::time::timeout;

use super::{
    identity::{self, Identity, IdentityError},
    io::{self, StreamError},
    tls::{self, DialError},
};

const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    #[error(
        "this agent is host {held} of another coordinator or under another name already; use another --state folder to be host {wanted}, or remove {} first",
        state
    )]
    OtherIdentity { held: String, wanted: String, state: String },
    #[error("the coordinator refused to enrol host {host}: {failure}")]
    Refused { host: String, failure: Failure },
    #[error("no coordinator could be reached to enrol host {host}: {}", tried.join("; "))]
    Unreachable { host: String, tried: Vec<String> },
    #[error("the coordinator's answer is not an identity for host {host}: {what}")]
    BadAnswer { host: String, what: String },
    #[error("cannot make a signing request")]
    Request(#[source] rcgen::Error),
    #[error("cannot keep the identity")]
    Identity(#[from] IdentityError),
    #[error("cannot dial")]
    Dial(#[from] DialError),
}

impl EnrolError {
    /// The same may succeed later: who starts agents starts this one again.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { failure, .. } => failure.class == FailureClass::Transient,
            _ => false,
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("{0}")]
    Broken(String),
    #[error("the exchange broke")]
    Stream(#[from] StreamError),
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Slow,
}

/// The identity in `state`, or a new one by the token. The token that made the identity is not needed again; another one
/// for the same host takes its place (the host was released and added again, or its coordinator has moved), and if it
/// cannot be used, what is held stays. A launched host has the proof of which instance it is with it.
pub async fn enrol(
    state: &Path,
    token: &Token,
    build: Sha256,
    proof: Option<InstanceProof>,
) -> Result<Identity, EnrolError> {
    let Some(held) = Identity::load(state)? else {
        let dir = identity::dir(state);
        identity::make_private_dir(&dir)?;
        let key = identity::pending_key(&dir.join("key.pem"))?;
        let (cert_pem, ca_pem) = ask(state, token, &key, build, proof).await?;
        accept(&dir, token, &key, &cert_pem, &ca_pem)?;
        let what = "it could not be read back".to_owned();
        return Identity::load(state)?.ok_or_else(|| EnrolError::BadAnswer { host: token.host.to_string(), what });
    };
    if held.host != token.host || held.ca_sha256() != token.ca {
        return Err(EnrolError::OtherIdentity {
            held: held.host.to_string(),
            wanted: token.host.to_string(),
            state: identity::dir(state).display().to_string(),
        });
    }
    if identity::made_by(&held.folder, token) {
        tracing::info!(host = %held.host, "enrolled already; the token is not needed");
        return Ok(held);
    }
    match again(state, &held, token, build, proof).await {
        Ok(renewed) => {
            tracing::info!(host = %held.host, "enrolled anew");
            Ok(renewed)
        }
        Err(e) => {
            tracing::warn!(host = %held.host, error = chain(&e), "the token was not used; going on with the identity that is held");
            // A unit gives the same file at each start: what was refused for good is not asked for again.
            if matches!(&e, EnrolError::Refused { .. }) && !e.is_passing() {
                identity::note_token(&held.folder, token)?;
            }
            Ok(held)
        }
    }
}

/// Enrols a host that has an identity, with a key of its own: what is held counts until the new one is whole.
async fn again(
    state: &Path,
    held: &Identity,
    token: &Token,
    build: Sha256,
    proof: Option<InstanceProof>,
) -> Result<Identity, EnrolError> {
    let bad = |what: String| EnrolError::BadAnswer { host: token.host.to_string(), what };
    let key = identity::pending_key(&held.folder.join(identity::NEXT_KEY))?;
    let (cert_pem, ca_pem) = ask(state, token, &key, build, proof).await?;
    let next = held.next(&cert_pem, &ca_pem)?.map_err(bad)?;
    identity::note_coordinator(&held.folder, token)?;
    next.keep()?;
    identity::note_token(&held.folder, token)?;
    Identity::load(state)?.ok_or_else(|| bad("it could not be read back".to_owned()))
}

/// The coordinator's answer to a request for this key: the certificate, and its CA's.
async fn ask(
    state: &Path,
    token: &Token,
    key: &KeyPair,
    build: Sha256,
    instance: Option<InstanceProof>,
) -> Result<(String, String), EnrolError> {
    let installation = identity::installation(state)?;
    let csr = CertificateParams::default().serialize_request(key).map_err(EnrolError::Request)?;
    let request = EnrolRequest {
        secret: token.secret.bytes().to_vec(),
        host: token.host.clone(),
        csr_der: csr.der().to_vec(),
        installation,
        instance,
    };
    let (config, foreign) = tls::pinned(token.ca)?;
    let host = token.host.to_string();
    let mut tried = Vec::new();
    for address in &token.addresses {
        match attempt(address, &config, &request, build).await {
            Ok(EnrolReply::Enrolled { certificate_pem, ca_pem }) => return Ok((certificate_pem, ca_pem)),
            Ok(EnrolReply::Refused(failure)) => return Err(EnrolError::Refused { host, failure }),
            Err(_) if foreign.swap(false, Ordering::AcqRel) => {
                let ca = token.ca.short();
                tried.push(format!("{address}: it does not show the CA {ca} that the token names: it is another coordinator, or its CA was replaced"));
            }
            Err(e) => tried.push(format!("{address}: {}", chain(&e))),
        }
    }
    Err(EnrolError::Unreachable { host, tried })
}

async fn attempt(
    address: &Address,
    config: &quinn::ClientConfig,
    request: &EnrolRequest,
    build: Sha256,
) -> Result<EnrolReply, AttemptError> {
    let (endpoint, connection) = tls::dial(&tls::Udp, &address.host, address.enrol, config).await?;
    let exchange = async {
        let (mut send, mut recv) = connection.open_bi().await.map_err(|e| AttemptError::Broken(tls::words(&e)))?;
        match io::shake_hands(&mut send, &mut recv, build).await? {
            1 => io::write(&mut send, Lane::Enrol, &v1::EnrolRequest::from(request.clone())).await?,
            _ => io::write(&mut send, Lane::Enrol, request).await?,
        }
        let _ = send.finish();
        io::read::<EnrolReply>(&mut recv, Lane::Enrol).await?.ok_or(AttemptError::Stream(StreamError::CutShort))
    };
    let reply = timeout(PATIENCE, exchange).await.map_err(|_| AttemptError::Slow)?;
    // A stream's error says less than what ended the connection.
    let reply = match (reply, connection.close_reason()) {
        (Err(AttemptError::Stream(_)), Some(reason)) => Err(AttemptError::Broken(tls::words(&reason))),
        (reply, _) => reply,
    };
    connection.close(Close::Goodbye.code().into(), b"");
    let _ = timeout(Duration::from_secs(1), endpoint.wait_idle()).await;
    reply
}

/// Checks an answer before it becomes our identity.
fn accept(dir: &Path, token: &Token, key: &KeyPair, cert_pem: &str, ca_pem: &str) -> Result<(), EnrolError> {
    let bad = |what: String| EnrolError::BadAnswer { host: token.host.to_string(), what };
    let ca = CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(|e| bad(format!("its CA: {e}")))?;
    if Sha256::of(&ca) != token.ca {
        return Err(bad("its CA is not the token's".to_owned()));
    }
    identity::leaf_for(cert_pem, key).map_err(bad)?;
    identity::note_coordinator(dir, token)?;
    identity::note_token(dir, token)?;
    identity::write(&dir.join("ca.pem"), ca_pem.as_bytes(), 0o644)?;
    identity::write(&dir.join("cert.pem"), cert_pem.as_bytes(), 0o644)?;
    Ok(())
}
