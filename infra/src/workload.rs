//! Workload folders: freezing one into a manifest, checking it, building one from files named by digest.
//!
//! The rules for a manifest itself are `drums_common::workload`'s; here they meet a file system.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read as _, Write},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use drums_common::{
    digest::Sha256,
    experiment::{ManifestFile, WorkloadManifest},
    workload::{self, BOOT, BadManifest, LAYOUT_VERSION, MANIFEST, MAX_FILES, MAX_MANIFEST_BYTES, TREE},
};
use sha2::Digest as _;

#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a workload manifest", .path.display())]
    Manifest { path: PathBuf, source: BadManifest },
    #[error("{path} of the workload differs from its manifest: {why}")]
    Differs { path: String, why: String },
}

type Result<T> = std::result::Result<T, WorkloadError>;

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> WorkloadError + 'a {
    move |source| WorkloadError::Io { what, path: path.to_owned(), source }
}

/// Reads `tree/` and `boot/` as they are now and writes `manifest.json`.
pub fn freeze(dir: &Path) -> Result<WorkloadManifest> {
    let manifest = WorkloadManifest { version: LAYOUT_VERSION, files: scan(dir)? };
    let path = dir.join(MANIFEST);
    workload::check(&manifest).map_err(|source| WorkloadError::Manifest { path: path.clone(), source })?;
    fs::write(&path, manifest.canonical()).map_err(io_error("write", &path))?;
    Ok(manifest)
}

/// Reads the manifest of a workload folder, without looking at the files that it names.
pub fn load(dir: &Path) -> Result<WorkloadManifest> {
    let path = dir.join(MANIFEST);
    let file = File::open(&path).map_err(io_error("open", &path))?;
    let mut text = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut text).map_err(io_error("read", &path))?;
    workload::parse(&text, None).map_err(|source| WorkloadError::Manifest { path, source })
}

/// Checks a workload folder against its manifest: nothing missing, nothing more, nothing changed.
pub fn verify(dir: &Path) -> Result<WorkloadManifest> {
    let manifest = load(dir)?;
    let found = scan(dir)?;
    let differs = |path: &str, why: String| WorkloadError::Differs { path: path.to_owned(), why };
    for (path, want) in &manifest.files {
        match found.get(path) {
            None => return Err(differs(path, "it is missing".to_owned())),
            Some(got) if got != want => return Err(differs(path, difference(want, got))),
            Some(_) => {}
        }
    }
    match found.keys().find(|path| !manifest.files.contains_key(*path)) {
        Some(path) => Err(differs(path, "it is not in the manifest".to_owned())),
        None => Ok(manifest),
    }
}

fn difference(want: &ManifestFile, got: &ManifestFile) -> String {
    if want.kind != got.kind {
        format!("it is a {}, not a {}", got.kind, want.kind)
    } else if want.mode != got.mode {
        format!("its mode is {:o}, not {:o}", got.mode, want.mode)
    } else if want.bytes != got.bytes {
        format!("it has {} bytes, not {}", got.bytes, want.bytes)
    } else {
        format!("its SHA-256 is {}, not {}", got.sha256, want.sha256)
    }
}

/// Builds the folder of a manifest in the empty folder `root` from files whose names are digests, and verifies it.
/// `text` is the manifest as it came, `blob` says where a file's content is.
pub fn assemble(
    root: &Path,
    text: &[u8],
    manifest: &WorkloadManifest,
    blob: &dyn Fn(&ManifestFile) -> PathBuf,
) -> Result<()> {
    let path = root.join(MANIFEST);
    let bad = |source| WorkloadError::Manifest { path: path.clone(), source };
    workload::check(manifest).map_err(bad)?;
    // Sorted by path, so a folder comes before what is in it.
    for (name, file) in &manifest.files {
        let at = root.join(name);
        match file.kind.as_str() {
            "dir" => fs::create_dir(&at).map_err(io_error("create", &at))?,
            "symlink" => symlink(&file.target, &at).map_err(io_error("create", &at))?,
            _ => {
                fs::copy(blob(file), &at).map_err(io_error("write", &at))?;
                set_mode(&at, file.mode)?;
            }
        }
    }
    // Last, so that a folder without permission to write can be filled first; children before parents.
    for (name, file) in manifest.files.iter().rev().filter(|(_, f)| f.kind == "dir") {
        set_mode(&root.join(name), file.mode)?;
    }
    fs::write(&path, text).map_err(io_error("write", &path))?;
    verify(root).map(drop)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io_error("set the mode of", path))
}

fn scan(dir: &Path) -> Result<BTreeMap<String, ManifestFile>> {
    let mut files = BTreeMap::new();
    for top in [TREE, BOOT] {
        let path = dir.join(top);
        if top == TREE || path.symlink_metadata().is_ok() {
            scan_into(&mut files, &path, top.to_owned())?;
        }
    }
    Ok(files)
}

fn scan_into(files: &mut BTreeMap<String, ManifestFile>, path: &Path, name: String) -> Result<()> {
    let unfit = |why: &str| WorkloadError::Differs { path: name.clone(), why: why.to_owned() };
    if files.len() >= MAX_FILES {
        return Err(unfit(&format!("there are more than {MAX_FILES} files")));
    }
    let meta = fs::symlink_metadata(path).map_err(io_error("look at", path))?;
    let kind = meta.file_type();
    let mode = meta.mode() & 0o7777;
    let entry = |kind: &str, bytes, sha256, target| ManifestFile { kind: kind.to_owned(), mode, bytes, sha256, target };
    if kind.is_dir() {
        let mut names = Vec::new();
        for child in fs::read_dir(path).map_err(io_error("list", path))? {
            let child = child.map_err(io_error("list", path))?.file_name();
            names.push(child.into_string().map_err(|_| unfit("a name in it is not UTF-8"))?);
        }
        for child in names {
            let inside = format!("{name}/{child}");
            scan_into(files, &path.join(child), inside)?;
        }
        files.insert(name, entry("dir", 0, Sha256::of(b""), String::new()));
    } else if kind.is_symlink() {
        let target = fs::read_link(path).map_err(io_error("read the link", path))?;
        let target = target.into_os_string().into_string().map_err(|_| unfit("its target is not UTF-8"))?;
        files.insert(name, entry("symlink", 0, Sha256::of(target.as_bytes()), target));
    } else if kind.is_file() {
        let mut file = File::open(path).map_err(io_error("open", path))?;
        let mut sink = Hashing::new(io::sink());
        io::copy(&mut file, &mut sink).map_err(io_error("read", path))?;
        let (_, sha256, bytes) = sink.finish();
        files.insert(name, entry("file", bytes, sha256, String::new()));
    } else {
        return Err(unfit("a device, socket or pipe has no place in a workload"));
    }
    Ok(())
}

/// Writes through, counting and hashing.
struct Hashing<W> {
    inner: W,
    hasher: sha2::Sha256,
    bytes: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hasher: sha2::Sha256::new(), bytes: 0 }
    }

    fn finish(self) -> (W, Sha256, u64) {
        (self.inner, Sha256(self.hasher.finalize().into()), self.bytes)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests;
