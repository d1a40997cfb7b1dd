//! What operators ask of the driver: runs made and cancelled, hosts released.

use std::sync::atomic::Ordering::SeqCst;

use super::*;

impl Driver {
    pub(super) async fn create(&mut self, new: NewRun) -> Result<RunState, Failure> {
        let now = self.control.now();
        let experiment = new.experiment;
        let (registrations, runs, hosts) = self
            .control
            .store
            .call(move |s| Ok((s.registrations(Some(experiment))?, s.runs(Some(experiment))?, s.hosts()?)))
            .await
            .map_err(|e| failure(&e))?;
        let registration = match new.registration {
            Some(sha) => registrations.into_iter().find(|r| r.sha256 == sha),
            None => registrations.into_iter().next_back(),
        };
        let registration = registration.ok_or_else(|| {
            Failure::refused(
                "not-registered",
                format!("{experiment} is not registered here"),
                "drumsctl register SPEC stores it before anything runs",
            )
        })?;
        let e = &registration.experiment;
        let made = runs.iter().filter(|r| r.state.registration == registration.sha256).count() as u32;
        if made >= e.design.max_runs {
            let message =
                format!("{experiment} allows {} runs of this registration and they were made", e.design.max_runs);
            let help = "all of them count; another question is another registration (drumsctl register --amend)";
            return Err(Failure::refused("max-runs", message, help));
        }
        if let Some(at) = e.not_after.filter(|at| *at <= now) {
            let message = format!("{experiment} allows no run after {}", utc(at));
            return Err(Failure::refused("deadline-past", message, "register a later version with --amend"));
        }
        if let Some(until) = new.until.filter(|u| *u <= now) {
            let message = format!("the deadline {} is in the past", utc(until));
            return Err(Failure::refused("deadline-past", message, "give a time to come, in UTC"));
        }
        let candidates: Vec<Candidate> = hosts
            .iter()
            .filter(|h| h.released.is_none())
            .map(|h| Candidate {
                host: h.host.clone(),
                connected: self.control.connected(&h.host),
                facts: h.facts.clone(),
            })
            .collect();
        let chosen = placement::place(e, &candidates)?;
        let placed = chosen
            .into_iter()
            .filter_map(|host| {
                let row = hosts.iter().find(|h| h.host == host)?;
                Some((host, row.facts.as_ref()?.identity.clone(), row.generation))
            })
            .collect();
        let t = RunState::place(new.id, registration.sha256, made + 1, new.until, placed, now);
        let (state, notes) = (t.next.clone(), t.notes);
        let audit = self.control.audit_row(&new.by, "run").run(state.id);
        let audit = audit.detail(&format!("{experiment}, run {} of {}", made + 1, e.design.max_runs));
        let id = state.id;
        if let Err(e) = self.control.store.call(move |s| s.create_run(&state, &notes, &audit)).await {
            if e.is_away() {
                self.unsure.push(id);
            }
            return Err(failure(&e));
        }
        tracing::info!(run = %t.next.id, experiment = %experiment, "run made");
        let row = RunRow { state: t.next.clone(), generation: 1, experiment };
        let hosts = t.next.hosts.iter().map(|h| (h.host.clone(), Committed::default())).collect();
        self.control.committed().insert(t.next.id, hosts);
        self.runs.push(Active::new(row, registration));
        self.control.orders_due();
        self.control.changed();
        Ok(t.next)
    }

    pub(super) async fn cancel(&mut self, run: RunId, by: Who) -> Result<RunState, Failure> {
        let stored = self.control.store.call(move |s| s.run(run)).await.map_err(|e| failure(&e))?;
        let stored = stored.ok_or_else(|| {
            Failure::refused("no-such-run", format!("there is no run {run}"), "drumsctl runs lists them")
        })?;
        if let Some(verdict) = stored.state.verdict() {
            let message = format!("run {run} is closed already: {verdict}");
            return Err(Failure::refused("closed", message, "a closed run stays what it is"));
        }
        let asked = self.control.audit_row(&by, "cancel").run(run);
        self.event_asked(run, &Event::Cancel { by: by.actor }, Some(asked)).await.map_err(|e| failure(&e))?;
        // Done is what is stored: a restarted coordinator must know of it.
        let state = self.runs.iter().map(|r| &r.row.state).find(|s| s.id == run && s.ending.is_some()).cloned();
        let state = state.ok_or_else(|| {
            let message = format!("the cancellation of {run} was not taken");
            Failure::new(FailureClass::Transient, "not-cancelled", message, "try again")
        })?;
        Ok(state)
    }

    pub(super) async fn release(&mut self, host: HostId, by: Who) -> Result<(), Failure> {
        let busy = self.runs.iter().find(|r| r.row.state.live() && r.row.state.host(&host).is_some());
        if let Some(run) = busy {
            let message = format!("host {host} is part of {}", run.row.state.id);
            return Err(Failure::refused("busy", message, "cancel the run or wait for its end, then release"));
        }
        let (of, audit) = (host.clone(), self.control.audit_row(&by, "release").host(&host));
        let released = self.control.store.call(move |s| s.release_host(&of, &audit)).await;
        // Also if it failed: it may be stored, and only its answer lost.
        self.control.host_moved();
        released.map_err(|e| match e {
            StoreError::Missing { .. } => {
                Failure::refused("no-such-host", format!("there is no host {host}"), "drumsctl fleet lists them")
            }
            e => failure(&e),
        })?;
        let link = self.control.links().remove(&host);
        if let Some(link) = link {
            // Its connection sees the order, tells the agent, and then that we are gone.
            link.orders.send_replace(Order::Retire { reason: format!("host {host} was released") });
        }
        self.control.leases().forget(&host);
        self.control.upgrades().remove(&host);
        self.control.changed();
        Ok(())
    }
}

impl Driver {
    /// Sends away whoever is connected as a host that is released, or another installation's by now.
    pub(super) async fn part_with_moved(&mut self) {
        if !self.control.links_due.swap(false, SeqCst) {
            return;
        }
        let rows = match self.control.store.call(|s| s.hosts()).await {
            Ok(rows) => rows,
            Err(e) => {
                tracing::debug!(error = chain(&e), "connections are held against the store at the next look");
                self.control.links_due.store(true, SeqCst);
                return;
            }
        };
        let mut gone = Vec::new();
        for row in rows {
            let mut links = self.control.links();
            let Some(link) = links.get(&row.host) else { continue };
            let reason = match row.installation {
                _ if row.released.is_some() => format!("host {} was released", row.host),
                Some(i) if i == link.installation => continue,
                _ => format!("host {} was enrolled on another machine or anew", row.host),
            };
            tracing::warn!(host = %row.host, reason, "a connection of it is ended");
            link.orders.send_replace(Order::Retire { reason });
            links.remove(&row.host);
            if row.released.is_some() {
                gone.push(row.host);
            }
        }
        for host in gone {
            self.control.leases().forget(&host);
            self.control.upgrades().remove(&host);
        }
        self.control.changed();
    }
}

fn utc(at: Micros) -> String {
    jiff::Timestamp::from_microsecond(at.0).map_or_else(|_| at.to_string(), |t| format!("{t:.0}"))
}
