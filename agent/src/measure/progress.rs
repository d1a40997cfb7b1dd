//! How far a run is on this host, as a fold over its records: the same after a restart as before the crash.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{
    digest::Sha256,
    evidence::{BlockEnded, BlockKind, BlockResult, Body, Environment, Identity, Record},
    experiment::{Control, Experiment, Metric},
    ids::ArmName,
};

use super::journal::LEAK;

/// What the records so far amount to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Which agent, by digest, said last what the host is.
    pub preflight: Option<Sha256>,
    pub closed: bool,
    /// Blocks that began, whether or not they ended; each kind has numbers of its own.
    pub started: BTreeSet<BlockKey>,
    /// The block that began and has not ended.
    pub open: Option<(BlockKind, u32)>,
    /// Create-to-ready of every valid warm-up session, by arm, milliseconds.
    pub warmup_ms: BTreeMap<ArmName, Vec<f64>>,
    /// Who every session and template of this run said it was, and what to call it.
    pub identities: Vec<(String, Identity)>,
    /// What could not be undone so far.
    pub leaked: BTreeSet<String>,
}

/// A block of a run: measured or not, and its number.
pub type BlockKey = (bool, u32);

pub fn block_key(kind: BlockKind, block: u32) -> BlockKey {
    (kind == BlockKind::Measured, block)
}

impl Progress {
    pub fn of(records: &[Record]) -> Self {
        let mut out = Self::default();
        for r in records {
            out.apply(&r.body);
        }
        out
    }

    pub fn apply(&mut self, body: &Body) {
        match body {
            Body::Preflight(p) => self.preflight = Some(p.agent_sha256),
            Body::Template(t) => {
                self.identities.push((format!("template {} of {}", t.build, t.arm), t.identity.clone()));
            }
            Body::BlockStarted(b) => {
                self.started.insert(block_key(b.kind, b.block));
                self.open = Some((b.kind, b.block));
            }
            Body::Sample(s) => {
                if s.kind == BlockKind::WarmUp && s.metric == Metric::CreateToReady {
                    self.warmup_ms.entry(s.arm.clone()).or_default().push(s.value);
                }
            }
            Body::Outcome(o) => {
                let who = |what: &str| format!("{what}{} of {} in block {}", o.session, o.arm, o.block);
                self.identities.push((who(""), o.identity.clone()));
                self.identities.push((who("the successor of "), o.identity_after_reset.clone()));
            }
            Body::BlockEnded(b) => {
                if self.open == Some((b.kind, b.block)) {
                    self.open = None;
                }
            }
            Body::Closed(_) => self.closed = true,
            Body::Log(l) => {
                if l.target == LEAK {
                    self.leaked.insert(l.text.clone());
                }
            }
            Body::Timeline(_) | Body::Fidelity(_) => {}
        }
    }

    /// What a restarted agent says of the block that it died in.
    pub fn interrupted(&self, why: &str) -> Option<BlockEnded> {
        let (kind, block) = self.open?;
        Some(BlockEnded {
            block,
            kind,
            result: BlockResult::Interrupted(why.to_owned()),
            // Nothing was read at its end, and `settled: false` with the reason says so.
            environment: Environment { unsettled: vec![format!("no reading: {why}")], ..Environment::default() },
        })
    }

    /// The delay of every delayed arm that can be told from the warm-up so far, milliseconds.
    pub fn delays_ms(&self, experiment: &Experiment) -> BTreeMap<ArmName, f64> {
        experiment
            .arms
            .iter()
            .filter_map(|a| match &a.control {
                Some(Control::Delayed { arm, fraction }) => {
                    Some((a.name.clone(), fraction * median(self.warmup_ms.get(arm)?)?))
                }
                _ => None,
            })
            .collect()
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(v[n / 2]),
        _ => Some(f64::midpoint(v[n / 2 - 1], v[n / 2])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 3.0, 5.0]), Some(4.0));
    }
}
