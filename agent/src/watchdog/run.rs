//! The watchdog's skin: reads the files, sleeps on two clocks, and powers off.

use std::{
    fs::DirBuilder,
    io,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::{
    clock::{Clock as _, Micros, MonoMicros},
    telemetry::chain,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        inotify::{AddWatchFlags, InitFlags, Inotify},
        time::TimeSpec,
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};

use super::{
    PaidSettings,
    bounds::{self, BoundsError},
    decide::{Next, Watch, Why},
    lease::{self, Lease, LeaseError},
    power::PowerOff,
};
use crate::{measure::clock::SystemClock, net::life};

/// Only while the lease's folder cannot be watched, so that nobody tells when it changes.
const LOOK: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum WatchdogError {
    #[error(
        "there is no {}, so this host was not launched as a paid one: the watchdog ends no other; on a paid host its user data writes that file",
        path.display()
    )]
    NotPaid { path: PathBuf },
    #[error("cannot tell this boot from another")]
    Boot(#[source] LeaseError),
    #[error("cannot make {what}; the host's own timer and its coordinator still end it")]
    Kernel { what: &'static str, source: Errno },
    #[error("this host could not be powered off ({why}); the watchdog is to be started again, and tries again")]
    PowerOff { why: Why, source: io::Error },
}

/// Watches until this host is to be powered off, and powers it off; `state` is the agent's folder. Why it did, where that
/// leaves anybody to tell.
pub fn run(settings: &PaidSettings, state: &Path) -> Result<Why, WatchdogError> {
    if !settings.is_paid_host() {
        return Err(WatchdogError::NotPaid { path: settings.deadline.clone() });
    }
    let boot = lease::boot_id().map_err(WatchdogError::Boot)?;
    let lived_before_ms = bounds::lived_before_ms(&settings.lived, &boot);
    let given_ms = life::noted(&state.join("spool"));
    let now = SystemClock.boottime();
    tracing::info!(deadline = %settings.deadline.display(), lease = %settings.lease_file().display(),
        lived_before_ms, ?given_ms, "watching over this paid host's end");
    let mut watch = Watch::begin(boot, now, settings.finish_s * 1_000, lived_before_ms, given_ms);
    let mut sleeper = Sleeper::new(&settings.folder)?;
    let mut said = Said::default();
    loop {
        // Before the look: what changes after it wakes us.
        sleeper.watch_folder();
        look(settings, &mut watch, &mut said);
        match watch.next(SystemClock.boottime(), SystemClock.now()) {
            Next::Wait { boottime, realtime } => sleeper.sleep(boottime, realtime)?,
            Next::PowerOff(why) => {
                let power = settings.power_off_in_tests.clone().map_or(PowerOff::ThisMachine, PowerOff::Program);
                return power.now(why).map(|()| why).map_err(|source| WatchdogError::PowerOff { why, source });
            }
        }
    }
}

/// The troubles that were said already: each once, not once a look.
#[derive(Default)]
struct Said {
    bounds: String,
    lease: String,
}

impl Said {
    fn once(place: &mut String, words: String, what: &str) {
        if *place != words {
            tracing::error!(error = %words, "{what}");
            *place = words;
        }
    }
}

fn look(settings: &PaidSettings, watch: &mut Watch, said: &mut Said) {
    match bounds::read(&settings.deadline) {
        Ok(bounds) => watch.saw_bounds(bounds),
        Err(e @ (BoundsError::Read { .. } | BoundsError::Damaged { .. })) => {
            Said::once(&mut said.bounds, chain(&e).to_string(), "what was read of this host's deadline before counts");
        }
    }
    match Lease::read(&settings.lease_file()) {
        Ok(lease) => match watch.saw_lease(&lease, SystemClock.boottime()) {
            Ok(()) => said.lease.clear(),
            Err(e) => Said::once(&mut said.lease, e.to_string(), "the life lease on this host is not gone by"),
        },
        // Before an agent was welcomed there is none; after that, what was read before counts.
        Err(e) if e.is_absent() => {}
        Err(e) => Said::once(&mut said.lease, chain(&e).to_string(), "the life lease on this host is not gone by"),
    }
}

/// Sleeps until an instant of either clock, a step of the wall clock, or a change in the lease's folder.
struct Sleeper {
    folder: PathBuf,
    changes: Inotify,
    watched: bool,
    boottime: TimerFd,
    realtime: TimerFd,
}

impl Sleeper {
    fn new(folder: &Path) -> Result<Self, WatchdogError> {
        let failed = |what| move |source| WatchdogError::Kernel { what, source };
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self {
            folder: folder.to_owned(),
            changes: Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).map_err(failed("a file watch"))?,
            // So that it is said if it cannot be.
            watched: true,
            boottime: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags).map_err(failed("a timer"))?,
            realtime: TimerFd::new(ClockId::CLOCK_REALTIME, flags).map_err(failed("a timer"))?,
        })
    }

    /// The folder as it is now: one that was removed is made again, and watched again.
    fn watch_folder(&mut self) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        let events = AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let added = made.map_err(|e| e.to_string()).and_then(|()| {
            // The same folder again is the same watch.
            self.changes.add_watch(&self.folder, events).map(drop).map_err(|e| e.to_string())
        });
        if let Err(e) = &added
            && self.watched
        {
            tracing::error!(folder = %self.folder.display(), error = e, "cannot be watched; it is looked at every ten seconds");
        }
        self.watched = added.is_ok();
    }

    fn sleep(&self, boottime: MonoMicros, realtime: Option<Micros>) -> Result<(), WatchdogError> {
        let failed = |what| move |source| WatchdogError::Kernel { what, source };
        let at = Expiration::OneShot(TimeSpec::from(Duration::from_micros(boottime.0)));
        self.boottime.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME).map_err(failed("a timer"))?;
        match realtime.map(|r| Duration::from_micros(r.0.unsigned_abs())) {
            None => self.realtime.unset().map_err(failed("a timer"))?,
            Some(at) => {
                // A clock that is set, whichever way, is a reason to look again.
                let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
                match self.realtime.set(Expiration::OneShot(TimeSpec::from(at)), flags) {
                    Ok(()) => {}
                    Err(Errno::ECANCELED) => return Ok(()),
                    Err(source) => return Err(WatchdogError::Kernel { what: "a timer", source }),
                }
            }
        }
        let timeout =
            if self.watched { PollTimeout::NONE } else { PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::MAX) };
        let fds = [self.changes.as_fd(), self.boottime.as_fd(), self.realtime.as_fd()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(source) => return Err(WatchdogError::Kernel { what: "a wait", source }),
        }
        // Emptied, so that the next wait is one. Timers are set anew before it.
        while matches!(self.changes.read_events(), Ok(events) if !events.is_empty()) {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Instant};

    use super::*;

    fn sleeper(folder: &Path) -> Sleeper {
        let mut sleeper = Sleeper::new(folder).unwrap();
        sleeper.watch_folder();
        sleeper
    }

    const LONG_MS: u64 = 600_000;

    #[test]
    fn it_sleeps_to_the_instant_of_either_clock_and_wakes_for_a_renewal_only() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("run");
        let mut it = sleeper(&folder);
        let begun = Instant::now();
        it.sleep(SystemClock.boottime().plus_ms(50), Some(SystemClock.now().plus_ms(LONG_MS))).unwrap();
        it.sleep(SystemClock.boottime().plus_ms(LONG_MS), Some(SystemClock.now().plus_ms(50))).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(100), "woken before either instant: {:?}", begun.elapsed());
        // A change between the watch and the sleep is not missed.
        fs::write(folder.join("x.new"), "").unwrap();
        fs::rename(folder.join("x.new"), folder.join("x")).unwrap();
        it.sleep(SystemClock.boottime().plus_ms(LONG_MS), None).unwrap();
        // It was read: the next sleep is one.
        let begun = Instant::now();
        it.sleep(SystemClock.boottime().plus_ms(50), None).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(50));
        // A folder that was removed is made again and watched again.
        fs::remove_dir_all(&folder).unwrap();
        it.sleep(SystemClock.boottime().plus_ms(LONG_MS), None).unwrap();
        it.watch_folder();
        let _ = it.sleep(SystemClock.boottime().plus_ms(50), None);
        fs::write(folder.join("y"), "").unwrap();
        it.sleep(SystemClock.boottime().plus_ms(LONG_MS), None).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
