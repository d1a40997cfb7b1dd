//! Many worlds at once: one thread per processor, each world on one thread from its beginning to its end.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
    time::{Duration, Instant},
};

use drums_common::lease::LeaseTimes;

use crate::{
    leases::{self, Judged},
    message::{Ended, Setup},
    truth::Counted,
};

/// Long enough for a dozen runs and every lease to lapse; short enough that a failing seed is looked into.
pub const WORLD_HOURS: u64 = 5;

#[derive(Debug, Default)]
pub struct Report {
    pub worlds: u32,
    pub hours: f64,
    pub events: u64,
    pub counted: Counted,
    /// Failing seeds first, with what broke.
    pub broken: Vec<String>,
    pub took: Duration,
}

/// Runs them all. A panic is a broken invariant too.
pub fn run(setups: Vec<Setup>, world: impl Fn(&Setup) -> Result<Ended, String> + Sync) -> Report {
    let began = Instant::now();
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
    let (queue, report) = (Mutex::new(setups.into_iter()), Mutex::new(Report::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
                    let Some(setup) = next else { return };
                    let ended = catch_unwind(AssertUnwindSafe(|| world(&setup)));
                    let mut report = report.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    report.worlds += 1;
                    match ended {
                        Ok(Ok(ended)) => {
                            report.hours += ended.hours;
                            report.events += ended.events;
                            report.counted.add(&ended.counted);
                        }
                        Ok(Err(broken)) => report.broken.push(broken),
                        Err(panic) => {
                            let words = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| {
                                panic.downcast_ref::<&str>().map_or_else(String::new, |s| (*s).to_owned())
                            });
                            report.broken.push(format!("seed {} panicked: {words}", setup.seed));
                        }
                    }
                }
            });
        }
    });
    let mut report = report.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    report.took = began.elapsed();
    report
}

/// So many host-hours of the lease cores alone, a hundred hours a host.
pub fn host_hours(first_seed: u64, hours: u64) -> Result<Judged, String> {
    const EACH: u64 = 100;
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get()) as u64;
    let seeds = first_seed..first_seed + hours.div_ceil(EACH);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|n| {
                let seeds = seeds.clone().filter(move |seed| seed % threads == n);
                scope.spawn(move || {
                    seeds
                        .map(|seed| leases::host_hours(seed, EACH, LeaseTimes::default()))
                        .collect::<Result<Vec<_>, _>>()
                })
            })
            .collect();
        let mut all = Judged::default();
        for worker in workers {
            for one in worker.join().map_err(|_| "a worker panicked".to_owned())?? {
                all.beats += one.beats;
                all.lost += one.lost;
                all.faults += one.faults;
            }
        }
        Ok(all)
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.counted;
        writeln!(
            f,
            "{} worlds, {:.0} simulated hours, {} events in {:.1} s; {} broken",
            self.worlds,
            self.hours,
            self.events,
            self.took.as_secs_f64(),
            self.broken.len()
        )?;
        writeln!(f, "runs by verdict: {:?}", c.by_verdict)?;
        writeln!(
            f,
            "{} blocks, {} records, {} of them late, {} hosts lost to runs",
            c.blocks, c.records, c.late, c.lost_hosts
        )?;
        write!(f, "faults: {:?}", c.faults)
    }
}
