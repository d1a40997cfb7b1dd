//! The files that tasks write for other programs: `{"rows": [...]}`.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;

#[derive(Serialize)]
struct Rows<'a, R> {
    rows: &'a [R],
}

pub fn write<R: Serialize>(path: &Path, rows: &[R]) -> Result<()> {
    let text = serde_json::to_string_pretty(&Rows { rows }).context("rows are plain data")?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
