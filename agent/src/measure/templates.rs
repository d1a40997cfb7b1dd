//! Templates of a run: built outside timed windows, thrown away when a grant asks for another build.
//!
//! Each arm has its own, the A/A control too: the same procedure twice, or the control would share the very thing whose
//! spread it is there to show.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use drums_common::{
    evidence::{Body, Template},
    experiment::{Arm, Experiment},
    ids::{ArmName, Generation, RunId, SessionRef},
    telemetry::chain,
};

use super::{draw, journal::Journal};
use crate::{
    engine::api::{ArmEngine, SessionOrder, Workload},
    net::Link,
    spool::SpoolError,
};
use drums_common::wire::latest::{Activity, Grant};

/// What is there of the current build, by arm: the saved state, or why there is no template.
#[derive(Debug, Default)]
pub struct Templates {
    build: Option<u32>,
    made: BTreeMap<ArmName, Result<String, String>>,
    /// Arms whose template has been restored from once.
    used: BTreeSet<ArmName>,
}

/// How bringing the templates up to a grant ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ensured {
    /// Every arm has its template or a reason why not.
    Ready,
    HostBroken(String),
    GivenUp,
}

/// What building needs to know.
pub struct Building<'a> {
    pub run: RunId,
    pub experiment: &'a Experiment,
    pub grant: &'a Grant,
    pub workload: &'a Workload,
    pub cpus: &'a [u32],
    pub environment_bytes: u32,
    pub generation: Generation,
}

impl<'a> Building<'a> {
    /// A session for the next use of the arm's template, or how it all ends instead.
    fn begin(
        &self,
        engine: &mut dyn ArmEngine,
        link: &Link,
        arm: &Arm,
        give_up: &dyn Fn() -> bool,
    ) -> Result<SessionRef, Ensured> {
        if give_up() {
            return Err(Ensured::GivenUp);
        }
        link.set_activity(Activity::Building { run: self.run, arm: arm.name.clone() });
        engine.next_session(self.generation).map_err(|e| Ensured::HostBroken(chain(&e)))
    }

    fn order(&self, arm: &'a Arm, session: SessionRef, identity_seed: u64) -> SessionOrder<'a> {
        SessionOrder {
            run: self.run,
            arm,
            session,
            limits: &self.experiment.limits,
            cpus: self.cpus,
            environment_bytes: self.environment_bytes,
            template_build: self.grant.template_build,
            delay: None,
            identity_seed,
            workload: self.workload,
            ready_timeout: Duration::from_millis(self.experiment.design.ready_timeout_ms),
        }
    }
}

impl Templates {
    /// The saved state that this arm's sessions must carry (empty for a cold arm), or why there is no template.
    pub fn state(&self, arm: &Arm) -> Result<&str, &str> {
        if !arm.kind.from_template() {
            return Ok("");
        }
        match self.made.get(&arm.name) {
            Some(Ok(state)) => Ok(state),
            Some(Err(why)) => Err(why),
            None => Err("its template was not built"),
        }
    }

    /// No template is held.
    pub fn is_empty(&self) -> bool {
        !self.made.values().any(Result::is_ok)
    }

    /// Nothing is there any more (the audit undid everything).
    pub fn forget(&mut self) {
        self.build = None;
        self.made.clear();
        self.used.clear();
    }

    /// Throws all away; answers with what could not be undone.
    pub fn discard(&mut self, engine: &mut dyn ArmEngine, run: RunId) -> Vec<String> {
        self.forget();
        engine.discard_templates(run)
    }

    /// Brings the templates to the grant's build: discards others, builds what is missing, tries failed ones again.
    pub fn ensure(
        &mut self,
        engine: &mut dyn ArmEngine,
        link: &Link,
        journal: &mut Journal,
        b: &Building<'_>,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Ensured, SpoolError> {
        if self.build != Some(b.grant.template_build) {
            let leaked = self.discard(engine, b.run);
            journal.leaks(&leaked)?;
            self.build = Some(b.grant.template_build);
        }
        for (i, arm) in b.experiment.arms.iter().enumerate() {
            if !arm.kind.from_template() || matches!(self.made.get(&arm.name), Some(Ok(_))) {
                continue;
            }
            let session = match b.begin(engine, link, arm, give_up) {
                Ok(session) => session,
                Err(ended) => return Ok(ended),
            };
            let order = b.order(arm, session, draw::template_identity(b.grant.seed, i));
            match engine.build_template(&order) {
                Ok(t) => {
                    journal.leaks(&t.leaked)?;
                    journal.record(Body::Template(Template {
                        arm: arm.name.clone(),
                        build: b.grant.template_build,
                        duration_ms: t.duration_ms,
                        bytes: t.bytes,
                        sha256: t.sha256,
                        state: t.state.clone(),
                        identity: t.identity,
                    }))?;
                    self.made.insert(arm.name.clone(), Ok(t.state));
                }
                Err(e) => {
                    journal.leaks(e.leaked())?;
                    let why =
                        format!("template {} of {} was not built: {}", b.grant.template_build, arm.name, chain(&e));
                    journal.log("error", "template", &why)?;
                    if !e.is_outcome() {
                        return Ok(Ensured::HostBroken(why));
                    }
                    if give_up() {
                        return Ok(Ensured::GivenUp);
                    }
                    self.made.insert(arm.name.clone(), Err(why));
                }
            }
            journal.commit()?;
        }
        self.use_once(engine, link, journal, b, give_up)
    }

    /// The first restore of a template is not like the later ones (caches of its files are cold), and what is registered
    /// is the steady one: each is restored from once, uncounted, before anything is measured.
    fn use_once(
        &mut self,
        engine: &mut dyn ArmEngine,
        link: &Link,
        journal: &mut Journal,
        b: &Building<'_>,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Ensured, SpoolError> {
        for (i, arm) in (0u32..).zip(&b.experiment.arms) {
            if !matches!(self.made.get(&arm.name), Some(Ok(_))) || self.used.contains(&arm.name) {
                continue;
            }
            let session = match b.begin(engine, link, arm, give_up) {
                Ok(session) => session,
                Err(ended) => return Ok(ended),
            };
            // No position of a block is so large.
            let (identity, _) = draw::further_identities(b.grant.seed, (1 << 30) + i, 0);
            let what = format!("first restore from template {} of {}", b.grant.template_build, arm.name);
            let tried = engine.create(&b.order(arm, session, identity)).and_then(|created| {
                let ms = created.timed.duration_ms();
                engine.destroy(created.handle).map(|destroyed| (ms, destroyed.leaked))
            });
            match tried {
                Ok((ms, leaked)) => {
                    journal.leaks(&leaked)?;
                    journal.log("info", "measure", &format!("{what}: {ms:.3} ms, not counted"))?;
                }
                Err(e) => {
                    journal.leaks(e.leaked())?;
                    if e.is_outcome() && give_up() {
                        return Ok(Ensured::GivenUp);
                    }
                    // The arm is judged by what is measured; that this failed, everybody may know.
                    let why = format!("{what}, not counted, failed: {}", chain(&e));
                    journal.log("error", "measure", &why)?;
                    if !e.is_outcome() {
                        return Ok(Ensured::HostBroken(why));
                    }
                }
            }
            self.used.insert(arm.name.clone());
            journal.commit()?;
        }
        Ok(Ensured::Ready)
    }
}
