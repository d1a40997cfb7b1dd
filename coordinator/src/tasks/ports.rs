//! What the network asks of us. No policy: rows, leases and wake-ups.

use std::{
    net::IpAddr,
    sync::{PoisonError, atomic::Ordering::SeqCst},
};

use drums_common::{
    clock::{Micros, MonoMicros},
    digest::Sha256,
    failure::{Failure, FailureClass},
    ids::{HostId, RunId},
    machine::{HostFacts, MachineIdentity},
    telemetry::chain,
    wire::latest::{AgentHello, Beat, BeatAck, EvidenceAck, EvidenceBatch, Upgrade, Uploads, Welcome},
};

use super::{Control, REFUSED_EVIDENCE, requests::Request};
use crate::{
    artifacts::{ArtifactError, Content},
    core::run::Observed,
    net::{
        SECOND_MACHINE, may_be_rebooted,
        ports::{Accepted, Bound, Order, Peer, Ports, Redemption, Shown, TokenRefusal, TokenStore},
        shows_identity_of,
    },
    store::{AuditRow, CertificateRow, HelloRow, HostRow, StoreError, Stored, Who, Written},
};

fn store_failure(e: &StoreError) -> Failure {
    Failure::new(FailureClass::Transient, "store", chain(e), "see the coordinator's log; the same will be tried again")
}

/// Whether a host may connect with a certificate, by what is stored of both.
fn may_connect(
    peer: &Peer,
    row: Option<&HostRow>,
    certificate: Option<&CertificateRow>,
    now: Micros,
) -> Result<(), Failure> {
    let refuse = |code, what: String| Err(Failure::refused(code, what, "drumsctl host add makes a new token"));
    let host = &peer.host;
    match row {
        None => return refuse("no-such-host", format!("host {host} is not known here")),
        Some(row) if row.released.is_some() => return refuse("released", format!("host {host} was released")),
        Some(_) => {}
    }
    match certificate {
        None => refuse("foreign-certificate", format!("this certificate of host {host} was not issued by this home")),
        Some(c) if c.revoked.is_some() => refuse("revoked", format!("this certificate of host {host} was revoked")),
        Some(c) if c.expires <= now => refuse("expired", format!("this certificate of host {host} has expired")),
        Some(_) => Ok(()),
    }
}

/// The machine on which the host was seen before, perhaps rebooted.
fn same_machine(peer: &Peer, before: Option<&HostFacts>, now: &MachineIdentity) -> Result<(), Failure> {
    match before.is_none_or(|before| may_be_rebooted(&before.identity, now)) {
        true => Ok(()),
        false => Err(shows_identity_of(peer, SECOND_MACHINE, "a second machine")),
    }
}

impl Ports for Control {
    async fn machine_of(&self, host: &HostId) -> Result<Option<MachineIdentity>, Failure> {
        let host = host.clone();
        let row = self.store.call(move |s| s.host(&host)).await.map_err(|e| store_failure(&e))?;
        Ok(row.filter(|r| r.released.is_none()).and_then(|r| r.facts).map(|f| f.identity))
    }

    async fn on_connect(&self, peer: &Peer, hello: AgentHello) -> Result<Accepted, Failure> {
        let build = hello.agent_sha256;
        // On its way to the store it is handed on several times.
        let hello_row = Box::new(HelloRow {
            installation: peer.installation,
            certificate: peer.certificate,
            facts: hello.facts,
            agent_version: hello.agent_version,
            agent_sha256: hello.agent_sha256,
        });
        let audit = self.row_of(peer, "connected");
        let audit = audit.detail(&format!("agent {} {}", hello_row.agent_version, hello_row.agent_sha256.short()));
        let (who, now) = (peer.clone(), self.now());
        let moves = self.moves.load(SeqCst);
        // One visit to the store: a fleet that comes back makes a thousand of them at once.
        let welcomed = self
            .store
            .call(move |s| {
                let (row, certificate) = (s.host(&who.host)?, s.certificate(who.certificate)?);
                let machine = &hello_row.facts.identity;
                let may = may_connect(&who, row.as_ref(), certificate.as_ref(), now)
                    .and_then(|()| same_machine(&who, row.as_ref().and_then(|r| r.facts.as_ref()), machine));
                match may {
                    Ok(()) => s.welcomed(&who.host, &hello_row, &audit).map(Ok),
                    Err(refused) => Ok(Err(refused)),
                }
            })
            .await;
        let generation = welcomed.map_err(|e| store_failure(&e))?.inspect_err(|refused| {
            if refused.code == SECOND_MACHINE {
                self.report(peer.from.ip(), Some(&peer.host), refused);
            }
        })?;
        let times = {
            let mut leases = self.leases();
            // The store hands generations out in order, so an older one cannot come after a newer one.
            let _ = leases.welcomed(peer.host.clone(), generation, self.clock.boottime());
            leases.times()
        };
        self.seen_build(peer, build).await;
        let orders = self.connect(peer.host.clone(), peer.installation, generation).await?;
        if self.moves.load(SeqCst) != moves {
            // It may be this host that was released or moved after the visit, and before its connection was known.
            self.host_moved();
        }
        let welcome = Welcome {
            host: peer.host.clone(),
            generation,
            beat_ms: times.beat_ms,
            dispatch_lease_ms: times.dispatch_ms,
            life_lease_ms: times.life_ms,
        };
        Ok(Accepted { welcome, orders })
    }

    async fn facts(&self, peer: &Peer, facts: HostFacts) {
        self.leases().heard(&peer.host, self.clock.boottime());
        let (host, installation, audit) = (peer.host.clone(), peer.installation, self.row_of(peer, "facts"));
        if let Err(e) = self.store.call(move |s| s.set_facts(&host, installation, &facts, &audit)).await {
            tracing::error!(host = %peer.host, error = chain(&e), "fresh facts were not stored");
        }
        self.changed();
    }

    async fn renewed(&self, peer: &Peer, certificate: Sha256, expires: Micros) -> Result<(), Failure> {
        let row = CertificateRow {
            sha256: certificate,
            host: peer.host.clone(),
            installation: peer.installation,
            expires,
            revoked: None,
        };
        let audit = self.row_of(peer, "renewed").detail(&format!("certificate {}", certificate.short()));
        let (who, now) = (peer.clone(), self.now());
        let stored = self.store.call(move |s| {
            // Its connection may be about to end because it was released or revoked.
            let (host, shown) = (s.host(&who.host)?, s.certificate(who.certificate)?);
            match may_connect(&who, host.as_ref(), shown.as_ref(), now) {
                Ok(()) => s.add_certificate(&row, &audit).map(|_| Ok(())),
                Err(refused) => Ok(Err(refused)),
            }
        });
        stored.await.map_err(|e| store_failure(&e))?
    }

    async fn upgrade_failed(&self, peer: &Peer, upgrade: Upgrade, failure: Failure) {
        self.upgrade_failed(peer, &upgrade, &failure).await;
    }

    async fn demand_refused(&self, peer: &Peer, run: RunId, failure: Failure) {
        self.leases().heard(&peer.host, self.clock.boottime());
        tracing::warn!(host = %peer.host, run = %run, error = %failure, "the host cannot meet a run's demand");
        self.send(Request::HostRefused { host: peer.host.clone(), run, failure }).await;
    }

    async fn commit_evidence(&self, peer: &Peer, batch: EvidenceBatch) -> Result<EvidenceAck, Failure> {
        let current = {
            let mut leases = self.leases();
            leases.heard(&peer.host, self.clock.boottime());
            leases.get(&peer.host).map(|l| l.generation)
        };
        let Some(current) = current else {
            return Err(Failure::new(FailureClass::Transient, "not-welcomed", "this host has not been welcomed", ""));
        };
        let (host, run, now) = (peer.host.clone(), batch.run, self.now());
        // A run that is over, or that this home never had.
        let member = self.committed().get(&run).is_some_and(|hosts| hosts.contains_key(&host));
        let observed: Vec<_> =
            batch.records.iter().map(|r| (r.seq, Observed::from(&r.body), r.generation < current)).collect();
        let written = match Written::all(&batch.records) {
            Ok(written) => written,
            Err(e) => return Err(self.evidence_refused(peer, run, &e).await),
        };
        drop(batch);
        let stored = self
            .store
            .write(Written::bytes(&written), move |s| {
                if !member && s.run(run)?.is_none_or(|r| r.state.host(&host).is_none()) {
                    return Err(StoreError::Missing { what: "run of this host", id: run.to_string() });
                }
                s.commit_evidence(run, &host, current, &written, now)
            })
            .await;
        let Stored { before, through } = match stored {
            Ok(stored) => stored,
            Err(e) => return Err(self.evidence_refused(peer, run, &e).await),
        };
        if let Some(committed) = self.committed().get_mut(&run).and_then(|hosts| hosts.get_mut(&peer.host)) {
            committed.commit(before, through, observed.into_iter());
        }
        self.wake.notify_one();
        Ok(EvidenceAck { run, through_seq: through })
    }

    fn beat(&self, peer: &Peer, beat: &Beat, received: MonoMicros) -> Option<BeatAck> {
        let ack = self.leases().beat(&peer.host, beat, received)?;
        // Asked last: what was sent before this instant is the latest that an answer renews.
        self.term.get().is_none_or(|term| term.holds(self.clock.boottime())).then_some(ack)
    }

    fn disconnected(&self, _peer: &Peer, _reason: &str) {
        self.wake.notify_one();
        self.changed();
    }

    async fn artifact(&self, sha256: Sha256, offset: u64) -> Result<Content, Failure> {
        let unreadable = |e: ArtifactError| {
            let text = format!("the coordinator cannot read artifact {sha256}: {}", chain(&e));
            Failure::new(FailureClass::Transient, "artifact-unreadable", text, "check the home's disk, or the bucket")
        };
        if let Some(content) = self.artifacts.read(sha256, offset).await.map_err(unreadable)? {
            return Ok(content);
        }
        let message = format!("artifact {sha256} is not in this home");
        Err(Failure::new(FailureClass::Permanent, "no-such-artifact", message, "drumsctl workload add DIR stores it"))
    }

    fn has_bucket(&self) -> bool {
        self.uploading.is_some()
    }

    async fn uploads(&self, peer: &Peer, runs: &[RunId]) -> Result<Uploads, Failure> {
        self.offer(peer, runs).await.map_err(|e| {
            Failure::new(FailureClass::Transient, "bucket", chain(&e), "is the bucket there, and may it be written to?")
        })
    }

    fn report(&self, from: IpAddr, host: Option<&HostId>, failure: &Failure) {
        let who = host.map_or_else(|| "an unknown peer".to_owned(), |h| format!("host {h}"));
        tracing::warn!(peer = who, error = %failure, "a peer was refused");
        self.audit_refusal(from, host, "refused", &failure.to_string());
    }
}

impl Control {
    pub(super) fn row_of(&self, peer: &Peer, action: &str) -> AuditRow {
        self.audit_row(&Who::new(format!("host {}", peer.host), peer.from.to_string()), action).host(&peer.host)
    }

    /// What can never be committed is said to people once, and ends the run: its agent can send nothing after it.
    async fn evidence_refused(&self, peer: &Peer, run: RunId, e: &StoreError) -> Failure {
        let (code, help) = match e {
            StoreError::Missing { .. } => ("no-such-run", "was the home restored from an older backup?"),
            StoreError::Differs { .. } => {
                ("evidence-differs", "was the agent's state folder put back from a copy? what was stored first stands")
            }
            StoreError::Unstorable { .. } => ("evidence-unstorable", "what measures non-finite numbers on that host?"),
            e => return store_failure(e),
        };
        let failure = Failure::new(FailureClass::Permanent, code, format!("evidence of {run}: {}", chain(e)), help);
        let (news, told) = {
            let of = (run, peer.host.clone());
            let mut refused = self.refused_evidence.lock().unwrap_or_else(PoisonError::into_inner);
            let told = refused.contains(&of);
            (refused.len() < REFUSED_EVIDENCE && refused.insert(of), told)
        };
        if news {
            self.audit(self.row_of(peer, "evidence-refused").run(run).detail(&failure.to_string())).await;
        }
        // Beyond what is remembered the driver hears of it each time, and leaves alone what ends already.
        if !told && code != "no-such-run" {
            self.send(Request::EvidenceRefused { host: peer.host.clone(), run, failure: failure.clone() }).await;
        }
        failure
    }
}

impl TokenStore for Control {
    async fn bound(&self, secret: Sha256, document: Option<Sha256>) -> Result<Bound, TokenRefusal> {
        let bound = self.store.call(move |s| s.bound(secret, document)).await;
        bound.map_err(|e| TokenRefusal::Store(chain(&e)))
    }

    async fn redeem(&self, redemption: Redemption) -> Result<(), TokenRefusal> {
        let who = Who::new(format!("host {}", redemption.host), redemption.from.to_string());
        let shown = match &redemption.shown {
            Shown::Nothing => String::new(),
            Shown::Claimed(what) => what.clone(),
            Shown::Proven(proven) => format!("proved to be {}, of the launch {}", proven.instance, proven.launch),
        };
        let audit = self.audit_row(&who, "token-used").host(&redemption.host).detail(&shown);
        match self.store.call(move |s| s.redeem(&redemption, &audit)).await {
            Ok(answer) => answer,
            Err(e) => Err(TokenRefusal::Store(chain(&e))),
        }
    }

    async fn enrolled(&self, peer: Peer, expires: Micros) -> Result<(), TokenRefusal> {
        let row = CertificateRow {
            sha256: peer.certificate,
            host: peer.host.clone(),
            installation: peer.installation,
            expires,
            revoked: None,
        };
        let detail = format!("installation {}, certificate {}", peer.installation, peer.certificate.short());
        let audit = self.row_of(&peer, "enrolled").detail(&detail);
        let stored = self.store.call(move |s| s.add_certificate(&row, &audit)).await;
        if !matches!(stored, Ok(false)) {
            // Also if it failed: it may be stored, and only its answer lost.
            self.host_moved();
        }
        let moved = stored.map_err(|e| TokenRefusal::Store(chain(&e)))?;
        // At once: the new one comes next, and must not find the name held.
        if moved && let Some(link) = self.links().remove(&peer.host) {
            let reason = format!("host {} was enrolled on another machine or anew", peer.host);
            link.orders.send_replace(Order::Retire { reason });
        }
        Ok(())
    }

    fn refused(&self, from: IpAddr, host: &HostId, failure: &Failure) {
        tracing::warn!(host = %host, error = %failure, "an enrolment was refused");
        self.audit_refusal(from, Some(host), "enrolment-refused", &failure.to_string());
    }
}
