//! Between samples the machine must be as quiet as the first sample found it: no zombies of ours, no cgroup or network
//! namespace that the kernel is still taking apart.
//!
//! `Survey` is a reading, `judge` decides, `settle` waits on the decision with a limit. Others' processes and groups
//! are looked at only where the kernel keeps no account by owner (its own workers, the count of dying groups).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use super::clock;

/// So many equal readings in a row, so that a worker which has not been woken yet is not taken for none.
const STEADY_READINGS: u32 = 3;
/// Between readings: long enough not to be the noise it looks for.
const PAUSE: Duration = Duration::from_millis(5);

/// What is there right now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// `pid (name)` of dead children of ours that nobody has reaped.
    pub zombies: Vec<String>,
    /// Kernel workers that are taking a namespace or a cgroup apart at this moment.
    pub workers: Vec<String>,
    /// Dying cgroups per controller: those that the kernel counts less those that can be seen.
    pub dying: BTreeMap<String, u64>,
}

/// How settling ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pub waited_ms: f64,
    /// What was still there when the limit passed; empty when settled.
    pub left: Vec<String>,
}

/// What in `now` is not settled. A memory group stays behind, dead, for as long as a page of cache is charged to
/// it, which is not activity: for it only a change between two readings counts. Every other controller must be back
/// at the block's baseline.
pub fn judge(baseline: &Survey, previous: Option<&Survey>, now: &Survey) -> Vec<String> {
    let mut left = Vec::new();
    left.extend(now.zombies.iter().map(|z| format!("zombie {z}")));
    left.extend(now.workers.iter().map(|w| format!("kernel worker {w}")));
    for (controller, &dying) in &now.dying {
        if holds_pages(controller) {
            if let Some(before) = previous.and_then(|p| p.dying.get(controller))
                && *before != dying
            {
                left.push(format!("dying {controller} groups changed from {before} to {dying}"));
            }
        } else {
            let allowed = baseline.dying.get(controller).copied().unwrap_or(0);
            if dying > allowed {
                left.push(format!("{dying} dying {controller} groups, {allowed} at the block's start"));
            }
        }
    }
    left
}

fn holds_pages(controller: &str) -> bool {
    matches!(controller, "memory" | "unified" | "hugetlb")
}

/// Waits until a number of surveys in a row show nothing left, or `limit` passes.
pub fn settle(baseline: &Survey, limit: Duration, mut survey: impl FnMut() -> Survey) -> Settled {
    let start = clock::raw_us();
    let limit_us = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
    let mut steady = 0;
    let mut previous: Option<Survey> = None;
    loop {
        let now = survey();
        let left = judge(baseline, previous.as_ref(), &now);
        steady = if left.is_empty() { steady + 1 } else { 0 };
        let waited = clock::raw_us().saturating_sub(start);
        if steady >= STEADY_READINGS || waited > limit_us {
            return Settled { waited_ms: waited as f64 / 1_000.0, left };
        }
        previous = Some(now);
        clock::pause_before_looking_again(PAUSE);
    }
}

/// Reads the machine. `parents` are the processes whose dead children count as ours: the agent and its shim.
pub fn survey(parents: &BTreeSet<u32>) -> Survey {
    let mut out = Survey::default();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // A process may end between the listing and the reading: then it is nobody's zombie.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some(p) = parse_pid_stat(&stat) else { continue };
        if p.state == 'Z' && parents.contains(&p.parent) {
            out.zombies.push(format!("{pid} ({})", p.name));
        }
        // 2 is kthreadd. Workers show in `comm`, not in `stat`, what they are at.
        if p.parent == 2
            && p.name.starts_with("kworker/")
            && let Ok(comm) = fs::read_to_string(entry.path().join("comm"))
            && tears_down(comm.trim_end())
        {
            out.workers.push(comm.trim_end().to_owned());
        }
    }
    out.dying = dying(Path::new("/sys/fs/cgroup"), &fs::read_to_string("/proc/cgroups").unwrap_or_default());
    out
}

/// True for a worker that is taking a namespace or a cgroup apart now: the kernel writes `+` before the name of a
/// work queue whose work is running and `-` before one that ran last.
fn tears_down(comm: &str) -> bool {
    comm.split_once('+').is_some_and(|(_, queue)| {
        queue.starts_with("netns") || queue.starts_with("cgroup_") || queue.starts_with("cgwb_release")
    })
}

struct PidStat {
    name: String,
    state: char,
    parent: u32,
}

fn parse_pid_stat(text: &str) -> Option<PidStat> {
    let (open, close) = (text.find('(')?, text.rfind(')')?);
    let mut rest = text.get(close + 1..)?.split_ascii_whitespace();
    Some(PidStat {
        name: text.get(open + 1..close)?.to_owned(),
        state: rest.next()?.chars().next()?,
        parent: rest.next()?.parse().ok()?,
    })
}

/// Dying groups per controller: version 1 from the counts of `/proc/cgroups` less the folders that are there, version
/// 2 from the root's `cgroup.stat`.
fn dying(root: &Path, proc_cgroups: &str) -> BTreeMap<String, u64> {
    let mut out = BTreeMap::new();
    for (name, count) in parse_proc_cgroups(proc_cgroups) {
        let mount = root.join(&name);
        if mount.join("cgroup.procs").exists() {
            out.insert(name, count.saturating_sub(folders(&mount)));
        }
    }
    for unified in [root.join("cgroup.stat"), root.join("unified/cgroup.stat")] {
        if let Ok(text) = fs::read_to_string(unified)
            && let Some(n) = text.lines().find_map(|l| l.strip_prefix("nr_dying_descendants "))
            && let Ok(n) = n.trim().parse()
        {
            out.insert("unified".to_owned(), n);
        }
    }
    out
}

/// Name and number of groups of each controller that is in a hierarchy of version 1.
fn parse_proc_cgroups(text: &str) -> Vec<(String, u64)> {
    text.lines()
        .filter(|l| !l.starts_with('#'))
        .filter_map(|l| {
            let mut w = l.split_ascii_whitespace();
            let name = w.next()?;
            let hierarchy: u32 = w.next()?.parse().ok()?;
            let count = w.next()?.parse().ok()?;
            (hierarchy != 0).then(|| (name.to_owned(), count))
        })
        .collect()
}

/// Folders under and including `at`.
fn folders(at: &Path) -> u64 {
    let below: u64 = fs::read_dir(at)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| folders(&e.path()))
        .sum();
    below + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dying_is(pairs: &[(&str, u64)]) -> Survey {
        Survey { dying: pairs.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect(), ..Survey::default() }
    }

    #[test]
    fn judged_by_owner_activity_and_baseline() {
        let base = dying_is(&[("cpu", 1), ("memory", 4)]);
        assert!(judge(&base, None, &base).is_empty());
        let more = dying_is(&[("cpu", 2), ("memory", 9)]);
        assert_eq!(judge(&base, None, &more), ["2 dying cpu groups, 1 at the block's start"]);
        // Memory groups only count while their number moves.
        let still = dying_is(&[("cpu", 1), ("memory", 9)]);
        assert!(judge(&base, Some(&still), &still).is_empty());
        assert_eq!(judge(&base, Some(&base), &still), ["dying memory groups changed from 4 to 9"]);
        let busy =
            Survey { zombies: vec!["7 (sh)".into()], workers: vec!["kworker/u8:1+netns".into()], ..Survey::default() };
        assert_eq!(judge(&base, None, &busy), ["zombie 7 (sh)", "kernel worker kworker/u8:1+netns"]);
    }

    #[test]
    fn only_running_teardown_work_counts() {
        for (comm, want) in [
            ("kworker/u8:1+netns", true),
            ("kworker/u8:1-netns", false),
            ("kworker/1:1+cgroup_release", true),
            ("kworker/1:1-cgroup_release", false),
            ("kworker/0:1-mm_percpu_wq", false),
            ("kworker/u8:1+flush-254:0", false),
            ("kworker/R-netns", false),
        ] {
            assert_eq!(tears_down(comm), want, "{comm}");
        }
    }

    #[test]
    fn settling_waits_for_the_condition_and_gives_up_at_the_limit() {
        let base = Survey::default();
        let mut left = 4;
        let busy = Survey { zombies: vec!["9 (x)".into()], ..Survey::default() };
        let got = settle(&base, Duration::from_secs(20), || {
            if left > 0 {
                left -= 1;
                busy.clone()
            } else {
                Survey::default()
            }
        });
        assert!(got.left.is_empty());
        assert_eq!(left, 0);
        let got = settle(&base, Duration::from_millis(1), || busy.clone());
        assert_eq!(got.left, ["zombie 9 (x)"]);
    }

    #[test]
    fn recorded_texts_are_read() {
        let text =
            "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t3\t1\t1\nmemory\t4\t16\t1\nnet_cls\t0\t1\t1\n";
        assert_eq!(parse_proc_cgroups(text), [("cpuset".to_owned(), 1), ("memory".to_owned(), 16)]);
        let p = parse_pid_stat("13 (a (b) c) Z 1 13 13 0 -1").unwrap();
        assert_eq!((p.name.as_str(), p.state, p.parent), ("a (b) c", 'Z', 1));
    }

    #[test]
    fn a_zombie_of_ours_is_seen_until_it_is_reaped() {
        #[allow(clippy::disallowed_methods)] // the test's own child, reaped below
        let mut c = std::process::Command::new("/bin/true").spawn().unwrap();
        let ours = BTreeSet::from([std::process::id()]);
        let mut seen = false;
        for _ in 0..2_000 {
            seen = survey(&ours).zombies.iter().any(|z| z.starts_with(&format!("{} ", c.id())));
            if seen {
                break;
            }
            clock::pause_before_looking_again(Duration::from_millis(1));
        }
        assert!(seen);
        c.wait().unwrap();
        assert!(!survey(&ours).zombies.iter().any(|z| z.starts_with(&format!("{} ", c.id()))));
    }
}
