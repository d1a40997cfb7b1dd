//! The next certificate, asked for over the connection that the present one made.
//!
//! ```text
//! a third of its time is left ─▶ key made and kept ─▶ asked ─▶ signed ─▶ one file, written whole ─▶ the next dial shows it
//! ```
//! A connection outlives the certificate that made it, so nothing is dialled anew for this. The coordinator revokes the
//! old certificate when the new one is shown.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drums_common::{
    clock::Micros,
    failure::Failure,
    telemetry::chain,
    wire::latest::{EnrolReply, ToCoordinator},
};
use quinn::ClientConfig;
use rcgen::CertificateParams;

use super::{
    identity::{self, Identity, IdentityError},
    link::Shared,
    tls::{self, DialError},
};

/// The answer may be lost with its connection. The key stays the same until there is one.
const AGAIN: Duration = Duration::from_secs(3_600);
/// Timers count the time that the machine runs; the calendar is looked at once a day.
const LOOK: Duration = Duration::from_secs(86_400);

#[derive(Debug, thiserror::Error)]
pub(super) enum RenewError {
    #[error("cannot keep the next key or certificate")]
    Identity(#[from] IdentityError),
    #[error("cannot make a signing request")]
    Request(#[source] rcgen::Error),
    #[error("the coordinator refused to renew this agent's certificate: {0}")]
    Refused(Failure),
    #[error("the coordinator's answer is not this agent's next certificate: {0}")]
    BadAnswer(String),
    #[error("cannot dial with the new certificate")]
    Dial(#[from] DialError),
}

/// What this agent shows when it dials.
pub(super) struct Credentials {
    enrolled: Identity,
    shown: Mutex<Shown>,
}

struct Shown {
    config: ClientConfig,
    renew_at: Micros,
}

impl Credentials {
    pub fn new(identity: Identity) -> Result<Self, DialError> {
        let shown = Shown { config: tls::enrolled(&identity)?, renew_at: identity.renew_at };
        Ok(Self { enrolled: identity, shown: Mutex::new(shown) })
    }

    /// Host, installation and addresses, which stay what they are.
    pub fn identity(&self) -> &Identity {
        &self.enrolled
    }

    pub fn config(&self) -> ClientConfig {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).config.clone()
    }

    fn due_in(&self, now: Micros) -> Duration {
        let at = self.shown.lock().unwrap_or_else(PoisonError::into_inner).renew_at;
        Duration::from_millis(at.ms_since(now))
    }

    fn request(&self) -> Result<ToCoordinator, RenewError> {
        let key = identity::pending_key(&self.enrolled.folder.join(identity::NEXT_KEY))?;
        let csr = CertificateParams::default().serialize_request(&key).map_err(RenewError::Request)?;
        Ok(ToCoordinator::Renew { csr_der: csr.der().to_vec() })
    }

    /// Takes the answer to a request. What is not a certificate for the key that was asked for changes nothing.
    pub fn take(&self, reply: EnrolReply) -> Result<(), RenewError> {
        let (cert_pem, ca_pem) = match reply {
            EnrolReply::Enrolled { certificate_pem, ca_pem } => (certificate_pem, ca_pem),
            EnrolReply::Refused(failure) => return Err(RenewError::Refused(failure)),
        };
        let next = self.enrolled.next(&cert_pem, &ca_pem)?.map_err(RenewError::BadAnswer)?;
        // Made before it is kept: what cannot be dialled with must not be found at the next start.
        let shown = Shown { config: tls::enrolled(&next.identity)?, renew_at: next.identity.renew_at };
        next.keep()?;
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown;
        Ok(())
    }
}

/// Asks when it is time, and again until an answer came. A request is no part of a quiet interval: the outbox waits.
pub(super) async fn ask_in_time(credentials: Arc<Credentials>, shared: Arc<Shared>) -> Infallible {
    loop {
        let left = credentials.due_in(shared.clock.now());
        if !left.is_zero() {
            tokio::time::sleep(left.min(LOOK)).await;
            continue;
        }
        match credentials.request() {
            Ok(request) => shared.say(request),
            Err(e) => tracing::error!(error = chain(&e), "this agent's certificate cannot be renewed"),
        }
        tokio::time::sleep(AGAIN).await;
    }
}
