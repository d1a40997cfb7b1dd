//! What the documents say, held against the project.

use std::{collections::BTreeSet, fs, process::Command};

use drums_tests::root;

/// Names of all test functions in the project.
fn test_functions() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![root().to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                todo.push(path);
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap();
                for part in text.split("#[test]").skip(1).chain(text.split("#[tokio::test").skip(1)) {
                    let function = part.split("fn ").nth(1).and_then(|s| s.split(['(', '<']).next());
                    found.extend(function.map(str::to_owned));
                }
            } else if name.starts_with("test_") && name.ends_with(".py") {
                let text = fs::read_to_string(&path).unwrap();
                let names = text.lines().filter_map(|l| l.trim_start().strip_prefix("def ")?.split_once('('));
                found.extend(names.map(|(name, _)| name.to_owned()).filter(|name| name.starts_with("test_")));
            }
        }
    }
    found
}

#[test]
fn every_promise_names_a_test_that_exists() {
    let text = fs::read_to_string(root().join("docs/promises.md")).unwrap();
    let tests = test_functions();
    let mut promises = 0;
    for line in text.lines().filter(|l| l.starts_with(|c: char| c.is_ascii_digit())) {
        promises += 1;
        let number = line.split('.').next().unwrap();
        assert_eq!(number, promises.to_string(), "promises are numbered without gaps: {line}");
        let (_, named) = line.rsplit_once("Test: ").unwrap_or_else(|| panic!("names no test: {line}"));
        for name in named.split('`').skip(1).step_by(2) {
            let function = name.rsplit("::").next().unwrap();
            assert!(tests.contains(function), "promise {number} names {name}, which does not exist");
        }
        assert!(named.contains('`'), "names no test: {line}");
    }
    assert!(promises > 0, "there are no promises");
}

#[test]
fn every_row_of_the_fields_faults_names_tests_that_exist_and_carry_its_number() {
    let text = fs::read_to_string(root().join("docs/field-faults.md")).unwrap();
    let tests = test_functions();
    let mut rows = BTreeSet::new();
    for line in text.lines().filter(|l| l.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let Ok(row) = cells[0].parse::<u32>() else { continue };
        assert_eq!(cells.len(), 4, "{line}");
        assert!(rows.insert(row), "row {row} stands twice");
        let named: Vec<&str> = cells[3].split('`').skip(1).step_by(2).collect();
        for name in &named {
            assert!(tests.contains(*name), "row {row} names {name}, which does not exist");
        }
        let own = format!("row_{row:02}_");
        assert!(named.iter().any(|n| n.starts_with(&own)), "row {row} names no test {own}...");
        // And none is left out.
        let left_out = tests.iter().find(|t| t.starts_with(&own) && !named.contains(&t.as_str()));
        assert_eq!(left_out, None, "row {row} does not name it");
    }
    for row in [1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14, 15, 19, 20] {
        assert!(rows.contains(&row), "row {row} is missing");
    }
}

#[test]
fn architecture_states_its_invariants() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let invariants = text.lines().filter(|l| l.contains("**Invariant:**")).count();
    assert!(invariants >= 8, "{invariants} invariants");
}

/// A bare machine has no cargo: each command of the README installs before it builds.
#[test]
fn every_make_target_prepares_the_machine_before_it_builds() {
    for (target, purpose) in
        [("build", "build"), ("demo", "demo"), ("demo-clean", "build"), ("install", "build"), ("test", "test")]
    {
        let plan = Command::new("make").args(["--dry-run", target]).current_dir(root()).output().unwrap();
        let plan = String::from_utf8(plan.stdout).unwrap();
        let first = plan.lines().find(|l| !l.starts_with("make")).unwrap_or_default();
        assert_eq!(first, format!("infra/prepare {purpose}"), "make {target}:\n{plan}");
    }
}
