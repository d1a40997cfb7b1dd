//! Does hardware virtualisation work here? `/dev/kvm` may open, make virtual machines and say that they run while nothing
//! runs in them, so only an answer from a guest counts.
//!
//! The answer is kept per QEMU binary, kernel and boot: a host does not change it in between, and a refusal takes the
//! whole ten seconds.

use std::{fs, io::Write as _, path::Path, time::Duration};

use drums_common::{digest::Sha256, machine::Accelerator};
use serde::{Deserialize, Serialize};

use super::{
    ToolsDir,
    command::{CommandError, Ended, Run, Said},
    probe_guest, tools,
};

/// A real accelerator needs well under a second.
pub const KVM_LIMIT: Duration = Duration::from_secs(10);
/// Interpreted, on a busy machine.
pub const TCG_LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmAnswer {
    pub usable: bool,
    /// Why, in words.
    pub detail: String,
    /// This machine is itself a virtual machine.
    pub nested: bool,
}

impl KvmAnswer {
    pub fn accelerator(&self) -> Accelerator {
        match (self.usable, self.nested) {
            (true, true) => Accelerator::KvmNested,
            (true, false) => Accelerator::KvmOnMetal,
            (false, _) => Accelerator::Tcg,
        }
    }

    fn unusable(detail: impl Into<String>) -> Self {
        Self { usable: false, detail: detail.into(), nested: nested() }
    }
}

/// What an answer holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Conditions {
    qemu_sha256: Sha256,
    kernel: String,
    boot_id: String,
    /// Appears and disappears with modules and permissions.
    device: bool,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    conditions: Conditions,
    answer: KvmAnswer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestAccel {
    Kvm,
    Tcg,
}

/// The kept answer if it holds for this QEMU, kernel and boot; else tries, and keeps what it found.
pub fn probe(dir: &ToolsDir, qemu: &Path) -> KvmAnswer {
    let Some(conditions) = conditions(qemu) else {
        return KvmAnswer::unusable(format!("{} cannot be read", qemu.display()));
    };
    let kept = fs::read(dir.kvm_answer()).ok().and_then(|t| serde_json::from_slice::<Kept>(&t).ok());
    if let Some(kept) = kept.filter(|k| k.conditions == conditions) {
        return kept.answer;
    }
    let answer = try_kvm(qemu);
    if let Err(e) = keep(dir, &Kept { conditions, answer: answer.clone() }) {
        tracing::warn!(error = %e, path = %dir.kvm_answer().display(), "the answer of the KVM preflight was not kept");
    }
    answer
}

fn conditions(qemu: &Path) -> Option<Conditions> {
    let text = |path: &str| fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default();
    Some(Conditions {
        qemu_sha256: tools::sha256_of(qemu).ok()?,
        kernel: text("/proc/sys/kernel/osrelease"),
        boot_id: text("/proc/sys/kernel/random/boot_id"),
        device: Path::new("/dev/kvm").exists(),
    })
}

fn keep(dir: &ToolsDir, kept: &Kept) -> std::io::Result<()> {
    fs::create_dir_all(dir.path())?;
    // Two agents may keep the same answer at once: each writes its own file, and a rename never shows half of one.
    let mut file = tempfile::NamedTempFile::new_in(dir.path())?;
    file.write_all(&serde_json::to_vec(kept)?)?;
    file.persist(dir.kvm_answer())?;
    Ok(())
}

/// Tries, whatever was kept.
pub fn try_kvm(qemu: &Path) -> KvmAnswer {
    if !Path::new("/dev/kvm").exists() {
        return KvmAnswer::unusable("there is no /dev/kvm");
    }
    if let Err(e) = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return KvmAnswer::unusable(format!("/dev/kvm cannot be opened: {e}"));
    }
    match boot(qemu, GuestAccel::Kvm, KVM_LIMIT) {
        Ok(detail) => KvmAnswer { usable: true, detail, nested: nested() },
        Err(why) => KvmAnswer::unusable(format!("/dev/kvm opens, but {why}")),
    }
}

/// Boots the probe guest; what it said, or why it said nothing.
pub fn boot(qemu: &Path, accel: GuestAccel, limit: Duration) -> Result<String, String> {
    let folder = tempfile::tempdir().map_err(|e| format!("no temporary folder could be made: {e}"))?;
    let disk = folder.path().join("disk.img");
    fs::write(&disk, probe_guest::disk()).map_err(|e| format!("{} could not be written: {e}", disk.display()))?;
    let (accel_option, cpu) = match accel {
        GuestAccel::Kvm => ("kvm", "host"),
        GuestAccel::Tcg => ("tcg", "max"),
    };
    // A comma ends a value in QEMU's option syntax; doubled it stands for itself.
    let file = disk.display().to_string().replace(',', ",,");
    let start = std::time::Instant::now();
    let run = Run::new(qemu, limit)
        .args(["-machine", "q35", "-accel", accel_option, "-cpu", cpu, "-m", "16"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"])
        .args(["-drive", &format!("file={file},format=raw,if=none,id=d"), "-device", "ide-hd,drive=d"])
        .dies_with_us();
    // QEMU pauses at an internal error instead of ending, so its message has to end the waiting.
    let broken = |said: &Said| said.err.contains("internal error");
    let alive = |said: &Said| said.out.contains(probe_guest::MARKER);
    let (said, ended) =
        run.until(|s| alive(s) || broken(s)).map_err(|e: CommandError| drums_common::telemetry::chain(&e))?;
    if alive(&said) {
        return Ok(format!("a guest answered from long mode after {} ms", start.elapsed().as_millis()));
    }
    let last = said.err.trim().lines().last().map(|l| format!(" ({})", l.trim())).unwrap_or_default();
    Err(match ended {
        Ended::Late => format!("no guest answered within {} s{last}", limit.as_secs()),
        Ended::Enough => format!("the guest stopped with an internal error{last}"),
        by @ Ended::By(_) => format!("QEMU {}{last}", by.words()),
    })
}

fn nested() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    flags.split_ascii_whitespace().any(|f| f == "hypervisor")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in QEMU's place.
    fn script(folder: &Path, text: &str) -> std::path::PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let path = folder.join("qemu");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn only_an_answer_from_the_guest_counts() {
        let t = tempfile::tempdir().unwrap();
        let boot = |text: &str| boot(&script(t.path(), text), GuestAccel::Kvm, Duration::from_millis(500));
        assert!(boot("echo drums-guest-alive; exec sleep 60").unwrap().contains("answered"));
        assert!(boot("echo running; exec sleep 60").unwrap_err().contains("no guest answered"));
        assert!(
            boot("echo 'KVM internal error. Suberror: 1' >&2; exec sleep 60").unwrap_err().contains("internal error")
        );
        assert!(boot("echo 'no such device' >&2; exit 1").unwrap_err().contains("status 1 (no such device)"));
    }

    #[test]
    fn an_answer_is_kept_for_its_conditions_only() {
        let t = tempfile::tempdir().unwrap();
        let dir = ToolsDir::new(t.path().join("tools"));
        let first = script(t.path(), "echo first");
        let conditions = conditions(&first).unwrap();
        let answer = KvmAnswer { usable: true, detail: "kept".to_owned(), nested: true };
        keep(&dir, &Kept { conditions, answer: answer.clone() }).unwrap();
        assert_eq!(probe(&dir, &first), answer);
        assert_eq!(answer.accelerator(), Accelerator::KvmNested);
        // Another binary: the kept answer says nothing about it, and this one does not even run a guest.
        let second = probe(&dir, &script(t.path(), "exit 1"));
        assert!(!second.usable);
        assert_eq!(second.accelerator(), Accelerator::Tcg);
        assert_eq!(probe(&dir, Path::new("/no/such")).accelerator(), Accelerator::Tcg);
    }

    #[test]
    fn live_a_guest_answers_under_tcg() {
        let Some(qemu) = tools::program("qemu-system-x86_64") else {
            eprintln!("SKIP qemu: not installed here; drums-agent setup installs it");
            return;
        };
        boot(&qemu, GuestAccel::Tcg, TCG_LIMIT).unwrap();
    }
}
