//! `cargo xtask check`: the half of `make test` that runs no test. What compiles leaves out drums-ec2, which takes minutes
//! to build with the AWS SDK: `make test-ec2` checks it.

mod tidy;

use anyhow::{Context as _, Result, bail};

use crate::workspace::{self, cargo, command};

#[derive(clap::Args)]
pub struct CheckArgs {
    /// Only what needs no compiler: formatting, lints present, tidiness
    #[arg(long)]
    quick: bool,
}

pub fn run(args: &CheckArgs) -> Result<()> {
    step("formatting", || run_cargo(&["fmt", "--all", "--check"]).context("`cargo fmt --all` mends it"))?;
    step("workspace lints in every package", lints_present)?;
    step("tidiness", tidy::check)?;
    if args.quick {
        return Ok(());
    }
    step("clippy", || {
        let all = ["clippy", "--quiet", "--locked", "--workspace", "--exclude", "drums-ec2", "--all-targets"];
        workspace::run(cargo().args(all).args(["--", "-D", "warnings"]))
    })?;
    step("documentation, private items included", || {
        workspace::run(
            cargo()
                .args(["doc", "--quiet", "--locked", "--workspace", "--exclude", "drums-ec2"])
                .args(["--no-deps", "--document-private-items"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    })
}

fn step(name: &str, what: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("check: {name}");
    what().with_context(|| format!("the check of {name} failed"))
}

fn run_cargo(args: &[&str]) -> Result<()> {
    workspace::run(cargo().args(args))
}

/// Every package takes the workspace's lints; one that forgets would be checked less than the others.
fn lints_present() -> Result<()> {
    let mut without = Vec::new();
    for package in workspace::metadata()?.workspace_packages() {
        let text = std::fs::read_to_string(&package.manifest_path)
            .with_context(|| format!("cannot read {}", package.manifest_path))?;
        let manifest: toml::Table = text.parse().with_context(|| format!("{} is not TOML", package.manifest_path))?;
        let inherits = manifest.get("lints").and_then(|l| l.get("workspace")).and_then(toml::Value::as_bool);
        if inherits != Some(true) {
            without.push(package.name.to_string());
        }
    }
    if !without.is_empty() {
        bail!("without `[lints] workspace = true`: {}", without.join(", "));
    }
    Ok(())
}

/// The advisory scan: a command of its own, since it needs the network and its answer changes without a change here.
pub fn advisories() -> Result<()> {
    let found = command("cargo-deny").arg("--version").output();
    if !found.is_ok_and(|o| o.status.success()) {
        bail!("the advisory scan needs cargo-deny; `cargo install --locked cargo-deny` installs it");
    }
    workspace::run(command("cargo-deny").args(["--locked", "check", "advisories", "bans", "licenses", "sources"]))
}
