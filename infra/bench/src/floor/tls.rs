//! rustls in memory: what the coordinator's side of a mutual TLS 1.3 handshake costs with no network at all.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use drums_agent::net::Identity;
use drums_common::wire::SERVER_NAME;
use drums_coordinator::pki::Pki;
use nix::time::{ClockId, clock_gettime};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    server::{NoServerSessionStorage, WebPkiClientVerifier},
};

/// Nanoseconds of this thread's CPU time that the server's side of `n` handshakes took.
pub fn server_ns(pki: &Pki, identity: &Identity, n: usize) -> Result<u64> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = &[&rustls::version::TLS13];
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca_der().clone())?;
    let roots = Arc::new(roots);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let shown = pki.server()?;
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(shown.chain, shown.key)?;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .with_root_certificates(roots)
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())?;
    client.resumption = rustls::client::Resumption::disabled();
    let (server, client) = (Arc::new(server), Arc::new(client));
    let mut spent = 0;
    for _ in 0..n {
        let mut theirs = ClientConnection::new(client.clone(), SERVER_NAME.try_into()?)?;
        let began = thread_ns()?;
        let mut ours = ServerConnection::new(server.clone())?;
        spent += thread_ns()? - began;
        while ours.is_handshaking() || theirs.is_handshaking() {
            let mut wire = Vec::new();
            while theirs.wants_write() {
                theirs.write_tls(&mut wire)?;
            }
            let began = thread_ns()?;
            let mut answer = Vec::new();
            let mut rest = wire.as_slice();
            while !rest.is_empty() {
                ours.read_tls(&mut rest)?;
                ours.process_new_packets().context("the server's side of the handshake")?;
            }
            while ours.wants_write() {
                ours.write_tls(&mut answer)?;
            }
            spent += thread_ns()? - began;
            let mut rest = answer.as_slice();
            while !rest.is_empty() {
                theirs.read_tls(&mut rest)?;
                theirs.process_new_packets().context("the client's side of the handshake")?;
            }
        }
    }
    Ok(spent)
}

fn thread_ns() -> Result<u64> {
    let t = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("this thread's CPU clock cannot be read")?;
    Ok(u64::try_from(t.tv_sec()).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec()).unwrap_or(0))
}
