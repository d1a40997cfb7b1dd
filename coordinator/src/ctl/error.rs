//! Why a command did not do what it was told, and what the process exits with.

use std::{io, path::PathBuf, process::ExitCode};

use drums_common::{
    failure::{Failure, FailureClass},
    spec::{BadSpec, Fault},
    telemetry::chain,
};
use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, NamedSource, Report, Severity};

use super::output;

pub(super) const BAD_INPUT: u8 = 2;
pub(super) const UNREACHABLE: u8 = 3;

#[derive(Debug, thiserror::Error)]
pub enum CtlError {
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
            Self::Refused(f) if matches!(f.class, FailureClass::Refused) => BAD_INPUT,
            // A file that the user named and that is not there is input; one that we cannot write is not.
            Self::File { attempt: "read", source, .. } if source.kind() == io::ErrorKind::NotFound => BAD_INPUT,
            _ => 1,
        }
    }

    fn help(&self) -> String {
        match self {
            Self::BadInput { help, .. } | Self::Unreachable { help, .. } | Self::Failed { help, .. } => help.clone(),
            Self::Refused(f) => f.help.clone(),
            Self::Answer { .. } => "drumsctl and the coordinator may be of different versions".to_owned(),
            Self::File { attempt: "read", .. } => "is the path right, and may you read it?".to_owned(),
            Self::File { .. } => "is the disk full, and may you write there?".to_owned(),
            Self::Runtime(_) | Self::BadSpec(_) => String::new(),
        }
    }

    /// Says it all on standard error.
    pub fn report(&self) -> ExitCode {
        if let Self::BadSpec(bad) = self {
            eprint!("{}", render(bad));
        } else {
            let text = match self {
                Self::Refused(f) => format!("{} [{}]", f.message, f.code),
                e => chain(e),
            };
            eprintln!("error: {text}");
            let help = self.help();
            if !help.is_empty() {
                eprintln!("help:  {help}");
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
    for fault in &bad.faults {
        // Places are repeated in words, so that editors and scripts find them without the picture.
        let place = if fault.line > 0 { format!(":{}:{}", fault.line, fault.column) } else { String::new() };
        out.push_str(&format!("{}{place}: {} [{}]\n", bad.file, fault.message, fault.code));
        if fault.line > 0 {
            let mut picture = String::new();
            let report = report(bad, fault);
            if handler.render_report(&mut picture, report.as_ref()).is_ok() {
                out.push_str(&picture);
            }
        } else {
            out.push_str(&format!("  help: {}\n", fault.help));
        }
    }
    let n = bad.faults.len();
    out.push_str(&format!("{n} fault{} in {}; nothing was recorded\n", if n == 1 { "" } else { "s" }, bad.file));
    out
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
