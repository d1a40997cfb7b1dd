//! The doctor's trials. Each returns what it saw, or why it did not work; each is bounded in time and leaves nothing.
//! What a killed agent's trial leaves is named as its sessions are and lies where theirs do: its next audit finds it.

use std::{
    ffi::{CString, OsString},
    fs::{self, File},
    io::{self, Read as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use drums_common::telemetry::chain;
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use serde_json::json;

use super::{
    command::{Run, enter, pidfd, readable},
    listener::GREETING,
};
use crate::{
    arms::Site,
    measure::surroundings::available_cpus,
    sys::{CgroupLimits, Leaf, LeafOf, cgroup::Layout},
};

const LIMIT: Duration = Duration::from_secs(30);

type Outcome = Result<String, String>;

fn words<E: std::error::Error + 'static>(what: &str) -> impl Fn(E) -> String + '_ {
    move |e| format!("{what}: {}", chain(&e))
}

/// Where trials make what they need, and what its names begin with. Names end in a random number: a pid comes again.
#[derive(Clone, Debug)]
pub struct Ground {
    prefix: String,
    folder: PathBuf,
}

impl Default for Ground {
    /// For a doctor that is no agent.
    fn default() -> Self {
        Self { prefix: "drums-doctor-".to_owned(), folder: std::env::temp_dir() }
    }
}

impl Ground {
    pub fn of_agent(site: &Site) -> Self {
        Self { prefix: format!("drums-{}-doctor-", site.installation), folder: site.scratch.clone() }
    }

    fn folder(&self) -> Result<tempfile::TempDir, String> {
        let made = tempfile::Builder::new().prefix(&self.prefix).tempdir_in(&self.folder);
        made.map_err(words("no temporary folder could be made"))
    }

    fn name(&self) -> String {
        format!("{}{:08x}", self.prefix, rand::random::<u32>())
    }
}

/// A control group with limits; what is in it is killed with it.
struct Group {
    layout: Layout,
    name: String,
}

impl Group {
    const BYTES: u64 = 512 << 20;

    fn make(ground: &Ground) -> Result<Self, String> {
        let layout = Layout::discover().map_err(words("the control groups cannot be found"))?;
        let this = Self { layout, name: ground.name() };
        let limits = CgroupLimits { cpu_milli: 1_000, cpus: available_cpus(), memory_bytes: Self::BYTES, pids: 1_024 };
        this.layout.create(&this.name, &limits).map_err(words("a cgroup cannot be made"))?;
        Ok(this)
    }

    /// Written to by a new process, they put it into the group.
    fn doors(&self) -> Result<Vec<File>, String> {
        let leaf = LeafOf { group: self.name.clone(), leaf: Leaf::Session };
        let open = |path: &PathBuf| File::options().write(true).open(path);
        let doors: io::Result<_> = self.layout.doors(&leaf).iter().map(open).collect();
        doors.map_err(words("a cgroup cannot be entered"))
    }

    fn remove(&self) -> Result<(), String> {
        self.layout.remove(&self.name, 5_000).map_err(words("a cgroup cannot be removed"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(why) = self.remove() {
            tracing::warn!(group = self.name, why, "left by a trial");
        }
    }
}

/// All namespaces of a session, and an overlay with the options that a restore needs.
pub fn overlay(ground: &Ground) -> Outcome {
    const SCRIPT: &str = r#"
        mount -t tmpfs drums-doctor "$1"
        mkdir "$1/lower" "$1/upper" "$1/work" "$1/root"
        echo below > "$1/lower/file"
        mount -t overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work,index=on,nfs_export=on" drums-doctor "$1/root"
        echo above > "$1/root/file"
        test "$(cat "$1/lower/file") $(cat "$1/upper/file")" = "below above"
    "#;
    let folder = ground.folder()?;
    Run::new("unshare", LIMIT)
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--ipc",
            "--uts",
            "--net",
            "--propagation",
            "private",
            "sh",
            "-ec",
            SCRIPT,
            "sh",
        ])
        .args([folder.path()])
        .dies_with_us()
        .ok()
        .map_err(|e| chain(&e))?;
    Ok("mount, pid, ipc, uts and net namespaces; an overlay on tmpfs with index and nfs_export".to_owned())
}

/// A session's group, with limits that read back.
pub fn cgroup(ground: &Ground) -> Outcome {
    let group = Group::make(ground)?;
    let read = group.layout.limits(&group.name).map_err(words("limits cannot be read"))?;
    group.remove()?;
    if read.memory_bytes == Group::BYTES && read.cpu_milli == 1_000 {
        Ok(format!("cgroup v{}, limits read back", group.layout.version()))
    } else {
        Err(format!("limits of {} bytes and one CPU read back as {read:?}", Group::BYTES))
    }
}

/// A tap link through the device node, or through a private one where there is none.
pub fn tap(ground: &Ground) -> Outcome {
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
    let folder = ground.folder()?;
    let public = Path::new("/dev/net/tun");
    let (path, how) = if public.exists() {
        (public.to_owned(), "/dev/net/tun")
    } else {
        (private_tun(folder.path())?, "a private device node")
    };
    let device =
        fs::OpenOptions::new().read(true).write(true).open(&path).map_err(words("the tun device cannot be opened"))?;
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The kernel puts a number in the place of %d.
    for (to, from) in request.ifr_name.iter_mut().zip(b"drumsdoc%d") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: the ioctl reads and writes the structure that is given, alive for the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF, std::ptr::from_mut(&mut request)) } != 0 {
        return Err(format!("no tap link can be made: {}", io::Error::last_os_error()));
    }
    // The link goes with the descriptor.
    Ok(format!("made through {how}"))
}

fn private_tun(folder: &Path) -> Result<PathBuf, String> {
    let path = folder.join("tun");
    let name = CString::new(path.as_os_str().as_bytes()).map_err(words("no name for a device node"))?;
    // SAFETY: the path is a C string, alive for the call.
    if unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(10, 200)) } != 0 {
        return Err(format!(
            "there is no /dev/net/tun and a private node cannot be made: {}",
            io::Error::last_os_error()
        ));
    }
    Ok(path)
}

/// Saves a process with a listening socket, restores it, and asks it for an answer both times.
pub fn criu(criu: &Path, listener: &[OsString], ground: &Ground) -> Outcome {
    let folder = ground.folder()?;
    let cache = KernelDataCache::look();
    let group = Group::make(ground)?;
    let result = criu_trial(criu, listener, folder.path(), &group);
    drop(group);
    drop(cache);
    result
}

fn criu_trial(criu: &Path, listener: &[OsString], folder: &Path, group: &Group) -> Outcome {
    let port_file = folder.join("port");
    let image = folder.join("image");
    fs::create_dir(&image).map_err(words("no folder for the image"))?;
    let mut process = Listener::start(listener, &port_file, group)?;
    let port = process.port(&port_file)?;
    greet(port).map_err(|e| format!("the listener did not answer before it was saved: {e}"))?;
    let pid = process.child.id();

    let common = ["--manage-cgroups=ignore", "--file-locks", "--ghost-limit", "64M"];
    Run::new(criu, LIMIT)
        .args(["dump", "-t", &pid.to_string(), "-D"])
        .args([&image])
        .args(["-o", "dump.log", "--tcp-established", "--network-lock", "skip"])
        .args(common)
        .dies_with_us()
        .ok()
        .map_err(|e| format!("dump failed: {}{}", chain(&e), log_tail(&image.join("dump.log"))))?;
    // It was killed once it was saved; its number must be free again before it comes back under it.
    process.child.wait().map_err(words("the saved process cannot be waited for"))?;

    let restored = Restored(pid);
    let restore = Run::new(criu, LIMIT)
        .args(["restore", "-d", "--restore-sibling", "-D"])
        .args([&image])
        .args(["-o", "restore.log", "--tcp-close"])
        .args(common)
        // What comes back is in its group.
        .entering(group.doors()?)
        .dies_with_us()
        .ok();
    let answer = restore
        .map_err(|e| format!("restore failed: {}{}", chain(&e), log_tail(&image.join("restore.log"))))
        .and_then(|_| greet(port).map_err(|e| format!("the restored listener did not answer: {e}")));
    drop(restored);
    answer?;
    Ok("a process with a TCP listener was saved and restored, and answered".to_owned())
}

/// The last errors of a log: CRIU names the cause first, and then what failed for it.
fn log_tail(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let errors: Vec<_> = text.lines().filter(|l| l.contains("Error")).map(str::trim).collect();
    match &errors[errors.len().saturating_sub(4)..] {
        [] => String::new(),
        last => format!(" ({})", last.join("; ")),
    }
}

/// CRIU leaves a cache of what the kernel can do in /run; one that was not there before is ours to remove.
struct KernelDataCache {
    paths: Vec<&'static Path>,
}

impl KernelDataCache {
    fn look() -> Self {
        let all = ["/run/criu.kdat", "/run/criu/criu.kdat"].map(Path::new);
        Self { paths: all.into_iter().filter(|p| !p.exists()).collect() }
    }
}

impl Drop for KernelDataCache {
    fn drop(&mut self) {
        for path in &self.paths {
            let _ = fs::remove_file(path);
        }
    }
}

struct Listener {
    child: Child,
    end: OwnedFd,
}

impl Listener {
    fn start(argv: &[OsString], port_file: &Path, group: &Group) -> Result<Self, String> {
        let doors = group.doors()?;
        let (program, arguments) = argv.split_first().ok_or("no program to save was named")?;
        let mut command = Command::new(program);
        command.args(arguments).arg(port_file).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: write on descriptors that are open, setsid and prctl with plain numbers are async-signal-safe. CRIU
        // saves whole sessions only.
        unsafe {
            command.pre_exec(move || {
                enter(&doors)?;
                if libc::setsid() < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(words("the process to be saved cannot be started"))?;
        match pidfd(child.id()) {
            Ok(end) => Ok(Self { child, end }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(format!("the process to be saved cannot be followed: {e}"))
            }
        }
    }

    /// The port that it writes down once it listens.
    fn port(&mut self, file: &Path) -> Result<u16, String> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            if let Ok(text) = fs::read_to_string(file) {
                return text.parse().map_err(words("the listener's port is no number"));
            }
            // Its end is the only event to wait for; the file is looked for in between.
            if readable(&self.end, Duration::from_millis(2)) {
                return Err("the process to be saved ended at once".to_owned());
            }
        }
        Err(format!("the process to be saved did not listen within {LIMIT:?}"))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that came back under the old number, as our child; ended when dropped.
struct Restored(u32);

impl Drop for Restored {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.0 as i32);
        let ours = fs::read_to_string(format!("/proc/{pid}/stat"))
            .ok()
            .and_then(|stat| {
                stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1).map(str::to_owned))
            })
            .is_some_and(|parent| parent == std::process::id().to_string());
        if ours && kill(pid, Signal::SIGKILL).is_ok() {
            let _ = waitpid(pid, None);
        }
    }
}

fn greet(port: u16) -> io::Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    if text == GREETING { Ok(()) } else { Err(io::Error::other(format!("it said {text:?}"))) }
}

/// Runs /bin/true of this machine's userland in a container of its own.
pub fn runc(runc: &Path, ground: &Ground) -> Outcome {
    let folder = ground.folder()?;
    let root = folder.path().join("rootfs");
    let state = folder.path().join("state");
    for path in [&root, &state] {
        fs::create_dir(path).map_err(words("no folder for the container"))?;
    }
    let id = ground.name();
    let config = config(&id, &root).map_err(words("the container's root cannot be prepared"))?;
    fs::write(folder.path().join("config.json"), config.to_string()).map_err(words("config.json cannot be written"))?;
    let runc = |limit| Run::new(runc, limit).args(["--root".as_ref(), state.as_os_str()]);
    let ran = runc(LIMIT).args(["run", "--bundle"]).args([folder.path()]).args([&id]).dies_with_us().ok();
    if ran.is_err() {
        // It may have got as far as a group or a process; an unknown container is no error here.
        let _ = runc(LIMIT).args(["delete", "--force", &id]).ok();
    }
    ran.map_err(|e| chain(&e))?;
    Ok("a container ran a program to its end".to_owned())
}

fn config(id: &str, root: &Path) -> io::Result<serde_json::Value> {
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] }),
    ];
    for name in ["bin", "lib", "lib64", "usr"] {
        let source = Path::new("/").join(name);
        let Ok(meta) = fs::symlink_metadata(&source) else { continue };
        if meta.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&source)?, root.join(name))?;
        } else {
            mounts.push(json!({ "destination": source, "type": "bind", "source": source, "options": ["rbind", "ro"] }));
        }
    }
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({ "type": kind }));
    Ok(json!({
        "ociVersion": "1.0.2",
        "process": { "terminal": false, "user": { "uid": 0, "gid": 0 }, "args": ["/bin/true"], "env": ["PATH=/bin"], "cwd": "/" },
        "root": { "path": "rootfs", "readonly": false },
        "mounts": mounts,
        "linux": { "namespaces": namespaces, "cgroupsPath": format!("/{id}") },
    }))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::setup::{install::refuse_unfit_machine, listener, tools};

    /// This test binary, run so that it is the process to be saved.
    pub(in crate::setup) fn own_listener() -> Vec<OsString> {
        const SCRIPT: &str =
            "DRUMS_TEST_LISTENER=\"$2\" exec \"$1\" --exact setup::trials::tests::the_listener_of_the_trial";
        let own = std::env::current_exe().unwrap();
        ["sh".as_ref(), "-c".as_ref(), SCRIPT.as_ref(), "sh".as_ref(), own.as_os_str()].map(ToOwned::to_owned).to_vec()
    }

    /// Runs as the process to be saved when `own_listener` starts this very test binary again; passes at once otherwise.
    #[test]
    fn the_listener_of_the_trial() {
        if let Some(file) = std::env::var_os("DRUMS_TEST_LISTENER") {
            listener::serve(Path::new(&file)).unwrap();
        }
    }

    fn root() -> bool {
        let root = refuse_unfit_machine().is_ok();
        if !root {
            eprintln!("SKIP root: not root on x86_64 Linux");
        }
        root
    }

    #[test]
    fn live_namespaces_overlay_limits_and_links_work_here() {
        if root() {
            let ground = Ground::default();
            overlay(&ground).unwrap();
            cgroup(&ground).unwrap();
            tap(&ground).unwrap();
        }
    }

    #[test]
    fn live_runc_runs_a_container_and_leaves_no_group() {
        let Some(path) = tools::program("runc").filter(|_| root()) else {
            eprintln!("SKIP runc: not installed here; drums-agent setup installs it");
            return;
        };
        // A prefix that no other test has.
        let ground = Ground { prefix: Ground::default().name(), ..Ground::default() };
        runc(&path, &ground).unwrap();
        assert_eq!(Layout::discover().unwrap().named(&ground.prefix).unwrap(), [""; 0]);
    }
}
