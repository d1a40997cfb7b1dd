//! `drumsctl verify`: a bundle or a bucket, held against itself, offline.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use drums_analysis::{
    bucket,
    bundle::{self, BundleFiles, Verification},
    tables,
};
use drums_common::{bucket::INSTALLATION, digest::Sha256, note, say, verdict::Verdict};

use super::{CtlError, Global, output};

/// How a Zstandard frame begins.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Names cost memory, too.
const MAX_FILES: usize = 100_000;

#[derive(Debug, Args)]
pub struct Verify {
    /// The bundle (a folder, or a .tar.zst file), or the bucket (a folder, or s3://NAME/PREFIX).
    #[arg(value_name = "BUNDLE|BUCKET")]
    pub bundle: PathBuf,
    /// The registration it must be of, as `drumsctl register` printed it; chooses one of a bucket's.
    #[arg(long, value_name = "SHA256")]
    pub registration: Option<Sha256>,
}

pub(super) async fn verify(global: &Global, c: &Verify) -> Result<ExitCode, CtlError> {
    let (found, help) = look(c).await?;
    let shown = c.bundle.display();
    let verdict = found.analysis.as_ref().map(|a| a.summary.verdict);
    if global.json {
        output::json(&serde_json::json!({
            "bundle": shown.to_string(),
            "bundle_sha256": found.bundle_sha256,
            "holds": found.holds(),
            "registration": found.registration.as_ref().map(|r| r.sha256),
            "files": found.files,
            "records": found.records,
            "problems": found.problems,
            "notes": found.notes,
            "verdict": verdict,
            "summary": found.analysis.as_ref().map(|a| &a.summary),
        }))?;
    } else {
        let state = if found.holds() { "holds" } else { "DOES NOT HOLD" };
        say!("{shown} {state}: {} files, {} records recomputed", found.files, found.records)?;
        for n in &found.notes {
            say!("note: {}", say::one_line(n))?;
        }
        // What does not hold has no verdict.
        if let Some(a) = found.analysis.as_ref().filter(|_| found.holds()) {
            for line in tables::verdict_lines(&a.summary) {
                say!("{line}")?;
            }
        }
    }
    for p in &found.problems {
        // On one line: a path from a bundle must not look like another message.
        note!("tampered or damaged: {}", say::one_line(&p.to_string()));
    }
    if !found.holds() {
        note!("help:  {help}");
        return Ok(ExitCode::from(1));
    }
    Ok(ExitCode::from(verdict.map_or(1, Verdict::exit_code)))
}

const BUNDLE_HELP: &str = "get the bundle again from where it was exported, and compare bundle_sha256 in manifest.json";
const BUCKET_HELP: &str = "the hosts that uploaded keep their evidence in the spool of their state folder";

/// What there is, and what to do if it does not hold.
async fn look(c: &Verify) -> Result<(Verification, &'static str), CtlError> {
    let path = &c.bundle;
    if let Some(url) = path.to_str().filter(|u| u.starts_with("s3://")) {
        let objects = objects(url).await?;
        return Ok((bucket::verify(&objects, c.registration), BUCKET_HELP));
    }
    if path.is_dir() {
        let folder = Folder(path.clone());
        let inside = path.join("bundle");
        if !path.join(bundle::MANIFEST).exists() && inside.join(bundle::MANIFEST).exists() {
            let message = format!("{} is no bundle, but there is one in it", path.display());
            return Err(CtlError::bad(message, format!("drumsctl verify {}", inside.display())));
        }
        return Ok(if is_bucket(path) {
            (bucket::verify(&folder, c.registration), BUCKET_HELP)
        } else {
            (bundle::verify(&folder, c.registration), BUNDLE_HELP)
        });
    }
    if path.is_file() {
        return Ok((bundle::verify(&Archive::read(path)?, c.registration), BUNDLE_HELP));
    }
    fs::metadata(path).map_err(CtlError::file("read", path))?;
    Err(CtlError::bad(
        format!("{} is neither a folder nor a file", path.display()),
        "give a folder or a .tar.zst file that drumsctl export made, or a bucket",
    ))
}

/// A bundle has a manifest; a bucket has installations.
fn is_bucket(dir: &Path) -> bool {
    let below = |dir: &Path| dir.join(INSTALLATION).is_file();
    let any = || fs::read_dir(dir).into_iter().flatten().flatten().any(|e| below(&e.path()));
    !dir.join(bundle::MANIFEST).exists() && (below(dir) || any())
}

#[cfg(feature = "s3")]
async fn objects(url: &str) -> Result<BTreeMap<String, Vec<u8>>, CtlError> {
    let help = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT_URL) say who asks and where";
    crate::bucket::s3::read_all(url, MAX_FILES, bundle::MAX_BYTES)
        .await
        .map_err(|e| CtlError::failed("reading the bucket", e, help))
}

#[cfg(not(feature = "s3"))]
async fn objects(_: &str) -> Result<BTreeMap<String, Vec<u8>>, CtlError> {
    Err(CtlError::bad(
        "this build of drumsctl reaches no S3",
        "build it with: cargo build --release -p drums-coordinator --features s3; or copy the bucket into a folder",
    ))
}

struct Folder(PathBuf);

impl BundleFiles for Folder {
    fn paths(&self) -> Result<Vec<String>, String> {
        let mut out = Vec::new();
        let mut open = vec![self.0.clone()];
        while let Some(dir) = open.pop() {
            let entries = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
            for entry in entries {
                let entry = entry.map_err(|e| format!("{}: {e}", dir.display()))?;
                let kind = entry.file_type().map_err(|e| format!("{}: {e}", entry.path().display()))?;
                if kind.is_dir() {
                    open.push(entry.path());
                } else {
                    let path = entry.path();
                    let relative = path.strip_prefix(&self.0).unwrap_or(&path);
                    out.push(relative.to_string_lossy().into_owned());
                }
                if out.len() > MAX_FILES {
                    return Err(format!("more than {MAX_FILES} files"));
                }
            }
        }
        out.sort();
        Ok(out)
    }

    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        let full = self.0.join(path);
        let meta = fs::symlink_metadata(&full).map_err(|e| e.to_string())?;
        if !meta.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        if meta.len() > most {
            return Err(bundle::too_long(meta.len(), most));
        }
        let mut bytes = Vec::new();
        let file = fs::File::open(&full).map_err(|e| e.to_string())?;
        // It may have grown since.
        file.take(most + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }
}

/// An archive's entries by name; `None` is one that is no regular file.
struct Archive(BTreeMap<String, Option<Vec<u8>>>);

impl Archive {
    fn read(path: &Path) -> Result<Self, CtlError> {
        let mut file = fs::File::open(path).map_err(CtlError::file("read", path))?;
        let mut magic = [0; 4];
        let packed = file.read_exact(&mut magic).is_ok() && magic == ZSTD;
        Self::unpack(magic.chain(file)).map_err(|why| {
            if packed {
                let attempt = format!("unpacking {}, which is cut short or damaged", path.display());
                return CtlError::failed(attempt, io::Error::other(why), BUNDLE_HELP);
            }
            CtlError::bad(
                format!("{} is not a bundle: {why}", path.display()),
                "give a folder or a .tar.zst file that drumsctl export made",
            )
        })
    }

    fn unpack(packed: impl Read) -> Result<Self, String> {
        let text = |e: io::Error| e.to_string();
        // Also names may be long: nothing that is read goes beyond files, their headers and padding.
        let most = bundle::MAX_BYTES + 1024 * MAX_FILES as u64;
        let mut archive = tar::Archive::new(zstd::Decoder::new(packed).map_err(text)?.take(most));
        let (mut out, mut left) = (BTreeMap::new(), bundle::MAX_BYTES);
        for entry in archive.entries().map_err(text)? {
            let entry = entry.map_err(text)?;
            let name = entry.path().map_err(text)?.to_string_lossy().into_owned();
            // Asked before anything is unpacked: a small file may unpack to any size.
            left = left
                .checked_sub(entry.size())
                .ok_or_else(|| format!("it unpacks to more than {} bytes", bundle::MAX_BYTES))?;
            let content = if entry.header().entry_type().is_file() {
                let (mut bytes, size) = (Vec::new(), entry.size());
                entry.take(size).read_to_end(&mut bytes).map_err(text)?;
                Some(bytes)
            } else {
                None
            };
            if out.insert(name.clone(), content).is_some() {
                return Err(format!("it has {name} twice"));
            }
            if out.len() > MAX_FILES {
                return Err(format!("it has more than {MAX_FILES} files"));
            }
        }
        Ok(Self(out))
    }
}

impl BundleFiles for Archive {
    fn paths(&self) -> Result<Vec<String>, String> {
        Ok(self.0.keys().cloned().collect())
    }

    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        match self.0.get(path) {
            None => Err("there is no such file".to_owned()),
            Some(None) => Err("it is not a regular file".to_owned()),
            Some(Some(bytes)) if bytes.len() as u64 > most => Err(bundle::too_long(bytes.len() as u64, most)),
            Some(Some(bytes)) => Ok(bytes.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<zstd::Encoder<'static, Vec<u8>>>)) -> Vec<u8> {
        let mut tar = tar::Builder::new(zstd::Encoder::new(Vec::new(), 1).unwrap());
        fill(&mut tar);
        tar.into_inner().unwrap().finish().unwrap()
    }

    fn header(size: u64) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_size(size);
        header
    }

    #[test]
    fn what_is_no_file_in_an_archive_is_named() {
        let packed = archive(|tar| {
            tar.append_data(&mut header(2), "manifest.json", &b"{}"[..]).unwrap();
            let mut link = header(0);
            link.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut link, "samples/x.jsonl", "/etc/passwd").unwrap();
        });
        let found = Archive::unpack(packed.as_slice()).unwrap();
        assert_eq!(found.paths().unwrap(), ["manifest.json", "samples/x.jsonl"]);
        assert_eq!(found.read("manifest.json", 2).unwrap(), b"{}");
        assert!(found.read("samples/x.jsonl", 100).unwrap_err().contains("not a regular file"));
    }

    #[test]
    fn a_bomb_is_refused_before_it_is_unpacked() {
        let size = bundle::MAX_BYTES + 1;
        let packed = archive(|tar| {
            // Its header is enough; what follows breaks off.
            let mut header = header(size);
            header.set_path("samples/x.jsonl").unwrap();
            header.set_cksum();
            std::io::Write::write_all(tar.get_mut(), header.as_bytes()).unwrap();
        });
        let why = Archive::unpack(packed.as_slice()).err().unwrap();
        assert!(why.contains("unpacks to more than"), "{why}");
    }

    #[test]
    fn fuzz_archives() {
        let packed = archive(|tar| {
            tar.append_data(&mut header(2), "manifest.json", &b"{}"[..]).unwrap();
            tar.append_data(&mut header(3), format!("samples/{}.jsonl", "x".repeat(120)), &b"{}\n"[..]).unwrap();
        });
        let plain = zstd::decode_all(packed.as_slice()).unwrap();
        drums_fuzz::decoder!(vec![packed, plain], |bytes: &[u8]| {
            // As the file, and as what the file unpacks to.
            for packed in [bytes.to_vec(), zstd::encode_all(bytes, 1).unwrap()] {
                if let Ok(found) = Archive::unpack(packed.as_slice()) {
                    for path in found.paths().unwrap() {
                        let _ = found.read(&path, 100);
                    }
                }
            }
        });
    }
}
