//! Key and certificate files: whole or absent, and keys for their owner only.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::Path,
};

use super::PkiError;

fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> PkiError {
    let path = path.to_owned();
    move |source| PkiError::Io { doing, path, source }
}

pub(super) fn make_private_dir(dir: &Path) -> Result<(), PkiError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("make the folder", dir))
}

pub(super) fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), PkiError> {
    let new = path.with_extension("new");
    let put = || {
        // What a crash left behind may have another mode.
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
        // Root may write into the home of another user, whose daemon must be able to read it.
        if let Some(folder) = path.parent()
            && nix::unistd::geteuid().is_root()
        {
            let of = fs::metadata(folder)?;
            if of.uid() != 0 {
                fchown(&file, Some(of.uid()), Some(of.gid()))?;
            }
        }
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    put().map_err(io("write", path))
}

pub(super) fn sync_dir(dir: &Path) -> Result<(), PkiError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(io("sync the folder", dir))
}

/// The folder's one writer, until this is dropped or the process ends.
pub(super) fn hold(dir: &Path) -> Result<File, PkiError> {
    let folder = File::open(dir).map_err(io("open the folder", dir))?;
    folder.lock().map_err(io("lock the folder", dir))?;
    Ok(folder)
}

pub(super) fn is_there(path: &Path) -> Result<bool, PkiError> {
    fs::exists(path).map_err(io("look at", path))
}

/// Also one that is not there.
pub(super) fn remove_dir(dir: &Path) -> Result<(), PkiError> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("remove the folder", dir)(e)),
        _ => Ok(()),
    }
}

/// Over a folder that is absent or empty, for good.
pub(super) fn rename_dir(from: &Path, to: &Path) -> Result<(), PkiError> {
    fs::rename(from, to).map_err(io("put in place the folder", to))?;
    to.parent().filter(|p| !p.as_os_str().is_empty()).map_or(Ok(()), sync_dir)
}

pub(super) fn read_text(path: &Path) -> Result<String, PkiError> {
    fs::read_to_string(path).map_err(io("read", path))
}

pub(super) fn read_key(path: &Path) -> Result<String, PkiError> {
    let mode = fs::metadata(path).map_err(io("look at", path))?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(PkiError::LooseKey { path: path.to_owned(), mode });
    }
    read_text(path)
}
