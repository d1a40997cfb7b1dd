//! Folder trees that sessions and tools wrote into: removing them (never through a link, never across a mount) and
//! digesting them.

use std::{
    ffi::CStr,
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use drums_common::digest::Sha256;

use nix::{
    dir::{Dir, Type},
    errno::Errno,
    fcntl::OFlag,
    sys::stat::{Mode, fstat},
    unistd::{UnlinkatFlags, unlinkat},
};
use sha2::{Digest as _, Sha256 as Hasher};

const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Removes `path` and everything in it. What is not there is fine; a mount in it is refused with EXDEV.
pub fn remove(path: &Path) -> io::Result<()> {
    let mut dir = match Dir::open(path, FOLDER, Mode::empty()) {
        Ok(dir) => dir,
        Err(Errno::ENOENT) => return Ok(()),
        Err(Errno::ENOTDIR) => return fs::remove_file(path),
        Err(e) => return Err(e.into()),
    };
    let device = fstat(&dir)?.st_dev;
    empty(&mut dir, device)?;
    match fs::remove_dir(path) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

fn empty(dir: &mut Dir, device: u64) -> io::Result<()> {
    let names: Vec<_> = dir
        .iter()
        .filter_map(|e| match e {
            Ok(e) if matches!(e.file_name().to_bytes(), b"." | b"..") => None,
            other => Some(other.map(|e| (e.file_name().to_owned(), e.file_type()))),
        })
        .collect::<Result<_, _>>()?;
    for (name, kind) in names {
        // A file system that does not tell the type answers EISDIR or EPERM to the plain unlink.
        if kind != Some(Type::Directory) {
            match unlinkat(dir.as_fd(), name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => continue,
                Err(Errno::EISDIR | Errno::EPERM) if kind.is_none() => {}
                Err(e) => return Err(e.into()),
            }
        }
        remove_folder(dir.as_fd(), &name, device)?;
    }
    Ok(())
}

fn remove_folder(parent: BorrowedFd<'_>, name: &CStr, device: u64) -> io::Result<()> {
    let mut dir = Dir::openat(parent, name, FOLDER, Mode::empty())?;
    if fstat(&dir)?.st_dev != device {
        return Err(Errno::EXDEV.into());
    }
    empty(&mut dir, device)?;
    drop(dir);
    Ok(unlinkat(parent, name, UnlinkatFlags::RemoveDir)?)
}

/// Size and digest of a folder's files: over each file's path, size and content, in the order of their paths.
pub fn digest(folder: &Path) -> io::Result<(u64, Sha256)> {
    let mut files = Vec::new();
    list(folder, &mut files)?;
    files.sort();
    let (mut total, mut hasher) = (0, Hasher::new());
    let mut buffer = vec![0; 1 << 20];
    for path in files {
        let mut file = File::open(&path)?;
        let size = file.metadata()?.len();
        hasher.update(format!("{}\0{size}\0", path.strip_prefix(folder).unwrap_or(&path).display()));
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => hasher.update(&buffer[..n]),
            }
        }
        total += size;
    }
    Ok((total, Sha256(hasher.finalize().into())))
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            list(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_tree_goes_and_what_its_links_point_to_stays() {
        let base = tempfile::tempdir().unwrap();
        let (tree, outside) = (base.path().join("tree"), base.path().join("outside"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("keep"), "x").unwrap();
        fs::write(tree.join("a/b/file"), "x").unwrap();
        symlink(&outside, tree.join("a/link")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("keep").exists());
        remove(&tree).unwrap();
    }
}
