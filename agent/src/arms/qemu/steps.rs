//! What only virtual machines need doing: the initramfs, the monitor's process and its QMP, saving and continuing.

use std::{
    fs::File,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{
    args::{self, Accel},
    initrd,
    qmp::{Qmp, QmpError},
    template::{self, Digests, Fingerprint, Manifest, TemplateError},
};
use crate::{
    probe::raw_us,
    steps::{Cx, Receipt, Resource, Step, StepError, tail},
    sys::{Sys, ToolSpec},
};

/// QEMU greets within some 100 ms of its exec; this is for a machine in trouble.
const QMP_TIMEOUT: Duration = Duration::from_secs(10);
/// Loading and saving device state takes tens of milliseconds; RAM does not move.
const STATE_TIMEOUT: Duration = Duration::from_secs(20);

pub const IGNORE_SHARED: &str = "x-ignore-shared";

fn said(what: &str, e: impl std::error::Error + Send + Sync + 'static) -> StepError {
    StepError::Failed { what: what.to_owned(), source: Box::new(e) }
}

/// The session's QMP connection, as later steps and the fidelity reading find it.
pub struct Monitor(Mutex<Qmp>);

impl Monitor {
    pub fn lock(&self) -> MutexGuard<'_, Qmp> {
        // A panic between a command and its answer would be noticed by the next command's id.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn monitor<'a>(cx: &'a Cx, what: &str) -> Result<MutexGuard<'a, Qmp>, StepError> {
    match cx.get::<Monitor>() {
        Some(m) => Ok(m.lock()),
        None => Err(StepError::Other(format!("{what}: this session has no QMP connection"))),
    }
}

/// Where the boot files are and what they are made from.
#[derive(Clone, Debug)]
pub struct BootFiles {
    pub kernel: PathBuf,
    pub tree: PathBuf,
    pub modules: PathBuf,
    /// Made from tree and modules.
    pub initrd: PathBuf,
}

/// The initramfs, once per workload and host: after the first time this looks at one file.
pub struct EnsureInitrd(pub BootFiles);

impl Step for EnsureInitrd {
    fn phase(&self) -> &'static str {
        "image"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, _: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        initrd::ensure(&self.0.tree, &self.0.modules, &self.0.initrd).map_err(|e| said("make the initramfs", e))?;
        Ok(Receipt::Made)
    }
}

/// What a template's manifest is compared with.
#[derive(Clone)]
pub struct Wanted {
    pub digests: Arc<Digests>,
    pub qemu: PathBuf,
    pub accel: Accel,
    pub memory_bytes: u64,
    pub boot: BootFiles,
}

impl Wanted {
    fn fingerprint(&self) -> Result<Fingerprint, TemplateError> {
        let boot = &self.boot;
        Fingerprint::take(&self.digests, &self.qemu, self.accel, self.memory_bytes, &boot.kernel, &boot.initrd)
    }
}

/// The template's folder, kept with a session for its fidelity reading.
pub struct RestoredFrom(pub PathBuf);

/// Refuses to continue a state in another machine than the one that was saved.
pub struct CheckManifest {
    pub folder: PathBuf,
    pub wanted: Wanted,
}

impl Step for CheckManifest {
    fn phase(&self) -> &'static str {
        "manifest"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, _: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        Manifest::read(&self.folder)
            .and_then(|m| m.admit(&self.wanted.fingerprint()?))
            .map_err(|e| said("check the template's manifest", e))?;
        cx.put(RestoredFrom(self.folder.clone()));
        Ok(Receipt::Made)
    }
}

/// QEMU itself, in the session's group, up to the negotiated QMP connection.
pub struct SpawnQemu {
    resource: Resource,
    spec: ToolSpec,
    log: PathBuf,
    /// A sibling's state file.
    state: Option<PathBuf>,
}

impl SpawnQemu {
    pub fn new(spec: ToolSpec, log: PathBuf, state: Option<PathBuf>) -> Self {
        Self { resource: Resource::Process { role: Cx::SESSION.to_owned() }, spec, log, state }
    }

    fn with_log(&self, sys: &dyn Sys, e: QmpError) -> StepError {
        said(&format!("start QEMU (its own words: {})", tail(sys, &self.log)), e)
    }
}

impl Step for SpawnQemu {
    fn phase(&self) -> &'static str {
        "monitor"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let (ours, theirs) = UnixStream::pair().map_err(|e| said("make QMP's socket pair", e))?;
        let theirs = OwnedFd::from(theirs);
        let state = match &self.state {
            Some(path) => Some(File::open(path).map_err(|e| said(&format!("open {}", path.display()), e))?),
            None => None,
        };
        let tap = cx.taps.last().ok_or_else(|| StepError::Other("start QEMU: the plan made no tap before".into()))?;
        let mut spec = self.spec.clone();
        let mut fds: Vec<BorrowedFd<'_>> = vec![tap.fd.as_fd(), theirs.as_fd()];
        spec.fds = vec![args::TAP_FD, args::QMP_FD];
        if let Some(state) = &state {
            fds.push(state.as_fd());
            spec.fds.push(args::STATE_FD);
        }
        let make = |source| StepError::Make { resource: self.resource.to_string(), source };
        let child = sys.spawn_tool(&spec, &fds).map_err(make)?;
        let process = child.process;
        cx.children.insert(Cx::SESSION.to_owned(), child);
        // The child has its copies; ours would keep the connection open after QEMU is gone.
        drop(theirs);
        let qmp = Qmp::negotiate(ours, QMP_TIMEOUT).map_err(|e| self.with_log(sys, e))?;
        cx.put(Monitor(Mutex::new(qmp)));
        Ok(Receipt::Process(process))
    }
}

/// Has a sibling load its state and waits until its processor runs.
pub struct Continue {
    pub log: PathBuf,
}

impl Step for Continue {
    fn phase(&self) -> &'static str {
        "state"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let mut qmp = monitor(cx, "continue the saved state")?;
        let failed = |why: &dyn std::fmt::Display| {
            let words = tail(sys, &self.log);
            StepError::Other(format!("continue the saved state: {why}; QEMU's own words: {words}"))
        };
        // RAM stays in its file on both sides.
        qmp.set_capability(IGNORE_SHARED, true).map_err(|e| failed(&e))?;
        qmp.migrate_incoming(&format!("fd:{}", args::STATE_FD)).map_err(|e| failed(&e))?;
        let deadline = raw_us() + STATE_TIMEOUT.as_micros() as u64;
        loop {
            match qmp.status().map_err(|e| failed(&e))?.as_str() {
                "running" => return Ok(Receipt::Made),
                // As it was saved: everything is loaded.
                "paused" => qmp.cont().map_err(|e| failed(&e))?,
                "inmigrate" | "prelaunch" if raw_us() < deadline => {
                    std::thread::park_timeout(Duration::from_micros(200));
                }
                other => return Err(failed(&format!("QEMU is {other}, not running"))),
            }
        }
    }
}

/// Stops the template's machine, writes its device state beside its RAM and ends QEMU, which leaves the RAM file as it
/// was at the stop.
pub struct SaveState {
    pub folder: PathBuf,
}

impl Step for SaveState {
    fn phase(&self) -> &'static str {
        "save"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let path = self.folder.join(template::STATE);
        let file = sys
            .new_file(&path, 0o400)
            .map_err(|source| StepError::Act { what: format!("create {}", path.display()), source })?
            .ok_or_else(|| StepError::Other("save the machine: this kernel gives no descriptors".into()))?;
        let saved = (|| {
            let mut qmp = monitor(cx, "save the machine")?;
            let q = |e: QmpError| said("save the machine", e);
            qmp.stop().map_err(q)?;
            // RAM stays in its file; only devices go into the state.
            qmp.set_capability(IGNORE_SHARED, true).map_err(q)?;
            qmp.give_fd("state", file.as_fd()).map_err(q)?;
            qmp.migrate("fd:state").map_err(q)?;
            qmp.wait_migration(STATE_TIMEOUT).map_err(q)?;
            qmp.quit().map_err(q)
        })();
        saved?;
        let child = cx.session().ok_or_else(|| StepError::Other("save the machine: it has no process".into()))?;
        sys.wait(child, STATE_TIMEOUT.as_millis() as u64)
            .map_err(|source| StepError::Act { what: "see QEMU end after saving".to_owned(), source })?;
        Ok(Receipt::Made)
    }
}

/// Digests what was saved and writes the manifest, last: without it there is no template.
pub struct SealTemplate {
    pub folder: PathBuf,
    pub wanted: Wanted,
}

impl Step for SealTemplate {
    fn phase(&self) -> &'static str {
        "seal"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        let seal = |e: TemplateError| said("seal the template", e);
        // Root writes all the same; what really finds a template out that changed is its digest.
        let ram = self.folder.join(template::RAM);
        sys.set_mode(&ram, 0o400)
            .map_err(|source| StepError::Act { what: "seal the template's RAM".to_owned(), source })?;
        let manifest = Manifest::seal(&self.folder, self.wanted.fingerprint().map_err(seal)?).map_err(seal)?;
        let path = self.folder.join(template::MANIFEST);
        let bytes = serde_json::to_vec_pretty(&manifest).map_err(|e| said("seal the template", e))?;
        sys.write_file(&path, &bytes, 0o400)
            .map_err(|source| StepError::Act { what: format!("write {}", path.display()), source })?;
        Ok(Receipt::Made)
    }
}

/// Is the template still what was sealed?
pub fn template_faults(folder: &Path) -> Option<String> {
    Manifest::read(folder).and_then(|m| m.unchanged(folder)).err().map(|e| e.to_string())
}
