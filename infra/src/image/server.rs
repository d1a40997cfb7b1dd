//! A server as it runs in a cloud: systemd, cloud-init, and what user data needs, from Debian's packages. Paid hosts are
//! booted from it where there is no cloud: what ends them is shown on a real kernel and a real service manager.
//!
//! ```text
//! DIR/disk.raw      ext4, sparse; whoever boots it writes elsewhere
//! DIR/kernel        Debian's cloud kernel, as packaged
//! DIR/initrd        busybox and the modules of a virtual machine: mounts the disk and goes there
//! DIR/server.json   of what it was made; written last
//! ```
//! It is made again when what it is made of has changed, and only then.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use drums_common::digest::Sha256;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::{ImageError, Result, debian, io_error, kernel, mode, put, run};
use crate::cpio;

const LAYOUT: u32 = 1;
const MANIFEST: &str = "server.json";
/// Named here; what they depend on comes with them.
const PACKAGES: [&str; 10] =
    ["ca-certificates", "cloud-init", "curl", "dbus", "iproute2", "kmod", "procps", "systemd", "systemd-sysv", "udev"];
/// The disk, the network, entropy, and a seed's file system; what is built in is skipped.
const MODULES: [&str; 8] =
    ["virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "vfat", "nls_ascii", "nls_cp437", "nls_utf8"];
/// Sparse: what is not used is not there.
const DISK: &str = "1G";
const FILES: [(&str, &str); 3] = [
    ("etc/cloud/cloud.cfg.d/90_drums.cfg", "datasource_list: [NoCloud, None]\n"),
    ("etc/fstab", "/dev/vda / ext4 defaults 0 0\n"),
    // Each boot's own.
    ("etc/machine-id", "uninitialized\n"),
];
/// All that is said is said on the serial line, which is what is looked at from outside; nothing of it is held back.
const COMMAND_LINE: &str = "console=ttyS0 printk.devkmsg=on systemd.log_target=kmsg systemd.show_status=0 \
                            systemd.journald.forward_to_console=1 tsc=reliable no_timer_check";
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do /bin/busybox insmod /lib/modules/$module; done </lib/modules/list
until [ -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount -o move /dev /root/dev
/bin/busybox umount /proc /sys
exec /bin/busybox switch_root /root /sbin/init
";

#[derive(Clone, Debug)]
pub struct Options {
    /// Where the image's folder is; replaced if it is one of something else.
    pub out: PathBuf,
    /// Packages of the kernel and the initrd are kept here.
    pub cache: PathBuf,
}

/// `server.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub layout: u32,
    /// Of the recipe, the suites, and the versions of what it names.
    pub inputs_sha256: Sha256,
    pub suites: Vec<String>,
    pub kernel_package: String,
    pub kernel_package_version: String,
    pub kernel_sha256: Sha256,
    pub initrd_sha256: Sha256,
    pub command_line: String,
    /// Everything that is on the disk: name and version.
    pub packages: Vec<(String, String)>,
}

/// An image that is there.
#[derive(Clone, Debug)]
pub struct Server {
    pub folder: PathBuf,
    pub manifest: Manifest,
}

impl Server {
    pub fn disk(&self) -> PathBuf {
        self.folder.join("disk.raw")
    }
    pub fn kernel(&self) -> PathBuf {
        self.folder.join("kernel")
    }
    pub fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }
}

/// The image that tests and tasks share, in cargo's target folder.
pub fn shared(target: &Path) -> Result<Server> {
    build(&Options { out: target.join("images/server"), cache: target.join("packages") })
}

/// The image at `options.out`, made if it is not there or is of something else: a few minutes, most of them for downloading.
pub fn build(options: &Options) -> Result<Server> {
    let sources = debian::sources()?;
    let kernel = kernel::fetch(&options.cache)?;
    let wanted = inputs(&sources, &kernel.package, &debian::candidates(&PACKAGES)?);
    if let Some(manifest) = read(&options.out).filter(|m| m.inputs_sha256 == wanted) {
        return Ok(Server { folder: options.out.clone(), manifest });
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(ImageError::NotRoot);
    }
    let parent = options.out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(io_error("create", parent))?;
    let aside =
        |what| tempfile::Builder::new().prefix(what).tempdir_in(parent).map_err(io_error("create a folder in", parent));
    let (staging, root) = (aside(".server-")?, aside(".root-")?);
    let folder = staging.path();
    mode(folder, 0o755)?;

    install(&root, &sources)?;
    let packages = debian::installed(root.path())?;
    for (name, text) in FILES {
        put(&root.path().join(name), text.as_bytes(), 0o644)?;
    }
    let disk = folder.join("disk.raw");
    run(Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=1", "-d"])
        .arg(root.path())
        .arg(&disk)
        .arg(DISK))?;
    root.close().map_err(io_error("remove what was unpacked in", parent))?;

    let image = kernel.package.file(&format!("boot/vmlinuz-{}", kernel.release))?;
    let image = fs::read(&image).map_err(io_error("read", &image))?;
    let initrd = initrd(&kernel.modules, &options.cache)?;
    put(&folder.join("kernel"), &image, 0o644)?;
    put(&folder.join("initrd"), &initrd, 0o644)?;
    let manifest = Manifest {
        layout: LAYOUT,
        inputs_sha256: wanted,
        suites: sources.into_iter().map(|s| s.suite).collect(),
        kernel_package: kernel.package.name,
        kernel_package_version: kernel.package.version,
        kernel_sha256: Sha256::of(&image),
        initrd_sha256: Sha256::of(&initrd),
        command_line: COMMAND_LINE.to_owned(),
        packages,
    };
    let text = serde_json::to_string_pretty(&manifest).expect("strings and numbers always serialise");
    put(&folder.join(MANIFEST), text.as_bytes(), 0o644)?;

    if options.out.join(MANIFEST).exists() {
        fs::remove_dir_all(&options.out).map_err(io_error("replace", &options.out))?;
    }
    fs::rename(folder, &options.out).map_err(io_error("move the image to", &options.out))?;
    // It is at its place now; nothing is left to remove.
    let _ = staging.keep();
    Ok(Server { folder: options.out.clone(), manifest })
}

/// Damage and absence are the same: it is made again.
fn read(folder: &Path) -> Option<Manifest> {
    serde_json::from_slice(&fs::read(folder.join(MANIFEST)).ok()?).ok()
}

fn inputs(sources: &[debian::Source], kernel: &debian::Package, packages: &[(String, String)]) -> Sha256 {
    let mut text =
        format!("{LAYOUT}\n{}\n{}\n{COMMAND_LINE}\n{INIT}\n{MODULES:?}\n{DISK}\n", kernel.name, kernel.version);
    for source in sources {
        text.push_str(&format!("suite {}\n", source.suite));
    }
    for (name, version) in packages {
        text.push_str(&format!("package {name} {version}\n"));
    }
    for (name, content) in FILES {
        text.push_str(&format!("file {name}\n{content}"));
    }
    Sha256::of(text.as_bytes())
}

/// A root of packages, installed as they would be on a machine of their own.
fn install(root: &TempDir, sources: &[debian::Source]) -> Result<()> {
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .arg(format!("--include={}", PACKAGES.join(",")));
    // What nobody reads there.
    for path in ["/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*"] {
        command.arg(format!("--dpkgopt=path-exclude={path}"));
    }
    command.args(["--aptopt=Apt::Install-Recommends \"false\"", "--aptopt=Acquire::Languages \"none\""]);
    // cloud-init writes its configuration, and nothing starts it by itself.
    command.arg("--customize-hook=chroot \"$1\" systemctl enable systemd-networkd.service");
    command.arg(&sources[0].suite).arg(root.path()).args(sources.iter().map(debian::Source::line));
    run(command.env("LC_ALL", "C.UTF-8")).map(drop)
}

fn initrd(modules: &kernel::Modules, cache: &Path) -> Result<Vec<u8>> {
    let busybox = debian::fetch("busybox-static", cache)?.any_file(&["bin/busybox", "usr/bin/busybox"])?;
    let program = fs::read(&busybox).map_err(io_error("read", &busybox))?;
    archive(&program, &modules.load_order(&MODULES)?).map_err(io_error("write an archive with", &busybox))
}

fn archive(busybox: &[u8], modules: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let mut archive = cpio::Writer::new(Vec::new());
    for name in ["bin", "dev", "lib", "lib/modules", "proc", "root", "sys"] {
        archive.dir(name, 0o755)?;
    }
    archive.file("bin/busybox", 0o755, busybox)?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    let mut list = String::new();
    for (name, content) in modules {
        list.push_str(&format!("{name}.ko\n"));
        archive.file(&format!("lib/modules/{name}.ko"), 0o644, content)?;
    }
    archive.file("lib/modules/list", 0o644, list.as_bytes())?;
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_of_its_recipe_and_of_the_versions_of_its_packages() {
        let sources = [debian::Source { uri: "http://a/".to_owned(), suite: "stable".to_owned() }];
        let kernel = |version: &str| debian::Package {
            name: "linux-image-1".to_owned(),
            version: version.to_owned(),
            root: PathBuf::new(),
        };
        let packages = |version: &str| vec![("systemd".to_owned(), version.to_owned())];
        let first = inputs(&sources, &kernel("1"), &packages("1"));
        assert_eq!(first, inputs(&sources, &kernel("1"), &packages("1")));
        assert_ne!(first, inputs(&sources, &kernel("2"), &packages("1")));
        assert_ne!(first, inputs(&sources, &kernel("1"), &packages("2")));
        let moved = [debian::Source { uri: "http://b/".to_owned(), ..sources[0].clone() }];
        assert_eq!(first, inputs(&moved, &kernel("1"), &packages("1")), "another mirror has the same packages");
    }

    #[test]
    fn a_folder_without_its_note_or_with_a_damaged_one_is_no_image() {
        let t = tempfile::tempdir().unwrap();
        assert_eq!(read(t.path()), None);
        fs::write(t.path().join(MANIFEST), "{\"layout\":1").unwrap();
        assert_eq!(read(t.path()), None);
    }

    #[test]
    fn the_archive_goes_through_its_modules_in_order() {
        let order = [("virtio".to_owned(), b"V".to_vec()), ("virtio_blk".to_owned(), b"B".to_vec())];
        let text = String::from_utf8_lossy(&archive(b"busybox", &order).unwrap()).into_owned();
        assert!(text.contains("virtio.ko\nvirtio_blk.ko\n") && text.contains("switch_root /root /sbin/init"));
    }
}
