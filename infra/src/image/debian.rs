//! Files out of Debian packages, without installing them: apt checks the signatures and downloads, dpkg unpacks.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{ImageError, Result, io_error, run};

/// A package as unpacked.
#[derive(Clone, Debug)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub root: PathBuf,
}

impl Package {
    /// A file in the package; symlinks inside it are not followed out of it because none is followed at all.
    pub fn file(&self, path: &str) -> Result<PathBuf> {
        let found = self.root.join(path);
        match found.symlink_metadata() {
            Ok(meta) if meta.is_file() => Ok(found),
            _ => Err(ImageError::NotInPackage { package: self.name.clone(), path: path.to_owned() }),
        }
    }

    /// The first of several places: where the file system is merged, a file is under usr.
    pub fn any_file(&self, paths: &[&str]) -> Result<PathBuf> {
        let missing = || ImageError::NotInPackage { package: self.name.clone(), path: paths.join(" or ") };
        paths.iter().find_map(|p| self.file(p).ok()).ok_or_else(missing)
    }
}

/// Fetches the candidate version of a package into `cache` and unpacks it there; does nothing if it is there already.
pub fn fetch(name: &str, cache: &Path) -> Result<Package> {
    let version = candidate(name)?;
    let folder = cache.join(format!("{name}_{}", version.replace([':', '/'], "_")));
    let root = folder.join("root");
    let done = Package { name: name.to_owned(), version: version.clone(), root: root.clone() };
    if root.is_dir() {
        return Ok(done);
    }
    fs::create_dir_all(cache).map_err(io_error("create", cache))?;
    // Built aside and renamed, so that an interrupted download is never taken for a package.
    let staging =
        tempfile::Builder::new().prefix(".fetch-").tempdir_in(cache).map_err(io_error("create a folder in", cache))?;
    let aside = staging.path();
    // Root's own folder: without this apt would warn that its sandbox user cannot write there.
    run(apt("apt-get")
        .args(["-o", "APT::Sandbox::User=root", "download"])
        .arg(format!("{name}={version}"))
        .current_dir(aside))?;
    let deb = fs::read_dir(aside)
        .map_err(io_error("list", aside))?
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| ImageError::NoPackage { package: name.to_owned() })?;
    let unpacked = aside.join("root");
    run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&unpacked))?;
    fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
    fs::rename(&unpacked, &root).map_err(io_error("move the unpacked package to", &root))?;
    Ok(done)
}

/// The first package of the dependencies of `name` that begins with `prefix`: how a metapackage names its content.
pub fn dependency(name: &str, prefix: &str) -> Result<String> {
    candidate(name)?;
    let output = run(apt("apt-cache").args(["depends", "--important", name]))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .filter_map(|l| l.trim().strip_prefix("Depends: "))
        .find(|d| d.starts_with(prefix))
        .map(str::to_owned)
        .ok_or_else(|| ImageError::NoPackage { package: format!("{prefix}* (a dependency of {name})") })
}

/// Where this machine gets the packages of its own Debian from, security and updates included: lines of apt's sources.
#[derive(Clone, Debug)]
pub struct Source {
    pub uri: String,
    pub suite: String,
}

impl Source {
    pub fn line(&self) -> String {
        format!("deb {} {} main", self.uri, self.suite)
    }
}

/// The release itself first: the other suites are named after it.
pub fn sources() -> Result<Vec<Source>> {
    let format = ["--format", "$(REPO_URI) $(RELEASE)", "Origin: Debian", "Created-By: Packages", "Component: main"];
    let list = || -> Result<String> {
        let output = run(apt("apt-get").arg("indextargets").args(format))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let mut text = list()?;
    if text.trim().is_empty() {
        // apt tells the origin of what it has a list of.
        run(apt("apt-get").args(["-qq", "update"]))?;
        text = list()?;
    }
    let pairs = text.lines().filter_map(|l| l.split_once(' '));
    let mut found: Vec<_> = pairs.map(|(uri, suite)| Source { uri: uri.to_owned(), suite: suite.to_owned() }).collect();
    found.sort_by_key(|s| (s.suite.len(), s.suite.clone()));
    found.dedup_by_key(|s| s.suite.clone());
    if found.is_empty() { Err(ImageError::NoPackage { package: "of Debian's main".to_owned() }) } else { Ok(found) }
}

/// The version that apt would take of each.
pub fn candidates(names: &[&str]) -> Result<Vec<(String, String)>> {
    names.iter().map(|name| Ok(((*name).to_owned(), candidate(name)?))).collect()
}

/// What is installed in a root: name and version, sorted by name.
pub fn installed(root: &Path) -> Result<Vec<(String, String)>> {
    let output = run(apt("dpkg-query").arg(format!("--admindir={}", root.join("var/lib/dpkg").display())).args([
        "--show",
        "--showformat",
        "${Package} ${Version}\\n",
    ]))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|l| l.split_once(' ')).map(|(n, v)| (n.to_owned(), v.to_owned())).collect())
}

/// The version that apt would take; refreshes the lists once if it knows none.
fn candidate(name: &str) -> Result<String> {
    if let Some(version) = known_candidate(name)? {
        return Ok(version);
    }
    run(apt("apt-get").args(["-qq", "update"]))?;
    known_candidate(name)?.ok_or_else(|| ImageError::NoPackage { package: name.to_owned() })
}

fn known_candidate(name: &str) -> Result<Option<String>> {
    let output = run(apt("apt-cache").args(["policy", name]))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|l| l.trim().strip_prefix("Candidate: "));
    Ok(version.filter(|v| *v != "(none)").map(str::to_owned))
}

/// Messages are parsed, so they must not be translated.
fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
    command
}
