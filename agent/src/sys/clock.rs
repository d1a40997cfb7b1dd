//! The clocks that durations are read from.

use nix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC_RAW, microseconds: not slewed by NTP. Every duration in the evidence is read from it.
pub fn raw_us() -> u64 {
    read_us(ClockId::CLOCK_MONOTONIC_RAW)
}

/// Wall clock, microseconds since 1970.
pub fn wall_us() -> i64 {
    i64::try_from(read_us(ClockId::CLOCK_REALTIME)).unwrap_or(i64::MAX)
}

fn read_us(clock: ClockId) -> u64 {
    // The kernel has had these clocks since 2.6.28 and the pointer is ours: the call has no way to fail.
    let Ok(t) = clock_gettime(clock) else { return 0 };
    let (s, n) = (u64::try_from(t.tv_sec()).unwrap_or(0), u64::try_from(t.tv_nsec()).unwrap_or(0));
    s.saturating_mul(1_000_000).saturating_add(n / 1_000)
}

/// Lets `us` microseconds pass between two looks at something that the kernel offers no event for (an EBUSY control
/// group, say). Never a replacement for the look itself.
pub fn between_looks(us: u64) {
    use nix::sys::time::{TimeSpec, TimeValLike as _};
    let limit = TimeSpec::microseconds(i64::try_from(us).unwrap_or(1_000));
    let _ = nix::poll::ppoll(&mut [], Some(limit), None);
}
