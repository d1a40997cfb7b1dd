//! A host's next certificate, over the connection that its present one made: no token is needed for who it is already.

use drums_common::{failure::Failure, telemetry::chain, wire::latest::EnrolReply};

use super::{
    connection::{Context, internal},
    ports::{Peer, Ports},
};
use crate::pki::SigningRequest;

/// A certificate lives for two years, and an agent that got no answer asks again after an hour.
pub(super) const APART_MS: u64 = 600_000;

pub(super) async fn answer<P: Ports>(peer: &Peer, csr_der: &[u8], context: &Context<P>) -> EnrolReply {
    match renew(peer, csr_der, context).await {
        Ok(certificate_pem) => EnrolReply::Enrolled { certificate_pem, ca_pem: context.pki.ca_pem().to_owned() },
        Err(failure) => {
            tracing::warn!(host = %peer.host, error = %failure, "certificate not renewed");
            EnrolReply::Refused(failure)
        }
    }
}

async fn renew<P: Ports>(peer: &Peer, csr_der: &[u8], context: &Context<P>) -> Result<String, Failure> {
    let request = SigningRequest::parse(csr_der)
        .map_err(|e| Failure::refused("bad-request", chain(&e), "use an agent of this release"))?;
    let issued = context
        .pki
        .issue_agent(&request, &peer.host, peer.installation, context.clock.now())
        .map_err(|e| internal(format!("the coordinator cannot issue a certificate: {}", chain(&e))))?;
    context.ports.renewed(peer, issued.sha256, issued.expires).await?;
    tracing::info!(host = %peer.host, certificate = %issued.sha256.short(), "certificate renewed");
    Ok(issued.pem)
}
