//! The operator's command line with the feature `ec2`, as a program. `infra/ec2/cargo` builds it beside these tests.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::peer::Peer;

fn program() -> PathBuf {
    // target/debug/deps/it-0123 and target/debug/drumsctl.
    let test = std::env::current_exe().unwrap();
    let built = test.parent().and_then(Path::parent).unwrap().join("drumsctl");
    assert!(built.exists(), "{} is not there; run these tests by infra/ec2/cargo nextest", built.display());
    built
}

/// With a key of its own, and with nothing else of this machine: no home, no configuration.
pub fn drumsctl(peer: &Peer, key: &str, line: &str) -> Output {
    let mut command = Command::new(program());
    command
        .args(line.split_whitespace())
        .env_clear()
        .env("AWS_ENDPOINT_URL", peer.endpoint())
        .env("AWS_ACCESS_KEY_ID", key)
        .env("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-test")
        .stdin(Stdio::null());
    command.output().unwrap()
}

#[track_caller]
pub fn ended(output: &Output, code: i32) {
    let (out, err) = (said(output), warned(output));
    assert_eq!(output.status.code(), Some(code), "{out}{err}");
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn warned(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", said(output), warned(output)))
}

/// Calls of this key that changed something: each one's name and parameters.
pub fn changes(peer: &Peer, key: &str) -> Vec<(String, Value)> {
    let journal = peer.get("journal");
    let reads = ["Describe", "Get", "List"];
    let of_key = journal.as_array().unwrap().iter().filter(|e| e["by"] == key && e["params"]["DryRun"] != "true");
    let named = of_key.map(|e| (e["action"].as_str().unwrap().to_owned(), e["params"].clone()));
    named.filter(|(action, _)| !reads.iter().any(|r| action.starts_with(r))).collect()
}
