//! Templates: a session that is made, certified, marked, saved and undone; what it was saved to remains.

use std::time::Duration;

use serde_json::json;

use super::{
    Engine, TemplateKey,
    api::{EngineError, GuestReady, HostFailure, SessionFailure, SessionOrder, TemplateReport},
    host,
    operate::{CALL_TIMEOUT, Cause, accepted},
    run::Made,
    timeline::Timeline,
};
use crate::arms::{Template, TemplatePlan};

/// A template and the resources that it is kept in.
pub(super) struct Held {
    pub(super) template: Template,
    made: Made,
}

impl Engine {
    pub(super) fn template(&mut self, order: &SessionOrder<'_>) -> Result<TemplateReport, EngineError> {
        let kind = order.arm.kind;
        let key: TemplateKey = (order.run, order.arm.name.clone(), order.template_build);
        if self.templates.contains_key(&key) {
            let why = format!("build {} of {} is there already", order.template_build, order.arm.name);
            return Err(host("cannot build a template".to_owned(), HostFailure::Unfit(why)));
        }
        let failed = |what: &str| format!("cannot {what} template build {} of {kind}", order.template_build);
        let plan = self.arm(kind)?.plan_template(&self.site, order).map_err(|e| host(failed("plan"), e.into()))?;
        let name = self.site.name(order.session);
        let kept = format!("{name}-template");
        self.intend(&kept, &plan.store).map_err(|e| host(failed("begin"), e.into()))?;
        let mut store = Made { plan: kept, ..Made::default() };
        let mut session = Made { plan: name, ..Made::default() };
        let mut timeline = Timeline::start(self.sys.now_us());
        let built = self.build(order, &plan, &mut store, &mut session, &mut timeline);
        let (end, mut leaked) = self.unwind(session, &mut timeline);
        let built = built.and_then(|ready| {
            let (bytes, sha256) = self.sys.digest_tree(&plan.image).map_err(|e| Cause::Host {
                attempted: "cannot read the saved template back".to_owned(),
                failure: e.into(),
            })?;
            Ok((ready, bytes, sha256))
        });
        match built {
            Ok((ready, bytes, sha256)) => {
                let state = ready.state.clone();
                let identity = ready.identity();
                let template = Template {
                    run: order.run,
                    arm: order.arm.name.clone(),
                    build: order.template_build,
                    session: order.session,
                    state: state.clone(),
                    ready,
                };
                self.templates.insert(key, Held { template, made: store });
                let duration_ms = timeline.done(end).duration_ms();
                Ok(TemplateReport { duration_ms, bytes, sha256, state, identity, leaked })
            }
            Err(cause) => {
                let (_, more) = self.unwind(store, &mut Timeline::start(self.sys.now_us()));
                leaked.extend(more);
                Err(self.failed(order, cause, leaked))
            }
        }
    }

    /// Store, session, certificate, mark, save. Whatever happens, both hands hold what there is.
    fn build(
        &mut self,
        order: &SessionOrder<'_>,
        plan: &TemplatePlan,
        store: &mut Made,
        session: &mut Made,
        timeline: &mut Timeline,
    ) -> Result<GuestReady, Cause> {
        self.apply(&plan.store, store, timeline)?;
        // The steps that save act on the session's resources and are undone with them.
        let resources: Vec<_> =
            plan.session.steps.iter().chain(&plan.save).filter_map(|s| s.resource().cloned()).collect();
        self.ledger.intend(&session.plan, &resources).map_err(|e| Cause::Host {
            attempted: "cannot begin a template's session".to_owned(),
            failure: e.into(),
        })?;
        self.live.insert(session.plan.clone());
        self.apply(&plan.session.before, session, timeline)?;
        self.apply(&plan.session.steps, session, timeline)?;
        let patience = |engine: &Self, d: Duration| {
            engine.sys.now_us().saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
        };
        let deadline = patience(self, order.ready_timeout);
        let target = &plan.session.ready_at;
        self.first_answer(target, session, deadline)?;
        let state = format!(
            "{} {} build {} {}",
            order.run,
            order.arm.name,
            order.template_build,
            hex::encode(rand::random::<[u8; 8]>())
        );
        let answer = self.prober.post(
            target,
            "/drums/state",
            &json!({ "state": state }),
            CALL_TIMEOUT,
            &mut self.lives(&session.cx),
        );
        accepted("the template's mark", answer).map_err(|f| Cause::session("certification", f))?;
        // What is certified is what is saved: a fresh nonce, the mark in place, nothing in between.
        let deadline = patience(self, CALL_TIMEOUT);
        let ready = self.first_answer(target, session, deadline)?.guest;
        if ready.state != state {
            let why = format!("the template answers state {:?} after {state:?} was set", ready.state);
            return Err(Cause::session("certification", SessionFailure::Template(why)));
        }
        self.apply(&plan.save, session, timeline)?;
        Ok(ready)
    }

    /// Undoes templates; answers with leaks.
    pub(super) fn discard(&mut self, which: impl Fn(&TemplateKey) -> bool) -> Vec<String> {
        let keys: Vec<TemplateKey> = self.templates.keys().filter(|k| which(k)).cloned().collect();
        let mut leaked = Vec::new();
        for key in keys {
            if let Some(held) = self.templates.remove(&key) {
                let mut timeline = Timeline::start(self.sys.now_us());
                leaked.extend(self.unwind(held.made, &mut timeline).1);
            }
        }
        leaked
    }
}
