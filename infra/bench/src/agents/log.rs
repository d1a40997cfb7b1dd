//! What a simulated agent has to say of one run: numbered records that stay until the coordinator has committed them.
//! Its memory is what the real agent's spool is on disk.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockKind, Body, Record},
    ids::{Generation, HostId, RunId},
    wire::latest::SpoolState,
};
use serde::Serialize;

use super::script::Script;

#[derive(Debug)]
pub(super) struct RunLog {
    pub run: RunId,
    registration: Sha256,
    pub script: Option<Script>,
    records: Vec<Record>,
    /// Records up to here were committed and are forgotten.
    pub acked: u64,
    pub prepared: bool,
    pub closed: bool,
    ended: Vec<(BlockKind, u32)>,
    /// When the first record was committed.
    pub acknowledged: Option<Micros>,
}

/// As `EvidenceBatch` is on the wire, with records that stay where they are.
#[derive(Debug, Serialize)]
pub(super) struct Batch<'r> {
    pub run: RunId,
    pub records: &'r [Record],
}

/// A frame of evidence carries about this much.
const BATCH_BYTES: usize = 256 << 10;

impl RunLog {
    pub fn new(run: RunId, registration: Sha256) -> Self {
        Self {
            run,
            registration,
            script: None,
            records: Vec::new(),
            acked: 0,
            prepared: false,
            closed: false,
            ended: Vec::new(),
            acknowledged: None,
        }
    }

    pub fn last(&self) -> u64 {
        self.acked + self.records.len() as u64
    }

    pub fn state(&self) -> SpoolState {
        SpoolState { run: self.run, last_seq: self.last(), closed: self.closed }
    }

    pub fn ended(&self, kind: BlockKind, block: u32) -> bool {
        self.ended.contains(&(kind, block))
    }

    pub fn push(&mut self, host: &HostId, generation: Generation, at: Micros, body: Body) {
        match &body {
            Body::Preflight(_) => self.prepared = true,
            Body::BlockEnded(b) => self.ended.push((b.kind, b.block)),
            Body::Closed(_) => self.closed = true,
            _ => {}
        }
        let (seq, registration, run) = (self.last() + 1, self.registration, self.run);
        self.records.push(Record { registration, run, host: host.clone(), seq, at, generation, body });
    }

    /// The next batch that is not committed; empty if there is none.
    pub fn unsent(&self) -> Batch<'_> {
        let mut bytes = 0;
        let fits = self.records.iter().take_while(|r| {
            let fits = bytes < BATCH_BYTES;
            bytes += size(r);
            fits
        });
        Batch { run: self.run, records: &self.records[..fits.count()] }
    }

    /// The coordinator has everything up to `through`.
    pub fn committed(&mut self, through: u64, at: Micros) {
        let done = usize::try_from(through.saturating_sub(self.acked)).unwrap_or(usize::MAX).min(self.records.len());
        self.records.drain(..done);
        self.acked += done as u64;
        if done > 0 {
            self.acknowledged.get_or_insert(at);
        }
    }
}

/// About how many bytes a record takes in a frame: only logs are long.
fn size(record: &Record) -> usize {
    match &record.body {
        Body::Log(log) => log.text.len() + 200,
        _ => 600,
    }
}
