//! Clocks of simulated machines: one true time, and what each machine makes of it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use drums_common::{
    clock::{Clock, Micros, MonoMicros},
    draw::Draw,
    lease::DRIFT_PPM,
};

pub const MS: u64 = 1_000;
pub const S: u64 = 1_000 * MS;
pub const MINUTE: u64 = 60 * S;
pub const HOUR: u64 = 60 * MINUTE;

/// Microseconds since the simulation began; nobody in it can read this.
#[derive(Debug)]
pub enum TrueTime {
    /// Set by whoever keeps the queue of events.
    Set(AtomicU64),
    /// Kept by a paused runtime.
    Paused(tokio::time::Instant),
}

impl Default for TrueTime {
    fn default() -> Self {
        Self::Set(AtomicU64::new(0))
    }
}

impl TrueTime {
    pub fn get(&self) -> u64 {
        match self {
            Self::Set(us) => us.load(Ordering::Relaxed),
            Self::Paused(began) => u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
        }
    }
    pub fn set(&self, now_us: u64) {
        if let Self::Set(us) = self {
            us.store(now_us, Ordering::Relaxed);
        }
    }
}

/// One machine's clocks. They run at their own rate from their own beginning.
#[derive(Clone, Debug)]
pub struct MachineClock {
    time: Arc<TrueTime>,
    /// Parts per million that it is fast.
    ppm: i64,
    booted_us: u64,
    wall_us: i64,
}

impl MachineClock {
    /// At most half of what two clocks may differ by, either way.
    pub fn draw(time: &Arc<TrueTime>, draw: &mut Draw) -> Self {
        let most = DRIFT_PPM as i64 / 2;
        Self {
            time: time.clone(),
            ppm: draw.below(2 * most as u64 + 1) as i64 - most,
            booted_us: draw.below(1_000 * S),
            // 2026; machines disagree by up to a second.
            wall_us: 1_780_000_000_000_000 + draw.below(S) as i64,
        }
    }

    /// Parts per million that it is fast.
    pub fn ppm(&self) -> i64 {
        self.ppm
    }

    fn passed(&self) -> u64 {
        let t = self.time.get();
        t.saturating_add_signed(t as i64 / 1_000_000 * self.ppm)
    }
}

impl Clock for MachineClock {
    fn now(&self) -> Micros {
        Micros(self.wall_us + self.passed() as i64)
    }
    fn boottime(&self) -> MonoMicros {
        MonoMicros(self.booted_us + self.passed())
    }
}
