//! Time as the measurement reads it: durations on CLOCK_MONOTONIC_RAW, and the wall clock watched against it.
//!
//! Raw, because neither a step nor a slew of the wall clock may stretch a sample.

use std::collections::BTreeMap;

use drums_common::clock::{Clock, Micros, MonoMicros};
use nix::time::{ClockId, clock_getres, clock_gettime};

/// The name under which samples cite the clock.
pub const RAW: &str = "CLOCK_MONOTONIC_RAW";

/// Microseconds of CLOCK_MONOTONIC_RAW.
pub fn raw_us() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_RAW)
}

fn read(id: ClockId) -> u64 {
    // The three clocks used here exist on every kernel that this project supports; the call has no other failure.
    let t = clock_gettime(id).expect("CLOCK_MONOTONIC_RAW, CLOCK_REALTIME and CLOCK_BOOTTIME are readable");
    let seconds = u64::try_from(t.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec()).unwrap_or(0);
    seconds * 1_000_000 + nanos / 1_000
}

/// One reading of both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instants {
    pub raw_us: u64,
    pub real_us: u64,
}

impl Instants {
    pub fn now() -> Self {
        Self { raw_us: raw_us(), real_us: read(ClockId::CLOCK_REALTIME) }
    }

    /// Milliseconds of the raw clock since `earlier`.
    pub fn ms_since(&self, earlier: &Self) -> f64 {
        span_ms(earlier.raw_us, self.raw_us)
    }

    /// How far the wall clock moved against the raw clock since `earlier`, milliseconds; negative when it went back.
    pub fn step_ms_since(&self, earlier: &Self) -> f64 {
        let real = i128::from(self.real_us) - i128::from(earlier.real_us);
        let raw = i128::from(self.raw_us) - i128::from(earlier.raw_us);
        // A block lasts minutes: the difference is far below 2^53.
        (real - raw) as f64 / 1_000.0
    }
}

/// For conditions that the kernel announces to nobody: the pause before looking again. Never inside a timed window.
pub fn pause_before_looking_again(pause: std::time::Duration) {
    #[allow(clippy::disallowed_methods)] // the named helper that the ban asks for
    std::thread::sleep(pause);
}

/// Milliseconds between two raw readings.
pub fn span_ms(start_us: u64, end_us: u64) -> f64 {
    end_us.saturating_sub(start_us) as f64 / 1_000.0
}

/// Resolution of the clocks used, nanoseconds.
pub fn resolutions_ns() -> BTreeMap<String, u64> {
    [
        (RAW, ClockId::CLOCK_MONOTONIC_RAW),
        ("CLOCK_REALTIME", ClockId::CLOCK_REALTIME),
        ("CLOCK_BOOTTIME", ClockId::CLOCK_BOOTTIME),
    ]
    .into_iter()
    .filter_map(|(name, id)| {
        let r = clock_getres(id).ok()?;
        let ns = u64::try_from(r.tv_sec()).ok()? * 1_000_000_000 + u64::try_from(r.tv_nsec()).ok()?;
        Some((name.to_owned(), ns))
    })
    .collect()
}

/// The agent's clock.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_the_wall_clock_is_seen_with_its_sign() {
        let a = Instants { raw_us: 1_000_000, real_us: 50_000_000 };
        let steady = Instants { raw_us: 3_000_000, real_us: 52_000_000 };
        assert!(steady.step_ms_since(&a).abs() < 1e-9);
        assert!((steady.ms_since(&a) - 2_000.0).abs() < 1e-9);
        let back = Instants { raw_us: 3_000_000, real_us: 51_990_000 };
        assert!((back.step_ms_since(&a) + 10.0).abs() < 1e-9);
        let forth = Instants { raw_us: 3_000_000, real_us: 52_250_000 };
        assert!((forth.step_ms_since(&a) - 250.0).abs() < 1e-9);
    }

    #[test]
    fn clocks_go_forward_and_have_a_resolution() {
        let a = Instants::now();
        let b = Instants::now();
        assert!(b.raw_us >= a.raw_us);
        assert!(resolutions_ns()[RAW] > 0);
        assert!(SystemClock.boottime() <= SystemClock.boottime());
    }
}
