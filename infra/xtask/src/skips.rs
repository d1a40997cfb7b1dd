//! Skips of a test run: read back from nextest's JUnit file, so that any test in any package can name one by printing
//! `SKIP name: reason` on a line of its own.

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// What may be missing on a machine, with the reason why tests cannot bring it along.
const ALLOWED: [(&str, &str); 4] = [
    ("kvm", "needs a machine whose /dev/kvm runs a guest"),
    ("macos", "needs a Mac"),
    ("aws", "needs an account"),
    ("peer", "a peer's own tool refuses this kind of machine"),
];

pub fn run() -> Result<()> {
    // nextest keeps its store in the workspace (`[store]` in .config/nextest.toml), wherever cargo's target folder is.
    let path = workspace::root().join("target/nextest/default/junit.xml");
    let xml = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}; run `make test` first", path.display()))?;
    let skips = find(&xml);
    println!("skipped: {}", skips.len());
    for skip in &skips {
        println!("  {skip}");
    }
    let foreign: Vec<_> = skips.iter().filter(|s| !allowed(s)).cloned().collect();
    if !foreign.is_empty() {
        let names = ALLOWED.map(|(name, why)| format!("{name} ({why})")).join(", ");
        bail!("these skips are not allowed: {}; allowed are {names}", foreign.join("; "));
    }
    Ok(())
}

/// `name: reason` of every skip line, sorted, each once.
fn find(xml: &str) -> Vec<String> {
    let lines = xml.lines().filter_map(|line| {
        let line = line.trim_start();
        // The first line of a captured stream stands behind its opening tag.
        let line = line.rsplit_once("<system-err>").map_or(line, |(_, rest)| rest);
        let rest = line.strip_prefix("SKIP ")?;
        rest.contains(": ").then(|| unescape(rest.split("</system-err>").next().unwrap_or(rest)))
    });
    let mut found: Vec<_> = lines.collect();
    found.sort();
    found.dedup();
    found
}

fn allowed(skip: &str) -> bool {
    let name = skip.split(':').next().unwrap_or_default();
    ALLOWED.iter().any(|(word, _)| name == *word || name.strip_prefix(word).is_some_and(|r| r.starts_with('-')))
}

fn unescape(s: &str) -> String {
    s.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'").replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skip_lines_are_found_wherever_they_stand_in_a_stream() {
        let xml =
            "<system-err>SKIP kvm: no &lt;answer&gt;\nother</system-err>\n<system-err>text\nSKIP peer-crun: refuses\n";
        assert_eq!(find(xml), ["kvm: no <answer>", "peer-crun: refuses"]);
    }

    #[test]
    fn a_skip_of_something_else_is_not_allowed() {
        assert!(allowed("kvm: x") && allowed("peer-crun: x"));
        assert!(!allowed("root: x") && !allowed("kvmx: x"));
    }
}
