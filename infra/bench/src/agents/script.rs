//! What a simulated agent observed: records of whole blocks, made up as the analysis' own tests make them.

use std::collections::BTreeMap;

use drums_analysis::synthetic::Scenario;
use drums_common::{
    evidence::{BlockKind, Body, Preflight},
    experiment::Experiment,
    ids::HostId,
    wire::latest::Grant,
};

/// All that one host will have to say of a run.
#[derive(Debug, Default)]
pub(super) struct Script {
    /// Begins with `BlockStarted` and ends with `BlockEnded`.
    blocks: BTreeMap<(bool, u32), Vec<Body>>,
    /// What comes between the preflight and the first block.
    templates: Vec<Body>,
}

fn scenario(experiment: &Experiment, host: &HostId, machine: u32) -> Scenario {
    let mut scenario = Scenario::exp028(u64::from(machine));
    let medians = experiment.arms.iter().map(|a| (a.name.clone(), 20.0));
    scenario.medians_ms = medians.collect();
    scenario.experiment = experiment.clone();
    scenario.hosts = vec![(host.clone(), machine)];
    scenario
}

/// What a host is, for its hello and for the first record of each run.
pub fn preflight(experiment: &Experiment, host: &HostId, machine: u32) -> Preflight {
    let records = scenario(experiment, host, machine).run(1).1;
    let found = records.into_iter().find_map(|r| match r.body {
        Body::Preflight(p) => Some(p),
        _ => None,
    });
    found.expect("a run of the scenario begins with a preflight")
}

impl Script {
    pub(super) fn new(experiment: &Experiment, host: &HostId, machine: u32) -> Self {
        let mut script = Self::default();
        let mut block: Option<((bool, u32), Vec<Body>)> = None;
        for record in scenario(experiment, host, machine).run(1).1 {
            let body = record.body;
            if let Body::BlockStarted(b) = &body {
                block = Some(((b.kind == BlockKind::Measured, b.block), Vec::new()));
            }
            let ended = matches!(body, Body::BlockEnded(_));
            match &mut block {
                Some((_, bodies)) => bodies.push(body),
                None if matches!(body, Body::Template(_)) => script.templates.push(body),
                None => {}
            }
            if ended && let Some((key, bodies)) = block.take() {
                script.blocks.insert(key, bodies);
            }
        }
        script
    }

    /// What is built before the first block; nothing the second time.
    pub(super) fn templates(&mut self) -> Vec<Body> {
        std::mem::take(&mut self.templates)
    }

    /// A granted block's records; none if the registration has no such block.
    pub(super) fn block(&self, grant: &Grant) -> Option<&[Body]> {
        self.blocks.get(&(grant.kind == BlockKind::Measured, grant.block)).map(Vec::as_slice)
    }
}
