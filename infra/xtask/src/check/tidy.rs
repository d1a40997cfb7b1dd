//! Tidiness: what no compiler looks at. Each rule says what to do about a finding.

use std::{collections::BTreeSet, path::Path};

use anyhow::{Result, bail};

use crate::workspace;

const MAX_LINES: usize = 800;

pub fn check() -> Result<()> {
    let mut found = Vec::new();
    for path in workspace::files()? {
        let Ok(text) = std::fs::read_to_string(workspace::root().join(&path)) else {
            continue; // not text
        };
        found.extend(findings(&path, &text, workspace::root()));
    }
    if !found.is_empty() {
        bail!("{} findings:\n  {}", found.len(), found.join("\n  "));
    }
    Ok(())
}

fn findings(path: &Path, text: &str, root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let name = path.display();
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let lines = text.lines().count();
    if extension == "rs" && lines > MAX_LINES && !text.contains("// long file:") {
        found.push(format!(
            "{name}: {lines} lines; split it by idea, or say why not in a comment `// long file: reason`"
        ));
    }
    if extension == "rs" {
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("#[ignore") {
                found.push(format!("{name}:{}: an ignored test; print a named SKIP instead", number + 1));
            }
            if line.ends_with(' ') {
                found.push(format!("{name}:{}: trailing space", number + 1));
            }
        }
    }
    if path.file_name().is_some_and(|f| f != "Cargo.lock") {
        for (number, line) in text.lines().enumerate() {
            for word in foreign_words() {
                if line.contains(&word) {
                    found.push(format!("{name}:{}: names {word:?}, which is not this project's to name", number + 1));
                }
            }
        }
    }
    if extension == "md" {
        for target in links(text) {
            let file = path.parent().unwrap_or(Path::new("")).join(&target);
            if !root.join(&file).exists() {
                found.push(format!("{name}: links to {target}, which does not exist"));
            }
        }
    }
    found
}

/// Registries' hosts belong in the clients' own configuration; paths of one machine belong nowhere. Put together here
/// so that this file does not find itself.
fn foreign_words() -> Vec<String> {
    let hosts = [
        ("index.crates", "io"),
        ("static.crates", "io"),
        ("pypi", "org"),
        ("registry.npmjs", "org"),
        ("deb.debian", "org"),
    ];
    let mut words: Vec<_> = hosts.iter().map(|(a, b)| format!("{a}.{b}")).collect();
    words.extend([["/work", "/"].concat(), ["../", "shared"].concat()]);
    words
}

/// Relative targets of Markdown links, without anchors.
fn links(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = text;
    while let Some(at) = rest.find("](") {
        rest = &rest[at + 2..];
        let Some(end) = rest.find(')') else { break };
        let target = rest[..end].split('#').next().unwrap_or_default();
        if !target.is_empty() && !target.contains("://") && !target.contains(char::is_whitespace) {
            found.insert(target.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_links_are_found_and_others_left_alone() {
        let text = "[a](x.md) [b](https://example.com/y) [c](#z) ![d](img/p.png#q)";
        assert_eq!(links(text).into_iter().collect::<Vec<_>>(), ["img/p.png", "x.md"]);
    }

    #[test]
    fn each_rule_finds_its_own_fault() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let long = "x\n".repeat(MAX_LINES + 1);
        assert_eq!(findings(Path::new("a.rs"), &long, root).len(), 1);
        assert!(findings(Path::new("a.rs"), &format!("// long file: a table\n{long}"), root).is_empty());
        assert_eq!(findings(Path::new("a.rs"), "#[ignore]\n", root).len(), 1);
        assert_eq!(findings(Path::new("a.md"), "[x](absent.md)", root).len(), 1);
        assert!(findings(Path::new("a.md"), "[x](Cargo.toml)", root).is_empty());
        for word in foreign_words() {
            assert_eq!(findings(Path::new("a.toml"), &word, root).len(), 1, "{word}");
        }
    }
}
