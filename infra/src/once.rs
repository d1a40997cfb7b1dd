//! Files that are written once: whole and on disk under their name, or not there. What a bucket does, with a folder.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
};

/// Makes the file, and the folders to it. False if there was one of that name, which stays as it is.
pub fn put(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let name = || io::Error::new(io::ErrorKind::InvalidInput, "not a path of a file in a folder");
    let (folder, file) = (path.parent().ok_or_else(name)?, path.file_name().ok_or_else(name)?);
    fs::create_dir_all(folder)?;
    if path.try_exists()? {
        return Ok(false);
    }
    let mut new = tempfile::Builder::new().prefix(".new-").suffix(file).tempfile_in(folder)?;
    new.write_all(bytes)?;
    new.as_file().sync_all()?;
    let put = match new.persist_noclobber(path) {
        Ok(_) => true,
        Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(e) => return Err(e.error),
    };
    File::open(folder)?.sync_all()?;
    Ok(put)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_content_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/c.json");
        assert!(put(&path, b"first").unwrap());
        assert!(!put(&path, b"second").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing half-made is left");
        assert!(put(Path::new("/"), b"").is_err());
    }

    #[test]
    fn of_writers_at_once_one_wins_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let won = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8u8)
                .map(|n| {
                    s.spawn({
                        let path = &path;
                        move || put(path, &[n; 4096]).unwrap()
                    })
                })
                .collect();
            threads.into_iter().filter_map(|t| t.join().ok()).filter(|won| *won).count()
        });
        assert_eq!(won, 1);
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 4096 && bytes.iter().all(|b| *b == bytes[0]));
    }
}
