//! Debian's package tools: packages for the host, and a private view of another suite that changes nothing on it.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::command::{CommandError, Run};

/// One download or installation on a slow mirror.
const APT_LIMIT: Duration = Duration::from_secs(600);
const QUERY_LIMIT: Duration = Duration::from_secs(60);
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Debug, thiserror::Error)]
pub enum AptError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("cannot {what} {}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error(
        "apt knows no Debian mirror on this machine (release {codename:?}): setup needs the package sources of a Debian \
         system; see /etc/apt/sources.list"
    )]
    NoMirror { codename: String },
    #[error("{KEYRING} is missing, so packages cannot be verified: install debian-archive-keyring")]
    NoKeyring,
}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> AptError + 'a {
    move |source| AptError::Io { what, path: path.to_owned(), source }
}

/// Installs packages on the host, without recommended ones; refreshes the lists first if apt does not know them.
pub fn install(packages: &[&str]) -> Result<(), AptError> {
    let known = packages.iter().all(|p| candidate(p).is_ok_and(|c| c.is_some()));
    if !known {
        update()?;
    }
    apt_get().args(["-y", "-qq", "--no-install-recommends", "install"]).args(packages).ok()?;
    Ok(())
}

pub fn update() -> Result<(), AptError> {
    apt_get().args(["-qq", "update"]).ok()?;
    Ok(())
}

/// The version that apt would install.
pub fn candidate(package: &str) -> Result<Option<String>, AptError> {
    let said = Run::new("apt-cache", QUERY_LIMIT).args(["policy", package]).ok()?;
    let version = said.out.lines().find_map(|l| l.trim().strip_prefix("Candidate: "));
    Ok(version.filter(|v| *v != "(none)").map(str::to_owned))
}

/// The address of the mirror that this machine already uses.
fn mirror() -> Result<String, AptError> {
    let codename = codename();
    let ask = || {
        Run::new("apt-get", QUERY_LIMIT)
            .args(["indextargets", "--format", "$(REPO_URI)", "Origin: Debian", &format!("Codename: {codename}")])
            .ok()
            .map(|said| {
                let mut found: Vec<_> = said.out.lines().map(str::to_owned).filter(|l| !l.is_empty()).collect();
                found.sort();
                found.into_iter().next()
            })
    };
    // The origin is known only once the lists are there.
    if let Some(found) = ask()? {
        return Ok(found);
    }
    update()?;
    ask()?.ok_or(AptError::NoMirror { codename })
}

fn codename() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    text.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).unwrap_or_default().trim_matches('"').to_owned()
}

/// Sources, lists, status and cache of their own: what is in here, apt takes for the whole system.
pub struct PrivateView {
    folder: PathBuf,
}

impl PrivateView {
    /// A view of these suites in `folder`. The last suite is the one that packages are taken from.
    pub fn open(folder: &Path, suites: &[&str]) -> Result<Self, AptError> {
        if !Path::new(KEYRING).is_file() {
            return Err(AptError::NoKeyring);
        }
        let mirror = mirror()?;
        for inside in ["none", "lists/partial", "cache/archives/partial"] {
            let path = folder.join(inside);
            fs::create_dir_all(&path).map_err(io_error("create", &path))?;
        }
        let sources: String =
            suites.iter().map(|suite| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n")).collect();
        for (name, text) in [("sources.list", sources.as_str()), ("status", "")] {
            let path = folder.join(name);
            fs::write(&path, text).map_err(io_error("write", &path))?;
        }
        let view = Self { folder: folder.to_owned() };
        view.apt_get().args(["-qq", "update"]).ok()?;
        Ok(view)
    }

    /// Downloads a package with all that it depends on; the .deb files. An empty status means that libc comes too.
    pub fn download(&self, package: &str, suite: &str) -> Result<Vec<PathBuf>, AptError> {
        self.apt_get().args(["-qq", "-y", "--download-only", "-t", suite, "install", package]).ok()?;
        let archives = self.folder.join("cache/archives");
        let mut debs: Vec<_> = fs::read_dir(&archives)
            .map_err(io_error("list", &archives))?
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "deb"))
            .collect();
        debs.sort();
        Ok(debs)
    }

    fn apt_get(&self) -> Run {
        let path = |inside: &str| self.folder.join(inside).display().to_string();
        let options = [
            format!("Dir::Etc::SourceList={}", path("sources.list")),
            format!("Dir::Etc::SourceParts={}", path("none")),
            format!("Dir::State::Lists={}", path("lists")),
            format!("Dir::State::status={}", path("status")),
            format!("Dir::Cache={}", path("cache")),
            "APT::Install-Recommends=0".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            // The folder is root's own; apt's sandbox user could not write to it.
            "APT::Sandbox::User=root".to_owned(),
        ];
        apt_get().args(options.iter().flat_map(|o| ["-o", o.as_str()]))
    }
}

/// Unpacks a package without installing it.
pub fn extract(deb: &Path, root: &Path) -> Result<(), AptError> {
    Run::new("dpkg-deb", APT_LIMIT).args(["-x".as_ref(), deb.as_os_str(), root.as_os_str()]).ok()?;
    Ok(())
}

fn apt_get() -> Run {
    // Another apt may be running, on a freshly started host in particular: wait for it, within our own limit.
    Run::new("apt-get", APT_LIMIT).env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=300"])
}
