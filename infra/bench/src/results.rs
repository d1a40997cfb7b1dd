//! The result file: written anew after each row, so that what was measured stays, whatever happens later.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::row::Row;

pub struct Results {
    path: Option<PathBuf>,
    /// What all rows of a file have in common: its seed and its sizes.
    head: Value,
    rows: Vec<Value>,
}

impl Results {
    /// What the file has already, if it is of the same kind. Without a file, rows are only counted.
    pub fn open(path: Option<PathBuf>, head: Value) -> Result<Self> {
        let rows = match path.as_deref().filter(|p| p.exists()) {
            Some(path) => read(path, &head)?,
            None => Vec::new(),
        };
        Ok(Self { path, head, rows })
    }

    pub fn has(&self, row: &str) -> bool {
        self.rows.iter().any(|r| r["row"] == row)
    }

    /// What a row's measurement gave, in place of what an earlier one did. `build` is what was measured.
    pub fn put(&mut self, row: &str, build: &str, rows: &[Row]) -> Result<()> {
        self.rows.retain(|r| r["row"] != row);
        for one in rows {
            let mut value = serde_json::to_value(one)?;
            value["row"] = row.into();
            value["build"] = build.into();
            self.rows.push(value);
        }
        let Some(path) = &self.path else { return Ok(()) };
        let mut all = self.head.clone();
        all["rows"] = json!(self.rows);
        let written = path.with_extension("part");
        let text = serde_json::to_string_pretty(&all)? + "\n";
        fs::write(&written, text).with_context(|| format!("cannot write {}", written.display()))?;
        fs::rename(&written, path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// How many bounds are held, and which are not.
    pub fn in_words(&self) -> String {
        let judged: Vec<&Value> = self.rows.iter().filter(|r| !r["met"].is_null()).collect();
        let missed: Vec<&str> =
            judged.iter().filter(|r| r["met"] == false).filter_map(|r| r["name"].as_str()).collect();
        let held = judged.len() - missed.len();
        let names = if missed.is_empty() { String::new() } else { format!("; missed: {}", missed.join("; ")) };
        format!("{held} of {} bounds are held{names}", judged.len())
    }
}

fn read(path: &Path, head: &Value) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut there: Value = serde_json::from_str(&text)
        .with_context(|| format!("{} is no result of this bench; give another file", path.display()))?;
    let rows = there["rows"].take();
    let alike = ["seed", "size"].iter().all(|key| there[key] == head[key]);
    ensure!(alike, "{} has rows of another seed or other sizes; give another file", path.display());
    Ok(rows.as_array().cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Goal, Reading, worst};

    fn row(name: &str, goal: f64) -> Row {
        worst(name, &[Reading { value: 2.0, cpu_us: f64::NAN }], "s", Goal::AtMost(goal))
    }

    #[test]
    fn a_row_that_is_measured_again_replaces_its_own_and_leaves_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = Some(dir.path().join("rows.json"));
        let head = json!({ "seed": 1, "size": { "agents": 7 } });
        let mut results = Results::open(path.clone(), head.clone()).unwrap();
        results.put("beats", "old", &[row("a", 3.0), row("b", 3.0)]).unwrap();
        results.put("death", "old", &[row("c", 1.0)]).unwrap();
        drop(results);
        let mut results = Results::open(path.clone(), head.clone()).unwrap();
        assert!(results.has("beats") && results.has("death") && !results.has("plan"));
        results.put("beats", "new", &[row("d", 3.0)]).unwrap();
        assert_eq!(results.in_words(), "1 of 2 bounds are held; missed: c");
        let names: Vec<_> = Results::open(path.clone(), head).unwrap().rows.iter().map(|r| r["name"].clone()).collect();
        assert_eq!(names, ["c", "d"]);
        let other = Results::open(path, json!({ "seed": 2, "size": { "agents": 7 } })).err().unwrap().to_string();
        assert!(other.contains("another seed"), "{other}");
    }
}
