//! Between samples the machine must be as quiet as the first sample found it: no zombies of ours, no cgroup or network
//! namespace that the kernel is still taking apart.
//!
//! `Survey` is a reading, `judge` decides, `settle` waits on the decision with a limit. Others' processes and groups
//! are looked at only where the kernel keeps no account by owner (its own workers, the count of dying groups).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
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
    /// The last survey, if the machine could be read.
    pub last: Option<Survey>,
}

/// What in `now` is not settled. A memory group stays behind, dead, for as long as a page of cache is charged to
/// it, which is not activity: for it only a change between two readings counts. Every other controller must be back
/// at the block's baseline; where that is still to be found, there too only a change counts.
pub fn judge(baseline: Option<&Survey>, previous: Option<&Survey>, now: &Survey) -> Vec<String> {
    let mut left = Vec::new();
    left.extend(now.zombies.iter().map(|z| format!("zombie {z}")));
    left.extend(now.workers.iter().map(|w| format!("kernel worker {w}")));
    for (controller, &dying) in &now.dying {
        match baseline.filter(|_| !holds_pages(controller)) {
            Some(baseline) => {
                let allowed = baseline.dying.get(controller).copied().unwrap_or(0);
                if dying > allowed {
                    left.push(format!("{dying} dying {controller} groups, {allowed} at the block's start"));
                }
            }
            None => {
                if let Some(before) = previous.and_then(|p| p.dying.get(controller))
                    && *before != dying
                {
                    left.push(format!("dying {controller} groups changed from {before} to {dying}"));
                }
            }
        }
    }
    left
}

fn holds_pages(controller: &str) -> bool {
    matches!(controller, "memory" | "unified" | "hugetlb")
}

/// Waits until a number of surveys in a row show nothing left, or `limit` passes. Without a baseline it finds one. What
/// cannot be read is never quiet.
pub fn settle(
    baseline: Option<&Survey>,
    limit: Duration,
    mut survey: impl FnMut() -> Result<Survey, SurveyError>,
) -> Settled {
    let start = clock::raw_us();
    let limit_us = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
    let mut steady = 0;
    let mut previous: Option<Survey> = None;
    loop {
        let now = survey();
        let mut left = match &now {
            Ok(now) => judge(baseline, previous.as_ref(), now),
            Err(e) => vec![format!("no survey: {}", drums_common::telemetry::chain(e))],
        };
        steady = if left.is_empty() { steady + 1 } else { 0 };
        previous = now.ok();
        let waited = clock::raw_us().saturating_sub(start);
        if steady >= STEADY_READINGS || waited > limit_us {
            if steady < STEADY_READINGS && left.is_empty() {
                left.push(format!("quiet for only {steady} of {STEADY_READINGS} readings when the limit passed"));
            }
            return Settled { waited_ms: waited as f64 / 1_000.0, left, last: previous };
        }
        clock::pause_before_looking_again(PAUSE);
    }
}

/// The machine cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} does not read as agreed: {text:?}", path.display())]
    Shape { path: PathBuf, text: String },
    #[error("the kernel counts no dying control groups that could be read below {}", root.display())]
    NoGroups { root: PathBuf },
}

/// Reads the machine. `parents` are the processes whose dead children count as ours: the agent and its shim.
pub fn survey(parents: &BTreeSet<u32>) -> Result<Survey, SurveyError> {
    survey_of(Path::new("/proc"), Path::new("/sys/fs/cgroup"), parents)
}

fn survey_of(proc: &Path, cgroups: &Path, parents: &BTreeSet<u32>) -> Result<Survey, SurveyError> {
    let mut out = Survey::default();
    for entry in fs::read_dir(proc).map_err(|e| unread(proc, e))? {
        let entry = entry.map_err(|e| unread(proc, e))?;
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // A process may end between the listing and the reading: then it is nobody's zombie.
        let path = entry.path().join("stat");
        let Some(stat) = still_there(&path, fs::read_to_string(&path))? else { continue };
        let p = parse_pid_stat(&stat).ok_or(SurveyError::Shape { path, text: stat })?;
        if p.state == 'Z' && parents.contains(&p.parent) {
            out.zombies.push(format!("{pid} ({})", p.name));
        }
        // 2 is kthreadd. Workers show in `comm`, not in `stat`, what they are at.
        if p.parent == 2 && p.name.starts_with("kworker/") {
            let path = entry.path().join("comm");
            let Some(comm) = still_there(&path, fs::read_to_string(&path))? else { continue };
            if tears_down(comm.trim_end()) {
                out.workers.push(comm.trim_end().to_owned());
            }
        }
    }
    let path = proc.join("cgroups");
    // A kernel without version 1 may have no such file; its unified hierarchy counts then.
    let counts = still_there(&path, fs::read_to_string(&path))?.unwrap_or_default();
    out.dying = dying(cgroups, &counts)?;
    Ok(out)
}

fn unread(path: &Path, source: io::Error) -> SurveyError {
    SurveyError::Read { path: path.to_owned(), source }
}

/// What was read, or nothing if it is gone.
fn still_there<T>(path: &Path, read: io::Result<T>) -> Result<Option<T>, SurveyError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
        Err(e) => Err(unread(path, e)),
    }
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
fn dying(root: &Path, proc_cgroups: &str) -> Result<BTreeMap<String, u64>, SurveyError> {
    let mut out = BTreeMap::new();
    for (name, count) in parse_proc_cgroups(proc_cgroups) {
        let mount = root.join(&name);
        if mount.join("cgroup.procs").exists() {
            out.insert(name, count.saturating_sub(folders(&mount)?));
        }
    }
    for unified in [root.join("cgroup.stat"), root.join("unified/cgroup.stat")] {
        let Some(text) = still_there(&unified, fs::read_to_string(&unified))? else { continue };
        let count = text.lines().find_map(|l| l.strip_prefix("nr_dying_descendants ")?.trim().parse().ok());
        out.insert("unified".to_owned(), count.ok_or(SurveyError::Shape { path: unified, text })?);
    }
    if out.is_empty() {
        return Err(SurveyError::NoGroups { root: root.to_owned() });
    }
    Ok(out)
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

/// Folders under and including `at`; none of one that has just gone.
fn folders(at: &Path) -> Result<u64, SurveyError> {
    let Some(list) = still_there(at, fs::read_dir(at))? else { return Ok(0) };
    let mut count = 1;
    for entry in list {
        let Some(entry) = still_there(at, entry)? else { break };
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            count += folders(&entry.path())?;
        }
    }
    Ok(count)
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
        assert!(judge(Some(&base), None, &base).is_empty());
        let more = dying_is(&[("cpu", 2), ("memory", 9)]);
        assert_eq!(judge(Some(&base), None, &more), ["2 dying cpu groups, 1 at the block's start"]);
        // Memory groups only count while their number moves.
        let still = dying_is(&[("cpu", 1), ("memory", 9)]);
        assert!(judge(Some(&base), Some(&still), &still).is_empty());
        assert_eq!(judge(Some(&base), Some(&base), &still), ["dying memory groups changed from 4 to 9"]);
        // Where the baseline is still to be found, every number must stand still.
        assert_eq!(
            judge(None, Some(&base), &more),
            ["dying cpu groups changed from 1 to 2", "dying memory groups changed from 4 to 9"]
        );
        assert!(judge(None, Some(&more), &more).is_empty());
        let busy =
            Survey { zombies: vec!["7 (sh)".into()], workers: vec!["kworker/u8:1+netns".into()], ..Survey::default() };
        assert_eq!(judge(Some(&base), None, &busy), ["zombie 7 (sh)", "kernel worker kworker/u8:1+netns"]);
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
        let got = settle(Some(&base), Duration::from_secs(20), || {
            if left > 0 {
                left -= 1;
                Ok(busy.clone())
            } else {
                Ok(Survey::default())
            }
        });
        assert!(got.left.is_empty());
        assert_eq!(left, 0);
        let got = settle(Some(&base), Duration::from_millis(1), || Ok(busy.clone()));
        assert_eq!(got.left, ["zombie 9 (x)"]);
    }

    #[test]
    fn quiet_once_is_not_settled() {
        // Busy until the limit has passed, then quiet in the very last reading.
        let limit = Duration::from_millis(20);
        let start = clock::raw_us();
        let got = settle(None, limit, || {
            let late = clock::raw_us() - start > 20_000;
            let zombies = if late { vec![] } else { vec!["9 (x)".to_owned()] };
            Ok(Survey { zombies, ..Survey::default() })
        });
        assert_eq!(got.left, ["quiet for only 1 of 3 readings when the limit passed"]);
    }

    #[test]
    fn what_cannot_be_read_is_never_quiet() {
        let error = || SurveyError::NoGroups { root: "/none".into() };
        let got = settle(Some(&Survey::default()), Duration::from_millis(1), || Err(error()));
        assert_eq!(got.left, ["no survey: the kernel counts no dying control groups that could be read below /none"]);
        assert_eq!(got.last, None);
        let t = tempfile::tempdir().unwrap();
        let (proc, cgroups) = (t.path().join("proc"), t.path().join("cgroup"));
        let look = || survey_of(&proc, &cgroups, &BTreeSet::new());
        assert!(matches!(look(), Err(SurveyError::Read { .. })), "no /proc");
        fs::create_dir_all(proc.join("7")).unwrap();
        assert!(matches!(look(), Err(SurveyError::NoGroups { .. })), "no groups; a process that has ended is fine");
        fs::create_dir_all(&cgroups).unwrap();
        fs::write(cgroups.join("cgroup.stat"), "nr_descendants 4\nnr_dying_descendants 2\n").unwrap();
        assert_eq!(look().unwrap(), dying_is(&[("unified", 2)]));
        fs::write(proc.join("7/stat"), "nonsense").unwrap();
        assert!(matches!(look(), Err(SurveyError::Shape { .. })));
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
            seen = survey(&ours).unwrap().zombies.iter().any(|z| z.starts_with(&format!("{} ", c.id())));
            if seen {
                break;
            }
            clock::pause_before_looking_again(Duration::from_millis(1));
        }
        assert!(seen);
        c.wait().unwrap();
        assert!(!survey(&ours).unwrap().zombies.iter().any(|z| z.starts_with(&format!("{} ", c.id()))));
    }
}
