//! Rules that need more than the file: which ids are taken, which hosts and workloads there are, what time it is.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use super::{
    diagnostic::{BadSpec, Faults},
    lower::Places,
};
use crate::{
    clock::Micros,
    digest::Sha256,
    experiment::Experiment,
    ids::{ExperimentId, HostId, WorkloadName},
};

/// An id that was used before this program kept the register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    pub id: ExperimentId,
    pub title: String,
}

/// The ids of `docs/experiments/reserved.toml`, which is part of the program.
pub fn reserved() -> Vec<Reserved> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        experiment: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        id: ExperimentId,
        title: String,
    }
    let file: File = toml::from_str(include_str!("../../../docs/experiments/reserved.toml"))
        .expect("the file is compiled in and a test reads it");
    file.experiment.into_iter().map(|e| Reserved { id: e.id, title: e.title }).collect()
}

/// What the coordinator knows when it judges a spec.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub now: Micros,
    /// Ids registered here, with the digest of their latest registration and of its spec's experiment.
    pub registered: BTreeMap<ExperimentId, Sha256>,
    /// The user said that this is a later version of a registered experiment.
    pub amend: bool,
    pub hosts: BTreeSet<HostId>,
    /// Digests by name, latest last.
    pub workloads: BTreeMap<WorkloadName, Vec<Sha256>>,
}

/// A spec that is sound by itself, with the places of what `check` judges.
#[derive(Clone, Debug)]
pub struct Parsed {
    pub(super) file: String,
    pub(super) source: String,
    pub experiment: Experiment,
    pub(super) places: Places,
}

impl Parsed {
    pub fn check(&self, known: &Known) -> Result<(), BadSpec> {
        let mut faults = Faults::new(&self.source);
        self.check_id(known, &mut faults);
        self.check_hosts(known, &mut faults);
        self.check_workload(known, &mut faults);
        if let (Some(at), Some(span)) = (self.experiment.not_after, &self.places.not_after)
            && at <= known.now
        {
            faults.add(
                "deadline-past",
                span.clone(),
                "not_after is in the past: no run could start",
                "give a time to come, in UTC, or leave not_after out",
            );
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.into_bad_spec(&self.file)) }
    }

    fn check_id(&self, known: &Known, faults: &mut Faults<'_>) {
        let id = self.experiment.id;
        let span = self.places.id.clone();
        let reserved = reserved();
        let free = (1..1000)
            .map(ExperimentId)
            .find(|n| !known.registered.contains_key(n) && !reserved.iter().any(|r| r.id == *n));
        let free = free.map_or_else(|| "none is free".to_owned(), |n| format!("the next free id is {n}"));
        if let Some(r) = reserved.iter().find(|r| r.id == id) {
            let message = format!("{id} is taken: {:?}", r.title);
            faults.add("taken-id", span, message, format!("ids are never reused; {free}"));
        } else if let Some(sha) = known.registered.get(&id)
            && !known.amend
        {
            let same = crate::experiment::Registration::freeze(self.pinned(known), known.now);
            if same.is_ok_and(|r| r.sha256 == *sha) {
                return;
            }
            faults.add(
                "taken-id",
                span,
                format!("{id} is registered already with other content, as {}", sha.short()),
                format!("ids are never reused; {free}. If this is a later version of the same experiment, register it with --amend: both registrations are kept"),
            );
        }
    }

    fn check_hosts(&self, known: &Known, faults: &mut Faults<'_>) {
        for (host, span) in self.experiment.hosts.names.iter().zip(&self.places.hosts) {
            if !known.hosts.contains(host) {
                let have: Vec<_> = known.hosts.iter().map(|h| h.as_str()).collect();
                let have = if have.is_empty() {
                    "there is none yet".to_owned()
                } else {
                    format!("there are {}", have.join(", "))
                };
                faults.add(
                    "absent-host",
                    span.clone(),
                    format!("there is no host {host}"),
                    format!("{have}; drumsctl host add {host} makes a token for it"),
                );
            }
        }
    }

    fn check_workload(&self, known: &Known, faults: &mut Faults<'_>) {
        let workload = &self.experiment.workload;
        match (known.workloads.get(&workload.name), workload.sha256) {
            (None, _) => {
                let have: Vec<_> = known.workloads.keys().map(|w| w.as_str()).collect();
                let have = if have.is_empty() {
                    "there is none yet".to_owned()
                } else {
                    format!("there are {}", have.join(", "))
                };
                faults.add(
                    "absent-workload",
                    self.places.workload.clone(),
                    format!("there is no workload {}", workload.name),
                    format!("{have}; drumsctl workload add DIR stores one"),
                );
            }
            (Some(have), Some(want)) if !have.contains(&want) => {
                let have: Vec<_> = have.iter().map(ToString::to_string).collect();
                faults.add(
                    "wrong-digest",
                    self.places.workload_sha256.clone().unwrap_or_else(|| self.places.workload.clone()),
                    format!("workload {} was never stored with digest {}", workload.name, want.short()),
                    format!("stored are {}", have.join(", ")),
                );
            }
            _ => {}
        }
    }

    /// The experiment with its workload's digest filled in: the latest stored under that name when the spec names none.
    pub fn pinned(&self, known: &Known) -> Experiment {
        let mut experiment = self.experiment.clone();
        if experiment.workload.sha256.is_none() {
            experiment.workload.sha256 = known.workloads.get(&experiment.workload.name).and_then(|d| d.last().copied());
        }
        experiment
    }

    pub fn id_span(&self) -> Range<usize> {
        self.places.id.clone()
    }
}
