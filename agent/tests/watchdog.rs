//! The real watchdog process, with leases of seconds and a program in the place of powering off.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use drums_agent::{
    facts::{Findings, Readings},
    measure::clock::{SystemClock, pause_before_looking_again},
    net::{KeptLease, Link, NextBeat},
    watchdog::lease::{Lease, boot_id, step_ms},
};
use drums_common::{
    clock::{Clock as _, MonoMicros},
    ids::Generation,
    machine::Accelerator,
    wire::latest::{BeatAck, Welcome},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const PATIENCE: Duration = Duration::from_secs(60);
const FINISH_MS: u64 = 1_000;
const LIFE_MS: u64 = 4_000;
const FAR_S: u64 = 100_000;

/// Where the process that plays the agent keeps its lease, and for how long.
const KEEP: &str = "DRUMS_TEST_KEEP_LEASE";
const KEEP_MS: &str = "DRUMS_TEST_KEEP_MS";

/// A host on which nothing is real but the watchdog and the time.
struct Host {
    dir: tempfile::TempDir,
    watchdog: Option<Child>,
}

impl Host {
    fn new(deadline_s: u64, lifetime_s: u64) -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap(), watchdog: None };
        let off = host.path("off");
        let program = host.path("power-off");
        fs::write(&program, format!("#!/bin/sh\necho \"$1\" > {0}.new && mv {0}.new {0}\n", off.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(host.path("deadline"), format!("DEADLINE_S={deadline_s}\nLIFETIME_S={lifetime_s}\n")).unwrap();
        let at = |name: &str| host.path(name).display().to_string();
        let config = format!(
            "[paid]\ndeadline = \"{}\"\nfolder = \"{}\"\nlived = \"{}\"\nfinish_s = {}\npower_off_in_tests = \"{}\"\n",
            at("deadline"),
            at("run"),
            at("lived"),
            FINISH_MS / 1_000,
            program.display(),
        );
        fs::write(host.path("agent.toml"), config).unwrap();
        host
    }

    /// With neither deadline nor lifetime near.
    fn long_lived() -> Self {
        Self::new(now_s() + FAR_S, uptime_s() + FAR_S)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn lease(&self) -> PathBuf {
        self.path("run/life-lease")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drums-agent"));
        command.arg("watchdog").arg("--config").arg(self.path("agent.toml")).arg("--state").arg(self.path("state"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Starts it and waits until it sleeps.
    fn watch(&mut self) {
        self.watchdog = Some(self.command().stderr(Stdio::null()).spawn().unwrap());
        until("the watchdog sleeps", || self.wakes_in_ms().is_some());
    }

    /// In how many milliseconds of the boot clock the watchdog is to be woken, as the kernel shows its timer.
    fn wakes_in_ms(&self) -> Option<u64> {
        let pid = self.watchdog.as_ref()?.id();
        let timers = fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?.flatten();
        timers.filter_map(|e| fs::read_to_string(e.path()).ok()).find_map(|text| {
            let boottime = text.lines().any(|l| l.trim() == format!("clockid: {}", libc::CLOCK_BOOTTIME));
            let value = text.lines().find_map(|l| l.strip_prefix("it_value: (")?.strip_suffix(')'));
            let (s, ns) = value.filter(|_| boottime)?.split_once(", ")?;
            let ms = s.parse::<u64>().ok()? * 1_000 + ns.parse::<u64>().ok()? / 1_000_000;
            (ms > 0).then_some(ms)
        })
    }

    /// An agent as a process of its own: this program with the one test that is one.
    fn agent(&self) -> Agent {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "an_agent_keeps_its_lease_while_its_coordinator_answers"]).env(KEEP, self.lease());
        command.env(KEEP_MS, (10 * PATIENCE).as_millis().to_string()).stdin(Stdio::null()).stdout(Stdio::null());
        Agent(command.spawn().unwrap())
    }

    /// When the lease that was kept last is over.
    fn kept(&self) -> Option<MonoMicros> {
        let lease = Lease::read(&self.lease()).ok()?;
        Some(lease.life_ends.plus_ms(step_ms(LIFE_MS) + FINISH_MS))
    }

    /// Waits until this host has lived for longer than the first lease that its agent was given, because of those after it.
    fn outlive_a_lease(&self) {
        let mut first = None;
        until("the agent keeps its lease", || {
            first = self.kept();
            first.is_some()
        });
        until("the first lease is over", || first.is_some_and(|f| SystemClock.boottime() > f.plus_ms(500)));
        assert!(!self.path("off").exists(), "powered off although its agent renews its lease");
    }

    fn kill(&mut self) {
        let mut child = self.watchdog.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A lease as an agent keeps it, which ends so long from now, seen by the watchdog; when it is over.
    fn renew(&self, left_ms: u64) -> MonoMicros {
        let life_ends = SystemClock.boottime().plus_ms(left_ms);
        Lease { boot: boot_id().unwrap(), life_ends, life_ms: LIFE_MS, deadline: None }.write(&self.lease()).unwrap();
        let over = life_ends.plus_ms(step_ms(LIFE_MS) + FINISH_MS);
        until("the watchdog sleeps until the lease is over", || {
            let wakes = self.wakes_in_ms().map(|ms| SystemClock.boottime().plus_ms(ms));
            self.path("off").exists() || wakes.is_some_and(|at| over.us_since(at).max(at.us_since(over)) < 300_000)
        });
        over
    }

    /// Waits until it is off; the reason, and the first instant at which that was seen.
    fn off(&self) -> (String, MonoMicros) {
        let path = self.path("off");
        until("the host is powered off", || path.exists());
        (fs::read_to_string(path).unwrap(), SystemClock.boottime())
    }

    /// It is off because of its lease, and not before that is over.
    fn off_by_lease(&self, over: MonoMicros) {
        let (why, at) = self.off();
        assert!(why.contains("life lease"), "{why}");
        assert!(at >= over, "powered off {} ms too early", over.ms_since(at));
    }
}

struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(child) = &mut self.watchdog {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not seen within {} s: {what}", PATIENCE.as_secs());
        pause_before_looking_again(Duration::from_millis(10));
    }
}

fn now_s() -> u64 {
    u64::try_from(SystemClock.now().0 / 1_000_000).unwrap()
}

fn uptime_s() -> u64 {
    SystemClock.boottime().0 / 1_000_000
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_host_is_off_when_its_lease_is_over_and_not_before() {
    let mut host = Host::long_lived();
    host.watch();
    let first = host.renew(LIFE_MS);
    let over = host.renew(LIFE_MS + 1_500);
    assert!(over > first);
    host.off_by_lease(over);
    assert!(host.watchdog.as_mut().unwrap().wait().unwrap().success());
}

/// The real link, and a coordinator that answers each of its beats.
#[test]
fn an_agent_keeps_its_lease_while_its_coordinator_answers() {
    // As a process that is going to be killed it is given its place, and would leave its own behind.
    let own = std::env::var_os(KEEP).is_none().then(|| tempfile::tempdir().unwrap());
    let path = own.as_ref().map_or_else(|| std::env::var_os(KEEP).unwrap().into(), |d| d.path().join("life-lease"));
    let ms = std::env::var(KEEP_MS).map_or(1_500, |ms| ms.parse().unwrap());
    let facts = Readings::take(Path::new("/")).describe(Findings {
        tools: Default::default(),
        accelerator: Accelerator::None,
        accelerator_detail: String::new(),
        unfit: Default::default(),
    });
    let link = Link::unplugged(std::sync::Arc::new(SystemClock), facts);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.spawn(link.keep_lease(KeptLease { path: path.clone(), boot: boot_id().unwrap(), deadline: None }));
    let welcome = Welcome {
        host: "h1".parse().unwrap(),
        generation: Generation(1),
        beat_ms: 50,
        dispatch_lease_ms: 1_000,
        life_lease_ms: LIFE_MS,
    };
    let begun = SystemClock.boottime();
    link.network_side().welcomed(&welcome, begun).unwrap();
    let end = begun.plus_ms(ms);
    while SystemClock.boottime() < end {
        let NextBeat::Send(beat) = link.network_side().next_beat() else { panic!("nobody declared silence") };
        link.network_side().acked(&BeatAck { generation: beat.generation, number: beat.number, sent: beat.sent });
        pause_before_looking_again(Duration::from_millis(50));
    }
    let kept = Lease::read(&path).unwrap();
    assert!(kept.life_ends > begun.plus_ms(LIFE_MS + ms / 2), "it was renewed: {kept:?}");
}

#[test]
fn a_host_whose_agent_is_killed_is_off_after_its_lease() {
    let mut host = Host::long_lived();
    host.watch();
    let agent = host.agent();
    host.outlive_a_lease();
    drop(agent);
    host.off_by_lease(host.kept().unwrap());
}

#[test]
fn a_host_whose_agent_is_stopped_is_off_after_its_lease() {
    let mut host = Host::long_lived();
    host.watch();
    let agent = host.agent();
    host.outlive_a_lease();
    kill(Pid::from_raw(agent.0.id().cast_signed()), Signal::SIGSTOP).unwrap();
    host.off_by_lease(host.kept().unwrap());
}

#[test]
fn a_host_whose_agent_is_back_in_time_lives_on() {
    let mut host = Host::long_lived();
    host.watch();
    let first = host.agent();
    until("the agent keeps its lease", || host.kept().is_some());
    drop(first);
    let left = host.kept().unwrap();
    let _second = host.agent();
    until("the lease of the first is over", || SystemClock.boottime() > left.plus_ms(500));
    assert!(!host.path("off").exists() && host.kept() > Some(left));
}

#[test]
fn a_file_that_is_torn_removed_or_of_another_boot_gives_no_time() {
    type Harm = fn(&Host);
    let harms: [Harm; 4] = [
        |host| {
            let whole = fs::read(host.lease()).unwrap();
            fs::write(host.lease(), &whole[..whole.len() / 2]).unwrap();
        },
        |host| fs::remove_file(host.lease()).unwrap(),
        |host| fs::remove_dir_all(host.path("run")).unwrap(),
        |host| {
            let life_ends = MonoMicros(u64::MAX);
            let forged = Lease { boot: "another".to_owned(), life_ends, life_ms: LIFE_MS, deadline: None };
            forged.write(&host.lease()).unwrap();
        },
    ];
    for harm in harms {
        let mut host = Host::long_lived();
        host.watch();
        let over = host.renew(1_000);
        harm(&host);
        host.off_by_lease(over);
    }
}

#[test]
fn a_watchdog_that_was_killed_and_started_again_goes_by_the_same_lease() {
    let mut host = Host::long_lived();
    host.watch();
    let over = host.renew(2_000);
    host.kill();
    host.watchdog = Some(host.command().stderr(Stdio::null()).spawn().unwrap());
    host.off_by_lease(over);
}

#[test]
fn a_host_is_off_at_its_deadline_whatever_its_lease_says() {
    let deadline_s = now_s() + 3;
    let mut host = Host::new(deadline_s, uptime_s() + FAR_S);
    host.watch();
    host.renew(2 * LIFE_MS);
    let (why, _) = host.off();
    assert!(why.contains("deadline") && now_s() >= deadline_s, "{why}");
}

/// Whose clock is years behind has a deadline that is years away.
#[test]
fn a_host_is_off_at_the_end_of_its_lifetime_over_all_its_boots() {
    let end_s = uptime_s() + 3;
    let mut host = Host::new(now_s() + FAR_S, 1_000 + end_s);
    fs::create_dir(host.path("lived")).unwrap();
    fs::write(host.path("lived/another-boot"), "1000\n").unwrap();
    host.watch();
    let (why, at) = host.off();
    assert!(why.contains("lifetime") && at.0 >= end_s * 1_000_000, "{why}");
}

#[test]
fn a_host_that_is_not_paid_for_is_refused_and_never_off() {
    let host = Host::new(1, 1);
    fs::remove_file(host.path("deadline")).unwrap();
    let output = host.command().output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("not launched as a paid one") && words.contains("deadline"), "{words}");
    assert!(!host.path("off").exists());
}

#[test]
fn nothing_stands_in_for_powering_off_a_real_host() {
    let host = Host::new(1, 1);
    let config = fs::read_to_string(host.path("agent.toml")).unwrap();
    let real = config.replace(&host.path("deadline").display().to_string(), "/etc/drums/deadline");
    fs::write(host.path("agent.toml"), real).unwrap();
    let output = host.command().output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("power_off_in_tests") && words.contains("a real host"), "{words}");
    assert!(!host.path("off").exists());
}
