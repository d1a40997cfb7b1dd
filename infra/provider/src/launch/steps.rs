//! The steps of a launch: from what is stored and what is shown to what is stored next and done.

use drums_common::clock::Micros;

use super::{
    Act, Decision, Doubt, Guest, Launch, Patience, Prepared, ReadBack, Reply, State, Then, View, Why, read_back,
};
use crate::{
    alarm::{Alarm, AlarmKind, backoff_ms},
    cloud::{Instance, InstanceState},
    deadline::{TagSays, effective_deadline},
    failure::{CloudError, Effect, FailureKind, Remedy},
    host::OwnedInstance,
    tags,
    words::instant_text,
};

/// By what a step is decided.
#[derive(Clone, Copy)]
struct Moment<'v> {
    view: &'v View,
    now: Micros,
    patience: &'v Patience,
}

/// What is seen of the instance that is known.
struct Known<'v> {
    instance: OwnedInstance,
    /// `None`: not shown, which says nothing.
    shown: Option<&'v Instance>,
    /// Its schedule is as it should be.
    armed: bool,
}

impl Launch {
    /// What comes next. Asked again with the same, it says the same.
    ///
    /// `now` is AWS's time ([`Account::clock`](crate::cloud::Account::clock)) wherever it is to be had: a wrong clock here must
    /// end no host early.
    pub fn decide(&self, view: &View, now: Micros, patience: &Patience) -> Decision {
        let before = self.due;
        let launch = Self { due: self.earliest(view), ..self.clone() };
        let mut d = Decision { launch: launch.clone(), reap: Vec::new(), act: None, alarms: Vec::new() };
        launch.step(&mut d, before, Moment { view, now, patience });
        d.launch.forget();
        d
    }

    /// User data hold the host's enrolment token: they are kept only while something may be called with them.
    fn forget(&mut self) {
        if !matches!(self.state, State::Intended { .. }) {
            self.prepared = None;
        }
    }

    fn step(&self, d: &mut Decision, before: Micros, moment: Moment<'_>) {
        let shown = self.shown(moment.view, d);
        self.tags_edited(d, shown.as_ref().map(|(_, i)| *i), before);
        match &self.state {
            State::Closed { .. } => {}
            State::Intended { .. } | State::Resolving { .. } => match shown {
                Some((instance, seen)) => self.found(d, instance, seen, moment),
                None => self.not_found(d, moment),
            },
            State::Leaving { instance, why } => {
                let mut ours = moment.view.instances.iter().flatten().filter(|i| self.host.claim(i).is_some());
                let all_going = ours.all(|i| i.state.is_going());
                let seen = shown.is_some_and(|(o, _)| o == *instance);
                self.leaving(d, seen && all_going, why, moment);
            }
            State::Launched { .. } | State::Armed { .. } | State::Enrolled { .. } | State::Ready { .. } => {
                self.known(d, shown, moment);
            }
        }
    }

    /// The earliest of what was known and of what is shown now. Kept, so that a look that fails forgets nothing.
    fn earliest(&self, view: &View) -> Micros {
        let ours = view.instances.iter().flatten().filter(|i| self.host.claim(i).is_some());
        let tags = ours.map(|i| effective_deadline(self.due, i.tags.get(tags::DEADLINE).map(String::as_str)).0);
        // A schedule of another instance says nothing of this one.
        let schedule =
            view.schedule.iter().flatten().filter(|s| self.instance().is_some_and(|i| *i.id() == s.instance));
        tags.chain(schedule.map(|s| s.at)).fold(self.due, Micros::min)
    }

    /// The instance that is shown and ours by this attempt's token. EC2 makes one per token; should it ever show more,
    /// the others are ended.
    fn shown<'v>(&self, view: &'v View, d: &mut Decision) -> Option<(OwnedInstance, &'v Instance)> {
        let all = view.instances.as_deref().unwrap_or_default();
        let mut ours: Vec<_> = all.iter().filter_map(|i| Some((self.host.claim(i)?, i))).collect();
        let known = match &self.state {
            State::Leaving { instance, .. } => Some(instance),
            _ => self.instance(),
        };
        // One that lives, where none is known.
        ours.sort_by_key(|(o, i)| (i.state.is_going(), o.id().clone()));
        let first = ours.iter().position(|(o, _)| known.is_none_or(|k| k == o)).map(|at| ours.remove(at));
        for (other, _) in ours {
            d.alarms.push(Alarm::new(
                AlarmKind::Twice,
                format!("{other} is a second instance under token {}; it is ended", self.host.token()),
            ));
            d.reap.push((other, Why::Unwanted("a second instance under one token".to_owned())));
        }
        first
    }

    /// Why it should not be, if it should not.
    fn over(&self, Moment { view, now, .. }: Moment<'_>) -> Option<Why> {
        if now >= self.due {
            return Some(Why::Deadline);
        }
        view.unwanted.clone().map(Why::Unwanted)
    }

    /// Why there should not be an instance where there is none, if there should not.
    fn futile(&self, moment: Moment<'_>) -> Option<Why> {
        let late = || self.is_late(moment.now, moment.patience).then_some(Why::TooLate);
        let unaffordable = || moment.view.unaffordable.clone().map(Why::Unaffordable);
        self.over(moment).or_else(late).or_else(unaffordable)
    }

    fn is_late(&self, now: Micros, patience: &Patience) -> bool {
        now.plus_ms(patience.least_life_ms) > self.due
    }

    /// Something is shown under a token of which we did not know what it made.
    fn found(&self, d: &mut Decision, instance: OwnedInstance, seen: &Instance, moment: Moment<'_>) {
        let closing = match &self.state {
            State::Resolving { then: Then::Close(why), .. } => Some(why.clone()),
            _ => None,
        };
        if let Some(why) = self.over(moment).or(closing) {
            Self::give_up(d, instance, why);
        } else if is_up(seen.state) {
            d.launch.state = State::Launched { instance, since: moment.now };
        } else {
            Self::replace(d, instance, Why::Gone);
        }
    }

    fn not_found(&self, d: &mut Decision, moment: Moment<'_>) {
        let Moment { view, now, patience } = moment;
        match (&self.state, self.futile(moment)) {
            (State::Intended { doubt: Doubt::None, .. }, Some(why)) => d.launch.state = State::Closed { why },
            (State::Intended { .. }, Some(why)) => {
                d.launch.state = State::Resolving { since: now, then: Then::Close(why) };
            }
            (State::Intended { doubt, not_before, tries }, None) if now >= *not_before => {
                self.call(d, (*doubt, *not_before, *tries), moment);
            }
            (State::Resolving { since, then }, futile) => {
                let then = match (then, futile) {
                    (Then::NextAttempt(_), Some(why)) => Then::Close(why),
                    (then, _) => then.clone(),
                };
                let settled = view.instances.is_ok() && now >= since.plus_ms(patience.settle_ms);
                d.launch.state = match (settled, then) {
                    (false, then) => State::Resolving { since: *since, then },
                    (true, Then::Close(why)) => State::Closed { why },
                    (true, Then::NextAttempt(error)) => return self.elsewhere(&mut d.launch, &error, now, patience),
                };
            }
            _ => {}
        }
    }

    /// With user data that are fresh; the same again as long as they are.
    fn call(&self, d: &mut Decision, (doubt, not_before, tries): (Doubt, Micros, u32), moment: Moment<'_>) {
        let Moment { now, patience, .. } = moment;
        let fresh = self.prepared.as_ref().filter(|p| now < p.at.plus_ms(patience.fresh_ms));
        match (fresh, doubt) {
            (Some(prepared), _) => {
                let doubt = if doubt == Doubt::None { Doubt::ThisCall } else { Doubt::Earlier };
                d.launch.state = State::Intended { doubt, not_before, tries };
                d.act = Some(Act::Run(Box::new(self.order()), prepared.user_data.clone()));
            }
            // Nothing was called with the token yet.
            (None, Doubt::None) if tries == 0 => {
                d.act = Some(Act::Prepare { host: self.host.clone(), due: self.due });
            }
            // EC2 may remember the token with what it was called with.
            (None, Doubt::None) => self.next_attempt(&mut d.launch, Why::TooManyAttempts, now, patience),
            (None, _) => {
                let text = "no call was answered before the user data were too old to be called with";
                let stale = CloudError::new(FailureKind::Unknown, "RunInstances", text);
                d.launch.state = State::Resolving { since: now, then: Then::NextAttempt(stale) };
            }
        }
    }

    /// The instance is the reaper's. Not shown is not gone: then there is no other one before the deadline.
    fn leaving(&self, d: &mut Decision, going: bool, why: &Why, moment: Moment<'_>) {
        if let Some(why) = self.over(moment) {
            d.launch.state = State::Closed { why };
        } else if going || self.is_late(moment.now, moment.patience) {
            self.next_attempt(&mut d.launch, why.clone(), moment.now, moment.patience);
        }
    }

    /// The instance is known: is it still there, what it should be, and armed?
    fn known(&self, d: &mut Decision, shown: Option<(OwnedInstance, &Instance)>, moment: Moment<'_>) {
        let Moment { view, now, patience } = moment;
        let Some(instance) = self.instance().cloned() else { return };
        if let Some(why) = self.over(moment) {
            return Self::give_up(d, instance, why);
        }
        let shown = shown.filter(|(o, _)| *o == instance).map(|(_, i)| i);
        if shown.is_some_and(|i| !is_up(i.state)) {
            return match self.state {
                // It has work bound to it: whether there is to be another is not this launch's to say.
                State::Ready { .. } => Self::give_up(d, instance, Why::Gone),
                _ => Self::replace(d, instance, Why::Gone),
            };
        }
        let wanted = self.schedule(&instance);
        let armed = matches!(&view.schedule, Ok(Some(s)) if *s == wanted);
        let known = Known { instance, shown, armed };
        if !matches!(self.state, State::Launched { .. }) {
            self.layer_gone(d, view, armed);
            self.attributes_edited(d, &known);
        }
        if !armed && view.schedule.is_ok() {
            let both = d.act.is_some();
            if !(both && self.mend_next) {
                d.act = Some(Act::PutSchedule(Box::new(wanted)));
            }
            d.launch.mend_next = both && !self.mend_next;
        }
        match &self.state {
            State::Launched { since, .. } => self.launched(d, known, *since, moment),
            State::Armed { since, running, .. } => {
                let started = shown.is_some_and(|i| i.state == InstanceState::Running).then_some(now);
                let running = running.or(started);
                if view.enrolled {
                    d.launch.state = State::Enrolled { instance: known.instance, since: now };
                } else if now >= running.unwrap_or(*since).max(view.attentive_since).plus_ms(patience.boot_ms) {
                    Self::replace(d, known.instance, Why::NotEnrolled);
                } else {
                    d.launch.state = State::Armed { instance: known.instance, since: *since, running };
                }
            }
            State::Enrolled { since, .. } => match &view.guest {
                _ if !self.recipe.prove_guest => d.launch.state = State::Ready { instance: known.instance },
                Guest::Booted => d.launch.state = State::Ready { instance: known.instance },
                Guest::Failed(why) => Self::give_up(d, known.instance, Why::NoGuest(why.clone())),
                Guest::NotYet if now >= (*since).max(view.attentive_since).plus_ms(patience.probe_ms) => {
                    Self::give_up(d, known.instance, Why::NoGuest("none booted in time".to_owned()));
                }
                Guest::NotYet => {}
            },
            _ => {}
        }
    }

    fn launched(&self, d: &mut Decision, known: Known<'_>, since: Micros, moment: Moment<'_>) {
        let Moment { view, now, patience } = moment;
        if !known.armed && now >= since.plus_ms(patience.arm_ms) {
            let why = match &view.schedule {
                Err(e) => e.to_string(),
                Ok(None) => "it was made and is not shown".to_owned(),
                Ok(Some(_)) => "what is shown under its name is another one".to_owned(),
            };
            return Self::give_up(d, known.instance, Why::NotArmed(why));
        }
        if let Err(e) = &view.schedule
            && e.kind.remedy() == Remedy::Person
        {
            return Self::give_up(d, known.instance, Why::NotArmed(e.to_string()));
        }
        let late = now >= since.plus_ms(patience.appear_ms);
        match known.shown.map(|i| read_back(&self.order(), i)) {
            Some(ReadBack::Differs(what)) => Self::give_up(d, known.instance, Why::ReadBack(what)),
            Some(ReadBack::NotYet(what)) if late => {
                Self::give_up(d, known.instance, Why::ReadBack(format!("not shown: {what}")));
            }
            None if late => Self::replace(d, known.instance, Why::NeverShown),
            Some(ReadBack::Same) if known.armed => {
                d.launch.state = State::Armed { instance: known.instance, since: now, running: None };
            }
            _ => {}
        }
    }

    /// A schedule that was there is not, or not as it was: it is made again, and someone should know.
    fn layer_gone(&self, d: &mut Decision, view: &View, armed: bool) {
        if !armed {
            let what = match &view.schedule {
                Ok(None) => "is gone; it is made again".to_owned(),
                Ok(Some(_)) => "is not as it should be, or its deadline was shortened; it is made anew".to_owned(),
                Err(e) => format!("cannot be looked at: {e}"),
            };
            let message = format!("the schedule that ends host {} {what}", self.host.host());
            d.alarms.push(Alarm::new(AlarmKind::LayerGone, message));
        }
    }

    /// Someone switched protection on, or shutting down off, after it was read back: it is put right.
    fn attributes_edited(&self, d: &mut Decision, known: &Known<'_>) {
        let Some(seen) = known.shown else { return };
        if let Some(profile) = &seen.profile
            && *profile != self.recipe.profile
        {
            let text = format!("{} bears profile {profile} where {} was ordered", known.instance, self.recipe.profile);
            d.alarms.push(Alarm::new(AlarmKind::LayerGone, format!("{text}; find out who changed it")));
        }
        let Some(Ok(attributes)) = seen.attributes else { return };
        let undying = attributes.undying();
        if undying.is_empty() {
            return;
        }
        let text = format!("of {} {} since it was launched", known.instance, undying.join(" and "));
        d.alarms.push(Alarm::new(AlarmKind::Protected, format!("{text}; it is put right; find out who changed it")));
        d.act = Some(Act::Mend(known.instance.kill_id(), attributes));
    }

    /// `before`: the deadline that counted so far. A tag that shortens it is told of once.
    fn tags_edited(&self, d: &mut Decision, seen: Option<&Instance>, before: Micros) {
        let Some(seen) = seen.filter(|i| !i.tags.is_empty()) else { return };
        let tag = seen.tags.get(tags::DEADLINE).map(String::as_str);
        let (_, says) = effective_deadline(before, tag);
        if says != TagSays::Same {
            let due = instant_text(self.due);
            let message = format!("the deadline's tag of {} is {tag:?}; what counts is {due}", seen.id);
            d.alarms.push(Alarm::new(AlarmKind::TagEdited, message));
        }
    }

    /// The instance is the reaper's, and there is no other one.
    fn give_up(d: &mut Decision, instance: OwnedInstance, why: Why) {
        d.act = None;
        d.reap.push((instance, why.clone()));
        d.launch.state = State::Closed { why };
    }

    /// The instance is the reaper's, and there may be another one once it is seen going. If this look shows it going already,
    /// so does the next.
    fn replace(d: &mut Decision, instance: OwnedInstance, why: Why) {
        d.act = None;
        d.reap.push((instance.clone(), why.clone()));
        d.launch.state = State::Leaving { instance, why };
    }

    /// The next token, at the same place. Only after the one before is known to have made nothing that lives.
    fn next_attempt(&self, launch: &mut Launch, otherwise: Why, now: Micros, patience: &Patience) {
        let late = self.is_late(now, patience);
        match self.host.relaunch().filter(|h| !late && h.attempt() <= patience.attempts) {
            Some(host) => {
                launch.host = host;
                launch.from = now;
                launch.prepared = None;
                let not_before = now.plus_ms(patience.retry_ms);
                launch.state = State::Intended { doubt: Doubt::None, not_before, tries: 0 };
            }
            None => launch.state = State::Closed { why: otherwise },
        }
    }

    /// The next token at the next place; at the first again, after a wait that grows with each time round.
    fn elsewhere(&self, launch: &mut Launch, error: &CloudError, now: Micros, patience: &Patience) {
        let otherwise = match error.kind {
            FailureKind::Capacity => Why::NoCapacity(error.clone()),
            _ => Why::TooManyAttempts,
        };
        self.next_attempt(launch, otherwise, now, patience);
        launch.place = self.place + 1;
        let round = launch.place / self.recipe.placements.len();
        if launch.place.is_multiple_of(self.recipe.placements.len())
            && let State::Intended { not_before, .. } = &mut launch.state
        {
            let tries = u32::try_from(round).unwrap_or(u32::MAX);
            *not_before = now.plus_ms(backoff_ms(tries, patience.retry_ms * 8, patience.retry_ms * 128));
        }
    }

    /// What came of the act of the last decision; to be stored, with the reaps, at once.
    pub fn heard(&self, reply: &Reply, now: Micros, patience: &Patience) -> Decision {
        let mut d = Decision { launch: self.clone(), reap: Vec::new(), act: None, alarms: Vec::new() };
        match (&self.state, reply) {
            (State::Intended { .. }, Reply::Ran(Ok(seen))) => {
                // One that does not bear our token is not ours, whatever the call was; the next look tells.
                if let Some(instance) = self.host.claim(seen) {
                    d.launch.state = State::Launched { instance, since: now };
                }
            }
            (State::Intended { doubt: Doubt::None, tries: 0, .. }, Reply::Prepared(Ok(user_data))) => {
                d.launch.prepared = Some(Prepared { user_data: user_data.clone(), at: now });
            }
            (State::Intended { doubt: Doubt::None, tries: 0, .. }, Reply::Prepared(Err(why))) => {
                // Not a try of the call.
                let not_before = now.plus_ms(patience.retry_ms * 8);
                d.launch.state = State::Intended { doubt: Doubt::None, not_before, tries: 0 };
                let text = format!("the user data of host {} cannot be made: {why}; it is tried on", self.host.host());
                d.alarms.push(Alarm::new(AlarmKind::Powerless, text));
            }
            (State::Intended { doubt, tries, .. }, Reply::Ran(Err(e))) => {
                self.not_run(&mut d, e, (*doubt, *tries), now, patience);
            }
            (State::Launched { instance, .. }, Reply::Scheduled(Err(e))) if e.kind.remedy() == Remedy::Person => {
                Self::give_up(&mut d, instance.clone(), Why::NotArmed(e.to_string()));
            }
            (_, Reply::Scheduled(Err(e)) | Reply::Mended(Err(e))) if e.kind.remedy() == Remedy::Person => {
                d.alarms.push(Alarm::new(AlarmKind::Powerless, e.to_string()));
            }
            _ => {}
        }
        d.launch.forget();
        d
    }

    fn not_run(
        &self,
        d: &mut Decision,
        e: &CloudError,
        (doubt, tries): (Doubt, u32),
        now: Micros,
        patience: &Patience,
    ) {
        let certain = doubt != Doubt::Earlier && e.kind.effect() == Effect::None;
        match (e.kind.remedy(), certain) {
            (Remedy::Again, certain) => {
                let doubt = if certain { Doubt::None } else { Doubt::Earlier };
                let wait_ms = backoff_ms(tries, patience.retry_ms, patience.retry_ms * 32);
                let not_before = now.plus_ms(wait_ms);
                d.launch.state = State::Intended { doubt, not_before, tries: tries.saturating_add(1) };
            }
            (Remedy::Elsewhere, true) => self.elsewhere(&mut d.launch, e, now, patience),
            (Remedy::Person, true) => d.launch.state = State::Closed { why: Why::Refused(e.clone()) },
            // Refused now, but a call before may have been taken; or the answer itself says that there is something.
            (Remedy::Elsewhere | Remedy::Look | Remedy::Unprotect, _) => {
                d.launch.state = State::Resolving { since: now, then: Then::NextAttempt(e.clone()) };
            }
            (Remedy::Person, false) => {
                d.launch.state = State::Resolving { since: now, then: Then::Close(Why::Refused(e.clone())) };
            }
        }
    }
}

/// Pending counts: it is on its way. A stopped one is of no use, and is ended.
fn is_up(state: InstanceState) -> bool {
    matches!(state, InstanceState::Pending | InstanceState::Running)
}
