//! A PostgreSQL server for tests: Debian's, on a folder and a unix socket of its own, without a network unless asked for,
//! as a user without privileges. It ends with the test that started it, also when that fails or is killed.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Gid, Pid, Uid, User, chown},
};

use crate::fleet::{tail, wait_until};

const START_PATIENCE: Duration = Duration::from_secs(60);
const STOP_PATIENCE: Duration = Duration::from_secs(20);
/// The name of the one user and the one database.
const NAME: &str = "drums";

#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    #[error("there is no PostgreSQL server on this machine; `infra/prepare test` installs Debian's")]
    Missing,
    #[error("this user may not run a server, and there is neither a user postgres nor a user nobody")]
    NoUser,
    #[error("cannot {attempt} {}", path.display())]
    File { attempt: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot start {program}")]
    Start { program: &'static str, source: io::Error },
    #[error("{program} ended with {status}: {said}")]
    Failed { program: &'static str, status: ExitStatus, said: String },
    #[error("the server was not ready after {} s; the end of its log:\n{log}", START_PATIENCE.as_secs())]
    NotReady { log: String },
}

#[derive(Debug)]
pub struct Server {
    programs: PathBuf,
    owner: Owner,
    child: Option<Child>,
    address: Option<SocketAddr>,
    /// Further settings, as `name=value`.
    settings: Vec<String>,
    dir: tempfile::TempDir,
}

/// Whom the server runs as: it refuses root.
#[derive(Clone, Copy, Debug)]
struct Owner {
    uid: Uid,
    gid: Gid,
}

impl Owner {
    fn find() -> Result<Self, PostgresError> {
        let me = Self { uid: nix::unistd::geteuid(), gid: nix::unistd::getegid() };
        if !me.uid.is_root() {
            return Ok(me);
        }
        let named = |name| User::from_name(name).ok().flatten();
        let user = named("postgres").or_else(|| named("nobody")).ok_or(PostgresError::NoUser)?;
        Ok(Self { uid: user.uid, gid: user.gid })
    }
}

/// The newest server's programs, as Debian lays them.
fn programs() -> Result<PathBuf, PostgresError> {
    let versions = fs::read_dir("/usr/lib/postgresql").map_err(|_| PostgresError::Missing)?;
    let newest = versions
        .flatten()
        .filter_map(|v| Some((v.file_name().to_str()?.parse::<u32>().ok()?, v.path().join("bin"))))
        .filter(|(_, bin)| bin.join("postgres").exists())
        .max();
    newest.map(|(_, bin)| bin).ok_or(PostgresError::Missing)
}

impl Server {
    /// Makes a database of its own and starts the server on it.
    pub fn start() -> Result<Self, PostgresError> {
        Self::start_with(&[])
    }

    /// As `start`, with further settings of the server.
    pub fn start_with(settings: &[&str]) -> Result<Self, PostgresError> {
        let programs = programs()?;
        let owner = Owner::find()?;
        let file = |attempt, path: &Path| {
            let path = path.to_owned();
            move |source| PostgresError::File { attempt, path, source }
        };
        // Short: a unix socket's path has a limit.
        let dir = tempfile::Builder::new()
            .prefix("drums-pg-")
            .tempdir_in("/tmp")
            .map_err(file("make a folder in", Path::new("/tmp")))?;
        chown(dir.path(), Some(owner.uid), Some(owner.gid))
            .map_err(|e| file("give away", dir.path())(io::Error::from(e)))?;
        let settings = settings.iter().map(|s| (*s).to_owned()).collect();
        let mut server = Self { programs, owner, child: None, address: None, settings, dir };
        let data = server.data();
        let mut initdb = server.program("initdb");
        initdb.arg("-D").arg(&data).args(["-U", NAME, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]);
        run("initdb", &mut initdb)?;
        server.resume()?;
        server.psql("postgres", &format!("CREATE DATABASE {NAME}"))?;
        Ok(server)
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// The folder of its unix socket.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The address of its database over the unix socket.
    pub fn url(&self) -> String {
        self.url_of(NAME)
    }

    pub fn url_of(&self, database: &str) -> String {
        format!("postgres://{NAME}@/{database}?host={}", self.dir.path().display())
    }

    /// Another, empty database.
    pub fn database(&self, name: &str) -> Result<String, PostgresError> {
        self.psql("postgres", &format!("CREATE DATABASE {name}"))?;
        Ok(self.url_of(name))
    }

    /// Listens there too, from the next start.
    pub fn listen(&mut self, address: SocketAddr) {
        self.address = Some(address);
    }

    /// A file in the server's own folder, which only it reads, as keys must be.
    pub fn keep(&self, name: &str, content: &str) -> Result<PathBuf, PostgresError> {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.dir.path().join(name);
        let failed = |source| PostgresError::File { attempt: "write", path: path.clone(), source };
        fs::write(&path, content).map_err(failed)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        chown(&path, Some(self.owner.uid), Some(self.owner.gid)).map_err(|e| failed(e.into()))?;
        Ok(path)
    }

    pub fn set(&mut self, setting: &str) {
        self.settings.push(setting.to_owned());
    }

    /// Starts it again, with what it had.
    pub fn resume(&mut self) -> Result<(), PostgresError> {
        let log = self.dir.path().join("log");
        let open = fs::File::options().create(true).append(true).open(&log);
        let out = open.map_err(|source| PostgresError::File { attempt: "open", path: log.clone(), source })?;
        let mut command = self.program("postgres");
        command.arg("-D").arg(self.data()).arg("-k").arg(self.dir.path());
        // Nothing of a test outlives the machine, and no memory segment the server.
        let fixed = ["fsync=off", "dynamic_shared_memory_type=mmap", "max_connections=40", "shared_buffers=16MB"];
        for setting in fixed.into_iter().chain(self.settings.iter().map(String::as_str)) {
            command.arg("-c").arg(setting);
        }
        match self.address {
            Some(at) => {
                command.args(["-c", &format!("listen_addresses={}", at.ip()), "-c", &format!("port={}", at.port())])
            }
            None => command.args(["-c", "listen_addresses="]),
        };
        let copy =
            out.try_clone().map_err(|source| PostgresError::File { attempt: "open", path: log.clone(), source })?;
        command.stdin(Stdio::null()).stdout(out).stderr(copy).process_group(0);
        // After the change of user, which would clear it: SIGQUIT ends the server and all its processes at once.
        let end_with_parent = || nix::sys::prctl::set_pdeathsig(Signal::SIGQUIT).map_err(io::Error::from);
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
        unsafe { command.pre_exec(end_with_parent) };
        let child = command.spawn().map_err(|source| PostgresError::Start { program: "postgres", source })?;
        self.child = Some(child);
        let ready = wait_until(START_PATIENCE, || self.psql("postgres", "SELECT 1").is_ok() || self.ended());
        if !ready || self.ended() {
            return Err(PostgresError::NotReady { log: tail(&log, 12) });
        }
        Ok(())
    }

    fn ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|c| c.try_wait().ok().flatten().is_some())
    }

    /// Ends it at once, as a crash of the server does: open transactions are lost, committed ones are not.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // Fails only for a process that has ended.
        let _ = kill(pid(&child), Signal::SIGQUIT);
        if !wait_until(STOP_PATIENCE, || child.try_wait().ok().flatten().is_some()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Runs SQL as an operator would; what it printed, unaligned.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String, PostgresError> {
        let mut command = self.program("psql");
        command.args(["-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-U", NAME, "-d", database, "-c", sql]);
        command.arg("-h").arg(self.dir.path());
        if let Some(at) = self.address {
            command.arg("-p").arg(at.port().to_string());
        }
        Ok(String::from_utf8_lossy(&run("psql", &mut command)?.stdout).trim_end().to_owned())
    }

    /// Runs a file of SQL, as `pg_dump` writes them.
    pub fn load(&self, database: &str, file: &Path) -> Result<(), PostgresError> {
        let input = fs::File::open(file).map_err(|source| PostgresError::File {
            attempt: "open",
            path: file.to_owned(),
            source,
        })?;
        let mut command = self.program("psql");
        command.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-U", NAME, "-d", database]);
        command.arg("-h").arg(self.dir.path()).stdin(input);
        run("psql", &mut command).map(|_| ())
    }

    /// Everything in a database as SQL.
    pub fn dump(&self, database: &str) -> Result<String, PostgresError> {
        let mut command = self.program("pg_dump");
        command.args(["--inserts", "--no-owner", "--no-privileges", "-U", NAME, "-d", database]);
        command.arg("-h").arg(self.dir.path());
        Ok(String::from_utf8_lossy(&run("pg_dump", &mut command)?.stdout).into_owned())
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.current_dir("/").env("LC_ALL", "C").stdin(Stdio::null());
        if nix::unistd::geteuid().is_root() {
            command.uid(self.owner.uid.as_raw()).gid(self.owner.gid.as_raw());
        }
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

fn run(program: &'static str, command: &mut Command) -> Result<Output, PostgresError> {
    let output = command.output().map_err(|source| PostgresError::Start { program, source })?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(PostgresError::Failed { program, status: output.status, said })
}
