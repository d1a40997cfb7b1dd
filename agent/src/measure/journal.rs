//! The measuring side's pen: numbers, generations and times on records, commits outside timed windows, and the run's
//! `Progress` kept in step with what was written.

use std::sync::Arc;

use drums_common::{
    clock::Clock,
    evidence::{Body, Log},
    ids::Generation,
};

use super::progress::Progress;
use crate::{
    net::Link,
    spool::{RunSpool, SpoolError, SpoolWriter},
};

/// Target of log records that name a leaked resource.
pub const LEAK: &str = "leak";
/// Longer log texts are cut.
const MAX_TEXT: usize = 64 * 1024;
const CUT: &str = " ... (cut)";

/// One run's journal on this host.
pub struct Journal {
    writer: SpoolWriter,
    link: Link,
    clock: Arc<dyn Clock>,
    progress: Progress,
    /// Of the newest record: what an agent writes after a restart and before its welcome is still said under it.
    generation: Generation,
    /// Something waits for a commit.
    buffered: bool,
}

impl Journal {
    /// Opens the run's spool for writing and reads what is in it.
    pub fn open(spool: &Arc<RunSpool>, link: Link, clock: Arc<dyn Clock>) -> Result<Self, SpoolError> {
        let records = spool.records()?;
        let progress = Progress::of(&records);
        let generation = records.last().map(|r| r.generation).unwrap_or_default();
        Ok(Self { writer: spool.writer()?, link, clock, progress, generation, buffered: false })
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Refuses when nothing may be begun for want of disk space.
    pub fn room(&self) -> Result<(), SpoolError> {
        self.writer.room()
    }

    /// Buffers a record. Nothing of it is durable before `commit`.
    pub fn record(&mut self, body: Body) -> Result<(), SpoolError> {
        if self.writer.commit_due() {
            self.commit()?;
        }
        let written = body.clone();
        self.generation = self.generation.max(self.link.generation());
        self.writer.append(self.generation, self.clock.now(), body)?;
        self.progress.apply(&written);
        self.buffered = true;
        Ok(())
    }

    pub fn log(&mut self, level: &str, target: &str, text: &str) -> Result<(), SpoolError> {
        self.record(Body::Log(Log { level: level.to_owned(), target: target.to_owned(), text: cut(text) }))
    }

    /// Notes what could not be undone, one record each: `Closed` repeats them at the end, also after a restart.
    pub fn leaks(&mut self, leaked: &[String]) -> Result<(), SpoolError> {
        for l in leaked {
            tracing::error!(resource = %l, "could not be undone; drums-agent audit tries again");
            self.log("error", LEAK, l)?;
        }
        Ok(())
    }

    /// Waits for the disk. Never inside a timed window.
    pub fn commit(&mut self) -> Result<(), SpoolError> {
        if self.buffered {
            debug_assert!(!self.link.is_quiet(), "evidence is written in a timed window");
            self.writer.commit()?;
            self.buffered = false;
            self.link.progressed();
        }
        Ok(())
    }
}

fn cut(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let end = (0..=MAX_TEXT - CUT.len()).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    format!("{}{CUT}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_with_a_mark_at_a_character() {
        assert_eq!(cut("short"), "short");
        let long = cut(&"é".repeat(MAX_TEXT));
        assert!(long.len() <= MAX_TEXT && long.ends_with(CUT));
    }
}
