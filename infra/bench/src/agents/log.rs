//! What a simulated agent has to say of one run: numbered records that stay until the coordinator has committed them.
//! Its memory is what the real agent's spool is on disk.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    evidence::{BlockKind, Body, Record},
    ids::{Generation, HostId, RunId},
    wire::latest::SpoolState,
};

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
    /// When everything that was written was committed, last.
    pub settled_at: Micros,
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
            settled_at: Micros(0),
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

    /// The next batch after `cursor`; empty if there is none.
    pub fn after(&self, cursor: u64) -> Vec<Record> {
        let from = usize::try_from(cursor.saturating_sub(self.acked)).unwrap_or(usize::MAX).min(self.records.len());
        let mut bytes = 0;
        let fits = |r: &&Record| {
            let fits = bytes < BATCH_BYTES;
            bytes += size(r);
            fits
        };
        self.records[from..].iter().take_while(fits).cloned().collect()
    }

    /// The coordinator has everything up to `through`.
    pub fn committed(&mut self, through: u64, at: Micros) {
        let done = usize::try_from(through.saturating_sub(self.acked)).unwrap_or(usize::MAX).min(self.records.len());
        self.records.drain(..done);
        self.acked += done as u64;
        if self.records.is_empty() {
            self.settled_at = at;
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
