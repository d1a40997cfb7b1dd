//! CRIU in a prefix of its own.
//!
//! Stable Debian's CRIU is too old for current kernels, and a newer one wants a newer libc. So it is taken from a later
//! suite together with all its libraries, unpacked beside the system, and started through the prefix's own dynamic
//! loader: nothing of the host's changes. Suites move, so what was found is written down, and a version that nobody has
//! tried is refused.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    ToolsDir,
    apt::{AptError, PrivateView, extract},
    tools,
};

/// Tried in this order: each row is the suites of the view, the last of which gives the package.
const SUITES: [&[&str]; 2] = [&["sid"], &["sid", "experimental"]];
const NOTE: &str = "installed.json";

#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    #[error("cannot get CRIU from Debian's {suite}")]
    Apt { suite: String, source: AptError },
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the packages from {suite} hold no {what}")]
    Incomplete { suite: String, what: &'static str },
    #[error("the CRIU from {suite} does not start: {why}")]
    DoesNotStart { suite: String, why: String },
    #[error(
        "Debian's {suite} has CRIU {version}, which this build does not know: 4.2 and later of major version 4 are known to \
         work; update drums-agent, or put a known CRIU at {}", .wrapper.display()
    )]
    Unknown { suite: String, version: String, wrapper: PathBuf },
}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> CriuError + 'a {
    move |source| CriuError::Io { what, path: path.to_owned(), source }
}

/// What is in the prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CriuNote {
    pub version: String,
    pub suite: String,
    /// File names of the packages, which carry their versions.
    pub packages: Vec<String>,
}

/// 3.17 dies of the vDSO, 4.1 of any inet socket; what a later major changes, nobody has seen.
pub fn known(version: &str) -> bool {
    tools::numbers(version).is_some_and(|(major, minor)| major == 4 && minor >= 2)
}

/// The CRIU that is installed and starts, if there is one and it is known.
pub fn installed(dir: &ToolsDir) -> Option<CriuNote> {
    let prefix = dir.criu();
    let note: CriuNote = serde_json::from_slice(&fs::read(prefix.join(NOTE)).ok()?).ok()?;
    let version = tools::version(&prefix.join("bin/criu")).ok()?;
    (version == note.version && known(&version)).then_some(note)
}

/// Installs a known CRIU into the prefix, replacing what is there.
pub fn install(dir: &ToolsDir, progress: &mut dyn FnMut(&str)) -> Result<CriuNote, CriuError> {
    let mut refused = None;
    for suites in SUITES {
        match install_from(dir, suites, progress) {
            Ok(note) => return Ok(note),
            Err(e) => {
                let first = refused.get_or_insert(e);
                progress(&format!("{}; trying the next suite", drums_common::telemetry::chain(first)));
            }
        }
    }
    // There is at least one suite, so the loop returned or left a refusal.
    Err(refused.unwrap_or(CriuError::Incomplete { suite: "no suite".to_owned(), what: "criu" }))
}

fn install_from(dir: &ToolsDir, suites: &[&str], progress: &mut dyn FnMut(&str)) -> Result<CriuNote, CriuError> {
    let suite = suites.last().copied().unwrap_or_default().to_owned();
    let apt = |source| CriuError::Apt { suite: suite.clone(), source };
    let staging = tempfile::Builder::new()
        .prefix(".criu-")
        .tempdir_in(dir.path())
        .map_err(io_error("create a folder in", dir.path()))?;
    progress(&format!("fetching the package lists of Debian's {suite} into a private folder"));
    let view = PrivateView::open(&staging.path().join("apt"), suites).map_err(apt)?;
    progress("downloading CRIU and its libraries");
    let debs = view.download("criu", &suite).map_err(apt)?;
    let fresh = staging.path().join("prefix");
    let root = fresh.join("root");
    for path in [&root, &fresh.join("bin")] {
        fs::create_dir_all(path).map_err(io_error("create", path))?;
    }
    for deb in &debs {
        extract(deb, &root).map_err(apt)?;
    }
    // Where it will run from; a script names its files absolutely, so it is written once it is in place.
    let prefix = dir.criu();
    let loader = [
        "usr/lib64/ld-linux-x86-64.so.2",
        "lib64/ld-linux-x86-64.so.2",
        "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    ]
    .into_iter()
    .find(|p| root.join(p).is_file())
    .ok_or(CriuError::Incomplete { suite: suite.clone(), what: "dynamic loader" })?;
    if !root.join("usr/sbin/criu").is_file() {
        return Err(CriuError::Incomplete { suite, what: "usr/sbin/criu" });
    }
    // Tried where it is, before it takes the place of one that works.
    wrapper(&fresh, &fresh, loader)?;
    let version =
        tools::version(&fresh.join("bin/criu")).map_err(|why| CriuError::DoesNotStart { suite: suite.clone(), why })?;
    if !known(&version) {
        return Err(CriuError::Unknown { suite, version, wrapper: prefix.join("bin/criu") });
    }
    wrapper(&fresh, &prefix, loader)?;
    let packages = debs.iter().filter_map(|d| Some(d.file_name()?.to_string_lossy().into_owned())).collect();
    let note = CriuNote { version, suite, packages };
    let path = fresh.join(NOTE);
    let text = serde_json::to_vec_pretty(&note).map_err(|e| io_error("write", &path)(e.into()))?;
    fs::write(&path, text).map_err(io_error("write", &path))?;
    if prefix.exists() {
        fs::rename(&prefix, staging.path().join("old")).map_err(io_error("move away", &prefix))?;
    }
    fs::rename(&fresh, &prefix).map_err(io_error("move CRIU to", &prefix))?;
    Ok(note)
}

/// Writes `into/bin/criu`, which starts the CRIU under `prefix` with its own loader and libraries.
fn wrapper(into: &Path, prefix: &Path, loader: &str) -> Result<(), CriuError> {
    let path = into.join("bin/criu");
    let text = format!(
        "#!/bin/sh\nR='{}/root'\nexec \"$R/{loader}\" --library-path \"$R/usr/lib/x86_64-linux-gnu:$R/lib/x86_64-linux-gnu\" \
         \"$R/usr/sbin/criu\" \"$@\"\n",
        prefix.display().to_string().replace('\'', "'\\''")
    );
    fs::write(&path, text).map_err(io_error("write", &path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(io_error("set the mode of", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_that_were_tried_are_known() {
        for (version, fine) in [
            ("4.2.1", true),
            ("4.3", true),
            ("4.2", true),
            ("4.1.1", false),
            ("3.17.1", false),
            ("5.0", false),
            ("", false),
        ] {
            assert_eq!(known(version), fine, "{version}");
        }
    }

    #[test]
    fn a_prefix_counts_as_installed_only_if_it_starts_as_noted() {
        let t = tempfile::tempdir().unwrap();
        let dir = ToolsDir::new(t.path());
        assert_eq!(installed(&dir), None);
        let prefix = dir.criu();
        fs::create_dir_all(prefix.join("bin")).unwrap();
        let script = |version: &str| {
            fs::write(prefix.join("bin/criu"), format!("#!/bin/sh\necho Version: {version}\n")).unwrap();
            fs::set_permissions(prefix.join("bin/criu"), fs::Permissions::from_mode(0o755)).unwrap();
        };
        let note = CriuNote { version: "4.2.1".to_owned(), suite: "sid".to_owned(), packages: vec![] };
        fs::write(prefix.join(NOTE), serde_json::to_vec(&note).unwrap()).unwrap();
        script("4.2.1");
        assert_eq!(installed(&dir), Some(note));
        script("4.3");
        assert_eq!(installed(&dir), None);
    }

    #[test]
    fn the_wrapper_survives_a_quote_in_its_path() {
        let t = tempfile::tempdir().unwrap();
        let prefix = t.path().join("it's");
        fs::create_dir_all(prefix.join("bin")).unwrap();
        fs::create_dir_all(prefix.join("root")).unwrap();
        fs::write(prefix.join("root/ld"), "#!/bin/sh\necho \"Version: 4.2 $3 $4\"\n").unwrap();
        fs::set_permissions(prefix.join("root/ld"), fs::Permissions::from_mode(0o755)).unwrap();
        wrapper(&prefix, &prefix, "ld").unwrap();
        assert_eq!(tools::version(&prefix.join("bin/criu")).unwrap(), "4.2");
    }
}
