//! The guest kernel: the uncompressed image out of a bzImage, and the modules that a virtual machine needs, in the order
//! in which they load.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    ImageError, Result,
    debian::{self, Package},
    io_error,
};

/// No kernel comes near this; a payload that claims more is broken.
const MAX_KERNEL: usize = 512 << 20;

const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// Debian's kernel for virtual machines, unpacked.
pub struct Fetched {
    pub package: Package,
    pub release: String,
    pub modules: Modules,
}

pub fn fetch(cache: &Path) -> Result<Fetched> {
    let package = debian::fetch(&debian::dependency(METAPACKAGE, "linux-image-")?, cache)?;
    let release = package.name.trim_start_matches("linux-image-").to_owned();
    // Where the file system is merged the modules are under usr.
    let places = ["lib/modules", "usr/lib/modules"].map(|p| package.root.join(p).join(&release));
    let place = places.iter().find(|p| p.is_dir()).unwrap_or(&places[0]);
    let modules = Modules::scan(place)?;
    Ok(Fetched { package, release, modules })
}

/// The ELF image inside a bzImage, which QEMU can start by PVH without the guest unpacking anything.
pub fn uncompressed(bzimage: &Path) -> Result<Vec<u8>> {
    let image = fs::read(bzimage).map_err(io_error("read", bzimage))?;
    let bad = |why: &str| ImageError::Kernel { path: bzimage.to_owned(), why: why.to_owned() };
    let payload = payload(&image).ok_or_else(|| bad("it has no payload where the boot protocol puts one"))?;
    let vmlinux = match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => lz4_legacy(payload).ok_or_else(|| bad("its lz4 payload is broken"))?,
        // The kernel's build appends the uncompressed size, which a strict decoder would take for another frame.
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let mut out = Vec::new();
            let decoder = zstd::Decoder::new(payload).map_err(|_| bad("its zstd payload is broken"))?;
            decoder
                .single_frame()
                .take(MAX_KERNEL as u64)
                .read_to_end(&mut out)
                .map_err(|_| bad("its zstd payload is broken"))?;
            out
        }
        [0xfd, b'7', b'z', b'X', b'Z', ..] => filtered("xz", payload, bzimage)?,
        [0x1f, 0x8b, ..] => filtered("gzip", payload, bzimage)?,
        _ => return Err(bad("its payload is compressed in an unknown way")),
    };
    if !vmlinux.starts_with(b"\x7fELF") {
        return Err(bad("its payload is not an ELF image"));
    }
    Ok(vmlinux)
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = match *image.get(0x1f1)? {
        0 => 4,
        n => usize::from(n),
    };
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    image.get(start..start.checked_add(word(0x24c)?)?)
}

/// The frame format of the kernel's `lz4 -l`: a magic number, then blocks, each preceded by its compressed length, and
/// at the very end the uncompressed size.
fn lz4_legacy(payload: &[u8]) -> Option<Vec<u8>> {
    const BLOCK: usize = 8 << 20;
    let mut rest = &payload[4..];
    let mut out = Vec::new();
    // What is left after the last block is the size field.
    while rest.len() > 4 {
        let length = u32::from_le_bytes(rest[..4].try_into().ok()?) as usize;
        let block = rest.get(4..4 + length)?;
        let limit = out.len() + BLOCK;
        if limit > MAX_KERNEL {
            return None;
        }
        lz4_block(block, &mut out, limit)?;
        rest = &rest[4 + length..];
    }
    let size = u32::from_le_bytes(rest.try_into().ok()?) as usize;
    (size == out.len()).then_some(out)
}

fn lz4_block(mut block: &[u8], out: &mut Vec<u8>, limit: usize) -> Option<()> {
    let start = out.len();
    loop {
        let token = next(&mut block)?;
        let literals = lz4_length(token >> 4, &mut block)?;
        if out.len() + literals > limit {
            return None;
        }
        out.extend_from_slice(block.get(..literals)?);
        block = &block[literals..];
        // A block ends with literals.
        if block.is_empty() {
            return Some(());
        }
        let offset = usize::from(u16::from_le_bytes([next(&mut block)?, next(&mut block)?]));
        let length = lz4_length(token & 15, &mut block)? + 4;
        let from = out.len().checked_sub(offset).filter(|from| offset > 0 && *from >= start)?;
        if out.len() + length > limit {
            return None;
        }
        // Byte by byte, for a match may overlap what it produces.
        for i in from..from + length {
            out.push(out[i]);
        }
    }
}

fn lz4_length(nibble: u8, block: &mut &[u8]) -> Option<usize> {
    let mut length = usize::from(nibble);
    if nibble == 15 {
        loop {
            let more = next(block)?;
            length += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Some(length)
}

fn next(bytes: &mut &[u8]) -> Option<u8> {
    let (first, rest) = bytes.split_first()?;
    *bytes = rest;
    Some(*first)
}

/// Formats of other kernels: their usual program unpacks them.
fn filtered(program: &str, payload: &[u8], origin: &Path) -> Result<Vec<u8>> {
    let spawn = |source| ImageError::Spawn { program: program.to_owned(), source };
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(spawn)?;
    let mut stdin = child.stdin.take().ok_or_else(|| spawn(std::io::Error::other("no pipe")))?;
    let mut out = Vec::new();
    std::thread::scope(|scope| {
        // The program may stop reading at the trailing size; whether all went well is seen by what came out.
        scope.spawn(move || drop(stdin.write_all(payload)));
        let stdout = child.stdout.take();
        stdout.map_or(Ok(0), |s| s.take(MAX_KERNEL as u64).read_to_end(&mut out))
    })
    .map_err(io_error("unpack the kernel of", origin))?;
    child.wait().map_err(spawn)?;
    Ok(out)
}

/// The modules of a kernel's folder by name.
pub struct Modules {
    paths: BTreeMap<String, PathBuf>,
}

impl Modules {
    pub fn scan(folder: &Path) -> Result<Self> {
        let mut paths = BTreeMap::new();
        let mut todo = vec![folder.to_owned()];
        while let Some(here) = todo.pop() {
            for entry in fs::read_dir(&here).map_err(io_error("list", &here))? {
                let entry = entry.map_err(io_error("list", &here))?;
                let path = entry.path();
                if entry.file_type().map_err(io_error("look at", &path))?.is_dir() {
                    todo.push(path);
                } else if let Some(name) = module_name(&path) {
                    paths.insert(name, path);
                }
            }
        }
        Ok(Self { paths })
    }

    pub fn has(&self, name: &str) -> bool {
        self.paths.contains_key(name)
    }

    /// The wanted modules and all that they depend on, dependencies first: name and content, uncompressed. A wanted
    /// name that is no module is left out: the kernel has it built in, or not at all.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let mut order = Vec::new();
        for name in wanted {
            self.visit(name, &mut order)?;
        }
        Ok(order)
    }

    fn visit(&self, name: &str, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
        let Some(path) = self.paths.get(name).filter(|_| order.iter().all(|(n, _)| n != name)) else { return Ok(()) };
        let content = read_module(path)?;
        for dependency in depends(&content) {
            self.visit(&dependency, order)?;
        }
        order.push((name.to_owned(), content));
        Ok(())
    }
}

/// `virtio-rng.ko.xz` is the module `virtio_rng`.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = file.strip_suffix(".ko").or_else(|| file.rsplit_once('.').and_then(|(s, _)| s.strip_suffix(".ko")))?;
    Some(stem.replace('-', "_"))
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path).map_err(io_error("read", path))?;
    match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => filtered("xz", &bytes, path),
        Some("gz") => filtered("gzip", &bytes, path),
        Some("zst") => zstd::decode_all(bytes.as_slice()).map_err(io_error("unpack", path)),
        _ => Ok(bytes),
    }
}

/// The module's own `depends=` note. Packages come without modules.dep, which depmod writes on installation.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|w| w == KEY) else { return Vec::new() };
    let rest = &module[at + KEY.len()..];
    let text = &rest[..rest.iter().position(|b| *b == 0).unwrap_or(0)];
    String::from_utf8_lossy(text).split(',').filter(|d| !d.is_empty()).map(|d| d.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lz4_block_with_an_overlapping_match_unpacks() {
        // "ab", then 10 bytes from 2 back, then the literal "!".
        let block = [0x26, b'a', b'b', 2, 0, 0x10, b'!'];
        let mut payload = vec![0x02, 0x21, 0x4c, 0x18];
        payload.extend((block.len() as u32).to_le_bytes());
        payload.extend(block);
        payload.extend(13u32.to_le_bytes());
        assert_eq!(lz4_legacy(&payload).unwrap(), b"abababababab!");
    }

    #[test]
    fn broken_lz4_is_refused() {
        let frame = |block: &[u8], size: u32| {
            let mut p = vec![0x02, 0x21, 0x4c, 0x18];
            p.extend((block.len() as u32).to_le_bytes());
            p.extend(block);
            p.extend(size.to_le_bytes());
            p
        };
        for payload in [
            frame(&[0x26, b'a', b'b', 3, 0, 0x10, b'!'], 13),
            frame(&[0x26, b'a', b'b', 0, 0, 0x10, b'!'], 13),
            frame(&[0x26, b'a', b'b', 2, 0, 0x10, b'!'], 12),
            frame(&[0xf0, 255], 0),
            frame(&[0x26, b'a'], 1),
            vec![0x02, 0x21, 0x4c, 0x18, 9, 0, 0, 0, 1],
        ] {
            assert_eq!(lz4_legacy(&payload), None);
        }
    }

    #[test]
    fn modules_load_after_what_they_depend_on() {
        let t = tempfile::tempdir().unwrap();
        let put = |name: &str, depends: &str| {
            fs::write(t.path().join(name), format!("\x7fELF\0license=GPL\0depends={depends}\0retpoline=Y\0")).unwrap();
        };
        fs::create_dir(t.path().join("sub")).unwrap();
        put("sub/net.ko", "ring,fail-over");
        put("ring.ko", "");
        put("fail-over.ko", "ring");
        put("other.ko", "");
        let modules = Modules::scan(t.path()).unwrap();
        let names: Vec<_> =
            modules.load_order(&["net", "absent", "ring"]).unwrap().into_iter().map(|(n, _)| n).collect();
        assert_eq!(names, ["ring", "fail_over", "net"]);
    }

    #[test]
    fn something_else_than_a_kernel_is_refused() {
        let t = tempfile::tempdir().unwrap();
        for bytes in [&b""[..], &[0; 4096]] {
            let path = t.path().join("k");
            fs::write(&path, bytes).unwrap();
            assert!(uncompressed(&path).unwrap_err().to_string().contains("not a kernel"));
        }
    }
}
