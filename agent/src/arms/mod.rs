//! Arms plan; the engine acts. An arm turns an order into a list of steps that names every resource before one exists,
//! and later reads a live session for the fidelity gates. It never touches the host by itself.

pub mod drums;
pub mod external;
pub mod qemu;
pub mod reading;
pub mod registry;
pub mod runc;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use drums_common::{
    arm::ArmKind,
    ids::{ArmName, InstallationId, RunId, SessionRef},
    machine::Accelerator,
};

use crate::{
    engine::api::{GuestReady, Personalise, SessionOrder, Target},
    steps::{Cx, PlanError, Step},
    sys::Sys,
};

pub use crate::sys::SessionNet;

/// Where the tools of this host are; absent ones make their arms unfit.
#[derive(Clone, Debug, Default)]
pub struct ToolPaths {
    pub criu: Option<PathBuf>,
    pub runc: Option<PathBuf>,
    pub qemu: Option<PathBuf>,
    /// QEMU's data folder (`-L`), where it is not the built-in one.
    pub qemu_data: Option<PathBuf>,
    pub qemu_img: Option<PathBuf>,
    /// What the preflight found; TCG unless a guest has answered under KVM.
    pub accelerator: Option<Accelerator>,
}

/// The fixed surroundings of all plans on this host.
#[derive(Clone, Debug)]
pub struct Site {
    pub installation: InstallationId,
    /// tmpfs of this agent: uppers, images, sockets. One folder per session or template in it.
    pub scratch: PathBuf,
    pub tools: ToolPaths,
}

impl Site {
    /// Name of a session on this host; prefix of everything made for it.
    pub fn name(&self, session: SessionRef) -> String {
        format!("drums-{}-{session}", self.installation)
    }
    /// The session's own folder in the scratch file system.
    pub fn dir(&self, session: SessionRef) -> PathBuf {
        self.scratch.join(self.name(session))
    }
    /// The folder of a template; its name carries the session that became it.
    pub fn template_dir(&self, session: SessionRef) -> PathBuf {
        self.scratch.join(format!("{}-template", self.name(session)))
    }
    /// A tmpfs folder to put on /run in CRIU's mount namespace: its kernel data cache stays warm only on a tmpfs.
    pub fn criu_run(&self) -> PathBuf {
        self.scratch.join("criu-run")
    }
    pub fn net(&self, session: SessionRef) -> SessionNet {
        SessionNet::new(self.installation, session)
    }
}

/// Port of the guest server in every arm.
pub const GUEST_PORT: u16 = 5000;

/// Hostname, machine id and random seed that an order asks for; a pure function of its identity seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedIdentity {
    pub hostname: String,
    pub machine_id: String,
    pub seed_hex: String,
}

impl WantedIdentity {
    pub fn of(order: &SessionOrder<'_>) -> Self {
        use drums_common::digest::Sha256;
        let seed = order.identity_seed;
        let derive = |what: &str| Sha256::of(format!("drums {what} {seed} {}", order.session).as_bytes()).to_string();
        Self {
            hostname: format!("s{}-{}", order.session.number, &derive("hostname")[..8]),
            machine_id: derive("machine-id")[..32].to_owned(),
            seed_hex: derive("random"),
        }
    }
}

/// A session as planned.
pub struct Plan {
    /// What this agent owes itself and no arm's mechanism needs: files made once, checks. Done before the clock starts,
    /// and makes no resource.
    pub before: Vec<Box<dyn Step>>,
    pub steps: Vec<Box<dyn Step>>,
    /// Where the ready answer is fetched.
    pub ready_at: Target,
    /// For restored sessions: the call to make before ready is asked for, and where.
    pub personalise: Option<(Target, Personalise)>,
    /// Cgroup whose account and limits are the session's.
    pub cgroup: String,
}

/// A template as planned: `store` outlives the session; `session` is made, certified and marked; then `save`, which may
/// end it; then the session is undone and `store` is what remains.
pub struct TemplatePlan {
    pub store: Vec<Box<dyn Step>>,
    pub session: Plan,
    pub save: Vec<Box<dyn Step>>,
    /// Folder with the saved image: measured and digested after `save`.
    pub image: PathBuf,
}

/// A template that exists: what siblings are planned from.
#[derive(Clone, Debug)]
pub struct Template {
    pub run: RunId,
    pub arm: ArmName,
    pub build: u32,
    /// The session that became it; [`Site::template_dir`] of it is where its files are.
    pub session: SessionRef,
    /// Saved state that siblings must carry.
    pub state: String,
    /// The template's last answer before it was saved; siblings must differ from its identity.
    pub ready: GuestReady,
}

/// One kind of arm.
pub trait Arm: Send {
    fn kind(&self) -> ArmKind;

    /// Why it cannot run with these tools, in words an operator can act on. `facts::probe` tries the rest out.
    fn unfit(&self, tools: &ToolPaths) -> Option<String>;

    /// Pure. `template` is there exactly for kinds with [`ArmKind::from_template`].
    fn plan(&self, site: &Site, order: &SessionOrder<'_>, template: Option<&Template>) -> Result<Plan, PlanError>;

    /// Pure. Only for kinds with [`ArmKind::from_template`].
    fn plan_template(&self, site: &Site, order: &SessionOrder<'_>) -> Result<TemplatePlan, PlanError> {
        let _ = (site, order);
        Err(PlanError::Other(format!("{} is not made from templates", self.kind())))
    }

    /// Reads a live session: what shows that the registered mechanism ran (tool version, namespaces, accelerator ...).
    /// Outside every timed window. Contradictions go to `faults`.
    fn mechanism(
        &self,
        site: &Site,
        order: &SessionOrder<'_>,
        sys: &dyn Sys,
        cx: &Cx,
        faults: &mut Vec<String>,
    ) -> BTreeMap<String, String>;
}

/// Limits of the kernel groups for an order; a virtual machine's tree gets its monitor's overhead on top.
pub fn cgroup_limits(order: &SessionOrder<'_>) -> crate::sys::CgroupLimits {
    let overhead = match order.arm.kind.mechanism() {
        drums_common::arm::Mechanism::Qemu => order.limits.vmm_memory_overhead_bytes,
        _ => 0,
    };
    crate::sys::CgroupLimits {
        cpu_milli: order.limits.cpu_milli,
        cpus: order.cpus.to_vec(),
        memory_bytes: order.limits.memory_bytes.saturating_add(overhead),
        pids: 2048,
    }
}

/// `true` if `path` lies in `base`; undo of folders refuses anything else.
pub fn is_below(path: &Path, base: &Path) -> bool {
    path.starts_with(base) && path != base && !path.components().any(|c| matches!(c, std::path::Component::ParentDir))
}
