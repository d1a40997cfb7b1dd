//! What making a process costs with runc: `runc run` of the tree's `true` until it is reaped, in the same root, the same
//! namespaces and the same limits as a drums session. The peer of `cargo xtask bench create`.

use std::path::{Path, PathBuf};

use oci_spec::runtime::{
    LinuxCpuBuilder, LinuxMemoryBuilder, LinuxNamespaceBuilder, LinuxNamespaceType, LinuxPidsBuilder,
    LinuxResourcesBuilder,
};

use super::config::{Container, held};
use crate::{
    steps::{StepError, tail},
    sys::{CgroupLimits, PreMount, Sys, ToolSpec, spec::OverlayRoot},
};

/// Points of one run on CLOCK_MONOTONIC_RAW, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    pub start_us: u64,
    /// Folders and configuration are there.
    pub bundle_us: u64,
    /// runc's program runs, with the overlay mounted.
    pub spawned_us: u64,
    /// The process ran, the container is deleted and runc is reaped.
    pub reaped_us: u64,
}

/// The same container, over and over.
#[derive(Clone, Debug)]
pub struct RuncTrue {
    pub runc: PathBuf,
    /// Root of the workload; `/bin/true` in it is run.
    pub tree: PathBuf,
    /// A folder on a tmpfs; each run makes one in it and removes it after the clock stopped.
    pub scratch: PathBuf,
    pub limits: CgroupLimits,
}

const TIMEOUT_MS: u64 = 30_000;

impl RuncTrue {
    /// One container. `name` must be new; the container, its group and its folder carry it.
    pub fn once(&self, sys: &dyn Sys, name: &str) -> Result<Timing, StepError> {
        let dir = self.scratch.join(name);
        let timing = self.timed(sys, name, &dir);
        let removed = sys
            .remove_tree(&dir)
            .map_err(|source| StepError::Act { what: format!("remove {}", dir.display()), source });
        timing.and_then(|t| removed.map(|()| t))
    }

    fn timed(&self, sys: &dyn Sys, name: &str, dir: &Path) -> Result<Timing, StepError> {
        let act = |what: &'static str| move |source| StepError::Act { what: what.to_owned(), source };
        let (log, rootfs) = (dir.join("runc.log"), dir.join("rootfs"));
        let start_us = sys.now_us();
        sys.make_dir(dir, 0o700).map_err(act("make the bundle's folder"))?;
        for below in ["upper", "work", "rootfs", "state"] {
            sys.make_dir(&dir.join(below), 0o755).map_err(act("make the bundle's folders"))?;
        }
        let config = self.config(name).map_err(|e| StepError::Other(format!("write runc's configuration: {e}")))?;
        sys.write_file(&dir.join("config.json"), &config, 0o600).map_err(act("write runc's configuration"))?;
        let bundle_us = sys.now_us();
        let overlay = OverlayRoot {
            lower: vec![self.tree.clone()],
            upper: dir.join("upper"),
            work: dir.join("work"),
            target: rootfs,
        };
        let path = |p: &Path| p.display().to_string();
        let args = ["--root", &path(&dir.join("state")), "--log", &path(&log), "run", "--no-new-keyring", "--bundle"];
        let spec = ToolSpec {
            program: self.runc.clone(),
            args: args.into_iter().map(str::to_owned).chain([path(dir), name.to_owned()]).collect(),
            mounts: vec![PreMount::Overlay(overlay)],
            ..ToolSpec::default()
        };
        let child = sys.spawn_tool(&spec, &[]).map_err(act("start runc"))?;
        let spawned_us = sys.now_us();
        let exit = match sys.wait(&child, TIMEOUT_MS) {
            Ok(exit) => exit,
            Err(source) => {
                let _ = sys.signal(&child, libc::SIGKILL);
                return Err(StepError::Act { what: "run a container by runc".to_owned(), source });
            }
        };
        let reaped_us = sys.now_us();
        if !exit.ok() {
            return Err(StepError::Tool { tool: "runc run".into(), status: exit.to_string(), output: tail(sys, &log) });
        }
        Ok(Timing { start_us, bundle_us, spawned_us, reaped_us })
    }

    /// As a session's, but with a network namespace and limits of runc's own making.
    fn config(&self, name: &str) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
        let argv = ["/bin/true".to_owned()];
        let env = [("PATH".to_owned(), "/sbin:/bin:/usr/sbin:/usr/bin".to_owned())];
        let cgroup = format!("/{name}");
        let capabilities = held(&std::fs::read_to_string("/proc/self/status")?);
        let netns = Path::new("");
        let container = Container { hostname: "bench", argv: &argv, env: &env, cgroup: &cgroup, netns, capabilities };
        let mut spec = container.spec()?;
        let cpus: Vec<String> = self.limits.cpus.iter().map(ToString::to_string).collect();
        let resources = LinuxResourcesBuilder::default()
            .cpu(
                LinuxCpuBuilder::default()
                    .period(100_000_u64)
                    .quota(i64::from(self.limits.cpu_milli) * 100)
                    .cpus(cpus.join(","))
                    .build()?,
            )
            .memory(LinuxMemoryBuilder::default().limit(i64::try_from(self.limits.memory_bytes)?).build()?)
            .pids(LinuxPidsBuilder::default().limit(i64::from(self.limits.pids)).build()?)
            .build()?;
        let network = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Network).build()?;
        if let Some(linux) = spec.linux_mut() {
            linux.set_resources(Some(resources));
            let mut namespaces = linux.namespaces().clone().unwrap_or_default();
            namespaces.retain(|n| n.typ() != LinuxNamespaceType::Network);
            namespaces.push(network);
            linux.set_namespaces(Some(namespaces));
        }
        Ok(serde_json::to_vec(&spec)?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_bench_container_has_limits_and_a_network_namespace_of_its_own() {
        let bench = RuncTrue {
            runc: "/usr/sbin/runc".into(),
            tree: "/t".into(),
            scratch: "/s".into(),
            limits: CgroupLimits { cpu_milli: 1_000, cpus: vec![0, 1], memory_bytes: 512 << 20, pids: 64 },
        };
        let v: Value = serde_json::from_slice(&bench.config("b1").unwrap()).unwrap();
        assert_eq!(v["linux"]["resources"]["cpu"]["quota"], 100_000);
        assert_eq!(v["linux"]["resources"]["cpu"]["cpus"], "0,1");
        assert_eq!(v["linux"]["resources"]["memory"]["limit"], 512 << 20);
        let networks: Vec<&Value> =
            v["linux"]["namespaces"].as_array().unwrap().iter().filter(|n| n["type"] == "network").collect();
        assert_eq!(networks.len(), 1);
        assert!(networks[0]["path"].is_null());
    }
}
