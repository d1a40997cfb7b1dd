//! Which tools this host has, where, and in which version. Looks only.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::{digest::Sha256, machine::Tool};
use sha2::Digest as _;

use super::{ToolsDir, command::Run};
use crate::arms::ToolPaths;

/// Looked through in this order; the environment's PATH may lack the administrator's folders.
const FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
const VERSION_LIMIT: Duration = Duration::from_secs(20);

/// A program of the host by name.
pub fn program(name: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|f| Path::new(f).join(name)).find(|p| p.is_file())
}

/// The tools of this host. The accelerator comes from the preflight, so it stays open.
pub fn find(dir: &ToolsDir) -> ToolPaths {
    ToolPaths {
        criu: Some(dir.criu().join("bin/criu")).filter(|p| p.is_file()),
        runc: program("runc"),
        qemu: program("qemu-system-x86_64"),
        qemu_img: program("qemu-img"),
        ..ToolPaths::default()
    }
}

/// Path, version and digest of each tool that there is, by the names that `HostFacts` uses. A tool that does not say its
/// version is listed with what went wrong in its place.
pub fn describe(dir: &ToolsDir, paths: &ToolPaths) -> BTreeMap<String, Tool> {
    let criu_itself = dir.criu().join("root/usr/sbin/criu");
    let mut tools = BTreeMap::new();
    for (name, path, binary) in [
        // The program started is a two-line script; what runs is the binary in the prefix.
        ("criu", &paths.criu, Some(criu_itself).filter(|p| p.is_file())),
        ("runc", &paths.runc, None),
        ("qemu", &paths.qemu, None),
    ] {
        let Some(path) = path else { continue };
        let Ok(sha256) = sha256_of(binary.as_ref().unwrap_or(path)) else { continue };
        let version = version(path).unwrap_or_else(|why| why);
        tools.insert(name.to_owned(), Tool { path: path.display().to_string(), version, sha256 });
    }
    tools
}

/// The first version number that a tool prints of itself.
pub fn version(path: &Path) -> Result<String, String> {
    let said = Run::new(path, VERSION_LIMIT)
        .args(["--version"])
        .dies_with_us()
        .ok()
        .map_err(|e| drums_common::telemetry::chain(&e))?;
    version_in(&said.out).ok_or_else(|| format!("{} --version named no version", path.display()))
}

fn version_in(text: &str) -> Option<String> {
    text.split(|c: char| c.is_ascii_whitespace() || c == '(')
        .find(|w| w.starts_with(|c: char| c.is_ascii_digit()) && w.contains('.'))
        .map(|w| w.trim_end_matches([',', ')']).to_owned())
}

/// Major and minor number.
pub fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next().and_then(|m| m.parse().ok()).unwrap_or(0)))
}

pub fn sha256_of(path: &Path) -> io::Result<Sha256> {
    let mut hasher = sha2::Sha256::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(Sha256(hasher.finalize().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_tools_print() {
        for (text, version) in [
            ("Version: 4.2.1\n", "4.2.1"),
            ("runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1+deb12u1\nspec: 1.0.2-dev\n", "1.1.5+ds1"),
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022\n", "7.2.22"),
        ] {
            assert_eq!(version_in(text).as_deref(), Some(version));
        }
        assert_eq!(version_in("no number"), None);
        assert_eq!(numbers("4.2.1"), Some((4, 2)));
        assert_eq!(numbers("4"), Some((4, 0)));
        assert_eq!(numbers("x"), None);
    }

    #[test]
    fn nothing_is_found_where_nothing_is() {
        let t = tempfile::tempdir().unwrap();
        let dir = ToolsDir::new(t.path());
        assert_eq!(find(&dir).criu, None);
        assert!(describe(&dir, &ToolPaths::default()).is_empty());
    }
}
