//! The noise gate's readings: steal time, and CPU that neither the run nor the agent used.
//!
//! Pure functions over `/proc` texts and a thin reader. Knows no limits: evidence holds readings, the analysis judges.

use std::{fs, io, path::PathBuf};

/// CPU time of the whole machine, microseconds since boot, from the first line of `/proc/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineCpu {
    /// user + nice + system + irq + softirq. Guest time is part of user already.
    pub busy_us: u64,
    pub steal_us: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum NoiseError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is not as proc(5) describes it: {what}")]
    Shape { path: PathBuf, what: &'static str },
}

/// Readings at one end of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoisePoint {
    pub machine: MachineCpu,
    /// CPU of the agent, its shim and every group made by them (gone ones included), microseconds.
    pub own_us: u64,
    /// CPU of the agent and its shim alone, microseconds.
    pub harness_us: u64,
}

/// What a block's Environment record says of noise, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Noise {
    pub steal_ms: f64,
    pub outside_cpu_ms: f64,
    pub harness_cpu_ms: f64,
}

impl Noise {
    /// Between two points. The machine's account is in ticks and the groups' in nanoseconds, so the remainder may come
    /// out slightly below zero on a quiet machine; it is cut at zero.
    pub fn between(start: &NoisePoint, end: &NoisePoint) -> Self {
        let ms = |a: u64, b: u64| b.saturating_sub(a) as f64 / 1_000.0;
        let busy = ms(start.machine.busy_us, end.machine.busy_us);
        let own = ms(start.own_us, end.own_us);
        Self {
            steal_ms: ms(start.machine.steal_us, end.machine.steal_us),
            outside_cpu_ms: (busy - own).max(0.0),
            harness_cpu_ms: ms(start.harness_us, end.harness_us),
        }
    }
}

/// Reads the `cpu` line of a `/proc/stat` text.
pub fn parse_stat(text: &str, ticks_per_second: u64) -> Result<MachineCpu, &'static str> {
    let line = text.lines().find(|l| l.starts_with("cpu ")).ok_or("no line begins with \"cpu \"")?;
    let mut fields = [0u64; 8];
    let mut got = 0;
    for (slot, word) in fields.iter_mut().zip(line.split_ascii_whitespace().skip(1)) {
        *slot = word.parse().map_err(|_| "a field of the cpu line is not a number")?;
        got += 1;
    }
    if got < 4 {
        return Err("the cpu line has fewer than four fields");
    }
    let [user, nice, system, _idle, _iowait, irq, softirq, steal] = fields;
    let us = |ticks: u64| ticks.saturating_mul(1_000_000) / ticks_per_second.max(1);
    Ok(MachineCpu { busy_us: us(user + nice + system + irq + softirq), steal_us: us(steal) })
}

/// CPU of one process (all its threads, without its children) from a `/proc/PID/stat` text, microseconds.
pub fn parse_pid_stat_cpu(text: &str, ticks_per_second: u64) -> Option<u64> {
    // The command name may hold spaces and brackets: fields count from the last closing bracket.
    let rest = &text[text.rfind(')')? + 1..];
    let mut words = rest.split_ascii_whitespace().skip(11);
    let user: u64 = words.next()?.parse().ok()?;
    let system: u64 = words.next()?.parse().ok()?;
    Some((user + system).saturating_mul(1_000_000) / ticks_per_second.max(1))
}

/// The machine's account now.
pub fn machine_cpu() -> Result<MachineCpu, NoiseError> {
    let path = PathBuf::from("/proc/stat");
    let text = fs::read_to_string(&path).map_err(|source| NoiseError::Read { path: path.clone(), source })?;
    parse_stat(&text, ticks_per_second()).map_err(|what| NoiseError::Shape { path, what })
}

/// CPU of this process, all threads, microseconds: finer than ticks.
pub fn self_cpu_us() -> u64 {
    use nix::sys::resource::{UsageWho, getrusage};
    use nix::sys::time::TimeValLike as _;
    getrusage(UsageWho::RUSAGE_SELF)
        .map(|u| u64::try_from(u.user_time().num_microseconds() + u.system_time().num_microseconds()).unwrap_or(0))
        .unwrap_or(0)
}

/// CPU of another process now; zero once it is gone.
pub fn pid_cpu_us(pid: u32) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|t| parse_pid_stat_cpu(&t, ticks_per_second()))
        .unwrap_or(0)
}

fn ticks_per_second() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .ok()
        .flatten()
        .and_then(|v| u64::try_from(v).ok())
        .filter(|v| *v > 0)
        .unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    // As a Debian 12 guest with two CPUs printed it.
    const STAT: &str = "cpu  52237 10 14852 139885 1545 3 184 1255 7 0\n\
        cpu0 25508 0 7369 70782 686 0 27 620 0 0\ncpu1 26729 0 7483 69102 859 0 157 634 0 0\nbtime 1795980117\n";

    #[test]
    fn busy_time_leaves_out_idle_iowait_steal_and_guest() {
        let got = parse_stat(STAT, 100).unwrap();
        assert_eq!(got, MachineCpu { busy_us: (52237 + 10 + 14852 + 3 + 184) * 10_000, steal_us: 12_550_000 });
    }

    #[test]
    fn texts_that_are_not_proc_stat_are_refused() {
        for t in ["", "cpu0 1 2 3 4\n", "cpu  1 2\n", "cpu  1 x 3 4 5\n"] {
            assert!(parse_stat(t, 100).is_err(), "{t:?}");
        }
        assert!(parse_stat("cpu  1 2 3 4\n", 100).is_ok(), "old kernels have four fields");
    }

    #[test]
    fn a_command_name_with_brackets_does_not_shift_the_fields() {
        let t = "42 (a) b (c)) S 1 42 42 0 -1 4194560 100 0 0 0 250 150 7 8 20 0 1 0 100 0 0";
        assert_eq!(parse_pid_stat_cpu(t, 100), Some(4_000_000));
        assert_eq!(parse_pid_stat_cpu("42 (a", 100), None);
    }

    #[test]
    fn outside_is_what_neither_run_nor_harness_used() {
        let a = NoisePoint::default();
        let b = NoisePoint {
            machine: MachineCpu { busy_us: 900_000, steal_us: 30_000 },
            own_us: 700_000,
            harness_us: 100_000,
        };
        let n = Noise::between(&a, &b);
        assert_eq!(n, Noise { steal_ms: 30.0, outside_cpu_ms: 200.0, harness_cpu_ms: 100.0 });
        let quiet = NoisePoint { machine: MachineCpu { busy_us: 690_000, steal_us: 0 }, ..b };
        assert!(Noise::between(&a, &quiet).outside_cpu_ms.abs() < 1e-9);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(machine_cpu().unwrap().busy_us > 0);
        assert!(pid_cpu_us(u32::MAX) == 0);
    }
}
