//! `drums-agent doctor`: says what works on this host by trying it.
//!
//! Versions and device nodes prove little here: a CRIU may pass its own check and fail at the first inet socket, and
//! `/dev/kvm` may open for a virtual machine that never runs. So each trial does, once and small, what a session will do.

use std::{collections::BTreeMap, ffi::OsString, time::Instant};

use drums_common::arm::ArmKind;
use serde::Serialize;

use super::{
    ToolsDir,
    kvm::{self, GuestAccel, KvmAnswer},
    listener, tools,
    trials::{self, Ground},
};

/// One thing tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trial {
    pub name: &'static str,
    pub ok: bool,
    /// What was seen, or why it did not work and what to do.
    pub detail: String,
    pub duration_ms: u64,
    /// Arms that cannot run without it; none if it only decides how they run.
    pub needed_by: Vec<ArmKind>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    pub trials: Vec<Trial>,
    pub kvm: KvmAnswer,
}

impl Report {
    /// Why an arm cannot run on this host, by kind; a kind that is not in here can.
    pub fn unfit(&self) -> BTreeMap<ArmKind, String> {
        let mut unfit = BTreeMap::new();
        for trial in self.trials.iter().filter(|t| !t.ok) {
            for kind in &trial.needed_by {
                unfit.entry(*kind).or_insert_with(|| format!("{}: {}", trial.name, trial.detail));
            }
        }
        unfit
    }

    /// True if every arm can run.
    pub fn healthy(&self) -> bool {
        self.trials.iter().all(|t| t.ok || t.needed_by.is_empty())
    }
}

#[derive(Clone, Debug)]
pub struct DoctorOptions {
    /// Program and arguments of a process that runs [`listener::serve`] with one more argument, the port file.
    pub listener: Vec<OsString>,
    pub ground: Ground,
}

impl Default for DoctorOptions {
    /// This program's own hidden subcommand.
    fn default() -> Self {
        Self { listener: vec!["/proc/self/exe".into(), listener::SUBCOMMAND.into()], ground: Ground::default() }
    }
}

const NAMESPACED: [ArmKind; 4] = [ArmKind::DrumsCold, ArmKind::DrumsRestored, ArmKind::RuncCold, ArmKind::RuncRestored];
const RESTORED: [ArmKind; 2] = [ArmKind::DrumsRestored, ArmKind::RuncRestored];
const RUNC: [ArmKind; 2] = [ArmKind::RuncCold, ArmKind::RuncRestored];
const QEMU: [ArmKind; 2] = [ArmKind::QemuCold, ArmKind::QemuWarm];

/// Tries everything, one after the other; `seen` is told of each result as it comes.
pub fn examine(dir: &ToolsDir, options: &DoctorOptions, seen: &mut dyn FnMut(&Trial)) -> Report {
    let paths = tools::find(dir);
    let missing = |what: &str| Err(format!("{what} is not installed; run drums-agent setup"));
    let mut trials = Vec::new();
    let mut add = |name, needed_by: &[ArmKind], attempt: &mut dyn FnMut() -> Result<String, String>| {
        let start = Instant::now();
        let result = attempt();
        let (ok, detail) = match result {
            Ok(detail) => (true, detail),
            Err(why) => (false, why),
        };
        let duration_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let trial = Trial { name, ok, detail, duration_ms, needed_by: needed_by.to_vec() };
        seen(&trial);
        trials.push(trial);
    };

    add("root on x86_64 Linux", &ArmKind::BUILT_IN, &mut || match super::install::refuse_unfit_machine() {
        Ok(()) => Ok("yes".to_owned()),
        Err(e) => Err(e.to_string()),
    });
    add("namespaces and overlay", &NAMESPACED, &mut || trials::overlay(&options.ground));
    add("cgroup limits", &ArmKind::BUILT_IN, &mut || trials::cgroup(&options.ground));
    add("tap link", &QEMU, &mut || trials::tap(&options.ground));
    add("CRIU dump and restore", &RESTORED, &mut || match &paths.criu {
        Some(criu) => trials::criu(criu, &options.listener, &options.ground),
        None => missing("CRIU"),
    });
    add("runc container", &RUNC, &mut || match &paths.runc {
        Some(runc) => trials::runc(runc, &options.ground),
        None => missing("runc"),
    });
    add("QEMU guest (TCG)", &QEMU, &mut || match &paths.qemu {
        Some(qemu) => kvm::boot(qemu, GuestAccel::Tcg, kvm::TCG_LIMIT),
        None => missing("QEMU"),
    });
    let mut answer = KvmAnswer { usable: false, detail: "QEMU is not installed".to_owned(), nested: false };
    add("QEMU guest (KVM)", &[], &mut || {
        if let Some(qemu) = &paths.qemu {
            answer = kvm::probe(dir, qemu);
        }
        if answer.usable {
            Ok(answer.detail.clone())
        } else {
            Err(format!("{}; QEMU's arms run under TCG", answer.detail))
        }
    });
    Report { trials, kvm: answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(failed: &[(&'static str, &[ArmKind])]) -> Report {
        let trial = |(name, needed_by): &(&'static str, &[ArmKind])| Trial {
            name,
            ok: false,
            detail: "why".to_owned(),
            duration_ms: 1,
            needed_by: needed_by.to_vec(),
        };
        let kvm = KvmAnswer { usable: false, detail: String::new(), nested: false };
        Report { trials: failed.iter().map(trial).collect(), kvm }
    }

    #[test]
    fn a_failed_trial_makes_its_arms_unfit_and_no_others() {
        let r = report(&[("CRIU", &RESTORED), ("KVM", &[])]);
        assert_eq!(r.unfit().keys().copied().collect::<Vec<_>>(), RESTORED);
        assert_eq!(r.unfit()[&ArmKind::DrumsRestored], "CRIU: why");
        assert!(!r.healthy());
    }

    #[test]
    fn tcg_alone_is_healthy() {
        assert!(report(&[("KVM", &[])]).healthy());
    }
}
