//! What a command makes for its user: written aside under a name of its own, put in place whole, never over anything.
//! Whatever ends the command, the name that was asked for is absent or complete, and what was there before stays.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use super::CtlError;

/// The folder that a path's last part is in.
fn near(to: &Path) -> &Path {
    to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn taken(to: &Path) -> CtlError {
    CtlError::bad(format!("{} exists already", to.display()), "nothing is overwritten: give a new name")
}

/// Refuses a name that is taken, also by a link that leads nowhere, and one in a folder that is none.
pub(super) fn free(to: &Path) -> Result<(), CtlError> {
    if to.symlink_metadata().is_ok() {
        return Err(taken(to));
    }
    let near = near(to);
    match fs::metadata(near) {
        Ok(m) if m.is_dir() && to.file_name().is_some() => Ok(()),
        Ok(_) => Err(CtlError::bad(format!("{} is not in a folder", to.display()), "give another path")),
        Err(e) => {
            let message = format!("cannot write {}: {}: {e}", to.display(), near.display());
            Err(CtlError::bad(message, "make the folder first, or give another path"))
        }
    }
}

/// A file; `write` fills it.
pub(super) fn file(
    to: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> Result<(), CtlError>,
) -> Result<(), CtlError> {
    free(to)?;
    let mut aside = tempfile::Builder::new()
        .prefix(".drums-")
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(near(to))
        .map_err(CtlError::file("create", to))?;
    write(aside.as_file_mut())?;
    aside.as_file().sync_all().map_err(CtlError::file("write", to))?;
    aside.persist_noclobber(to).map_err(|e| misplaced(to, e.error))?;
    sync(to)
}

/// A folder; `fill` makes its content.
pub(super) fn folder(to: &Path, fill: impl FnOnce(&Path) -> Result<(), CtlError>) -> Result<(), CtlError> {
    free(to)?;
    let aside = tempfile::Builder::new()
        .prefix(".drums-")
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(near(to))
        .map_err(CtlError::file("create", to))?;
    fill(aside.path())?;
    // Whoever makes the folder has the name. A rename replaces a folder only while it is empty.
    fs::create_dir(to).map_err(|e| misplaced(to, e))?;
    if let Err(e) = fs::rename(aside.path(), to) {
        // Only if it is still the empty one.
        let _ = fs::remove_dir(to);
        return Err(misplaced(to, e));
    }
    // It is no more under the name that would be removed.
    let _ = aside.keep();
    sync(to)
}

fn misplaced(to: &Path, e: io::Error) -> CtlError {
    match e.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => taken(to),
        _ => CtlError::file("put in place", to)(e),
    }
}

fn sync(to: &Path) -> Result<(), CtlError> {
    File::open(near(to)).and_then(|d| d.sync_all()).map_err(CtlError::file("write", to))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn put(to: &Path, text: &str) -> Result<(), CtlError> {
        file(to, 0o600, |f| f.write_all(text.as_bytes()).map_err(CtlError::file("write", to)))
    }

    #[test]
    fn what_somebody_else_made_meanwhile_stays() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("it");
        let first = file(&to, 0o600, |f| {
            put(&to, "theirs")?;
            f.write_all(b"ours").map_err(CtlError::file("write", &to))
        });
        assert!(matches!(first, Err(CtlError::BadInput { .. })), "{first:?}");
        assert_eq!(fs::read(&to).unwrap(), b"theirs");
        assert!(matches!(put(&to, "later"), Err(CtlError::BadInput { .. })));

        let to = dir.path().join("folder");
        let first = folder(&to, |_| {
            fs::create_dir(&to).unwrap();
            fs::write(to.join("theirs"), "").map_err(CtlError::file("write", &to))
        });
        assert!(matches!(first, Err(CtlError::BadInput { .. })), "{first:?}");
        assert_eq!(names(dir.path()), ["folder", "it"]);
        assert_eq!(names(&to), ["theirs"]);
    }

    #[test]
    fn a_dangling_link_is_taken_and_a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("nowhere"), &to).unwrap();
        assert!(matches!(put(&to, "-"), Err(CtlError::BadInput { .. })));
        assert!(matches!(folder(&to, |_| Ok(())), Err(CtlError::BadInput { .. })));
        let failed = || CtlError::bad("no", "");
        assert!(file(&dir.path().join("a"), 0o600, |_| Err(failed())).is_err());
        assert!(folder(&dir.path().join("b"), |_| Err(failed())).is_err());
        assert_eq!(names(dir.path()), ["link"]);
        assert!(matches!(put(&dir.path().join("no/such/file"), "-"), Err(CtlError::BadInput { .. })));
        folder(&dir.path().join("b"), |d| fs::write(d.join("x"), "1").map_err(CtlError::file("write", d))).unwrap();
        assert_eq!(names(&dir.path().join("b")), ["x"]);
    }
}
