//! Upgrades: another build takes this agent's place, or shows that it cannot.
//!
//! ```text
//! ordered, nothing open ─▶ fetched by digest ─▶ this agent ends orderly ─▶ the other is tried: audit, welcome, orderly end
//!        ├─ done in time: noted as the agent of this state folder; this process becomes it
//!        └─ not done: ended, noted as failed with the reason; this process becomes what it was
//! start ─▶ another build is noted ─▶ become it; given up after three starts without a welcome
//! ```
//! The process stays the same throughout, so a service manager sees one agent. Owns `agents/` of the state folder:
//!
//! ```text
//! agents/<sha256>        the program, whole and verified
//!        current.json    which of them is the agent of this folder, in the place of which, and its starts without a welcome
//!        failed.json     the last one that could not take over, under which order, and why
//! ```

use std::{
    ffi::OsString,
    fs,
    io::{self, Write as _},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use drums_common::{clock::Micros, digest::Sha256};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::signal::unix::{SignalKind, signal};

/// From the start of the other build to its orderly end. An agent audits in seconds; the welcome may take a reconnect.
pub const TRIAL: Duration = Duration::from_secs(90);
/// Of the trial, this much for the welcome.
pub const WELCOME: Duration = Duration::from_secs(60);
/// Hidden flag of `drums-agent run`: be welcomed, then end.
pub const TRIAL_FLAG: &str = "--trial";
const STARTS: u32 = 3;

#[derive(Debug, thiserror::Error)]
pub enum SuccessionError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is damaged: {source}; remove it: the installed agent runs then", path.display())]
    Damaged { path: PathBuf, source: serde_json::Error },
    #[error("cannot become {}", path.display())]
    Become { path: PathBuf, source: io::Error },
    #[error("cannot watch over the trial of {}", path.display())]
    Watch { path: PathBuf, source: io::Error },
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SuccessionError {
    let path = path.to_owned();
    move |source| SuccessionError::Io { doing, path, source }
}

/// Another build that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Successor {
    pub sha256: Sha256,
    /// When the operator ordered it: a second order of the same build is another one.
    pub ordered: Micros,
}

#[derive(Debug, Serialize, Deserialize)]
struct Current {
    sha256: Sha256,
    /// The installed build. When another one is installed, that one is the newest wish.
    instead_of: Sha256,
    starts: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Failed {
    successor: Successor,
    why: String,
}

/// How a trial came out.
#[derive(Debug, PartialEq, Eq)]
pub enum Trial {
    Proven,
    Failed(String),
    /// This process was told to stop meanwhile.
    Stopped,
}

#[derive(Clone, Debug)]
pub struct Succession {
    dir: PathBuf,
}

impl Succession {
    pub fn of(state: &Path) -> Self {
        Self { dir: state.join("agents") }
    }

    /// Where a build is, or is put when it was fetched and verified.
    pub fn program(&self, sha256: Sha256) -> PathBuf {
        self.dir.join(sha256.to_string())
    }

    /// Takes a verified file in as a program.
    pub fn install(&self, fetched: &Path, sha256: Sha256) -> Result<(), SuccessionError> {
        self.make_dir()?;
        fs::set_permissions(fetched, fs::Permissions::from_mode(0o755))
            .map_err(io_error("set the mode of", fetched))?;
        let path = self.program(sha256);
        fs::rename(fetched, &path).map_err(io_error("move the new agent to", &path))?;
        self.sync()
    }

    /// Why this order was given up before, if it was.
    pub fn failed(&self, successor: &Successor) -> Result<Option<String>, SuccessionError> {
        let failed: Option<Failed> = self.read("failed.json")?;
        Ok(failed.filter(|f| f.successor == *successor).map(|f| f.why))
    }

    pub fn note_failed(&self, successor: &Successor, why: &str) -> Result<(), SuccessionError> {
        self.write("failed.json", &Failed { successor: successor.clone(), why: why.to_owned() })?;
        self.remove_others(None)
    }

    /// At a start of build `me`: the program that is to run in its place.
    pub fn at_start(&self, me: Sha256) -> Result<Option<PathBuf>, SuccessionError> {
        let Some(current) = self.read::<Current>("current.json")? else { return Ok(None) };
        if current.sha256 == me {
            return Ok(None);
        }
        let program = self.program(current.sha256);
        let why = if current.instead_of != me {
            format!("build {} was installed instead", me.short())
        } else if current.starts >= STARTS {
            format!("it was started {STARTS} times without being welcomed")
        } else if !program.exists() {
            "its program is gone".to_owned()
        } else {
            self.write("current.json", &Current { starts: current.starts + 1, ..current })?;
            return Ok(Some(program));
        };
        tracing::warn!(build = %current.sha256.short(), why, "the upgrade is given up; the installed agent runs");
        let path = self.dir.join("current.json");
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
        self.remove_others(None)?;
        Ok(None)
    }

    /// The coordinator welcomed this agent: it works.
    pub fn welcomed(&self) -> Result<(), SuccessionError> {
        match self.read::<Current>("current.json")? {
            Some(current) if current.starts > 0 => self.write("current.json", &Current { starts: 0, ..current }),
            _ => Ok(()),
        }
    }

    /// From now on `sha256` is the agent of this folder. `me` is the build that ran until now.
    pub fn crown(&self, sha256: Sha256, me: Sha256) -> Result<(), SuccessionError> {
        let instead_of = self.read::<Current>("current.json")?.map_or(me, |c| c.instead_of);
        if instead_of == sha256 {
            // Back to what is installed.
            let path = self.dir.join("current.json");
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        } else {
            self.write("current.json", &Current { sha256, instead_of, starts: 0 })?;
        }
        self.remove_others(Some(sha256))
    }

    fn make_dir(&self) -> Result<(), SuccessionError> {
        fs::create_dir_all(&self.dir).map_err(io_error("make the folder", &self.dir))
    }

    /// Programs that are no longer anybody's agent.
    fn remove_others(&self, kept: Option<Sha256>) -> Result<(), SuccessionError> {
        let current = self.read::<Current>("current.json")?.map(|c| c.sha256);
        for entry in fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))?.flatten() {
            let Ok(sha256) = entry.file_name().to_string_lossy().parse::<Sha256>() else { continue };
            if Some(sha256) != current && Some(sha256) != kept {
                fs::remove_file(entry.path()).map_err(io_error("remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, SuccessionError> {
        let path = self.dir.join(name);
        match fs::read(&path) {
            Ok(json) => {
                serde_json::from_slice(&json).map(Some).map_err(|source| SuccessionError::Damaged { path, source })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error("read", &path)(e)),
        }
    }

    /// Whole or not at all.
    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), SuccessionError> {
        self.make_dir()?;
        let path = self.dir.join(name);
        let put = || {
            let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
            serde_json::to_writer(&mut file, value)?;
            file.flush()?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|e| e.error)?;
            fs::File::open(&self.dir)?.sync_all()
        };
        put().map_err(io_error("write", &path))
    }

    fn sync(&self) -> Result<(), SuccessionError> {
        fs::File::open(&self.dir).and_then(|d| d.sync_all()).map_err(io_error("sync", &self.dir))
    }
}

/// Runs the other build with this one's arguments until it ended, at most `bound`. It ends with this process.
pub fn try_out(program: &Path, arguments: &[OsString], bound: Duration) -> Result<Trial, SuccessionError> {
    let watch = |source| SuccessionError::Watch { path: program.to_owned(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(watch)?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate()).map_err(watch)?, signal(SignalKind::interrupt()).map_err(watch)?);
        let started = tokio::process::Command::new(program)
            .args(arguments)
            .arg(TRIAL_FLAG)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(e) => return Ok(Trial::Failed(format!("it cannot be started: {e}"))),
        };
        // All branches are cancel-safe. A child that is not waited for is killed and reaped below.
        let trial = tokio::select! {
            ended = child.wait() => match ended.map_err(watch)? {
                status if status.success() => Trial::Proven,
                status => Trial::Failed(format!("it ended with {status}; its log says why")),
            },
            () = tokio::time::sleep(bound) => Trial::Failed(format!("it was not done after {} s", bound.as_secs())),
            _ = terminate.recv() => Trial::Stopped,
            _ = interrupt.recv() => Trial::Stopped,
        };
        child
            .kill()
            .await
            .or_else(|e| if e.kind() == io::ErrorKind::InvalidInput { Ok(()) } else { Err(e) })
            .map_err(watch)?;
        Ok(trial)
    })
}

/// Replaces this process by `program` with the same arguments; returns only if that failed.
pub fn become_it(program: &Path, arguments: &[OsString]) -> SuccessionError {
    let source = std::process::Command::new(program).args(arguments).exec();
    SuccessionError::Become { path: program.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Sha256 = Sha256([1; 32]);
    const NEW: Sha256 = Sha256([2; 32]);

    fn ground() -> (tempfile::TempDir, Succession) {
        let dir = tempfile::tempdir().unwrap();
        let succession = Succession::of(dir.path());
        (dir, succession)
    }

    fn put(s: &Succession, sha256: Sha256) {
        let fetched = s.dir.parent().unwrap().join("fetched");
        fs::write(&fetched, "#!/bin/sh\n").unwrap();
        s.install(&fetched, sha256).unwrap();
    }

    #[test]
    fn a_build_that_took_over_runs_from_the_next_start_on_and_is_given_up_after_three_without_a_welcome() {
        let (_dir, s) = ground();
        assert_eq!(s.at_start(OLD).unwrap(), None);
        put(&s, NEW);
        assert_eq!(s.at_start(OLD).unwrap(), None, "fetched is not taken over");
        s.crown(NEW, OLD).unwrap();
        for _ in 0..5 {
            assert_eq!(s.at_start(OLD).unwrap(), Some(s.program(NEW)));
            assert_eq!(s.at_start(NEW).unwrap(), None, "it is who it is");
            s.welcomed().unwrap();
        }
        for _ in 0..3 {
            assert!(s.at_start(OLD).unwrap().is_some());
        }
        assert_eq!(s.at_start(OLD).unwrap(), None);
        assert!(!s.program(NEW).exists());
    }

    #[test]
    fn a_build_that_is_installed_later_wins() {
        let (_dir, s) = ground();
        put(&s, NEW);
        s.crown(NEW, OLD).unwrap();
        assert_eq!(s.at_start(Sha256([3; 32])).unwrap(), None);
        assert_eq!(s.at_start(OLD).unwrap(), None, "for good");
    }

    #[test]
    fn a_chain_of_upgrades_keeps_one_program_and_ends_at_the_installed_one() {
        let (_dir, s) = ground();
        put(&s, NEW);
        s.crown(NEW, OLD).unwrap();
        let third = Sha256([3; 32]);
        put(&s, third);
        s.crown(third, NEW).unwrap();
        assert!(!s.program(NEW).exists());
        assert_eq!(s.at_start(OLD).unwrap(), Some(s.program(third)));
        s.crown(OLD, third).unwrap();
        assert_eq!(s.at_start(OLD).unwrap(), None);
    }

    #[test]
    fn a_failure_is_remembered_for_its_order_only() {
        let (_dir, s) = ground();
        put(&s, NEW);
        let first = Successor { sha256: NEW, ordered: Micros(1) };
        s.note_failed(&first, "it crashed").unwrap();
        assert_eq!(s.failed(&first).unwrap().as_deref(), Some("it crashed"));
        assert_eq!(s.failed(&Successor { ordered: Micros(2), ..first }).unwrap(), None);
        assert!(!s.program(NEW).exists());
    }

    fn script(dir: &Path, text: &str) -> PathBuf {
        let path = dir.join("agent");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_trial_tells_what_became_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let arguments = [OsString::from("run")];
        let tried = |text: &str, bound| try_out(&script(dir.path(), text), &arguments, bound).unwrap();
        let long = Duration::from_secs(20);
        assert_eq!(tried("test \"$*\" = 'run --trial'", long), Trial::Proven);
        let Trial::Failed(why) = tried("exit 3", long) else { panic!("it failed") };
        assert!(why.contains("exit status: 3"), "{why}");
        let Trial::Failed(why) = tried("exec sleep 60", Duration::from_millis(100)) else { panic!("it hung") };
        assert!(why.contains("not done"), "{why}");
        let Trial::Failed(why) = try_out(dir.path(), &arguments, long).unwrap() else { panic!("it is a folder") };
        assert!(why.contains("cannot be started"), "{why}");
    }
}
