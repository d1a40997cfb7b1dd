//! What the driver concludes from leases: hosts that are lost are fenced, and people are told of work that stands still.

use super::*;

impl Driver {
    /// Hosts that were silent for a whole life lease are fenced, and fenced hosts are lost to the runs that they were given
    /// before. In this order: whatever is left of the host is late from the instant at which anybody counts on its loss,
    /// and a crash in between is made good by the next look.
    pub(super) async fn count_leases(&mut self) {
        let now = self.control.clock.boottime();
        self.control.leases().looked(now);
        let judged = |lease, given, health| lease == given && matches!(health, Some(Health::Lost { .. }));
        for (run, host) in self.hosts_of_started_runs(judged) {
            let (of, audit) =
                (host.clone(), self.control.audit_row(&Who::coordinator(), "fenced").host(&host).run(run));
            match self.control.store.call(move |s| s.next_generation(&of, &audit)).await {
                Ok(generation) => {
                    tracing::warn!(host = %host, run = %run, generation = %generation, "host lost: its life lease ended");
                    self.control.leases().fence(&host, generation);
                    // Whatever connection it has left is of the old generation.
                    self.control.links().remove(&host);
                }
                Err(e) => tracing::error!(host = %host, error = chain(&e), "a lost host was not fenced"),
            }
        }
        for (run, host) in self.hosts_of_started_runs(|lease, given, _| lease > given) {
            // One that was not stored is told again at the next look.
            let _ = self.event(run, &Event::HostLost { host }).await;
        }
    }

    /// Hosts that runs under way still count on, each once per run, of which `pick` holds: given the generation that is
    /// in force for the host, the one under which it got the run, and what can be said of it.
    fn hosts_of_started_runs(
        &self,
        pick: impl Fn(Generation, Generation, Option<Health>) -> bool,
    ) -> Vec<(RunId, HostId)> {
        let now = self.control.clock.boottime();
        let leases = self.control.leases();
        let counted = self.runs.iter().map(|r| &r.row.state).filter(|s| s.live() && s.started.is_some());
        counted
            .flat_map(|s| s.hosts.iter().filter(|h| !h.lost && h.teardown.is_none()).map(move |h| (s.id, h)))
            .filter(|(_, h)| {
                let lease = leases.get(&h.host).map_or(h.generation, |l| l.generation);
                pick(lease, h.generation, leases.health(&h.host, now))
            })
            .map(|(run, h)| (run, h.host.clone()))
            .collect()
    }

    /// An agent may live and its work stand still: people are told, and nothing else follows.
    pub(super) async fn watch_progress(&mut self) {
        let now = self.control.clock.boottime();
        let busy: BTreeMap<HostId, (RunId, u64)> = self
            .runs
            .iter()
            .flat_map(|r| {
                let bound = plan::progress_bound_ms(&r.registration.experiment);
                r.row.state.busy().map(move |h| (h.host.clone(), (r.row.state.id, bound)))
            })
            .collect();
        let stuck: Vec<(HostId, RunId, u64)> = {
            let mut leases = self.control.leases();
            leases.expect_progress(&busy.iter().map(|(host, (_, bound))| (host.clone(), *bound)).collect(), now);
            let for_ms = |host| match leases.health(host, now) {
                Some(Health::Stuck { for_ms }) => Some(for_ms),
                _ => None,
            };
            busy.iter().filter_map(|(host, (run, _))| Some((host.clone(), *run, for_ms(host)?))).collect()
        };
        for (host, run, for_ms) in
            stuck.iter().filter(|(host, ..)| !self.stuck.contains(host)).cloned().collect::<Vec<_>>()
        {
            tracing::warn!(host = %host, run = %run, for_ms, "the host's work does not move");
            let text = format!("no progress for {} s, although its agent lives", for_ms / 1_000);
            let row = self.control.audit_row(&Who::coordinator(), "stuck").host(&host).run(run);
            self.control.audit(row.detail(&text)).await;
            self.complain(run, host, text).await;
        }
        self.stuck = stuck.into_iter().map(|(host, ..)| host).collect();
    }
}
