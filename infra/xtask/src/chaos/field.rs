//! The coordinator and the agents under fault: who should be up, who is, and what is done to them.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use drums_common::clock::Micros;
use drums_infra::fleet::{Binaries, Daemon, Fleet, Layout, tail, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Serialize;

use super::{
    clocks,
    disk::Disk,
    relay::{Relay, Way},
    schedule::{Fault, Kind, Target},
};

/// Where agents find the relay; the coordinator itself has the lab's first address.
const RELAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// Beats four times a second: what takes minutes in the field takes seconds here.
const LEASES: &str = "[leases]\nbeat_ms = 250\ndispatch_ms = 2000\nlife_ms = 12000\nsilent_ms = 1000\n\
                      quiet_slack_ms = 2500\n";
pub const LIFE_MS: u64 = 12_000;
/// A daemon that ended by itself is started again after this.
const RESTART_AFTER: Duration = Duration::from_millis(500);
/// An orderly end undoes what there is.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// A fault as it really happened, wall clock.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Happened {
    pub fault: Fault,
    pub began: Micros,
    pub ended: Option<Micros>,
}

/// A daemon's place.
struct Post {
    target: Target,
    name: String,
    daemon: Option<Daemon>,
    disk: Disk,
    /// It should be up from then on; none while a fault keeps it down.
    up_from: Option<Instant>,
    /// Its end is our doing.
    doomed: bool,
    /// Must be gone before the next start: its shim, whose start time reads otherwise by other clocks.
    before: Vec<u32>,
    /// By how much its clocks are ahead.
    hours: u32,
    /// When an orderly end was asked for.
    asked: Option<Instant>,
}

pub struct Field {
    pub fleet: Fleet,
    relay: Relay,
    posts: Vec<Post>,
    pub happened: Vec<Happened>,
    /// Ends that nobody caused, and other surprises.
    pub surprises: Vec<String>,
}

fn wall() -> Micros {
    Micros(jiff::Timestamp::now().as_microsecond())
}

impl Field {
    /// Coordinator and agents, enrolled and connected, in folders below `dir`.
    pub fn start(dir: &Path, binaries: Binaries, tools: &Path, hosts: &[&str], seed: u64) -> Result<Self> {
        let layout = Layout {
            binaries,
            home: dir.join("coordinator/home"),
            states: dir.join("agents"),
            logs: dir.join("logs"),
            tools: tools.to_owned(),
            coordinator_config: LEASES.to_owned(),
            log: None,
        };
        let mut posts = Vec::new();
        let names = std::iter::once("coordinator").chain(hosts.iter().copied());
        for (at, name) in names.enumerate() {
            let mount = if at == 0 { dir.join(name) } else { layout.states.join(name) };
            posts.push(Post {
                target: if at == 0 { Target::Coordinator } else { Target::Host(at - 1) },
                name: name.to_owned(),
                daemon: None,
                disk: Disk::make(&dir.join(format!("{name}.ext4")), &mount)?,
                up_from: None,
                doomed: false,
                before: Vec::new(),
                hours: 0,
                asked: None,
            });
        }
        let mut fleet = Fleet::prepare(layout, hosts)?;
        let own = fleet.lab.coordinator.address;
        fleet.lab.coordinator.also_at(RELAY)?;
        let config = format!("listen = \"{own}\"\nadvertise = [\"{RELAY}\"]\n{LEASES}");
        fs::write(fleet.layout.home.join("coordinator.toml"), config).context("cannot configure the coordinator")?;
        let addresses: Vec<Ipv4Addr> = fleet.lab.hosts.iter().map(|h| h.address).collect();
        let relay = Relay::start(&fleet.lab.coordinator, RELAY, own, &addresses, seed)?;
        fleet.start_coordinator()?;
        for host in hosts {
            fleet.enrol(host)?;
        }
        // From here on they are ours to kill.
        for post in &mut posts {
            post.daemon = match post.target {
                Target::Coordinator => fleet.coordinator.take(),
                _ => fleet.host_mut(&post.name)?.agent.take(),
            };
            post.up_from = Some(Instant::now());
        }
        Ok(Self { fleet, relay, posts, happened: Vec::new(), surprises: Vec::new() })
    }

    pub fn packets(&self) -> super::relay::Packets {
        self.relay.packets()
    }

    fn post(&mut self, target: Target) -> Result<&mut Post> {
        self.posts.iter_mut().find(|p| p.target == target).context("a fault for nobody")
    }

    /// A fault begins; its index is for its end. Cancels are the operator's.
    pub fn begin(&mut self, fault: Fault) -> Result<usize> {
        match fault.kind {
            Kind::Kill => self.post(fault.target)?.kill(),
            Kind::ClockStep => {
                let post = self.post(fault.target)?;
                post.before = post.pid().map(|pid| children(pid.as_raw())).unwrap_or_default();
                post.kill();
            }
            Kind::Restart => self.post(fault.target)?.ask_to_end(),
            Kind::Stall => self.post(fault.target)?.signal(Signal::SIGSTOP),
            Kind::FrozenDisk => self.post(fault.target)?.disk.freeze()?,
            _ => self.rule(fault, true),
        }
        self.happened.push(Happened { fault, began: wall(), ended: None });
        Ok(self.happened.len() - 1)
    }

    pub fn end(&mut self, index: usize) -> Result<()> {
        let fault = self.happened[index].fault;
        match fault.kind {
            Kind::Kill | Kind::Restart => self.post(fault.target)?.up_from = Some(Instant::now()),
            Kind::ClockStep => {
                let post = self.post(fault.target)?;
                (post.hours, post.up_from) = (fault.amount, Some(Instant::now()));
            }
            Kind::Stall => self.post(fault.target)?.signal(Signal::SIGCONT),
            Kind::FrozenDisk => self.post(fault.target)?.disk.thaw(),
            _ => self.rule(fault, false),
        }
        self.happened[index].ended = Some(wall());
        Ok(())
    }

    fn rule(&mut self, fault: Fault, on: bool) {
        let Target::Host(index) = fault.target else { return };
        let address = self.fleet.lab.hosts[index].address;
        let amount = if on { fault.amount } else { 0 };
        let both = |r: &mut super::relay::Rules, set: fn(&mut Way, u32)| {
            set(&mut r.to_coordinator, amount);
            set(&mut r.from_coordinator, amount);
        };
        self.relay.rule(address, |r| match fault.kind {
            Kind::Partition => (r.to_coordinator.cut, r.from_coordinator.cut) = (on, on),
            Kind::DeafCoordinator => r.to_coordinator.cut = on,
            Kind::DeafAgent => r.from_coordinator.cut = on,
            Kind::Loss => both(r, |way, n| way.loss = n),
            Kind::Duplication => both(r, |way, n| way.duplication = n),
            Kind::Reordering => both(r, |way, n| way.reordering = n),
            _ => {}
        });
    }

    /// Starts whoever should be up and is not; notices who ended by itself.
    pub fn tend(&mut self) -> Result<()> {
        let (fleet, surprises) = (&self.fleet, &mut self.surprises);
        for post in &mut self.posts {
            post.tend(fleet, surprises)?;
        }
        Ok(())
    }

    /// Everybody should be up, and is: nothing is left to start or to end.
    pub fn all_up(&mut self) -> bool {
        self.posts.iter_mut().all(|p| p.asked.is_none() && p.daemon.as_mut().is_some_and(|d| d.ended().is_none()))
    }

    /// Ends the daemons in order: agents first, since they report their end to the coordinator.
    pub fn stop(&mut self) -> Result<()> {
        for post in self.posts.iter_mut().rev() {
            if let Some(mut daemon) = post.daemon.take() {
                ensure!(
                    daemon.stop(STOP_PATIENCE),
                    "{} had to be killed at the end: {}",
                    post.name,
                    tail(&daemon.log, 5)
                );
            }
        }
        Ok(())
    }

    /// State folder of a host.
    pub fn state(&self, host: &str) -> PathBuf {
        self.fleet.layout.states.join(host)
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        // Nobody can end on a frozen disk or while it stands still.
        for post in &mut self.posts {
            post.disk.thaw();
            post.signal(Signal::SIGCONT);
        }
        for post in self.posts.iter_mut().rev() {
            post.daemon = None;
        }
        // What a killed agent's shim still holds would keep the disks busy.
        let hosts: Vec<String> = self.fleet.hosts.iter().map(|h| h.name.clone()).collect();
        for host in hosts.iter().filter(|h| self.state(h).join("ledger").exists()) {
            if let Err(e) = self.fleet.audit(host) {
                eprintln!("{e:#}");
            }
        }
    }
}

impl Post {
    fn pid(&self) -> Option<Pid> {
        self.daemon.as_ref().map(|d| Pid::from_raw(d.pid().cast_signed()))
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            // It has not been reaped, so the number is still its own.
            let _ = kill(pid, signal);
        }
    }

    fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        (self.up_from, self.doomed) = (None, true);
    }

    fn ask_to_end(&mut self) {
        self.signal(Signal::SIGTERM);
        (self.up_from, self.doomed, self.asked) = (None, true, Some(Instant::now()));
    }

    fn tend(&mut self, fleet: &Fleet, surprises: &mut Vec<String>) -> Result<()> {
        if let Some(daemon) = &mut self.daemon
            && let Some(status) = daemon.ended()
        {
            if !self.doomed {
                let last = tail(&daemon.log, 3);
                surprises.push(format!("{} ended by itself with {status}: {last}", self.name));
                self.up_from = Some(Instant::now() + RESTART_AFTER);
            }
            self.daemon = None;
            self.asked = None;
        }
        if let (Some(asked), Some(daemon)) = (self.asked, &mut self.daemon)
            && asked.elapsed() > STOP_PATIENCE
        {
            surprises.push(format!("{} did not end within {} s", self.name, STOP_PATIENCE.as_secs()));
            daemon.kill();
        }
        let due = self.daemon.is_none() && self.up_from.is_some_and(|at| Instant::now() >= at);
        self.before.retain(|pid| Path::new(&format!("/proc/{pid}")).exists());
        if due && self.before.is_empty() {
            self.daemon = Some(self.start(fleet)?);
            self.doomed = false;
        }
        Ok(())
    }

    fn start(&self, fleet: &Fleet) -> Result<Daemon> {
        let binaries = &fleet.layout.binaries;
        let (mut command, member, log) = match self.target {
            Target::Coordinator => {
                let mut command = Command::new(&binaries.coordinator);
                command.arg("--home").arg(&fleet.layout.home);
                (command, &fleet.lab.coordinator, "coordinator.log".to_owned())
            }
            _ => {
                let mut command = Command::new(&binaries.agent);
                command.arg("run").arg("--state").arg(fleet.layout.states.join(&self.name));
                command.arg("--tools").arg(&fleet.layout.tools);
                let member = fleet.lab.host(&self.name).context("no such host")?;
                (command, member, format!("{}.log", self.name))
            }
        };
        if self.hours > 0 {
            clocks::ahead(&mut command, self.hours);
        }
        Ok(Daemon::start(&self.name, member, &mut command, &fleet.layout.logs.join(log), None)?)
    }
}

/// Processes that this one started.
fn children(pid: i32) -> Vec<u32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(text.split_ascii_whitespace().filter_map(|p| p.parse::<u32>().ok()));
    }
    found
}

/// Waits for a condition that the field must be tended for meanwhile.
pub fn tended(field: &mut Field, patience: Duration, mut holds: impl FnMut(&mut Field) -> bool) -> Result<bool> {
    let mut failed = None;
    let held = wait_until(patience, || match field.tend() {
        Ok(()) => holds(field),
        Err(e) => {
            failed = Some(e);
            true
        }
    });
    failed.map_or(Ok(held), Err)
}
