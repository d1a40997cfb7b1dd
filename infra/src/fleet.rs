//! A fleet on one machine: the real coordinator and real agents, each in its namespace of the lab, as the demo and the
//! live tests start them.
//!
//! Owns the processes and how they are started, watched and ended. Knows nothing of experiments: what the fleet is told
//! goes through `drumsctl`, as an operator's words would.

use std::{
    fs::{self, File},
    io,
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use crate::lab::{Lab, LabError, Member};

#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    #[error("cannot make the lab network")]
    Lab(#[from] LabError),
    #[error("cannot {attempt} {path}")]
    File {
        attempt: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start {name}")]
    Start {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("{name} ended with {status} before it was ready; the end of its log {log}:\n{tail}")]
    Died { name: String, status: ExitStatus, log: PathBuf, tail: String },
    #[error("{name} was not ready after {waited_s} s: {state}; its log is {log}")]
    NotReady { name: String, waited_s: u64, state: String, log: PathBuf },
    #[error("`drumsctl {arguments}` ended with {status}: {said}")]
    Ctl { arguments: String, status: ExitStatus, said: String },
    #[error("no host is called {0} in this fleet")]
    NoHost(String),
}

/// Where the project's own programs are.
#[derive(Clone, Debug)]
pub struct Binaries {
    pub coordinator: PathBuf,
    pub drumsctl: PathBuf,
    pub agent: PathBuf,
}

impl Binaries {
    /// The programs in one folder, as cargo lays them.
    pub fn beside(folder: &Path) -> Self {
        let at = |name| folder.join(name);
        Self { coordinator: at("drums-coordinator"), drumsctl: at("drumsctl"), agent: at("drums-agent") }
    }
}

/// A daemon that this process started: in its own process group, so that a Ctrl-C at the terminal reaches only us and
/// everything ends in order; told to end when the thread that started it dies.
#[derive(Debug)]
pub struct Daemon {
    pub name: String,
    pub log: PathBuf,
    child: Child,
}

impl Daemon {
    pub fn start(
        name: &str,
        member: &Member,
        command: &mut Command,
        log: &Path,
        filter: Option<&str>,
    ) -> Result<Self, FleetError> {
        let out = File::options().create(true).append(true).open(log).map_err(|source| FleetError::File {
            attempt: "open",
            path: log.to_owned(),
            source,
        })?;
        let error = out.try_clone().map_err(|source| FleetError::File {
            attempt: "duplicate the descriptor of",
            path: log.to_owned(),
            source,
        })?;
        if let Some(filter) = filter {
            command.env("DRUMS_LOG", filter);
        }
        command.stdin(Stdio::null()).stdout(out).stderr(error).process_group(0).env("NO_COLOR", "1");
        let child = member
            .enter(end_with_parent(command))
            .spawn()
            .map_err(|source| FleetError::Start { name: name.to_owned(), source })?;
        Ok(Self { name: name.to_owned(), log: log.to_owned(), child })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    fn check_alive(&mut self) -> Result<(), FleetError> {
        match self.ended() {
            None => Ok(()),
            Some(status) => Err(FleetError::Died {
                name: self.name.clone(),
                status,
                log: self.log.clone(),
                tail: tail(&self.log, 12),
            }),
        }
    }

    /// SIGKILL: what a crash looks like. Returns once it is reaped.
    pub fn kill(&mut self) {
        // Both fail only for a child that has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks for an orderly end and waits for it; kills after `patience`. True if it ended by itself.
    pub fn stop(&mut self, patience: Duration) -> bool {
        let pid = nix::unistd::Pid::from_raw(self.pid().cast_signed());
        if self.ended().is_none() {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        }
        let ended = wait_until(patience, || self.ended().is_some());
        self.kill();
        ended
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One host of the fleet: its state folder and, while it runs, its agent.
#[derive(Debug)]
pub struct Host {
    pub name: String,
    pub state: PathBuf,
    pub agent: Option<Daemon>,
}

/// What a fleet is made of.
#[derive(Clone, Debug)]
pub struct Layout {
    pub binaries: Binaries,
    /// The coordinator's home.
    pub home: PathBuf,
    /// Below it one state folder per agent.
    pub states: PathBuf,
    pub logs: PathBuf,
    /// Where `drums-agent setup` has put CRIU, runc and QEMU.
    pub tools: PathBuf,
    /// What the coordinator's configuration says beyond where it is reached, TOML: tests shorten its leases.
    pub coordinator_config: String,
    /// What the daemons log, as `DRUMS_LOG` says it; none: their default.
    pub log: Option<String>,
}

#[derive(Debug)]
pub struct Fleet {
    pub layout: Layout,
    pub lab: Lab,
    pub coordinator: Option<Daemon>,
    pub hosts: Vec<Host>,
}

/// How long a daemon may take to be ready.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long an orderly end may take: an agent undoes what it made before it goes.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

impl Fleet {
    /// Makes the lab and the coordinator's home; starts nothing yet.
    pub fn prepare(layout: Layout, hosts: &[&str]) -> Result<Self, FleetError> {
        for path in [&layout.states, &layout.logs] {
            fs::create_dir_all(path).map_err(|source| FleetError::File {
                attempt: "create",
                path: path.clone(),
                source,
            })?;
        }
        let lab = Lab::new(hosts)?;
        let host = |name: &&str| Host { name: (*name).to_owned(), state: layout.states.join(name), agent: None };
        let hosts = hosts.iter().map(host).collect();
        let fleet = Self { layout, lab, coordinator: None, hosts };
        fleet.ctl(&["init"])?;
        let path = fleet.layout.home.join("coordinator.toml");
        let config =
            format!("advertise = [\"{}\"]\n{}", fleet.lab.coordinator.address, fleet.layout.coordinator_config);
        fs::write(&path, config).map_err(|source| FleetError::File { attempt: "write", path, source })?;
        Ok(fleet)
    }

    pub fn start_coordinator(&mut self) -> Result<(), FleetError> {
        let mut command = Command::new(&self.layout.binaries.coordinator);
        command.arg("--home").arg(&self.layout.home);
        let log = self.layout.logs.join("coordinator.log");
        let mut daemon =
            Daemon::start("drums-coordinator", &self.lab.coordinator, &mut command, &log, self.layout.log.as_deref())?;
        let socket = self.layout.home.join("drums.sock");
        let ready = wait_until(START_PATIENCE, || daemon.ended().is_some() || UnixStream::connect(&socket).is_ok());
        daemon.check_alive()?;
        if !ready {
            return Err(not_ready(&daemon, "its unix socket answers nobody"));
        }
        self.coordinator = Some(daemon);
        Ok(())
    }

    /// Adds a host and starts its agent with the token that this printed; waits until the coordinator shows it connected.
    pub fn enrol(&mut self, name: &str) -> Result<(), FleetError> {
        let token = self.ctl(&["host", "add", name])?;
        let path = self.layout.states.join(format!("{name}.token"));
        let word = token.split_whitespace().find(|w| w.starts_with("drums1.")).unwrap_or_default();
        write_private(&path, word.as_bytes())?;
        self.start_new_agent(name, &path)
    }

    /// Starts the agent of a host that enrols with the token in this file.
    pub fn start_new_agent(&mut self, name: &str, token: &Path) -> Result<(), FleetError> {
        self.start_agent_with(name, &["--token-file".as_ref(), token.as_os_str()])
    }

    /// Starts the agent of a host that has enrolled before.
    pub fn start_agent(&mut self, name: &str) -> Result<(), FleetError> {
        self.start_agent_with(name, &[])
    }

    fn start_agent_with(&mut self, name: &str, arguments: &[&std::ffi::OsStr]) -> Result<(), FleetError> {
        let member = self.lab.host(name).ok_or_else(|| FleetError::NoHost(name.to_owned()))?;
        let mut command = Command::new(&self.layout.binaries.agent);
        command.arg("run").arg("--state").arg(self.layout.states.join(name));
        command.arg("--tools").arg(&self.layout.tools).args(arguments);
        let log = self.layout.logs.join(format!("{name}.log"));
        let mut daemon =
            Daemon::start(&format!("drums-agent on {name}"), member, &mut command, &log, self.layout.log.as_deref())?;
        let mut state = String::new();
        let ready = wait_until(START_PATIENCE, || {
            state = self.host_state(name).unwrap_or_else(|e| e.to_string());
            daemon.ended().is_some() || state == "connected"
        });
        daemon.check_alive()?;
        if !ready {
            return Err(not_ready(&daemon, &format!("the coordinator shows it as {state:?}")));
        }
        self.host_mut(name)?.agent = Some(daemon);
        Ok(())
    }

    /// What the coordinator says about a host's connection.
    pub fn host_state(&self, name: &str) -> Result<String, FleetError> {
        let fleet: serde_json::Value = serde_json::from_str(&self.ctl(&["fleet", "--json"])?).unwrap_or_default();
        let hosts = fleet.get("hosts").unwrap_or(&fleet).as_array().cloned().unwrap_or_default();
        let host = hosts.iter().find(|h| ["host", "name"].iter().any(|k| h.get(k).is_some_and(|v| v == name)));
        Ok(host.and_then(|h| h.get("state")?.as_str()).unwrap_or("unknown").to_owned())
    }

    pub fn host_mut(&mut self, name: &str) -> Result<&mut Host, FleetError> {
        self.hosts.iter_mut().find(|h| h.name == name).ok_or_else(|| FleetError::NoHost(name.to_owned()))
    }

    /// `drumsctl` with this fleet's home: the home's unix socket needs no network.
    pub fn drumsctl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.layout.binaries.drumsctl);
        command.arg("--home").arg(&self.layout.home).args(arguments);
        end_with_parent(&mut command);
        command
    }

    /// Runs `drumsctl` to its end; standard output if it succeeded.
    pub fn ctl(&self, arguments: &[&str]) -> Result<String, FleetError> {
        let output = self.ctl_output(arguments)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(FleetError::Ctl {
            arguments: arguments.join(" "),
            status: output.status,
            said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Runs `drumsctl` to its end, whatever that is.
    pub fn ctl_output(&self, arguments: &[&str]) -> Result<Output, FleetError> {
        let mut command = self.drumsctl(arguments);
        command.stdin(Stdio::null()).env("NO_COLOR", "1");
        command.output().map_err(|source| FleetError::Start { name: "drumsctl".to_owned(), source })
    }

    /// The installation ids of the agents, which every name that they make carries.
    pub fn installations(&self) -> Vec<String> {
        let read = |h: &Host| fs::read_to_string(h.state.join("installation")).ok();
        self.hosts.iter().filter_map(read).map(|id| format!("drums-{}", id.trim())).collect()
    }

    /// What an agent's audit finds, as it prints it; the agent must not be running.
    pub fn audit(&self, name: &str) -> Result<Output, FleetError> {
        audit(&self.layout.binaries.agent, &self.layout.states.join(name), &self.layout.tools)
    }

    /// Ends everything in order: agents first, since they report their end to the coordinator. Names what had to be
    /// killed.
    pub fn stop(&mut self) -> Vec<String> {
        let agents = self.hosts.iter_mut().filter_map(|h| h.agent.take());
        let mut all: Vec<Daemon> = agents.collect();
        all.extend(self.coordinator.take());
        all.iter_mut().filter_map(|d| (!d.stop(STOP_PATIENCE)).then(|| d.name.clone())).collect()
    }
}

/// Whoever started it may be killed: what waits for a coordinator would then wait for ever.
fn end_with_parent(command: &mut Command) -> &mut Command {
    let hook = || nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM).map_err(io::Error::from);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
    unsafe { command.pre_exec(hook) }
}

/// Runs `drums-agent audit`: compares a state folder's ledger with the kernel and undoes what is left.
pub fn audit(agent: &Path, state: &Path, tools: &Path) -> Result<Output, FleetError> {
    let mut command = Command::new(agent);
    command.arg("audit").arg("--state").arg(state).arg("--tools").arg(tools).stdin(Stdio::null());
    command.output().map_err(|source| FleetError::Start { name: "drums-agent audit".to_owned(), source })
}

/// Looks at a condition until it holds, at most `patience`. True if it came to hold.
pub fn wait_until(patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        pause(Duration::from_millis(50));
    }
}

/// The pause between two looks at a condition for which there is no event.
#[allow(clippy::disallowed_methods)] // a poll with a deadline, which is what the ban asks for
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

fn not_ready(daemon: &Daemon, state: &str) -> FleetError {
    FleetError::NotReady {
        name: daemon.name.clone(),
        waited_s: START_PATIENCE.as_secs(),
        state: state.to_owned(),
        log: daemon.log.clone(),
    }
}

/// Writes a file that only its owner reads.
fn write_private(path: &Path, bytes: &[u8]) -> Result<(), FleetError> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let write = || File::options().create(true).truncate(true).write(true).mode(0o600).open(path)?.write_all(bytes);
    write().map_err(|source| FleetError::File { attempt: "write", path: path.to_owned(), source })
}

/// The last lines of a log, for an error message.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
