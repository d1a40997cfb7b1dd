//! Enrolment: a token's secret and a signing request in, a certificate out.
//!
//! The only endpoint without a client certificate, so everything is small, counted and over in seconds. Why a token is
//! not accepted is told to both sides.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use drums_common::{
    clock::Clock,
    digest::Sha256,
    failure::{Failure, FailureClass},
    telemetry::chain,
    token::SECRET_BYTES,
    wire::{
        close::Close,
        frame::Lane,
        latest::{EnrolReply, EnrolRequest},
        v1,
    },
};
use drums_identity::Certificates;
use quinn::{Connection, Incoming};
use tokio::time::timeout;

use super::{
    connection::internal,
    instance,
    io::{self, StreamError},
    ports::{Peer, Redemption, TokenRefusal, TokenStore},
};
use crate::pki::{Pki, SigningRequest};

/// Everything from the first packet to the reply.
const PATIENCE: Duration = Duration::from_secs(15);
const FAREWELL: Duration = Duration::from_secs(2);

pub(super) struct Context<T> {
    pub store: Arc<T>,
    pub pki: Arc<Pki>,
    /// AWS's, by region.
    pub certificates: Certificates,
    pub clock: Arc<dyn Clock>,
    pub build: Sha256,
}

#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the connection broke")]
    Broken(#[from] quinn::ConnectionError),
    #[error("the exchange broke")]
    Stream(#[from] StreamError),
    #[error("the peer closed its stream without asking for anything")]
    Nothing,
}

pub(super) async fn serve<T: TokenStore>(incoming: Incoming, context: Arc<Context<T>>) {
    let remote = incoming.remote_address();
    let exchange = async {
        let connection = incoming.accept()?.await?;
        let result = answer(&connection, remote, &context).await;
        let code = match &result {
            Ok(()) => Close::Goodbye,
            Err(End::Stream(e)) if e.peers_fault() => Close::BadPeer,
            Err(_) => Close::Internal,
        };
        connection.close(code.code().into(), code.words().as_bytes());
        result
    };
    match timeout(PATIENCE, exchange).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::warn!(%remote, error = %chain(&e), "enrolment failed"),
        Err(_) => tracing::warn!(%remote, "enrolment not finished in time"),
    }
}

async fn answer<T: TokenStore>(connection: &Connection, remote: SocketAddr, context: &Context<T>) -> Result<(), End> {
    let (mut send, mut recv) = connection.accept_bi().await?;
    let version = match io::shake_hands(&mut send, &mut recv, context.build).await {
        Ok(version) => version,
        Err(e) => {
            let _ = send.finish();
            let _ = timeout(FAREWELL, send.stopped()).await;
            return Err(e.into());
        }
    };
    let request = match version {
        1 => io::read::<v1::EnrolRequest>(&mut recv, Lane::Enrol).await?.map(EnrolRequest::from),
        _ => io::read::<EnrolRequest>(&mut recv, Lane::Enrol).await?,
    };
    let request = request.ok_or(End::Nothing)?;
    let host = request.host.clone();
    let reply = match enrol(request, remote, context).await {
        Ok((certificate_pem, peer)) => {
            tracing::info!(%remote, %host, installation = %peer.installation, certificate = %peer.certificate.short(), "host enrolled");
            EnrolReply::Enrolled { certificate_pem, ca_pem: context.pki.ca_pem().to_owned() }
        }
        Err(failure) => {
            tracing::warn!(%remote, %host, error = %failure, "enrolment refused");
            context.store.refused(remote.ip(), &host, &failure);
            EnrolReply::Refused(failure)
        }
    };
    io::write(&mut send, Lane::Enrol, &reply).await?;
    let _ = send.finish();
    // The agent closes once it has read the reply.
    let _ = timeout(FAREWELL, connection.closed()).await;
    Ok(())
}

async fn enrol<T: TokenStore>(
    request: EnrolRequest,
    from: SocketAddr,
    context: &Context<T>,
) -> Result<(String, Peer), Failure> {
    if request.secret.len() != SECRET_BYTES {
        let message = format!("the secret has {} bytes instead of {SECRET_BYTES}", request.secret.len());
        return Err(Failure::refused("token-malformed", message, "copy the token again, as one line"));
    }
    // Parsed before the token is used up: a malformed request must not cost the host its token.
    let signing = SigningRequest::parse(&request.csr_der)
        .map_err(|e| Failure::refused("bad-request", chain(&e), "use an agent of this release"))?;
    let now = context.clock.now();
    let host = request.host;
    let secret_sha256 = Sha256::of(&request.secret);
    // Looked at before the token is used up: whoever has stolen it must not be able to take it from its instance, neither by
    // enrolling nor by being refused.
    let document = request.instance.as_ref().map(|proof| Sha256::of(proof.document()));
    let bound = context.store.bound(secret_sha256, document).await.map_err(|e| refusal(&e, &host.to_string()))?;
    let shown = instance::judge(&context.certificates, &host, &bound, request.instance.as_ref())?;
    let redemption = Redemption {
        secret_sha256,
        host: host.clone(),
        installation: request.installation,
        key_sha256: signing.key_sha256,
        shown,
        from,
        now,
    };
    context.store.redeem(redemption).await.map_err(|e| refusal(&e, &host.to_string()))?;
    let issued = context
        .pki
        .issue_agent(&signing, &host, request.installation, now)
        .map_err(|e| internal(format!("the coordinator cannot issue a certificate: {}", chain(&e))))?;
    let peer = Peer { host: host.clone(), installation: request.installation, certificate: issued.sha256, from };
    context.store.enrolled(peer.clone(), issued.expires).await.map_err(|e| refusal(&e, &host.to_string()))?;
    Ok((issued.pem, peer))
}

fn refusal(refusal: &TokenRefusal, host: &str) -> Failure {
    let (class, code) = match refusal {
        TokenRefusal::Unknown => (FailureClass::Refused, "token-unknown"),
        TokenRefusal::Expired => (FailureClass::Refused, "token-expired"),
        TokenRefusal::Reused => (FailureClass::Refused, "token-used"),
        TokenRefusal::WrongHost(_) => (FailureClass::Refused, "token-wrong-host"),
        TokenRefusal::Released => (FailureClass::Refused, "host-released"),
        TokenRefusal::NotTheInstance(_) => (FailureClass::Refused, instance::OTHER),
        TokenRefusal::InstanceTaken(_) => (FailureClass::Refused, instance::USED),
        TokenRefusal::Store(_) => (FailureClass::Transient, "store"),
    };
    let help = match (class, code) {
        (FailureClass::Transient, _) => "try again".to_owned(),
        (_, instance::OTHER | instance::USED) => instance::STOLEN.to_owned(),
        _ => format!("make a new token with drumsctl host add {host}"),
    };
    Failure::new(class, code, format!("host {host} cannot be enrolled: {refusal}"), help)
}
