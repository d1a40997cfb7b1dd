//! Standard output and standard error, as every program here writes them: a reader that went away or a full disk is an
//! error of the writer, never a panic, and what others wrote cannot steer the terminal.

use std::{
    fmt::{self, Write as _},
    io::{self, Write as _},
    process::ExitCode,
};

use crate::telemetry::chain;

/// As shells count a program that ended because its reader had gone; 0 would say `done` of what nobody saw.
pub const READER_GONE: u8 = 141;

/// Text as it may be shown: control characters, and those that turn the direction of writing, become escapes. Line ends
/// and tabs stay.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c != '\n' && c != '\t' && steers(c) {
            // Writing to a String cannot fail.
            let _ = write!(out, "{}", c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// As [`printable`], on one line.
pub fn one_line(text: &str) -> String {
    printable(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// JSON as it may be shown: the same value, with what steers a terminal as JSON's own escapes ([`printable`]'s are none).
pub fn json_text(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        // Line ends are layout: within strings JSON has them escaped already.
        if c != '\n' && steers(c) {
            // All that steers is in the basic plane. Writing to a String cannot fail.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

pub fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Standard output did not take what was to be said.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub struct Unsaid(#[from] io::Error);

impl Unsaid {
    /// Nobody is there to read it: no reason to complain.
    pub fn reader_gone(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }

    /// How a program ends that cannot say its answer.
    pub fn exit(&self, program: &str) -> ExitCode {
        if self.reader_gone() {
            return ExitCode::from(READER_GONE);
        }
        note(format_args!("{program}: {}", chain(self)));
        ExitCode::FAILURE
    }
}

/// Text that is laid out already.
pub fn text(text: &str) -> Result<(), Unsaid> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// One line to standard output.
pub fn line(line: fmt::Arguments<'_>) -> Result<(), Unsaid> {
    text(&(one_line(&line.to_string()) + "\n"))
}

/// One line to standard error, which has no other place to complain to.
pub fn note(line: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_all((printable(&line.to_string()) + "\n").as_bytes());
}

/// `println!` that returns its error.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::say::line(format_args!($($arg)*)) };
}

/// `eprintln!` that never panics.
#[macro_export]
macro_rules! note {
    ($($arg:tt)*) => { $crate::say::note(format_args!($($arg)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_that_is_shown_steers_nothing_and_stays_the_same_value() {
        let value = serde_json::json!({ "text": "a\x1b[2J\u{9b}\u{7f}b\n\t\u{202e}\u{2066}é" });
        for json in [serde_json::to_string(&value).unwrap(), serde_json::to_string_pretty(&value).unwrap()] {
            let shown = json_text(&json);
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
            assert!(!shown.chars().any(|c| c != '\n' && steers(c)), "{shown}");
            assert_eq!(one_line(&json_text(&json)), shown.replace('\n', "\\n"));
        }
    }

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        assert_eq!(printable("a\x1b[2J\u{9b}b\n\u{202e}\tc"), "a\\u{1b}[2J\\u{9b}b\n\\u{202e}\tc");
        assert_eq!(one_line("holds\nforged\r"), "holds\\nforged\\u{d}");
    }
}
