//! The runner: applies steps in order and undoes resources in reverse. Ledger, timing and unwinding are written here,
//! once for all arms.

use drums_common::telemetry::chain;

use super::{Engine, timeline::Timeline};
use crate::{
    ledger::LedgerError,
    steps::{Cx, Receipt, Resource, Seen, Step, StepError, undo},
};

/// A plan as far as it was made: what is undone, in reverse.
#[derive(Debug, Default)]
pub(super) struct Made {
    pub(super) plan: String,
    pub(super) entries: Vec<(Resource, Option<Receipt>)>,
    pub(super) cx: Cx,
}

/// Undone, and not accounted for yet.
#[must_use = "the ledger still holds it"]
pub(super) struct Undone {
    made: Made,
    leaks: Vec<(usize, String)>,
    /// Entries that are looked for outside timed windows.
    later: Vec<usize>,
}

/// A step failed, at this index; what was made is in the other hand.
#[derive(Debug)]
pub(super) enum Stopped {
    Step(StepError),
    Ledger(LedgerError),
}

impl Engine {
    /// Writes a plan's resources down. Outside every timed window: it costs an fsync.
    pub(super) fn intend(&mut self, plan: &str, steps: &[Box<dyn Step>]) -> Result<(), LedgerError> {
        let resources: Vec<Resource> = steps.iter().filter_map(|s| s.resource().cloned()).collect();
        self.ledger.intend(plan, &resources)?;
        self.live.insert(plan.to_owned());
        Ok(())
    }

    /// Applies the steps of an intended plan. `made` holds what there is afterwards, also when it stopped: the failed
    /// step's own resource included, because a step may fail after the kernel has begun.
    pub(super) fn apply(
        &mut self,
        steps: &[Box<dyn Step>],
        made: &mut Made,
        timeline: &mut Timeline,
    ) -> Result<(), Stopped> {
        for step in steps {
            let from = self.sys.now_us();
            let index = made.entries.len();
            if let Some(resource) = step.resource() {
                made.entries.push((resource.clone(), None));
            }
            let applied = step.apply(&*self.sys, &mut made.cx);
            timeline.mark(step.phase(), from, self.sys.now_us());
            let receipt = match applied {
                Ok(receipt) => receipt,
                Err(e) => {
                    if matches!(e, StepError::Taken { .. }) {
                        // Nothing was made, and what carries the name must outlive the unwinding and every audit.
                        made.entries.truncate(index);
                        self.ledger.disowned(&made.plan, index).map_err(Stopped::Ledger)?;
                    }
                    return Err(Stopped::Step(e));
                }
            };
            if step.resource().is_some() {
                if receipt != Receipt::Made {
                    self.ledger.held(&made.plan, index, &receipt).map_err(Stopped::Ledger)?;
                }
                made.entries[index].1 = Some(receipt);
            }
        }
        Ok(())
    }

    /// Undoes everything in reverse until nothing of it is observed. Returns the moment of that, and what leaked.
    pub(super) fn unwind(&mut self, made: Made, timeline: &mut Timeline) -> (u64, Vec<String>) {
        let (done, undone) = self.take_apart(made, timeline);
        (done, self.account(undone))
    }

    /// The part of unwinding that takes the caller's time: undone, and observed gone.
    pub(super) fn take_apart(&mut self, mut made: Made, timeline: &mut Timeline) -> (u64, Undone) {
        let mut leaks: Vec<(usize, String)> = Vec::new();
        let installation = self.site.installation;
        for (index, (resource, receipt)) in made.entries.iter().enumerate().rev() {
            let from = self.sys.now_us();
            self.let_go(resource, &mut made.cx);
            if let Err(e) = undo::undo(resource, receipt.as_ref(), installation, &*self.sys) {
                leaks.push((index, chain(&e)));
            }
            timeline.mark(phase(resource), from, self.sys.now_us());
        }
        // Once more, now that the group is empty: what a failed step had started may have been writing still.
        leaks.retain_mut(|(index, why)| {
            let (resource, receipt) = &made.entries[*index];
            let retried = undo::undo(resource, receipt.as_ref(), installation, &*self.sys);
            retried.is_err_and(|e| {
                *why = chain(&e);
                true
            })
        });
        drop(std::mem::take(&mut made.cx));
        let from = self.sys.now_us();
        let mut later = Vec::new();
        for (index, (resource, receipt)) in made.entries.iter().enumerate() {
            // A namespace goes with its last process and descriptor, which are looked for here; that no stranger sits
            // in it takes a walk over /proc, which is no part of destroying and is done after the clock stopped.
            if matches!(resource, Resource::Netns { .. }) {
                later.push(index);
            } else {
                self.check(index, resource, receipt.as_ref(), &mut leaks);
            }
        }
        let done = self.sys.now_us();
        timeline.mark("observe", from, done);
        (done, Undone { made, leaks, later })
    }

    /// The part that is ours, and belongs in no timed window: strangers looked for, the ledger written. Answers with
    /// what leaked.
    pub(super) fn account(&mut self, undone: Undone) -> Vec<String> {
        let Undone { made, mut leaks, later } = undone;
        for index in later {
            let (resource, receipt) = &made.entries[index];
            self.check(index, resource, receipt.as_ref(), &mut leaks);
        }
        self.settle(&made, leaks)
    }

    /// Descriptors that keep a resource alive are closed before it is undone. A group's account is read while it is
    /// there.
    fn let_go(&mut self, resource: &Resource, cx: &mut Cx) {
        match resource {
            Resource::Netns { .. } => cx.netns = None,
            Resource::Link { name } => cx.taps.retain(|t| &t.link != name),
            Resource::Cgroup { name } => {
                // What is not there has used nothing.
                self.spent_us += self.sys.cgroup_cpu_us(name).unwrap_or(0);
            }
            _ => {}
        }
    }

    fn check(&self, index: usize, resource: &Resource, receipt: Option<&Receipt>, leaks: &mut Vec<(usize, String)>) {
        let why = match undo::observe(resource, receipt, self.site.installation, &*self.sys) {
            Ok(Seen::Absent | Seen::Foreign(_)) => return,
            Ok(Seen::Ours) => "it is still there after its undo".to_owned(),
            Err(e) => format!("nobody can tell whether it is gone: {}", chain(&e)),
        };
        if !leaks.iter().any(|(i, _)| *i == index) {
            leaks.push((index, why));
        }
    }

    fn settle(&mut self, made: &Made, leaks: Vec<(usize, String)>) -> Vec<String> {
        self.live.remove(&made.plan);
        let mut leaked = Vec::new();
        for (index, why) in leaks {
            let text = format!("{} of {}: {why}", made.entries[index].0, made.plan);
            tracing::error!(leaked = %text, "could not be undone; the next audit tries again");
            if let Err(e) = self.ledger.leaked(&made.plan, index, &why) {
                tracing::error!(error = %chain(&e), "the leak could not be noted");
            }
            leaked.push(text);
        }
        if leaked.is_empty()
            && let Err(e) = self.ledger.released(&made.plan)
        {
            // Harmless: the next audit finds a plan of which nothing is left.
            tracing::warn!(plan = %made.plan, error = %chain(&e), "the release could not be noted");
        }
        leaked
    }
}

/// Name of the phase in which a resource is undone; none is also a phase of making, so that a reset's timeline has each
/// name once.
fn phase(resource: &Resource) -> &'static str {
    match resource {
        Resource::Cgroup { .. } => "remove limits",
        Resource::Dir { .. } | Resource::Mount { .. } => "remove scratch",
        Resource::Link { .. } | Resource::Netns { .. } => "remove network",
        Resource::Process { .. } => "kill",
        Resource::RuncContainer { .. } | Resource::External { .. } => "delete",
    }
}
