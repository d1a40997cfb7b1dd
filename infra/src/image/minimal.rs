//! The `minimal` workload: busybox, `drums-guest`, and for virtual machines Debian's cloud kernel.
//!
//! The same inputs (guest binary, package versions) give the same bytes and so the same digest.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use drums_common::{
    digest::Sha256,
    experiment::WorkloadManifest,
    workload::{BOOT, BOOT_MANIFEST, BootManifest, GUEST, KERNEL, LAYOUT_VERSION, MODULES, TREE},
};

use super::{ImageError, Result, debian, io_error, kernel, mode, put, run};
use crate::{cpio, workload};

/// Devices of the virtual machine; what is built in or absent is skipped.
const WANTED_MODULES: [&str; 4] = ["virtio_pci", "virtio_net", "virtio_rng", "vmgenid"];
/// Parameters of every boot: what makes a cold boot short without taking anything from the guest, much as the Kata
/// project starts its guests. `quiet`, because each character on the serial line costs an exit (the log is in dmesg all
/// the same); the machine's own time stamp counter and timer are taken at their word; no self-tests of the crypto code,
/// no rewriting of the code for one CPU, no look at buses that are not there; grace periods are not stretched.
/// Mitigations stay at their defaults, as they do on the host for the other arms. On two busy cores under TCG this took
/// the CPU time until ready from 4.4 to 3.1 s.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 8250.nr_uarts=1 tsc=reliable no_timer_check \
                            rcupdate.rcu_expedited=1 noreplace-smp cryptomgr.notests pci=lastbus=0";
/// busybox's programs that the tree offers under their own names.
const APPLETS: &str = "ash basename cat chmod chown cp cut date dd df dirname dmesg du echo env false find free grep head \
                       hostname id ifconfig ip kill killall ln ls mkdir mktemp mount mv nc netstat nproc od ps pwd \
                       readlink rm rmdir sed seq sh sha256sum sleep sort stat sync tail tar test touch tr true umount \
                       uname uptime wc wget which xargs";

#[derive(Clone, Debug)]
pub struct Options {
    /// Where the workload folder is written; replaced if it is one already.
    pub out: PathBuf,
    /// The statically linked `drums-guest`; `build_guest` makes one.
    pub guest: PathBuf,
    /// Downloaded packages are kept here.
    pub cache: PathBuf,
}

/// Builds the static guest from the sources in `workspace`; returns the binary. Paths of this machine do not get into
/// it, so another checkout gives the same bytes with the same compiler.
pub fn build_guest(workspace: &Path) -> Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|h| Path::new(&h).join(".cargo"))).unwrap_or_default();
    let flags = [
        "-C".to_owned(),
        "target-feature=+crt-static".to_owned(),
        format!("--remap-path-prefix={}=/drums", workspace.display()),
        format!("--remap-path-prefix={}=/cargo", home.display()),
    ];
    let output = run(crate::cargo::outside(&mut Command::new(cargo))
        .args(["build", "--release", "--package", "drums-guest", "--target", TARGET, "--message-format", "json"])
        // A separator that no flag contains; paths may hold spaces.
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        // Progress and errors go to the caller's terminal.
        .stderr(Stdio::inherit())
        .current_dir(workspace))?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok())
        .filter(|m| m["target"]["name"] == "drums-guest")
        .find_map(|m| m["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| ImageError::NotInPackage { package: "drums-guest".to_owned(), path: "executable".to_owned() })
}

/// Writes the workload folder and its manifest.
pub fn build(options: &Options) -> Result<WorkloadManifest> {
    let parent = options.out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(io_error("create", parent))?;
    let staging = tempfile::Builder::new()
        .prefix(".image-")
        .tempdir_in(parent)
        .map_err(io_error("create a folder in", parent))?;
    let folder = staging.path();
    mode(folder, 0o755)?;
    tree(&folder.join(TREE), options)?;
    boot(folder, options)?;
    let manifest = workload::freeze(folder)?;

    if options.out.join(drums_common::workload::MANIFEST).exists() {
        fs::remove_dir_all(&options.out).map_err(io_error("replace", &options.out))?;
    }
    fs::rename(folder, &options.out).map_err(io_error("move the workload to", &options.out))?;
    // It is at its place now; nothing is left to remove.
    let _ = staging.keep();
    Ok(manifest)
}

fn tree(tree: &Path, options: &Options) -> Result<()> {
    let busybox = debian::fetch("busybox-static", &options.cache)?;
    for (name, bits) in [
        ("", 0o755),
        ("bin", 0o755),
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("home/user", 0o755),
        ("lib", 0o755),
        ("mnt", 0o755),
        ("proc", 0o555),
        ("root", 0o700),
        ("run", 0o755),
        ("sbin", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("usr/bin", 0o755),
        ("usr/sbin", 0o755),
        ("var", 0o755),
        ("var/tmp", 0o1777),
    ] {
        let path = tree.join(name);
        fs::create_dir(&path).map_err(io_error("create", &path))?;
        mode(&path, bits)?;
    }
    let program = busybox.any_file(&["bin/busybox", "usr/bin/busybox"])?;
    static_program(&program, &tree.join("bin/busybox"))?;
    static_program(&options.guest, &tree.join(GUEST.trim_start_matches('/')))?;
    for applet in APPLETS.split_ascii_whitespace() {
        let link = tree.join("bin").join(applet);
        symlink("busybox", &link).map_err(io_error("create", &link))?;
    }
    for (name, text) in [
        ("etc/group", "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"),
        ("etc/hostname", "template\n"),
        ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
        ("etc/issue", "DrumsBench minimal workload\n"),
        // Empty: each session is given its own.
        ("etc/machine-id", ""),
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n\
             nobody:x:65534:65534:nobody:/:/bin/false\n",
        ),
        ("etc/profile", "export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"),
    ] {
        put(&tree.join(name), text.as_bytes(), 0o644)?;
    }
    Ok(())
}

fn boot(folder: &Path, options: &Options) -> Result<()> {
    let kernel::Fetched { package, release, modules } = kernel::fetch(&options.cache)?;
    let vmlinux = kernel::uncompressed(&package.file(&format!("boot/vmlinuz-{release}"))?)?;
    let order = modules.load_order(&WANTED_MODULES)?;
    let config = package.file(&format!("boot/config-{release}"))?;
    let config_text = fs::read_to_string(&config).map_err(io_error("read", &config))?;
    let vmgenid = config_text.lines().any(|l| matches!(l, "CONFIG_VMGENID=y" | "CONFIG_VMGENID=m"));

    fs::create_dir(folder.join(BOOT)).map_err(io_error("create", &folder.join(BOOT)))?;
    mode(&folder.join(BOOT), 0o755)?;
    let archive = modules_archive(&order).map_err(io_error("write", &folder.join(MODULES)))?;
    put(&folder.join(KERNEL), &vmlinux, 0o644)?;
    put(&folder.join(MODULES), &archive, 0o644)?;
    let manifest = BootManifest {
        version: LAYOUT_VERSION,
        kernel_release: release,
        kernel_package: package.name,
        kernel_package_version: package.version,
        kernel_sha256: Sha256::of(&vmlinux),
        modules_sha256: Sha256::of(&archive),
        modules: order.into_iter().map(|(name, _)| name).collect(),
        command_line: COMMAND_LINE.to_owned(),
        vmgenid,
    };
    let path = folder.join(BOOT_MANIFEST);
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| io_error("write", &path)(e.into()))?;
    put(&path, text.as_bytes(), 0o644)
}

/// The second archive of a virtual machine's boot: all that the other arms have no use for.
fn modules_archive(order: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let mut archive = cpio::Writer::new(Vec::new());
    archive.symlink("init", GUEST)?;
    archive.dir("lib", 0o755)?;
    archive.dir("lib/modules", 0o755)?;
    let mut list = String::new();
    for (name, content) in order {
        list.push_str(&format!("{name}.ko\n"));
        archive.file(&format!("lib/modules/{name}.ko"), 0o644, content)?;
    }
    archive.file("lib/modules/drums.list", 0o644, list.as_bytes())?;
    archive.finish()
}

/// Copies a program that has to run with nothing beside it.
fn static_program(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).map_err(io_error("read", from))?;
    if !is_static(&bytes) {
        return Err(ImageError::NotStatic { path: from.to_owned() });
    }
    put(to, &bytes, 0o755)
}

/// A 64-bit x86 ELF program without an interpreter.
fn is_static(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(elf.get(at..at + 4)?.try_into().ok()?));
    let table = elf.get(32..40).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes).map(|o| o as usize);
    let header = || {
        let (table, size, count) = (table?, usize::from(half(54)?), usize::from(half(56)?));
        (0..count).map(|i| word(table.checked_add(i * size)?)).collect::<Option<Vec<_>>>()
    };
    elf.starts_with(b"\x7fELF\x02\x01") && half(18) == Some(62) && header().is_some_and(|h| !h.contains(&PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamically_linked_program_is_refused() {
        let own = std::env::current_exe().unwrap();
        let t = tempfile::tempdir().unwrap();
        let error = static_program(&own, &t.path().join("x")).unwrap_err();
        assert!(error.to_string().contains("crt-static"), "{error}");
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(b"\x7fELF\x02\x01"));
    }

    #[test]
    fn the_second_archive_lists_its_modules_in_order() {
        let order = [("b".to_owned(), b"B".to_vec()), ("a".to_owned(), b"A".to_vec())];
        let archive = modules_archive(&order).unwrap();
        let text = String::from_utf8_lossy(&archive);
        assert!(text.contains("b.ko\na.ko\n") && text.contains("/sbin/drums-guest"));
        assert_eq!(archive, modules_archive(&order).unwrap());
    }
}
