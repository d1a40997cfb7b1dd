//! The canary: one fixed piece of work, timed before every arm and after the last, to see whether the machine is as
//! fast as it was a moment ago.
//!
//! It is not calibrated: the iteration count is the same on every host and in every run of a build, so that only
//! the machine can change its time. It runs on the CPUs that the block drew, because that is the speed sessions get.

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

use super::clock;

/// About ten milliseconds on a CPU of 2020 when optimised.
const ITERATIONS: u64 = 5_000_000;

/// Runs the loop on `cpus` and gives its time in milliseconds. The thread's own CPU set is restored afterwards.
pub fn run(cpus: &[u32]) -> Result<f64, CanaryError> {
    let before = sched_getaffinity(Pid::from_raw(0)).map_err(CanaryError::Read)?;
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu as usize).map_err(|source| CanaryError::Pin { cpus: cpus.to_vec(), source })?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|source| CanaryError::Pin { cpus: cpus.to_vec(), source })?;
    let start = clock::raw_us();
    std::hint::black_box(work(std::hint::black_box(ITERATIONS)));
    let end = clock::raw_us();
    sched_setaffinity(Pid::from_raw(0), &before).map_err(CanaryError::Restore)?;
    Ok(clock::span_ms(start, end))
}

#[derive(Debug, thiserror::Error)]
pub enum CanaryError {
    #[error("cannot read the measuring thread's CPU set")]
    Read(#[source] nix::Error),
    #[error("cannot run the canary on CPUs {cpus:?}")]
    Pin { cpus: Vec<u32>, source: nix::Error },
    #[error("cannot give the measuring thread its CPU set back after the canary")]
    Restore(#[source] nix::Error),
}

/// A dependent chain: each step needs the last, so no compiler and no superscalar core shortens it.
fn work(iterations: u64) -> u64 {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for i in 0..iterations {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x = x.wrapping_add(i);
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_the_same_each_time() {
        assert_eq!(work(1_000), work(1_000));
        assert_ne!(work(1_000), work(1_001));
    }

    #[test]
    fn it_takes_time_and_gives_the_cpu_set_back() {
        let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let one = (0..CpuSet::count()).find(|c| before.is_set(*c).unwrap_or(false)).unwrap();
        let ms = run(&[u32::try_from(one).unwrap()]).unwrap();
        assert!(ms > 0.0);
        assert_eq!(sched_getaffinity(Pid::from_raw(0)).unwrap(), before);
        assert!(matches!(run(&[1_000_000]), Err(CanaryError::Pin { .. })));
        assert_eq!(sched_getaffinity(Pid::from_raw(0)).unwrap(), before);
    }
}
