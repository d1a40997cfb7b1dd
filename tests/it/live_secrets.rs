//! Secrets stay where they belong: with everything logged, no key and no token's secret is in a log, in a command line, in
//! an environment, in the store, or in a file that others may read.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use drums_tests::fleet::TestFleet;

/// Regular files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn holds(text: &[u8], secret: &str) -> bool {
    text.windows(secret.len()).any(|w| w == secret.as_bytes())
}

/// What a key file protects: its longest line, which for PEM is the first of the key itself.
fn secret_of(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path)?;
    let inside = text.lines().filter(|l| !l.starts_with('-'));
    inside.max_by_key(|l| l.len()).map(str::to_owned).with_context(|| format!("{} is empty", path.display()))
}

#[test]
fn live_secrets_are_in_no_log_argument_environment_or_readable_file() -> Result<()> {
    let fleet = TestFleet::start_logging(&["h1", "h2"], Some("trace"))?;
    let unused = fleet.ctl(&["host", "add", "h3"])?;
    let unused = unused.split_whitespace().find(|w| w.starts_with("drums1.")).context("no token was printed")?;
    let used = fs::read_to_string(fleet.fleet.layout.states.join("h1.token"))?;

    let token_secret = |text: &str| -> Result<String> {
        let json = base64::Engine::decode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, &text.trim()["drums1.".len()..])?;
        let content: serde_json::Value = serde_json::from_slice(&json)?;
        Ok(content["secret"].as_str().context("a token without a secret")?.to_owned())
    };
    let mut secrets = vec![
        ("the used token".to_owned(), token_secret(&used)?),
        ("the unused token".to_owned(), token_secret(unused)?),
        ("the used token's text".to_owned(), used.trim().to_owned()),
        ("the unused token's text".to_owned(), unused.to_owned()),
    ];
    let home = fleet.fleet.layout.home.clone();
    let mut keys = Vec::new();
    for path in [files(&home)?, files(&fleet.fleet.layout.states)?].concat() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".key") || name == "key.pem" {
            secrets.push((path.display().to_string(), secret_of(&path)?));
            keys.push(path);
        }
    }
    ensure!(keys.len() >= 6, "the home's and the agents' keys were not found: {keys:?}");

    let mut wrong = Vec::new();
    // Command lines and environments of everything that runs.
    for process in fs::read_dir("/proc")?.flatten().filter(|e| e.file_name().to_string_lossy().parse::<u32>().is_ok()) {
        for what in ["cmdline", "environ"] {
            let text = fs::read(process.path().join(what)).unwrap_or_default();
            wrong.extend(
                secrets
                    .iter()
                    .filter(|(_, s)| holds(&text, s))
                    .map(|(name, _)| format!("{name} is in the {what} of process {:?}", process.file_name())),
            );
        }
    }
    let logs = fleet.fleet.layout.logs.clone();
    let traced = fs::read_to_string(logs.join("coordinator.log"))?;
    ensure!(traced.contains("TRACE") && traced.contains("h1"), "the coordinator's log is no trace");
    for path in files(&fleet.dir)? {
        let text = fs::read(&path)?;
        let mode = fs::metadata(&path)?.permissions().mode();
        let own = path.starts_with(fleet.dir.join("agents")) && path.extension().is_some_and(|e| e == "token");
        for (name, _) in secrets.iter().filter(|(_, s)| holds(&text, s)) {
            if !own && !keys.contains(&path) {
                wrong.push(format!("{name} is in {}", path.display()));
            }
            if mode & 0o077 != 0 {
                wrong.push(format!("{name} is in {}, which others may read (mode {mode:o})", path.display()));
            }
        }
    }
    let mode = fs::metadata(&home)?.permissions().mode() & 0o777;
    ensure!(mode == 0o700, "the home has mode {mode:o}");
    ensure!(wrong.is_empty(), "{wrong:#?}");
    fleet.finish()
}
