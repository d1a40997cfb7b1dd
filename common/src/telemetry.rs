//! Tracing: one way to start it, one way to print an error with its causes.

use std::{error::Error, fmt::Write as _, io::IsTerminal as _};

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

/// The chain of an error and its sources, joined with `: `; each layer describes only itself.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut out = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        let _ = write!(out, ": {e}");
        next = e.source();
    }
    out
}

/// Starts tracing to standard error. `DRUMS_LOG` filters as `RUST_LOG` would (default `info`); `json` for machines.
/// Colours only on a terminal and without NO_COLOR. A second call changes nothing.
pub fn init(json: bool) {
    let filter = EnvFilter::try_from_env("DRUMS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let layer = fmt::layer().with_writer(std::io::stderr).with_ansi(colour).with_target(false);
    let result = if json {
        tracing_subscriber::registry().with(filter).with(layer.json()).try_init()
    } else {
        tracing_subscriber::registry().with(filter).with(layer).try_init()
    };
    let _ = result;
}
