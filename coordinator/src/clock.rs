//! The daemon's real clock.

use drums_common::clock::{Clock, Micros, MonoMicros};
use nix::time::{ClockId, clock_gettime};

/// CLOCK_REALTIME and CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        Micros(i64::try_from(read(ClockId::CLOCK_REALTIME)).unwrap_or(i64::MAX))
    }
    fn boottime(&self) -> MonoMicros {
        MonoMicros(read(ClockId::CLOCK_BOOTTIME))
    }
}

fn read(clock: ClockId) -> u64 {
    // Both clocks exist on every kernel this runs on and the pointer is ours: the call has no way to fail.
    let Ok(t) = clock_gettime(clock) else { return 0 };
    let (s, n) = (u64::try_from(t.tv_sec()).unwrap_or(0), u64::try_from(t.tv_nsec()).unwrap_or(0));
    s.saturating_mul(1_000_000).saturating_add(n / 1_000)
}
