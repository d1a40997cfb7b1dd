//! Bad command lines: refused with exit code 2 (3 where only the coordinator is missing), what was expected and what to
//! do, and never with a panic. Bad specs are tested where specs are read.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use drums_analysis::{Verdict, bundle, synthetic::Scenario};

fn run(folder: &Path, program: &str, arguments: &[&str], home: &Path) -> Output {
    let mut command = Command::new(folder.join(program));
    command.args(arguments).env("DRUMS_HOME", home).env_remove("RUST_BACKTRACE").stdin(std::process::Stdio::null());
    command.output().unwrap()
}

fn refused(program: &str, cases: &[(&[&str], i32, &str)]) {
    let folder = drums_tests::programs().unwrap();
    let home = tempfile::tempdir().unwrap();
    let absent = home.path().join("absent");
    for (arguments, code, word) in cases {
        let output = run(&folder, program, arguments, &absent);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = format!("{program} {}", arguments.join(" "));
        assert_eq!(output.status.code(), Some(*code), "`{line}` says: {said}");
        assert!(!said.contains("panicked") && !said.contains("stack backtrace"), "`{line}` panics: {said}");
        assert!(said.contains(word), "`{line}` does not say {word:?}: {said}");
    }
    assert!(!absent.exists(), "a refused command made a home");
}

#[test]
fn bad_command_lines_of_drumsctl_are_refused() {
    refused(
        "drumsctl",
        &[
            (&[], 2, "Usage"),
            (&["no-such-command"], 2, "unrecognized"),
            (&["run"], 2, "required"),
            (&["run", "EXP-28"], 2, "EXP-028"),
            (&["run", "EXP-028", "--deadline", "tomorrow"], 2, "UTC"),
            (&["cancel"], 2, "required"),
            (&["cancel", "run-1"], 2, "12 hexadecimal digits"),
            (&["host", "add", "Not A Name"], 2, "a-z"),
            (&["register", "/no/such/spec.toml"], 2, "/no/such/spec.toml"),
            (&["--api", "not a url", "fleet"], 2, "https://"),
            (&["fleet"], 3, "drums-coordinator"),
            (&["runs"], 3, "drums-coordinator"),
        ],
    );
}

#[test]
fn bad_command_lines_of_the_daemons_are_refused() {
    refused("drums-agent", &[(&["no-such-command"], 2, "unrecognized"), (&["run", "--no-such-flag"], 2, "unexpected")]);
    refused("drums-coordinator", &[(&["--no-such-flag"], 2, "unexpected")]);
}

#[test]
fn help_of_every_program_shows_an_example() {
    let folder = drums_tests::programs().unwrap();
    let home = tempfile::tempdir().unwrap();
    for program in ["drumsctl", "drums-agent", "drums-coordinator"] {
        let output = run(&folder, program, &["--help"], home.path());
        assert!(output.status.success());
        let version = run(&folder, program, &["--version"], home.path());
        let said = String::from_utf8_lossy(&version.stdout).into_owned();
        assert!(said.contains("build sha256:"), "{program} --version names no build digest: {said}");
        let mut full = Command::new(folder.join(program));
        full.arg("--help").stdout(fs::File::options().write(true).open("/dev/full").unwrap());
        let output = full.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{program} on a full disk: {said}");
    }
}

/// `verify` exits with the verdict's code; with one byte changed in a sample, the registration or a log it exits with 1,
/// whatever the verdict, and names the file.
#[test]
fn a_changed_byte_of_a_bundle_fails_verify_and_is_named() {
    let folder = drums_tests::programs().unwrap();
    let home = tempfile::tempdir().unwrap();
    let verify = |bundle: &Path| run(&folder, "drumsctl", &["verify", bundle.to_str().unwrap()], home.path());
    for (fail, verdict) in [(false, Verdict::Pass), (true, Verdict::Fail)] {
        let mut scenario = Scenario::exp028(1);
        if fail {
            scenario.experiment.bars[1].at_most = 0.1;
        }
        let (meta, records) = scenario.run(1);
        let files = bundle::files(&scenario.registration(), &[meta], 1, &records).unwrap();
        let dir = home.path().join(verdict.as_str());
        for f in &files {
            let path = dir.join(&f.path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &f.bytes).unwrap();
        }
        let output = verify(&dir);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(i32::from(verdict.exit_code())), "{said}");
        for kind in ["samples/", bundle::REGISTRATION, "logs/"] {
            let file = files.iter().find(|f| f.path.starts_with(kind)).unwrap();
            let mut bytes = file.bytes.clone();
            let middle = bytes.len() / 2;
            bytes[middle] = if bytes[middle] == b'1' { b'2' } else { b'1' };
            fs::write(dir.join(&file.path), bytes).unwrap();
            let output = verify(&dir);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{}: {said}", file.path);
            assert!(said.contains(&format!("tampered or damaged: {}", file.path)), "{}: {said}", file.path);
            fs::write(dir.join(&file.path), &file.bytes).unwrap();
        }
        assert_eq!(verify(&dir).status.code(), Some(i32::from(verdict.exit_code())), "untouched again");
    }
}
