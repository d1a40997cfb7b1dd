//! Every value in run order, with what became of it: what plots and CSV files show.

use drums_common::{
    evidence::BlockKind,
    experiment::{Experiment, Metric},
    ids::{ArmName, HostId, RunId},
};
use serde::{Deserialize, Serialize};

use crate::{
    gates::{BlockFate, EffectiveState, JudgedRun, Taken},
    value::Value,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    Counted,
    /// Plus infinity, counted.
    Failed,
    Voided,
    /// Of a run that is not pooled, a broken block, or a block beyond the registered number.
    NotCounted,
    /// Due, and not there.
    Lost,
    WarmUp,
}

impl Mark {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counted => "counted",
            Self::Failed => "failed",
            Self::Voided => "voided",
            Self::NotCounted => "not counted",
            Self::Lost => "lost",
            Self::WarmUp => "warm-up",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub run: RunId,
    pub run_number: u32,
    pub host: HostId,
    pub block: u32,
    pub position: u32,
    pub arm: ArmName,
    pub metric: Metric,
    /// None where nothing was measured (failed or lost).
    pub value: Option<Value>,
    pub unit: String,
    pub template_build: u32,
    pub session: String,
    pub intended_start_us: Option<u64>,
    pub mark: Mark,
    pub note: String,
}

/// Points of all runs, in order of run, then of time on each machine's clock as far as it is known, then of host and
/// block.
pub fn points(experiment: &Experiment, runs: &[JudgedRun<'_, '_>]) -> Vec<Point> {
    let mut out = Vec::new();
    for run in runs {
        let mut of_run = Vec::new();
        for b in &run.blocks {
            for (row, judged) in b.attempt.rows.iter().zip(&b.rows) {
                for (metric, taken) in &judged.values {
                    let sample = row.samples.get(metric).and_then(|s| s.first());
                    let mark = match (&b.fate, taken) {
                        (BlockFate::Voided(_), _) => Mark::Voided,
                        (_, Taken::Lost) => Mark::Lost,
                        (BlockFate::Counted, Taken::Failed) if run.state == EffectiveState::Pooled => Mark::Failed,
                        (BlockFate::Counted, Taken::Valid(_)) if run.state == EffectiveState::Pooled => Mark::Counted,
                        _ => Mark::NotCounted,
                    };
                    let note = match &b.fate {
                        BlockFate::Voided(why) => why.join("; "),
                        BlockFate::Broken(why) => why.clone(),
                        _ => judged.failures.join("; "),
                    };
                    of_run.push(Point {
                        run: run.evidence.meta.run,
                        run_number: run.evidence.meta.number,
                        host: b.attempt.host.clone(),
                        block: b.attempt.started.block,
                        position: judged.position as u32,
                        arm: experiment.arms[judged.arm].name.clone(),
                        metric: *metric,
                        value: match taken {
                            Taken::Valid(v) => Some(Value::new(*v)),
                            _ => None,
                        },
                        unit: metric.unit().to_owned(),
                        template_build: b.attempt.started.template_build,
                        session: row.outcome().map(|o| o.session.to_string()).unwrap_or_default(),
                        intended_start_us: sample.map(|s| s.intended_start_us),
                        mark,
                        note,
                    });
                }
            }
        }
        for (host, h) in &run.evidence.hosts {
            for a in h.attempts.iter().filter(|a| a.started.kind == BlockKind::WarmUp) {
                for row in &a.rows {
                    for (metric, samples) in &row.samples {
                        of_run.extend(samples.iter().map(|s| Point {
                            run: run.evidence.meta.run,
                            run_number: run.evidence.meta.number,
                            host: (*host).clone(),
                            block: a.started.block,
                            position: row.position as u32,
                            arm: s.arm.clone(),
                            metric: *metric,
                            value: Some(Value::new(s.value)),
                            unit: s.unit.clone(),
                            template_build: s.template_build,
                            session: s.session.to_string(),
                            intended_start_us: Some(s.intended_start_us),
                            mark: Mark::WarmUp,
                            note: String::new(),
                        }));
                    }
                }
            }
        }
        // A failed session has no start; it stands where its block and position put it.
        of_run.sort_by(|a, b| {
            let key = |p: &Point| (p.mark != Mark::WarmUp, p.block, p.host.clone(), p.position);
            key(a).cmp(&key(b))
        });
        out.extend(of_run);
    }
    out
}
