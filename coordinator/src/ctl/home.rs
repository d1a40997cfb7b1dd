//! `init`, `doctor`, `backup`: a home on this machine.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use drums_common::{clock::Clock as _, ids::InstallationId, telemetry::chain};
use serde::Serialize;

use super::{Client, CtlError, Global, output};
use crate::{
    api::views::{FleetView, StatusView},
    clock::SystemClock,
    config::{Home, RawConfig},
    pki::Pki,
    store::{SqliteStore, Store as _},
};

#[derive(Debug, Args)]
pub struct Init {}

#[derive(Debug, Args)]
pub struct Doctor {}

#[derive(Debug, Args)]
pub struct Backup {
    /// The file to make; it must not exist.
    pub file: PathBuf,
}

#[derive(Serialize)]
struct Made {
    home: PathBuf,
    installation: InstallationId,
    ca_sha256: drums_common::digest::Sha256,
    operator_certificate: PathBuf,
    operator_key: PathBuf,
    /// False when the home was there.
    new: bool,
}

pub(super) fn init(global: &Global, _: &Init) -> Result<ExitCode, CtlError> {
    let home = Home::new(&global.home);
    let dir = home.dir();
    let attempt = || format!("making the home {}", dir.display());
    if dir.exists() && !dir.is_dir() {
        return Err(CtlError::bad(format!("{} is not a folder", dir.display()), "give another --home"));
    }
    fs::create_dir_all(dir).map_err(CtlError::file("create", dir))?;
    // The CA's key is in there.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(CtlError::file("protect", dir))?;
    let help = "is another file in the way, or the disk full?";
    let (pki, new) =
        Pki::open_or_create(&home.pki(), SystemClock.now()).map_err(|e| CtlError::failed(attempt(), e, help))?;
    fs::create_dir_all(home.artifacts()).map_err(CtlError::file("create", home.artifacts()))?;
    let mut store = SqliteStore::open(&home.store()).map_err(|e| CtlError::failed(attempt(), e, help))?;
    let drawn = InstallationId(rand::random()).to_string();
    let installation = store.meta_or("installation", &drawn).map_err(|e| CtlError::failed(attempt(), e, help))?;
    let installation = installation
        .parse()
        .map_err(|e: drums_common::ids::BadId| CtlError::failed(attempt(), e, "restore the home from a backup"))?;
    for path in [home.store(), home.store().with_extension("sqlite-wal"), home.store().with_extension("sqlite-shm")] {
        if path.exists() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(CtlError::file("protect", &path))?;
        }
    }
    if !home.config().exists() {
        let text = toml::to_string_pretty(&RawConfig::default())
            .map_err(|e| CtlError::failed("writing the default configuration", e, "this is a fault of drumsctl"))?;
        let text = format!("# Configuration of drums-coordinator; every value is the default.\n\n{text}");
        // Whole or absent: half a configuration would be read as one.
        let begun = home.config().with_extension("toml.begun");
        fs::write(&begun, text).map_err(CtlError::file("write", &begun))?;
        fs::rename(&begun, home.config()).map_err(CtlError::file("put in place", home.config()))?;
    }
    let (operator_certificate, operator_key) = pki.operator_paths();
    let made = Made {
        home: dir.to_owned(),
        installation,
        ca_sha256: pki.fingerprint(),
        operator_certificate,
        operator_key,
        new,
    };
    if global.json {
        output::json(&made)?;
    } else {
        println!("{} {}", if new { "made home" } else { "home was there:" }, made.home.display());
        println!("installation   {}", made.installation);
        println!("CA SHA-256     {}", made.ca_sha256);
        println!("operator       {}", made.operator_certificate.display());
        println!("next           drums-coordinator --home {}", made.home.display());
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Check {
    name: &'static str,
    ok: bool,
    detail: String,
    help: String,
}

pub(super) async fn doctor(global: &Global, _: Doctor) -> Result<ExitCode, CtlError> {
    let mut checks = Vec::new();
    let mut check = |name, result: Result<String, String>, help: &str| {
        let ok = result.is_ok();
        let help = if ok { String::new() } else { help.to_owned() };
        let detail = result.unwrap_or_else(|e| e);
        checks.push(Check { name, ok, detail, help });
    };
    let home = Home::new(&global.home);
    if global.api.is_none() {
        let folder = match fs::metadata(home.dir()) {
            Ok(m) if m.permissions().mode() & 0o077 != 0 => {
                Err(format!("others may look into it (mode {:o})", m.permissions().mode() & 0o777))
            }
            Ok(_) => Ok(home.dir().display().to_string()),
            Err(e) => Err(e.to_string()),
        };
        check("home", folder, "drumsctl init makes a home and protects it");
        let pki = Pki::open(&home.pki()).map(|p| format!("CA {}", p.fingerprint().short())).map_err(|e| chain(&e));
        check("identity", pki, "drumsctl init makes it; a damaged one comes from a backup");
        let config = RawConfig::read(&home.config())
            .and_then(|c| c.unwrap_or_default().validate())
            .map(|c| format!("agents {}, enrolment {}, api {}", c.agents, c.enrol, c.api))
            .map_err(|e| chain(&e));
        check("configuration", config, "correct coordinator.toml in the home");
        check("disk", disk(home.dir()), "free some space: evidence is durable before it is acknowledged");
    }
    let client = Client::new(global);
    let reached = client.get::<StatusView>("/status").await;
    let unreachable = matches!(reached, Err(CtlError::Unreachable { .. }));
    let status = match &reached {
        Ok(s) if s.version != env!("CARGO_PKG_VERSION") => {
            Err(format!("it is version {}, drumsctl is {}", s.version, env!("CARGO_PKG_VERSION")))
        }
        Ok(s) => Ok(format!("version {}, up since {}", s.version, output::time(&s.up_since))),
        Err(e) => Err(chain(e)),
    };
    check("coordinator", status, "start drums-coordinator with this home, of the same version");
    if reached.is_ok() {
        let fleet = client.get::<FleetView>("/hosts").await;
        let hosts = match fleet {
            Ok(f) => {
                let live: Vec<_> = f.hosts.into_iter().filter(|h| h.state != "released").collect();
                for h in &live {
                    let connected = h.state == "connected";
                    let unfit: Vec<String> = h
                        .facts
                        .iter()
                        .flat_map(|f| f.unfit.iter().map(|(kind, why)| format!("{kind}: {why}")))
                        .collect();
                    let result = match (connected, unfit.is_empty()) {
                        (true, true) => Ok(format!("{}: every arm can run", h.name)),
                        (true, false) => Err(format!("{}: {}", h.name, unfit.join("; "))),
                        (false, _) => Err(format!("{}: {}", h.name, h.state)),
                    };
                    check("host", result, "on the host: drums-agent doctor, drums-agent setup, drums-agent run");
                }
                if live.is_empty() { Err("there is none".to_owned()) } else { Ok(format!("{} known", live.len())) }
            }
            Err(e) => Err(chain(&e)),
        };
        check("fleet", hosts, "drumsctl host add NAME makes a token for a host's agent");
    }
    let bad = checks.iter().filter(|c| !c.ok).count();
    if global.json {
        output::json(&checks)?;
    } else {
        let rows: Vec<Vec<String>> = checks
            .iter()
            .map(|c| {
                vec![if c.ok { "ok" } else { "FAULT" }.to_owned(), c.name.to_owned(), c.detail.clone(), c.help.clone()]
            })
            .collect();
        output::table(&["", "what", "found", "what to do"], &rows);
    }
    Ok(ExitCode::from(if unreachable { super::error::UNREACHABLE } else { u8::from(bad > 0) }))
}

/// A run of the first comparison is a few MiB; below this something else fills the disk.
const MIN_FREE: u64 = 512 << 20;

fn disk(dir: &Path) -> Result<String, String> {
    let s = nix::sys::statvfs::statvfs(dir).map_err(|e| e.to_string())?;
    let free = s.blocks_available() * s.fragment_size();
    let text = format!("{} MiB free", free >> 20);
    if free < MIN_FREE { Err(format!("{text}, {} MiB are needed", MIN_FREE >> 20)) } else { Ok(text) }
}

pub(super) fn backup(global: &Global, c: &Backup) -> Result<ExitCode, CtlError> {
    let home = Home::new(&global.home);
    if !home.store().exists() {
        let message = format!("{} is not a home: it has no store", home.dir().display());
        return Err(CtlError::bad(message, "give the coordinator's --home"));
    }
    let attempt = || format!("backing up {}", home.dir().display());
    let help = "is there space left where the backup goes?";
    let out =
        fs::File::options().create_new(true).write(true).mode(0o600).open(&c.file).map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => CtlError::bad(
                format!("{} exists already", c.file.display()),
                "a backup never overwrites: give a new name",
            ),
            _ => CtlError::file("create", &c.file)(e),
        })?;
    let result = (|| {
        // The store is copied as of one moment, also while its coordinator writes.
        let near = c.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let scratch = tempfile::tempdir_in(near).map_err(CtlError::file("make a scratch folder in", near))?;
        let copy = scratch.path().join("store.sqlite");
        let mut store = SqliteStore::open(&home.store()).map_err(|e| CtlError::failed(attempt(), e, help))?;
        store.backup(&copy).map_err(|e| CtlError::failed(attempt(), e, help))?;
        let fail = |e: std::io::Error| CtlError::failed(attempt(), e, help);
        let encoder = zstd::Encoder::new(out, 3).map_err(fail)?;
        let mut tar = tar::Builder::new(encoder);
        tar.append_path_with_name(&copy, "store.sqlite").map_err(fail)?;
        tar.append_dir_all("pki", home.pki()).map_err(fail)?;
        if home.config().exists() {
            tar.append_path_with_name(home.config(), "coordinator.toml").map_err(fail)?;
        }
        tar.append_dir("artifacts", home.artifacts()).map_err(fail)?;
        for entry in fs::read_dir(home.artifacts()).map_err(CtlError::file("read", home.artifacts()))? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name();
            // Uploads that are under way are nobody's yet.
            if !name.to_string_lossy().starts_with('.') {
                tar.append_path_with_name(entry.path(), Path::new("artifacts").join(name)).map_err(fail)?;
            }
        }
        let encoder = tar.into_inner().map_err(fail)?;
        let mut file = encoder.finish().map_err(fail)?;
        file.flush().map_err(fail)?;
        file.sync_all().map_err(fail)?;
        Ok(())
    })();
    if let Err(e) = result {
        // Half a backup is worse than none.
        let _ = fs::remove_file(&c.file);
        return Err(e);
    }
    println!("backup {}", c.file.display());
    println!("restore with: mkdir -m 700 DIR && tar --zstd -xpf {} -C DIR", c.file.display());
    Ok(ExitCode::SUCCESS)
}
