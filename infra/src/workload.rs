//! Workload folders: freezing one into a manifest, checking it, and carrying it as one file.
//!
//! The artifact is a zstd-compressed tar: the manifest first, then its entries in order. Whoever unpacks one trusts
//! nothing but the digest that he was given: paths, kinds, sizes and contents have to be those of the manifest, and the
//! manifest has to have that digest.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Write},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Component, Path, PathBuf},
};

use drums_common::{
    digest::Sha256,
    experiment::{ManifestFile, WorkloadManifest},
    workload::{BOOT, LAYOUT_VERSION, MANIFEST, MAX_FILES, MAX_MANIFEST_BYTES, MAX_TOTAL_BYTES, TREE},
};
use sha2::Digest as _;

/// Zstandard's window, as a power of two: bounds what unpacking may allocate.
const WINDOW_LOG: u32 = 27;

#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a workload manifest of layout {LAYOUT_VERSION}: {why}", .path.display())]
    Manifest { path: PathBuf, why: String },
    #[error("the workload has SHA-256 {got}, not {expected}: it was changed, or another one was asked for")]
    Digest { expected: Sha256, got: Sha256 },
    #[error("{path} of the workload differs from its manifest: {why}; build or add the workload again")]
    Differs { path: String, why: String },
    #[error("{} is not a workload artifact: {why}", .path.display())]
    Artifact { path: PathBuf, why: String },
}

type Result<T> = std::result::Result<T, WorkloadError>;

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> WorkloadError + 'a {
    move |source| WorkloadError::Io { what, path: path.to_owned(), source }
}

/// What `pack` made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The workload's name.
    pub workload: Sha256,
    /// Of the artifact file itself.
    pub artifact: Sha256,
    pub bytes: u64,
    pub files: usize,
}

/// Reads `tree/` and `boot/` as they are now and writes `manifest.json`.
pub fn freeze(dir: &Path) -> Result<WorkloadManifest> {
    let manifest = WorkloadManifest { version: LAYOUT_VERSION, files: scan(dir)? };
    let path = dir.join(MANIFEST);
    check(&manifest).map_err(|why| WorkloadError::Manifest { path: path.clone(), why })?;
    fs::write(&path, manifest.canonical()).map_err(io_error("write", &path))?;
    Ok(manifest)
}

/// Reads the manifest of a workload folder, without looking at the files that it names.
pub fn load(dir: &Path) -> Result<WorkloadManifest> {
    let path = dir.join(MANIFEST);
    let file = File::open(&path).map_err(io_error("open", &path))?;
    let mut text = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut text).map_err(io_error("read", &path))?;
    parse(&text).map_err(|why| WorkloadError::Manifest { path, why })
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

/// Verifies the folder and writes it as one artifact. The same folder gives the same bytes.
pub fn pack(dir: &Path, artifact: &Path) -> Result<Packed> {
    let manifest = verify(dir)?;
    let out = File::create(artifact).map_err(io_error("create", artifact))?;
    let failed = || io_error("write", artifact);
    let mut encoder = zstd::Encoder::new(Hashing::new(BufWriter::new(out)), 9).map_err(failed())?;
    encoder.window_log(WINDOW_LOG).map_err(failed())?;
    let mut tar = tar::Builder::new(encoder);
    let text = manifest.canonical();
    let mut header = blank(tar::EntryType::Regular, 0o644, text.len() as u64);
    tar.append_data(&mut header, MANIFEST, text.as_bytes()).map_err(failed())?;
    for (name, file) in &manifest.files {
        let path = dir.join(name);
        match file.kind.as_str() {
            "dir" => {
                let mut header = blank(tar::EntryType::Directory, file.mode, 0);
                tar.append_data(&mut header, name, io::empty()).map_err(failed())?;
            }
            "symlink" => {
                let mut header = blank(tar::EntryType::Symlink, file.mode, 0);
                tar.append_link(&mut header, name, &file.target).map_err(failed())?;
            }
            _ => {
                let mut header = blank(tar::EntryType::Regular, file.mode, file.bytes);
                let content = File::open(&path).map_err(io_error("open", &path))?;
                tar.append_data(&mut header, name, content.take(file.bytes)).map_err(failed())?;
            }
        }
    }
    let hashing = tar.into_inner().and_then(zstd::Encoder::finish).map_err(failed())?;
    let (out, artifact_sha256, bytes) = hashing.finish();
    let out = out.into_inner().map_err(|e| failed()(e.into_error()))?;
    out.sync_all().map_err(failed())?;
    Ok(Packed { workload: manifest.sha256(), artifact: artifact_sha256, bytes, files: manifest.files.len() })
}

fn blank(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header
}

/// Unpacks an artifact into `dir`, which must not exist: it appears whole or not at all.
pub fn unpack(artifact: &Path, dir: &Path, expected: Sha256) -> Result<WorkloadManifest> {
    let file = File::open(artifact).map_err(io_error("open", artifact))?;
    unpack_from(BufReader::new(file), artifact, dir, expected)
}

/// `unpack` from anything that reads; `origin` is for messages.
pub fn unpack_from(source: impl Read, origin: &Path, dir: &Path, expected: Sha256) -> Result<WorkloadManifest> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(io_error("create", parent))?;
    // Removed when dropped, so a failure leaves nothing.
    let staging = tempfile::Builder::new()
        .prefix(".unpack-")
        .tempdir_in(parent)
        .map_err(io_error("create a folder in", parent))?;
    let manifest = Unpacking { origin, root: staging.path() }.run(source, expected)?;
    fs::set_permissions(staging.path(), fs::Permissions::from_mode(0o755))
        .map_err(io_error("set the mode of", staging.path()))?;
    fs::rename(staging.path(), dir).map_err(io_error("move the unpacked workload to", dir))?;
    // It is at its place now; nothing is left to remove.
    let _ = staging.keep();
    Ok(manifest)
}

struct Unpacking<'a> {
    origin: &'a Path,
    root: &'a Path,
}

impl Unpacking<'_> {
    fn bad(&self, why: impl Into<String>) -> WorkloadError {
        WorkloadError::Artifact { path: self.origin.to_owned(), why: why.into() }
    }

    fn run(&self, source: impl Read, expected: Sha256) -> Result<WorkloadManifest> {
        let broken = |e: io::Error| self.bad(e.to_string());
        let mut decoder = zstd::Decoder::new(source).map_err(broken)?;
        decoder.window_log_max(WINDOW_LOG).map_err(broken)?;
        let mut archive = tar::Archive::new(decoder);
        let mut entries = archive.entries().map_err(broken)?;

        let first = entries.next().ok_or_else(|| self.bad("it is empty"))?.map_err(broken)?;
        if first.path_bytes().as_ref() != MANIFEST.as_bytes() || first.size() > MAX_MANIFEST_BYTES {
            return Err(self.bad(format!("it does not begin with {MANIFEST}")));
        }
        let mut text = Vec::new();
        first.take(MAX_MANIFEST_BYTES).read_to_end(&mut text).map_err(broken)?;
        let got = Sha256::of(&text);
        if got != expected {
            return Err(WorkloadError::Digest { expected, got });
        }
        let manifest = parse(&text).map_err(|why| self.bad(format!("its manifest: {why}")))?;

        // From here on the manifest is the one that was asked for; the entries have to follow it one by one, so no
        // path of the archive is ever used.
        for (name, file) in &manifest.files {
            let entry = entries.next().ok_or_else(|| self.bad(format!("it ends before {name}")))?.map_err(broken)?;
            if entry.path_bytes().as_ref() != name.as_bytes() {
                let found = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
                return Err(self.bad(format!("it has {found:?} where its manifest has {name:?}")));
            }
            self.place(name, file, entry)?;
        }
        if entries.next().is_some() {
            return Err(self.bad("it has more entries than its manifest"));
        }
        // Last, so that a folder without permission to write can be filled first; children before parents.
        for (name, file) in manifest.files.iter().rev().filter(|(_, f)| f.kind == "dir") {
            self.mode(&self.root.join(name), file.mode)?;
        }
        let path = self.root.join(MANIFEST);
        fs::write(&path, &text).map_err(io_error("write", &path))?;
        Ok(manifest)
    }

    fn place(&self, name: &str, file: &ManifestFile, entry: impl Read) -> Result<()> {
        let path = self.root.join(name);
        match file.kind.as_str() {
            "dir" => fs::create_dir(&path).map_err(io_error("create", &path)),
            "symlink" => symlink(&file.target, &path).map_err(io_error("create", &path)),
            _ => {
                let out = File::create_new(&path).map_err(io_error("create", &path))?;
                let mut out = Hashing::new(out);
                let copied = io::copy(&mut entry.take(file.bytes), &mut out).map_err(io_error("unpack", &path))?;
                let (out, sha256, _) = out.finish();
                if copied != file.bytes || sha256 != file.sha256 {
                    let why = format!("it has {copied} bytes with SHA-256 {sha256}");
                    return Err(WorkloadError::Differs { path: name.to_owned(), why });
                }
                drop(out);
                self.mode(&path, file.mode)
            }
        }
    }

    fn mode(&self, path: &Path, mode: u32) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io_error("set the mode of", path))
    }
}

fn parse(text: &[u8]) -> std::result::Result<WorkloadManifest, String> {
    if text.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(format!("it is larger than {MAX_MANIFEST_BYTES} bytes"));
    }
    let manifest: WorkloadManifest = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    check(&manifest)?;
    // Its digest names the workload, so there must be only one way to write it.
    if manifest.canonical().as_bytes() == text { Ok(manifest) } else { Err("it is not in canonical form".to_owned()) }
}

/// Rules that need no file: layout, bounds, and paths that cannot lead out of the folder. A parent of every entry is an
/// entry of kind `dir` itself, so nothing is ever written through a symbolic link.
fn check(manifest: &WorkloadManifest) -> std::result::Result<(), String> {
    if manifest.version != LAYOUT_VERSION {
        return Err(format!("its version is {}, this build knows {LAYOUT_VERSION}", manifest.version));
    }
    if manifest.files.len() > MAX_FILES {
        return Err(format!("it names more than {MAX_FILES} files"));
    }
    if manifest.files.get(TREE).is_none_or(|f| f.kind != "dir") {
        return Err(format!("it has no folder {TREE}"));
    }
    let mut total: u64 = 0;
    for (name, file) in &manifest.files {
        let path = Path::new(name);
        let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
        let spelled = path.components().collect::<PathBuf>().as_os_str() == name.as_str();
        let top = name.split('/').next().unwrap_or_default();
        if !plain || !spelled || name.contains('\0') || !matches!(top, TREE | BOOT) {
            return Err(format!("{name:?} is not a plain path inside {TREE} or {BOOT}"));
        }
        if let Some((parent, _)) = name.rsplit_once('/')
            && manifest.files.get(parent).is_none_or(|p| p.kind != "dir")
        {
            return Err(format!("{name:?} is not in a folder of the manifest"));
        }
        let fine = match file.kind.as_str() {
            "file" => file.target.is_empty(),
            "dir" => file.target.is_empty() && file.bytes == 0,
            "symlink" => !file.target.is_empty() && file.bytes == 0 && !file.target.contains('\0'),
            _ => false,
        };
        if !fine || file.mode > 0o7777 {
            return Err(format!("{name:?} is neither a proper file nor a dir nor a symlink"));
        }
        total = total.saturating_add(file.bytes);
    }
    if total > MAX_TOTAL_BYTES {
        return Err(format!("its files have {total} bytes, more than {MAX_TOTAL_BYTES}"));
    }
    Ok(())
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
