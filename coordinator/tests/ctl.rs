//! `drumsctl` as a program: what it leaves behind and how it ends, without a coordinator.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output, Stdio},
    time::Instant,
};

use drums_common::{clock::Micros, digest::Sha256};
use drums_coordinator::{
    pki::Pki,
    store::{AuditRow, SqliteStore, Store as _, Who, WorkloadRow},
};

fn drumsctl(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumsctl"));
    command.arg("--home").arg(home).args(arguments).env_remove("DRUMS_API").stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn init(home: &Path) -> Output {
    drumsctl(home, &["init"]).output().unwrap()
}

#[track_caller]
fn made(home: &Path) {
    let output = init(home);
    assert!(output.status.success(), "{}", said(&output));
}

#[track_caller]
fn refused(output: &Output, word: &str) {
    let text = said(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(word), "it does not say {word:?}: {text}");
}

#[test]
fn a_folder_of_somebody_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(dir.path().join("thesis.tex"), "").unwrap();
    refused(&init(dir.path()), "thesis.tex");
    assert_eq!(fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    // Nor is it proposed.
    let fleet = drumsctl(dir.path(), &["fleet"]).output().unwrap();
    assert_eq!(fleet.status.code(), Some(3));
    assert!(!said(&fleet).contains("init"), "{}", said(&fleet));
    refused(&init(&dir.path().join("x".repeat(120))), "shorter path");
}

#[test]
fn of_inits_at_once_one_makes_the_home() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let running: Vec<_> = (0..6)
        .map(|_| drumsctl(&home, &["init"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    let mut makers = 0;
    for child in running {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        makers += usize::from(output.stdout.starts_with(b"made home"));
    }
    assert_eq!(makers, 1);
    // Every key fits its certificate, which opening checks.
    made(&home);
}

#[test]
fn keys_and_store_are_lost_together_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    made(&home);
    made(&home);
    let aside = dir.path().join("store");
    fs::rename(home.join("store.sqlite"), &aside).unwrap();
    refused(&init(&home), "lost its store");
    fs::write(home.join("store.sqlite"), "").unwrap();
    refused(&init(&home), "lost its store");
    fs::rename(&aside, home.join("store.sqlite")).unwrap();
    // An attempt that broke off before its keys were in place goes on.
    fs::remove_dir_all(home.join("pki")).unwrap();
    made(&home);
}

#[test]
fn a_backup_is_whole_outside_of_the_home_or_absent() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    made(&home);
    let to = |file: &Path| drumsctl(&home, &["backup"]).arg(file).output().unwrap();
    refused(&to(&home.join("backup.tar.zst")), "inside the home");
    refused(&to(&dir.path().join("no/backup.tar.zst")), "make the folder first");
    let file = dir.path().join("backup.tar.zst");
    assert!(to(&file).status.success());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    refused(&to(&file), "exists already");
    // What the store names must be in it.
    let mut store = SqliteStore::open(&home.join("store.sqlite")).unwrap();
    let sha256 = Sha256::of(b"tree");
    let name = "minimal".parse().unwrap();
    let audit = AuditRow::new(Micros(1), Who::coordinator(), "workload-add");
    store.add_workload(&WorkloadRow { sha256, name, bytes: 1, files: 1, added: Micros(1) }, &audit).unwrap();
    drop(store);
    refused(&to(&dir.path().join("another.tar.zst")), &sha256.to_string());
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn a_server_key_that_is_rotated_is_whole_whenever_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    refused(&drumsctl(&home, &["access", "rotate-server"]).output().unwrap(), "drumsctl init");
    made(&home);
    refused(&drumsctl(&home, &["--api", "https://c:7443", "access", "rotate-server"]).output().unwrap(), "--home");
    let shown = || Pki::open(&home.join("pki")).unwrap().shown().certificate().sha256.to_string();
    let first = shown();
    let began = Instant::now();
    let output = drumsctl(&home, &["access", "rotate-server"]).output().unwrap();
    let took = began.elapsed();
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(&shown()) && said(&output).contains(&first), "{text}{}", said(&output));
    let mut killed = 0;
    for nth in 1..=24 {
        // Most of them early: the one that was timed may have been slow.
        let after = took * (nth * nth) / 400;
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", &after.as_secs_f64().to_string(), env!("CARGO_BIN_EXE_drumsctl"), "--home"]);
        let output = command.arg(&home).args(["access", "rotate-server"]).output().unwrap();
        killed += usize::from(!output.status.success());
        // Opening checks that each key is its certificate's.
        shown();
    }
    assert!(killed > 0, "none was killed; an undisturbed one took {took:?}");
    assert!(drumsctl(&home, &["access", "rotate-server"]).output().unwrap().status.success());
    // A backup takes it along.
    let file = dir.path().join("backup.tar.zst");
    assert!(drumsctl(&home, &["backup"]).arg(&file).output().unwrap().status.success());
    let restored = dir.path().join("restored");
    fs::create_dir(&restored).unwrap();
    let tar = Command::new("tar").arg("--zstd").arg("-xpf").arg(&file).arg("-C").arg(&restored).status().unwrap();
    assert!(tar.success());
    assert_eq!(Pki::open(&restored.join("pki")).unwrap().shown().certificate().sha256.to_string(), shown());
}

#[test]
fn a_full_disk_is_an_error_and_a_reader_that_left_is_none() {
    let dir = tempfile::tempdir().unwrap();
    for program in [env!("CARGO_BIN_EXE_drumsctl"), env!("CARGO_BIN_EXE_drums-coordinator")] {
        for arguments in [&["--help"][..], &["--version"]] {
            let full = File::options().write(true).open("/dev/full").unwrap();
            let output = Command::new(program).args(arguments).stdout(full).output().unwrap();
            let text = said(&output);
            assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{program} {arguments:?}: {text}");
            assert!(text.contains("standard output"), "{text}");
        }
    }
    for arguments in [&["init"][..], &["completions", "bash"], &["--version"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = drumsctl(&dir.path().join("home"), arguments).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), said(&output).as_str()), (Some(141), ""), "{arguments:?}");
    }
}

#[test]
fn bad_input_is_told_from_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&link, &link).unwrap();
    let ask = |arguments: &[&str]| drumsctl(&dir.path().join("home"), arguments).output().unwrap();
    let name = |path: &Path| path.to_str().unwrap().to_owned();
    refused(&ask(&["register", &name(&link)]), &name(&link));
    refused(&ask(&["register", &name(&file.join("x.toml"))]), "x.toml");
    refused(&ask(&["verify", &name(&dir.path().join("absent"))]), "absent");
    refused(&init(&file.join("sub")), "sub");
    refused(&ask(&["export", "EXP-001", "-o", &name(&dir.path().join("no/bundle"))]), "make the folder first");
    refused(&ask(&["run", "EXP-001", "--attach", "--deadline", "2099-01-01T00:00:00Z"]), "cannot be used with");
    refused(&ask(&["results", "EXP-001", "--format", "csv", "--json"]), "contradict");
}

#[test]
fn who_asks_for_json_has_the_error_as_json_too() {
    let dir = tempfile::tempdir().unwrap();
    let spec = dir.path().join("x.toml");
    fs::write(&spec, "id = 7\n").unwrap();
    let spec = spec.to_str().unwrap();
    for (arguments, code, exit) in
        [(["register", spec], "bad-spec", 2), (["cancel", "run-0123456789ab"], "unreachable", 3)]
    {
        let ask = || drumsctl(&dir.path().join("home"), &arguments);
        assert!(ask().output().unwrap().stdout.is_empty());
        let output = ask().arg("--json").output().unwrap();
        assert!(output.stdout.is_empty());
        let last = said(&output).lines().last().unwrap().to_owned();
        let error = serde_json::from_str::<serde_json::Value>(&last).unwrap()["error"].take();
        assert_eq!((error["code"].as_str(), error["exit"].as_i64()), (Some(code), Some(exit)), "{error}");
        assert_eq!(output.status.code().map(i64::from), Some(exit));
    }
}

/// Without the feature `ec2`, what can be refused without AWS is, and the rest says what is missing.
#[cfg(not(feature = "ec2"))]
#[test]
fn what_speaks_to_aws_says_what_it_lacks_and_refuses_bad_input_first() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("no-home");
    let account = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/account.example.toml");
    let ask = |line: &str| drumsctl(&absent, &line.split_whitespace().collect::<Vec<_>>()).output().unwrap();
    let sweep = "sweep --installation 0a1b2c3d --canary eu-central-1/i-0123456789abcdef0";
    for flags in ["", " --shadow", " --json", " --region eu-central-1"] {
        refused(&ask(&format!("{sweep}{flags}")), "--features ec2");
    }
    refused(&ask("sweep --installation 0a1b2c3d"), "no canary");
    refused(&ask("sweep --installation 0a1b2c3 --canary eu-central-1/i-0123456789abcdef0"), "8 hexadecimal digits");
    refused(&ask(&format!("{sweep} --region Frankfurt")), "eu-central-1");

    let host = "host provision h1 --type c8i.xlarge --campaign c1 --deadline 3h --max-usd 5 --region eu-central-1";
    let with = |account: &str, flags: &str| ask(&format!("{host} --account {account} {flags}"));
    refused(&with(account, "--dry-run"), "--features ec2");
    refused(&with(account, ""), "not built yet");
    refused(&with("/no/account.toml", "--dry-run"), "/no/account.toml");
    let file = dir.path().join("account.toml");
    let text = fs::read_to_string(account).unwrap();
    fs::write(&file, text.replace("drain_minutes", "drane_minutes")).unwrap();
    let line = 1 + text.lines().position(|l| l.starts_with("drain_minutes")).unwrap();
    let wrong = with(file.to_str().unwrap(), "--dry-run");
    refused(&wrong, "drane_minutes");
    refused(&wrong, &format!("line {line}"));
    refused(
        &ask(&format!("{host} --account {account} --dry-run").replace("--max-usd 5", "--max-usd 0")),
        "--max-usd: ",
    );
    assert!(!absent.exists(), "neither needs a home, nor makes one");
    for command in [&["sweep"][..], &["host", "provision"]] {
        let help = drumsctl(&absent, &[command, &["--help"]].concat()).output().unwrap();
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(help.contains("--features ec2") && help.contains("Exit code") && help.contains("Example"), "{help}");
    }
}
