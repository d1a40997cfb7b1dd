//! Plans of the two runc arms.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use drums_common::{arm::ArmKind, workload::GUEST};
use serde_json::Value;

use super::steps::{AdoptContainer, Bundle, Checkpoint, RunContainer, WriteConfig};
use crate::{
    arms::{Arm, GUEST_PORT, Plan, Site, Template, TemplatePlan, ToolPaths, WantedIdentity, cgroup_limits, reading},
    engine::api::{Personalise, SessionOrder, Target},
    steps::{Cx, MakeCgroup, MakeDir, MakeNetns, MakeVeth, PlanError, Step},
    sys::{Sys, spec::OverlayRoot},
};

/// One of the runc arms.
pub struct Runc {
    kind: ArmKind,
}

impl Runc {
    pub fn cold() -> Self {
        Self { kind: ArmKind::RuncCold }
    }
    pub fn restored() -> Self {
        Self { kind: ArmKind::RuncRestored }
    }

    /// The container of a session. `store` holds a template's files and is where its upper layer has to outlive it.
    fn bundle(&self, site: &Site, order: &SessionOrder<'_>, root: Root) -> Result<Bundle, PlanError> {
        let need = |path: &Option<PathBuf>, tool: &'static str| {
            path.clone().ok_or_else(|| PlanError::NoTool { arm: self.kind.to_string(), tool })
        };
        let dir = site.dir(order.session);
        let tree = order.workload.tree.clone();
        let (lower, layers) = match root {
            Root::Fresh => (vec![tree], dir.clone()),
            Root::Template(store) => (vec![tree], store),
            // The template's upper layer is frozen by being a lower one now: nothing is copied.
            Root::Sibling(store) => (vec![store.join("upper"), tree], dir.clone()),
        };
        Ok(Bundle {
            runc: need(&site.tools.runc, "runc")?,
            criu: if self.kind.from_template() { Some(need(&site.tools.criu, "CRIU")?) } else { None },
            criu_run: site.criu_run(),
            root: dir.join("runc"),
            id: site.name(order.session),
            log: dir.join("runc.log"),
            group: site.name(order.session),
            overlay: OverlayRoot {
                lower,
                upper: layers.join("upper"),
                work: layers.join("work"),
                target: dir.join("rootfs"),
            },
            dir,
        })
    }

    fn steps(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        bundle: &Bundle,
        image: Option<PathBuf>,
    ) -> Vec<Box<dyn Step>> {
        let (name, net) = (site.name(order.session), site.net(order.session));
        let identity = WantedIdentity::of(order);
        vec![
            Box::new(MakeCgroup::new(&name, cgroup_limits(order))),
            Box::new(MakeDir::new(&bundle.dir, &["upper", "work", "rootfs", "runc", "criu"])),
            Box::new(MakeNetns::new(&name)),
            Box::new(MakeVeth::new(net)),
            Box::new(WriteConfig {
                bundle: bundle.clone(),
                hostname: identity.hostname.clone(),
                argv: vec![GUEST.to_owned(), "init".to_owned()],
                env: environment(&identity, order.environment_bytes),
                restore: image.is_some(),
            }),
            Box::new(RunContainer::new(bundle.clone(), image)),
            Box::new(AdoptContainer::new(bundle.pid_file())),
        ]
    }
}

/// Where a container's root comes from.
enum Root {
    Fresh,
    /// As fresh, but its upper layer is in the template's folder.
    Template(PathBuf),
    /// On top of the upper layer in the template's folder.
    Sibling(PathBuf),
}

fn environment(identity: &WantedIdentity, padding: u32) -> Vec<(String, String)> {
    [
        ("PATH", "/sbin:/bin:/usr/sbin:/usr/bin".to_owned()),
        ("DRUMS_HOSTNAME", identity.hostname.clone()),
        ("DRUMS_MACHINE_ID", identity.machine_id.clone()),
        ("DRUMS_PORT", GUEST_PORT.to_string()),
        ("PAD", "x".repeat(padding as usize)),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect()
}

impl Arm for Runc {
    fn kind(&self) -> ArmKind {
        self.kind
    }

    fn unfit(&self, tools: &ToolPaths) -> Option<String> {
        let mut missing = Vec::new();
        if tools.runc.is_none() {
            missing.push("no runc");
        }
        if self.kind.from_template() && tools.criu.is_none() {
            missing.push("no CRIU that passed its trial");
        }
        (!missing.is_empty()).then(|| format!("{}; run drums-agent setup", missing.join(", ")))
    }

    fn plan(&self, site: &Site, order: &SessionOrder<'_>, template: Option<&Template>) -> Result<Plan, PlanError> {
        let ready_at = Target::new(std::net::SocketAddrV4::new(site.net(order.session).guest, GUEST_PORT));
        let (root, image, personalise) = match (self.kind.from_template(), template) {
            (false, _) => (Root::Fresh, None, None),
            (true, None) => {
                let build = order.template_build;
                return Err(PlanError::NoTemplate { arm: order.arm.name.to_string(), build });
            }
            (true, Some(t)) => {
                let store = site.template_dir(t.session);
                let identity = WantedIdentity::of(order);
                let call = Personalise {
                    hostname: identity.hostname,
                    machine_id: identity.machine_id,
                    address: None,
                    gateway: None,
                    clock_us: None,
                    seed_hex: identity.seed_hex,
                };
                (Root::Sibling(store.clone()), Some(store.join("image")), Some((ready_at.clone(), call)))
            }
        };
        let bundle = self.bundle(site, order, root)?;
        let steps = self.steps(site, order, &bundle, image);
        Ok(Plan { before: Vec::new(), steps, ready_at, personalise, cgroup: site.name(order.session) })
    }

    fn plan_template(&self, site: &Site, order: &SessionOrder<'_>) -> Result<TemplatePlan, PlanError> {
        if !self.kind.from_template() {
            return Err(PlanError::Other(format!("{} is not made from templates", self.kind)));
        }
        let store = site.template_dir(order.session);
        let bundle = self.bundle(site, order, Root::Template(store.clone()))?;
        Ok(TemplatePlan {
            store: vec![Box::new(MakeDir::new(&store, &["upper", "work", "image"]))],
            session: Plan {
                before: Vec::new(),
                steps: self.steps(site, order, &bundle, None),
                ready_at: Target::new(std::net::SocketAddrV4::new(site.net(order.session).guest, GUEST_PORT)),
                personalise: None,
                cgroup: site.name(order.session),
            },
            save: vec![Box::new(Checkpoint { bundle, image: store.join("image") })],
            image: store.join("image"),
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
        let mut read = BTreeMap::new();
        let Some(process) = cx.process(Cx::SESSION) else {
            faults.push("the container's pid 1 is not known".to_owned());
            return read;
        };
        reading::container(sys, process.pid, &mut read, faults);
        let dir = site.dir(order.session);
        state(sys, &dir.join("runc").join(site.name(order.session)), process.pid, &mut read, faults);
        if self.kind.from_template() {
            reading::restored(sys, &dir.join("criu").join("restore.log"), &mut read, faults);
        }
        read
    }
}

/// Reads runc's own state file.
fn state(sys: &dyn Sys, folder: &Path, pid: i32, read: &mut BTreeMap<String, String>, faults: &mut Vec<String>) {
    let path = folder.join("state.json");
    let state: Option<Value> = sys.read_file(&path).ok().and_then(|b| serde_json::from_slice(&b).ok());
    let Some(state) = state else {
        faults.push(format!("runc's {} cannot be read", path.display()));
        return;
    };
    read.insert("oci_version".to_owned(), state["config"]["version"].as_str().unwrap_or("?").to_owned());
    if state["init_process_pid"].as_i64() != Some(i64::from(pid)) {
        faults.push(format!("runc says that the container's pid 1 is {}, not {pid}", state["init_process_pid"]));
    }
}
