//! A saved machine and the manifest that says what may continue it.
//!
//! QEMU checks little of this by itself: another `-cpu` restores into a guest that hangs without a word, and a sibling
//! that maps the RAM file shared changes the template under every later one. So the fingerprint of everything that the
//! state depends on is written beside it and compared before each restore, and the RAM file's content is digested.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::{
        fd::AsFd as _,
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    sync::Mutex,
};

use drums_common::digest::Sha256;
use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256 as Hasher};

use super::args::{self, Accel};

/// Files of a template, in its folder.
pub const RAM: &str = "ram";
pub const STATE: &str = "state";
pub const MANIFEST: &str = "manifest.json";

const PAGE: usize = 4096;

/// What a state depends on. Two machines with equal fingerprints can continue each other's states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    pub qemu: PathBuf,
    pub qemu_sha256: Sha256,
    pub machine: String,
    pub accel: Accel,
    pub cpu: String,
    pub memory_bytes: u64,
    /// Device and machine options, in order.
    pub hardware: Vec<String>,
    pub kernel_sha256: Sha256,
    pub initrd_sha256: Sha256,
}

impl Fingerprint {
    /// What the machine on this host would be now.
    pub fn take(
        digests: &Digests,
        qemu: &Path,
        accel: Accel,
        memory_bytes: u64,
        kernel: &Path,
        initrd: &Path,
    ) -> Result<Self, TemplateError> {
        Ok(Self {
            qemu: qemu.to_owned(),
            qemu_sha256: digests.of(qemu)?,
            machine: args::MACHINE.to_owned(),
            accel,
            cpu: accel.cpu().to_owned(),
            memory_bytes,
            hardware: args::hardware(accel),
            kernel_sha256: digests.of(kernel)?,
            initrd_sha256: digests.of(initrd)?,
        })
    }

    /// What differs from `now`, in words; empty when the state may be continued.
    pub fn differences(&self, now: &Self) -> Vec<String> {
        let mut out = Vec::new();
        let mut check = |what: &str, saved: String, found: String| {
            if saved != found {
                out.push(format!("{what} was {saved} and is {found}"));
            }
        };
        check("QEMU's binary", self.qemu_sha256.to_string(), now.qemu_sha256.to_string());
        check("the machine type", self.machine.clone(), now.machine.clone());
        check("the accelerator", format!("{:?}", self.accel), format!("{:?}", now.accel));
        check("the CPU model", self.cpu.clone(), now.cpu.clone());
        check("the memory in bytes", self.memory_bytes.to_string(), now.memory_bytes.to_string());
        check("the hardware", self.hardware.join(" "), now.hardware.join(" "));
        check("the guest kernel", self.kernel_sha256.to_string(), now.kernel_sha256.to_string());
        check("the initramfs", self.initrd_sha256.to_string(), now.initrd_sha256.to_string());
        out
    }
}

/// A template's manifest: written last, so a template without one was never finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub fingerprint: Fingerprint,
    pub ram_sha256: Sha256,
    pub state_sha256: Sha256,
    pub state_bytes: u64,
}

impl Manifest {
    pub fn seal(folder: &Path, fingerprint: Fingerprint) -> Result<Self, TemplateError> {
        let (ram, state) = (folder.join(RAM), folder.join(STATE));
        let state_bytes = meta(&state)?.len();
        Ok(Self { fingerprint, ram_sha256: content_digest(&ram)?, state_sha256: content_digest(&state)?, state_bytes })
    }

    pub fn read(folder: &Path) -> Result<Self, TemplateError> {
        let path = folder.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(|source| TemplateError::Read { path: path.clone(), source })?;
        serde_json::from_slice(&bytes).map_err(|source| TemplateError::Manifest { path, source })
    }

    /// Refuses a restore into another machine.
    pub fn admit(&self, now: &Fingerprint) -> Result<(), TemplateError> {
        match self.fingerprint.differences(now) {
            d if d.is_empty() => Ok(()),
            d => Err(TemplateError::Mismatch(d.join("; "))),
        }
    }

    /// Is the saved machine still what was sealed? A sibling that mapped the RAM shared shows up here.
    pub fn unchanged(&self, folder: &Path) -> Result<(), TemplateError> {
        for (name, want) in [(RAM, self.ram_sha256), (STATE, self.state_sha256)] {
            let path = folder.join(name);
            let got = content_digest(&path)?;
            if got != want {
                return Err(TemplateError::Changed { path, want, got });
            }
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("cannot read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a template's manifest", .path.display())]
    Manifest {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("this template cannot be continued here: {0}; build a new one")]
    Mismatch(String),
    #[error("{} changed after it was saved: its digest was {want} and is {got}; every sibling since is suspect", .path.display())]
    Changed { path: PathBuf, want: Sha256, got: Sha256 },
}

fn meta(path: &Path) -> Result<std::fs::Metadata, TemplateError> {
    std::fs::metadata(path).map_err(|source| TemplateError::Read { path: path.to_owned(), source })
}

/// Digest of a sparse file's content: of its size and of every page that is not all zero, with its place. Holes are
/// skipped unread, which for a guest's RAM is most of the file.
pub fn content_digest(path: &Path) -> Result<Sha256, TemplateError> {
    let fail = |source: io::Error| TemplateError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(fail)?;
    let size = file.metadata().map_err(fail)?.len();
    let mut hash = Hasher::new();
    hash.update(size.to_le_bytes());
    let mut at = 0;
    let mut buffer = vec![0; 1 << 20];
    while at < size {
        let data = match lseek(file.as_fd(), at as i64, Whence::SeekData) {
            Ok(n) => n as u64,
            Err(Errno::ENXIO) => break,
            Err(e) => return Err(fail(e.into())),
        };
        let end = lseek(file.as_fd(), data as i64, Whence::SeekHole).map_err(|e| fail(e.into()))? as u64;
        at = data - data % PAGE as u64;
        while at < end {
            let want = buffer.len().min((size - at) as usize);
            file.read_exact_at(&mut buffer[..want], at).map_err(fail)?;
            for (i, page) in buffer[..want].chunks(PAGE).enumerate() {
                if page.iter().any(|b| *b != 0) {
                    hash.update((at + (i * PAGE) as u64).to_le_bytes());
                    hash.update(page);
                }
            }
            at += want as u64;
        }
    }
    Ok(Sha256(hash.finalize().into()))
}

/// Digests of large files that do not change, remembered by what identifies their content to the file system: a restore
/// must not read QEMU's 20 MB to say that it is still the same QEMU.
#[derive(Debug, Default)]
pub struct Digests(Mutex<HashMap<PathBuf, (FileId, Sha256)>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    dev: u64,
    ino: u64,
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Digests {
    pub fn of(&self, path: &Path) -> Result<Sha256, TemplateError> {
        let m = meta(path)?;
        let id = FileId {
            dev: m.dev(),
            ino: m.ino(),
            size: m.size(),
            mtime: (m.mtime(), m.mtime_nsec()),
            ctime: (m.ctime(), m.ctime_nsec()),
        };
        // A poisoned lock means that a digest panicked half-way; the map itself is only ever replaced entry by entry.
        let mut known = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((at, digest)) = known.get(path)
            && *at == id
        {
            return Ok(*digest);
        }
        let fail = |source| TemplateError::Read { path: path.to_owned(), source };
        let mut hash = Hasher::new();
        io::copy(&mut File::open(path).map_err(fail)?, &mut hash).map_err(fail)?;
        let digest = Sha256(hash.finalize().into());
        known.insert(path.to_owned(), (id, digest));
        Ok(digest)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, SeekFrom, Write as _};

    use super::*;

    fn fingerprint() -> Fingerprint {
        let d = Sha256::of(b"x");
        Fingerprint {
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            qemu_sha256: d,
            machine: args::MACHINE.to_owned(),
            accel: Accel::Tcg,
            cpu: "max".to_owned(),
            memory_bytes: 512 << 20,
            hardware: args::hardware(Accel::Tcg),
            kernel_sha256: d,
            initrd_sha256: d,
        }
    }

    /// The negative controls: each of these hangs or misbehaves without a word if QEMU is left to find out.
    #[test]
    fn every_mismatch_is_refused_in_words() {
        let manifest = Manifest {
            fingerprint: fingerprint(),
            ram_sha256: Sha256::of(b""),
            state_sha256: Sha256::of(b""),
            state_bytes: 0,
        };
        manifest.admit(&fingerprint()).unwrap();
        let other = Sha256::of(b"other");
        type Change = fn(&mut Fingerprint, Sha256);
        let cases: [(&str, Change); 8] = [
            ("CPU model", |f, _| f.cpu = "qemu64".to_owned()),
            ("memory", |f, _| f.memory_bytes = 768 << 20),
            ("machine type", |f, _| f.machine = "pc-q35-8.0".to_owned()),
            ("accelerator", |f, _| f.accel = Accel::Kvm),
            ("hardware", |f, _| drop(f.hardware.pop())),
            ("QEMU's binary", |f, d| f.qemu_sha256 = d),
            ("guest kernel", |f, d| f.kernel_sha256 = d),
            ("initramfs", |f, d| f.initrd_sha256 = d),
        ];
        for (what, change) in cases {
            let mut now = fingerprint();
            change(&mut now, other);
            let e = manifest.admit(&now).unwrap_err().to_string();
            assert!(e.contains(what) && e.contains("cannot be continued"), "{what}: {e}");
        }
    }

    #[test]
    fn a_changed_ram_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let ram = folder.path().join(RAM);
        let mut file = File::create(&ram).unwrap();
        file.set_len(64 << 20).unwrap();
        file.seek(SeekFrom::Start(5_000_000)).unwrap();
        file.write_all(b"guest memory").unwrap();
        std::fs::write(folder.path().join(STATE), b"device state").unwrap();
        let manifest = Manifest::seal(folder.path(), fingerprint()).unwrap();
        manifest.unchanged(folder.path()).unwrap();
        // A page of zeros where a hole was is the same memory.
        file.seek(SeekFrom::Start(9_000_000)).unwrap();
        file.write_all(&[0; 8192]).unwrap();
        manifest.unchanged(folder.path()).unwrap();
        file.seek(SeekFrom::Start(60_000_000)).unwrap();
        file.write_all(b"!").unwrap();
        let e = manifest.unchanged(folder.path()).unwrap_err();
        assert!(matches!(e, TemplateError::Changed { .. }), "{e}");
    }

    #[test]
    fn a_template_without_a_manifest_was_never_finished() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Manifest::read(folder.path()), Err(TemplateError::Read { .. })));
        std::fs::write(folder.path().join(MANIFEST), b"{}").unwrap();
        assert!(matches!(Manifest::read(folder.path()), Err(TemplateError::Manifest { .. })));
    }

    #[test]
    fn digests_are_taken_again_when_a_file_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"one").unwrap();
        let digests = Digests::default();
        assert_eq!(digests.of(&path).unwrap(), Sha256::of(b"one"));
        std::fs::write(&path, b"three").unwrap();
        assert_eq!(digests.of(&path).unwrap(), Sha256::of(b"three"));
    }
}
