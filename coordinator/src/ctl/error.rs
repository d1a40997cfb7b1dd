//! Why a command did not do what it was told, and what the process exits with.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use drums_common::note;
use drums_common::{
    failure::{Failure, FailureClass},
    say::{self, Unsaid},
    spec::{BadSpec, Fault},
    telemetry::chain,
};
use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, NamedSource, Report, Severity};
use serde_json::{Value, json};

use super::output;

pub(super) const BAD_INPUT: u8 = 2;
pub(super) const UNREACHABLE: u8 = 3;

#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    #[error(transparent)]
    Unsaid(#[from] Unsaid),
    #[error("cannot start: the runtime failed")]
    Runtime(#[source] io::Error),
    /// What the user gave cannot be used.
    #[error("{message}")]
    BadInput { message: String, help: String },
    /// Faults with places.
    #[error("the spec is not acceptable")]
    BadSpec(Box<BadSpec>),
    #[error("cannot reach the coordinator at {target}")]
    Unreachable {
        target: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
        help: String,
    },
    /// The coordinator's answer.
    #[error("{0}")]
    Refused(Failure),
    #[error("the coordinator's answer to {what} cannot be read")]
    Answer {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("cannot {attempt} {}", path.display())]
    File {
        attempt: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{attempt} failed")]
    Failed {
        attempt: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
        help: String,
    },
}

impl CtlError {
    pub(super) fn bad(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::BadInput { message: message.into(), help: help.into() }
    }

    pub(super) fn failed(
        attempt: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
        help: impl Into<String>,
    ) -> Self {
        Self::Failed { attempt: attempt.into(), source: Box::new(source), help: help.into() }
    }

    pub(super) fn file(attempt: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { attempt, path, source }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::BadInput { .. } | Self::BadSpec(_) => BAD_INPUT,
            Self::Unreachable { .. } => UNREACHABLE,
            Self::Unsaid(e) if e.reader_gone() => say::READER_GONE,
            Self::Refused(f) if matches!(f.class, FailureClass::Refused) => BAD_INPUT,
            // A file that the user named and that cannot be read is input; one that we cannot write is not.
            Self::File { attempt: "read", .. } => BAD_INPUT,
            _ => 1,
        }
    }

    /// The same may be answered in a while.
    pub(super) fn passes(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused(f) => f.class == FailureClass::Transient,
            _ => false,
        }
    }

    fn help(&self) -> String {
        match self {
            Self::BadInput { help, .. } | Self::Unreachable { help, .. } | Self::Failed { help, .. } => help.clone(),
            Self::Refused(f) => f.help.clone(),
            Self::Answer { .. } => "drumsctl and the coordinator may be of different versions".to_owned(),
            Self::File { attempt: "read", .. } => "is the path right, and may you read it?".to_owned(),
            Self::File { .. } => "is the disk full, and may you write there?".to_owned(),
            Self::Unsaid(_) | Self::Runtime(_) | Self::BadSpec(_) => String::new(),
        }
    }

    /// One word for scripts; the coordinator's own where the answer is the coordinator's.
    fn code(&self) -> &str {
        match self {
            Self::Refused(f) => &f.code,
            Self::Unsaid(_) => "unsaid",
            Self::Runtime(_) => "runtime",
            Self::BadInput { .. } => "bad-input",
            Self::BadSpec(_) => "bad-spec",
            Self::Unreachable { .. } => "unreachable",
            Self::Answer { .. } => "answer",
            Self::File { .. } => "file",
            Self::Failed { .. } => "failed",
        }
    }

    /// What went wrong, in one line.
    fn message(&self) -> String {
        match self {
            Self::Refused(f) => f.message.clone(),
            e => chain(e),
        }
    }

    /// `{"error": {"code", "message", "help", "exit"}}`, and of a spec `file`, `faults` with their places, and `more`.
    fn document(&self) -> Value {
        let mut error = json!({
            "code": self.code(),
            "message": self.message(),
            "help": self.help(),
            "exit": self.exit_code(),
        });
        if let Self::BadSpec(bad) = self {
            error["file"] = json!(bad.file);
            error["faults"] = json!(bad.faults);
            error["more"] = json!(bad.more);
        }
        json!({ "error": error })
    }

    /// Says it all on standard error: as one line of JSON to who asked for JSON.
    pub fn report(&self, as_json: bool) -> ExitCode {
        if matches!(self, Self::Unsaid(e) if e.reader_gone()) {
            return ExitCode::from(self.exit_code());
        }
        if as_json {
            note!("{}", say::json_text(&self.document().to_string()));
        } else if let Self::BadSpec(bad) = self {
            // Colours are in there; what came from the spec was made printable.
            let _ = io::stderr().lock().write_all(render(bad).as_bytes());
        } else {
            match self {
                Self::Refused(f) => note!("error: {} [{}]", f.message, f.code),
                e => note!("error: {}", e.message()),
            }
            let help = self.help();
            if !help.is_empty() {
                note!("help:  {help}");
            }
        }
        ExitCode::from(self.exit_code())
    }
}

/// Every fault with the lines it is about.
pub(super) fn render(bad: &BadSpec) -> String {
    let theme = if output::colour() { GraphicalTheme::unicode() } else { GraphicalTheme::unicode_nocolor() };
    let handler = GraphicalReportHandler::new_themed(theme).with_width(110);
    let mut out = String::new();
    let bad = &shown(bad);
    for fault in &bad.faults {
        // Places are repeated in words, so that editors and scripts find them without the picture.
        let place = if fault.line > 0 { format!(":{}:{}", fault.line, fault.column) } else { String::new() };
        out.push_str(&format!("{}{place}: {} [{}]\n", bad.file, fault.message, fault.code));
        if fault.line > 0 && narrow(bad, fault) {
            let mut picture = String::new();
            let report = report(bad, fault);
            if handler.render_report(&mut picture, report.as_ref()).is_ok() {
                out.push_str(&picture);
            }
        } else {
            out.push_str(&format!("  help: {}\n", fault.help));
        }
    }
    let n = bad.faults.len() + bad.more;
    if bad.more > 0 {
        out.push_str(&format!("and {} more\n", bad.more));
    }
    out.push_str(&format!("{n} fault{} in {}; nothing was recorded\n", if n == 1 { "" } else { "s" }, bad.file));
    out
}

/// With everything that could steer a terminal replaced, byte for byte so that places stay.
fn shown(bad: &BadSpec) -> BadSpec {
    let stand_in = |c: char| match c.len_utf8() {
        _ if matches!(c, '\n' | '\t') || !say::steers(c) => c,
        1 => '?',
        2 => '·',
        _ => '\u{fffd}',
    };
    BadSpec {
        file: say::one_line(&bad.file),
        source: bad.source.chars().map(stand_in).collect(),
        faults: bad
            .faults
            .iter()
            .map(|f| Fault { message: say::one_line(&f.message), help: say::one_line(&f.help), ..f.clone() })
            .collect(),
        more: bad.more,
    }
}

/// Whether a fault's lines, and those around them, are short enough for a picture.
fn narrow(bad: &BadSpec, fault: &Fault) -> bool {
    let first = fault.line.saturating_sub(2);
    bad.source.lines().skip(first).take(3).all(|line| line.len() <= 200) && fault.span.len() <= 2_000
}

fn report(bad: &BadSpec, fault: &Fault) -> Report {
    let span = fault.span.start..fault.span.end.max(fault.span.start);
    let diagnostic = MietteDiagnostic::new(fault.message.clone())
        .with_code(fault.code.clone())
        .with_severity(Severity::Error)
        .with_help(fault.help.clone())
        .with_label(LabeledSpan::at(span, "here"));
    Report::new(diagnostic).with_source_code(NamedSource::new(bad.file.clone(), bad.source.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(spec: &str) -> String {
        render(&drums_common::spec::parse("x.toml", spec.as_bytes()).unwrap_err())
    }

    #[test]
    fn an_error_as_json_has_the_words_the_places_and_the_exit_code_of_the_text() {
        let bad = CtlError::BadSpec(Box::new(drums_common::spec::parse("x.toml", b"\nkey = 1\n").unwrap_err()));
        let error = &bad.document()["error"];
        assert_eq!((&error["code"], &error["exit"], &error["file"]), (&json!("bad-spec"), &json!(2), &json!("x.toml")));
        let fault = error["faults"].as_array().unwrap().iter().find(|f| f["line"] == 2).unwrap();
        assert!(fault["message"].as_str().unwrap().contains("key"), "{fault}");
        let refused = CtlError::Refused(Failure::refused("no-host", "no such host", "list them"));
        let wanted = json!({ "code": "no-host", "message": "no such host", "help": "list them", "exit": 2 });
        assert_eq!(refused.document()["error"], wanted);
    }

    #[test]
    fn a_spec_cannot_steer_the_terminal_or_flood_it() {
        let text = rendered("\"a\\u001b[2J\u{202e}\" = 1\n");
        assert!(!text.contains("\u{202e}") && !text.contains("\u{1b}[2J"), "{text}");
        let keys: String = (0..20_000).map(|i| format!("k{i} = 1\n")).collect();
        let text = rendered(&keys);
        assert!(text.contains("more\n") && text.len() < 100_000, "{} bytes", text.len());
        let wide: String = (0..20_000).map(|i| format!("k{i} = 1, ")).collect();
        let text = rendered(&format!("limits = {{ {wide} }}"));
        assert!(text.len() < 50_000, "{} bytes", text.len());
    }
}
