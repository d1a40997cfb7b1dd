//! Plans of the two qemu arms.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use drums_common::{
    arm::ArmKind,
    ids::SessionRef,
    machine::Accelerator,
    workload::{self, BootManifest},
};
use serde_json::{Value, json};

use super::{
    args::{self, Accel, Boot, Machine, Memory},
    steps::{
        BootFiles, CheckManifest, Continue, EnsureInitrd, IGNORE_SHARED, Monitor, RestoredFrom, SaveState,
        SealTemplate, SpawnQemu, Wanted, template_faults,
    },
    template::{self, Digests},
};
use crate::{
    arms::{Arm, GUEST_PORT, Plan, Site, Template, TemplatePlan, ToolPaths, WantedIdentity, cgroup_limits},
    engine::api::{Personalise, SessionOrder, Target},
    probe::post_json,
    steps::{Cx, MakeCgroup, MakeDir, MakeTap, PlanError, Step},
    sys::{Leaf, LeafOf, SessionNet, StdIo, Sys, ToolSpec},
};

/// One of the qemu arms.
pub struct Qemu {
    kind: ArmKind,
    digests: Arc<Digests>,
}

impl Qemu {
    pub fn cold() -> Self {
        Self { kind: ArmKind::QemuCold, digests: Arc::default() }
    }
    pub fn warm() -> Self {
        Self { kind: ArmKind::QemuWarm, digests: Arc::default() }
    }

    fn tools<'a>(&self, site: &'a Site) -> Result<Tools<'a>, PlanError> {
        let need = |path: &'a Option<PathBuf>, tool: &'static str| {
            path.as_ref().ok_or_else(|| PlanError::NoTool { arm: self.kind.to_string(), tool })
        };
        Ok(Tools {
            qemu: need(&site.tools.qemu, "qemu-system-x86_64")?,
            data: site.tools.qemu_data.clone(),
            accel: match site.tools.accelerator {
                Some(Accelerator::KvmOnMetal | Accelerator::KvmNested) => Accel::Kvm,
                _ => Accel::Tcg,
            },
        })
    }

    fn wanted(&self, site: &Site, order: &SessionOrder<'_>, tools: &Tools<'_>) -> Wanted {
        let folder = folder(order);
        Wanted {
            digests: self.digests.clone(),
            qemu: tools.qemu.clone(),
            accel: tools.accel,
            memory_bytes: order.limits.memory_bytes,
            boot: BootFiles {
                kernel: folder.join(workload::KERNEL),
                tree: order.workload.tree.clone(),
                modules: folder.join(workload::MODULES),
                // The workload's digest covers the tree and the modules.
                initrd: site.scratch.join(format!("initramfs-{}.cpio", order.workload.sha256.short())),
            },
        }
    }

    /// Steps of a machine with this memory; for a sibling, the folder of its template is checked on the way.
    fn steps(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        memory: Memory,
        template: Option<(PathBuf, SessionNet)>,
    ) -> Result<Steps, PlanError> {
        let tools = self.tools(site)?;
        let wanted = self.wanted(site, order, &tools);
        let (name, dir) = (site.name(order.session), site.dir(order.session));
        let net =
            SessionNet { first_guest: template.as_ref().map(|(_, saved)| saved.guest), ..net(site, order.session) };
        let (log, serial) = (dir.join("qemu.log"), dir.join("serial.log"));
        let identity = WantedIdentity::of(order);
        let machine = Machine {
            name: name.clone(),
            accel: tools.accel,
            memory_bytes: order.limits.memory_bytes,
            memory,
            boot: Boot {
                kernel: wanted.boot.kernel.clone(),
                initrd: wanted.boot.initrd.clone(),
                command_line: boot_manifest(order)?.command_line,
                parameters: parameters(&identity, &net),
            },
            serial,
            data: tools.data.clone(),
        };
        let spec = ToolSpec {
            program: tools.qemu.clone(),
            args: machine.arguments(),
            // Set-up is randomised where it can matter here: in the monitor's address space.
            env: vec![("DRUMS_PAD".to_owned(), "x".repeat(order.environment_bytes as usize))],
            leaf: Some(LeafOf { group: name.clone(), leaf: Leaf::Tool }),
            stdout: StdIo::File(log.clone()),
            stderr: StdIo::File(log.clone()),
            ..ToolSpec::default()
        };
        let mut before: Vec<Box<dyn Step>> = vec![Box::new(EnsureInitrd(wanted.boot.clone()))];
        let state = template.as_ref().map(|(folder, _)| folder.join(template::STATE));
        if let Some((folder, _)) = &template {
            before.push(Box::new(CheckManifest { folder: folder.clone(), wanted }));
        }
        let mut steps: Vec<Box<dyn Step>> = vec![
            Box::new(MakeCgroup::new(&name, cgroup_limits(order))),
            Box::new(MakeDir::new(&dir, &[])),
            Box::new(MakeTap::new(net)),
            Box::new(SpawnQemu::new(spec, log.clone(), state)),
        ];
        if template.is_some() {
            steps.push(Box::new(Continue { log }));
        }
        Ok(Steps { before, steps })
    }
}

/// Before the clock starts, and after.
struct Steps {
    before: Vec<Box<dyn Step>>,
    steps: Vec<Box<dyn Step>>,
}

struct Tools<'a> {
    qemu: &'a PathBuf,
    data: Option<PathBuf>,
    accel: Accel,
}

/// Where the workload was unpacked: the tree is one of its folders.
fn folder<'a>(order: &'a SessionOrder<'_>) -> &'a Path {
    order.workload.tree.parent().unwrap_or(Path::new("/"))
}

/// What the workload says of its kernel. A frozen file of the workload, so reading it keeps plans functions of orders.
fn boot_manifest(order: &SessionOrder<'_>) -> Result<BootManifest, PlanError> {
    let path = folder(order).join(workload::BOOT_MANIFEST);
    let failed = |why: &dyn std::fmt::Display| {
        let path = path.display();
        PlanError::Other(format!(
            "workload {} cannot boot a virtual machine: {path}: {why}",
            order.workload.sha256.short()
        ))
    };
    let text = std::fs::read(&path).map_err(|e| failed(&e))?;
    serde_json::from_slice(&text).map_err(|e| failed(&e))
}

/// A machine's network: addresses of its session, hardware addresses of every machine of this installation, since a
/// sibling continues with its own and with its template's neighbour entry for the host.
fn net(site: &Site, session: SessionRef) -> SessionNet {
    let own = site.net(session);
    // The first half carries the installation, by which an audit knows our links.
    let [a, b, c, ..] = own.host_mac;
    SessionNet { host_mac: [a, b, c, 0, 0, 0], guest_mac: args::GUEST_MAC, ..own }
}

fn target(net: &SessionNet) -> Target {
    Target::new(std::net::SocketAddrV4::new(net.guest, GUEST_PORT))
}

/// What the guest's init reads on its kernel's command line.
fn parameters(identity: &WantedIdentity, net: &SessionNet) -> Vec<(String, String)> {
    let mac = net.host_mac.map(|b| format!("{b:02x}")).join(":");
    [
        ("boot", "vm".to_owned()),
        ("hostname", identity.hostname.clone()),
        ("machine_id", identity.machine_id.clone()),
        ("port", GUEST_PORT.to_string()),
        ("address", net.guest_cidr()),
        ("gateway", net.host.to_string()),
        ("gateway_mac", mac),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect()
}

impl Arm for Qemu {
    fn kind(&self) -> ArmKind {
        self.kind
    }

    fn unfit(&self, tools: &ToolPaths) -> Option<String> {
        tools.qemu.is_none().then(|| "no qemu-system-x86_64; run drums-agent setup".to_owned())
    }

    fn plan(&self, site: &Site, order: &SessionOrder<'_>, template: Option<&Template>) -> Result<Plan, PlanError> {
        let own = net(site, order.session);
        let (memory, continued, personalise) = match (self.kind.from_template(), template) {
            (false, _) => (Memory::Private, None, None),
            (true, None) => {
                let build = order.template_build;
                return Err(PlanError::NoTemplate { arm: order.arm.name.to_string(), build });
            }
            (true, Some(t)) => {
                let folder = site.template_dir(t.session);
                let saved = net(site, t.session);
                let identity = WantedIdentity::of(order);
                // The sibling still has its template's address: only this session's tap leads to it.
                let first = target(&saved).via(&own.link, own.host);
                let call = Personalise {
                    hostname: identity.hostname,
                    machine_id: identity.machine_id,
                    address: Some(own.guest_cidr()),
                    gateway: Some(own.host.to_string()),
                    clock_us: None,
                    seed_hex: identity.seed_hex,
                };
                let memory = Memory::Sibling { ram: folder.join(template::RAM) };
                (memory, Some((folder, saved)), Some((first, call)))
            }
        };
        let Steps { before, steps } = self.steps(site, order, memory, continued)?;
        Ok(Plan { before, steps, ready_at: target(&own), personalise, cgroup: site.name(order.session) })
    }

    fn plan_template(&self, site: &Site, order: &SessionOrder<'_>) -> Result<TemplatePlan, PlanError> {
        if !self.kind.from_template() {
            return Err(PlanError::Other(format!("{} is not made from templates", self.kind)));
        }
        let folder = site.template_dir(order.session);
        let tools = self.tools(site)?;
        let wanted = self.wanted(site, order, &tools);
        let Steps { before, steps } =
            self.steps(site, order, Memory::Template { ram: folder.join(template::RAM) }, None)?;
        Ok(TemplatePlan {
            store: vec![Box::new(MakeDir::new(&folder, &[]))],
            session: Plan {
                before,
                steps,
                ready_at: target(&net(site, order.session)),
                personalise: None,
                cgroup: site.name(order.session),
            },
            save: vec![
                Box::new(SaveState { folder: folder.clone() }),
                Box::new(SealTemplate { folder: folder.clone(), wanted }),
            ],
            image: folder,
        })
    }

    fn mechanism(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        _: &dyn Sys,
        cx: &Cx,
        faults: &mut Vec<String>,
    ) -> BTreeMap<String, String> {
        let mut read = BTreeMap::new();
        let boot = boot_manifest(order);
        match &boot {
            Ok(b) => {
                read.insert("guest_kernel".to_owned(), format!("{} {}", b.kernel_package, b.kernel_package_version));
                read.insert("guest_kernel_sha256".to_owned(), b.kernel_sha256.to_string());
                read.insert("guest_modules_sha256".to_owned(), b.modules_sha256.to_string());
            }
            Err(e) => faults.push(e.to_string()),
        }
        let accel = self.tools(site).map_or(Accel::Tcg, |t| t.accel);
        let Some(monitor) = cx.get::<Monitor>() else {
            faults.push("the session has no QMP connection to ask".to_owned());
            return read;
        };
        let mut qmp = monitor.lock();
        read.insert("qemu_version".to_owned(), qmp.version().to_owned());
        read.insert("machine".to_owned(), args::MACHINE.to_owned());
        match qmp.kvm_enabled() {
            Ok(on) => {
                read.insert("accelerator".to_owned(), if on { "kvm" } else { "tcg" }.to_owned());
                if on != (accel == Accel::Kvm) {
                    faults.push(format!("QEMU says KVM {on}, the host's preflight decided for {accel:?}"));
                }
            }
            Err(e) => faults.push(e.to_string()),
        }
        match qmp.status() {
            Ok(s) if s == "running" => {}
            Ok(s) => faults.push(format!("QEMU says that the machine is {s}")),
            Err(e) => faults.push(e.to_string()),
        }
        if self.kind.from_template() {
            match qmp.capability(IGNORE_SHARED) {
                Ok(true) => drop(read.insert("ram".to_owned(), "template's file, mapped copy on write".to_owned())),
                Ok(false) => faults.push("x-ignore-shared is off: RAM was copied, not mapped".to_owned()),
                Err(e) => faults.push(e.to_string()),
            }
            drop(qmp);
            self.sibling(site, order, cx, boot.is_ok_and(|b| b.vmgenid), &mut read, faults);
        } else {
            read.insert("ram".to_owned(), "anonymous".to_owned());
        }
        read
    }
}

impl Qemu {
    /// What only a restored machine must show: the generation id reseeded its kernel, and its template is unharmed.
    fn sibling(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        cx: &Cx,
        vmgenid: bool,
        read: &mut BTreeMap<String, String>,
        faults: &mut Vec<String>,
    ) {
        match cx.get::<RestoredFrom>().map(|r| template_faults(&r.0)) {
            Some(None) => drop(read.insert("template".to_owned(), "unchanged by digest".to_owned())),
            Some(Some(fault)) => faults.push(fault),
            None => faults.push("it is not known which template this session continued".to_owned()),
        }
        if !vmgenid {
            let said = "the guest kernel has no driver for it; the post-restore call re-keys instead";
            read.insert("vmgenid".to_owned(), said.to_owned());
            return;
        }
        let guest = target(&net(site, order.session));
        let body = json!({"command": ["dmesg"], "shell": false});
        // QEMU has just answered that it runs.
        match post_json::<_, Value>(&guest, "/execute", &body, Duration::from_secs(5), &mut || true) {
            Ok(answer) => {
                let log = answer["output"].as_str().unwrap_or_default();
                match log.lines().rev().find(|l| l.contains("virtual machine fork")) {
                    Some(line) => drop(read.insert("vmgenid".to_owned(), line.trim().to_owned())),
                    None => faults.push("the guest's log has no line of vmgenid's reseeding".to_owned()),
                }
            }
            Err(e) => faults.push(format!("read the guest's log: {}", drums_common::telemetry::chain(&e))),
        }
    }
}
