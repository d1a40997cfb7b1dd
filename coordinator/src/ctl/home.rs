//! `init`, `doctor`, `backup`: a home on this machine.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use drums_common::{
    clock::Clock as _, digest::Sha256, experiment::WorkloadManifest, ids::InstallationId, say, telemetry::chain,
};
use serde::Serialize;

use super::{Client, CtlError, Global, output, place, server};
use crate::{
    api::views::{FleetView, StatusView, utc},
    clock::SystemClock,
    config::{Home, PostgresConfig, RawConfig},
    disk,
    pki::Pki,
    store::{AuditQuery, AuditRow, SqliteStore, Store as _, Who, WorkloadRow},
};

#[derive(Debug, Args)]
pub struct Init {
    /// Keep the store on a PostgreSQL server: postgres://USER@HOST/DATABASE, or postgres://USER@/DATABASE?host=/FOLDER
    /// for a unix socket. Default: SQLite in the home.
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// The file with the server's password; it stays where it is.
    #[arg(long, value_name = "FILE", requires = "store")]
    pub store_password_file: Option<PathBuf>,
    /// The CA (PEM) that the server's certificate is of; needed over a network.
    #[arg(long, value_name = "FILE", requires = "store")]
    pub store_ca: Option<PathBuf>,
}

impl Init {
    fn server(&self) -> Option<PostgresConfig> {
        let absolute = |p: &PathBuf| std::path::absolute(p).unwrap_or_else(|_| p.clone());
        let url = self.store.as_ref()?;
        Some(PostgresConfig {
            password_file: self.store_password_file.as_ref().map(absolute),
            ca: self.store_ca.as_ref().map(absolute),
            ..PostgresConfig::new(url)
        })
    }
}

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
    ca_sha256: Sha256,
    operator_certificate: PathBuf,
    operator_key: PathBuf,
    /// False when the home was there.
    new: bool,
}

/// The longest path of a unix socket, without its closing zero.
const MAX_SOCKET: usize = 107;
/// What an `init` that broke off may leave, and what a new file system brings along.
const BEGUN: [&str; 10] = [
    "pki",
    "pki.begun",
    "store.sqlite",
    "store.sqlite-wal",
    "store.sqlite-shm",
    "store.sqlite-journal",
    "artifacts",
    "coordinator.toml",
    "coordinator.toml.begun",
    "lost+found",
];

/// Refuses what is no home and cannot become one; nothing is changed yet.
fn may_become_a_home(home: &Home) -> Result<(), CtlError> {
    let dir = home.dir();
    let socket = std::path::absolute(home.socket()).map_err(CtlError::file("read", dir))?;
    if socket.as_os_str().len() > MAX_SOCKET {
        let message =
            format!("{} is too long for a unix socket's path, which has at most {MAX_SOCKET} bytes", socket.display());
        return Err(CtlError::bad(message, "give a --home with a shorter path"));
    }
    match fs::metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(CtlError::file("read", dir)(e)),
        Ok(m) if !m.is_dir() => {
            return Err(CtlError::bad(format!("{} is not a folder", dir.display()), "give another --home"));
        }
        Ok(_) => {}
    }
    if Pki::is_there(&home.pki()) || home.store().exists() {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(CtlError::file("read", dir))? {
        let name = entry.map_err(CtlError::file("read", dir))?.file_name();
        if !BEGUN.iter().any(|b| name == *b) {
            let message = format!("{} is no home and not empty: it has {}", dir.display(), name.to_string_lossy());
            let help = format!("a home is a folder of its own; try --home {}", dir.join("drums").display());
            return Err(CtlError::bad(message, help));
        }
    }
    Ok(())
}

/// The store of a home that is made now, or of one that was; keys and store are lost together or not at all.
fn open_store(home: &Home) -> Result<(SqliteStore, InstallationId), CtlError> {
    let attempt = || format!("making the home {}", home.dir().display());
    let help = "is another file in the way, or the disk full?";
    let restore = "restore the home from a backup (drumsctl backup says how), or make a new one elsewhere";
    let keys = Pki::is_there(&home.pki());
    let lost = |what: &str, left: &str| {
        CtlError::bad(format!("the home {} has lost its {what}: its {left} there", home.dir().display()), restore)
    };
    if keys && !fs::metadata(home.store()).is_ok_and(|m| m.len() > 0) {
        return Err(lost("store", "keys are"));
    }
    // A home that was there may be a coordinator's of another release, which runs.
    let open = if keys { SqliteStore::as_it_is } else { SqliteStore::open };
    let mut store = open(&home.store()).map_err(|e| CtlError::failed(attempt(), e, help))?;
    let fail = |e| CtlError::failed(attempt(), e, help);
    if keys && store.installation().map_err(fail)?.is_none() {
        return Err(lost("store's content", "keys are"));
    }
    // What `init` itself wrote before it broke off is no past.
    if !keys && store.audits(&AuditQuery::latest(2)).map_err(fail)?.iter().any(|a| a.row.action != "init") {
        return Err(lost("keys", "store is"));
    }
    let (drawn, audit) = drawn();
    let installation = store.meta_or("installation", &drawn, &audit).map_err(fail)?;
    let installation =
        installation.parse().map_err(|e: drums_common::ids::BadId| CtlError::failed(attempt(), e, restore))?;
    Ok((store, installation))
}

/// An installation's name, and the row that says who gave it.
pub(super) fn drawn() -> (String, AuditRow) {
    let drawn = InstallationId(rand::random()).to_string();
    let who = Who::new(format!("uid {}", nix::unistd::getuid()), "drumsctl init");
    let audit = AuditRow::new(SystemClock.now(), who, "init").detail(&drawn);
    (drawn, audit)
}

/// The settings that the home has, or gets now.
fn settings(home: &Home, c: &Init) -> Result<(RawConfig, bool), CtlError> {
    let there = RawConfig::read(&home.config())
        .map_err(|e| CtlError::failed("reading the home's configuration", e, "correct coordinator.toml in the home"))?;
    let asked = c.server();
    match there {
        None => Ok((RawConfig { postgres: asked, ..RawConfig::default() }, true)),
        Some(raw) if asked.is_none() || asked == raw.postgres => Ok((raw, false)),
        Some(raw) => {
            let held = raw.postgres.map_or_else(|| "SQLite in the home".to_owned(), |p| p.url);
            let message = format!("the home {} has its store already: {held}", home.dir().display());
            Err(CtlError::bad(message, "a store is not moved by init; make another home for another store"))
        }
    }
}

pub(super) fn init(global: &Global, c: &Init) -> Result<ExitCode, CtlError> {
    let home = Home::new(&global.home);
    let dir = home.dir();
    may_become_a_home(&home)?;
    fs::create_dir_all(dir).map_err(CtlError::file("create", dir))?;
    // One at a time: two would each put half of their keys in place. Released when the process ends, however it ends.
    let lock = fs::File::open(dir).map_err(CtlError::file("read", dir))?;
    lock.lock().map_err(CtlError::file("lock", dir))?;
    may_become_a_home(&home)?;
    let free = disk::free(dir).map_err(CtlError::file("read", dir))?;
    if free < disk::MIN_TO_START {
        let message = format!("there are {} MiB free at {}", free >> 20, dir.display());
        let help =
            format!("a home needs at least {} MiB: free some space, or give another --home", disk::MIN_TO_START >> 20);
        return Err(CtlError::bad(message, help));
    }
    // The CA's key is in there.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(CtlError::file("protect", dir))?;
    let (config, fresh) = settings(&home, c)?;
    let installation = match &config.postgres {
        None => open_store(&home)?.1,
        Some(at) => server::installation(&home, at)?,
    };
    for path in [home.store(), home.store().with_extension("sqlite-wal"), home.store().with_extension("sqlite-shm")] {
        if path.exists() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(CtlError::file("protect", &path))?;
        }
    }
    fs::create_dir_all(home.artifacts()).map_err(CtlError::file("create", home.artifacts()))?;
    if fresh {
        let text = toml::to_string_pretty(&config)
            .map_err(|e| CtlError::failed("writing the default configuration", e, "this is a fault of drumsctl"))?;
        let text =
            format!("# Configuration of drums-coordinator, with the defaults of what was not asked for.\n\n{text}");
        // Whole or absent: half a configuration would be read as one.
        let begun = home.config().with_extension("toml.begun");
        fs::write(&begun, text).map_err(CtlError::file("write", &begun))?;
        fs::rename(&begun, home.config()).map_err(CtlError::file("put in place", home.config()))?;
    }
    // Last: from here on it is a home.
    let (pki, new) = Pki::open_or_create(&home.pki(), SystemClock.now()).map_err(|e| {
        let help = "is another file in the way, or the disk full? Damaged keys come from a backup";
        CtlError::failed(format!("making the home {}", dir.display()), e, help)
    })?;
    if let Some(at) = &config.postgres {
        server::register_ca(at, pki.fingerprint())?;
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
        say!("{} {}", if new { "made home" } else { "home was there:" }, made.home.display())?;
        say!("installation   {}", made.installation)?;
        say!("CA SHA-256     {}", made.ca_sha256)?;
        say!("operator       {}", made.operator_certificate.display())?;
        say!("next           drums-coordinator --home {}", made.home.display())?;
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
    if global.api.is_none() && !home.dir().exists() {
        let nothing = Err(format!("there is no {}", home.dir().display()));
        check("home", nothing, "drumsctl init makes one; is --home right?");
    } else if global.api.is_none() {
        let folder = match fs::metadata(home.dir()) {
            Ok(m) if m.permissions().mode() & 0o077 != 0 => {
                Err(format!("others may look into it (mode {:o})", m.permissions().mode() & 0o777))
            }
            Ok(_) => Ok(home.dir().display().to_string()),
            Err(e) => Err(e.to_string()),
        };
        check("home", folder, "drumsctl init makes a home and protects it");
        let identity = |p: Pki| {
            let server = p.shown().certificate();
            let until = output::time(&utc(server.expires));
            format!("CA {}, server's certificate {} until {until}", p.fingerprint().short(), server.sha256.short())
        };
        let pki = Pki::open(&home.pki()).map(identity).map_err(|e| chain(&e));
        check("identity", pki, "drumsctl init makes it; a damaged one comes from a backup");
        let config = RawConfig::read(&home.config())
            .and_then(|c| c.unwrap_or_default().validate())
            .map(|c| format!("agents {}, enrolment {}, api {}", c.agents, c.enrol, c.api))
            .map_err(|e| chain(&e));
        check("configuration", config, "correct coordinator.toml in the home");
        let at = RawConfig::read(&home.config()).ok().flatten().and_then(|c| c.postgres);
        let store = match (at, fs::metadata(home.store())) {
            (Some(at), _) => server::look(&at),
            (None, Ok(m)) if m.len() > 0 => Ok(output::bytes(m.len())),
            (None, Ok(_)) => Err("it is empty".to_owned()),
            (None, Err(e)) => Err(e.to_string()),
        };
        let help = "drumsctl init makes it with the home; a lost one comes from a backup; a server must be running";
        check("store", store, help);
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
        output::table(&["", "what", "found", "what to do"], &rows)?;
    }
    Ok(ExitCode::from(if unreachable { super::error::UNREACHABLE } else { u8::from(bad > 0) }))
}

/// A run of the first comparison is a few MiB; below this something else fills the disk.
const MIN_FREE: u64 = 512 << 20;

fn disk(dir: &Path) -> Result<String, String> {
    let free = disk::free(dir).map_err(|e| e.to_string())?;
    let text = format!("{} MiB free", free >> 20);
    if free < MIN_FREE { Err(format!("{text}, {} MiB are needed", MIN_FREE >> 20)) } else { Ok(text) }
}

pub(super) fn backup(global: &Global, c: &Backup) -> Result<ExitCode, CtlError> {
    let home = Home::new(&global.home);
    let server = RawConfig::read(&home.config())
        .map_err(|e| CtlError::failed("reading the home's configuration", e, "correct coordinator.toml in the home"))?
        .and_then(|c| c.postgres);
    match fs::metadata(home.store()) {
        _ if server.is_some() => {}
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let message = format!("{} is not a home: it has no store", home.dir().display());
            return Err(CtlError::bad(message, "give the coordinator's --home"));
        }
        Err(e) => return Err(CtlError::file("read", home.store())(e)),
    }
    place::free(&c.file)?;
    // `free` has seen that the folder is there.
    let near = c.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let real = |path: &Path| path.canonicalize().map_err(CtlError::file("read", path));
    if real(near)?.starts_with(real(home.dir())?) {
        let message = format!("{} is inside the home", c.file.display());
        return Err(CtlError::bad(message, "a backup that is lost with its home is none: give a path outside of it"));
    }
    let attempt = || format!("backing up {}", home.dir().display());
    let help = "is there space left where the backup goes?";
    place::file(&c.file, 0o600, |out| {
        let fail = |e: io::Error| CtlError::failed(attempt(), e, help);
        // The store is copied as of one moment, also while its coordinator writes.
        let scratch = tempfile::tempdir_in(near).map_err(CtlError::file("make a scratch folder in", near))?;
        let copy = scratch.path().join("store.sqlite");
        match &server {
            None => {
                let mut store =
                    SqliteStore::as_it_is(&home.store()).map_err(|e| CtlError::failed(attempt(), e, help))?;
                whole(&home, &store.workloads().map_err(|e| CtlError::failed(attempt(), e, help))?)?;
                store.backup(&copy).map_err(|e| CtlError::failed(attempt(), e, help))?;
            }
            Some(at) => whole(&home, &server::workloads(at)?)?,
        }
        let encoder = zstd::Encoder::new(out, 3).map_err(fail)?;
        let mut tar = tar::Builder::new(encoder);
        if server.is_none() {
            tar.append_path_with_name(&copy, "store.sqlite").map_err(fail)?;
        }
        // With a server key of one moment: a rotation waits.
        let still = Pki::hold(&home.pki()).map_err(|e| CtlError::failed(attempt(), e, "is it a whole home?"))?;
        tar.append_dir_all("pki", home.pki()).map_err(fail)?;
        drop(still);
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
        tar.into_inner().map_err(fail)?.finish().map_err(fail)?.flush().map_err(fail)
    })?;
    if global.json {
        output::json(&serde_json::json!({ "backup": c.file }))?;
    } else {
        say!("backup {}", c.file.display())?;
        if let Some(at) = &server {
            say!("its store stays on the server: back that up with pg_dump {}", at.url)?;
        }
        say!("restore with: mkdir -m 700 DIR && tar --zstd -xpf {} -C DIR", c.file.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a home whose store names workloads that it cannot hand out: its backup could not, either.
fn whole(home: &Home, workloads: &[WorkloadRow]) -> Result<(), CtlError> {
    for w in workloads {
        let lacks = |what: &str, sha: Sha256| {
            let message = format!("the home lacks {what} of workload {}: artifacts/{sha}", w.name);
            CtlError::bad(message, "store the workload again with drumsctl workload add, then repeat the backup")
        };
        let artifact = |sha: Sha256| home.artifacts().join(sha.to_string());
        let manifest = fs::read(artifact(w.sha256))
            .ok()
            .filter(|bytes| Sha256::of(bytes) == w.sha256)
            .and_then(|bytes| serde_json::from_slice::<WorkloadManifest>(&bytes).ok())
            .ok_or_else(|| lacks("the manifest", w.sha256))?;
        for (path, file) in manifest.files.iter().filter(|(_, f)| f.kind == "file") {
            if !fs::metadata(artifact(file.sha256)).is_ok_and(|m| m.is_file() && m.len() == file.bytes) {
                return Err(lacks(path, file.sha256));
            }
        }
    }
    Ok(())
}
