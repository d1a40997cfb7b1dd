//! The initramfs of the virtual machines: the workload's tree as a `newc` cpio archive, followed by the archive with the
//! guest kernel's modules. The kernel unpacks one after the other.
//!
//! Deterministic: sorted, owned by root, without times. The same tree gives the same bytes on every host.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use crate::windows::around;

#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", .path.display())]
pub struct InitrdError {
    what: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> InitrdError + 'a {
    move |source| InitrdError { what, path: path.to_owned(), source }
}

/// Writes `target` from a tree and a second archive, if it is not there yet. It appears whole or not at all.
pub fn ensure(tree: &Path, modules: &Path, target: &Path) -> Result<(), InitrdError> {
    if target.exists() {
        return Ok(());
    }
    let part = target.with_extension(format!("part{}", std::process::id()));
    let made = around("write-initramfs", || write(tree, modules, &part)).and_then(|()| {
        around("rename-initramfs", || fs::rename(&part, target)).map_err(error("rename the initramfs to", target))
    });
    if made.is_err() {
        let _ = fs::remove_file(&part);
    }
    made
}

fn write(tree: &Path, modules: &Path, path: &Path) -> Result<(), InitrdError> {
    let mut out = Archive { out: BufWriter::new(File::create(path).map_err(error("create", path))?), at: 0, inode: 0 };
    folder(&mut out, tree, Path::new(""))?;
    out.trailer().map_err(error("write", path))?;
    let mut modules_file = File::open(modules).map_err(error("open the modules' archive", modules))?;
    io::copy(&mut modules_file, &mut out.out).map_err(error("append to", path))?;
    let file = out.out.into_inner().map_err(|e| error("write", path)(e.into_error()))?;
    file.sync_all().map_err(error("sync", path))
}

fn folder(out: &mut Archive, tree: &Path, inside: &Path) -> Result<(), InitrdError> {
    let here = tree.join(inside);
    let mut names = fs::read_dir(&here)
        .and_then(|d| d.map(|e| e.map(|e| e.file_name())).collect::<io::Result<Vec<_>>>())
        .map_err(error("list", &here))?;
    names.sort();
    for name in names {
        let (path, inside) = (here.join(&name), inside.join(&name));
        let meta = fs::symlink_metadata(&path).map_err(error("look at", &path))?;
        let kind = meta.file_type();
        let mode = meta.mode() & 0o170_000 | meta.permissions().mode() & 0o7_777;
        let entry = |out: &mut Archive, data: &[u8]| out.entry(&inside, mode, data).map_err(error("archive", &path));
        if kind.is_dir() {
            entry(out, &[])?;
            folder(out, tree, &inside)?;
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).map_err(error("read the link", &path))?;
            entry(out, target.as_os_str().as_encoded_bytes())?;
        } else if kind.is_file() {
            entry(out, &fs::read(&path).map_err(error("read", &path))?)?;
        } else {
            let what = if kind.is_socket() || kind.is_fifo() { "a socket or pipe" } else { "a device node" };
            let source = io::Error::other(format!("{what} has no place in a workload's tree"));
            return Err(error("archive", &path)(source));
        }
    }
    Ok(())
}

struct Archive {
    out: BufWriter<File>,
    at: usize,
    inode: u32,
}

impl Archive {
    fn entry(&mut self, name: &Path, mode: u32, data: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(data.len()).map_err(|_| io::Error::other("larger than 4 GiB"))?;
        self.header(name.as_os_str().as_encoded_bytes(), self.inode, mode, size)?;
        self.put(data)?;
        self.pad(4)
    }

    fn trailer(&mut self) -> io::Result<()> {
        self.header(b"TRAILER!!!", 0, 0, 0)?;
        self.pad(512)
    }

    fn header(&mut self, name: &[u8], inode: u32, mode: u32, size: u32) -> io::Result<()> {
        let links = u32::from(mode & 0o170_000 == 0o040_000) + 1;
        let name_size = name.len() + 1;
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let head = format!(
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}",
            0, 0, 0, 0, 0, 0, 0, 0
        );
        self.put(head.as_bytes())?;
        self.put(name)?;
        self.put(&[0])?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len();
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: usize) -> io::Result<()> {
        let missing = (to - self.at % to) % to;
        self.put(&[0; 512][..missing])
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_same_tree_gives_the_same_bytes_and_the_modules_follow() {
        let t = tempfile::tempdir().unwrap();
        let tree = t.path().join("tree");
        fs::create_dir_all(tree.join("bin")).unwrap();
        fs::write(tree.join("bin/busybox"), b"#!").unwrap();
        fs::set_permissions(tree.join("bin/busybox"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("busybox", tree.join("bin/sh")).unwrap();
        let modules = t.path().join("modules.cpio");
        fs::write(&modules, b"SECOND").unwrap();
        let (a, b) = (t.path().join("a"), t.path().join("b"));
        ensure(&tree, &modules, &a).unwrap();
        ensure(&tree, &modules, &b).unwrap();
        let bytes = fs::read(&a).unwrap();
        assert_eq!(bytes, fs::read(&b).unwrap());
        assert!(bytes.starts_with(b"070701"));
        assert!(bytes.ends_with(b"SECOND"));
        assert_eq!((bytes.len() - 6) % 512, 0);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        for part in ["bin\0", "bin/busybox\0", "bin/sh\0", "000081ed", "TRAILER!!!"] {
            assert!(text.contains(part), "{part:?} is missing");
        }
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let t = tempfile::tempdir().unwrap();
        let target = t.path().join("initrd");
        let e = ensure(t.path(), &t.path().join("absent"), &target).unwrap_err();
        assert!(e.to_string().contains("absent"), "{e}");
        assert!(!target.exists());
        assert_eq!(fs::read_dir(t.path()).unwrap().count(), 0);
    }
}
