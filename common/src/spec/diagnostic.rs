//! What is wrong with a spec: where, what was expected, what to do.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

/// One fault of a spec. Serialisable because the coordinator, which alone knows hosts, workloads and taken ids, answers
/// with the same positions that the local reader gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Stable kebab-case word.
    pub code: String,
    /// Bytes of the source that it is about; empty at 0 when it is about the file as a whole.
    pub span: Range<usize>,
    /// 1-based; 0 when the fault is about the file as a whole.
    pub line: usize,
    /// 1-based, in characters.
    pub column: usize,
    pub message: String,
    /// What was expected and what to do.
    pub help: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}: ", self.line, self.column)?;
        }
        write!(f, "{} [{}]", self.message, self.code)?;
        if !self.help.is_empty() {
            write!(f, "; {}", self.help)?;
        }
        Ok(())
    }
}

/// Every fault found in one spec, in order of place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadSpec {
    /// As the user named it.
    pub file: String,
    /// The source as far as it is text, for pointing into it.
    pub source: String,
    pub faults: Vec<Fault>,
    /// Faults beyond those: nobody reads thousands.
    #[serde(default)]
    pub more: usize,
}

/// Faults that one answer lists.
pub const MAX_FAULTS: usize = 50;
/// Characters of a message; what it quotes may be the whole file.
const MAX_MESSAGE: usize = 400;

impl fmt::Display for BadSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.faults.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:{fault}", self.file)?;
        }
        if self.more > 0 {
            write!(f, "\nand {} more", self.more)?;
        }
        Ok(())
    }
}
impl std::error::Error for BadSpec {}

impl BadSpec {
    /// A fault of the file as a whole.
    pub fn whole(file: &str, code: &str, message: String, help: &str) -> Self {
        let fault = Fault { code: code.to_owned(), span: 0..0, line: 0, column: 0, message, help: help.to_owned() };
        Self { file: file.to_owned(), source: String::new(), faults: vec![fault], more: 0 }
    }
}

/// Collects faults against one source.
pub(super) struct Faults<'s> {
    source: &'s str,
    /// Where lines begin.
    lines: Vec<usize>,
    list: Vec<Fault>,
    more: usize,
}

impl<'s> Faults<'s> {
    pub(super) fn new(source: &'s str) -> Self {
        let lines = std::iter::once(0).chain(source.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Self { source, lines, list: Vec::new(), more: 0 }
    }

    pub(super) fn add(&mut self, code: &str, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        if self.list.len() == MAX_FAULTS {
            self.more += 1;
            return;
        }
        let (line, column) = self.place(span.start);
        let (message, help) = (cut(message.into()), cut(help.into()));
        let fault = Fault { code: code.to_owned(), span, line, column, message, help };
        if !self.list.contains(&fault) {
            self.list.push(fault);
        }
    }

    /// 1-based line and column (in characters) of a byte offset.
    fn place(&self, offset: usize) -> (usize, usize) {
        let offset = offset.min(self.source.len());
        let line = self.lines.partition_point(|start| *start <= offset);
        let before = self.source.get(self.lines[line - 1]..offset).unwrap_or_default();
        (line, before.chars().count() + 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn into_bad_spec(mut self, file: &str) -> BadSpec {
        self.list.sort_by_key(|f| f.span.start);
        BadSpec { file: file.to_owned(), source: self.source.to_owned(), faults: self.list, more: self.more }
    }
}

fn cut(text: String) -> String {
    match text.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
