//! Running, saving and restoring a container: each step is one runc command to its end.

use std::{
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use super::config::{Container, held};
use crate::{
    steps::{Cx, Receipt, Resource, Step, StepError},
    sys::{Leaf, LeafOf, PreMount, Sys, ToolSpec, spec::OverlayRoot},
};

/// Creating or restoring takes some 100 ms; this is for a machine in trouble.
const RUNC_TIMEOUT_MS: u64 = 30_000;

/// Options for CRIU that runc's command line cannot say: the same that the drums arm gives it.
const CRIU_OPTIONS: &str = "manage-cgroups=ignore\nghost-limit 64M\n";
const CRIU_DUMP: &str = "tcp-established\nnetwork-lock skip\n";
const CRIU_RESTORE: &str = "tcp-close\n";

/// One container: where its things are and which program makes it.
#[derive(Clone, Debug)]
pub struct Bundle {
    pub runc: PathBuf,
    /// Needed for saving and restoring only.
    pub criu: Option<PathBuf>,
    /// A warm tmpfs that CRIU sees as /run; its kernel data cache is kept on nothing else.
    pub criu_run: PathBuf,
    /// runc's state folder, the session's own.
    pub root: PathBuf,
    pub id: String,
    /// Folder with `config.json` and `rootfs`.
    pub dir: PathBuf,
    pub log: PathBuf,
    pub group: String,
    pub overlay: OverlayRoot,
}

impl Bundle {
    pub fn resource(&self) -> Resource {
        Resource::RuncContainer { runc: self.runc.clone(), root: self.root.clone(), id: self.id.clone() }
    }
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("pid")
    }
    pub fn criu_options(&self) -> PathBuf {
        self.dir.join("criu.conf")
    }

    /// One runc command. Its standard streams are the null device, because the container inherits them and CRIU cannot
    /// dump a file of the host; what runc has to say goes to its log.
    fn command(&self, words: &[&str], criu: bool) -> ToolSpec {
        let mut args: Vec<String> = vec![
            "--root".to_owned(),
            self.root.display().to_string(),
            "--log".to_owned(),
            self.log.display().to_string(),
        ];
        let mut mounts = vec![PreMount::Overlay(self.overlay.clone())];
        if criu {
            if let Some(path) = &self.criu {
                args.extend(["--criu".to_owned(), path.display().to_string()]);
            }
            let (source, target) = (self.criu_run.clone(), PathBuf::from("/run"));
            mounts.insert(0, PreMount::Bind { source, target, read_only: false });
        }
        args.extend(words.iter().map(|w| (*w).to_owned()));
        ToolSpec {
            program: self.runc.clone(),
            args,
            leaf: Some(LeafOf { group: self.group.clone(), leaf: Leaf::Tool }),
            mounts,
            ..ToolSpec::default()
        }
    }

    fn run(&self, sys: &dyn Sys, what: &str, spec: &ToolSpec, logs: &[PathBuf]) -> Result<(), StepError> {
        let act = |source| StepError::Act { what: format!("{what} the container {}", self.id), source };
        let child = sys.spawn_tool(spec, &[]).map_err(act)?;
        match sys.wait(&child, RUNC_TIMEOUT_MS) {
            Ok(exit) if exit.ok() => Ok(()),
            Ok(exit) => {
                let output: Vec<String> = logs
                    .iter()
                    .filter(|p| sys.path_exists(p).unwrap_or(false))
                    .map(|p| crate::steps::tail(sys, p))
                    .collect();
                let tool = format!("runc {what}");
                Err(StepError::Tool { tool, status: exit.to_string(), output: output.join(" || ") })
            }
            Err(source) => {
                // What it leaves behind is in the session's group and goes with it; the tool itself ends here.
                let _ = sys.signal(&child, libc::SIGKILL);
                Err(act(source))
            }
        }
    }
}

/// The container's configuration; only now, because it names the network namespace by the agent's descriptor of it.
pub struct WriteConfig {
    pub bundle: Bundle,
    pub hostname: String,
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub restore: bool,
}

impl Step for WriteConfig {
    fn phase(&self) -> &'static str {
        "bundle"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let fd = cx.netns.as_ref().map_or(-1, |f| f.as_raw_fd());
        let netns = PathBuf::from(format!("/proc/{}/fd/{fd}", std::process::id()));
        let cgroup = format!("/{}/session", self.bundle.group);
        let status = sys
            .read_file(Path::new("/proc/self/status"))
            .map_err(|source| StepError::Act { what: "read the agent's own capabilities".to_owned(), source })?;
        let capabilities = held(&String::from_utf8_lossy(&status));
        let container = Container {
            capabilities,
            hostname: &self.hostname,
            argv: &self.argv,
            env: &self.env,
            cgroup: &cgroup,
            netns: &netns,
        };
        let words = |e: &dyn std::fmt::Display| StepError::Other(format!("write the container's configuration: {e}"));
        let mut spec = container.spec().map_err(|e| words(&e))?;
        let options = self.bundle.criu_options();
        spec.set_annotations(Some([("org.criu.config".to_owned(), options.display().to_string())].into()));
        let json = serde_json::to_vec(&spec).map_err(|e| words(&e))?;
        let write = |path: &Path, bytes: &[u8]| {
            sys.write_file(path, bytes, 0o600)
                .map_err(|source| StepError::Act { what: format!("write {}", path.display()), source })
        };
        let more = if self.restore { CRIU_RESTORE } else { CRIU_DUMP };
        write(&options, format!("{CRIU_OPTIONS}{more}").as_bytes())?;
        write(&self.bundle.dir.join("config.json"), &json)?;
        Ok(Receipt::Made)
    }
}

/// `runc run --detach`, or `runc restore --detach` when there is an image.
pub struct RunContainer {
    resource: Resource,
    bundle: Bundle,
    image: Option<PathBuf>,
}

impl RunContainer {
    pub fn new(bundle: Bundle, image: Option<PathBuf>) -> Self {
        Self { resource: bundle.resource(), bundle, image }
    }
}

impl Step for RunContainer {
    fn phase(&self) -> &'static str {
        if self.image.is_some() { "runc restore" } else { "runc run" }
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        let b = &self.bundle;
        let (dir, pid, work) = (b.dir.display().to_string(), b.pid_file().display().to_string(), b.dir.join("criu"));
        match &self.image {
            None => {
                let words = ["run", "--detach", "--no-new-keyring", "--bundle", &dir, "--pid-file", &pid, &b.id];
                b.run(sys, "run", &b.command(&words, false), std::slice::from_ref(&b.log))?;
            }
            Some(image) => {
                let (image, work_dir) = (image.display().to_string(), work.display().to_string());
                let words = [
                    "restore",
                    "--detach",
                    "--file-locks",
                    "--image-path",
                    &image,
                    "--work-path",
                    &work_dir,
                    "--bundle",
                    &dir,
                    "--pid-file",
                    &pid,
                    &b.id,
                ];
                b.run(sys, "restore", &b.command(&words, true), &[b.log.clone(), work.join("restore.log")])?;
            }
        }
        Ok(Receipt::Made)
    }
}

/// The container's pid 1 is the shim's child by now: runc, which made it, has ended.
pub struct AdoptContainer {
    resource: Resource,
    pid_file: PathBuf,
}

impl AdoptContainer {
    pub fn new(pid_file: PathBuf) -> Self {
        Self { resource: Resource::Process { role: Cx::SESSION.to_owned() }, pid_file }
    }
}

impl Step for AdoptContainer {
    fn phase(&self) -> &'static str {
        "adopt"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let act = |source| StepError::Act { what: format!("read {}", self.pid_file.display()), source };
        let text = sys.read_file(&self.pid_file).map_err(act)?;
        let pid = String::from_utf8_lossy(&text)
            .trim()
            .parse()
            .map_err(|_| StepError::Other(format!("runc's {} holds no process number", self.pid_file.display())))?;
        let child = sys.adopt(pid).map_err(|source| StepError::Make { resource: self.resource.to_string(), source })?;
        let process = child.process;
        cx.children.insert(Cx::SESSION.to_owned(), child);
        Ok(Receipt::Process(process))
    }
}

/// `runc checkpoint`, which ends the container.
pub struct Checkpoint {
    pub bundle: Bundle,
    pub image: PathBuf,
}

impl Step for Checkpoint {
    fn phase(&self) -> &'static str {
        "save"
    }
    fn resource(&self) -> Option<&Resource> {
        None
    }
    fn apply(&self, sys: &dyn Sys, _: &mut Cx) -> Result<Receipt, StepError> {
        let (image, work) = (self.image.display().to_string(), self.bundle.dir.join("criu"));
        let work_dir = work.display().to_string();
        let id = &self.bundle.id;
        let words = ["checkpoint", "--file-locks", "--image-path", &image, "--work-path", &work_dir, id];
        let mut spec = self.bundle.command(&words, true);
        // The overlay is in use by the container; only CRIU's /run is wanted here.
        spec.mounts.retain(|m| matches!(m, PreMount::Bind { .. }));
        self.bundle.run(sys, "checkpoint", &spec, &[self.bundle.log.clone(), work.join("dump.log")])?;
        Ok(Receipt::Made)
    }
}
