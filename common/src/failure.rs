//! Failures that cross the wire. Inside a process errors are typed enums; at the edge they become this.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a caller may do about a failure. Callers decide on the class alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureClass {
    /// The same call may succeed later.
    Transient,
    /// The call was understood and declined; the same call will be declined again.
    Refused,
    /// It will not succeed as things stand.
    Permanent,
    /// A broken invariant of ours.
    Bug,
}

/// A failure as data: `code` is a stable kebab-case word, `message` says what was attempted and why it failed, `help`
/// what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub class: FailureClass,
    pub code: String,
    pub message: String,
    pub help: String,
}

impl Failure {
    pub fn new(class: FailureClass, code: &str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { class, code: code.to_owned(), message: message.into(), help: help.into() }
    }
    pub fn refused(code: &str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(FailureClass::Refused, code, message, help)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.code)?;
        if !self.help.is_empty() {
            write!(f, "; {}", self.help)?;
        }
        Ok(())
    }
}
impl std::error::Error for Failure {}
