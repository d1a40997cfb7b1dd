//! What the network asks of the rest of the coordinator. Parsed, bounded, authenticated messages leave `net` through
//! these traits and nowhere else.
//!
//! Implementors must be safe to repeat: an agent re-sends whatever it has no answer for. Every call may come from many
//! connections at once; per host, calls come from one connection at a time.

use std::{
    future::Future,
    net::{IpAddr, SocketAddr},
};

use drums_common::{
    clock::{Micros, MonoMicros},
    digest::Sha256,
    failure::Failure,
    ids::{HostId, InstallationId, RunId},
    machine::{HostFacts, MachineIdentity},
    wire::latest::{AgentHello, Beat, BeatAck, Desired, EvidenceAck, EvidenceBatch, Upgrade, Uploads, Welcome},
};
use drums_identity::Expected;
use drums_provider::{
    token::ClientToken,
    words::{ImageId, InstanceId, InstanceType, Region},
};
use tokio::sync::watch;

use crate::artifacts::Content;

/// Who speaks, as its certificate says. Never taken from a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub host: HostId,
    pub installation: InstallationId,
    /// SHA-256 of the certificate's DER.
    pub certificate: Sha256,
    /// Where it spoke from when it connected: for the audit trail, never for a decision.
    pub from: SocketAddr,
}

/// What a host is to do, level-triggered: only the last value counts.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    Desired(Desired),
    /// No run, and another build of the agent in the place of the one that runs.
    Upgrade(Upgrade),
    /// The host was released or its certificate revoked: it exits and does not come back.
    Retire {
        reason: String,
    },
}

/// An accepted connection of a host.
#[derive(Debug)]
pub struct Accepted {
    pub welcome: Welcome,
    /// The present order at once, and every later one. The connection ends when the sender is dropped.
    pub orders: watch::Receiver<Order>,
}

/// The agents' endpoint.
pub trait Ports: Send + Sync + 'static {
    /// The machine that this host ran on when it was last welcomed, or `None` if it never was or was enrolled anew since.
    /// A connection from another one is refused by `net` while the host has one, and so is any while the answer is a
    /// failure; a machine that comes alone is judged by `on_connect`.
    fn machine_of(&self, host: &HostId) -> impl Future<Output = Result<Option<MachineIdentity>, Failure>> + Send;

    /// A host says hello. Store its facts, hand out the generation; or refuse (released host, revoked certificate),
    /// in words for the agent's operator. A refused agent exits if the failure's class is `Refused` or `Permanent`, and
    /// tries again if it is `Transient`.
    fn on_connect(&self, peer: &Peer, hello: AgentHello) -> impl Future<Output = Result<Accepted, Failure>> + Send;

    /// Fresh facts after a preflight.
    fn facts(&self, peer: &Peer, facts: HostFacts) -> impl Future<Output = ()> + Send;

    /// The host's next certificate was issued. Recorded before the agent gets it.
    fn renewed(
        &self,
        peer: &Peer,
        certificate: Sha256,
        expires: Micros,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The build that was ordered did not take over.
    fn upgrade_failed(&self, peer: &Peer, upgrade: Upgrade, failure: Failure) -> impl Future<Output = ()> + Send;

    /// The agent cannot meet a run's demand. The run ends by evidence; this is for people.
    fn demand_refused(&self, peer: &Peer, run: RunId, failure: Failure) -> impl Future<Output = ()> + Send;

    /// Commits a batch and only then returns the cumulative acknowledgement. Idempotent on (run, host, seq). Records that
    /// do not follow what is committed are not stored: the answer then names what is committed, and the agent goes back
    /// to there. `net` has checked that every record names this run and this host. A failure is told to nobody but the
    /// log; the stream ends and the agent sends again.
    fn commit_evidence(
        &self,
        peer: &Peer,
        batch: EvidenceBatch,
    ) -> impl Future<Output = Result<EvidenceAck, Failure>> + Send;

    /// A beat, with the coordinator's CLOCK_BOOTTIME on arrival. Never blocks. `None` (old generation) is not answered.
    fn beat(&self, peer: &Peer, beat: &Beat, received: MonoMicros) -> Option<BeatAck>;

    /// The host's connection ended. `reason` is for people. Not called for a connection that another one of the same
    /// agent replaced.
    fn disconnected(&self, peer: &Peer, reason: &str);

    /// An artifact from a byte on, complete and verified when it was stored. Agents fetch a workload as its manifest
    /// (canonical JSON, whose SHA-256 is the workload's digest) and then each file by its own digest.
    fn artifact(&self, sha256: Sha256, offset: u64) -> impl Future<Output = Result<Content, Failure>> + Send;

    /// There is a bucket for evidence.
    fn has_bucket(&self) -> bool {
        false
    }

    /// Where in the bucket this host may put sealed evidence of these runs while the coordinator is away.
    fn uploads(&self, _peer: &Peer, _runs: &[RunId]) -> impl Future<Output = Result<Uploads, Failure>> + Send {
        std::future::ready(Ok(Uploads::default()))
    }

    /// Something that an operator should know of: a second machine with an enrolled identity, a foreign certificate.
    /// `host` is `None` if the peer could not prove to be one. Strangers cause these: implementors bound what they keep.
    fn report(&self, from: IpAddr, host: Option<&HostId>, failure: &Failure);
}

/// What may be wrong with a secret. Both sides get to know which.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    #[error("the token's secret is not known here")]
    Unknown,
    #[error("the token expired")]
    Expired,
    #[error("the token has been used already")]
    Reused,
    #[error("the token is for host {0}")]
    WrongHost(HostId),
    #[error("the host was released")]
    Released,
    #[error("the token is of the launch {0}, and who shows it has not proved to be the instance that was launched")]
    NotTheInstance(ClientToken),
    #[error("the instance that was launched is host {0} already")]
    InstanceTaken(HostId),
    /// The store could not answer: the agent tries again.
    #[error("the store failed: {0}")]
    Store(String),
}

/// What a launch made, or is to make: who shows its token must be that instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Of the attempt, known before there is an instance.
    pub launch: ClientToken,
    /// 12 digits.
    pub account: String,
    pub region: Region,
    pub image: ImageId,
    pub kind: InstanceType,
    /// `None` until the launch was read back.
    pub instance: Option<Started>,
}

/// An instance as EC2 shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    pub id: InstanceId,
    /// EC2's launch time.
    pub at: Micros,
}

impl Launched {
    /// What the instance's document must say; `None` while it is not known which instance it is.
    pub fn expected(&self) -> Option<Expected> {
        self.instance.as_ref().map(|started| Expected {
            account: self.account.clone(),
            region: self.region.clone(),
            instance: started.id.clone(),
            image: self.image.clone(),
            kind: self.kind.clone(),
            launched: started.at,
        })
    }
}

/// What is known of a token, and of the document that is shown with it, before it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// The launch that the token is of; `None` for a host that was added by hand.
    pub to: Option<Launched>,
    /// Who proved with this document which instance it is, earlier.
    pub shown_by: Option<HostId>,
}

/// Which instance a host is, as far as that was looked into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// It shows no document, and none is demanded.
    Nothing,
    /// What it says of itself, which nobody checked: for the audit trail.
    Claimed(String),
    /// AWS's signature says that it is the instance of this launch.
    Proven(Proven),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proven {
    pub launch: ClientToken,
    pub instance: InstanceId,
    pub document_sha256: Sha256,
}

impl Proven {
    pub fn is_of(&self, launched: &Launched) -> bool {
        self.launch == launched.launch && launched.instance.as_ref().is_some_and(|i| i.id == self.instance)
    }
}

/// One attempt to use a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redemption {
    /// The store never sees the secret itself.
    pub secret_sha256: Sha256,
    pub host: HostId,
    pub installation: InstallationId,
    /// SHA-256 of the public key in the signing request (SubjectPublicKeyInfo, DER).
    pub key_sha256: Sha256,
    pub shown: Shown,
    pub from: SocketAddr,
    pub now: Micros,
}

/// Where tokens are kept, by the SHA-256 of their secrets.
pub trait TokenStore: Send + Sync + 'static {
    /// What a token that may be unknown is bound to, and who has shown this document before.
    fn bound(
        &self,
        secret_sha256: Sha256,
        document_sha256: Option<Sha256>,
    ) -> impl Future<Output = Result<Bound, TokenRefusal>> + Send;

    /// Uses up a token, in one transaction. A second call with the same secret *and* the same key is answered `Ok` until
    /// the token expires (the reply to the first may have been lost); with another key it is `Reused`. One that is bound to
    /// a launch is used by the instance of that launch or not at all, and an instance is one host.
    fn redeem(&self, redemption: Redemption) -> impl Future<Output = Result<(), TokenRefusal>> + Send;

    /// A certificate was issued. Recorded before the agent gets it.
    fn enrolled(&self, peer: Peer, expires: Micros) -> impl Future<Output = Result<(), TokenRefusal>> + Send;

    /// An enrolment was refused: for the audit trail, bounded as [`Ports::report`].
    fn refused(&self, from: IpAddr, host: &HostId, failure: &Failure);
}
