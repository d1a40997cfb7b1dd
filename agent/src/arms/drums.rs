//! The drums arms. Cold: limits, overlay, network namespace, `drums-guest init` as pid 1. Restored: the same
//! surroundings, filled by CRIU from a template that was saved when its guest server was ready (position K2).
//!
//! A sibling's overlay is the template's frozen upper layer over the workload's tree with an empty upper of its own, so
//! nothing is copied; its network namespace is ours, handed to CRIU by descriptor, so CRIU runs no `ip`.

use std::{
    collections::BTreeMap,
    net::SocketAddrV4,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use drums_common::arm::ArmKind;

use super::{Arm, GUEST_PORT, Plan, Site, Template, TemplatePlan, ToolPaths, WantedIdentity, cgroup_limits, reading};
use crate::{
    engine::api::{Personalise, SessionOrder, Target},
    steps::{
        Cx, MakeCgroup, MakeDir, MakeNetns, MakeVeth, PlanError, Receipt, Resource, SpawnSession, SpawnTool, Step,
        StepError, tail,
    },
    sys::{Leaf, LeafOf, OverlayRoot, PreMount, SessionSpec, StdIo, Sys, ToolSpec},
};

/// Namespaces, overlay and limits by ourselves.
pub struct Drums {
    kind: ArmKind,
}

impl Drums {
    pub fn cold() -> Self {
        Self { kind: ArmKind::DrumsCold }
    }
    pub fn restored() -> Self {
        Self { kind: ArmKind::DrumsRestored }
    }
}

/// CRIU's name for the network namespace that we hand in.
const NETNS_KEY: &str = "drums";
/// Its descriptor in CRIU's process.
const NETNS_FD: i32 = 40;
/// What runc asks CRIU for, too, and cannot be told otherwise: writing the log costs time.
const LOG_LEVEL: &str = "-v4";
/// A dump or restore of so small a tree takes tens of milliseconds; one that hangs never ends by itself.
const CRIU_TIMEOUT_MS: u64 = 60_000;

/// Folders of a session.
fn overlay(order: &SessionOrder<'_>, dir: &Path, frozen: Option<&Path>, upper_in: &Path) -> OverlayRoot {
    let mut lower: Vec<PathBuf> = frozen.map(Path::to_owned).into_iter().collect();
    lower.push(order.workload.tree.clone());
    OverlayRoot { lower, upper: upper_in.join("upper"), work: upper_in.join("work"), target: dir.join("root") }
}

/// What a session's pid 1 is told; the same in every arm that passes an environment.
fn environment(identity: &WantedIdentity, padding: u32) -> Vec<(String, String)> {
    [
        ("PATH", "/sbin:/bin:/usr/sbin:/usr/bin".to_owned()),
        ("DRUMS_HOSTNAME", identity.hostname.clone()),
        ("DRUMS_MACHINE_ID", identity.machine_id.clone()),
        ("DRUMS_PORT", GUEST_PORT.to_string()),
        ("PAD", "x".repeat(padding as usize)),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .to_vec()
}

fn target(site: &Site, order: &SessionOrder<'_>) -> Target {
    Target::new(SocketAddrV4::new(site.net(order.session).guest, GUEST_PORT))
}

/// Limits, folders, network: what cold and restored sessions share.
fn surroundings(site: &Site, order: &SessionOrder<'_>, below: &[&'static str]) -> Vec<Box<dyn Step>> {
    let name = site.name(order.session);
    vec![
        Box::new(MakeCgroup::new(&name, cgroup_limits(order))),
        Box::new(MakeDir::new(site.dir(order.session), below)),
        Box::new(MakeNetns::new(&name)),
        Box::new(MakeVeth::new(site.net(order.session))),
    ]
}

/// A cold session whose upper layer lies in `upper_in`.
fn cold(site: &Site, order: &SessionOrder<'_>, below: &[&'static str], upper_in: &Path) -> Plan {
    let name = site.name(order.session);
    let identity = WantedIdentity::of(order);
    let mut steps = surroundings(site, order, below);
    steps.push(Box::new(SpawnSession::new(SessionSpec {
        leaf: Some(LeafOf { group: name.clone(), leaf: Leaf::Session }),
        root: Some(overlay(order, &site.dir(order.session), None, upper_in)),
        hostname: identity.hostname.clone(),
        argv: vec!["/sbin/drums-guest".to_owned(), "init".to_owned()],
        env: environment(&identity, order.environment_bytes),
        new_netns: false,
        deny_pkeys: true,
        output: None,
    })));
    Plan { before: Vec::new(), steps, ready_at: target(site, order), personalise: None, cgroup: name }
}

impl Arm for Drums {
    fn kind(&self) -> ArmKind {
        self.kind
    }

    fn unfit(&self, tools: &ToolPaths) -> Option<String> {
        (self.kind == ArmKind::DrumsRestored && tools.criu.is_none())
            .then(|| "no CRIU that passed its trial; run drums-agent setup".to_owned())
    }

    fn plan(&self, site: &Site, order: &SessionOrder<'_>, template: Option<&Template>) -> Result<Plan, PlanError> {
        let dir = site.dir(order.session);
        if self.kind == ArmKind::DrumsCold {
            return Ok(cold(site, order, &["upper", "work", "root"], &dir));
        }
        let template = template
            .ok_or_else(|| PlanError::NoTemplate { arm: order.arm.name.to_string(), build: order.template_build })?;
        let store = site.template_dir(template.session);
        let name = site.name(order.session);
        let identity = WantedIdentity::of(order);
        let mut steps = surroundings(site, order, &["upper", "work", "root"]);
        steps.push(Box::new(CriuRestore {
            resource: Resource::Process { role: Cx::SESSION.to_owned() },
            spec: restore_command(site, &name, &dir, &store, overlay(order, &dir, Some(&store.join("upper")), &dir))?,
            pid_file: dir.join("pid"),
            log: dir.join("restore.log"),
        }));
        let personalise = Personalise {
            hostname: identity.hostname,
            machine_id: identity.machine_id,
            address: None,
            gateway: None,
            clock_us: None,
            seed_hex: identity.seed_hex,
        };
        let ready_at = target(site, order);
        Ok(Plan {
            before: Vec::new(),
            steps,
            personalise: Some((ready_at.clone(), personalise)),
            ready_at,
            cgroup: name,
        })
    }

    fn plan_template(&self, site: &Site, order: &SessionOrder<'_>) -> Result<TemplatePlan, PlanError> {
        if self.kind != ArmKind::DrumsRestored {
            return Err(PlanError::Other(format!("{} is not made from templates", self.kind)));
        }
        let store = site.template_dir(order.session);
        let image = store.join("image");
        let name = site.name(order.session);
        let dump = CriuDump {
            resource: Resource::Process { role: "criu dump".to_owned() },
            spec: dump_command(site, &name, &image)?,
            log: image.join("dump.log"),
        };
        let mut version = criu(site, &name, Leaf::Tool)?;
        version.args.push("--version".to_owned());
        version.stdout = StdIo::File(store.join(VERSION));
        Ok(TemplatePlan {
            store: vec![Box::new(MakeDir::new(&store, &["upper", "work", "image"]))],
            session: cold(site, order, &["root"], &store),
            save: vec![Box::new(SpawnTool::run("version", "criu version", version, CRIU_TIMEOUT_MS)), Box::new(dump)],
            image,
        })
    }

    fn mechanism(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        sys: &dyn Sys,
        cx: &Cx,
        faults: &mut Vec<String>,
    ) -> BTreeMap<String, String> {
        let mut seen = BTreeMap::new();
        let Some(process) = cx.process(Cx::SESSION) else {
            faults.push("the session has no process".to_owned());
            return seen;
        };
        reading::container(sys, process.pid, &mut seen, faults);
        if self.kind == ArmKind::DrumsRestored {
            reading::restored(sys, &site.dir(order.session).join("restore.log"), &mut seen, faults);
        }
        seen
    }
}

/// File in a template's folder.
const VERSION: &str = "criu-version";

/// CRIU in its private mount namespace: its kernel data cache stays warm on a tmpfs at /run only.
fn criu(site: &Site, group: &str, leaf: Leaf) -> Result<ToolSpec, PlanError> {
    let program = site
        .tools
        .criu
        .clone()
        .ok_or_else(|| PlanError::NoTool { arm: ArmKind::DrumsRestored.to_string(), tool: "CRIU" })?;
    Ok(ToolSpec {
        program,
        leaf: Some(LeafOf { group: group.to_owned(), leaf }),
        mounts: vec![PreMount::Bind { source: site.criu_run(), target: "/run".into(), read_only: false }],
        ..ToolSpec::default()
    })
}

fn push(spec: &mut ToolSpec, args: &[&str]) {
    spec.args.extend(args.iter().map(|&a| a.to_owned()));
}

fn dump_command(site: &Site, group: &str, image: &Path) -> Result<ToolSpec, PlanError> {
    let mut spec = criu(site, group, Leaf::Tool)?;
    push(
        &mut spec,
        &["dump", "-D", &image.display().to_string(), "-o", "dump.log", LOG_LEVEL, "--manage-cgroups=ignore"],
    );
    push(&mut spec, &["--file-locks", "--ghost-limit", "64M", "--tcp-established", "--network-lock", "skip"]);
    Ok(spec)
}

fn restore_command(
    site: &Site,
    group: &str,
    dir: &Path,
    store: &Path,
    root: OverlayRoot,
) -> Result<ToolSpec, PlanError> {
    // What CRIU restores stays in the group that CRIU is in: the session's leaf.
    let mut spec = criu(site, group, Leaf::Session)?;
    let at = |p: PathBuf| p.display().to_string();
    push(&mut spec, &["restore", "-d", "--restore-sibling", "-D", &at(store.join("image")), "-W", &at(dir.to_owned())]);
    push(
        &mut spec,
        &["-o", "restore.log", LOG_LEVEL, "--pidfile", &at(dir.join("pid")), "--root", &at(root.target.clone())],
    );
    push(&mut spec, &["--manage-cgroups=ignore", "--file-locks", "--ghost-limit", "64M", "--tcp-close"]);
    push(&mut spec, &["--inherit-fd", &format!("fd[{NETNS_FD}]:{NETNS_KEY}")]);
    spec.mounts.push(PreMount::Overlay(root));
    spec.fds = vec![NETNS_FD];
    Ok(spec)
}

/// Runs a tool to its end; its log's end is quoted when it fails.
fn run(sys: &dyn Sys, name: &str, spec: &ToolSpec, cx: &Cx, log: &Path) -> Result<(), StepError> {
    let fds: Vec<_> = if spec.fds.is_empty() { Vec::new() } else { cx.netns.iter().map(|f| f.as_fd()).collect() };
    let act = |source| StepError::Act { what: format!("run {name}"), source };
    let child = sys.spawn_tool(spec, &fds).map_err(act)?;
    match sys.wait(&child, CRIU_TIMEOUT_MS) {
        Ok(exit) if exit.ok() => Ok(()),
        Ok(exit) => Err(StepError::Tool { tool: name.to_owned(), status: exit.to_string(), output: tail(sys, log) }),
        Err(source) => {
            // What it has half restored is in the session's group and goes with it.
            let _ = sys.signal(&child, libc::SIGKILL);
            Err(act(source))
        }
    }
}

/// Saves the session and ends it.
struct CriuDump {
    resource: Resource,
    spec: ToolSpec,
    log: PathBuf,
}

impl Step for CriuDump {
    fn phase(&self) -> &'static str {
        "dump"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let session = cx
            .process(Cx::SESSION)
            .ok_or_else(|| StepError::Other("there is no session to save: a bug of the plan".to_owned()))?;
        let link = format!("/proc/{}/ns/net", session.pid);
        let netns = sys
            .read_link(Path::new(&link))
            .map_err(|source| StepError::Act { what: "find the session's network namespace".to_owned(), source })?;
        // It reads `net:[4026531840]`, and CRIU wants the same without the colon.
        let inode: String = netns.display().to_string().chars().filter(char::is_ascii_digit).collect();
        let mut spec = self.spec.clone();
        push(&mut spec, &["-t", &session.pid.to_string(), "--external", &format!("net[{inode}]:{NETNS_KEY}")]);
        run(sys, "criu dump", &spec, cx, &self.log)?;
        Ok(Receipt::Made)
    }
}

/// Restores a sibling as a child of the shim and adopts it.
struct CriuRestore {
    resource: Resource,
    spec: ToolSpec,
    pid_file: PathBuf,
    log: PathBuf,
}

impl Step for CriuRestore {
    fn phase(&self) -> &'static str {
        "restore"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        run(sys, "criu restore", &self.spec, cx, &self.log)?;
        let read = sys
            .read_file(&self.pid_file)
            .map_err(|source| StepError::Act { what: "learn the restored pid".to_owned(), source })?;
        let text = String::from_utf8_lossy(&read);
        let pid = text
            .trim()
            .parse()
            .map_err(|_| StepError::Other(format!("criu restore wrote {text:?} instead of a pid")))?;
        let child = sys
            .adopt(pid)
            .map_err(|source| StepError::Act { what: format!("adopt the restored pid {pid}"), source })?;
        let process = child.process;
        cx.children.insert(Cx::SESSION.to_owned(), child);
        Ok(Receipt::Process(process))
    }
}
